"""The gain and the cost of prompt cache files on disks of several speeds.

``python -m benchmarks.serving.disks`` plays two traces on one simulated board: conversations of
several turns that displace each other, and prompts that never come back. Each is played with and
without parking. What must not happen: that a trace takes longer with parking than without.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rkserve.local.board import AsyncLocalBoard

DISKS = (20.0, 80.0, 200.0, 1000.0)  # MB/s: a slow card, a fast one, eMMC, NVMe
PROFILES = ("rk3588-qwen2.5-1.5b-w8a8", "rk3588-qwen3-0.6b-w8a8")
SCALE = 0.1
ANSWER = 24
FIRST, MORE = 500, 80  # tokens of a first prompt, and of each later turn
CONVERSATIONS, TURNS = 6, 4
ONE_SHOTS = 48
PAUSE_S = 0.1  # between two requests: at this time scale a board never idles for a second
VOCABULARY = (300, 2900)  # ids of ordinary tokens of the simulated model


@dataclass
class DiskFigures:
    """One trace on one board. Times in ms of the simulated board, cache files included."""

    ttft_ms: list[float] = field(default_factory=list)
    parked: int = 0
    restored: int = 0

    @property
    def mean_ms(self) -> float:
        """The mean time to the first token."""
        return statistics.fmean(self.ttft_ms)


def conversations(rng: random.Random) -> Iterator[tuple[int, list[int]]]:
    """Yield the turns of conversations in random order: its number, and the tokens of the turn."""
    order = [number for number in range(CONVERSATIONS) for _ in range(TURNS)]
    rng.shuffle(order)
    begun: set[int] = set()
    for number in order:
        size = MORE if number in begun else FIRST
        begun.add(number)
        yield number, [rng.randrange(*VOCABULARY) for _ in range(size)]


def one_shots(rng: random.Random) -> Iterator[tuple[int, list[int]]]:
    """Yield prompts of one turn each."""
    for number in range(ONE_SHOTS):
        yield number, [rng.randrange(*VOCABULARY) for _ in range(FIRST)]


TRACES = {"conversations": conversations, "one turn each": one_shots}


async def play(trace: str, profile: str, mb_per_s: float, *, park: bool) -> DiskFigures:
    """Play a trace on a new board."""
    found, histories = DiskFigures(), dict[int, list[int]]()
    simulated = {"profile": profile, "time_scale": SCALE, "disk_mb_per_s": mb_per_s, "load_s": 0}
    with tempfile.TemporaryDirectory() as folder:
        board = await AsyncLocalBoard.open(
            "models/sim-chat",
            state_dir=Path(folder),
            simulated=simulated,
            prompt_cache={"park": park},
        )
        async with board:
            for number, more in TRACES[trace](random.Random(1)):
                prompt = [*histories.get(number, []), *more]
                found.ttft_ms.append(await _first_token(board, prompt, histories, number))
                await asyncio.sleep(PAUSE_S)
            report = await board.report()
            found.parked, found.restored = report.parked, report.restored
    return found


async def _first_token(
    board: AsyncLocalBoard, prompt: list[int], histories: dict[int, list[int]], number: int
) -> float:
    """Return the time to the first token of an answer, and keep its tokens as history."""
    loop = asyncio.get_running_loop()
    begun_s, first_s, ids = loop.time(), None, list[int]()
    pieces = board.stream(prompt=prompt, max_tokens=ANSWER, temperature=0)
    async for piece in pieces:
        first_s = first_s or loop.time()
        ids += piece.token_ids
    assert first_s is not None
    histories[number] = [*prompt, *ids]
    return (first_s - begun_s) * 1e3 / SCALE


def table(rows: Sequence[tuple[str, str, float, DiskFigures, DiskFigures]]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| profile | trace | disk, MB/s | TTFT without files, ms | with | ratio | parked "
        "| restored |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for profile, trace, disk, without, parked in rows:
        lines.append(
            f"| {profile} | {trace} | {disk:.0f} | {without.mean_ms:.0f} | {parked.mean_ms:.0f} "
            f"| {parked.mean_ms / without.mean_ms:.2f} | {parked.parked} | {parked.restored} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="prompt cache files on disks of several speeds")
    parser.add_argument("--profile", action="append", choices=PROFILES)
    given = parser.parse_args()
    rows = []
    for profile in given.profile or PROFILES:
        for trace in TRACES:
            without = asyncio.run(play(trace, profile, DISKS[-1], park=False))
            for disk in DISKS:
                parked = asyncio.run(play(trace, profile, disk, park=True))
                rows.append((profile, trace, disk, without, parked))
                sys.stderr.write(table(rows[-1:]).splitlines()[-1] + "\n")
    sys.stdout.write(f"{table(rows)}\n")


if __name__ == "__main__":
    main()
