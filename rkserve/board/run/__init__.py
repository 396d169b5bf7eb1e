"""Runs on a board, from start to finish, with pauses and adapter loads in between."""
