"""Readers and models of JSON bodies, their limits, and errors with the parameter's path."""
