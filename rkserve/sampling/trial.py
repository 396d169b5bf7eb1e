"""A process that test-compiles grammars, so that a hostile one cannot block the Router.

It reads one grammar per line, as JSON, and answers each with its error or null. The compiler has no
time limit of its own: a timer signal ends the process after ``LIMIT_S`` of processor time, and too
much memory ends it as well. A Router starts it as ``python -m rkserve.sampling.trial``.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from typing import TextIO

from rkserve.core.run_params import Guide, GuideKind
from rkserve.sampling.grammar import refusal
from rkserve.sampling.trial_limits import LIMIT_S, MEMORY_BYTES, READY

_NICE = 10  # the Router and the boards' engines go first


def answer(line: str) -> str:
    """Return the answer line to a grammar line."""
    kind, text = json.loads(line)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        return json.dumps(refusal(Guide(GuideKind(kind), text))) + "\n"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def serve(given: TextIO, out: TextIO) -> None:
    """Answer all lines until the input ends."""
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
