"""The binding to ``librkllmrt.so`` through cffi."""
