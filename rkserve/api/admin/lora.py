"""Bodies and answers of the calls about LoRA adapters; it knows names and ranges, and no file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pydantic_core import from_json

from rkserve.api.admin.pause import COMMON, CallOptions, terms_of
from rkserve.api.admin.query import ControlRequest, ParameterKind, ParameterKinds
from rkserve.api.json.body import JsonObject
from rkserve.api.json.fields import Fields, Range, quoted
from rkserve.api.json.limits import MAX_NAMED, MAX_OBSERVE_S, MAX_PATH_CHARS
from rkserve.core.board_report import BoardReport
from rkserve.core.desired_state import AdapterVersion, AdapterVersions, Desired, InFlight
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.file_digests import DIGEST
from rkserve.core.name_rules import NAME
from rkserve.models.tensors import Parameter, read_parameters

MAX_SCALE = 100  # as in manifest.json
_STRATEGIES = ("atomic", "rolling", "canary")

_ROLLOUT: ParameterKinds = {
    **COMMON,
    "strategy": ParameterKind.TEXT,
    "max_unavailable": ParameterKind.NUMBER,
    "weight": ParameterKind.NUMBER,
    "canary_weight": ParameterKind.NUMBER,
    "in_flight": ParameterKind.TEXT,
    "observe_s": ParameterKind.NUMBER,
    "auto": ParameterKind.FLAG,
}
_ARTIFACT: ParameterKinds = {
    **_ROLLOUT,
    "name": ParameterKind.TEXT,
    "version": ParameterKind.TEXT,
    "sha256": ParameterKind.TEXT,
    "scale": ParameterKind.NUMBER,
    "base_model": ParameterKind.TEXT,
    "base_digest": ParameterKind.TEXT,
    "parameters": ParameterKind.TEXT,
    "activate": ParameterKind.FLAG,
}
_UPLOAD: ParameterKinds = {**_ARTIFACT, "size": ParameterKind.NUMBER}
_REGISTER: ParameterKinds = {**_ARTIFACT, "path": ParameterKind.TEXT, "url": ParameterKind.TEXT}
_NAMED: ParameterKinds = {**_ROLLOUT, "version": ParameterKind.TEXT}
_LOAD: ParameterKinds = {
    **_ROLLOUT,
    "lora_name": ParameterKind.TEXT,
    "lora_path": ParameterKind.TEXT,
    "load_inplace": ParameterKind.FLAG,
    "base_model_name": ParameterKind.TEXT,
    "is_3d_lora_weight": ParameterKind.FLAG,
    "lora_int_id": ParameterKind.NUMBER,
    "pinned": ParameterKind.FLAG,
    "version": ParameterKind.TEXT,
    "sha256": ParameterKind.TEXT,
    "scale": ParameterKind.NUMBER,
}
_UNLOAD: ParameterKinds = {
    **COMMON,
    "lora_name": ParameterKind.TEXT,
    "lora_int_id": ParameterKind.NUMBER,
}


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


@dataclass(frozen=True)
class NewAdapter:
    """A new version of an adapter. ``path`` and ``url`` are None where its bytes are the body's.

    ``parameters`` are the tensors in it, and ``base_digest`` is the sha256 of the base weights that
    it was trained on; neither need be said.
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
    """vLLM's load: ``again`` says that a known adapter shall get a new version."""

    push: NewAdapter
    again: bool


def parse_upload(asked: ControlRequest) -> NewAdapter:
    """Read POST /v1/lora_adapters with a file as its body: everything else is in the query."""
    fields = ControlRequest(asked.query).fields(_UPLOAD)
    return _push(fields, size=fields.integer("size", Range(1)))


def parse_register(asked: ControlRequest) -> NewAdapter:
    """Read POST /v1/lora_adapters with a path or a URL."""
    fields = asked.fields(_REGISTER)
    path, url = _place(fields, "path"), _place(fields, "url")
    if (path is None) == (url is None):
        raise RequestError(
            "Send either 'path' or 'url', or the file itself as application/octet-stream.", "path"
        )
    return _push(fields, path=path, url=url)


def parse_load(asked: ControlRequest) -> LoadAdapterCall:
    """Read POST /v1/load_lora_adapter."""
    fields = asked.fields(_LOAD)
    if fields.flag("is_3d_lora_weight"):
        raise UnsupportedParameter(
            "Unsupported parameter: 'is_3d_lora_weight' is about tensors of a checkpoint. A board "
            "loads an adapter that was converted to .rkllm.",
            "is_3d_lora_weight",
        )
    name = check_name(fields.required_text("lora_name"), "lora_name")
    path = fields.required_text("lora_path")
    _place(fields, "lora_path")
    push = NewAdapter(
        _terms_for(fields, "base_model_name"),
        name,
        _version(fields),
        _scale(fields),
        read_digest(fields),
        _rollout(fields),
        path=path,
    )
    return LoadAdapterCall(push, fields.flag("load_inplace"))


