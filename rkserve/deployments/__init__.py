"""Ray Serve: builds the application and wraps Router, board and Coordinator."""

import gc

# Nearly all objects of an import stay: looking for garbage among them is a seventh of the time that
# a Router needs for its modules. A replica that has started collects as ever (``replica.settle``).
gc.set_threshold(50_000, 20, 100)
