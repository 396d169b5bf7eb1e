"""``python -m benchmarks.control``: the cluster paused and changed under load, and its bars."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.control.cases import ControlBench
from benchmarks.control.faults_cases import FaultBench, chosen
from benchmarks.control.measure import CASES, FULL, QUICK, ControlMeasurement, Size
from benchmarks.control.report import render
from benchmarks.harness.command import REPORTS, ProgressLine, add_outputs, deliver, run
from benchmarks.harness.growth import FEWEST_SAMPLES
from benchmarks.harness.processes import BenchCrew
from rkserve.bench.systems import MODEL
from rkserve.config.serve_config import resolve_folder

REPORT = REPORTS / "control.md"
# Every version stays loaded: reclaiming memory is not what is measured here.
MAX_ADAPTERS = 16


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    cases: tuple[str, ...]
    size: Size
    output: Path | None
    json: Path | None


def options(arguments: Sequence[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control", description=__doc__)
    parser.add_argument("--cases", default=CASES, type=_cases, help=f"some of {','.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="a few minutes, for a first look")
    parser.add_argument("--rounds", type=_rounds, help="rounds of pause, switch and resume")
    parser.add_argument("--times", type=_times, help="how many times each fault is made")
    parser.add_argument(
        "--fault", action="append", type=_fault, help="only faults with this in their name; again"
    )
    add_outputs(parser, REPORT)
    given = parser.parse_args(arguments)
    size = QUICK if given.quick else FULL
    full = given.cases == CASES and not given.quick and not given.fault
    return Options(
        cases=given.cases,
        size=replace(
            size,
            rounds=given.rounds or size.rounds,
            faults=given.times or size.faults,
            fault=tuple(given.fault or ("",)),
        ),
        output=given.output or (REPORT if full else None),
        json=given.json,
    )


def _cases(text: str) -> tuple[str, ...]:
    asked = text.split(",")
    if set(asked) - set(CASES):
        raise argparse.ArgumentTypeError(f"{text!r} is not some of {','.join(CASES)}")
    return tuple(case for case in CASES if case in asked)


def _rounds(text: str) -> int:
    """Two versions are served in turns, and each round is looked at where there are few."""
    if not text.isdecimal() or int(text) % 2 or int(text) < FEWEST_SAMPLES:
        raise argparse.ArgumentTypeError(f"{text!r} is no even number from {FEWEST_SAMPLES} on")
    return int(text)


def _times(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _fault(text: str) -> str:
    if not chosen([text]):
        raise argparse.ArgumentTypeError(f"no fault is called {text!r}")
    return text


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    asked = options(arguments)

    def measure(folder: Path) -> None:
        model = folder / MODEL.name
        shutil.copytree(resolve_folder(MODEL), model)
        with (model / "rkserve.yaml").open("a", encoding="utf-8") as file:
            file.write(f"max_adapters: {MAX_ADAPTERS}\n")
        crew = BenchCrew(folder, (progress := ProgressLine()).note, model)
        try:
            benches = ControlBench(crew), FaultBench(crew)
            results = ControlMeasurement(*benches, progress, asked.size).measure(asked.cases)
        finally:
            crew.close()
        deliver(render(results), asdict(results), asked.output, asked.json)

    return run(measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
