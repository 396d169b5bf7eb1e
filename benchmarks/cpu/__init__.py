"""The CPU benchmark: a board beside the bare library, alone and with several answers at once."""
