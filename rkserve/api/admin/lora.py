"""Bodies and answers of the calls about LoRA adapters.

The models state names, ranges and meanings; files and boards are not known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
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
from rkserve.api.admin.query import ParameterKind
from rkserve.api.json.fields import MAX_NAMED, MAX_OBSERVE_S, MAX_PATH_CHARS, JsonObject, quoted
from rkserve.api.json.schemas import Count, one_of
from rkserve.control.calls import (
    AcceptedManifest,
    AdapterRolloutAction,
    ArtifactMetadata,
    DeclaredArtifact,
    Strategy,
)
from rkserve.core.board_report import AdapterTrial, BoardReport, TrialVerdict
from rkserve.core.desired_state import AdapterVersion, AdapterVersions, Desired, InFlight
from rkserve.core.errors import RequestError
from rkserve.core.files import MANIFEST_MAX_CHARS, NAME
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


def check_name(name: str, param: str | None) -> str:
    """Return a name that an adapter or a version may have. Raises ``RequestError``."""
    if not NAME.fullmatch(name):
        raise RequestError(
            f"Invalid '{param}': {quoted(name)}. It begins with a letter or a digit and has at "
            "most 64 letters, digits, '.', '_' and '-'.",
            param,
        )
    return name


def _path(path: str, info: ValidationInfo) -> str:
    if "\0" in path:
        raise RequestError(f"Invalid '{info.field_name}': it has a NUL.", info.field_name)
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


def _envelope(given: object) -> str:
    """Return the envelope of a manifest as text; the Coordinator reads it."""
    if not isinstance(given, str | dict):
        raise RequestError("Invalid 'manifest': expected a DSSE envelope.", "manifest")
    text = given if isinstance(given, str) else json.dumps(given, separators=(",", ":"))
    if len(text) > MANIFEST_MAX_CHARS:
        raise RequestError(
            f"'manifest' has {len(text)} characters; the limit is {MANIFEST_MAX_CHARS}.", "manifest"
        )
    return text


ArtifactName = Annotated[
    str,
    AfterValidator(lambda name, info: check_name(name, info.field_name)),
    WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}),
]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Place = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS), AfterValidator(_path)]
Parameters = Annotated[
    tuple[Parameter, ...],
    PlainValidator(_parameters),
    WithJsonSchema({"anyOf": [PARAMETERS, {"type": "string"}]}),
    ParameterKind.TEXT,
]
SignedManifest = Annotated[
    str,
    PlainValidator(_envelope),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "payload": {"type": "string"},
                        "payloadType": {"type": "string"},
                        "signatures": {"type": "array", "items": {"type": "object"}},
                    },
                    "required": ["payload", "payloadType", "signatures"],
                },
                {"type": "string", "maxLength": MANIFEST_MAX_CHARS},
            ]
        }
    ),
    ParameterKind.TEXT,
]
Scale = Annotated[float, Field(gt=0, le=MAX_SCALE)]
Share = Annotated[float, Field(gt=0, le=1)]
Boards = Annotated[int, Field(ge=1, le=MAX_NAMED)]
Handling = Annotated[InFlight, Field(strict=False)]

VERSION_MEANS = "Its version; without it the beginning of the file's digest."
SHA_MEANS = "What the file must have."
SCALE_MEANS = "The strength with which it is applied; the default is 1."
PATH_MEANS = "Where the file is on the head."
URL_MEANS = "Where the file is fetched from."
SIZE_MEANS = "How long the file is."
MANIFEST_MEANS = "Its signed manifest, a DSSE envelope; in a query as JSON."
OLDER_MEANS = "Take a lower version than the highest signed one; needs the scope `admin`."
TENSORS_MEAN = "The tensors in the file; in a query as JSON."
IN_FLIGHT_MEANS = "What becomes of requests that run with the version before."
BOARDS_MEAN = "Boards that may load at once."
ONE_SOURCE = "Send either 'path' or 'url', or the file itself as application/octet-stream."


class RolloutBody(ControlBody):
    """Parameters of the rollout of a version."""

    strategy: Literal["atomic", "rolling", "canary"] = Field(
        "atomic", description="How the version comes to be served."
    )
    max_unavailable: Boards | None = Field(None, description=BOARDS_MEAN)
    weight: Share | None = Field(None, description="Of a canary: the share of sessions.")
    canary_weight: Share | None = Field(None, description="Another name of `weight`.")
    in_flight: Handling = Field(InFlight.PIN, description=IN_FLIGHT_MEANS)
    observe_s: float | None = Field(None, ge=0, le=MAX_OBSERVE_S, description="Of a canary, in s.")
    auto: bool = Field(True, description="Of a canary: promoted, or rolled back, by itself.")

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

    def rollout(self, model: str, name: str, version: str) -> AdapterRolloutAction:
        """Return the rollout of a version; the Coordinator chooses what is left out."""
        given: dict[str, Any] = {
            "max_unavailable": self.max_unavailable,
            "weight": self.canary_weight if self.weight is None else self.weight,
            "observe_s": self.observe_s,
        }
        return AdapterRolloutAction(
            model=model,
            name=name,
            version=version,
            strategy=Strategy(self.strategy),
            in_flight=self.in_flight,
            auto=self.auto,
            **{key: value for key, value in given.items() if value is not None},
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
    base_digest: Digest | None = Field(None, description="Of the weights it was trained on.")
    parameters: Parameters = Field((), description=TENSORS_MEAN)
    activate: bool = Field(True, description="Whether it is served at once; the default.")
    force: bool = Field(False, description="Try a content again that failed its trial before.")
    manifest: SignedManifest = Field("", description=MANIFEST_MEANS)
    allow_older: bool = Field(False, description=OLDER_MEANS)

    def claim(self, model: str, size_bytes: int | None = None, who: str = "") -> DeclaredArtifact:
        """Return the file that is declared by a caller."""
        return DeclaredArtifact(
            self.name,
            self.version,
            model,
            size_bytes,
            self.sha256,
            parameters=self.parameters,
            base_digest=self.base_digest,
            manifest=self.manifest or None,
            allow_older=self.allow_older,
            who=who,
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

    @property
    def source(self) -> tuple[str, str]:
        """``path`` or ``url``, and which."""
        return source_of(self.path, self.url)


class AdapterQuery(RegisterBody, UploadBody):
    """The query of POST /v1/lora_adapters, whatever its body is."""


class LoadAdapterBody(RolloutBody):
    """POST /v1/load_lora_adapter in vLLM's form."""

    lora_name: ArtifactName = Field(description="The adapter.")
    lora_path: Place = Field(description="Where its file is on the head.")
    load_inplace: bool = Field(False, description="Another version of it may be served.")
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
    def push(self) -> RegisterBody:
        """The same in rkserve's own form."""
        own = {name: getattr(self, name) for name in RolloutBody.model_fields}
        return RegisterBody.model_construct(
            **{**own, "async": self.background, "model": self.terms.models, "models": ()},
            name=self.lora_name,
            version=self.version,
            sha256=self.sha256,
            scale=self.scale,
            path=self.lora_path,
        )

    @property
    def terms(self) -> CallOptions:
        """The parameters of every call; ``base_model_name`` is another name of the model."""
        return _for_base(super().terms, self.base_model_name, "base_model_name")


