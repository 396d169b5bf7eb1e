"""``python -m benchmarks.scale``: simulate clusters and write the report."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.command import REPORTS, ProgressLine, add_outputs, deliver, run
from benchmarks.scale.cases import (
    SESSIONS_PER_BOARD,
    Results,
    decide,
    grow,
    load,
    policies,
    remember,
    rollouts,
)
from benchmarks.scale.report import render

REPORT = REPORTS / "scale.md"
BOARDS = 1000
CASES = ("policies", "decisions", "growth", "memory", "overload", "rollouts")
FACTORS = (0.7, 1.0, 3.0)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--boards", type=int, default=BOARDS, help="boards of the largest cluster")
    parser.add_argument(
        "--sessions", type=int, help=f"its sessions; {SESSIONS_PER_BOARD} for each board otherwise"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    add_outputs(parser, REPORT)
    asked = parser.parse_args(arguments)
    full = set(asked.cases) == set(CASES) and asked.boards == BOARDS and asked.sessions is None
    if full and asked.output is None:
        asked.output = REPORT
    return asked


class Simulation:
    """One run of the command."""

    def __init__(self, asked: argparse.Namespace, progress: ProgressLine) -> None:
        self.results = Results(asked.seed)
        self._asked, self._progress = asked, progress
        self._sizes = sorted({size for size in (10, 100) if size < asked.boards} | {asked.boards})

    def run(self, cases: Sequence[str]) -> Results:
        """Simulate the cases, in this order."""
        work: dict[str, Callable[[], None]] = {
            "policies": self._policies,
            "decisions": self._decisions,
            "growth": self._growth,
            "memory": self._memory,
            "overload": self._overload,
            "rollouts": self._rollouts,
        }
        for name in cases:
            began = time.monotonic()
            self._progress.begin(name)
            work[name]()
            self._progress.end(f"{time.monotonic() - began:.0f} s")
        return self.results

    def _policies(self) -> None:
        boards = min(8, self._asked.boards)
        for name, found in policies(self._asked.seed, boards, self._progress.note):
            self.results.policies[name] = found

    def _decisions(self) -> None:
        for size in self._sizes:
            self._progress.note(f"{size} boards")
            self.results.decided.append(decide(self._asked.seed, size))

    def _growth(self) -> None:
        for size in self._sizes:
            sessions = size * SESSIONS_PER_BOARD
            if self._asked.sessions is not None:
                sessions = max(1, self._asked.sessions * size // self._asked.boards)
            for name in ("least_load", "prefix"):
                grown = grow(self._asked.seed, size, sessions, self._progress.note, name=name)
                self.results.grown.append(grown)

    def _memory(self) -> None:
        contexts = SESSIONS_PER_BOARD * self._asked.boards
        for tokens in (512, 1500, 4000):
            self._progress.note(f"{contexts} contexts of {tokens} tokens")
            self.results.remembered.append(remember(contexts, tokens))

    def _overload(self) -> None:
        boards = min(100, self._asked.boards)
        for factor in FACTORS:
            self.results.loaded.append(load(self._asked.seed, boards, factor, self._progress.note))

    def _rollouts(self) -> None:
        for size in self._sizes:
            self._progress.note(f"{size} boards")
            self.results.rollouts += rollouts(self._asked.seed, size)


def main(arguments: Sequence[str]) -> int:
    """Simulate and report; return the exit code."""
    asked = options(arguments)

    def simulate(_folder: Path) -> None:
        results = Simulation(asked, ProgressLine()).run(asked.cases)
        deliver(render(results), asdict(results), asked.output, asked.json)

    return run(simulate)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
