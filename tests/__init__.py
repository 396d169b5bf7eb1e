"""The tests. Processes that they start share the package's bytecode."""

import os
import sys

# Engines and replicas are fresh processes: each would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
