"""A board's files: adapters, base weights and prompt caches on its disk."""
