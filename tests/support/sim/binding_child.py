"""Scripts that use the binding on the simulated runtime, each in a process of its own.

In strict mode the simulator ends the process on any misuse: a script that ends well made none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rkserve.native.sim import build
from tests.support.paths import PROJECT
from tests.support.sim.rkllm_fake import sanitized

MODEL = PROJECT / "models" / "sim-chat"

PRELUDE = """
import gc, json, os, sys, threading, time
from pathlib import Path
from tokenizers import Tokenizer
from rkserve.core.errors import *
from rkserve.core.run_params import Sampling
from rkserve.native.binding.runtime import open_runtime
from rkserve.native.runtime import *

library, model = Path(sys.argv[1]), Path(sys.argv[2])
tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
runtime = open_runtime(library)

def load(**changes):
    values = {"max_context_len": 512, "max_new_tokens": 200, "sampling": Sampling(temperature=0)}
    runtime.load(LoadParams(str(model / "model.rkllm"), **{**values, **changes}))

def ids(text):
    return TokenInput(tuple(tokenizer.encode(text, add_special_tokens=False).ids))

def chat(text):
    return ids(f"<|im_start|>user\\n{text}<|im_end|>\\n<|im_start|>assistant\\n")

pieces = []
def keep(step):
    pieces.extend(step)
    return SinkAction.CONTINUE

def pausing_at(*places):
    def sink(step):
        keep(step)
        return SinkAction.PAUSE if len(pieces) in places else SinkAction.CONTINUE
    return sink

def last():
    return TokenInput((pieces[-1].token_id,))

def run_of(given, **how):
    return RunParams((given,), **how)

def text():
    return b"".join(piece.text for piece in pieces).decode()

def misuse(call):
    try:
        call()
    except Misuse:
        return
    raise AssertionError("that was let through")

def tell(**facts):
    print(json.dumps(facts))
"""


def child(
    release: str,
    script: str,
    *,
    tmp_path: Path,
    fault: str = "",
    strict: bool = True,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` after the prelude in a process of its own."""
    control = tmp_path / "control"
    control.write_text(f"time_scale=0\n{fault}\n")
    environ = {
        **os.environ,
        "RKSIM_TIME_SCALE": "0",
        "RKSIM_LOAD_MS": "0",
        "RKSIM_STRICT": str(int(strict)),
        "RKSIM_CONTROL": str(control),
        **(env or {}),
    }
    path = build.ensure_built(release, sanitize=sanitized())
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(path), str(MODEL)],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        env=environ,
        timeout=60,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert "violation:" not in done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts
