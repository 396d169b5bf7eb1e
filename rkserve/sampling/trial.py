"""A process that tries grammars, so that one which takes too long takes nothing else with it.

It reads a grammar per line, as JSON, and answers each with what is wrong with it. No limit of the
compiler's bounds its time: what needs more than so much of a processor ends the process, by the
signal of its timer, and so does what needs too much memory. ``python -m rkserve.sampling.trial``
is started by a Router, never by hand.
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
    """Return the line that answers."""
    kind, text = json.loads(line)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        return json.dumps(refusal(Guide(GuideKind(kind), text))) + "\n"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def serve(given: TextIO, out: TextIO) -> None:
    """Answer until nobody asks any more."""
    out.write(json.dumps(READY) + "\n")
    out.flush()
    for line in given:
        out.write(answer(line))
        out.flush()


def main() -> None:
    """Serve the Router at the other end of stdin and stdout."""
    os.nice(_NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # less than that was granted already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
    serve(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
