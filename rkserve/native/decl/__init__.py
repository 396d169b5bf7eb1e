"""The vendor's declarations, one file per binary interface: input to cffi and to the simulator."""
