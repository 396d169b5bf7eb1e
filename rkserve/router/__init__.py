"""The Router without HTTP or Ray. Start with ``router/service.py``."""
