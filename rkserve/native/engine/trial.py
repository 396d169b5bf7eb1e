"""A trial of an unlisted release in a sacrificial process.

The library checks nothing: structs of another layout corrupt memory instead of failing. A release
that is not listed is therefore loaded in a child first, which makes one short run, and only a child
that ends well lets the engine go on. The trial proves little: it finds gross differences of a
layout, no subtle ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rkserve.core.errors import NativeError, ReleaseRefused
from rkserve.native.binding.runtime import open_runtime
from rkserve.native.engine import commands
from rkserve.native.runtime import PromptInput, RunEnd, RunParams, SinkAction, Step

TOKENS = 8
PROMPT = "Repeat after me: yes"
MOST_IDS = 1 << 20  # larger than any vocabulary
GRACE_S = 5.0
LAST_LINES = 3


def try_release(library: Path, params: Mapping[str, Any], name: str, limit_s: float) -> None:
    """Make the trial; ``params`` are those of a load command, ``name`` is the release's.

    Raises:
        ReleaseRefused: the child crashed, hung, or found figures that make no sense.
    """
    order = json.dumps({"library": str(library), "params": dict(params)})
    # Its stdout is taken by the library; this process's own belongs to frames.
    child = subprocess.Popen(
        (sys.executable, "-m", "rkserve.native.engine.trial"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
    )
    try:
        output, _ = child.communicate(order, limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver
            child.communicate(timeout=GRACE_S)
        raise ReleaseRefused(_refusal(name, f"nothing came within {limit_s:.0f} s")) from None
    if child.returncode != 0:
        raise ReleaseRefused(_refusal(name, output.strip() or _ending(child.returncode)))


def _refusal(name: str, why: str) -> str:
    return f"RKLLM {name} failed its trial: {why}. Install a listed release."


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"crashed: {signal.Signals(-code).name}"
    except ValueError:
        return f"crashed: signal {-code}"


def make_run(library: Path, params: Mapping[str, Any]) -> str:
    """Load the model, make one run, and return the first thing that makes no sense, if any."""
    load = replace(commands.load_params(params), max_new_tokens=TOKENS, n_batch=1)
    runtime = open_runtime(library, allow_unlisted=True)
    runtime.load(load)
    ids: list[int] = []

    def take(step: Step) -> SinkAction:
        ids.extend(piece.token_id for piece in step if piece is not None)
        return SinkAction.CONTINUE

    outcome = runtime.run(RunParams((PromptInput(PROMPT),), keep_history=True), take)
    (positions,) = runtime.kv_cache_sizes()
    runtime.destroy()
    if outcome.end is not RunEnd.FINISHED or not 1 <= len(ids) <= TOKENS:
        return f"a run of at most {TOKENS} tokens {outcome.end.value} after {len(ids)}"
    if not all(0 <= one < MOST_IDS for one in ids):
        return f"token IDs from {min(ids)} to {max(ids)}"
    if not 1 <= positions <= load.max_context_len:
        return f"{positions} positions in a KV cache of {load.max_context_len}"
    perf = outcome.perf
    counts = (perf.prefill_tokens, perf.decode_tokens)
    if not all(0 <= one <= load.max_context_len for one in counts):
        return f"counts of {counts[0]} and {counts[1]} tokens"
    return ""


def main() -> None:
    """Make the trial that stdin describes; exit code 0 lets the engine go on."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the vendor's library prints to stdout
    order = json.load(sys.stdin)
    try:
        wrong = make_run(Path(order["library"]), order["params"])
    except NativeError as exc:
        wrong = str(exc)
    out.write(wrong)
    out.flush()
    os._exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
