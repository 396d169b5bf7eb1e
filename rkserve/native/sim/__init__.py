"""The simulated runtime: an ABI-compatible librkllmrt.so in C, and what builds it.

It knows how to compile itself. It refuses to know the binding: nothing here imports cffi.
"""
