"""A request's way to a board, and its failover to another."""
