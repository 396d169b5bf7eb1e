"""``python -m benchmarks.control``: the cluster paused and changed under load, and its bars."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.control.cases import ControlBench
from benchmarks.control.faults_cases import FaultBench, chosen
from benchmarks.control.measure import CASES, FULL, QUICK, ControlMeasurement, Size
from benchmarks.control.report import ControlResults, render
from benchmarks.harness.growth import FEWEST_SAMPLES
from benchmarks.harness.processes import BenchCrew
from benchmarks.harness.progress import ProgressLine
from benchmarks.serving.__main__ import interruptible
from rkserve.bench.systems import MODEL
from rkserve.config.serve_config import PROJECT, resolve_folder
from rkserve.core.errors import RkserveError

REPORT = PROJECT / "docs" / "benchmarks" / "control.md"
# Every version stays loaded: reclaiming memory is not what is measured here.
MAX_ADAPTERS = 16


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

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
    parser.add_argument(
        "--output",
        type=Path,
        help=f"where the report goes; a full run writes docs/benchmarks/{REPORT.name}, "
        "others only print it",
    )
    parser.add_argument("--json", type=Path, help="where all measurements go, as JSON")
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
    """Run the benchmark; 1 where it failed. A missed target is no failure of the command."""
    asked = options(arguments)
    interruptible()
    try:
        with _crew(progress := ProgressLine()) as crew:
            measurement = ControlMeasurement(
                ControlBench(crew), FaultBench(crew), progress, asked.size
            )
            results = measurement.measure(asked.cases)
    except RkserveError as exc:
        sys.stderr.write(f"\nThe benchmark failed: {exc}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted; the cluster has been ended.\n")
        return 130
    _deliver(results, asked)
    return 0


@contextmanager
def _crew(progress: ProgressLine) -> Iterator[BenchCrew]:
    folder = Path(tempfile.mkdtemp(prefix="rkbench-"))  # short: sockets' paths have a limit
    try:
        model = folder / MODEL.name
        shutil.copytree(resolve_folder(MODEL), model)
        with (model / "rkserve.yaml").open("a", encoding="utf-8") as file:
            file.write(f"max_adapters: {MAX_ADAPTERS}\n")
        crew = BenchCrew(folder, progress.say, model)
        try:
            yield crew
        finally:
            crew.close()
    finally:
        shutil.rmtree(folder)


def _deliver(results: ControlResults, asked: Options) -> None:
    text = render(results)
    sys.stdout.write(text)
    if asked.output is not None:
        asked.output.write_text(text, encoding="utf-8")
    if asked.json is not None:
        asked.json.write_text(json.dumps(_plain(asdict(results)), indent=1), encoding="utf-8")


def _plain(value: object) -> object:
    """Return what JSON can say of it: what versions say is found by a name, not by a pair."""
    if isinstance(value, dict):
        return {_name(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _name(key: object) -> str:
    return " ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
