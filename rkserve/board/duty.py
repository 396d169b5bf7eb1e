"""What one board is charged with: the epoch it obeys, what is paused, which versions it serves.

Pure bookkeeping over ``rkserve.desired``; that is carried out elsewhere (holding). It knows neither
runs nor files: which versions are on the disk it is told by whoever made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rkserve.desired import AdapterLine, AdapterVersion, Desired, Duty, Hold, PauseMode
from rkserve.errors import BoardBehind, EnginePaused, ModelNotFound
from rkserve.messages import FIRST_LABEL, AdapterRef, GenerateRequest

RETRY_AFTER_S = 5  # where a pause has no lease, nobody knows how long it lasts


def adapter_name(request: GenerateRequest) -> str | None:
    """Return the name of the adapter that the request is for, in whichever version."""
    if request.line is not None:
        return request.line
    return request.adapter.name if request.adapter is not None else None


class Charge:
    """What the board was told last; ``governed`` boards serve nothing before that."""

    def __init__(
        self,
        board_id: str,
        model: str,
        staged: Callable[[], tuple[AdapterVersion, ...]],
        *,
        governed: bool,
    ) -> None:
        self._board_id, self._model = board_id, model
        self._staged = staged
        self._governed = governed
        self.duty: Duty | None = None

    @property
    def epoch(self) -> int | None:
        """The epoch of what it obeys; None before it was told anything."""
        return None if self.duty is None else self.duty.epoch

    @property
    def staged(self) -> tuple[AdapterVersion, ...]:
        """What is on the disk."""
        return self._staged()

    @property
    def missing(self) -> tuple[AdapterVersion, ...]:
        """What it shall serve and does not have."""
        if self.duty is None:
            return ()
        there = frozenset(self._staged())
        return tuple(version for version in self.duty.versions if version not in there)

    @property
    def joining(self) -> str:
        """Why it takes no requests yet, or nothing."""
        if self.duty is None:
            return "it was not told yet what it shall be" if self._governed else ""
        missing = ", ".join(version.ref.label for version in self.missing)
        return f"it has not been sent yet: {missing}" if missing else ""

    def take(self, desired: Desired) -> bool:
        """Obey from now on; False where it obeys a later epoch, or this one, already."""
        if self.duty is not None and desired.epoch <= self.duty.epoch:
            return False
        self.duty = desired.duty(self._board_id, self._model)
        return True

    def hold(self, adapter: str | None) -> Hold | None:
        """Return what pauses generations with the adapter of that name."""
        return None if self.duty is None else self.duty.held(adapter)

    def line(self, request: GenerateRequest) -> AdapterLine | None:
        """Return the line that the request leaves its version to."""
        if self.duty is None or request.line is None:
            return None
        return self.duty.line(request.line)

    def check(self, request: GenerateRequest, now_s: float) -> None:
        """Raise ``BoardBehind`` or ``EnginePaused`` where it takes no such request now.

        ``now_s`` is in seconds since 1970, as the ends of leases are.
        """
        if self.joining:
            raise BoardBehind(self._board_id, self.joining)
        if (self.epoch or 0) < request.min_epoch:
            reason = f"it obeys epoch {self.epoch}, and {request.min_epoch} is asked for"
            raise BoardBehind(self._board_id, reason)
        name = adapter_name(request)
        hold = self.hold(name)
        if hold is None or hold.mode is PauseMode.KEEP:
            return
        whole = self.duty is not None and hold is self.duty.hold
        what = f"board {self._board_id}" if whole else f"adapter {name}"
        raise EnginePaused(what, _retry_after_s(hold, now_s))

    def bind(self, request: GenerateRequest) -> AdapterRef | None:
        """Return the version of the adapter that the request would begin with now.

        Raises:
            ModelNotFound: the request names a line of which nothing is served.
        """
        if request.line is None:
            return request.adapter
        line = self.line(request)
        ref = None if line is None else self.serves(line, request)
        if ref is None:
            raise ModelNotFound(request.line)
        return ref

    def serves(self, line: AdapterLine, request: GenerateRequest) -> AdapterRef | None:
        """Return what a request gets of a line here."""
        return line.serves(self._board_id, request.session)

    def label(self, ref: AdapterRef | None) -> str:
        """Return what weights are called in answers: the adapter's version, or the model's."""
        if ref is not None:
            return ref.label
        return FIRST_LABEL if self.duty is None else self.duty.label


def _retry_after_s(hold: Hold, now_s: float) -> int:
    if hold.expires_s is None:
        return RETRY_AFTER_S
    return max(1, math.ceil(hold.expires_s - now_s))
