"""Bodies and answers of the calls about LoRA adapters.

The models state names, ranges and meanings; files and boards are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import from_json
from typing_extensions import NotRequired, TypedDict

from rkserve.api.admin.operations import Envelope
from rkserve.api.admin.pause import ONLY_FALSE, CallOptions, ControlBody, refused
from rkserve.api.admin.query import ControlRequest, ParameterKind
from rkserve.api.json.body import JsonObject
from rkserve.api.json.fields import quoted
from rkserve.api.json.limits import MAX_NAMED, MAX_OBSERVE_S, MAX_PATH_CHARS
from rkserve.api.json.schemas import Count, one_of
from rkserve.core.board_report import BoardReport
from rkserve.core.desired_state import AdapterVersion, AdapterVersions, Desired, InFlight
from rkserve.core.errors import RequestError
from rkserve.core.files import DIGEST, NAME
from rkserve.models.files import Parameter, read_parameters

MAX_SCALE = 100  # as in manifest.json

_COUNT: JsonObject = {"type": "integer", "minimum": 0}
_SHARD: JsonObject = {
    "anyOf": [
        _COUNT,
        {"type": "string", "pattern": "^[0-9]+(/|-of-)[0-9]+$"},
        {
            "type": "object",
            "properties": {"index": _COUNT, "count": _COUNT, "dim": _COUNT},
            "required": ["index"],
            "additionalProperties": False,
        },
    ]
}
PARAMETERS: JsonObject = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "shape": {"type": "array", "items": _COUNT},
            "dtype": {"type": "string"},
            "shard": _SHARD,
        },
        "required": ["name", "shape", "dtype"],
        "additionalProperties": False,
    },
}


def check_name(name: str, param: str) -> str:
    """Return a name that an adapter or a version may have. Raises ``RequestError``."""
    if not NAME.fullmatch(name):
        raise RequestError(
            f"Invalid '{param}': {quoted(name)}. It begins with a letter or a digit and has at "
            "most 64 letters, digits, '.', '_' and '-'.",
            param,
        )
    return name


def _name(name: str, info: ValidationInfo) -> str:
    return check_name(name, str(info.field_name))


def _digest(digest: str, info: ValidationInfo) -> str:
    name = info.field_name
    if not DIGEST.fullmatch(digest):
        raise RequestError(f"Invalid '{name}': expected 64 lower-case hexadecimal digits.", name)
    return digest


def _path(path: str, info: ValidationInfo) -> str:
    name = info.field_name
    if not 1 <= len(path) <= MAX_PATH_CHARS or "\0" in path:
        raise RequestError(f"Invalid '{name}': it has 1 to {MAX_PATH_CHARS} characters.", name)
    return path


def _parameters(given: object) -> tuple[Parameter, ...]:
    if isinstance(given, str):
        try:
            given = from_json(given, allow_inf_nan=False)
        except ValueError:
            raise RequestError(
                f"Invalid 'parameters': expected JSON, got {quoted(given)}.", "parameters"
            ) from None
    return read_parameters(given, "parameters")


ArtifactName = Annotated[
    str,
    AfterValidator(_name),
    WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}),
]
Digest = Annotated[
    str, AfterValidator(_digest), WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{64}$"})
]
Place = Annotated[
    str,
    AfterValidator(_path),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_PATH_CHARS}),
]
Parameters = Annotated[
    tuple[Parameter, ...],
    PlainValidator(_parameters),
    WithJsonSchema({"anyOf": [PARAMETERS, {"type": "string"}]}),
    ParameterKind.TEXT,
]
Scale = Annotated[float, Field(gt=0, le=MAX_SCALE)]
Share = Annotated[float, Field(gt=0, le=1)]
Boards = Annotated[int, Field(ge=1, le=MAX_NAMED)]
Handling = Annotated[InFlight, Field(strict=False)]

VERSION_MEANS = "Its version; without it the beginning of the file's digest."
SHA_MEANS = "What the file must have."
SCALE_MEANS = "How strongly it is applied; 1 unless it is said."
PATH_MEANS = "Where the file is on the head."
URL_MEANS = "Where the file is fetched from."
SIZE_MEANS = "How long the file is."
TENSORS_MEAN = "The tensors in the file; in a query as JSON."
IN_FLIGHT_MEANS = "What becomes of requests that run with the version before."
BOARDS_MEAN = "Boards that may load at once."
ONE_SOURCE = "Send either 'path' or 'url', or the file itself as application/octet-stream."


@dataclass(frozen=True)
class RolloutOptions:
    """The rollout of a version; the Coordinator chooses the values that are None."""

    strategy: str = "atomic"
    max_unavailable: int | None = None
    weight: float | None = None
    in_flight: InFlight = InFlight.PIN
    observe_s: float | None = None
    auto: bool = True

    def params(self) -> JsonObject:
        """Return it as an operation's parameters."""
        given = {
            "max_unavailable": self.max_unavailable,
            "weight": self.weight,
            "observe_s": self.observe_s,
        }
        return {
            "strategy": self.strategy,
            "in_flight": self.in_flight.value,
            "auto": self.auto,
            **{name: value for name, value in given.items() if value is not None},
        }


