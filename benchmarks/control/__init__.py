"""``make bench-control``: pauses, adapter switches and faults under load."""
