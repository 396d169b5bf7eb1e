"""What a Router says to the process that tries grammars, and its limits. It loads no compiler."""

from __future__ import annotations

import json
from typing import NoReturn

from rkserve.core.errors import RequestError
from rkserve.core.run_params import Guide

PROGRAM = "rkserve.sampling.trial"
READY = "ready"
# Longer ones are no schemas that somebody wrote.
MAX_CHARS = 64 * 1024
# Of processor time, so that a busy machine refuses what an idle one does.
LIMIT_S = 2.0
MEMORY_BYTES = 2 << 30
_MAX_REASON_CHARS = 500


def ask(guide: Guide) -> str:
    """Return the line that asks."""
    return json.dumps([guide.kind.value, guide.text]) + "\n"


def too_long(guide: Guide) -> str | None:
    """Say that a grammar is, if it is."""
    size = len(guide.text)
    return f"it has {size} characters, and may have {MAX_CHARS}." if size > MAX_CHARS else None


def refuse(reason: str, param: str) -> NoReturn:
    """Raise ``RequestError`` for a grammar that cannot be followed."""
    raise RequestError(f"Invalid '{param}': {reason[:_MAX_REASON_CHARS]}", param)
