"""Servers with OpenAI's API that serve beside the boards, as one Router reaches them."""
