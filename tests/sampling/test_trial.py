"""The process that tries grammars: its lines, and that nobody else loads the compiler."""

from __future__ import annotations

import io
import json
import subprocess
import sys

from rkserve.sampling import trial
from rkserve.sampling.trial import PROGRAM, READY, ask
from tests.support.values.grammar_walk import schema

GOOD = schema({"type": "integer"})
BAD = schema({"not": {}})


def test_the_process_says_that_it_is_ready_and_answers_line_by_line() -> None:
    out = io.StringIO()
    trial.serve(io.StringIO(ask(GOOD) + ask(BAD)), out)
    ready, good, bad = map(json.loads, out.getvalue().splitlines())
    assert (ready, good) == (READY, None)
    assert "Unimplemented" in bad


def test_neither_engines_nor_routers_load_a_compiler_that_nobody_asked_for() -> None:
    code = (
        "import sys, rkserve.native.engine.process, rkserve.native.binding.runtime;"
        "import rkserve.router.off_loop;"
        "print([name for name in ('numpy', 'llguidance') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
    assert trial.__name__ == PROGRAM
