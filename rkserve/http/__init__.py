"""The FastAPI app: one file of routes per API."""
