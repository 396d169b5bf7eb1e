"""The protocol and limits of the process that test-compiles grammars, without its compiler."""

from __future__ import annotations

import json
from typing import NoReturn

from rkserve.core.errors import RequestError
from rkserve.core.run_params import Guide

PROGRAM = "rkserve.sampling.trial"
READY = "ready"
# Far above any hand-written schema.
MAX_CHARS = 64 * 1024
# Of processor time, so that the result does not depend on the machine's load.
LIMIT_S = 2.0
MEMORY_BYTES = 2 << 30
_MAX_REASON_CHARS = 500


def ask(guide: Guide) -> str:
    """Return the request line of a grammar."""
    return json.dumps([guide.kind.value, guide.text]) + "\n"


def too_long(guide: Guide) -> str | None:
    """Return the error of a grammar above the size limit, or None."""
    size = len(guide.text)
    return f"it has {size} characters; the limit is {MAX_CHARS}." if size > MAX_CHARS else None


def refuse(reason: str, param: str) -> NoReturn:
    """Raise ``RequestError`` for a grammar that cannot be compiled."""
    raise RequestError(f"Invalid '{param}': {reason[:_MAX_REASON_CHARS]}", param)
