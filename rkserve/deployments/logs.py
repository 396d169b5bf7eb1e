"""Where rkserve's log goes in a replica: into the file and format of Serve's own log."""

from __future__ import annotations

import logging


def log_with_serve() -> None:
    """Send the log of ``rkserve`` the way of Serve's, which configures no logger but its own."""
    serve, ours = logging.getLogger("ray.serve"), logging.getLogger("rkserve")
    ours.handlers = list(serve.handlers)
    ours.setLevel(serve.level)
    ours.propagate = False