class UnloadAdapterBody(ControlBody):
    """POST /v1/unload_lora_adapter in vLLM's form."""

    lora_name: ArtifactName = Field(description="The adapter.")
    lora_int_id: float | None = Field(None, description="Read by vLLM, and of no use here.")


def source_of(path: str | None, url: str | None) -> tuple[str, str]:
    """Return the kind of a source and the source: one of the two is there."""
    return ("path", path) if path is not None else ("url", url or "")


def _for_base(terms: CallOptions, base: str | None, param: str) -> CallOptions:
    if base is None:
        return terms
    if terms.models and base not in terms.models:
        raise RequestError(
            f"The adapter is for the model {quoted(base)}, and 'model' is another.", param
        )
    return replace(terms, models=(base,))


class AdapterBoardEntry(TypedDict):
    """A board, and whether it has the version."""

    staged: bool
    loaded: bool


class AdapterManifestEntry(TypedDict):
    """The manifest that a version came with; without a key no signature was verified."""

    version: int
    key: str | None
    key_id: str | None


class AdapterVersionEntry(TypedDict):
    """One version of an adapter."""

    version: str
    label: str
    role: Annotated[str, one_of(("active", "candidate", "previous", "kept"))]
    sha256: str
    bytes: Count
    scale: float
    key: str
    trial: Annotated[str, one_of(TrialVerdict)] | None
    manifest: AdapterManifestEntry | None
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


