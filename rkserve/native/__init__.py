"""The vendor's C library behind one Protocol, ``native/runtime.py``. Imports no Ray."""
