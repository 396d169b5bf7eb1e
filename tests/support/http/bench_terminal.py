"""``rkserve bench`` in this process."""

from __future__ import annotations

import json
from typing import Any

from rkserve.cli import app
from tests.support.http.terminal import Runner, plain

QUICK = ("--rate", "200", "--sessions", "4")


def bench(*words: str, **environ: str) -> tuple[int, str, str]:
    done = Runner().invoke(
        app, ["bench", *words], env={"COLUMNS": "200", "RKSERVE_URL": "", **environ}
    )
    return done.exit_code, done.stdout, plain(done.stderr)


def report(*words: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = bench(*words, "--json")
    found: dict[str, Any] = json.loads(out)
    return code, found
