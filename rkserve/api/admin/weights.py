"""Bodies and answers of the calls that replace weights, in PipelineRL's and SGLang's forms.

The models state names, ranges and meanings; files are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast

from pydantic import (
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import NotRequired, TypedDict

from rkserve.api.admin.lora import (
    BOARDS_MEAN,
    IN_FLIGHT_MEANS,
    MANIFEST_MEANS,
    OLDER_MEANS,
    ONE_SOURCE,
    PARAMETERS,
    PATH_MEANS,
    SHA_MEANS,
    SIZE_MEANS,
    TENSORS_MEAN,
    URL_MEANS,
    VERSION_MEANS,
    ArtifactName,
    Boards,
    Digest,
    Handling,
    Parameters,
    Place,
    SignedManifest,
    source_of,
)
from rkserve.api.admin.operations import ACCEPTED, Envelope
from rkserve.api.admin.pause import ONLY_FALSE, ControlBody, Label, refused
from rkserve.api.admin.query import ControlRequest, Name, ParameterKind
from rkserve.api.json.schemas import Count, RequestModel, Seconds, one_of
from rkserve.control.calls import DeclaredArtifact
from rkserve.control.operations import ControlOperation, OperationState
from rkserve.core.board_report import UNKNOWN, BoardReport, own_digest
from rkserve.core.desired_state import Artifact, BaseVersion, Desired, InFlight, Weights
from rkserve.core.errors import ArtifactRefused, RequestError
from rkserve.models.files import Parameter, difference, read_parameters

OWN = "default"  # stands for the file in the model's own folder
WHOLE_FILE = "uint8"
MAX_STEP = 2**53 - 1  # the largest integer that every JSON reader keeps exact

# PipelineRL's timings of an update, and the phases in each.
_TIMING = {
    "lock_ms": ("locking",),
    "broadcast_ms": ("checking", "staging"),
    "verify_ms": ("loading", "switching"),
    "pause_ms": ("stopping",),
    "resume_ms": ("releasing",),
}


def _parameters_info(given: object) -> tuple[Parameter, ...]:
    return read_parameters(given, "parameters_info")


GpuFlag = Annotated[bool, refused(), ONLY_FALSE]


class UpdateBody(ControlBody):
    """POST /receive_weight_update in PipelineRL's form."""

    kind: Literal["weight_update_request"] | None = Field(None, description="PipelineRL's.")
    version: Annotated[int, Field(ge=0, le=MAX_STEP)] = Field(description="The trainer's step.")
    parameters_info: Annotated[
        tuple[Parameter, ...],
        PlainValidator(_parameters_info),
        WithJsonSchema(PARAMETERS),
        ParameterKind.TEXT,
    ] = Field((), description="The tensors that were sent.")
    timestamp: float | None = Field(None, description="The trainer's clock.")
    artifact: Name | None = Field(None, description="`<adapter>@<version>` or `<model>@<version>`.")
    in_flight: Handling = Field(InFlight.SWITCH, description=IN_FLIGHT_MEANS)

    @model_validator(mode="after")
    def _check_weights(self) -> UpdateBody:
        _ = self.weights
        return self

    @property
    def weights(self) -> str:
        """The name of the new weights. Raises ``RequestError``."""
        parameters = self.parameters_info
        if self.artifact is not None:
            return self.artifact
        if len(parameters) == 1 and "@" in parameters[0].name:
            return parameters[0].name
        raise RequestError(
            "Say which weights it is about: 'artifact' is '<adapter>@<version>' or "
            "'<model>@<version>', or that is the name of the one entry of 'parameters_info'.",
            "artifact",
        )


class DiskBody(ControlBody):
    """POST /update_weights_from_disk in SGLang's form, with its clients' defaults for GPUs."""

    model_path: Place = Field(description="A path of the head, `default`, or `<model>@<version>`.")
    load_format: Annotated[
        str,
        refused("'load_format'. A board loads an .rkllm file.", "auto"),
        WithJsonSchema({"type": "string", "enum": ["auto"]}),
    ] = Field("auto", description="SGLang's; there is one format.")
    abort_all_requests: bool = Field(False, description="Whether running requests are ended.")
    weight_version: Label | None = Field(None, description="The label of the new weights.")
    flush_cache: Annotated[
        bool,
        refused(
            "'flush_cache' must be true. The KV cache was computed with the weights that are "
            "replaced; with others it would be wrong.",
            True,
        ),
        WithJsonSchema({"const": True}),
    ] = Field(True, description="KV caches of other weights would be wrong.")
    keep_pause: Annotated[
        bool, refused("'keep_pause'. What is paused stays paused in any case."), ONLY_FALSE
    ] = Field(False, description="What is paused stays paused in any case.")
    is_async: GpuFlag = Field(False, description="SGLang's.")
    torch_empty_cache: GpuFlag = Field(False, description="SGLang's.")
    recapture_cuda_graph: GpuFlag = Field(False, description="SGLang's.")
    token_step: Annotated[float, refused()] = Field(0.0, description="Only 0.")
    max_unavailable: Boards = Field(1, description=BOARDS_MEAN)
    in_flight: Handling | None = Field(None, description=IN_FLIGHT_MEANS)

    @model_validator(mode="after")
    def _check_in_flight(self) -> DiskBody:
        if self.abort_all_requests and self.in_flight not in (None, InFlight.ABORT):
            raise RequestError(
                "'abort_all_requests' is 'in_flight': 'abort'; 'in_flight' says something else.",
                "in_flight",
            )
        return self

    @property
    def handling(self) -> InFlight:
        """The effect on running requests; SGLang's flag decides by default."""
        default = InFlight.ABORT if self.abort_all_requests else InFlight.PIN
        return self.in_flight or default


