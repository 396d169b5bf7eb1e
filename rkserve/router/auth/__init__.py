"""API keys, callers and their limits."""
