"""The desired state of the cluster as one frozen value, and its derivation for one board.

Only the Coordinator changes it, each time with the next epoch. Every board and every Router
receives the whole value and derives its own part here, so that a board that joins late knows as
much as one that received every call. Transport, storage and execution are elsewhere.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import TypeAlias

from rkserve.core.board_report import AdapterTrial
from rkserve.core.messages import FIRST_LABEL, AdapterRef
from rkserve.core.skew import crosses_versions


class PauseMode(str, Enum):
    """Treatment of requests during a pause.

    ``keep``: streams stay open, new requests queue. ``wait``: accepted requests run to their end.
    ``abort``: they end now. New requests are refused under the last two.
    """

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


MOST_NAMED = 5  # boards in a command that a person is to read


def undrain_command(model: str, boards: Sequence[str]) -> str:
    """Return the command that ends the drain of boards of a model."""
    if len(boards) > MOST_NAMED:
        return f"rkserve boards undrain --model {shlex.quote(model)}"
    return f"rkserve boards undrain {shlex.join(boards)}"


_SEVERITY = (PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT)


class InFlight(str, Enum):
    """Treatment of running requests when a switch replaces their version."""

    PIN = "pin"
    SWITCH = "switch"
    ABORT = "abort"


class SleepLevel(IntEnum):
    """The depth of a sleep; a deeper sleep includes the effects of a lighter one.

    ``PAUSED``: nothing runs, model and KV cache stay. ``UNLOADED``: the engine process has ended;
    requests are kept as transcripts, and conversations as prompt cache files where the runtime
    allows it. ``DROPPED``: KV caches are not kept, on disk neither.
    """

    PAUSED = 0
    UNLOADED = 1
    DROPPED = 2


@crosses_versions
@dataclass(frozen=True, slots=True)
class Scope:
    """A part of the cluster; an empty tuple or None restricts nothing.

    ``models`` are model IDs, ``boards`` board IDs. With ``adapter`` (a name) it means only
    generations with that adapter, not the boards as a whole.
    """

    models: tuple[str, ...] = ()
    boards: tuple[str, ...] = ()
    adapter: str | None = None

    def covers(self, board_id: str, model: str) -> bool:
        """Return whether the board is part of it."""
        return (not self.models or model in self.models) and (
            not self.boards or board_id in self.boards
        )

    def within(self, other: Scope) -> bool:
        """Return whether it is contained in ``other``."""
        return (
            _narrower(self.models, other.models)
            and _narrower(self.boards, other.boards)
            and other.adapter in (None, self.adapter)
        )


def _narrower(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    return not outer or (bool(inner) and set(inner) <= set(outer))


@crosses_versions
@dataclass(frozen=True, slots=True)
class ActivePause:
    """A pause or a sleep of a part of the cluster.

    ``operation`` is the ID of the operation that made it. ``clear_cache`` drops KV caches once it
    is in effect. Times are in seconds since 1970; ``expires_s`` of None means no lease. With a
    ``level`` it is a sleep: only a wake-up ends it, not a resume. With ``wakes`` the next request
    for the model wakes it.
    """

    operation: str
    scope: Scope
    mode: PauseMode
    clear_cache: bool = False
    since_s: float = 0.0
    expires_s: float | None = None
    level: SleepLevel | None = None
    wakes: bool = False


@crosses_versions
@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One version of an adapter, identified by its content; boards need it on their disks."""

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
        """Its name in messages."""
        return f"adapter {self.ref.name}@{self.ref.version}"


