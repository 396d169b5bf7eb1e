"""Formats of tool calls: their parsers by name, and the JSON of calls."""