class RolloutBody(ControlBody):
    """Parameters of the rollout of a version."""

    strategy: Literal["atomic", "rolling", "canary"] = Field(
        "atomic", description="How the version comes to be served."
    )
    max_unavailable: Boards | None = Field(None, description=BOARDS_MEAN)
    weight: Share | None = Field(None, description="Of a canary: the share of sessions.")
    canary_weight: Share | None = Field(None, description="Another name of `weight`.")
    in_flight: Handling = Field(InFlight.PIN, description=IN_FLIGHT_MEANS)
    observe_s: Annotated[float, Field(ge=0, le=MAX_OBSERVE_S)] | None = Field(
        None, description="Of a canary: how long it is watched."
    )
    auto: bool = Field(
        True, description="Of a canary: whether it is promoted, or rolled back, by itself."
    )

    @model_validator(mode="after")
    def _check_rollout(self) -> RolloutBody:
        if self.weight is not None and self.canary_weight is not None:
            raise RequestError(
                "'weight' and 'canary_weight' are two names of one value; send one.",
                "canary_weight",
            )
        share = self.canary_weight if self.weight is None else self.weight
        for name, given in (("weight", share), ("observe_s", self.observe_s)):
            if given is not None and self.strategy != "canary":
                raise RequestError(f"'{name}' goes with the strategy 'canary' only.", name)
        return self

    @property
    def rollout(self) -> RolloutOptions:
        """The rollout as one value."""
        return RolloutOptions(
            strategy=self.strategy,
            max_unavailable=self.max_unavailable,
            weight=self.canary_weight if self.weight is None else self.weight,
            in_flight=self.in_flight,
            observe_s=self.observe_s,
            auto=self.auto,
        )


class NamedRolloutBody(RolloutBody):
    """POST /v1/lora_adapters/{name}/rollout."""

    version: ArtifactName = Field(description=VERSION_MEANS)


class AdapterBody(RolloutBody):
    """Parameters of a new version of an adapter."""

    name: ArtifactName = Field(description="The adapter.")
    version: ArtifactName | None = Field(None, description=VERSION_MEANS)
    sha256: Digest | None = Field(None, description=SHA_MEANS)
    scale: Scale = Field(1.0, description=SCALE_MEANS)
    base_model: str | None = Field(None, description="The model that it is for.")
    base_digest: Digest | None = Field(
        None, description="The sha256 of the weights that it was trained on."
    )
    parameters: Parameters = Field((), description=TENSORS_MEAN)
    activate: bool = Field(
        True, description="Whether it is served at once; true unless it is said."
    )

    @property
    def terms(self) -> CallOptions:
        """The parameters of every call; ``base_model`` is another name of the model."""
        return _for_base(super().terms, self.base_model, "base_model")


class UploadBody(AdapterBody):
    """POST /v1/lora_adapters with the file as its body, and these parameters in the query."""

    size: Annotated[int, Field(ge=1)] | None = Field(None, description=SIZE_MEANS)


class RegisterBody(AdapterBody):
    """POST /v1/lora_adapters with a path or a URL."""

    path: Place | None = Field(None, description=PATH_MEANS)
    url: Place | None = Field(None, description=URL_MEANS)

    @model_validator(mode="after")
    def _check_source(self) -> RegisterBody:
        if (self.path is None) == (self.url is None):
            raise RequestError(ONE_SOURCE, "path")
        return self


