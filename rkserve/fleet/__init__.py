"""A Router's view of the boards: load, speeds, failures, cached prefixes, hash ring."""
