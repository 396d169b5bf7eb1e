"""Schemas of the HTTP APIs, and pure translations between them and runs."""
