"""Tests of the room of verdicts."""
