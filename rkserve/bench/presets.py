"""The named cases, and the runner that plays their traces on one target after the other.

``multi-turn`` compares what is loaded on one trace of conversations; ``overload`` compares it at
its capacity with a multiple of that; ``smoke`` shows in seconds that a server can be measured at
all.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from rkserve.bench import capture
from rkserve.bench.figures import Comparison, Distribution, Slo, TraceFigures, compare, figures
from rkserve.bench.player import OnRunProgress, PlayedRun, Player, PlayOptions, RunProgress
from rkserve.bench.processes import BenchFailed, Json
from rkserve.bench.results import MISSING, RunResult, TargetVerdict, figure, percent, table
from rkserve.bench.systems import SystemUnderTest
from rkserve.bench.target import BoardMonitor, Target
from rkserve.bench.trace import Trace, TraceShape, make_trace

Show = Callable[[str, RunProgress], None]
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CONVERSATIONS = TraceShape(
    sessions=200,
    rate=0.3,
    turns=5.0,
    think_s=20.0,
    systems=4,
    system_words=150,
    user_words=60,
    answer_tokens=48,
)
SMOKE = TraceShape(sessions=6, rate=2.0, turns=2.0, systems=1, system_words=20, answer_tokens=16)
SINGLE = TraceShape(sessions=1, rate=1.0, turns=1.0, user_words=60, answer_tokens=48, spread=0.3)
ROUND_ROBIN, LEAST_LOAD, PREFIX = "round_robin", "least_load", "prefix"
HITS_AT_LEAST, TTFT_AT_MOST, P99_AT_MOST, GOODPUT_AT_LEAST = 3.8, 0.4, 1.0, 1.0
MANY = 10_000  # requests for a closed loop that ends by the clock
LIMIT_FACTOR = 5.0  # end-to-end, times that of a server whose queue is empty


@dataclass(frozen=True, slots=True)
class PresetOptions:
    """The options of a preset. ``sessions`` and ``seconds`` replace its own size.

    For ``overload``, ``sessions`` is the number of requests that measure the capacity, and ``load``
    the rate of its last run relative to that capacity. Each target
    is played ``runs`` times. For ``compare``, ``whole`` shows equal answers too.
    """

    seed: int = 1
    sessions: int | None = None
    seconds: float | None = None
    load: float = 3.0
    clients: int | None = None
    slo: Slo | None = None
    tell_deadline: bool = True
    runs: int = 1
    whole: bool = False
    plan: PlayOptions = field(default_factory=PlayOptions)


@dataclass(frozen=True, slots=True)
class PresetResult:
    """The result of a preset in addition to its runs."""

    title: str
    trace: str
    comparisons: Sequence[Comparison] = ()
    verdicts: Sequence[TargetVerdict] = ()
    appendix: str = ""
    more: Json = field(default_factory=dict)


@dataclass
class Bench:
    """Plays traces and keeps what came of them in ``runs``, also where it is interrupted."""

    site: SystemUnderTest
    slo: Slo = field(default_factory=Slo)
    show: Show = lambda _name, _progress: None
    runs: list[RunResult] = field(default_factory=list)
    interrupted: bool = False

    def run(self, target: Target, trace: Trace, plan: PlayOptions, name: str = "") -> RunResult:
        """Play a trace. Raises ``BenchFailed`` where it cannot even begin."""
        name = name or target.name
        watch = self.site.watch()
        if watch is not None:
            watch.start()
        boards = BoardMonitor(target) if plan.capture else None
        if boards is not None:
            boards.start()
        played = play(
            replace(target, name=name), trace, plan, lambda progress: self.show(name, progress)
        )
        found = figures(played, self.slo)
        result = (
            RunResult(played, found) if watch is None else RunResult(played, found, *watch.stop())
        )
        if boards is not None:
            result = replace(result, boards=boards.stop())
        self.runs.append(result)
        self.interrupted = self.interrupted or played.interrupted
        return result

    def judged_by(self, slo: Slo) -> None:
        """Hold all runs to other limits."""
        self.slo = slo
        self.runs = [replace(one, figures=figures(one.played, slo)) for one in self.runs]

    def targets(self) -> Iterator[Target]:
        """Come to one target after the other, until Ctrl-C."""
        for name in self.site.names:
            if self.interrupted:
                return
            yield self.site.enter(name)


def play(target: Target, trace: Trace, plan: PlayOptions, progress: OnRunProgress) -> PlayedRun:
    """Play a trace; Ctrl-C or an ordinary kill ends it, and what there was is returned."""

    _allow_many_sockets()

    async def whole() -> PlayedRun:
        player = Player(target, trace, plan)
        with _stopped_by_signals(player):
            return await player.play(progress)

    return asyncio.run(whole())


def _allow_many_sockets() -> None:
    """An open loop has as many connections as a slow server makes it have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def _stopped_by_signals(player: Player) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, player.stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def play_all(bench: Bench, trace: Trace, asked: PresetOptions, title: str) -> PresetResult:
    """Play one trace on everything that is loaded, ``runs`` times, and compare it with the first.

    Each round is compared with the same round of the first.
    """
    rounds: dict[str, list[RunResult]] = {}
    for number, target in enumerate(bench.targets()):
        for turn in range(asked.runs):
            if bench.interrupted:
                break
            name = target.name if asked.runs == 1 else f"{target.name}, run {turn + 1}"
            plan = _plan(bench, asked, number * asked.runs + turn)
            rounds.setdefault(target.name, []).append(bench.run(target, trace, plan, name))
    if asked.runs == 1:
        return PresetResult(title, describe(trace), _beside_the_first(bench))
    first = next(iter(rounds.values()), [])
    comparisons = [
        compare(one.played, other.played, bench.slo)
        for found in list(rounds.values())[1:]
        for one, other in zip(found, first, strict=False)
    ]
    appendix, more = spread_table(rounds), {"spread": spread_of(rounds)}
    return PresetResult(title, describe(trace), comparisons, appendix=appendix, more=more)


