"""Calls from a Router to the Coordinator: operations and artifacts, as values sent by pickle.

Each kind of operation has an action: a model that names its parameters, their types and their
defaults. An operation's record keeps the action, and shows the parameters that were given.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from rkserve.core.desired_state import (
    AdapterVersion,
    Artifact,
    BaseVersion,
    InFlight,
    PauseMode,
    Scope,
    SleepLevel,
)
from rkserve.core.messages import AdapterRef
from rkserve.core.skew import crosses_versions
from rkserve.models.files import Parameter

WEIGHTS, KV_CACHE = "weights", "kv_cache"
ADAPTER, MODEL, FOLDER = "adapter", "model", "folder"  # kinds of files in manifests


class OperationKind(str, Enum):
    """The kinds of operations."""

    PAUSE = "pause"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKE = "wake"
    CACHE_RESET = "cache_reset"
    ABORT = "abort"
    ADAPTER_STAGE = "adapter_stage"
    ADAPTER_ROLLOUT = "adapter_rollout"
    ADAPTER_ROLLBACK = "adapter_rollback"
    ADAPTER_PROMOTE = "adapter_promote"
    ADAPTER_RETIRE = "adapter_retire"
    LABEL = "label"
    WEIGHT_UPDATE = "weight_update"
    REBASE = "rebase"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    RESTART = "restart"
    MEASURE = "measure"


class DrainMode(str, Enum):
    """Treatment of the requests that a board has when it is drained.

    ``wait``: they run to their end. ``move``: other boards continue them at once.
    """

    WAIT = "wait"
    MOVE = "move"


class Strategy(str, Enum):
    """The strategy of a rollout: everywhere at one instant, board by board, or for some
    sessions.
    """

    ATOMIC = "atomic"
    ROLLING = "rolling"
    CANARY = "canary"


def _whole(level: object) -> object:
    """Refuse true and 1.0, which an enum of integers accepts."""
    if isinstance(level, bool | float):
        raise ValueError("a level is 0, 1 or 2")  # noqa: TRY004 # pydantic turns it into its own
    return level


Text = Annotated[str, Field(min_length=1)]
Level = Annotated[SleepLevel, BeforeValidator(_whole)]
Handling = Annotated[InFlight, Field(strict=False)]
_K = OperationKind


class Action(BaseModel):
    """The parameters of an operation, of the kind that its class stands for.

    ``done`` is the status of a board that has done its part. ``one_change``: it is a single change
    of the desired state, which stands once it is stored. ``errand``: it is a single request to
    boards, about which the epoch that they obey says nothing. ``frees``: it is carried out also
    while some boards are unknown. ``loads``: boards obey it before they have loaded the weights.
    """

    # Validators are built at first use: a Router that only pauses needs one of them.
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )
    done: ClassVar[str]
    one_change: ClassVar[bool] = False
    errand: ClassVar[bool] = False
    frees: ClassVar[bool] = False
    loads: ClassVar[bool] = False
    kind: OperationKind

    @property
    def params(self) -> dict[str, JsonValue]:
        """The given parameters as JSON data, for records and answers."""
        return self.model_dump(mode="json", exclude_unset=True, exclude={"kind"})


class ScopedAction(Action):
    """An action on a part of the cluster: model IDs, board IDs (empty: all), and the name of an
    adapter (None: the boards as a whole).
    """

    models: tuple[Text, ...] = ()
    boards: tuple[Text, ...] = ()
    adapter: Text | None = None

    @property
    def scope(self) -> Scope:
        """The part of the cluster."""
        return Scope(tuple(sorted(set(self.models))), tuple(sorted(set(self.boards))), self.adapter)


class PauseAction(ScopedAction):
    """Stop generation. ``lease_s`` (None: no limit) is in seconds."""

    kind: Literal[_K.PAUSE] = _K.PAUSE
    done = "paused"
    mode: PauseMode = PauseMode.KEEP
    clear_cache: bool = False
    lease_s: float | None = None


class ResumeAction(ScopedAction):
    """Remove pauses."""

    kind: Literal[_K.RESUME] = _K.RESUME
    done = "resumed"
    frees = True
    one_change = True


class SleepAction(ScopedAction):
    """Unload models. ``wakes``: a request for the model ends it; None is as its boards' group is
    configured.
    """

    kind: Literal[_K.SLEEP] = _K.SLEEP
    done = "sleeping"
    mode: PauseMode = PauseMode.KEEP
    level: Level = SleepLevel.UNLOADED
    lease_s: float | None = None
    wakes: bool | None = None


class WakeAction(ScopedAction):
    """Load models again; empty ``tags`` are both. With ``requested`` it removes only sleeps that a
    request ends, and does not refuse the rest.
    """

    kind: Literal[_K.WAKE] = _K.WAKE
    done = "awake"
    frees = True
    loads = True
    one_change = True
    tags: tuple[Annotated[str, Field(pattern=f"^({WEIGHTS}|{KV_CACHE})$")], ...] = ()
    requested: bool = False


class CacheResetAction(ScopedAction):
    """Clear KV caches."""

    kind: Literal[_K.CACHE_RESET] = _K.CACHE_RESET
    done = "cleared"
    errand = True
    reset_running_requests: bool = False


class AbortAction(ScopedAction):
    """Abort the named requests; None or empty is all."""

    kind: Literal[_K.ABORT] = _K.ABORT
    done = "aborted"
    errand = True
    request_ids: tuple[Text, ...] | None = None


class DrainAction(ScopedAction):
    """Send boards no new requests, until they are undrained."""

    kind: Literal[_K.DRAIN] = _K.DRAIN
    done = "drained"
    one_change = True
    mode: Annotated[DrainMode, Field(strict=False)] = DrainMode.WAIT


class UndrainAction(ScopedAction):
    """Let drained boards take requests again."""

    kind: Literal[_K.UNDRAIN] = _K.UNDRAIN
    done = "serving"
    frees = True
    one_change = True


class BoardAction(ScopedAction):
    """An errand to one board, the only one in its ``boards``."""

    errand = True

    @property
    def board(self) -> str:
        """The board's ID."""
        return self.boards[0]