@crosses_versions
@dataclass(frozen=True, slots=True)
class AdapterVersions:
    """The versions of one adapter that a model serves.

    Requests that name the adapter without a version get ``active``; None means that only named
    versions are served. A rollout brings in ``candidate``: boards in ``switched`` serve it, the
    others with probability ``weight`` per session. A rollback returns to ``previous``; ``kept`` are
    other versions that stay addressable as ``name@version``. ``epoch`` is that of the last change
    of the served versions, and ``in_flight`` its treatment of running requests. ``left`` names
    those of ``kept`` that were served before: newer ones push them out, but never a version that
    was staged and not yet rolled out.
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
        """Every version that a request may get, without duplicates."""
        named = (self.active, self.candidate, self.previous, *self.kept)
        return tuple(dict.fromkeys(version for version in named if version is not None))

    def version(self, version: str) -> AdapterVersion | None:
        """Return the version named ``version``, if any."""
        return next((one for one in self.versions if one.ref.version == version), None)

    def serves(self, board_id: str, session: str) -> AdapterRef | None:
        """Return the version that a request for the bare name gets on a board.

        A session gets the same version on all boards as long as these versions do not change.
        """
        chosen = self.active
        if self.candidate is not None:
            lot = _lot(self.model, self.name, self.candidate.ref.digest, session)
            if board_id in self.switched or lot < self.weight:
                chosen = self.candidate
        return None if chosen is None else chosen.ref


def _lot(*parts: str) -> float:
    """Return a number in [0, 1) that depends on the parts only."""
    content = "".join(f"{len(part)}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:7], "big") / (1 << 56)


@crosses_versions
@dataclass(frozen=True, slots=True)
class BaseVersion:
    """One version of a base model, identified by its content: the file that boards load instead of
    the one in their model folder. ``version`` is its name in answers.
    """

    model: str
    version: str
    digest: str
    size_bytes: int

    @property
    def key(self) -> str:
        """The name under which boards report it as staged: by content, independent of the version
        name.
        """
        return f"{self.model}-{self.digest[:12]}"

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"model {self.model}@{self.version}"


# A file that is sent to boards; staging needs only its digest and size.
Artifact: TypeAlias = AdapterVersion | BaseVersion


@crosses_versions
@dataclass(frozen=True, slots=True)
class BaseWeightsChange:
    """A change of base weights in progress: boards in ``switched`` load them, or with
    ``everywhere`` all boards, including those that join.

    ``to`` of None is the file in the model folder.
    """

    to: BaseVersion | None
    label: str
    switched: tuple[str, ...] = ()
    everywhere: bool = False

    def meets(self, board_id: str) -> bool:
        """Return whether a board must load them."""
        return self.everywhere or board_id in self.switched


@crosses_versions
@dataclass(frozen=True, slots=True)
class Weights:
    """A model's base weights: their version name, their file (None: the one in the model folder),
    and the last training step applied to the model or one of its adapters.

    ``in_flight`` is the treatment of running requests when a board's turn comes in the last change
    of the file, including one in progress or undone.
    """

    model: str
    label: str = FIRST_LABEL
    step: int | None = None
    base: BaseVersion | None = None
    rebase: BaseWeightsChange | None = None
    in_flight: InFlight = InFlight.PIN

    def on(self, board_id: str) -> tuple[BaseVersion | None, str]:
        """Return the file that a board must load, and its version name."""
        if self.rebase is not None and self.rebase.meets(board_id):
            return self.rebase.to, self.rebase.label
        return self.base, self.label


@crosses_versions
@dataclass(frozen=True, slots=True)
class Desired:
    """The desired state of the cluster from ``epoch`` on.

    Boards in ``drained`` take no new requests; those of them in ``moved`` hand over their running
    ones to other boards. Both are board IDs, sorted: an earlier version reads a state without them,
    as without ``trials``, the results of the latest trials of adapters, the last one last.
    """

    epoch: int = 0
    pauses: tuple[ActivePause, ...] = ()
    lines: tuple[AdapterVersions, ...] = ()
    weights: tuple[Weights, ...] = ()
    drained: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    trials: tuple[AdapterTrial, ...] = ()

    def trial(
        self, model: str, version: AdapterVersion, releases: Collection[str] = ()
    ) -> AdapterTrial | None:
        """Return the latest trial of a version's content and scale on the model's base weights.

        With ``releases``, one in another release of the runtime does not count.
        """
        wanted = (model, version.digest, version.ref.scale, self.base_of(model))
        for one in reversed(self.trials):
            known = not releases or not one.release or one.release in releases
            if one.subject[:4] == wanted and known:
                return one
        return None

    def base_of(self, model: str) -> str:
        """Return the sha256 of a model's base weights; empty for those of the model folder."""
        base = self.weights_of(model).base
        return "" if base is None else base.digest

    def line(self, model: str, name: str) -> AdapterVersions | None:
        """Return the versions of an adapter, if it has any."""
        for one in self.lines:
            if (one.model, one.name) == (model, name):
                return one
        return None

    def weights_of(self, model: str) -> Weights:
        """Return a model's base weights."""
        return next((one for one in self.weights if one.model == model), Weights(model))

    def served(self, model: str) -> ServedWeights:
        """Return the weights that a model's boards serve, for a later comparison."""
        lines = tuple(line for line in self.lines if line.model == model)
        return ServedWeights(self.weights_of(model), lines, self._sleeps(model))

    def _sleeps(self, model: str) -> bool:
        return any(
            pause.level is not None and (not pause.scope.models or model in pause.scope.models)
            for pause in self.pauses
        )

    def target(self, board_id: str, model: str) -> BoardTarget:
        """Return the desired state of one board."""
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
            drained=board_id in self.drained,
            moves=board_id in self.moved,
        )