class NewWeightsBody(ControlBody):
    """POST /v1/weights."""

    version: ArtifactName | None = Field(None, description=VERSION_MEANS)
    sha256: Digest | None = Field(None, description=SHA_MEANS)
    size: Annotated[int, Field(ge=1)] | None = Field(None, description=SIZE_MEANS)
    path: Place | None = Field(None, description=PATH_MEANS)
    url: Place | None = Field(None, description=URL_MEANS)
    parameters: Parameters = Field((), description=TENSORS_MEAN)
    manifest: SignedManifest = Field("", description=MANIFEST_MEANS)
    allow_older: bool = Field(False, description=OLDER_MEANS)

    @property
    def source(self) -> tuple[str, str]:
        """``path`` or ``url``, and which."""
        return source_of(self.path, self.url)

    def claim(self, model: str, size_bytes: int | None, who: str = "") -> DeclaredArtifact:
        """Return the file that is declared by a caller."""
        return DeclaredArtifact(
            model,
            self.version,
            model,
            size_bytes,
            self.sha256,
            base=True,
            parameters=self.parameters,
            manifest=self.manifest or None,
            allow_older=self.allow_older,
            who=who,
        )


def read_weights(asked: ControlRequest, *, from_body: bool) -> NewWeightsBody:
    """Read POST /v1/weights, with the file as its body or with a path or URL."""
    body = (ControlRequest(asked.query) if from_body else asked).read(NewWeightsBody)
    if (body.path is None) + (body.url is None) != (2 if from_body else 1):
        raise RequestError(ONE_SOURCE, "path")
    return body


def check_fits(update: UpdateBody, version: Artifact, known: tuple[Parameter, ...]) -> None:
    """Raise ``ArtifactRefused`` unless the trainer's parameter list fits the weights sent."""
    asked = update.parameters_info
    if len(asked) == 1 and asked[0].name == update.weights:
        whole = Parameter(update.weights, (version.size_bytes,), WHOLE_FILE)
        why = difference(asked, (whole,))
    elif asked and not known:
        why = "it was sent without its list of 'parameters'."
    else:
        why = difference(asked, known)
    if why is not None:
        raise ArtifactRefused(
            f"The update does not fit '{update.weights}': {why}", "parameters_info"
        )


class TimingEntry(TypedDict):
    """The milliseconds of an update."""

    lock_ms: Seconds
    broadcast_ms: Seconds
    verify_ms: Seconds
    pause_ms: Seconds
    resume_ms: Seconds
    total_ms: Seconds


class _Updated(TypedDict):
    status: Annotated[str, one_of(("ok", "accepted"))]
    untried: bool
    timing: TimingEntry


class UpdateDone(_Updated, Envelope):
    """A trainer's weights."""


class _Loaded(TypedDict):
    success: bool
    message: str
    num_paused_requests: Count
    untried: bool


class DiskDone(_Loaded, Envelope):
    """Base weights from the head's disk."""


class BaseEntry(TypedDict):
    """Base weights."""

    version: str
    digest: str
    bytes: Count | None
    own: bool


class RebaseEntry(TypedDict):
    """Base weights that boards are switched to."""

    version: str
    digest: str
    switched: list[str]


class BoardWeightsEntry(TypedDict):
    """The weights of a board."""

    weight_version: str
    base: str
    own: bool
    adapter_digests: dict[str, str]
    epoch: int | None
    state: str


class VersionEntry(TypedDict):
    """The label and the trainer's step of a model's weights."""

    weight_version: str
    step: int | None


class BoardsWeights(VersionEntry):
    """A model's base weights, and those of each board."""

    base: BaseEntry
    rebase: RebaseEntry | None
    boards: dict[str, BoardWeightsEntry]


class ModelWeightsEntry(BoardsWeights):
    """A model's weights."""

    adapters: dict[str, str | None]
    adapter_digests: dict[str, str]


class WeightInfoAnswer(VersionEntry):
    """The weights of one model, and of all."""

    model: str
    epoch: int
    models: dict[str, ModelWeightsEntry]


class WeightVersionAnswer(TypedDict):
    """The label of a model's weights."""

    weight_version: str
    model: str


class WeightsTakenAnswer(TypedDict):
    """Base weights that are on the head now."""

    id: str
    object: Literal["weights"]
    model: str
    own: bool
    parameters: Count
    version: NotRequired[str]
    sha256: NotRequired[str]
    bytes: NotRequired[Count]


