"""The history of a simulated cluster, and the guarantees by which it is judged."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field
from typing import Any

from rkserve.control.calls import OperationKind
from rkserve.control.operations import OperationOutcome, OperationState
from rkserve.core.messages import (
    Accepted,
)

LINE = "tone"
CLIENT = 7  # every client's prompt begins with it, and no trial run's
BOARDS = ("a", "b", "c")
ROUTERS = ("r0", "r1")
HEAD = "head"


def now_s() -> float:
    """The virtual time."""
    return asyncio.get_running_loop().time()


def next_token(
    base: str, adapter: str | None, _: int, context: tuple[int, ...]
) -> tuple[int, bytes]:
    """The model: weights, adapter and all of the context decide the next token."""
    token_id = 1000 + zlib.crc32(repr((base, adapter, context)).encode()) % 5000
    return token_id, b"%d " % token_id


class Violated(AssertionError):
    """The history is none that the guarantees allow."""


@dataclass
class Call:
    """One operator's call: from its first sending to the moment that its result is known."""

    kind: OperationKind
    params: dict[str, Any]
    began_s: float
    ended_s: float = float("inf")
    outcome: OperationOutcome | None = None

    @property
    def succeeded(self) -> bool:
        outcome = self.outcome
        return outcome is not None and outcome.operation.state is OperationState.SUCCEEDED

    @property
    def boards(self) -> tuple[str, ...]:
        """The boards that it is about."""
        return tuple(self.params.get("boards") or BOARDS)

    @property
    def epoch(self) -> int:
        """The epoch that it made; 0 where it changed nothing, or that is not known."""
        return 0 if self.outcome is None else self.outcome.operation.epoch


@dataclass(frozen=True)
class Answer:
    """An answer in full: when its request was sent and ended, and what it was made with."""

    began_s: float
    ended_s: float
    line: str | None
    accepted: Accepted
    versions: tuple[str, ...]


RELEASES = frozenset((OperationKind.RESUME, OperationKind.WAKE))
HOLDS = frozenset((OperationKind.PAUSE, OperationKind.SLEEP))
OF_LINE = frozenset((OperationKind.ADAPTER_ROLLOUT, OperationKind.ADAPTER_ROLLBACK))
OF_BASE = frozenset((OperationKind.REBASE,))


@dataclass
class History:
    """Everything that was done and seen, with its time."""

    tokens: list[tuple[float, str, str | None]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    def fault(self, kind: str, what: str) -> None:
        """Note a fault that was made."""
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.note(what)

    def token(self, board: str, adapter: str | None) -> None:
        """Note a client's token at the moment that the library gives it out."""
        self.tokens.append((now_s(), board, adapter))

    def note(self, what: str) -> None:
        self.story.append(f"{now_s():9.3f} {what}")

    # -- judging ------------------------------------------------------------------------------

    def judge(self) -> None:
        """Raise ``Violated`` where a guarantee was broken."""
        self._pauses()
        self._versions()
        self._epochs()

    def _until_changed(self, first: Call, kinds: frozenset[OperationKind]) -> float:
        """Return until when no call of these kinds could change what a confirmed one has done.

        A call takes effect at one moment between its beginning and its end, and epochs order those
        of two calls; one without an epoch has changed nothing.
        """
        moments = [float("inf")]
        for call in self.calls:
            if call is first or call.kind not in kinds or call.ended_s < first.began_s:
                continue
            if call.succeeded and (call.epoch == 0 or 0 < call.epoch < first.epoch):
                continue
            moments.append(max(call.began_s, first.ended_s))
        return min(moments)

    def _pauses(self) -> None:
        """No token comes from a board between a confirmed pause and its end."""
        for call in self.calls:
            if call.kind not in HOLDS or not call.succeeded or call.params.get("wakes"):
                continue  # a request ends a sleep that it wakes
            lease_s = call.params.get("lease_s")
            end_s = self._until_changed(call, RELEASES)
            if lease_s is not None:
                end_s = min(end_s, call.began_s + lease_s)
            for at_s, board, _ in self.tokens:
                if call.ended_s < at_s < end_s and board in call.boards:
                    raise Violated(
                        f"board {board} gave out a token at {at_s:.3f}, and {call.kind.value} "
                        f"{call.params} was confirmed at {call.ended_s:.3f}"
                    )

    def _versions(self) -> None:
        """Each request after a confirmed rollout, and before the next, gets that version."""
        for call in self.calls:
            if call.kind is not OperationKind.ADAPTER_ROLLOUT or not call.succeeded:
                continue
            end_s = self._until_changed(call, OF_LINE)
            wanted = f"{LINE}@{call.params['version']}"
            for answer in self.answers:
                inside = call.ended_s < answer.began_s and answer.ended_s < end_s
                if inside and answer.line and set(answer.versions) - {wanted}:
                    raise Violated(
                        f"a request from {answer.began_s:.3f} to {answer.ended_s:.3f} was answered "
                        f"by {answer.versions}; {wanted} was confirmed at {call.ended_s:.3f}"
                    )

    def _epochs(self) -> None:
        """A board that accepts a request obeys every epoch that was confirmed before it."""
        # Boards are released also while some are unknown, which keep what they obey until then.
        freeing = (*RELEASES, OperationKind.UNDRAIN)
        confirmed = [one for one in self.calls if one.succeeded and one.kind not in freeing]
        for answer in self.answers:
            board = answer.accepted.board_id
            known = max(
                (
                    call.epoch
                    for call in confirmed
                    if call.ended_s < answer.began_s and board in call.boards
                ),
                default=0,
            )
            if answer.accepted.epoch < known:
                raise Violated(
                    f"board {answer.accepted.board_id} accepted at epoch {answer.accepted.epoch} "
                    f"a request of {answer.began_s:.3f}; epoch {known} was confirmed before"
                )
