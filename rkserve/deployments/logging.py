"""Where rkserve's log goes in a replica: into the file and format of Serve's own log."""

from __future__ import annotations

import logging

from rkserve.core.errors import RkserveError


class RefusalsInOneLine(logging.Filter):
    """Turns Serve's traceback of a call that rkserve refused into a line of information.

    Serve logs whatever a replica's method raises as an error with its traceback. Ours are answers:
    a client that asks for what cannot be would fill the log and bury the faults in it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record, some of them shorter."""
        exc = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(exc, RkserveError):
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
            record.msg, record.args = "refused: %s: %s", (type(exc).__name__, exc)
            record.exc_info = record.exc_text = None
        return True


def log_with_serve() -> None:
    """Send the log of ``rkserve`` the way of Serve's, which configures no logger but its own."""
    serve, ours = logging.getLogger("ray.serve"), logging.getLogger("rkserve")
    ours.handlers = list(serve.handlers)
    ours.setLevel(serve.level)
    ours.propagate = False
    serve.addFilter(RefusalsInOneLine())
