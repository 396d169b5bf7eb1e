"""Compatibility tests: programs that others wrote, with an rkserve of simulated boards."""