def parse_unload(asked: ControlRequest) -> tuple[CallOptions, str]:
    """Read POST /v1/unload_lora_adapter."""
    fields = asked.fields(_UNLOAD)
    return terms_of(fields), check_name(fields.required_text("lora_name"), "lora_name")


def parse_rollout(asked: ControlRequest) -> tuple[CallOptions, str, RolloutOptions]:
    """Read POST /v1/lora_adapters/{name}/rollout: the version, and how it comes to be served."""
    fields = asked.fields(_NAMED)
    version = check_name(fields.required_text("version"), "version")
    return terms_of(fields), version, _rollout(fields)


def parse_named(asked: ControlRequest) -> CallOptions:
    """Read what rolls back, promotes or retires an adapter that the path names."""
    return terms_of(asked.fields(COMMON))


def check_name(name: str, param: str) -> str:
    """Return a name that an adapter or a version may have. Raises ``RequestError``."""
    if not NAME.fullmatch(name):
        raise RequestError(
            f"Invalid '{param}': {quoted(name)}. It begins with a letter or a digit and has at "
            "most 64 letters, digits, '.', '_' and '-'.",
            param,
        )
    return name


def lines_list(
    desired: Desired, boards: Iterable[BoardReport], models: Iterable[str]
) -> JsonObject:
    """Return the answer of GET /v1/lora_adapters: every version, and which boards have it."""
    known, wanted = list(boards), set(models)
    return {
        "object": "list",
        "epoch": desired.epoch,
        "data": [_line(line, known) for line in desired.lines if line.model in wanted],
    }


def _line(line: AdapterVersions, boards: list[BoardReport]) -> JsonObject:
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
) -> JsonObject:
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


def _push(
    fields: Fields, *, size: int | None = None, path: str | None = None, url: str | None = None
) -> NewAdapter:
    terms = _terms_for(fields, "base_model")
    name = check_name(fields.required_text("name"), "name")
    activate = fields.maybe_flag("activate")
    return NewAdapter(
        terms,
        name,
        _version(fields),
        _scale(fields),
        read_digest(fields),
        _rollout(fields),
        activate is None or activate,
        size,
        path,
        url,
        sent_parameters(fields),
        read_digest(fields, "base_digest"),
    )


def _terms_for(fields: Fields, base_name: str) -> CallOptions:
    """Read what every call may say, where the model may also stand under another name."""
    terms, base = terms_of(fields), fields.text(base_name)
    if base is None:
        return terms
    if terms.models and base not in terms.models:
        raise RequestError(
            f"The adapter is for the model {quoted(base)}, and 'model' is another.", base_name
        )
    return replace(terms, models=(base,))


def sent_parameters(fields: Fields) -> tuple[Parameter, ...]:
    """Read the list of tensors; in a query it is JSON."""
    given = fields.get("parameters")
    if isinstance(given, str):
        try:
            given = from_json(given, allow_inf_nan=False)
        except ValueError:
            raise RequestError(
                f"Invalid 'parameters': expected JSON, got {quoted(given)}.", "parameters"
            ) from None
    return read_parameters(given, "parameters")


def _version(fields: Fields) -> str | None:
    version = fields.text("version")
    return None if version is None else check_name(version, "version")


def _scale(fields: Fields) -> float:
    scale = fields.number("scale", Range(0, MAX_SCALE, above=True))
    return 1.0 if scale is None else scale


def read_digest(fields: Fields, name: str = "sha256") -> str | None:
    """Read a sha256."""
    digest = fields.text(name)
    if digest is not None and not DIGEST.fullmatch(digest):
        raise RequestError(f"Invalid '{name}': expected 64 lower-case hexadecimal digits.", name)
    return digest


def _place(fields: Fields, name: str) -> str | None:
    place = fields.text(name)
    if place is None:
        return None
    if not 1 <= len(place) <= MAX_PATH_CHARS or "\0" in place:
        raise RequestError(f"Invalid '{name}': it has 1 to {MAX_PATH_CHARS} characters.", name)
    return place


def _rollout(fields: Fields) -> RolloutOptions:
    strategy = fields.choice("strategy", *_STRATEGIES) or "atomic"
    weight = fields.number("weight", Range(0, 1, above=True))
    alias = fields.number("canary_weight", Range(0, 1, above=True))
    if weight is not None and alias is not None:
        raise RequestError(
            "'weight' and 'canary_weight' are two names of one value; send one.", "canary_weight"
        )
    weight = alias if weight is None else weight
    observe_s = fields.number("observe_s", Range(0, MAX_OBSERVE_S))
    for name, given in (("weight", weight), ("observe_s", observe_s)):
        if given is not None and strategy != "canary":
            raise RequestError(f"'{name}' goes with the strategy 'canary' only.", name)
    auto = fields.maybe_flag("auto")
    return RolloutOptions(
        strategy=strategy,
        max_unavailable=fields.integer("max_unavailable", Range(1, MAX_NAMED)),
        weight=weight,
        in_flight=InFlight(
            fields.choice("in_flight", *(one.value for one in InFlight)) or InFlight.PIN
        ),
        observe_s=observe_s,
        auto=auto is None or auto,
    )