class AdapterQuery(RegisterBody, UploadBody):
    """The query of POST /v1/lora_adapters, whatever its body is."""


class LoadAdapterBody(RolloutBody):
    """POST /v1/load_lora_adapter in vLLM's form."""

    lora_name: ArtifactName = Field(description="The adapter.")
    lora_path: Place = Field(description="Where its file is on the head.")
    load_inplace: bool = Field(
        False, description="Whether another version of it may be served already."
    )
    base_model_name: str | None = Field(None, description="The model that it is for.")
    version: ArtifactName | None = Field(None, description=VERSION_MEANS)
    sha256: Digest | None = Field(None, description=SHA_MEANS)
    scale: Scale = Field(1.0, description=SCALE_MEANS)
    is_3d_lora_weight: Annotated[
        bool,
        refused(
            "'is_3d_lora_weight' is about tensors of a checkpoint. A board loads an adapter that "
            "was converted to .rkllm."
        ),
        ONLY_FALSE,
    ] = Field(False, description="vLLM's, about tensors; a board loads .rkllm files.")
    lora_int_id: float | None = Field(None, description="Read by vLLM, and of no use here.")
    pinned: bool = Field(False, description="SGLang's, and of no use here.")

    @property
    def terms(self) -> CallOptions:
        """The parameters of every call; ``base_model_name`` is another name of the model."""
        return _for_base(super().terms, self.base_model_name, "base_model_name")


class UnloadAdapterBody(ControlBody):
    """POST /v1/unload_lora_adapter in vLLM's form."""

    lora_name: ArtifactName = Field(description="The adapter.")
    lora_int_id: float | None = Field(None, description="Read by vLLM, and of no use here.")


def _for_base(terms: CallOptions, base: str | None, param: str) -> CallOptions:
    if base is None:
        return terms
    if terms.models and base not in terms.models:
        raise RequestError(
            f"The adapter is for the model {quoted(base)}, and 'model' is another.", param
        )
    return replace(terms, models=(base,))


@dataclass(frozen=True)
class NewAdapter:
    """A new version of an adapter. ``path`` and ``url`` are None where its bytes are the body's.

    ``parameters`` are the tensors in it, and ``base_digest`` is the sha256 of the base weights that
    it was trained on; both are optional.
    """

    terms: CallOptions
    name: str
    version: str | None
    scale: float
    sha256: str | None
    rollout: RolloutOptions
    activate: bool = True
    size: int | None = None
    path: str | None = None
    url: str | None = None
    parameters: tuple[Parameter, ...] = ()
    base_digest: str | None = None


@dataclass(frozen=True)
class LoadAdapterCall:
    """vLLM's load. ``again``: a known adapter may get a new version."""

    push: NewAdapter
    again: bool


def parse_upload(asked: ControlRequest) -> NewAdapter:
    """Read POST /v1/lora_adapters with a file as its body: everything else is in the query."""
    body = ControlRequest(asked.query).read(UploadBody)
    return _new_adapter(body, size=body.size)


def parse_register(asked: ControlRequest) -> NewAdapter:
    """Read POST /v1/lora_adapters with a path or a URL."""
    body = asked.read(RegisterBody)
    return _new_adapter(body, path=body.path, url=body.url)


def _new_adapter(body: AdapterBody, **source: Any) -> NewAdapter:
    return NewAdapter(
        body.terms,
        body.name,
        body.version,
        body.scale,
        body.sha256,
        body.rollout,
        activate=body.activate,
        parameters=body.parameters,
        base_digest=body.base_digest,
        **source,
    )


def parse_load(asked: ControlRequest) -> LoadAdapterCall:
    """Read POST /v1/load_lora_adapter."""
    body = asked.read(LoadAdapterBody)
    adapter = NewAdapter(
        body.terms,
        body.lora_name,
        body.version,
        body.scale,
        body.sha256,
        body.rollout,
        path=body.lora_path,
    )
    return LoadAdapterCall(adapter, body.load_inplace)


