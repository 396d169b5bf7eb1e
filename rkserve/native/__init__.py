"""The room of the vendor's C library: the only one that knows pointers, and none that knows Ray."""
