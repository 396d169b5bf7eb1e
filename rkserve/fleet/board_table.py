"""What boards said of themselves, as one Router keeps it: who is there, may be chosen, how fast.

It knows reports, candidates and what the cluster shall be; it asks nobody.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import Desired, Duty, PauseMode, SleepLevel
from rkserve.core.errors import BoardStartFailed
from rkserve.core.messages import GenerateRequest
from rkserve.fleet.load import BoardStatus, Candidate, ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import PrefixIndex
from rkserve.fleet.requests import RoutingRequest
from rkserve.fleet.speeds import Rate, Rates, TokenCounts, WorkCounters

# A board that recovers or loads keeps its queue and serves within a model load; one that sleeps
# says itself whether it takes a request that waits.
_USABLE = (BoardState.READY, BoardState.RECOVERING, BoardState.ASLEEP, BoardState.LOADING)
SILENT = "the board's replica does not answer"
FORGET_AFTER = 30  # reports that a silent board may miss before it is no longer listed

_BoardKey = tuple[str, str]  # group and board id
_HELD = {
    PauseMode.KEEP: PauseEffect.QUEUES,
    PauseMode.WAIT: PauseEffect.REFUSES,
    PauseMode.ABORT: PauseEffect.REFUSES,
}


@dataclass(frozen=True, slots=True)
class BoardAddress:
    """One board as it can be asked: its group's link, and its replica there.

    A ``silent`` one has missed its last report: waiting for it would cost the others' answers time.
    """

    group: str
    replica: str
    board_id: str
    model: str
    silent: bool = False


class BoardTable:
    """The boards of an application. ``groups`` maps a group's name to its model.

    ``boards`` are those that requests for one model may be sent to, by the model.
    """

    def __init__(
        self,
        groups: Mapping[str, str],
        rng: random.Random | None = None,
        files_per_board: int | None = None,
    ) -> None:
        """``files_per_board`` of None: nobody wants to know what boards hold."""
        self._groups = groups
        rng = rng or random.Random()
        self.boards = {
            model: ModelBoards(
                rng, None if files_per_board is None else PrefixIndex(files_per_board)
            )
            for model in dict.fromkeys(groups.values())
        }
        self._desired = Desired()
        self._reports: dict[_BoardKey, BoardReport] = {}
        self._missed: dict[_BoardKey, int] = {}
        self._rates: dict[_BoardKey, Rates] = {}

    @property
    def desired(self) -> Desired:
        """What the cluster shall be, as far as it was heard."""
        return self._desired

    def reports(self, model: str | None = None) -> list[BoardReport]:
        """Latest reports, sorted by board; one whose replica vanished says so."""
        found = (r for r in self._reports.values() if model is None or r.model == model)
        return sorted(found, key=lambda report: report.board_id)

    def rates(self) -> dict[str, Rate]:
        """How fast the boards work now, by board."""
        return {board: rates.now() for (_, board), rates in self._rates.items()}

    def seats(self, model: str | None = None) -> list[BoardAddress]:
        """Return the boards that have a replica, also those that fell silent a moment ago."""
        return [
            BoardAddress(
                group,
                report.replica,
                report.board_id,
                report.model,
                report.state is BoardState.LOST,
            )
            for (group, _), report in sorted(self._reports.items())
            if report.replica and (model is None or report.model == model)
        ]

    def ask(self, request: GenerateRequest, *, hashed: bool) -> RoutingRequest:
        """Return what a policy is asked for a request; see ``RoutingRequest.of``."""
        ref = request.adapter
        if ref is None and request.line is not None:
            # Boards choose the version. While one comes in board by board they differ, and then
            # this is a guess that a report puts right.
            line = self._desired.line(request.model, request.line)
            ref = None if line is None else line.serves("", request.session)
        return RoutingRequest.of(request, None if ref is None else ref.key, hashed=hashed)

    def candidate(self, group: str, replica: str) -> Candidate | None:
        """Return what is known of that replica."""
        return self.boards[self._groups[group]].get(replica)

    def has_board(self, group: str) -> bool:
        """Whether some board of that group has reported."""
        return bool(self._of(group))

    def asked(self, group: str) -> None:
        """The boards of a group are asked for their reports."""
        now_s = time.monotonic()
        for candidate in self._of(group):
            candidate.asked(now_s)

    def obey(self, desired: Desired) -> None:
        """Choose boards by what they shall be from now on.

        What they lose of their contexts by that is forgotten, whichever Router was asked for it.
        """
        before, self._desired = self._desired, desired
        now_s = time.monotonic()
        for (group, _), report in self._reports.items():
            boards = self.boards[self._groups[group]]
            candidate = boards.get(report.replica)
            if candidate is None:
                continue
            had = before.duty(report.board_id, report.model)
            duty = desired.duty(report.board_id, report.model)
            boards.hold(candidate, _held(duty))
            if had.base != duty.base:  # of other weights not even a file is of use
                boards.forget(candidate, now_s)
            elif _unloads(duty) or _clears(duty) - _clears(had):
                boards.forget(candidate, now_s, files=duty.level is SleepLevel.DROPPED)

    def is_awake(self, model: str) -> bool:
        """Whether a board could start a request now, or sleeps as it shall.

        Who puts one model to sleep does not mean to take the Router from the others.
        """
        return any(
            report.state is BoardState.READY
            or (report.state is BoardState.ASLEEP and _unloads(self._duty(report)))
            for report in self.reports(model)
        )

    def forget_prompts(self, meant: Callable[[str, str], bool], *, files: bool) -> None:
        """Forget what boards hold of contexts; ``meant`` takes board and model.

        Without ``files`` those stay that they have on their disks.
        """
        for (group, board), report in self._reports.items():
            candidate = self.candidate(group, report.replica)
            if candidate is not None and meant(board, report.model):
                boards = self.boards[report.model]
                boards.forget(candidate, time.monotonic(), files=files)

    def update(self, group: str, reports: list[BoardReport]) -> None:
        """Take over what the boards of a group report; those that did not are listed as lost."""
        now_s = time.monotonic()
        boards = self.boards[self._groups[group]]
        usable = {r.replica for r in reports if r.state is BoardState.READY}
        usable = usable or {r.replica for r in reports if r.state in _USABLE}
        for report in reports:
            standing = self._standing(report, ready=report.replica in usable)
            boards.heard(report.replica, group, report.board_id, standing)
            self._hear((group, report.board_id), report)
        heard = {report.replica for report in reports}
        for candidate in self._of(group):
            if candidate.key not in heard:
                boards.silent(candidate, now_s)
        self._age(group, {report.board_id for report in reports})

    def _of(self, group: str) -> list[Candidate]:
        return [one for one in self.boards[self._groups[group]] if one.group == group]

    def _standing(self, report: BoardReport, *, ready: bool) -> BoardStatus:
        return BoardStatus(
            ready=ready,
            loaded=report.state is BoardState.READY,
            held=_held(self._duty(report)),
            n_batch=report.n_batch,
            queue_limit=report.queue_limit,
            running=report.running,
            queued=report.queued,
            kind=report.platform,
            counters=WorkCounters(
                report.replica,
                report.prefill_tokens,
                report.prefill_ms,
                report.decode_tokens,
                report.decode_ms,
            ),
            holdings=report.holdings,
        )

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

    def _duty(self, report: BoardReport) -> Duty:
        return self._desired.duty(report.board_id, report.model)

    def _hear(self, key: _BoardKey, report: BoardReport) -> None:
        self._reports[key] = report
        self._missed[key] = 0
        counted = (report.replica, report.prefill_tokens, report.decode_tokens)
        self._rates.setdefault(key, Rates()).heard(TokenCounts(time.monotonic(), *counted))

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


def _held(duty: Duty) -> PauseEffect:
    return PauseEffect.NOT if duty.hold is None else _HELD[duty.hold.mode]


def _unloads(duty: Duty) -> bool:
    return duty.level is not None and duty.level > SleepLevel.PAUSED


def _clears(duty: Duty) -> set[str]:
    """Return the holds that empty the board's KV cache: of an adapter by its name, of all by ""."""
    holds = {"": duty.hold, **dict(duty.adapter_holds)}
    return {name for name, hold in holds.items() if hold is not None and hold.clear_cache}
