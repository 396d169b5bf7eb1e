"""A measurement of a model in a child process, beside readings of the board while it runs.

The library may crash, hang or end the process: only the child loads it. ``python -m
rkserve.doctor.measure LIBRARY MODEL CONTEXT SECONDS`` is the child; it prints a line of JSON when
the model is loaded, and one after the last run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from statistics import median
from typing import Any

from rkserve.board.engine.telemetry import read_telemetry
from rkserve.core.board_report import Hardware
from rkserve.core.child_process import clean_environ
from rkserve.core.run_params import FEWEST_SPEED_TOKENS, SPEED_TEXT, SPEED_TOKENS
from rkserve.doctor.facts import MeasuredSpeed
from rkserve.doctor.known import expected_speed

SECONDS = 20.0
LOAD_S = 240.0  # a large model from a slow card; the longest load published took 189 s
LAST_RUN_S = 120.0  # a run that has begun within the time may take this much longer
SAMPLE_S = 0.5
STDERR_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class MeasureLimits:
    """The time of the runs, that of the load, and the most that the last run may take beyond."""

    seconds: float = SECONDS
    load_s: float = LOAD_S
    last_run_s: float = LAST_RUN_S

    @property
    def run_s(self) -> float:
        """The time until the last run has ended."""
        return self.seconds + self.last_run_s


USUAL_LIMITS = MeasureLimits()


def measure(
    library: Path, weights: Path, context: int, root: Path, limits: MeasureLimits = USUAL_LIMITS
) -> MeasuredSpeed:
    """Return the speed of a model, and the reading of the board in the middle of it."""
    seconds = str(limits.seconds)
    child = subprocess.Popen(
        (sys.executable, "-m", __name__, str(library), str(weights), str(context), seconds),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environ(),
        start_new_session=True,
    )
    lines: Queue[str | None] = Queue()
    errors = bytearray()
    readers = [
        threading.Thread(target=_read_lines, args=(child, lines), daemon=True),
        threading.Thread(target=_read_errors, args=(child, errors), daemon=True),
    ]
    for one in readers:
        one.start()
    samples: list[Hardware] = []
    try:
        loaded = _next(lines, limits.load_s, root, [])
        found = _next(lines, limits.run_s, root, samples) if loaded is not None else None
    finally:
        hangs = not _ends(child)
        if hangs:
            child.kill()
        code = child.wait()
        for one in readers:
            one.join(1)
    if loaded is None or found is None:
        if hangs:
            limit = limits.load_s if loaded is None else limits.run_s
            step = "loaded" if loaded is None else "measured"
            problem = f"it was not {step} within {limit:.0f} s"
        else:
            problem = _end(code)
        return MeasuredSpeed(problem=f"{problem}{_last_error(bytes(errors))}")
    if "problem" in found:
        return MeasuredSpeed(problem=f"{found['problem']}{_last_error(bytes(errors))}")
    return MeasuredSpeed(
        release=str(found["release"]),
        load_s=float(loaded["load_s"]),
        prefill_tokens_per_s=float(found["prefill_tokens_per_s"]),
        decode_tokens_per_s=float(found["decode_tokens_per_s"]),
        decode_tokens=int(found["decode_tokens"]),
        hardware=samples[len(samples) // 2] if samples else None,
    )


def compared(found: MeasuredSpeed, soc: str, folder: Path, weights: Path) -> MeasuredSpeed:
    """Return a measurement with the speed that the SoC and the model should reach."""
    with suppress(OSError):
        size = weights.stat().st_size
        expected = expected_speed(soc, (folder.name, weights.name), size)
        if expected is not None:
            figures = {
                "expected_tokens_per_s": expected.decode_tokens_per_s,
                "slow_share": expected.slow_share,
                "basis": expected.basis,
            }
            return found.model_copy(update=figures)
    return found


def _read_lines(child: subprocess.Popen[bytes], lines: Queue[str | None]) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            lines.put(line.decode("utf-8", "replace"))
    lines.put(None)


def _read_errors(child: subprocess.Popen[bytes], errors: bytearray) -> None:
    assert child.stderr is not None
    with child.stderr:
        while chunk := child.stderr.read1(STDERR_BYTES):  # type: ignore[attr-defined] # a pipe is a BufferedReader
            errors += chunk
            del errors[:-STDERR_BYTES]


def _next(
    lines: Queue[str | None], limit_s: float, root: Path, samples: list[Hardware]
) -> dict[str, Any] | None:
    """Return the child's next line, None where it ends or the time is up; sample meanwhile."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        with suppress(Empty):
            line = lines.get(timeout=SAMPLE_S)
            found = json.loads(line) if line else None
            return found if isinstance(found, dict) else None
        samples.append(read_telemetry(root))
    return None