class WeightDirBody(RequestModel):
    """POST /update_weights in prime-rl's and vLLM's form."""

    model_config = ConfigDict(extra="ignore")

    weight_dir: str | None = Field(None, description="A path; without it the folder's own.")
    update_info: dict[str, Any] | None = Field(None, description="vLLM's; only with `model_path`.")
    model: str | None = None
    weight_version: str | None = None


def update_body(record: ControlOperation) -> _Updated:
    """Return PipelineRL's answer, with the time of each phase."""
    return {
        "status": "ok" if record.over else "accepted",
        "untried": untried(record),
        "timing": timing(record.phases, record.created_s, record.finished_s),
    }


def timing(
    phases: Iterable[tuple[str, float]], created_s: float, finished_s: float | None
) -> TimingEntry:
    """Return the milliseconds of each phase, and the total so far."""
    spent: dict[str, float] = {}
    for name, ms in phases:
        spent[name] = spent.get(name, 0.0) + ms
    entry = {
        name: round(sum(spent.get(phase, 0.0) for phase in of), 3) for name, of in _TIMING.items()
    }
    total = sum(spent.values()) if finished_s is None else (finished_s - created_s) * 1e3
    entry["total_ms"] = round(max(total, 0.0), 3)
    return cast("TimingEntry", entry)  # its names are those of the table


def disk_body(record: ControlOperation, status: int, paused: int) -> _Loaded:
    """Return SGLang's answer; unlike there, ``success`` means that nothing is left to do."""
    if record.error is not None:
        message = record.error.message
    elif status == ACCEPTED:
        message = f"The update goes on: GET /v1/operations/{record.id} tells how far it is."
    elif record.state is OperationState.PARTIAL:
        message = "The new weights stand; the boards in 'failed' are still to load them."
    elif untried(record):
        message = (
            "Succeeded to update model weights. No board has loaded them yet: all of them sleep, "
            "and load them when they wake."
        )
    else:
        message = "Succeeded to update model weights."
    done = record.error is None and record.state is OperationState.SUCCEEDED
    return {
        "success": done,
        "message": message,
        "num_paused_requests": paused,
        "untried": untried(record),
    }


def untried(record: ControlOperation) -> bool:
    """Return whether every board sleeps, so that none has loaded the weights of an update."""
    loaded = [one.details.get("loaded") for one in record.results.values() if one.good]
    return bool(loaded) and all(one == "asleep" for one in loaded)


def weights_entry(desired: Desired, model: str, boards: Iterable[BoardReport]) -> BoardsWeights:
    """Return one model's entry in GET /weight_info: its base weights, and those of each board."""
    weights = desired.weights_of(model)
    rebase = weights.rebase
    having = sorted((one for one in boards if one.model == model), key=lambda one: one.board_id)
    there = [board.board_id for board in having]
    labels = {_digest(weights.base): weights.label}
    if rebase is not None:
        labels.setdefault(_digest(rebase.to), rebase.label)
    return {
        "weight_version": weights.label,
        "step": weights.step,
        "base": base_entry(weights, having),
        "rebase": None
        if rebase is None
        else {
            "version": rebase.label,
            "digest": _digest(rebase.to) or own_digest(having),
            "switched": [board for board in there if rebase.meets(board)],
        },
        "boards": {
            board.board_id: {
                "weight_version": labels.get(board.base, board.base[:12] or OWN),
                "base": loaded_digest(board),
                "own": not board.base,
                "adapter_digests": dict(board.serving),
                "epoch": board.epoch,
                "state": board.state.value,
            }
            for board in having
        },
    }


def base_entry(weights: Weights, boards: Iterable[BoardReport]) -> BaseEntry:
    """Return the entry of base weights; the model folder's own are as its boards report them."""
    base = weights.base
    if base is not None:
        return {
            "version": base.version,
            "digest": base.digest,
            "bytes": base.size_bytes,
            "own": False,
        }
    known = list(boards)
    sizes = {board.own_bytes for board in known if board.own_bytes}
    return {
        "version": OWN,
        "digest": own_digest(known),
        "bytes": sizes.pop() if len(sizes) == 1 else None,
        "own": True,
    }


def loaded_digest(board: BoardReport) -> str:
    """Return the sha256 of the base weights that a board has loaded, or ``unknown``."""
    return board.base or board.own_digest or UNKNOWN


def taken_entry(model: str, base: BaseVersion | None, parameters: int) -> WeightsTakenAnswer:
    """Return the answer of POST /v1/weights; ``parameters`` is the number of listed tensors."""
    if base is None:
        return {
            "id": OWN,
            "object": "weights",
            "model": model,
            "own": True,
            "parameters": parameters,
        }
    return {
        "id": f"{base.model}@{base.version}",
        "object": "weights",
        "model": base.model,
        "version": base.version,
        "sha256": base.digest,
        "bytes": base.size_bytes,
        "own": False,
        "parameters": parameters,
    }


def _digest(base: BaseVersion | None) -> str:
    return "" if base is None else base.digest
