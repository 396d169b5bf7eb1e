"""The command: which cases to run, for how long, and where the report goes."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from rkserve import __version__
from rkserve.bench.cases import (
    CLIENTS_PER_BOARD,
    Bench,
    Load,
    Loaded,
    Pair,
    cores,
    cycle_s,
)
from rkserve.bench.report import Machine, Results, render
from rkserve.bench.stream import HangUp
from rkserve.bench.summary import (
    HangUpFigures,
    LoadFigures,
    PairFigures,
    hang_up_figures,
    load_figures,
    pair_figures,
    verdicts,
)
from rkserve.config import PROJECT
from rkserve.errors import RkserveError

CASES = "abcd"
REPORT = PROJECT / "docs" / "benchmarks.md"
SECONDS, QUICK_SECONDS = 50.0, 8.0
FEWEST_ROUNDS = 3
HANG_UPS, QUICK_HANG_UPS = 40, 20
PACED_BOARDS, QUICK_PACED_BOARDS = (1, 3, 8), (1, 3)
CEILING = (
    Load(boards=1, clients=1, time_scale=0),
    Load(boards=3, clients=12, time_scale=0),
    Load(boards=3, clients=12, time_scale=0, new_tokens=512),
    Load(boards=3, clients=12, time_scale=0.05, new_tokens=512),
)
# The ceiling makes thousands of answers a minute: it needs no long window.
CEILING_SHARE, IDLE_SHARE = 0.3, 0.15


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    cases: str
    seconds: float
    quick: bool
    output: Path | None
    json: Path | None


def options(arguments: Sequence[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m rkserve.bench", description=__doc__)
    parser.add_argument(
        "--cases",
        default=CASES,
        type=_cases,
        help="some of a,b,c,d; (b) and (c) are held to (a), which therefore runs with them",
    )
    parser.add_argument("--quick", action="store_true", help="three minutes, for a first look")
    parser.add_argument("--seconds", type=float, help="length of a measured window")
    parser.add_argument(
        "--output",
        type=Path,
        help="where the report goes; a full run writes docs/benchmarks.md, others only print it",
    )
    parser.add_argument("--json", type=Path, help="where all measurements go, as JSON")
    given = parser.parse_args(arguments)
    full = given.cases == CASES and not given.quick
    return Options(
        cases=given.cases,
        seconds=given.seconds or (QUICK_SECONDS if given.quick else SECONDS),
        quick=given.quick,
        output=given.output or (REPORT if full else None),
        json=given.json,
    )


def _cases(text: str) -> str:
    asked = set(text.replace(",", "").lower())
    if not asked or asked - set(CASES):
        raise argparse.ArgumentTypeError(f"{text!r} is not some of a,b,c,d")
    return "".join(sorted(asked))


class Progress:
    """One line per case: rewritten in place on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._title = ""

    def begin(self, title: str) -> None:
        """Begin the line of a case."""
        self._title = title
        if not self._terminal:
            sys.stderr.write(f"{title}\n")
            sys.stderr.flush()

    def say(self, text: str) -> None:
        """Say what goes on in the case."""
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{self._title}: {text}")
            sys.stderr.flush()

    def end(self, text: str) -> None:
        """End the line with what came out."""
        sys.stderr.write(f"\r\x1b[K{self._title}: {text}\n" if self._terminal else f"  {text}\n")
        sys.stderr.flush()


def measure(bench: Bench, asked: Options, progress: Progress) -> Results:
    """Run the cases that were asked for."""
    pair = _measure_pair(bench, asked, progress) if asked.cases != "d" else None
    board_rate = None if pair is None else pair[1].alone.never_idle_rate
    hang_ups = _measure_hang_ups(bench, asked, progress) if "b" in asked.cases else None
    paced = [
        _measure_load(bench, progress, load, seconds=asked.seconds, board_rate=board_rate)
        for load in (_paced_loads(asked.quick) if "c" in asked.cases else ())
    ]
    ceiling = [
        _measure_load(bench, progress, load, seconds=asked.seconds * CEILING_SHARE)
        for load in (CEILING if "d" in asked.cases else ())
    ]
    return Results(
        machine=_machine(),
        verdicts=verdicts(pair and pair[1], hang_ups and hang_ups[1], [*paced, *ceiling]),
        pair=pair,
        hang_ups=hang_ups,
        paced=paced,
        ceiling=ceiling,
    )


def _paced_loads(quick: bool) -> list[Load]:
    return [
        Load(boards, boards * CLIENTS_PER_BOARD, time_scale=1.0)
        for boards in (QUICK_PACED_BOARDS if quick else PACED_BOARDS)
    ]


def _measure_pair(bench: Bench, asked: Options, progress: Progress) -> tuple[Pair, PairFigures]:
    through = "b" in asked.cases
    progress.begin("(a) binding alone" + (", (b) through the cluster" if through else ""))
    rounds = max(FEWEST_ROUNDS, round(2 * asked.seconds / cycle_s()))
    pair = bench.pair(rounds, through=through)
    figures = pair_figures(pair)
    text = f"TTFT {figures.alone.ttft_ms.p50:.1f} ms, {figures.alone.decode_rate.p50:.2f} tokens/s"
    if figures.ttft is not None and figures.decode is not None:
        text += f"; b / a: TTFT {figures.ttft.value:.3f}, tokens/s {figures.decode.value:.3f}"
    progress.end(text)
    return pair, figures


def _measure_hang_ups(
    bench: Bench, asked: Options, progress: Progress
) -> tuple[list[HangUp], HangUpFigures]:
    progress.begin("(b) clients that leave")
    hang_ups = bench.hang_ups(QUICK_HANG_UPS if asked.quick else HANG_UPS)
    figures = hang_up_figures(hang_ups)
    freed = figures.freed_ms
    progress.end(f"board free after {freed.p50:.0f} ms (p50), {freed.p99:.0f} ms (p99)")
    return hang_ups, figures


def _measure_load(
    bench: Bench,
    progress: Progress,
    load: Load,
    *,
    seconds: float,
    board_rate: float | None = None,
) -> tuple[Loaded, LoadFigures]:
    progress.begin(f"{load.case} {load.name}")
    idle_s = seconds * IDLE_SHARE if load.time_scale == 1 else 0.0
    loaded = bench.loaded(load, seconds, idle_s)
    figures = load_figures(loaded, board_rate)
    of_sum = "" if figures.of_sum is None else f", {figures.of_sum:.3f} of the sum"
    progress.end(f"{figures.rate:.1f} tokens/s{of_sum}")
    return loaded, figures


def _machine() -> Machine:
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    kib = next(int(line.split()[1]) for line in meminfo.splitlines() if "MemTotal" in line)
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
    return Machine(
        cores=cores(),
        processor=next(names, "processor unnamed"),
        memory_gb=kib * 1024 / 1e9,
        versions={
            "Python": ".".join(str(part) for part in sys.version_info[:3]),
            "Ray": version("ray"),
            "rkserve": __version__,
        },
    )


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; 1 where it failed. A missed target is no failure of the command."""
    asked = options(arguments)
    # Ctrl-C and an ordinary kill take the same way out, which ends the cluster.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="rkbench-"))  # short: sockets' paths have a limit
    bench = Bench(folder, (progress := Progress()).say)
    try:
        results = measure(bench, asked, progress)
    except RkserveError as exc:
        sys.stderr.write(f"\nThe benchmark failed: {exc}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted; ending the cluster.\n")
        return 130
    finally:
        bench.close()
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


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # impatience must not leave the cluster behind
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
