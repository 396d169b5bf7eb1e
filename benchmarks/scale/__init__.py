"""``make bench-scale``: clusters of up to 1,000 simulated boards in virtual time."""
