"""The cluster as one Router sees it: facts from reports, traffic from its metrics, peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rkserve.config.router import ObjectivesConfig, RouterConfig
from rkserve.core.board_report import BoardReport, BoardState, Hardware
from rkserve.core.desired_state import Desired
from rkserve.core.errors import BoardFailed, BoardNotFound, EngineDied, EnginePaused
from rkserve.core.messages import Delta
from rkserve.router.features.cluster_view import (
    AT_WORK_S,
    REMEMBERED_S,
    ViewPeers,
    expectation,
    phase_of,
    totals,
)
from rkserve.verdicts.facts import (
    RequestPhase,
    RequestView,
    RouterView,
)
from rkserve.verdicts.history import EVERY_S
from rkserve.verdicts.rules import VerdictOutcome
from tests.support.boards.fake_boards import FakeBoards, accepted, eventually, report
from tests.support.boards.own_time import SetClock, run_loop
from tests.support.http.router_house import CHAT, House, chat, house, scripted
from tests.support.values.cluster_facts import HEALTHY, pause, traffic

NOW_S = 1_800_000_000.0
MODEL = "sim-chat"


class Viewed:
    """A Router's view with a clock of its own."""

    def __init__(self, viewers: ViewPeers | None = None) -> None:
        self.clock = SetClock(NOW_S)
        self.house = House(FakeBoards([]), viewers=viewers, clock=self.clock)
        self.view = self.house.view
        self.news = 0
        self.view.changed.append(self._count)

    def _count(self) -> None:
        self.news += 1

    def report(self, *reports: BoardReport, after_s: float = 0.0) -> None:
        """Have the boards report so, some time later."""
        self.clock.now_s += after_s
        self.house.boards.reported = list(reports)
        run_loop(self.house.service.fleet.refresh())


def test_a_state_has_the_time_since_which_a_board_has_it() -> None:
    of = Viewed()
    of.report(report("a"))
    of.report(report("a", state=BoardState.RECOVERING), after_s=7)
    of.report(report("a", state=BoardState.RECOVERING), after_s=5)
    (board,) = of.view.facts().boards
    assert (board.report.state, board.state_since_s) == (BoardState.RECOVERING, NOW_S + 7)


def test_readers_are_notified_when_a_state_changes_and_not_at_each_report() -> None:
    of = Viewed()
    of.report(report("a"))
    assert of.news == 1
    of.report(report("a", running=1), after_s=1)
    assert of.news == 1
    of.report(report("a", state=BoardState.HUNG), after_s=1)
    assert of.news == 2
    of.house.service.fleet.obey(Desired(epoch=3))
    assert of.news == 3
    assert of.view.facts().epoch_since_s == of.clock.now_s


def test_boards_are_sorted_by_the_numbers_in_their_names() -> None:
    of = Viewed()
    of.report(*(report(name) for name in ("sim-10", "rock/1", "sim-2", "sim-1", "sim-02")))
    found = [one.id for one in of.view.facts().boards]
    assert found == ["rock/1", "sim-1", "sim-02", "sim-2", "sim-10"]


def test_readings_at_work_are_those_after_some_seconds_of_it_and_count_for_minutes() -> None:
    def seen() -> Hardware | None:
        return of.view.facts().boards[0].at_work

    at_work, idle = Hardware(ddr_hz=528_000_000), Hardware(ddr_hz=324_000_000)
    of = Viewed()
    of.report(report("a", running=1, hardware=idle))
    assert seen() is None
    of.report(report("a", running=2, hardware=at_work), after_s=6)
    assert seen() == at_work
    of.report(report("a", hardware=idle), after_s=1)
    of.report(report("a", running=1, hardware=idle), after_s=1)
    assert seen() == at_work
    of.report(report("a", hardware=idle), after_s=AT_WORK_S)
    assert seen() is None


def test_a_slow_clock_stays_a_reason_between_two_requests_until_it_is_raised() -> None:
    slow = Hardware(ddr_hz=528_000_000, ddr_max_hz=2_112_000_000)
    of = Viewed()

    def rules(running: int, hardware: Hardware, after_s: float = 1) -> list[str]:
        of.report(report("a", running=running, hardware=hardware), after_s=after_s)
        found = of.view.verdict()[1].reasons
        return [one.rule for one in found if one.rule != "CoordinatorDown"]

    assert rules(1, slow) == []
    assert rules(1, slow, after_s=6) == ["DdrBelowMax"]
    assert rules(0, slow) == ["DdrBelowMax"]
    assert rules(0, replace(slow, ddr_hz=2_112_000_000)) == []


def test_a_board_that_is_listed_no_more_counts_as_lost_for_half_an_hour() -> None:
    of = Viewed()
    both = (report("a"), report("b"))
    of.report(*both)
    for _ in range(32):  # after which the Router lists it no more
        of.report(report("a"), after_s=1)
    of.view.sample()
    of.house.cluster.reachable = True
    assert [one.board_id for one in of.house.service.fleet.reports()] == ["a"]
    facts, verdict = of.view.verdict()
    assert [one.report.state.value for one in facts.boards] == ["ready", "lost"]
    assert [one.rule for one in verdict.reasons] == ["BoardLost"]
    of.report(report("a"), after_s=REMEMBERED_S)
    of.view.sample()
    assert [one.id for one in of.view.facts().boards] == ["a"]
    assert [*of.view.histories] == ["a"]


