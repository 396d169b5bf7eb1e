"""The channel between Router and board."""
