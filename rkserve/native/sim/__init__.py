"""The simulated runtime: an ABI-compatible librkllmrt.so in C, and its build.

Nothing here imports the binding or cffi.
"""
