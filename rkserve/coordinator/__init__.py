"""The Coordinator without Ray. Start with ``coordinator/coordinator.py``."""