def spread_of(rounds: Mapping[str, Sequence[RunResult]]) -> Json:
    """Return how far the rounds of each target lie apart, figure by figure."""
    found: Json = {}
    for name, runs in rounds.items():
        found[name] = {}
        for what, of in _SPREAD:
            values = [value for run in runs if (value := of(run.figures)) is not None]
            if not values:
                continue
            found[name][what] = {
                "mean": fmean(values),
                "least": min(values),
                "most": max(values),
                "deviation": stdev(values) if len(values) > 1 else None,
                "runs": len(values),
            }
    return found


def spread_table(rounds: Mapping[str, Sequence[RunResult]]) -> str:
    """Return the same as Markdown."""
    rows = [
        [
            f"{what}: {name}",
            figure(spread["mean"], 2),
            figure(spread["least"], 2),
            figure(spread["most"], 2),
            figure(spread["deviation"], 2),
            MISSING
            if spread["deviation"] is None or not spread["mean"]
            else percent(spread["deviation"] / spread["mean"]),
            figure(spread["runs"], 0),
        ]
        for name, figures_of in spread_of(rounds).items()
        for what, spread in figures_of.items()
    ]
    head = ["", "mean", "least", "most", "standard deviation", "of the mean", "runs"]
    return f"## Spread over the runs\n\n{table(head, rows)}"


def _median(of: Distribution | None) -> float | None:
    return None if of is None else of.p50.value


_SPREAD: tuple[tuple[str, Callable[[TraceFigures], float | None]], ...] = (
    ("TTFT p50, ms", lambda found: _median(found.ttft_ms)),
    ("per token p50, ms", lambda found: _median(found.token_ms)),
    ("end-to-end p50, ms", lambda found: _median(found.e2e_ms)),
    ("tokens/s", lambda found: found.token_rate),
    ("goodput/s", lambda found: found.goodput),
    ("errors", lambda found: float(sum(found.errors.values()))),
)


def smoke(bench: Bench, asked: PresetOptions) -> PresetResult:
    """Ask a little of everything."""
    trace = make_trace(_sized(SMOKE, asked), asked.seed)
    asked = replace(asked, clients=asked.clients or 2)
    found = play_all(bench, trace, asked, "Smoke test")
    answered = [run.figures.answered / max(1, run.figures.asked) for run in bench.runs]
    worst = min(answered, default=0.0)
    return replace(found, verdicts=[TargetVerdict("answered, of all", worst, 1.0, at_most=False)])


def multi_turn(bench: Bench, asked: PresetOptions) -> PresetResult:
    """Play conversations; between policies of ours, hold their ratios to the targets."""
    trace = make_trace(_sized(CONVERSATIONS, asked), asked.seed)
    found = play_all(bench, trace, asked, "Conversations of several turns")
    return replace(
        found, verdicts=_policy_verdicts({run.figures.target: run for run in bench.runs}, bench.slo)
    )


def side_by_side(bench: Bench, trace: Trace, asked: PresetOptions) -> PresetResult:
    """Have all answer the same prompts, and put the answers beside those of the first."""
    plan = replace(asked.plan, clients=asked.clients or 1, time_factor=0.0, keep_text=True)
    texts, comparisons = [], []
    for target in bench.targets():
        played = bench.run(target, trace, plan).played
        first = bench.runs[0].played
        if played is first:
            trace = capture.with_answers(trace, first.outcomes)
            continue
        names = (first.target, played.target)
        pairs = capture.pairs(trace, first.outcomes, played.outcomes)
        texts.append(capture.render(names, pairs, whole=asked.whole))
        comparisons.append(capture.to_json(names, pairs))
    more = {"captured": comparisons}
    return PresetResult(
        "Answers side by side", describe(trace), appendix="\n".join(texts), more=more
    )


