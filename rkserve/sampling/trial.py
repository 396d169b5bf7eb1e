"""A process that test-compiles grammars, so that a hostile one cannot block the Router.

It reads one grammar per line, as JSON, and answers each with its error or null. The compiler has no
time limit of its own: a timer signal ends the process after ``LIMIT_S`` of processor time, and too
much memory ends it as well. A Router starts it as ``python -m rkserve.sampling.trial``. It also
imports this module for the limits and ``ask``: the compiler is loaded only to compile.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from importlib import import_module
from typing import NoReturn, TextIO

from rkserve.core.errors import RequestError
from rkserve.core.run_params import Guide, GuideKind

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


_NICE = 10  # the Router and the boards' engines go first


def answer(line: str) -> str:
    """Return the answer line to a grammar line."""
    from rkserve.sampling.grammar import refusal  # not for the Router, which compiles nothing

    kind, text = json.loads(line)
    guide = Guide(GuideKind(kind), text)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        return json.dumps(too_long(guide) or refusal(guide)) + "\n"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def serve(given: TextIO, out: TextIO) -> None:
    """Answer all lines until the input ends."""
    import_module("rkserve.sampling.grammar")  # takes a while; not within a grammar's time
    out.write(json.dumps(READY) + "\n")
    out.flush()
    for line in given:
        out.write(answer(line))
        out.flush()


def main() -> None:
    """Serve the Router at the other end of stdin and stdout."""
    os.nice(_NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # the existing limit is lower
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
    serve(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