def _ends(child: subprocess.Popen[bytes]) -> bool:
    """Return whether the child ends by itself, as it does after its last line."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(1)
        return True
    return False


def _end(code: int) -> str:
    """Return the meaning of a child's exit code."""
    if code == -signal.SIGILL:
        return "the library's build is not for this CPU: it ended its process by SIGILL"
    if code == -signal.SIGKILL:
        return "its process was killed, by the kernel where memory ran out"
    if code < 0:
        return f"the library ended its process by {signal.Signals(-code).name}"
    return f"its process ended with {code}"


def _last_error(errors: bytes) -> str:
    """Return the library's last line about an error, in brackets."""
    lines = [line.strip() for line in errors.decode("utf-8", "replace").splitlines()]
    last = next((line for line in reversed(lines) if line.startswith("E ")), "")
    return f" ({last})" if last else ""


def _run(library: Path, weights: str, context: int, seconds: float) -> None:
    """Load the model and run it until the time is up; print the figures."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the vendor's library prints to stdout
    try:
        for line in _figures(library, weights, context, seconds):
            out.write(json.dumps(line) + "\n")
            out.flush()
    except Exception as exc:  # noqa: BLE001 -- the parent reports it
        # Twice: the parent may still wait for the line of the load.
        out.write(f"{json.dumps({'problem': str(exc)})}\n" * 2)
        out.flush()
    # Threads inside C cannot be joined; the kernel frees what they hold.
    os._exit(0)


def _figures(library: Path, weights: str, context: int, seconds: float) -> Iterator[dict[str, Any]]:
    from rkserve.core.run_params import Sampling
    from rkserve.native.binding.library import raise_file_limit
    from rkserve.native.binding.runtime import open_runtime
    from rkserve.native.runtime import LoadParams, PromptInput, RunParams, SinkAction

    raise_file_limit()
    began_s = time.monotonic()
    runtime = open_runtime(library)
    greedy = Sampling(temperature=0.8, top_k=1, repeat_penalty=1.0)
    runtime.load(LoadParams(weights, context, SPEED_TOKENS, sampling=greedy))
    yield {"load_s": time.monotonic() - began_s}
    run = RunParams((PromptInput(SPEED_TEXT),))
    rates: list[float] = []
    prefill, tokens = 0.0, 0
    deadline_s = time.monotonic() + seconds
    while not rates or time.monotonic() < deadline_s:
        perf = runtime.run(run, lambda _: SinkAction.CONTINUE).perf
        if perf.decode_tokens < FEWEST_SPEED_TOKENS or perf.decode_ms <= 0:
            if time.monotonic() < deadline_s:
                continue
            raise RuntimeError(f"answers end after {perf.decode_tokens} tokens")
        rates.append(1000 * perf.decode_tokens / perf.decode_ms)
        tokens += perf.decode_tokens
        if not prefill and perf.prefill_ms > 0:
            # Later runs may reuse the prompt, which is then no prefill.
            prefill = 1000 * perf.prefill_tokens / perf.prefill_ms
    yield {
        "release": runtime.release,
        "prefill_tokens_per_s": prefill,
        "decode_tokens_per_s": median(rates),
        "decode_tokens": tokens,
    }


if __name__ == "__main__":
    _run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
