"""Readers of JSON bodies: fields, limits, errors with the parameter's path."""