class RestartAction(BoardAction):
    """Replace a board's engine."""

    kind: Literal[_K.RESTART] = _K.RESTART
    done = "restarted"


class MeasureAction(BoardAction):
    """Measure a board's speed for ``seconds``. With ``wait`` it comes after a run that goes on."""

    kind: Literal[_K.MEASURE] = _K.MEASURE
    done = "measured"
    seconds: Annotated[float, Field(gt=0)] = 10.0
    wait: bool = False


class ModelAction(Action):
    """An action on the weights or adapters of one model."""

    model: Text


class LabelAction(ModelAction):
    """Name the weights. ``reset_step`` forgets the last step of a trainer."""

    kind: Literal[_K.LABEL] = _K.LABEL
    done = "labelled"
    one_change = True
    label: Text
    reset_step: bool = False


class AdapterStageAction(ModelAction):
    """Deliver a version whose file is in the head's store, after its trial on one board; with
    ``force`` also after one that it did not pass.
    """

    kind: Literal[_K.ADAPTER_STAGE] = _K.ADAPTER_STAGE
    done = "staged"
    one_change = True
    name: Text
    version: Text
    digest: Text
    scale: float = 1.0
    size_bytes: int
    force: bool = False

    @property
    def artifact(self) -> AdapterVersion:
        """The version."""
        ref = AdapterRef(self.name, self.version, self.digest, self.scale)
        return AdapterVersion(ref, self.size_bytes)


class ServingAction(ModelAction):
    """An action that changes the versions that a model serves."""


