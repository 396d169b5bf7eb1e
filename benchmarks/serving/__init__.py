"""``make bench``: the cost of rkserve beside the bare runtime, measured in one run."""
