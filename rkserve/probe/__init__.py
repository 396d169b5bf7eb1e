"""Experiments that settle the quirks of a board's runtime, and their report."""
