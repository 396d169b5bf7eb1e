"""Sampling outside the runtime: draws from logits, and grammars."""
