"""A board's engine as seen from the replica: protocol, process, lifecycle, watchdog."""
