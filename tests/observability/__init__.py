"""Tests of the dashboards and alert rules."""