class AdapterRolloutAction(ServingAction):
    """Serve a staged version. ``weight`` is the canary's share of the sessions, which is observed
    for ``observe_s`` seconds; with ``auto`` it is promoted on a good verdict.
    """

    kind: Literal[_K.ADAPTER_ROLLOUT] = _K.ADAPTER_ROLLOUT
    done = "serving"
    name: Text
    version: Text
    strategy: Annotated[Strategy, Field(strict=False)] = Strategy.ATOMIC
    max_unavailable: Annotated[int, Field(ge=1)] = 1
    weight: Annotated[float, Field(ge=0, le=1)] = 0.1
    in_flight: Handling = InFlight.PIN
    observe_s: Annotated[float, Field(ge=0)] = 60.0
    auto: bool = True


class AdapterRollbackAction(ServingAction):
    """Serve the previous version again."""

    kind: Literal[_K.ADAPTER_ROLLBACK] = _K.ADAPTER_ROLLBACK
    done = "serving"
    name: Text


class AdapterPromoteAction(ServingAction):
    """Make the observed canary the active version."""

    kind: Literal[_K.ADAPTER_PROMOTE] = _K.ADAPTER_PROMOTE
    done = "serving"
    name: Text


class AdapterRetireAction(ServingAction):
    """Remove a version; None is the whole adapter."""

    kind: Literal[_K.ADAPTER_RETIRE] = _K.ADAPTER_RETIRE
    done = "retired"
    one_change = True
    name: Text
    version: Text | None = None


class WeightUpdateAction(ServingAction):
    """Serve a trainer's weights from one instant on: with ``name`` a staged adapter version, else
    base weights in the head's store, of which ``version`` is the label. ``step`` is the trainer's,
    later than the last one.
    """

    kind: Literal[_K.WEIGHT_UPDATE] = _K.WEIGHT_UPDATE
    done = "updated"
    loads = True
    step: Annotated[int, Field(ge=0)]
    in_flight: Handling = InFlight.SWITCH
    name: Text | None = None
    version: Text
    digest: Text | None = None
    size_bytes: int | None = None

    @property
    def artifact(self) -> BaseVersion | None:
        """The base weights that it brings to boards, if any."""
        return _base(self.model, self.version, self.digest, self.size_bytes)


class RebaseAction(ServingAction):
    """Load other base weights board by board: those of ``digest`` in the head's store, or with None
    the file in the model folder. ``model_path`` is their place as the caller named it.
    """

    kind: Literal[_K.REBASE] = _K.REBASE
    done = "updated"
    loads = True
    model_path: str | None = None
    label: Text | None = None
    in_flight: Handling = InFlight.PIN
    max_unavailable: Annotated[int, Field(ge=1)] = 1
    digest: Text | None = None
    size_bytes: int | None = None

    @property
    def artifact(self) -> BaseVersion | None:
        """The base weights that it brings to boards, if any."""
        return _base(self.model, self.label, self.digest, self.size_bytes)


def _base(
    model: str, label: str | None, digest: str | None, size_bytes: int | None
) -> BaseVersion | None:
    if digest is None:
        return None
    return BaseVersion(model, label or digest[:12], digest, size_bytes or 0)


# An action of any kind; in JSON data its ``kind`` tells which.
AnyAction: TypeAlias = Annotated[
    PauseAction
    | ResumeAction
    | SleepAction
    | WakeAction
    | CacheResetAction
    | AbortAction
    | LabelAction
    | AdapterStageAction
    | AdapterRolloutAction
    | AdapterRollbackAction
    | AdapterPromoteAction
    | AdapterRetireAction
    | WeightUpdateAction
    | RebaseAction
    | DrainAction
    | UndrainAction
    | RestartAction
    | MeasureAction,
    Field(discriminator="kind"),
]


