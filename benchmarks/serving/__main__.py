"""The command: which cases to run, for how long, and where the report goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.harness.command import REPORTS, ProgressLine, add_outputs, deliver, run
from benchmarks.harness.processes import BenchCrew
from benchmarks.serving.measure import CASES, FULL, QUICK, Measurement, Size
from benchmarks.serving.report import render
from rkserve.bench.processes import hold

REPORT = REPORTS / "serving.md"


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

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
    add_outputs(parser, REPORT)
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
    """Run the benchmark; return the exit code."""
    asked = options(arguments)

    def measure(folder: Path) -> None:
        crew = BenchCrew(folder, (progress := ProgressLine()).note)
        try:
            results = Measurement(crew, progress, asked.size).measure(asked.cases)
        finally:
            crew.close()
        deliver(render(results), asdict(results), asked.output, asked.json)
        hold(list(results.failed))

    return run(measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
