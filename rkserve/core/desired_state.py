"""What the cluster shall be, as one frozen value, and what that makes of one board.

The Coordinator alone changes it, each time with the next epoch; every board and every Router gets
it whole and derives its own part here, so that a board that joins late knows no less than one that
heard every call. It knows nothing of how it travels, is stored or is carried out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeAlias

from rkserve.core.messages import FIRST_LABEL, AdapterRef


class PauseMode(str, Enum):
    """What becomes of requests under a pause.

    ``keep``: streams stay open, new requests queue. ``wait``: what was accepted runs to its end.
    ``abort``: it ends now. New requests are refused under the last two.
    """

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


_SEVERITY = (PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT)


class InFlight(str, Enum):
    """What becomes of requests that run with the version that a switch replaces."""

    PIN = "pin"
    SWITCH = "switch"
    ABORT = "abort"


class SleepLevel(IntEnum):
    """How deep boards sleep; a deeper sleep includes what a lighter one does.

    ``PAUSED``: nothing runs, model and KV cache stay. ``UNLOADED``: the engine has ended, requests
    are kept as transcripts, and conversations as prompt cache files where the runtime allows that.
    ``DROPPED``: of the KV caches nothing is kept, on no disk either.
    """

    PAUSED = 0
    UNLOADED = 1
    DROPPED = 2


@dataclass(frozen=True, slots=True)
class Scope:
    """A part of the cluster: an empty tuple or None restricts nothing.

    ``models`` are model ids, ``boards`` board ids. With ``adapter`` only generations with that
    adapter (its name) are meant, and not the boards as a whole.
    """

    models: tuple[str, ...] = ()
    boards: tuple[str, ...] = ()
    adapter: str | None = None

    def covers(self, board_id: str, model: str) -> bool:
        """Whether the board is in it."""
        return (not self.models or model in self.models) and (
            not self.boards or board_id in self.boards
        )

    def within(self, other: Scope) -> bool:
        """Whether all of it is a part of ``other``."""
        return (
            _narrower(self.models, other.models)
            and _narrower(self.boards, other.boards)
            and other.adapter in (None, self.adapter)
        )


def _narrower(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    return not outer or (bool(inner) and set(inner) <= set(outer))


@dataclass(frozen=True, slots=True)
class ActivePause:
    """A part of the cluster that shall be paused, or asleep.

    ``operation`` is the id of what asked for it. With ``clear_cache`` KV caches are dropped once it
    holds. Times are in seconds since 1970; ``expires_s`` of None has no lease. With a ``level`` it
    is a sleep, which no resume takes back but a wake-up; with ``wakes`` the next request for its
    model is one.
    """

    operation: str
    scope: Scope
    mode: PauseMode
    clear_cache: bool = False
    since_s: float = 0.0
    expires_s: float | None = None
    level: SleepLevel | None = None
    wakes: bool = False


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One version of an adapter, which is its content: what boards must have on their disks."""

    ref: AdapterRef
    size_bytes: int

    @property
    def digest(self) -> str:
        """The sha256 of its file."""
        return self.ref.digest

    @property
    def key(self) -> str:
        """The name under which boards report it as staged."""
        return self.ref.key

    @property
    def title(self) -> str:
        """What to call it in words to people."""
        return f"adapter {self.ref.name}@{self.ref.version}"


@dataclass(frozen=True, slots=True)
class AdapterVersions:
    """Which versions of one adapter a model serves.

    Requests that name the adapter without a version get ``active``; None where only named
    versions are served. A rollout brings in ``candidate``: on the boards in ``switched`` it is
    what they get, elsewhere with the probability ``weight`` per session. ``previous`` is what a
    rollback returns to, ``kept`` are others that stay addressable as ``name@version``. ``epoch`` is
    that of the last change of what is served, and ``in_flight`` says what that change meant for
    requests that ran. ``left`` names those of ``kept`` that were served before: newer ones push
    them out, and never one that was staged and waits for its turn.
    """

    model: str
    name: str
    active: AdapterVersion | None = None
    candidate: AdapterVersion | None = None
    previous: AdapterVersion | None = None
    kept: tuple[AdapterVersion, ...] = ()
    switched: tuple[str, ...] = ()
    weight: float = 0.0
    in_flight: InFlight = InFlight.PIN
    epoch: int = 0
    left: tuple[str, ...] = ()

    @property
    def versions(self) -> tuple[AdapterVersion, ...]:
        """Every version that a request may get, without repeats."""
        named = (self.active, self.candidate, self.previous, *self.kept)
        return tuple(dict.fromkeys(version for version in named if version is not None))

    def version(self, version: str) -> AdapterVersion | None:
        """Return the one that is called ``version``."""
        return next((one for one in self.versions if one.ref.version == version), None)

    def serves(self, board_id: str, session: str) -> AdapterRef | None:
        """Return what a request for the bare name gets on that board.

        The same session gets the same on all boards as long as the line stays what it is.
        """
        chosen = self.active
        if self.candidate is not None:
            lot = _lot(self.model, self.name, self.candidate.ref.digest, session)
            if board_id in self.switched or lot < self.weight:
                chosen = self.candidate
        return None if chosen is None else chosen.ref