def parse_unload(asked: ControlRequest) -> tuple[CallOptions, str]:
    """Read POST /v1/unload_lora_adapter."""
    body = asked.read(UnloadAdapterBody)
    return body.terms, body.lora_name


def parse_rollout(asked: ControlRequest) -> tuple[CallOptions, str, RolloutOptions]:
    """Read the version and the rollout of POST /v1/lora_adapters/{name}/rollout."""
    body = asked.read(NamedRolloutBody)
    return body.terms, body.version, body.rollout


def parse_named(asked: ControlRequest) -> CallOptions:
    """Read a rollback, promotion or retirement of the adapter in the path."""
    return asked.read(ControlBody).terms


class AdapterBoardEntry(TypedDict):
    """A board, and whether it has the version."""

    staged: bool
    loaded: bool


class AdapterVersionEntry(TypedDict):
    """One version of an adapter."""

    version: str
    label: str
    role: Annotated[str, one_of(("active", "candidate", "previous", "kept"))]
    sha256: str
    bytes: Count
    scale: float
    key: str
    boards: dict[str, AdapterBoardEntry]


class AdapterEntry(TypedDict):
    """An adapter with its versions."""

    name: str
    model: str
    epoch: int
    active: str | None
    candidate: str | None
    previous: str | None
    weight: float | None
    switched: list[str]
    in_flight: Annotated[str, one_of(InFlight)]
    versions: list[AdapterVersionEntry]


class AdaptersAnswer(TypedDict):
    """Every version of every adapter."""

    object: Literal["list"]
    epoch: int
    data: list[AdapterEntry]


class AdapterDone(Envelope):
    """A change of the served version of an adapter."""

    name: str
    model: str
    version: str | None


class AdapterDeleted(AdapterDone):
    """An adapter, or one version of it, that is served no more."""

    deleted: Annotated[bool, WithJsonSchema({"const": True})]


class AdapterPushed(TypedDict):
    """A new version of an adapter."""

    name: str
    version: str
    model: str
    label: str
    sha256: str
    bytes: Count
    scale: float
    activated: bool
    staging: NotRequired[Envelope]


class AdapterPushDone(AdapterPushed, Envelope):
    """A new version of an adapter, with its staging where that was an operation of its own."""


class AdapterMessageDone(Envelope):
    """A change in vLLM's form that goes on."""

    message: str


class AdapterSuccessAnswer(TypedDict):
    """A change in SGLang's form."""

    success: bool
    message: str
    error_message: str | None


def lines_list(
    desired: Desired, boards: Iterable[BoardReport], models: Iterable[str]
) -> AdaptersAnswer:
    """Return the answer of GET /v1/lora_adapters: every version, and which boards have it."""
    known, wanted = list(boards), set(models)
    return {
        "object": "list",
        "epoch": desired.epoch,
        "data": [_line(line, known) for line in desired.lines if line.model in wanted],
    }


def _line(line: AdapterVersions, boards: list[BoardReport]) -> AdapterEntry:
    serving = [board for board in boards if board.model == line.model]
    return {
        "name": line.name,
        "model": line.model,
        "epoch": line.epoch,
        "active": _called(line.active),
        "candidate": _called(line.candidate),
        "previous": _called(line.previous),
        "weight": line.weight,
        "switched": list(line.switched),
        "in_flight": line.in_flight.value,
        "versions": [_version_row(line, version, serving) for version in line.versions],
    }


def _version_row(
    line: AdapterVersions, version: AdapterVersion, boards: list[BoardReport]
) -> AdapterVersionEntry:
    ref = version.ref
    return {
        "version": ref.version,
        "label": ref.label,
        "role": _role(line, version),
        "sha256": ref.digest,
        "bytes": version.size_bytes,
        "scale": ref.scale,
        "key": ref.key,
        "boards": {
            board.board_id: {"staged": ref.key in board.staged, "loaded": ref.key in board.adapters}
            for board in boards
        },
    }


def _role(line: AdapterVersions, version: AdapterVersion) -> str:
    roles = {"active": line.active, "candidate": line.candidate, "previous": line.previous}
    return next((role for role, one in roles.items() if one == version), "kept")


def _called(version: AdapterVersion | None) -> str | None:
    return None if version is None else version.ref.version
