"""Run the chosen cases, each with its line of progress, and gather the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import StatisticsError
from typing import TypeVar

from benchmarks.harness.command import ProgressLine
from benchmarks.harness.exchange import HangUp, InterruptedAnswer
from benchmarks.harness.processes import BenchCrew
from benchmarks.harness.prompts import SMALL_PROFILE, cycle_s, step_ms
from benchmarks.serving import guided
from benchmarks.serving.cases import CLIENTS_PER_BOARD, Bench, Load, Loaded, Pair
from benchmarks.serving.guided import GuidedFound
from benchmarks.serving.oneboard import OneBoard
from benchmarks.serving.oneboard_figures import (
    Batches,
    ParkedFigures,
    ParkedRound,
    PauseFigures,
    parked_figures,
    pause_figures,
)
from benchmarks.serving.report import Results
from benchmarks.serving.summary import (
    HangUpFigures,
    LoadFigures,
    PairFigures,
    hang_up_figures,
    load_figures,
    pair_figures,
    verdicts,
)
from benchmarks.serving.tokenpath import TokenPath, TokenPaths, ways
from benchmarks.serving.tokenpath_figures import WayFigures, path_figures, path_verdicts
from rkserve.bench.processes import BenchFailed
from rkserve.bench.results import machine

T = TypeVar("T")

CASES = "abcdefghi"
BESIDE_ALONE = "abc"  # (b) and (c) are held to (a), which therefore runs with them
FEWEST_ROUNDS = 3
CEILING = (
    Load(boards=1, clients=1, time_scale=0),
    Load(boards=3, clients=12, time_scale=0),
    Load(boards=3, clients=12, time_scale=0, new_tokens=512),
    Load(boards=3, clients=12, time_scale=0.05, new_tokens=512),
)
# The ceiling makes thousands of answers a minute: it needs no long window.
CEILING_SHARE, IDLE_SHARE = 0.3, 0.15


@dataclass(frozen=True)
class Size:
    """The size of a run."""

    seconds: float
    hang_ups: int
    paced_boards: Sequence[int]
    parked_rounds: int
    paused_answers: int
    guided_rounds: int
    every_way: bool  # of tokens, also those between the plain and the fast one


FULL = Size(
    seconds=25.0,
    hang_ups=40,
    paced_boards=(1, 3, 8),
    parked_rounds=8,
    paused_answers=6,
    guided_rounds=5,
    every_way=True,
)
QUICK = Size(
    seconds=8.0,
    hang_ups=20,
    paced_boards=(1, 3),
    parked_rounds=3,
    paused_answers=2,
    guided_rounds=2,
    every_way=False,
)


class Measurement:
    """The cases on one crew."""

    def __init__(self, crew: BenchCrew, progress: ProgressLine, size: Size) -> None:
        self._crew, self._bench, self._one_board = crew, Bench(crew), OneBoard(crew)
        self._progress, self._size = progress, size
        self._failed: list[str] = []

    def measure(self, cases: str) -> Results:
        """Run these cases, in the order of the boards that they need.

        A case that fails, as one without an answer does, is noted, and the others go on.
        """
        size, tried = self._size, self._tried
        beside = bool(set(cases) & set(BESIDE_ALONE))
        pair = tried(partial(self._pair, through="b" in cases)) if beside else None
        board_rate = None if pair is None else pair[1].alone.never_idle_rate
        hang_ups = tried(self._hang_ups) if "b" in cases else None
        loads = [
            tried(partial(self._load, load, size.seconds, board_rate))
            for load in (self._paced_loads() if "c" in cases else ())
        ]
        paced = [one for one in loads if one is not None]
        loads = [
            tried(partial(self._load, load, size.seconds * CEILING_SHARE))
            for load in (CEILING if "d" in cases else ())
        ]
        ceiling = [one for one in loads if one is not None]
        parked = tried(self._parked) if "e" in cases else None
        held = [
            tried(partial(self._pauses, kept=kept))
            for kept in ((True, False) if "f" in cases else ())
        ]
        pauses = [one for one in held if one is not None]
        batches = tried(self._batches) if "g" in cases else None
        paths = tried(self._paths) if "h" in cases else None
        answers = tried(self._guided) if "i" in cases else None
        found = verdicts(
            pair and pair[1],
            hang_ups and hang_ups[1],
            [*paced, *ceiling],
            parked and parked[1],
            [figures for _, figures in pauses],
        )
        return Results(
            machine=machine(),
            verdicts=[*found, *(path_verdicts(paths[1]) if paths else ())],
            pair=pair,
            hang_ups=hang_ups,
            paced=paced,
            ceiling=ceiling,
            parked=parked,
            pauses=pauses,
            batches=batches,
            paths=paths,
            guided=answers,
            one_board_cpu=self._one_board.cpu,
            failed=tuple(self._failed),
        )

    def _tried(self, case: Callable[[], T]) -> T | None:
        """Return what a case found; None if it failed, which is noted."""
        try:
            return case()
        except (BenchFailed, StatisticsError) as exc:
            reason = str(exc).strip() or type(exc).__name__
            self._failed.append(f"{self._progress.title}: {reason}")
            self._progress.end(f"failed: {reason}")
            return None

    def _paced_loads(self) -> list[Load]:
        boards = self._size.paced_boards
        return [Load(count, count * CLIENTS_PER_BOARD, time_scale=1.0) for count in boards]

    def _pair(self, *, through: bool) -> tuple[Pair, PairFigures]:
        self._progress.begin("(a) binding alone" + (", (b) through the cluster" if through else ""))
        rounds = max(FEWEST_ROUNDS, round(2 * self._size.seconds / cycle_s()))
        pair = self._bench.pair(rounds, through=through)
        figures = pair_figures(pair)
        alone = figures.alone
        text = f"TTFT {alone.ttft_ms.p50:.1f} ms, {alone.decode_rate.p50:.2f} tokens/s"
        if figures.ttft is not None and figures.decode is not None:
            ttft, decode = figures.ttft.value, figures.decode.value
            text += f"; b / a: TTFT {ttft:.3f}, tokens/s {decode:.3f}"
        self._progress.end(text)
        return pair, figures

    def _hang_ups(self) -> tuple[list[HangUp], HangUpFigures]:
        self._progress.begin("(b) clients that leave")
        hang_ups = self._bench.hang_ups(self._size.hang_ups)
        figures = hang_up_figures(hang_ups)
        freed = figures.freed_ms
        self._progress.end(f"board free after {freed.p50:.0f} ms (p50), {freed.p99:.0f} ms (p99)")
        return hang_ups, figures

    def _load(
        self, load: Load, seconds: float, board_rate: float | None = None
    ) -> tuple[Loaded, LoadFigures]:
        self._progress.begin(f"{load.case} {load.name}")
        idle_s = seconds * IDLE_SHARE if load.time_scale == 1 else 0.0
        loaded = self._bench.loaded(load, seconds, idle_s)
        figures = load_figures(loaded, board_rate)
        of_sum = "" if figures.of_sum is None else f", {figures.of_sum:.3f} of the sum"
        self._progress.end(f"{figures.rate:.1f} tokens/s{of_sum}")
        return loaded, figures

    def _parked(self) -> tuple[list[ParkedRound], ParkedFigures]:
        self._progress.begin("(e) parked conversations")
        rounds, learning = self._one_board.parked(self._size.parked_rounds)
        figures = parked_figures(rounds, learning)
        self._progress.end(
            f"TTFT of a return {figures.ttft.value:.3f} of a cold one, "
            f"of its guest {figures.displacing.value:.3f} of a calm one"
        )
        return rounds, figures

    def _pauses(self, *, kept: bool) -> tuple[list[InterruptedAnswer], PauseFigures]:
        self._progress.begin(f"(f) pauses, KV cache {'kept' if kept else 'recomputed'}")
        answers = self._one_board.interrupted(self._size.paused_answers, kept=kept)
        figures = pause_figures(answers, step_ms(SMALL_PROFILE))
        self._progress.end(
            f"last token after {figures.last_ms.p50:.0f} ms (p50), {figures.last_ms.p99:.0f} ms "
            f"(p99); next one {figures.resumed_ms.p50:.0f} ms after the resumption"
        )
        return answers, figures

    def _batches(self) -> Batches:
        self._progress.begin("(g) batches in the binding")
        found = self._one_board.batches()
        costs = ", ".join(f"{one.us_per_token:.2f} us ({one.n_batch})" for one in found.costs)
        self._progress.end(f"CPU per token {costs}")
        return found

    def _paths(self) -> tuple[TokenPaths, list[WayFigures]]:
        """Case (h): each way has a Ray of its own, and no other one may work meanwhile."""
        self._progress.begin("(h) the token path")
        self._crew.rest()
        found = TokenPath(self._crew.folder, self._progress.note).measure(
            ways(all_of_them=self._size.every_way),
            self._size.seconds,
            lambda taken: self._progress.note(f"{taken.way.name} is done"),
        )
        figures = path_figures(found)
        plain, fast = figures[0], figures[-1]
        costs = (plain.many.cost.gross, fast.many.cost.gross)
        self._progress.end(f"CPU per token {costs[0]:.3f} ms, and {costs[1]:.3f} ms the fast way")
        return found, figures

    def _guided(self) -> GuidedFound:
        self._progress.begin("(i) answers that follow a grammar")
        found = guided.measure(self._crew, self._size.guided_rounds)
        rates = ", ".join(f"{guided.rate(of):.1f} ({way.name})" for way, of in found.answers)
        self._progress.end(f"tokens/s {rates}")
        return found