def test_a_lost_board_that_comes_back_is_ready_at_once() -> None:
    of = Viewed()
    of.report(report("a"), report("b"))
    of.report(report("a"), after_s=1)
    assert of.view.facts().boards[1].report.state is BoardState.LOST
    of.report(report("a"), report("b", replica="another"), after_s=1)
    assert of.view.facts().boards[1].report.state is BoardState.READY


def test_each_sample_has_the_figures_of_the_time_and_none_of_a_lost_board() -> None:
    of = Viewed()
    of.report(report("a", running=2, hardware=HEALTHY))
    of.view.sample()
    of.report(after_s=EVERY_S)
    of.view.sample()
    history = of.view.history("a")
    assert history.column(3) == [2, None]
    assert [(state.value, count) for state, count in history.spans()] == [("ready", 1), ("lost", 1)]
    assert of.view.tick == 2
    with pytest.raises(BoardNotFound):
        of.view.history("b")


def test_a_board_without_a_sample_has_an_empty_history() -> None:
    of = Viewed()
    of.report(report("a"))
    assert of.view.history("a").column(0) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, 16.69, id="a published model"),
        pytest.param({"model": "unknown", "own_bytes": 0}, None, id="of neither name nor size"),
        pytest.param({"platform": "simulated"}, None, id="a simulated board"),
        pytest.param({"n_batch": 4}, None, id="batches"),
        pytest.param({"hardware": None}, None, id="no reading yet"),
    ],
)
def test_the_expected_speed_is_that_of_the_soc_and_the_model(
    changes: dict[str, Any], expected: float | None
) -> None:
    known: dict[str, Any] = {"model": "Qwen2.5-1.5B-w8a8", "hardware": HEALTHY}
    found = expectation(report("a", **{**known, **changes}))
    assert (None if found is None else found.decode_tokens_per_s) == expected


# -- traffic --------------------------------------------------------------------------------------


def judged(of: House) -> dict[str, float]:
    """How many calls were answered how."""
    outcomes = ("good", "late", "failed")
    found = {
        name: of.metric("rkserve_judged_requests_total", model=MODEL, outcome=name)
        for name in outcomes
    }
    return {name: value for name, value in found.items() if value}


STRICT = RouterConfig(objectives=ObjectivesConfig(ttft_s=1e-9))


@pytest.mark.parametrize(
    ("make", "extra", "expected"),
    [
        pytest.param(house, {}, {"good": 1}, id="in order"),
        pytest.param(house, {"stream": True}, {"good": 1}, id="in order, as a stream"),
        pytest.param(
            lambda: House(FakeBoards.answering("a"), STRICT), {}, {"late": 1}, id="too late"
        ),
        pytest.param(
            lambda: House(FakeBoards.answering("a"), STRICT),
            {"stream": True},
            {"late": 1},
            id="too late, as a stream",
        ),
        pytest.param(
            lambda: scripted(BoardFailed("a", "it burns")), {}, {"failed": 1}, id="no board"
        ),
        pytest.param(
            lambda: scripted(
                accepted("a"), Delta("x", (1,)), EngineDied("a", "signal 11"), max_continuations=0
            ),
            {},
            {"failed": 1},
            id="an answer without its end",
        ),
        pytest.param(
            lambda: scripted(EnginePaused("the cluster", 7)), {}, {}, id="paused by the operator"
        ),
        pytest.param(house, {"max_tokens": -1}, {}, id="a wrong request"),
        pytest.param(house, {"model": "other"}, {}, id="an unknown model"),
    ],
)
def test_a_call_is_judged(
    make: Callable[[], House], extra: dict[str, Any], expected: dict[str, float]
) -> None:
    of = make()
    run_loop(of("POST", CHAT, json=chat(**extra)))
    assert judged(of) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(RouterConfig(), {}, id="in time"),
        pytest.param(STRICT, {"late": 1}, id="after the target"),
    ],
)
def test_a_client_that_leaves_counts_only_if_it_has_waited_too_long(
    config: RouterConfig, expected: dict[str, float]
) -> None:
    async def leave() -> House:
        of = House(FakeBoards([report("a")], {"replica of a": [[accepted("a"), asyncio.Event()]]}))
        of.service.config = config
        asked = asyncio.create_task(of("POST", CHAT, json=chat()))
        await eventually(lambda: of.boards.running)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await eventually(lambda: not of.boards.running)
        return of

    assert judged(run_loop(leave())) == expected


def test_the_counts_of_the_metrics_are_those_of_the_windows() -> None:
    of = house()

    async def ask(times: int) -> None:
        for _ in range(times):
            await of("POST", CHAT, json=chat())

    run_loop(ask(2))
    of.view.sample()
    counts = totals(of.service.metrics)[MODEL]
    assert (counts.good, sum(counts.ttft), sum(counts.queue_wait)) == (2, 2, 2)
    assert counts.expected <= counts.found + 100
    # Within any window since this Router's start.
    assert of.view.facts().window(MODEL, "5m") == counts
    assert of.view.facts().window(MODEL, "3d") == counts