def overload(bench: Bench, asked: PresetOptions) -> PresetResult:
    """Measure the capacity in a closed loop, then ask as much and a multiple of it."""
    verdicts: list[TargetVerdict] = []
    seconds = asked.seconds or 60.0
    limits = asked.slo
    for number, target in enumerate(bench.targets()):
        capacity = _capacity(bench, target, asked, seconds, number)
        if bench.interrupted:
            break
        if capacity.figures.answer_rate <= 0 or capacity.figures.e2e_ms is None:
            raise BenchFailed(f"{target.name} answered nothing, so that it has no capacity")
        limits = limits or Slo(e2e_ms=round(LIMIT_FACTOR * capacity.figures.e2e_ms.p50.value))
        bench.judged_by(limits)
        verdicts += _over(bench, target, asked, capacity.figures.answer_rate, seconds)
    return PresetResult("Overload", "single requests, Poisson", verdicts=verdicts)


def _capacity(
    bench: Bench, target: Target, asked: PresetOptions, seconds: float, number: int
) -> RunResult:
    counted = asked.sessions is not None
    trace = make_trace(_sized(replace(SINGLE, sessions=MANY), asked), asked.seed)
    plan = replace(
        _plan(bench, asked, number),
        clients=asked.clients or bench.site.clients,
        duration_s=None if counted else seconds / 2,
    )
    return bench.run(target, trace, plan, f"{target.name}, capacity")


def _over(
    bench: Bench, target: Target, asked: PresetOptions, capacity: float, seconds: float
) -> list[TargetVerdict]:
    found = []
    for factor in (1.0, asked.load):
        if bench.interrupted:
            return []
        rate = factor * capacity
        shape = replace(SINGLE, sessions=max(2, round(rate * seconds)), rate=rate)
        limit_ms = bench.slo.e2e_ms if asked.tell_deadline else None
        plan = replace(
            asked.plan,
            clients=None,
            time_factor=1.0,
            deadline_s=None if limit_ms is None else limit_ms / 1e3,
            salt=f"{asked.plan.salt} {factor:g}".strip(),
        )
        name = f"{target.name}, {factor:g} x capacity"
        found.append(bench.run(target, make_trace(shape, asked.seed), plan, name).figures)
    at, over = found
    if bench.interrupted or not at.goodput:
        return []
    what = f"{target.name}: goodput at {asked.load:g} x capacity by that at capacity"
    return [TargetVerdict(what, over.goodput / at.goodput, GOODPUT_AT_LEAST, at_most=False)]


def describe(trace: Trace) -> str:
    """Say what a trace is."""
    made = trace.made
    how = ", ".join(f"{name} {value}" for name, value in made.items()) if made else "recorded"
    return f"{len(trace.sessions)} sessions, {trace.requests} requests ({how})"


def _plan(bench: Bench, asked: PresetOptions, number: int) -> PlayOptions:
    # The same number of tokens for each, and nothing that an earlier run may have left behind.
    salt = f"{asked.plan.salt} {number}".strip()
    factor = asked.plan.time_factor * bench.site.time_factor
    return replace(asked.plan, clients=asked.clients, time_factor=factor, salt=salt)


def _sized(shape: TraceShape, asked: PresetOptions) -> TraceShape:
    return shape if asked.sessions is None else replace(shape, sessions=asked.sessions)


def _beside_the_first(bench: Bench) -> list[Comparison]:
    played = [run.played for run in bench.runs]
    return [compare(one, played[0], bench.slo) for one in played[1:]]


def _policy_verdicts(runs: dict[str, RunResult], slo: Slo) -> list[TargetVerdict]:
    if PREFIX not in runs:
        return []
    bounds = (
        (ROUND_ROBIN, "prefix hit ratio", HITS_AT_LEAST, False),
        (ROUND_ROBIN, "TTFT p50", TTFT_AT_MOST, True),
        (LEAST_LOAD, "TTFT p99", P99_AT_MOST, True),
    )
    found = []
    for other, name, bound, at_most in bounds:
        if other not in runs:
            continue
        ratio = compare(runs[PREFIX].played, runs[other].played, slo).ratios[name]
        if ratio is not None:
            detail = f"{ratio.low:.3f} to {ratio.high:.3f}"
            what = f"{name}: {PREFIX} / {other}"
            found.append(TargetVerdict(what, ratio.value, bound, at_most, detail=detail))
    return found
