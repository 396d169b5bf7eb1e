"""Choosing tokens on our side: drawing from logits, and grammars. It knows no runtime."""
