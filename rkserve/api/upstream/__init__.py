"""Calls as requests to servers with OpenAI's API, and their answers."""
