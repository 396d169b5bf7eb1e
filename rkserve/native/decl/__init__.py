"""The vendor's declarations, one header per binary interface, and what cffi makes of them.

The simulator includes the headers; scripts/make_declarations.py writes the modules.
"""
