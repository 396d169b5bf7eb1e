"""Run simulated clusters in virtual time, a seed each, and report the seeds that break a guarantee.

``make simulate FIRST=1000 SEEDS=500`` runs seeds 1000 to 1499, and ``STORY=--story`` prints all
that was done, for a seed that failed. See ``simulation``.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from tests.support.boards.own_time import run_seeded
from tests.support.cluster import simulation
from tests.support.cluster.simulated_history import Violated

HASH_SEED = "0"  # the order of sets decides as well
LIMIT_S = 3600.0  # of virtual time, for one seed


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(seed: int, steps: int) -> tuple[int, Counter[str], str, str]:
    """Run one seed; return it, what was done, what broke, and the story."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="rkserve-simulated-") as folder:
        try:
            world = run_seeded(simulation.live(seed, Path(folder), steps), seed, LIMIT_S)
        except Violated as exc:
            broken, _, story = str(exc).partition("\n")
            return seed, Counter(), broken, story
    history = world.history
    done = Counter(
        calls=len(history.calls),
        confirmed=sum(call.succeeded for call in history.calls),
        answers=len(history.answers),
        refusals=sum(history.errors.values()),
        faults=sum(history.faults.values()),
        tokens=len(history.tokens),
    )
    return seed, done, "", "\n".join(history.story)


def main() -> int:
    """Run the seeds, each in a process of its own: one that ran another before differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many seeds")
    parser.add_argument("--also", type=int, nargs="*", default=(), help="seeds to run besides")
    parser.add_argument("--steps", type=int, default=60, help="random things done in each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--story", action="store_true", help="print everything that was done")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        command = [sys.executable, "-m", "tests.support.cluster.simulate", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": HASH_SEED})
    seeds = dict.fromkeys((*given.also, *range(given.first, given.first + given.count)))
    totals, failed, began_s = Counter[str](), 0, time.perf_counter()
    with multiprocessing.get_context("fork").Pool(given.jobs, maxtasksperchild=1) as pool:
        for _, done, broken, story in pool.imap_unordered(partial(run, steps=given.steps), seeds):
            totals += done
            if broken:
                failed += 1
                say(f"FAILED {broken}")
            if given.story:
                say(story)
    did = ", ".join(f"{total} {name}" for name, total in sorted(totals.items()))
    say(f"{len(seeds)} seeds, {failed} failed: {did}; {time.perf_counter() - began_s:.1f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
