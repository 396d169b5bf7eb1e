"""The command: which cases to run, for how long, and where the report goes."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from benchmarks.harness.processes import BenchCrew
from benchmarks.harness.progress import ProgressLine
from benchmarks.serving.measure import CASES, FULL, QUICK, Measurement, Size
from benchmarks.serving.report import Results, render
from rkserve.config.serve_config import PROJECT
from rkserve.core.errors import RkserveError

REPORT = PROJECT / "docs" / "benchmarks" / "serving.md"


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    cases: str
    size: Size
    output: Path | None
    json: Path | None


def options(arguments: Sequence[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument(
        "--cases",
        default=CASES,
        type=_cases,
        help=f"some of {','.join(CASES)}; (b) and (c) are held to (a), which runs with them",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of an hour, for a first look"
    )
    parser.add_argument("--seconds", type=float, help="length of a measured window")
    parser.add_argument(
        "--output",
        type=Path,
        help="where the report goes; a full run writes docs/benchmarks/serving.md, "
        "others only print it",
    )
    parser.add_argument("--json", type=Path, help="where all measurements go, as JSON")
    given = parser.parse_args(arguments)
    size = QUICK if given.quick else FULL
    full = given.cases == CASES and not given.quick
    return Options(
        cases=given.cases,
        size=replace(size, seconds=given.seconds or size.seconds),
        output=given.output or (REPORT if full else None),
        json=given.json,
    )


def _cases(text: str) -> str:
    asked = set(text.replace(",", "").lower())
    if not asked or asked - set(CASES):
        raise argparse.ArgumentTypeError(f"{text!r} is not some of {','.join(CASES)}")
    return "".join(sorted(asked))


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; 1 where it failed. A missed target is no failure of the command."""
    asked = options(arguments)
    interruptible()
    folder = Path(tempfile.mkdtemp(prefix="rkbench-"))  # short: sockets' paths have a limit
    crew = BenchCrew(folder, (progress := ProgressLine()).say)
    try:
        results = Measurement(crew, progress, asked.size).measure(asked.cases)
    except RkserveError as exc:
        sys.stderr.write(f"\nThe benchmark failed: {exc}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted; ending the cluster.\n")
        return 130
    finally:
        crew.close()
        shutil.rmtree(folder)
    _deliver(results, asked)
    return 0


def _deliver(results: Results, asked: Options) -> None:
    text = render(results)
    sys.stdout.write(text)
    if asked.output is not None:
        asked.output.write_text(text, encoding="utf-8")
    if asked.json is not None:
        asked.json.write_text(json.dumps(asdict(results), indent=1), encoding="utf-8")


def interruptible() -> None:
    """Let Ctrl-C and an ordinary kill take the same way out, which ends the cluster."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # impatience must not leave the cluster behind
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