def test_requests_in_flight_have_their_phase_board_and_key() -> None:
    async def look() -> list[RequestView]:
        of = House(
            FakeBoards(
                [report("a")],
                {"replica of a": [[accepted("a"), Delta("x", (1,)), asyncio.Event()]]},
            )
        )
        asked = [asyncio.create_task(of("POST", CHAT, json=chat())) for _ in range(2)]
        await eventually(lambda: len(of.service.unassigned.known) == len(asked))
        await eventually(
            lambda: any(one.progress.begun for one in of.service.unassigned.known.values())
        )
        found = list(of.view.facts().requests)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return found

    found = {one.phase: one for one in run_loop(look())}
    running = found[RequestPhase.DECODE]
    assert (running.board, running.model, running.failovers) == ("a", MODEL, 0)
    assert running.id.startswith("chatcmpl-")
    assert "/" not in running.id
    assert found[RequestPhase.QUEUED].board == ""


@dataclass
class _Progress:
    rests: object | None = None
    accepted: bool = False
    begun: bool = False


@dataclass
class _Location:
    progress: _Progress
    replica: str | None = None
    paused: object | None = None


@pytest.mark.parametrize(
    ("location", "phase"),
    [
        (_Location(_Progress()), RequestPhase.QUEUED),
        (_Location(_Progress(accepted=True, begun=True)), RequestPhase.MOVING),
        (_Location(_Progress(accepted=True), "r"), RequestPhase.PREFILL),
        (_Location(_Progress(accepted=True, begun=True), "r"), RequestPhase.DECODE),
        (_Location(_Progress(rests=object(), begun=True), "r"), RequestPhase.PAUSED),
        (_Location(_Progress(begun=True), "r", paused=(1.0, None)), RequestPhase.PAUSED),
    ],
)
def test_the_phase_of_a_request(location: Any, phase: RequestPhase) -> None:
    assert phase_of(location) is phase


# -- the other Routers ----------------------------------------------------------------------------

OTHER = RouterView(
    "1",
    {MODEL: {"5m": traffic(30)}},
    {"ray": 7},
    (RequestView("chatcmpl-9", RequestPhase.QUEUED, NOW_S, MODEL),),
)


@dataclass
class Peers:
    """The other Routers."""

    views_: Sequence[RouterView] = (OTHER,)
    silent: Sequence[str] = ()
    asked: int = 0

    async def views(self, timeout_s: float) -> tuple[Sequence[RouterView], Sequence[str]]:
        assert timeout_s > 0
        self.asked += 1
        await asyncio.sleep(0.01)
        return self.views_, self.silent


def test_the_shares_of_other_routers_are_added_to_the_own_one() -> None:
    of = Viewed(Peers(silent=("2",)))
    of.report(report("a"))
    run_loop(of.view.look())
    of.house.cluster.reachable = True
    facts = of.view.facts()
    assert (facts.routers_up, facts.routers_silent) == (("0", "1"), ("2",))
    assert facts.window(MODEL, "5m").good == 30
    assert facts.streams == {"channel": 0, "ray": 7}
    assert facts.waiting(MODEL) == 1
    assert facts.window(MODEL, "1h").judged == 0
    (only,) = of.view.verdict()[1].reasons
    assert (only.rule, only.evidence) == ("RouterSilent", ("Router 2",))


def test_readers_who_come_together_share_one_question_to_the_other_routers() -> None:
    peers = Peers()
    of = Viewed(peers)

    async def look() -> None:
        await asyncio.gather(*(of.view.look() for _ in range(5)))
        await asyncio.sleep(EVERY_S)
        await of.view.look()

    run_loop(look())
    assert peers.asked == 2


def test_the_router_exports_what_alerts_need_of_control() -> None:
    of = Viewed()
    assert of.house.metric("rkserve_coordinator_reachable") == 0
    assert of.house.metric("rkserve_pause_overdue_seconds") == 0
    assert of.house.metric("rkserve_channel_enabled") == 1
    ended = pause(expires_s=NOW_S - 30)
    of.house.service.fleet.obey(Desired(2, (ended, replace(ended, expires_s=None))))
    assert of.house.metric("rkserve_pause_overdue_seconds") == 30


def test_a_cluster_without_its_coordinator_is_degraded() -> None:
    of = Viewed()
    of.report(report("a", hardware=Hardware()))
    facts, verdict = of.view.verdict()
    assert not facts.coordinator_reachable
    assert verdict.outcome is VerdictOutcome.DEGRADED
    assert [one.rule for one in verdict.reasons] == ["CoordinatorDown"]


def test_a_sample_that_fails_does_not_end_the_others() -> None:
    of = Viewed()
    failing = [True, False]

    async def prepare() -> None:
        if failing.pop(0):
            raise RuntimeError("once")

    async def follow() -> None:
        task = asyncio.create_task(of.view.follow(prepare))
        await asyncio.sleep(2.5 * EVERY_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_loop(follow())
    assert of.view.tick == 1
