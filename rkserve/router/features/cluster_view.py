"""The cluster as one Router sees it: facts, verdict and histories, sampled every five seconds.

The share of the other Routers in the facts (traffic, requests in flight) is asked for only while
there is a reader.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol

from rkserve.core.board_report import BoardReport, BoardState, Hardware
from rkserve.core.errors import BoardNotFound
from rkserve.core.metrics import (
    TTFT_BUCKETS_S,
    WAIT_BUCKETS_S,
    ControlCollector,
    RouterMetrics,
    buckets_by_model,
    counts_by_model,
)
from rkserve.doctor.known import ExpectedSpeed, expected_speed
from rkserve.fleet.board_table import SILENT
from rkserve.fleet.measurements import Rate
from rkserve.router.dispatch.failover import RequestLocation
from rkserve.router.service import Service
from rkserve.verdicts.facts import (
    NO_TRAFFIC,
    WINDOWS,
    BoardView,
    ClusterFacts,
    RequestPhase,
    RequestView,
    RouterView,
    TrafficCounts,
)
from rkserve.verdicts.history import (
    EVERY_S,
    FIGURES,
    BoardHistory,
    CountHistory,
    figures_of,
)
from rkserve.verdicts.rules import ClusterVerdict, judge

log = logging.getLogger(__name__)

PEERS_S = 2.0  # a reader must not wait longer for a Router that does not answer
FRESH_S = EVERY_S / 2  # readers within this time share the answers of the other Routers
BUSY_S = 5.0  # a governor that follows the load has raised its clock by then
AT_WORK_S = 300.0  # readings at work count for so long after it: requests come and go
REMEMBERED_S = 1800.0  # a board that is listed no more counts as lost for as long as its history
STREAMS = ("channel", "ray")
NO_STREAMS = array("Q", (0, 0))
_expected = cache(expected_speed)  # of a model's name and size, which do not change

StreamCounts = Callable[[], tuple[Mapping[str, int], int]]


class ViewPeers(Protocol):
    """The other Routers of one application."""

    async def views(self, timeout_s: float) -> tuple[Sequence[RouterView], Sequence[str]]:
        """Return the shares of those that answered in time, and the names of the silent ones."""


class _Since:
    """A board's latest report, the time since which it has its state, and that since which it has
    worked. ``at_work`` are its latest readings at work, with their time.
    """

    __slots__ = ("at_work", "busy_s", "circuit", "report", "state_s")

    def __init__(self, report: BoardReport, circuit: str, now_s: float) -> None:
        self.report, self.circuit, self.state_s = report, circuit, now_s
        self.busy_s: float | None = None
        self.at_work: tuple[float, Hardware] | None = None

    def look(self, report: BoardReport, circuit: str, now_s: float) -> bool:
        """Take over a report; return whether the state has changed."""
        busy = report.running > 0 and report.state is BoardState.READY
        self.busy_s = (self.busy_s if self.busy_s is not None else now_s) if busy else None
        settled = self.busy_s is not None and now_s - self.busy_s >= BUSY_S
        if settled and report.hardware is not None:
            self.at_work = (now_s, report.hardware)
        before, self.report = (self.report.state, self.circuit), report
        self.circuit = circuit
        if report.state is not before[0]:
            self.state_s = now_s
        return (report.state, circuit) != before

    def worked(self, now_s: float) -> Hardware | None:
        """Return the latest readings at work, while they count."""
        if self.at_work is None or now_s - self.at_work[0] > AT_WORK_S:
            return None
        return self.at_work[1]


class ClusterView:
    """The view of one Router. Use from one event loop.

    ``changed`` are called when a board's state or the desired state changes, and after each sample.
    """

    def __init__(
        self,
        service: Service,
        router: str = "0",
        peers: ViewPeers | None = None,
        *,
        streams: StreamCounts = lambda: ({}, 0),
        has_channel: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``router`` is this Router's name. ``streams`` returns the token streams by path, and
        ``clock`` the time in seconds since 1970.
        """
        self.router = router
        self.tick = 0
        self.histories: dict[str, BoardHistory] = {}
        self.sampled_s = clock()
        self.changed: list[Callable[[], None]] = []
        self._service, self._peers = service, peers
        self._streams, self._has_channel = streams, has_channel
        self._clock = clock
        self._offset_s = clock() - time.monotonic()  # once: a time that varies would be news
        self._since: dict[str, _Since] = {}
        self._epoch = (-1, clock())
        self._traffic, self._stream_counts = CountHistory(), CountHistory()
        self._others: Sequence[RouterView] = ()
        self._silent: Sequence[str] = ()
        self._asked_s = float("-inf")
        self._asking = asyncio.Lock()
        service.fleet.changed.append(self._observe)
        service.registry.register(ControlCollector(self._control))

    # -- sampling -----------------------------------------------------------------------------

    async def follow(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Take a sample every ``EVERY_S``, forever, after what ``prepare`` does for it."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await prepare()
                self.sample()
            except Exception:
                log.exception("the cluster could not be sampled; trying again")

    def sample(self) -> None:
        """Take a sample of all boards and of this Router's counters."""
        now_s = time.monotonic()
        metrics = self._service.metrics
        self._traffic.add(now_s, {name: one.packed() for name, one in totals(metrics).items()})
        counts, _ = self._streams()
        self._stream_counts.add(now_s, {"": array("Q", (counts.get(one, 0) for one in STREAMS))})
        self._observe()
        for report in self._reports():
            self.histories.setdefault(report.board_id, BoardHistory()).decoded(report)
        for board in self._boards():
            lost = board.report.state is BoardState.LOST
            figures = [None] * len(FIGURES) if lost else figures_of(board)
            self.histories[board.id].add(board.report.state, figures)
        for gone in self.histories.keys() - self._since.keys():
            del self.histories[gone]
        self.sampled_s = self._clock()
        self.tick += 1
        self._notify()

    def _observe(self) -> None:
        """Look at the reports that have come; called at each of them, once a second."""
        now_s, changed = self._clock(), False
        epoch = self._service.fleet.desired.epoch
        if epoch != self._epoch[0]:
            self._epoch, changed = (epoch, now_s), True
        reports = {report.board_id: report for report in self._service.fleet.reports()}
        for board_id, report in reports.items():
            circuit = self._service.dispatch.circuit(report.replica)[0].value
            known = self._since.get(board_id)
            if known is None:
                known = self._since[board_id] = _Since(report, circuit, now_s)
                changed = True
            changed = known.look(report, circuit, now_s) or changed
        for gone in self._since.keys() - reports.keys():
            changed = self._miss(gone, now_s) or changed
        if changed:
            self._notify()

    def _miss(self, board_id: str, now_s: float) -> bool:
        """Keep a board as lost that its Router lists no more; return whether that is news.

        It may have been removed on purpose, or be the one that the operator looks for.
        """
        known = self._since[board_id]
        if now_s - known.state_s > REMEMBERED_S and known.report.state is BoardState.LOST:
            del self._since[board_id]
            return True
        lost = replace(known.report, state=BoardState.LOST, reason=known.report.reason or SILENT)
        return known.look(lost, "closed", now_s)

    def _reports(self) -> list[BoardReport]:
        """Return the latest reports, by the boards' names; numbers in them by their values."""
        return [self._since[board_id].report for board_id in sorted(self._since, key=by_number)]

    def _notify(self) -> None:
        for notify in self.changed:
            notify()

    async def look(self) -> None:
        """Ask the other Routers for their share, unless that was just done."""
        if self._peers is None:
            return
        async with self._asking:
            if time.monotonic() - self._asked_s < FRESH_S:
                return
            self._others, self._silent = await self._peers.views(PEERS_S)
            self._asked_s = time.monotonic()

    # -- looking ------------------------------------------------------------------------------

    def facts(self) -> ClusterFacts:
        """Return the facts of now, with the other Routers' share as last asked."""
        service, own = self._service, self.own()
        cluster = service.cluster
        views = (own, *self._others)
        return ClusterFacts(
            self._clock(),
            tuple(service.fleet.models),
            tuple(self._boards()),
            service.fleet.desired,
            self._epoch[1],
            service.config.objectives,
            traffic={model: dict(_together(views, model)) for model in service.fleet.models},
            ttft_bounds_s=TTFT_BUCKETS_S,
            wait_bounds_s=WAIT_BUCKETS_S,
            streams={path: sum(one.streams.get(path, 0) for one in views) for path in STREAMS},
            has_channel=self._has_channel,
            coordinator_reachable=cluster.reachable,
            coordinator_silent_s=cluster.heard_s_ago,
            routers_up=tuple(one.router for one in views),
            routers_silent=tuple(self._silent),
            requests=tuple(request for one in views for request in one.requests),
        )

    def own(self) -> RouterView:
        """Return this Router's share."""
        now_s, current = time.monotonic(), totals(self._service.metrics)
        traffic: dict[str, dict[str, TrafficCounts]] = {model: {} for model in current}
        for name, length_s in WINDOWS.items():
            before = self._traffic.before(now_s - length_s)
            for model, counts in current.items():
                earlier = before.get(model)
                since = NO_TRAFFIC if earlier is None else TrafficCounts.unpacked(earlier)
                traffic[model][name] = counts.minus(since)
        counts_now, _ = self._streams()
        earlier_streams = self._stream_counts.before(now_s - WINDOWS["5m"]).get("", NO_STREAMS)
        streams = {
            path: counts_now.get(path, 0) - then
            for path, then in zip(STREAMS, earlier_streams, strict=True)
        }
        return RouterView(self.router, traffic, streams, tuple(self._requests()))

    def verdict(self) -> tuple[ClusterFacts, ClusterVerdict]:
        """Return the facts of now, and the verdict by them."""
        facts = self.facts()
        return facts, judge(facts)

    def history(self, board_id: str) -> BoardHistory:
        """Return the history of a board. Raises ``BoardNotFound``."""
        if board_id not in self._since:
            raise BoardNotFound(board_id)
        return self.histories.get(board_id) or BoardHistory()

    def _control(self) -> tuple[bool, float, bool]:
        """Return the figures of ``ControlCollector``."""
        now_s = self._clock()
        ends = [pause.expires_s for pause in self._service.fleet.desired.pauses]
        overdue = [now_s - end for end in ends if end is not None]
        return self._service.cluster.reachable, max((0.0, *overdue)), self._has_channel

    def _boards(self) -> Iterator[BoardView]:
        fleet, dispatch, now_s = self._service.fleet, self._service.dispatch, self._clock()
        rates, desired = fleet.rates(), fleet.desired
        for report in self._reports():
            circuit, circuit_reason = dispatch.circuit(report.replica)
            rate = rates.get(report.board_id, Rate())
            since = self._since[report.board_id]
            history = self.histories.get(report.board_id)
            expected = expectation(report)
            yield BoardView(
                report,
                desired.target(report.board_id, report.model),
                state_since_s=since.state_s,
                circuit=circuit.value,
                circuit_reason=circuit_reason,
                prefill_tokens_per_s=rate.prefill_tokens_per_s,
                decode_tokens_per_s=rate.decode_tokens_per_s,
                speed_tokens_per_s=None if history is None else history.speed_tokens_per_s,
                at_work=since.worked(now_s),
                expected_tokens_per_s=None if expected is None else expected.decode_tokens_per_s,
                basis="" if expected is None else expected.basis,
            )

    def _requests(self) -> Iterator[RequestView]:
        boards = {one.replica: one.board_id for one in self._service.fleet.reports()}
        for location in self._service.unassigned.known.values():
            completion, _, choice = location.id.rpartition("/")
            terms = location.terms
            came_s = location.since_s if terms.came_s is None else terms.came_s
            yield RequestView(
                completion if choice == "0" else location.id,
                phase_of(location),
                came_s + self._offset_s,
                location.progress.asked.model,
                boards.get(location.replica or "", ""),
                location.progress.times,
                self._service.callers.name_of(terms.flow),
            )


def by_number(name: str) -> list[tuple[int, str]]:
    """Return the key by which ``sim-2`` is sorted before ``sim-10``."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), part) if part.isdecimal() else (0, part) for part in parts]


def phase_of(location: RequestLocation) -> RequestPhase:
    """Return the phase of a request in flight."""
    progress = location.progress
    if progress.rests is not None or location.paused is not None:
        return RequestPhase.PAUSED
    if location.replica is None:
        return RequestPhase.MOVING if progress.accepted else RequestPhase.QUEUED
    return RequestPhase.DECODE if progress.begun else RequestPhase.PREFILL


def expectation(report: BoardReport) -> ExpectedSpeed | None:
    """Return the speed that a board should reach; it is published for single generations."""
    hardware = report.hardware
    if hardware is None or report.n_batch != 1 or report.platform == "simulated":
        return None
    return _expected(hardware.soc, (report.model,), report.own_bytes)


def _together(views: Sequence[RouterView], model: str) -> Iterator[tuple[str, TrafficCounts]]:
    for name in WINDOWS:
        counts = NO_TRAFFIC
        for view in views:
            counts = counts.plus(view.traffic.get(model, {}).get(name, NO_TRAFFIC))
        yield name, counts


def totals(metrics: RouterMetrics) -> dict[str, TrafficCounts]:
    """Return the counts of a Router's traffic since its start, by model, from its metrics."""
    judged = counts_by_model(metrics.judged, "outcome")
    away = counts_by_model(metrics.turned_away)
    prefixes = counts_by_model(metrics.prefix_tokens, "what")
    ttft, waits = buckets_by_model(metrics.ttft), buckets_by_model(metrics.queue_wait)
    models = {model for model, _ in (*judged, *away, *prefixes)} | {*ttft, *waits}
    return {
        model: TrafficCounts(
            good=judged.get((model, "good"), 0),
            late=judged.get((model, "late"), 0),
            failed=judged.get((model, "failed"), 0),
            turned_away=away.get((model, ""), 0),
            expected=prefixes.get((model, "expected"), 0),
            found=prefixes.get((model, "found"), 0),
            ttft=ttft.get(model, ()),
            queue_wait=waits.get(model, ()),
        )
        for model in models
    }
