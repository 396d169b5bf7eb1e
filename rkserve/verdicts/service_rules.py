"""Rules about the service as a whole: models, answers, queues, caches, control, Routers."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import ActivePause, undrain_command
from rkserve.verdicts.facts import FEWEST, BoardView, ClusterFacts, TrafficCounts, percentile
from rkserve.verdicts.reasons import ClusterRule, Gravity, PrometheusAlert, Reason

BUDGET = 0.01  # of the requests may be answered late, out of order or not at all
# Two windows, and the speed at which a budget of 30 days is used up in both.
FAST = (("5m", "1h", 14.4), ("30m", "6h", 6.0))
SLOW = (("6h", "3d", 1.0),)
P95 = 0.95
TURNED_AWAY = 0.01
OVERDUE_S = 10.0
FOUND = 0.5  # of the tokens that were expected in KV caches
FEWEST_TOKENS = 2000
FALLBACK = 0.05
SHORT, LONG = "5m", "30m"
FLEET = "rkserve doctor --fleet"
NOT_GOOD = '{outcome!="good"}'


def _unserved(facts: ClusterFacts) -> Iterator[Reason]:
    for model in facts.models:
        boards = [one for one in facts.boards if one.report.model == model]
        drained = [one.id for one in boards if one.target.drained]
        # A request wakes no drained board.
        able = [one for one in boards if not one.target.drained]
        asleep = bool(able) and all(one.target.level is not None for one in able)
        if asleep or any(one.serves for one in boards):
            continue
        sentence, command = "No board with it has joined yet.", "rkserve boards"
        if drained:
            command = undrain_command(model, drained)
            sentence = "All its boards are drained: requests are refused."
            if able:
                few = f"{len(drained)} of its {len(boards)} boards"
                sentence = f"No board serves it. Drained: {few}."
        elif boards:
            sentence = "No board serves it."
        states = [f"{one.id}: {_state(one)}" for one in boards]
        yield Reason(
            "ModelWithoutBoards", sentence, command, model=model, evidence=tuple(states[:5])
        )


def _state(board: BoardView) -> str:
    state = board.report.state.value
    return f"{state}, drained" if board.target.drained else state


def _coordinator(facts: ClusterFacts) -> Iterator[Reason]:
    if not facts.coordinator_reachable:
        silent_s = facts.coordinator_silent_s
        since = "since this Router's start" if silent_s is None else f"for {silent_s:.0f} s"
        yield Reason(
            "CoordinatorDown",
            f"The Coordinator has not answered {since}: requests are served, and nothing can be "
            "changed.",
            "serve status",
            run_on="head",
        )


def _routers(facts: ClusterFacts) -> Iterator[Reason]:
    if facts.routers_silent:
        count = len(facts.routers_silent)
        yield Reason(
            "RouterSilent",
            f"{count} of {count + len(facts.routers_up)} Routers do not answer the others.",
            "serve status",
            evidence=tuple(f"Router {name}" for name in facts.routers_silent),
            run_on="head",
        )


def _budget(
    name: str, pairs: tuple[tuple[str, str, float], ...]
) -> Callable[[ClusterFacts], Iterator[Reason]]:
    def find(facts: ClusterFacts) -> Iterator[Reason]:
        for model in facts.models:
            for short, long, speed in pairs:
                near, far, limit = facts.window(model, short), facts.window(model, long), speed
                share = min(near.bad_share, far.bad_share)
                if near.judged < FEWEST or share <= limit * BUDGET:
                    continue
                target_s = facts.objectives.ttft_s
                yield Reason(
                    name,
                    f"{near.bad_share:.1%} of the requests of the last {short} were not answered "
                    f"in order with the first token within {target_s:g} s, and {far.bad_share:.1%} "
                    f"of the last {long}.",
                    FLEET,
                    model=model,
                    figure=100 * near.bad_share,
                    limit=100 * limit * BUDGET,
                    unit="%",
                    evidence=(_outcomes(near, short), _outcomes(far, long)),
                )
                break

    return find


def _outcomes(counts: TrafficCounts, window: str) -> str:
    return f"{window}: {counts.failed} failed and {counts.late} late of {counts.judged}"


def _ttft(facts: ClusterFacts) -> Iterator[Reason]:
    for model in facts.models:
        found = _p95(facts.window(model, LONG).ttft, facts.ttft_bounds_s)
        if found is not None and found > facts.objectives.ttft_s:
            yield Reason(
                "TtftP95",
                f"The first token of one request in twenty takes {found:.1f} s or longer; the "
                f"target is {facts.objectives.ttft_s:g} s.",
                FLEET,
                model=model,
                figure=found,
                limit=facts.objectives.ttft_s,
                unit="s",
                evidence=(f"95th percentile of the last {LONG}: {found:.1f} s",),
            )


def _queue_wait(facts: ClusterFacts) -> Iterator[Reason]:
    for model in facts.models:
        found = _p95(facts.window(model, SHORT).queue_wait, facts.wait_bounds_s)
        if found is not None and found > facts.objectives.queue_wait_s:
            waiting = facts.waiting(model)
            yield Reason(
                "QueueWaitP95",
                f"One request in twenty waits {found:.1f} s or longer for a board; the target is "
                f"{facts.objectives.queue_wait_s:g} s.",
                "rkserve generations",
                model=model,
                figure=found,
                limit=facts.objectives.queue_wait_s,
                unit="s",
                evidence=(f"95th percentile of the last {SHORT}", f"{waiting} requests wait"),
            )


def _p95(counts: tuple[int, ...], bounds: tuple[float, ...]) -> float | None:
    return percentile(counts, bounds, P95) if sum(counts) >= FEWEST else None


def _turned_away(facts: ClusterFacts) -> Iterator[Reason]:
    for model in facts.models:
        counts = facts.window(model, SHORT)
        total = counts.good + counts.late + counts.turned_away
        if total >= FEWEST and counts.turned_away > TURNED_AWAY * total:
            yield Reason(
                "TurnedAway",
                f"{counts.turned_away} of {total} requests of the last {SHORT} got no place at a "
                "board.",
                "rkserve generations",
                model=model,
                figure=100 * counts.turned_away / total,
                limit=100 * TURNED_AWAY,
                unit="%",
                evidence=(f"{facts.waiting(model)} requests wait",),
            )


def _overdue(facts: ClusterFacts) -> Iterator[Reason]:
    for pause in facts.desired.pauses:
        over_s = facts.now_s - (pause.expires_s or facts.now_s)
        if over_s > OVERDUE_S:
            yield Reason(
                "PauseHeldPastLease",
                f"The pause by operation {pause.operation} should have ended {over_s:.0f} s ago.",
                _resume(pause),
                figure=over_s,
                limit=OVERDUE_S,
                unit="s",
                evidence=(
                    "The Coordinator ends leases, and answers."
                    if facts.coordinator_reachable
                    else "The Coordinator ends leases, and does not answer.",
                ),
            )


def _resume(pause: ActivePause) -> str:
    scope = pause.scope
    words = [
        *(word for model in scope.models for word in ("--model", model)),
        *(word for board in scope.boards for word in ("--board", board)),
        *(("--adapter", scope.adapter) if scope.adapter is not None else ()),
    ]
    return shlex.join(("rkserve", "wake" if pause.level is not None else "resume", *words))


def _prefixes(facts: ClusterFacts) -> Iterator[Reason]:
    for model in facts.models:
        counts = facts.window(model, LONG)
        if counts.expected >= FEWEST_TOKENS and counts.found < FOUND * counts.expected:
            yield Reason(
                "PrefixExpectedNotFound",
                f"Boards had {counts.found / counts.expected:.0%} of the prompt tokens in their KV "
                "caches that the Router expected there; requests go to boards that do not help "
                "them.",
                "rkserve caches",
                model=model,
                figure=100 * counts.found / counts.expected,
                limit=100 * FOUND,
                unit="%",
                evidence=(
                    f"{counts.found} of {counts.expected} expected tokens in the last {LONG}",
                ),
            )


def _fallback(facts: ClusterFacts) -> Iterator[Reason]:
    by_ray, total = facts.streams.get("ray", 0), sum(facts.streams.values())
    if facts.has_channel and total >= FEWEST and by_ray > FALLBACK * total:
        yield Reason(
            "ChannelFallback",
            f"{by_ray} of {total} answers of the last {SHORT} came through Ray instead of the "
            "channel, which costs the Router more time for each token.",
            "# open channel.ports of the boards to the Routers' nodes; see the boards' logs",
            figure=100 * by_ray / total,
            limit=100 * FALLBACK,
            unit="%",
            evidence=tuple(
                f"{one.id} is {one.report.state.value}"
                for one in facts.boards
                if one.report.state is not BoardState.READY
            )[:5],
        )


def _increase(metric: str, window: str, labels: str, by: str, where: str = "") -> str:
    """Return the increase of a counter of Routers, summed by labels.

    ``labels`` are all that the counter has. Several scrapes of one Router count once.
    """
    inner = f"max by (router, {labels}) (increase({metric}{where}[{window}]))"
    return f"sum by ({by}) ({inner})"


def _judged(window: str, where: str = "") -> str:
    metric = "rkserve_judged_requests_total"
    return _increase(metric, window, "model, outcome", "model", where)


def _bad(window: str) -> str:
    return f"{_judged(window, NOT_GOOD)} / {_judged(window)}"


def _prefix_tokens(what: str) -> str:
    where = f'{{what="{what}"}}'
    return _increase("rkserve_prefix_tokens_total", LONG, "model, what", "model", where)


def _burns(pairs: tuple[tuple[str, str, float], ...]) -> str:
    return " or ".join(
        f"({_bad(short)} > {speed * BUDGET:g} and {_bad(long)} > {speed * BUDGET:g} "
        f"and {_judged(short)} >= {FEWEST})"
        for short, long, speed in pairs
    )


def _quantile(metric: str, window: str, limit: str) -> str:
    buckets = _increase(f"{metric}_bucket", window, "le, model", "le, model")
    count = _increase(f"{metric}_count", window, "model", "model")
    return f"histogram_quantile({P95}, {buckets}) > {limit} and {count} >= {FEWEST}"


# 1 where a board of the model is ready and not drained. A board of an earlier version has no series
# about drains.
SERVING = (
    'max by (model) (max by (board, model) (rkserve_board_state{state="ready"}) '
    "unless on (board, model) max by (board, model) (rkserve_board_drained) == 1) "
    'or max by (model) (rkserve_board_state{state="ready"}) * 0'
)
MODEL_WITHOUT_BOARDS = ClusterRule(
    "ModelWithoutBoards",
    Gravity.CRITICAL,
    _unserved,
    PrometheusAlert(
        f'({SERVING}) == 0 unless max by (model) (rkserve_board_state{{state="asleep"}}) == 1',
        60,
        "No board serves {{ $labels.model }}.",
    ),
    stops=True,
)
COORDINATOR_DOWN = ClusterRule(
    "CoordinatorDown",
    Gravity.CRITICAL,
    _coordinator,
    PrometheusAlert(
        "min(rkserve_coordinator_reachable) == 0",
        60,
        "A Router does not reach the Coordinator: nothing can be changed.",
    ),
)
BUDGET_FAST = ClusterRule(
    "ErrorBudgetFast",
    Gravity.CRITICAL,
    _budget("ErrorBudgetFast", FAST),
    PrometheusAlert(
        _burns(FAST),
        0,
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} failed or were "
        "late.",
    ),
)
BUDGET_SLOW = ClusterRule(
    "ErrorBudgetSlow",
    Gravity.WARNING,
    _budget("ErrorBudgetSlow", SLOW),
    PrometheusAlert(
        _burns(SLOW),
        300,
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} failed or were "
        "late in six hours.",
    ),
    explained_by=("ErrorBudgetFast",),
)
TURNED_AWAY_RULE = ClusterRule(
    "TurnedAway",
    Gravity.WARNING,
    _turned_away,
    PrometheusAlert(
        f"{_increase('rkserve_turned_away_total', SHORT, 'model, reason', 'model')} "
        f"> {TURNED_AWAY} * "
        f"({_judged(SHORT)} >= {FEWEST})",
        60,
        "{{ $value | humanize }} requests to {{ $labels.model }} got no place at a board.",
    ),
)
QUEUE_WAIT_P95 = ClusterRule(
    "QueueWaitP95",
    Gravity.WARNING,
    _queue_wait,
    PrometheusAlert(
        _quantile("rkserve_queue_wait_seconds", SHORT, "$queue_wait_s"),
        120,
        "One request in twenty to {{ $labels.model }} waits {{ $value | humanizeDuration }}.",
    ),
)
TTFT_P95 = ClusterRule(
    "TtftP95",
    Gravity.WARNING,
    _ttft,
    PrometheusAlert(
        _quantile("rkserve_ttft_seconds", LONG, "$ttft_s"),
        120,
        "The first token of one request in twenty to {{ $labels.model }} takes "
        "{{ $value | humanizeDuration }}.",
    ),
)
PAUSE_OVERDUE = ClusterRule(
    "PauseHeldPastLease",
    Gravity.WARNING,
    _overdue,
    PrometheusAlert(
        f"max(rkserve_pause_overdue_seconds) > {OVERDUE_S:g}",
        0,
        "A pause should have ended {{ $value | humanizeDuration }} ago.",
    ),
)
PREFIX_NOT_FOUND = ClusterRule(
    "PrefixExpectedNotFound",
    Gravity.WARNING,
    _prefixes,
    PrometheusAlert(
        f"{_prefix_tokens('found')} < {FOUND} * ({_prefix_tokens('expected')} >= {FEWEST_TOKENS})",
        300,
        "Boards have few of the prompt tokens of {{ $labels.model }} that Routers expect there.",
    ),
)
CHANNEL_FALLBACK = ClusterRule(
    "ChannelFallback",
    Gravity.WARNING,
    _fallback,
    PrometheusAlert(
        'sum(max by (router) (increase(rkserve_token_streams_total{path="ray"}[5m]))) '
        f"> {FALLBACK} * (sum(max by (router, path) (increase(rkserve_token_streams_total[5m]))) "
        f">= {FEWEST}) and max(rkserve_channel_enabled) == 1",
        120,
        "{{ $value | humanize }} answers came through Ray instead of the channel in five minutes.",
    ),
)
ROUTER_SILENT = ClusterRule(
    "RouterSilent",
    Gravity.WARNING,
    _routers,
    PrometheusAlert(
        "min by (router) (rkserve_router_up) == 0",
        60,
        "Router {{ $labels.router }} does not answer the others.",
    ),
)