@crosses_versions
@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that a model's boards serve at one moment, and whether some of the boards
    sleep.
    """

    weights: Weights
    lines: tuple[AdapterVersions, ...]
    sleeps: bool

    def held_by(self, later: ServedWeights) -> str:
        """Return the reason for the hold between then and ``later``: ``update``, ``sleep`` or
        ``pause``.
        """
        if (self.weights, self.lines) != (later.weights, later.lines):
            return "update"
        return "sleep" if self.sleeps else "pause"


@crosses_versions
@dataclass(frozen=True, slots=True)
class EffectivePause:
    """The pause of a board, or of one adapter on it; ``expires_s`` is the end of the last lease.

    With several pauses ``mode`` is the strictest for new requests. ``keeps``: another one of mode
    ``keep`` stops the running generations that ``wait`` would let end.
    """

    mode: PauseMode
    clear_cache: bool = False
    expires_s: float | None = None
    keeps: bool = False

    @property
    def stops(self) -> bool:
        """Return whether running generations stop, or are aborted."""
        return self.keeps or self.mode is not PauseMode.WAIT


@crosses_versions
@dataclass(frozen=True, slots=True)
class BoardTarget:
    """The desired state of one board. ``label`` is the version name of its base weights.

    ``level`` is the depth of its sleep, None when awake; ``hold`` then defines the treatment of
    requests. ``base`` is the model file to load, None for the one in the model folder, and
    ``rebase`` the treatment of running requests while another file is loaded. A ``drained`` board
    takes no new requests; with ``moves`` its running ones continue on other boards.
    """

    epoch: int
    hold: EffectivePause | None = None
    adapter_holds: tuple[tuple[str, EffectivePause], ...] = ()
    lines: tuple[AdapterVersions, ...] = ()
    label: str = FIRST_LABEL
    level: SleepLevel | None = None
    base: BaseVersion | None = None
    rebase: InFlight = InFlight.PIN
    drained: bool = False
    moves: bool = False

    def held(self, adapter: str | None) -> EffectivePause | None:
        """Return the pause of requests with that adapter (a name), the stricter of two."""
        own = [hold for name, hold in self.adapter_holds if name == adapter]
        holds = [*own, *([] if self.hold is None else [self.hold])]
        if not holds:
            return None
        strictest = max(holds, key=lambda hold: _SEVERITY.index(hold.mode))
        return replace(strictest, keeps=_keeps(strictest.mode, holds))

    def line(self, name: str) -> AdapterVersions | None:
        """Return the versions of an adapter, if it has any."""
        return next((one for one in self.lines if one.name == name), None)

    @property
    def versions(self) -> tuple[AdapterVersion, ...]:
        """Every adapter version that the board needs on its disk before it serves."""
        return tuple(dict.fromkeys(v for line in self.lines for v in line.versions))


def _hold(pauses: list[ActivePause]) -> EffectivePause:
    mode = max((pause.mode for pause in pauses), key=_SEVERITY.index)
    ends = [pause.expires_s for pause in pauses]
    known = [end for end in ends if end is not None]
    return EffectivePause(
        mode,
        any(pause.clear_cache for pause in pauses),
        max(known) if len(known) == len(ends) else None,
        _keeps(mode, pauses),
    )


def _keeps(mode: PauseMode, pauses: Sequence[ActivePause | EffectivePause]) -> bool:
    """Return whether one of the pauses stops what ``mode`` lets end."""
    return mode is PauseMode.WAIT and any(
        pause.mode is PauseMode.KEEP or (isinstance(pause, EffectivePause) and pause.keeps)
        for pause in pauses
    )


@crosses_versions
@dataclass(frozen=True, slots=True)
class Adoption:
    """A board's answer to a new desired state.

    ``epoch`` is the one that it obeys now: later than the one sent if it already received a later
    one. It serves once ``missing`` is empty. This call stopped ``stopped`` generations, ``kept`` of
    them with their KV cache; their last token came at most ``latency_ms`` after the call.
    ``switched`` generations continue with another version. ``emitted`` has the request ID and the
    token count of every generation that has not ended. ``level`` is the depth of its sleep, None
    when awake; of the contexts put to sleep by this call, ``kept_tokens`` can be restored from
    memory or disk and ``dropped_tokens`` must be recomputed. ``missing_base`` is the model file
    that it must load and does not have; it serves nothing before that. ``refused`` is the reason
    why it returned to the previous file after an earlier call, or empty.
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
        """Every file that must be sent to it."""
        return (*self.missing, *(() if self.missing_base is None else (self.missing_base,)))


SYSTEM_PROMPT = "system-prompt"  # the name of the prompt cache of the configured system prompt


@crosses_versions
@dataclass(frozen=True, slots=True)
class DesiredCache:
    """A named prompt cache that every board of a model must hold; none without ``ids``.

    It is computed with the base model, with the version of the adapter ``line`` active at the time
    (or the one named ``version``), or with ``ref``, an adapter of the model folder. ``at_s`` is the
    time of the request for it, in seconds since 1970.
    """

    model: str
    name: str
    ids: tuple[int, ...] = ()
    line: str | None = None
    version: str | None = None
    ref: AdapterRef | None = None
    at_s: float = 0.0


@crosses_versions
@dataclass(frozen=True, slots=True)
class Probe:
    """Measurements of trial runs on one board, with the adapter of ``key`` or the base model.

    ``load_ms`` is the time of the adapter's load, ``tokens`` the number of generated ones.
    """

    board_id: str
    key: str
    load_ms: float
    tokens: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float = 0.0
