"""The command: which sides to measure, for how long, and where the page goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import StatisticsError

from benchmarks.harness.command import ProgressLine, run
from benchmarks.serving.plain.gateways import LeftOut
from benchmarks.serving.plain.measure import Figures, measure
from benchmarks.serving.plain.pace import BOARDS
from benchmarks.serving.plain.report import Result, page
from benchmarks.serving.plain.sides import SIDES, Side
from rkserve.bench.processes import hold
from rkserve.bench.results import machine
from rkserve.core.errors import RkserveError

SECONDS = 20.0


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.plain", description=__doc__)
    parser.add_argument(
        "--sides", type=_sides, default=[*SIDES.values()], help=f"some of {','.join(SIDES)}"
    )
    parser.add_argument("--boards", type=int, default=BOARDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measured window")
    parser.add_argument("--output", type=Path, help="where the page goes, too")
    return parser.parse_args(arguments)


def _sides(text: str) -> list[Side]:
    asked = [name.strip() for name in text.split(",")]
    if strange := [name for name in asked if name not in SIDES]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, strange))}: not some of {','.join(SIDES)}"
        )
    return [side for side in SIDES.values() if side.name in asked]


def measured(
    side: Side, folder: Path, boards: int, seconds: float, progress: ProgressLine
) -> Result:
    """Measure one side. Its failure is in the result, and does not end the benchmark."""
    progress.begin(side.title)
    found: list[Figures] = []
    folder.mkdir()
    try:
        with side.open(folder, boards, progress.note) as running:
            for figures in measure(side.name, running, seconds, (1, boards)):
                found.append(figures)
    except (RkserveError, OSError, StatisticsError) as exc:
        reason = str(exc).strip() or type(exc).__name__
        progress.end(f"failed: {reason}")
        return Result(side, found, reason, left_out=isinstance(exc, LeftOut))
    rates = ", ".join(f"{one.tokens_per_s:.0f} ({one.streams})" for one in found)
    progress.end(f"tokens/s {rates}")
    return Result(side, found)


def main(arguments: Sequence[str]) -> int:
    """Measure the sides one after the other; return the exit code.

    That is 1 if one failed. One that cannot be installed here is only named.
    """
    given = options(arguments)
    progress = ProgressLine()

    def work(folder: Path) -> None:
        results = [
            # One letter: the paths of sockets have a limit.
            measured(side, folder / letter, given.boards, given.seconds, progress)
            for letter, side in zip("abcdefghij", given.sides, strict=False)
        ]
        text = page(results, given.boards, machine())
        if given.output is not None:
            given.output.write_text(text, encoding="utf-8")
        sys.stdout.write(text)
        hold([f"{r.side.title}: {r.failure}" for r in results if r.failure and not r.left_out])

    return run(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