@crosses_versions
@dataclass(frozen=True, slots=True)
class OperationRequest:
    """A call that changes the cluster.

    ``who`` names the caller without any secret. ``key`` is its idempotency key. Parts not done
    after ``timeout_s`` seconds (None: the Coordinator's own limit) are undone. With
    ``expected_epoch`` the call is refused (``StaleEpoch``) unless that is the current epoch.
    ``background`` answers at once, with a running operation. ``request_id`` is for the log.
    ``sent_s`` is the time of sending by ``time.monotonic`` on the machine started as ``boot``.
    """

    action: AnyAction
    who: str = ""
    key: str | None = None
    timeout_s: float | None = None
    expected_epoch: int | None = None
    background: bool = False
    request_id: str = field(default="", compare=False)
    boot: str = field(default="", compare=False)
    sent_s: float = field(default=0.0, compare=False)

    @property
    def kind(self) -> OperationKind:
        """The kind of operation."""
        return self.action.kind

    @property
    def params(self) -> dict[str, JsonValue]:
        """The given parameters as JSON data."""
        return self.action.params

    @property
    def fingerprint(self) -> str:
        """A digest of the call: a key that is reused with another one is an error."""
        content = json.dumps(
            {"kind": self.kind.value, "params": self.params, "epoch": self.expected_epoch},
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )
        return hashlib.sha256(content.encode()).hexdigest()


@crosses_versions
@dataclass(frozen=True, slots=True)
class AcceptedManifest:
    """The manifest with which a content was accepted as an adapter of ``model``, as its base
    weights, or as its whole folder.

    ``version`` is the number in it. The key is the pinned one that signed it; both are None where
    no signature was verified.
    """

    model: str
    name: str
    version: int
    kind: str = ADAPTER
    key_id: str | None = None
    key_name: str | None = None

    @property
    def target(self) -> tuple[str, str, str]:
        """The adapter or model, whatever the version."""
        return self.model, self.name, self.kind


@crosses_versions
@dataclass(frozen=True, slots=True)
class ArtifactMetadata:
    """The metadata of one content. An empty tuple, or None, means not stated.

    ``labels`` are the ``<model>@<version>`` names under which it is base weights, and ``manifests``
    the latest one of each adapter or model that it was accepted as.
    """

    parameters: tuple[Parameter, ...] = ()
    base_digest: str | None = None
    labels: tuple[str, ...] = ()
    manifests: tuple[AcceptedManifest, ...] = ()

    def manifest(self, model: str, name: str, kind: str = ADAPTER) -> AcceptedManifest | None:
        """Return the manifest with which it was accepted as that adapter, or as base weights."""
        wanted = (model, name, kind)
        return next((one for one in self.manifests if one.target == wanted), None)

    def with_more(self, other: ArtifactMetadata) -> ArtifactMetadata:
        """Return it with later statements, which take precedence."""
        return ArtifactMetadata(
            other.parameters or self.parameters,
            other.base_digest or self.base_digest,
            tuple(dict.fromkeys((*self.labels, *other.labels))),
            tuple({one.target: one for one in (*self.manifests, *other.manifests)}.values()),
        )


@crosses_versions
@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """An artifact that can be served: its content, and the declared tensors in it."""

    version: Artifact
    parameters: tuple[Parameter, ...] = ()


@crosses_versions
@dataclass(frozen=True, slots=True)
class DeclaredArtifact:
    """A sender's declaration of a file before its upload; None is not declared.

    It is an adapter of ``model``, or with ``base`` other base weights of it, whose ``name`` is the
    model's. ``parameters`` are the tensors in it, and ``base_digest`` is the sha256 of the base
    weights that it was trained on.

    ``manifest`` is the envelope of its signed manifest. ``allow_older`` accepts a lower version
    than the highest one that was signed, and ``who`` names the caller for the audit log.
    ``folder`` is a whole model folder, whose ``sha256`` is the version of its index.
    ``accepted`` is set by the Coordinator, which has checked the manifest.
    """

    name: str
    version: str | None
    model: str
    size_bytes: int | None = None
    sha256: str | None = None
    base: bool = False
    parameters: tuple[Parameter, ...] = ()
    base_digest: str | None = None
    manifest: str | None = None
    allow_older: bool = False
    who: str = field(default="", compare=False)
    accepted: AcceptedManifest | None = None
    folder: bool = False

    @property
    def what(self) -> str:
        """Its kind in messages and manifests."""
        if self.folder:
            return FOLDER
        return MODEL if self.base else ADAPTER
