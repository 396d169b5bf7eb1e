"""A Router's view of the boards: load, speeds, prefix index, hash ring."""
