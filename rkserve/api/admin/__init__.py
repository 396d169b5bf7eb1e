"""The control API: pauses, adapters, weights, caches, sleep and status."""