def _lot(*parts: str) -> float:
    """Return a number in [0, 1) that depends on the parts alone."""
    content = "".join(f"{len(part)}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:7], "big") / (1 << 56)


@dataclass(frozen=True, slots=True)
class BaseVersion:
    """One version of a base model, which is its content: what boards load instead of the file in
    their model folder. ``version`` is its label in answers.
    """

    model: str
    version: str
    digest: str
    size_bytes: int

    @property
    def key(self) -> str:
        """The name under which boards report it as staged: its content, whatever it is called."""
        return f"{self.model}-{self.digest[:12]}"

    @property
    def title(self) -> str:
        """What to call it in words to people."""
        return f"model {self.model}@{self.version}"


# A file that boards are sent: all that staging needs is its digest and its size.
Artifact: TypeAlias = AdapterVersion | BaseVersion


@dataclass(frozen=True, slots=True)
class BaseWeightsChange:
    """A base model on its way to the boards of a model: those in ``switched`` load it, or all,
    those that join included, where it comes ``everywhere``.

    ``to`` of None is the file in the model folder.
    """

    to: BaseVersion | None
    label: str
    switched: tuple[str, ...] = ()
    everywhere: bool = False

    def meets(self, board_id: str) -> bool:
        """Whether a board shall load it."""
        return self.everywhere or board_id in self.switched


@dataclass(frozen=True, slots=True)
class Weights:
    """What a model's base weights are: their label, their file (None: that in the model folder),
    and the last step that a trainer applied to the model, to an adapter of it included.

    ``in_flight`` says what the last change of the file, also one that goes on or was undone, means
    for requests that run on a board when its turn comes.
    """

    model: str
    label: str = FIRST_LABEL
    step: int | None = None
    base: BaseVersion | None = None
    rebase: BaseWeightsChange | None = None
    in_flight: InFlight = InFlight.PIN

    def on(self, board_id: str) -> tuple[BaseVersion | None, str]:
        """Return the file that a board shall load, and its label."""
        if self.rebase is not None and self.rebase.meets(board_id):
            return self.rebase.to, self.rebase.label
        return self.base, self.label


@dataclass(frozen=True, slots=True)
class Desired:
    """What the cluster shall be from ``epoch`` on, until there is a later one."""

    epoch: int = 0
    pauses: tuple[ActivePause, ...] = ()
    lines: tuple[AdapterVersions, ...] = ()
    weights: tuple[Weights, ...] = ()

    def line(self, model: str, name: str) -> AdapterVersions | None:
        """Return the line of an adapter, if there is one."""
        for one in self.lines:
            if (one.model, one.name) == (model, name):
                return one
        return None

    def weights_of(self, model: str) -> Weights:
        """Return the label and the step of a model."""
        return next((one for one in self.weights if one.model == model), Weights(model))

    def served(self, model: str) -> ServedWeights:
        """Return what boards of a model serve, to tell later whether that has changed."""
        lines = tuple(line for line in self.lines if line.model == model)
        return ServedWeights(self.weights_of(model), lines, self._sleeps(model))

    def _sleeps(self, model: str) -> bool:
        return any(
            pause.level is not None and (not pause.scope.models or model in pause.scope.models)
            for pause in self.pauses
        )

    def target(self, board_id: str, model: str) -> BoardTarget:
        """Return what it makes of one board."""
        mine = [pause for pause in self.pauses if pause.scope.covers(board_id, model)]
        whole = [pause for pause in mine if pause.scope.adapter is None]
        named: dict[str, list[ActivePause]] = {}
        for pause in mine:
            if pause.scope.adapter is not None:
                named.setdefault(pause.scope.adapter, []).append(pause)
        weights = self.weights_of(model)
        base, label = weights.on(board_id)
        levels = [pause.level for pause in whole if pause.level is not None]
        return BoardTarget(
            epoch=self.epoch,
            hold=_hold(whole) if whole else None,
            adapter_holds=tuple((name, _hold(pauses)) for name, pauses in sorted(named.items())),
            lines=tuple(line for line in self.lines if line.model == model),
            label=label,
            level=max(levels, default=None),
            base=base,
            rebase=weights.in_flight,
        )


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that a model's boards serve at one moment, and whether some of them sleep."""

    weights: Weights
    lines: tuple[AdapterVersions, ...]
    sleeps: bool

    def held_by(self, later: ServedWeights) -> str:
        """Return what held the model from then until now: ``update``, ``sleep`` or ``pause``."""
        if (self.weights, self.lines) != (later.weights, later.lines):
            return "update"
        return "sleep" if self.sleeps else "pause"


@dataclass(frozen=True, slots=True)
class EffectivePause:
    """How a board, or one adapter on it, is paused; ``expires_s`` is the last lease's end."""

    mode: PauseMode
    clear_cache: bool = False
    expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class BoardTarget:
    """What one board shall be. ``label`` is that of its base model's weights.

    ``level`` is how deep it sleeps, None where it is awake; its hold says what becomes of requests
    then. ``base`` is the model's file that it has loaded, None for that in the model folder, and
    ``rebase`` what becomes of requests that run while another one is loaded.
    """

    epoch: int
    hold: EffectivePause | None = None
    adapter_holds: tuple[tuple[str, EffectivePause], ...] = ()
    lines: tuple[AdapterVersions, ...] = ()
    label: str = FIRST_LABEL
    level: SleepLevel | None = None
    base: BaseVersion | None = None
    rebase: InFlight = InFlight.PIN

    def held(self, adapter: str | None) -> EffectivePause | None:
        """Return what holds a request with that adapter (its name), the stricter of two."""
        own = [hold for name, hold in self.adapter_holds if name == adapter]
        holds = [*own, *([] if self.hold is None else [self.hold])]
        return max(holds, key=lambda hold: _SEVERITY.index(hold.mode), default=None)

    def line(self, name: str) -> AdapterVersions | None:
        """Return the line of an adapter, if there is one."""
        return next((one for one in self.lines if one.name == name), None)

    @property
    def versions(self) -> tuple[AdapterVersion, ...]:
        """Every version that the board must have on its disk before it serves."""
        return tuple(dict.fromkeys(v for line in self.lines for v in line.versions))


def _hold(pauses: list[ActivePause]) -> EffectivePause:
    mode = max((pause.mode for pause in pauses), key=_SEVERITY.index)
    ends = [pause.expires_s for pause in pauses]
    known = [end for end in ends if end is not None]
    return EffectivePause(
        mode,
        any(pause.clear_cache for pause in pauses),
        max(known) if len(known) == len(ends) else None,
    )


@dataclass(frozen=True, slots=True)
class Adoption:
    """A board's answer to what it shall be.

    ``epoch`` is the one that it now obeys: a later one than it was sent where it had heard that
    already. It serves once ``missing`` is empty. ``stopped`` generations were stopped by this call,
    of which ``kept`` have their KV cache still; the last token was emitted ``latency_ms`` after the
    call at the latest. ``switched`` generations go on with another version. ``emitted`` has the
    request's id of every generation that has not ended, and how many tokens it has. It sleeps at
    ``level``, None where it is awake: of the contexts that this call put to sleep, ``kept_tokens``
    can be restored from its memory or disk and ``dropped_tokens`` are computed again.
    ``missing_base`` is the model's file that it shall load and has not on its disk: it serves
    nothing before that. ``refused`` says why it has gone back from these to those of before, where
    an earlier call has seen that, or is empty.
    """

    board_id: str
    epoch: int
    missing: tuple[AdapterVersion, ...] = ()
    held: bool = False
    stopped: int = 0
    kept: int = 0
    aborted: int = 0
    switched: int = 0
    latency_ms: float = 0.0
    emitted: tuple[tuple[str, int], ...] = ()
    level: SleepLevel | None = None
    kept_tokens: int = 0
    dropped_tokens: int = 0
    missing_base: BaseVersion | None = None
    refused: str = ""

    @property
    def lacking(self) -> tuple[Artifact, ...]:
        """Every file that it has to be sent."""
        return (*self.missing, *(() if self.missing_base is None else (self.missing_base,)))


SYSTEM_PROMPT = "system-prompt"  # the name of the prompt cache of the configured system prompt


@dataclass(frozen=True, slots=True)
class DesiredCache:
    """A named prompt cache that every board of a model is to hold; without ``ids`` none is.

    It is computed with the base model, with the version of the adapter ``line`` that is active at
    the time (or the one called ``version``), or with ``ref``, an adapter of the model folder.
    ``at_s`` is when it was asked for, in seconds since 1970.
    """

    model: str
    name: str
    ids: tuple[int, ...] = ()
    line: str | None = None
    version: str | None = None
    ref: AdapterRef | None = None
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What a board found of an adapter that it has loaded: times in ms, tokens of a trial run."""

    board_id: str
    key: str
    load_ms: float
    tokens: int
    decode_tokens_per_s: float
