"""Adapter and weight files that the Coordinator keeps."""
