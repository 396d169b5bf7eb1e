"""What boards said of themselves, as one Router keeps it: who is there, may be chosen, how fast.

It knows reports, candidates and what the cluster shall be; it asks nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from rkserve.deployments.seats import Seat
from rkserve.desired import Desired, PauseMode, SleepLevel
from rkserve.errors import BoardStartFailed
from rkserve.messages import BoardReport, BoardState
from rkserve.routing.least_load import Candidate, Held
from rkserve.routing.rates import Counted, Rate, Rates

# A board that recovers or loads keeps its queue and serves within a model load; one that sleeps
# says itself whether it takes a request that waits.
_USABLE = (BoardState.READY, BoardState.RECOVERING, BoardState.ASLEEP, BoardState.LOADING)
SILENT = "the board's replica does not answer"
FORGET_AFTER = 30  # reports that a silent board may miss before it is no longer listed

_BoardKey = tuple[str, str]  # group and board id
_HELD = {PauseMode.KEEP: Held.QUEUES, PauseMode.WAIT: Held.REFUSES, PauseMode.ABORT: Held.REFUSES}


class Listing:
    """The boards of an application. ``groups`` maps a group's name to its model."""

    def __init__(self, groups: Mapping[str, str]) -> None:
        self._groups = groups
        self._desired = Desired()
        self._reports: dict[_BoardKey, BoardReport] = {}
        self._missed: dict[_BoardKey, int] = {}
        self._rates: dict[_BoardKey, Rates] = {}
        self.candidates: dict[str, dict[str, Candidate]] = {group: {} for group in groups}

    def reports(self, model: str | None = None) -> list[BoardReport]:
        """Latest reports, sorted by board; one whose replica vanished says so."""
        found = (r for r in self._reports.values() if model is None or r.model == model)
        return sorted(found, key=lambda report: report.board_id)

    def rates(self) -> dict[str, Rate]:
        """How fast the boards work now, by board."""
        return {board: rates.now() for (_, board), rates in self._rates.items()}

    def seats(self, model: str | None = None) -> list[Seat]:
        """Return the boards that have a replica, also those that fell silent a moment ago."""
        return [
            Seat(
                group,
                report.replica,
                report.board_id,
                report.model,
                report.state is BoardState.LOST,
            )
            for (group, _), report in sorted(self._reports.items())
            if report.replica and (model is None or report.model == model)
        ]

    def obey(self, desired: Desired) -> None:
        """Choose boards by what they shall be from now on."""
        self._desired = desired
        for (group, _), report in self._reports.items():
            candidate = self.candidates[group].get(report.replica)
            if candidate is not None:
                candidate.held = self._held(report)
                if self._unloads(report):
                    candidate.last_prompt = ()  # the KV cache has gone with the engine

    def is_awake(self, model: str) -> bool:
        """Whether a board could start a request now, or sleeps as it shall.

        Who puts one model to sleep does not mean to take the Router from the others.
        """
        return any(
            report.state is BoardState.READY
            or (report.state is BoardState.ASLEEP and self._unloads(report))
            for report in self.reports(model)
        )

    def forget_prompts(self, meant: Callable[[str, str], bool]) -> None:
        """Forget what boards hold of their last prompts; ``meant`` takes board and model."""
        for (group, board), report in self._reports.items():
            candidate = self.candidates[group].get(report.replica)
            if candidate is not None and meant(board, report.model):
                candidate.last_prompt = ()

    def update(self, group: str, reports: list[BoardReport]) -> None:
        """Take over what the boards of a group report; those that did not are listed as lost."""
        candidates = self.candidates[group]
        usable = {r.replica for r in reports if r.state is BoardState.READY}
        usable = usable or {r.replica for r in reports if r.state in _USABLE}
        for report in reports:
            candidate = candidates.setdefault(report.replica, Candidate(report.replica, 0))
            candidate.capacity = report.queue_limit + report.n_batch
            candidate.ready = report.replica in usable
            candidate.loaded = report.state is BoardState.READY
            candidate.held = self._held(report)
            candidate.heard(report.running + report.queued)
            self._hear((group, report.board_id), report)
        heard = {report.replica for report in reports}
        for replica in candidates.keys() - heard:
            candidates[replica].ready = False
            if candidates[replica].unused:
                del candidates[replica]
        self._age(group, {report.board_id for report in reports})

    def note_failure(self, group: str, failure: BoardStartFailed) -> None:
        """List a board that cannot start; it has no replica to report."""
        key = (group, failure.board_id)
        known = self._reports.get(key)
        if known is not None and known.state not in (BoardState.LOST, BoardState.FAILED):
            return  # it has started since
        self._missed[key] = 0
        self._reports[key] = BoardReport(
            board_id=failure.board_id,
            model=self._groups[group],
            state=BoardState.FAILED,
            reason=failure.reason,
        )

    def _unloads(self, report: BoardReport) -> bool:
        level = self._desired.duty(report.board_id, report.model).level
        return level is not None and level > SleepLevel.PAUSED

    def _held(self, report: BoardReport) -> Held:
        hold = self._desired.duty(report.board_id, report.model).hold
        return Held.NOT if hold is None else _HELD[hold.mode]

    def _hear(self, key: _BoardKey, report: BoardReport) -> None:
        self._reports[key] = report
        self._missed[key] = 0
        counted = (report.replica, report.prefill_tokens, report.decode_tokens)
        self._rates.setdefault(key, Rates()).heard(Counted(time.monotonic(), *counted))

    def _age(self, group: str, heard: set[str]) -> None:
        """Keep a board that fell silent listed for a while, as what it is."""
        for key, report in list(self._reports.items()):
            if key[0] != group or key[1] in heard:
                continue
            self._missed[key] += 1
            self._rates.pop(key, None)
            if report.state is not BoardState.FAILED:
                self._reports[key] = replace(report, state=BoardState.LOST, reason=SILENT)
            if self._missed[key] > FORGET_AFTER:
                del self._reports[key], self._missed[key]