class AdapterTrialEntry(TypedDict):
    """The trial of an adapter's content on one board, with a scale, on base weights (empty: those
    of the model folder) and in a release of the runtime.
    """

    model: str
    sha256: str
    label: str
    verdict: Annotated[str, one_of(TrialVerdict)]
    board: str
    reason: str
    at_s: float
    scale: float
    base_sha256: str
    release: str


class AdaptersAnswer(TypedDict):
    """Every version of every adapter, and the latest trials, also of contents that failed."""

    object: Literal["list"]
    epoch: int
    data: list[AdapterEntry]
    trials: list[AdapterTrialEntry]


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


Manifests = Mapping[str, tuple[AcceptedManifest, ...]]


def lines_list(
    desired: Desired,
    boards: Iterable[BoardReport],
    models: Iterable[str],
    manifests: Manifests,
) -> AdaptersAnswer:
    """Return the answer of GET /v1/lora_adapters: every version, and which boards have it.

    ``manifests`` are those of each content.
    """
    known, wanted = list(boards), set(models)
    return {
        "object": "list",
        "epoch": desired.epoch,
        "data": [
            _line(desired, line, known, manifests) for line in desired.lines if line.model in wanted
        ],
        "trials": [_trial(one) for one in reversed(desired.trials) if one.model in wanted],
    }


def _trial(found: AdapterTrial) -> AdapterTrialEntry:
    return {
        "model": found.model,
        "sha256": found.digest,
        "label": found.title,
        "verdict": found.verdict.value,
        "board": found.board_id,
        "reason": found.reason,
        "at_s": found.at_s,
        "scale": found.scale,
        "base_sha256": found.base,
        "release": found.release,
    }


def _line(
    desired: Desired, line: AdapterVersions, boards: list[BoardReport], manifests: Manifests
) -> AdapterEntry:
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
        "versions": [
            _version_row(desired, line, one, serving, manifests.get(one.digest, ()))
            for one in line.versions
        ],
    }


def _version_row(
    desired: Desired,
    line: AdapterVersions,
    version: AdapterVersion,
    boards: list[BoardReport],
    manifests: tuple[AcceptedManifest, ...],
) -> AdapterVersionEntry:
    ref, trial = version.ref, desired.trial(line.model, version)
    return {
        "version": ref.version,
        "label": ref.label,
        "role": _role(line, version),
        "sha256": ref.digest,
        "bytes": version.size_bytes,
        "scale": ref.scale,
        "key": ref.key,
        "trial": None if trial is None else trial.verdict.value,
        "manifest": _manifest(ArtifactMetadata(manifests=manifests).manifest(line.model, ref.name)),
        "boards": {
            board.board_id: {"staged": ref.key in board.staged, "loaded": ref.key in board.adapters}
            for board in boards
        },
    }


def _manifest(found: AcceptedManifest | None) -> AdapterManifestEntry | None:
    if found is None:
        return None
    return {"version": found.version, "key": found.key_name, "key_id": found.key_id}


def _role(line: AdapterVersions, version: AdapterVersion) -> str:
    roles = {"active": line.active, "candidate": line.candidate, "previous": line.previous}
    return next((role for role, one in roles.items() if one == version), "kept")


def _called(version: AdapterVersion | None) -> str | None:
    return None if version is None else version.ref.version
