"""The desired state of one board: its epoch, holds, and versions. Pure.

Bookkeeping over ``core.desired_state``, carried out by ``operations.adopt``. It knows neither runs
nor files: the versions on the disk are an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rkserve.core.desired_state import (
    AdapterVersion,
    AdapterVersions,
    BaseVersion,
    BoardTarget,
    Desired,
    EffectivePause,
    PauseMode,
    SleepLevel,
)
from rkserve.core.errors import (
    BoardAsleep,
    BoardBehind,
    BoardDrained,
    EngineAsleep,
    EnginePaused,
    ModelNotFound,
)
from rkserve.core.messages import FIRST_LABEL, AdapterRef, GenerateRequest

RETRY_AFTER_S = 5  # for a pause without a lease, whose end is unknown


def adapter_name(request: GenerateRequest) -> str | None:
    """Return the name of the request's adapter, whatever its version."""
    if request.line is not None:
        return request.line
    return request.adapter.name if request.adapter is not None else None


class Obligations:
    """The desired state that one board last adopted.

    A ``governed`` board serves nothing before the first one.
    """

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
        self._refused = ""  # why the desired weights could not be loaded
        self._here: Callable[[BaseVersion], bool] = lambda _: False
        self._base: BaseVersion | None = None
        self._label = FIRST_LABEL
        self.target: BoardTarget | None = None

    @property
    def epoch(self) -> int | None:
        """The epoch of the adopted state; None before the first."""
        return None if self.target is None else self.target.epoch

    @property
    def staged(self) -> tuple[AdapterVersion, ...]:
        """The adapter versions on the disk."""
        return self._staged()

    @property
    def missing(self) -> tuple[AdapterVersion, ...]:
        """The desired adapter versions that are not on the disk."""
        if self.target is None:
            return ()
        there = frozenset(self._staged())
        return tuple(version for version in self.target.versions if version not in there)

    @property
    def missing_base(self) -> BaseVersion | None:
        """The desired base weights, where their file is not on the disk."""
        base = None if self.target is None else self.target.base
        if base is None or self.has_base or self._here(base):
            return None
        return base

    @property
    def has_base(self) -> bool:
        """True where the model is loaded from the desired base weights."""
        return self.target is None or same(self.target.base, self._base)

    @property
    def joining(self) -> str:
        """The reason for taking no requests yet, or an empty string."""
        if self.target is None:
            return "it has no desired state yet" if self._governed else ""
        missing = [version.ref.label for version in self.missing]
        if self.missing_base is not None:
            missing.append(self.missing_base.title)
        if missing:
            return f"missing files: {', '.join(missing)}"
        return "" if self.has_base else self._refused

    # -- base weights -----------------------------------------------------------------------------

    def weights_here(self, here: Callable[[BaseVersion], bool]) -> None:
        """Set the check for whether a file of base weights is on the disk."""
        self._here = here

    def loaded(self, base: BaseVersion | None) -> None:
        """Note the file that the model is loaded from now, or next; None is the model folder's."""
        self._base = base
        self._label = FIRST_LABEL if base is None else base.version
        self._take_label()

    def refused(self, reason: str) -> None:
        """Note why the desired base weights could not be loaded; empty: they were not tried."""
        self._refused = reason

    def _take_label(self) -> None:
        if self.target is not None and self.has_base:
            self._label = self.target.label

    @property
    def unloads(self) -> bool:
        """True where the desired state has the model unloaded."""
        level = None if self.target is None else self.target.level
        return level is not None and level >= SleepLevel.UNLOADED

    @property
    def holds(self) -> bool:
        """True where any generations are held."""
        target = self.target
        return target is not None and (target.hold is not None or bool(target.adapter_holds))

    def take(self, desired: Desired) -> bool:
        """Adopt a desired state; False where its epoch is not later than the adopted one."""
        if self.target is not None and desired.epoch <= self.target.epoch:
            return False
        self.target = desired.target(self._board_id, self._model)
        self._take_label()
        return True

    def hold(self, adapter: str | None) -> EffectivePause | None:
        """Return the hold on generations with the adapter of that name."""
        return None if self.target is None else self.target.held(adapter)

    def line(self, request: GenerateRequest) -> AdapterVersions | None:
        """Return the adapter line that chooses the request's version."""
        if self.target is None or request.line is None:
            return None
        return self.target.line(request.line)

    @property
    def serving(self) -> tuple[tuple[str, str], ...]:
        """Name and sha256 of each adapter that a new session gets."""
        lines = () if self.target is None else self.target.lines
        refs = [line.serves(self._board_id, "") for line in lines]
        return tuple((ref.name, ref.digest) for ref in refs if ref is not None)

    def check(self, request: GenerateRequest, now_s: float) -> None:
        """Raise ``BoardBehind``, ``BoardDrained``, ``BoardAsleep`` or ``EnginePaused`` where the
        request is not accepted.

        ``now_s`` is in seconds since 1970, as the ends of leases are.
        """
        if self.joining:
            raise BoardBehind(self._board_id, self.joining)
        if (self.epoch or 0) < request.min_epoch:
            reason = f"its epoch is {self.epoch}; the request needs at least {request.min_epoch}"
            raise BoardBehind(self._board_id, reason)
        self._check_drain(request)
        self._check_weights(request)
        name, level = adapter_name(request), None if self.target is None else self.target.level
        if level is not None and not request.patient:
            raise BoardAsleep(self._board_id, f"it sleeps at level {level:d}")
        hold = self.hold(name)
        if hold is None or hold.mode is PauseMode.KEEP:
            return
        if hold.mode is PauseMode.WAIT and request.continued is not None:
            return  # it was accepted before the pause and runs to its end
        refused = EnginePaused if level is None else EngineAsleep
        of_board = None if self.target is None else self.target.hold
        whole = of_board is not None and of_board.mode is hold.mode
        what = f"board {self._board_id}" if whole else f"adapter {name}"
        raise refused(what, _retry_after_s(hold, now_s))

    def _check_drain(self, request: GenerateRequest) -> None:
        """Raise ``BoardDrained`` for a new request, and where running ones are moved for any.

        Else a request that was accepted before, here or elsewhere, may end here: its Router asks a
        drained board only where no other one is left.
        """
        target = self.target
        if target is not None and (target.moves or (target.drained and request.continued is None)):
            raise BoardDrained(self._board_id, "it takes no requests until it is undrained")

    def _check_weights(self, request: GenerateRequest) -> None:
        """Raise ``BoardBehind`` where a request that keeps its version would get other weights."""
        begun = None if request.continued is None else request.continued.bound
        if begun is None or begun.adapter is not None or not request.keep_version:
            return
        if begun.marks and begun.marks[-1][1] != self._label:
            reason = f"its weights are {self._label}; the request needs {begun.marks[-1][1]}"
            raise BoardBehind(self._board_id, reason)

    def bind(self, request: GenerateRequest) -> AdapterRef | None:
        """Return the adapter version that the request would begin with now.

        Raises:
            ModelNotFound: the request names a line without a served version.
        """
        if request.line is None:
            return request.adapter
        line = self.line(request)
        ref = None if line is None else self.serves(line, request)
        if ref is None:
            raise ModelNotFound(request.line)
        return ref

    def serves(self, line: AdapterVersions, request: GenerateRequest) -> AdapterRef | None:
        """Return the version that a line gives to a request on this board."""
        return line.serves(self._board_id, request.session)

    def label(self, ref: AdapterRef | None) -> str:
        """Return the label of the weights in answers: the adapter's version, or the model's.

        The model's label is that of the loaded weights, not of the desired ones.
        """
        return self._label if ref is None else ref.label


def digest_of(base: BaseVersion | None) -> str:
    """Return the sha256 of base weights; None and an empty string are the model folder's."""
    return "" if base is None else base.digest


def same(one: BaseVersion | None, other: BaseVersion | None) -> bool:
    """Return whether both have the same content; None is the model folder's file."""
    return digest_of(one) == digest_of(other)


def _retry_after_s(hold: EffectivePause, now_s: float) -> int:
    if hold.expires_s is None:
        return RETRY_AFTER_S
    return max(1, math.ceil(hold.expires_s - now_s))
