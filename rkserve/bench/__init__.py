"""``python -m rkserve.bench``: what rkserve costs beside the bare runtime, measured in one run."""
