"""Checks of a board before it serves: facts, the rules over them, and a measurement."""
