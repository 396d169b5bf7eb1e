"""The latest reports of all boards, with their addresses, rates and desired state, at one Router.

It processes reports and desired state that are passed in and sends no requests.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import BoardTarget, Desired, PauseMode, SleepLevel
from rkserve.core.errors import BoardStartFailed
from rkserve.fleet.load import Candidate, ModelBoards, PauseEffect
from rkserve.fleet.measurements import Rate, Rates
from rkserve.fleet.prefix_index import PrefixIndex

# A board that recovers or loads keeps its queue and serves within a model load; a sleeping one
# decides itself whether it takes a waiting request.
USABLE = (BoardState.READY, BoardState.RECOVERING, BoardState.ASLEEP, BoardState.LOADING)
SILENT = "the board's replica does not answer"
FORGET_AFTER = 30  # missed reports after which a silent board is no longer listed

_BoardKey = tuple[str, str]  # group and board id
_HELD = {
    PauseMode.KEEP: PauseEffect.QUEUES,
    PauseMode.WAIT: PauseEffect.REFUSES,
    PauseMode.ABORT: PauseEffect.REFUSES,
}


@dataclass(frozen=True, slots=True)
class BoardAddress:
    """The address of one board: its group's link, and its replica there.

    A ``silent`` board missed its last report. Waiting for its answer would delay those of others.
    """

    group: str
    replica: str
    board_id: str
    model: str
    silent: bool = False
    upstream: bool = False


class BoardTable:
    """The boards of an application. ``groups`` maps a group's name to its model.

    ``boards`` holds, by model, the boards that requests may be sent to.
    """

    def __init__(
        self,
        groups: Mapping[str, str],
        files_per_board: int | None = None,
    ) -> None:
        """With ``files_per_board`` of None, KV cache contents are not tracked."""
        self.groups = groups
        rng = random.Random()
        self.boards = {
            model: ModelBoards(
                rng, None if files_per_board is None else PrefixIndex(files_per_board)
            )
            for model in dict.fromkeys(groups.values())
        }
        self.desired = Desired()  # the latest desired state of the cluster
        self._reports: dict[_BoardKey, BoardReport] = {}
        self._missed: dict[_BoardKey, int] = {}
        self._rates: dict[_BoardKey, Rates] = {}

    def reports(self, model: str | None = None) -> list[BoardReport]:
        """Return the latest reports, sorted by board; a vanished replica's is LOST."""
        found = (r for r in self._reports.values() if model is None or r.model == model)
        return sorted(found, key=lambda report: report.board_id)

    def rates(self) -> dict[str, Rate]:
        """Return the current throughput of each board."""
        return {board: rates.now() for (_, board), rates in self._rates.items()}

    def addresses(self, model: str | None = None, *, fetching: bool = False) -> list[BoardAddress]:
        """Return the boards that have a replica, including those that just fell silent.

        Those that fetch their model can only report, and fetch; they count with ``fetching``.
        """
        return [
            BoardAddress(
                group,
                report.replica,
                report.board_id,
                report.model,
                report.state is BoardState.LOST,
                report.is_upstream,
            )
            for (group, _), report in sorted(self._reports.items())
            if report.replica
            and (fetching or report.fetch is None)
            and (model is None or report.model == model)
        ]

    def report_of(self, address: BoardAddress) -> BoardReport | None:
        """Return the latest report of a board."""
        return self._reports.get((address.group, address.board_id))

    def candidate(self, group: str, replica: str) -> Candidate | None:
        """Return the state of a replica's board."""
        return self.boards[self.groups[group]].get(replica)

    def has_board(self, group: str) -> bool:
        """Return whether any board of the group has reported."""
        return bool(self._of(group))

    def asked(self, group: str) -> None:
        """Note that a group's boards are asked for their reports now."""
        now_s = time.monotonic()
        for candidate in self._of(group):
            candidate.asked(now_s)

    def obey(self, desired: Desired) -> None:
        """Apply a new desired state to the choice of boards.

        Cached prefixes that a board loses by it are forgotten, whichever Router requested the
        change.
        """
        before, self.desired = self.desired, desired
        now_s = time.monotonic()
        for (group, _), report in self._reports.items():
            boards = self.boards[self.groups[group]]
            candidate = boards.get(report.replica)
            if candidate is None:
                continue
            had = before.target(report.board_id, report.model)
            target = desired.target(report.board_id, report.model)
            boards.hold(candidate, _held(target, report))
            if had.base != target.base:  # a KV cache file is only valid for its weights
                boards.forget(candidate, now_s)
            elif _unloads(target) or _clears(target) - _clears(had):
                boards.forget(candidate, now_s, files=target.level is SleepLevel.DROPPED)

    def is_ready(self, model: str) -> bool:
        """Return whether a board is ready, or asleep on purpose.

        Putting one model to sleep must not make the Router unready for the others.
        """
        return any(
            report.state is BoardState.READY
            or (report.state is BoardState.ASLEEP and _unloads(self._duty(report)))
            for report in self.reports(model)
        )

    def forget_prompts(self, meant: Callable[[str, str], bool], *, files: bool = True) -> None:
        """Forget cached prefixes; ``meant`` selects by board and model.

        Without ``files``, those in files on the boards' disks are kept.
        """
        for (group, board), report in self._reports.items():
            candidate = self.candidate(group, report.replica)
            if candidate is not None and meant(board, report.model):
                boards = self.boards[report.model]
                boards.forget(candidate, time.monotonic(), files=files)

    def update(self, group: str, reports: list[BoardReport]) -> None:
        """Store the reports of a group's boards; boards without a report become LOST."""
        now_s = time.monotonic()
        boards = self.boards[self.groups[group]]
        # A board that recovers gets requests rather than none, so drained ones do not count.
        drained = {r.replica for r in reports if r.board_id in self.desired.drained}
        ready = {r.replica for r in reports if r.state is BoardState.READY}
        usable = ready - drained
        usable = usable or {r.replica for r in reports if r.state in USABLE} - drained
        usable |= ready
        for report in reports:
            self._store((group, report.board_id), report)
            if report.fetch is not None:
                continue
            held = _held(self._duty(report), report)
            boards.update(group, report, ready=report.replica in usable, held=held)
        reported = {report.replica for report in reports}
        for candidate in self._of(group):
            if candidate.key not in reported:
                boards.silent(candidate, now_s)
        self._age(group, {report.board_id for report in reports})

    def _of(self, group: str) -> list[Candidate]:
        return [one for one in self.boards[self.groups[group]] if one.group == group]

    def note_failure(self, group: str, failure: BoardStartFailed) -> None:
        """List a board that cannot start, and so has no replica to report."""
        key = (group, failure.board_id)
        known = self._reports.get(key)
        if known is not None and known.state not in (BoardState.LOST, BoardState.FAILED):
            return  # it has started since
        self._missed[key] = 0
        self._reports[key] = BoardReport(
            board_id=failure.board_id,
            model=self.groups[group],
            state=BoardState.FAILED,
            reason=failure.reason,
        )

    def _duty(self, report: BoardReport) -> BoardTarget:
        return self.desired.target(report.board_id, report.model)

    def _store(self, key: _BoardKey, report: BoardReport) -> None:
        self._reports[key] = report
        self._missed[key] = 0
        self._rates.setdefault(key, Rates()).update(report, time.monotonic())

    def _age(self, group: str, reported: set[str]) -> None:
        """Mark silent boards as LOST, and drop them after ``FORGET_AFTER`` reports."""
        for key, report in list(self._reports.items()):
            if key[0] != group or key[1] in reported:
                continue
            self._missed[key] += 1
            self._rates.pop(key, None)
            if report.state is not BoardState.FAILED:
                self._reports[key] = replace(report, state=BoardState.LOST, reason=SILENT)
            if self._missed[key] > FORGET_AFTER:
                del self._reports[key], self._missed[key]


def _held(target: BoardTarget, report: BoardReport) -> PauseEffect:
    if target.drained:
        return PauseEffect.DRAINED
    if report.is_upstream:  # it has no queue for a pause
        return PauseEffect.OVERFLOW if target.hold is None else PauseEffect.REFUSES
    return PauseEffect.NOT if target.hold is None else _HELD[target.hold.mode]


def _unloads(target: BoardTarget) -> bool:
    return target.level is not None and target.level > SleepLevel.PAUSED


def _clears(target: BoardTarget) -> set[str]:
    """Return the holds that empty the KV cache: of an adapter by name, of everything as ""."""
    holds = {"": target.hold, **dict(target.adapter_holds)}
    return {name for name, hold in holds.items() if hold is not None and hold.clear_cache}
