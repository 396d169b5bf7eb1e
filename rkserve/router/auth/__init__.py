"""Access control of a Router: its keys, their owners, and the limits of each."""
