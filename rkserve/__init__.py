"""rkserve serves language models on a cluster of Rockchip boards as one OpenAI endpoint."""

__version__ = "0.1.0"
