"""Bodies and answers of the calls that bring other weights in, in PipelineRL's and SGLang's forms.

It knows names, ranges and the peers' words, and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rkserve.api.admin.lora import check_name, read_digest, sent_parameters
from rkserve.api.admin.operations import ACCEPTED, OperationRecord
from rkserve.api.admin.pause import COMMON, CallOptions, check_label, terms_of
from rkserve.api.admin.query import ControlRequest, ParameterKind, ParameterKinds
from rkserve.api.json.body import JsonObject
from rkserve.api.json.fields import Fields, Range
from rkserve.api.json.limits import MAX_MODEL_CHARS, MAX_NAMED, MAX_PATH_CHARS
from rkserve.core.board_report import HASHING, UNREADABLE, BoardReport
from rkserve.core.desired_state import Artifact, BaseVersion, Desired, InFlight, Weights
from rkserve.core.errors import ArtifactRefused, RequestError, UnsupportedParameter
from rkserve.models.tensors import Parameter, difference, read_parameters

OWN = "default"  # stands for the file in the model's own folder
WHOLE_FILE = "uint8"
# What stands in for the sha256 of the model folder's file: its boards have different ones, or no
# board has told it.
MIXED = "mixed"
UNKNOWN = "unknown"
KIND = "weight_update_request"
MAX_STEP = 2**53 - 1  # what every JSON reader keeps whole

_UPDATE: ParameterKinds = {
    **COMMON,
    "kind": ParameterKind.TEXT,
    "version": ParameterKind.NUMBER,
    "parameters_info": ParameterKind.TEXT,
    "timestamp": ParameterKind.NUMBER,
    "artifact": ParameterKind.TEXT,
    "in_flight": ParameterKind.TEXT,
}
_DISK: ParameterKinds = {
    **COMMON,
    "model_path": ParameterKind.TEXT,
    "load_format": ParameterKind.TEXT,
    "abort_all_requests": ParameterKind.FLAG,
    "weight_version": ParameterKind.TEXT,
    "flush_cache": ParameterKind.FLAG,
    "keep_pause": ParameterKind.FLAG,
    "is_async": ParameterKind.FLAG,
    "torch_empty_cache": ParameterKind.FLAG,
    "recapture_cuda_graph": ParameterKind.FLAG,
    "token_step": ParameterKind.NUMBER,
    "max_unavailable": ParameterKind.NUMBER,
    "in_flight": ParameterKind.TEXT,
}
_WEIGHTS: ParameterKinds = {
    **COMMON,
    "version": ParameterKind.TEXT,
    "sha256": ParameterKind.TEXT,
    "size": ParameterKind.NUMBER,
    "path": ParameterKind.TEXT,
    "url": ParameterKind.TEXT,
    "parameters": ParameterKind.TEXT,
}
# What a trainer's clock says of the phases of an update, in PipelineRL's order.
_TIMING = {
    "lock_ms": ("locking",),
    "broadcast_ms": ("checking", "staging"),
    "verify_ms": ("loading", "switching"),
    "pause_ms": ("stopping",),
    "resume_ms": ("releasing",),
}


@dataclass(frozen=True)
class WeightUpdate:
    """A trainer's update. ``artifact`` is ``<name>@<version>``."""

    terms: CallOptions
    step: int
    artifact: str
    parameters: tuple[Parameter, ...]
    in_flight: InFlight


@dataclass(frozen=True)
class DiskUpdate:
    """Other base weights, board by board. ``place`` is a path, ``default``, or a version's name."""

    terms: CallOptions
    place: str
    label: str | None
    in_flight: InFlight
    max_unavailable: int


@dataclass(frozen=True)
class NewWeights:
    """Base weights for the head's store. ``path`` and ``url`` are None where the body has them."""

    terms: CallOptions
    version: str | None
    sha256: str | None
    size: int | None
    parameters: tuple[Parameter, ...]
    path: str | None = None
    url: str | None = None


def parse_update(asked: ControlRequest) -> WeightUpdate:
    """Read POST /receive_weight_update."""
    fields = asked.fields(_UPDATE)
    fields.choice("kind", KIND)
    step = fields.integer("version", Range(0, MAX_STEP))
    if step is None:
        raise RequestError("Missing required parameter: 'version'.", "version")
    fields.number("timestamp")  # the trainer's clock: checked, and of no use here
    parameters = read_parameters(fields.get("parameters_info"), "parameters_info")
    return WeightUpdate(
        terms_of(fields),
        step,
        _artifact(fields, parameters),
        parameters,
        _in_flight(fields, InFlight.SWITCH),
    )


def _artifact(fields: Fields, parameters: tuple[Parameter, ...]) -> str:
    named = fields.text("artifact")
    if named is None and len(parameters) == 1 and "@" in parameters[0].name:
        named = parameters[0].name
    if named is None:
        raise RequestError(
            "Say which weights it is about: 'artifact' is '<adapter>@<version>' or "
            "'<model>@<version>', or that is the name of the one entry of 'parameters_info'.",
            "artifact",
        )
    if not 1 <= len(named) <= MAX_MODEL_CHARS:
        raise RequestError(
            f"Invalid 'artifact': it has 1 to {MAX_MODEL_CHARS} characters.", "artifact"
        )
    return named


def check_fits(update: WeightUpdate, version: Artifact, known: tuple[Parameter, ...]) -> None:
    """Raise ``ArtifactRefused`` unless what the trainer says of its weights is what was sent."""
    asked = update.parameters
    if len(asked) == 1 and asked[0].name == update.artifact:
        whole = Parameter(update.artifact, (version.size_bytes,), WHOLE_FILE)
        why = difference(asked, (whole,))
    elif asked and not known:
        why = "it was sent without its list of 'parameters'."
    else:
        why = difference(asked, known)
    if why is not None:
        raise ArtifactRefused(
            f"The update does not fit '{update.artifact}': {why}", "parameters_info"
        )


def parse_disk(asked: ControlRequest) -> DiskUpdate:
    """Read POST /update_weights_from_disk."""
    fields = asked.fields(_DISK)
    if fields.maybe_flag("flush_cache") is False:
        raise UnsupportedParameter(
            "Unsupported parameter: 'flush_cache' must be true. The KV cache was computed with the "
            "weights that are replaced; with others it would be wrong.",
            "flush_cache",
        )
    if fields.text("load_format") not in (None, "auto"):
        raise UnsupportedParameter(
            "Unsupported parameter: 'load_format'. A board loads an .rkllm file.", "load_format"
        )
    if fields.flag("keep_pause"):
        raise UnsupportedParameter(
            "Unsupported parameter: 'keep_pause'. What is paused stays paused in any case.",
            "keep_pause",
        )
    # SGLang's clients send these with their defaults; what they ask for is a GPU's.
    for name in ("is_async", "torch_empty_cache", "recapture_cuda_graph", "token_step"):
        if fields.get(name):
            raise UnsupportedParameter(f"Unsupported parameter: '{name}'.", name)
    place = fields.required_text("model_path")
    if len(place) > MAX_PATH_CHARS or "\0" in place:
        raise RequestError(
            f"Invalid 'model_path': it has 1 to {MAX_PATH_CHARS} characters.", "model_path"
        )
    label = fields.text("weight_version")
    return DiskUpdate(
        terms_of(fields),
        place,
        None if label is None else check_label(label, "weight_version"),
        _disk_in_flight(fields),
        fields.integer("max_unavailable", Range(1, MAX_NAMED)) or 1,
    )


def _disk_in_flight(fields: Fields) -> InFlight:
    if not fields.flag("abort_all_requests"):
        return _in_flight(fields, InFlight.PIN)
    if _in_flight(fields, InFlight.ABORT) is not InFlight.ABORT:
        raise RequestError(
            "'abort_all_requests' is 'in_flight': 'abort'; 'in_flight' says something else.",
            "in_flight",
        )
    return InFlight.ABORT


def _in_flight(fields: Fields, default: InFlight) -> InFlight:
    said = fields.choice("in_flight", *(one.value for one in InFlight))
    return InFlight(said or default)


def parse_weights(asked: ControlRequest, *, from_body: bool) -> NewWeights:
    """Read POST /v1/weights, with the file as its body or with where it is."""
    fields = (ControlRequest(asked.query) if from_body else asked).fields(_WEIGHTS)
    path, url = fields.text("path"), fields.text("url")
    if (path is None) + (url is None) != (2 if from_body else 1):
        raise RequestError(
            "Send either 'path' or 'url', or the file itself as application/octet-stream.", "path"
        )
    place = path or url
    if place is not None and (len(place) > MAX_PATH_CHARS or "\0" in place):
        raise RequestError(f"Invalid 'path': it has at most {MAX_PATH_CHARS} characters.", "path")
    version = fields.text("version")
    return NewWeights(
        terms_of(fields),
        None if version is None else check_name(version, "version"),
        read_digest(fields, "sha256"),
        fields.integer("size", Range(1)),
        sent_parameters(fields),
        path,
        url,
    )


def update_body(record: OperationRecord) -> JsonObject:
    """Return PipelineRL's answer, with the time that each phase took."""
    status = "accepted" if _text(record.state) == "running" else "ok"
    told: JsonObject = {"status": status, "untried": untried(record)}
    return {**told, "timing": timing(record.phases, record.created_s, record.finished_s)}


def timing(
    phases: Iterable[tuple[str, float]], created_s: float, finished_s: float | None
) -> JsonObject:
    """Return the milliseconds of each phase, and those of all of it as far as it went."""
    spent: dict[str, float] = {}
    for name, ms in phases:
        spent[name] = spent.get(name, 0.0) + ms
    told = {
        name: round(sum(spent.get(phase, 0.0) for phase in of), 3) for name, of in _TIMING.items()
    }
    total = sum(spent.values()) if finished_s is None else (finished_s - created_s) * 1e3
    return {**told, "total_ms": round(max(total, 0.0), 3)}


def disk_body(record: OperationRecord, status: int, paused: int) -> JsonObject:
    """Return SGLang's answer; unlike there, it is ``success`` only where nothing is left to do."""
    if record.error is not None:
        message = record.error.message
    elif status == ACCEPTED:
        message = f"The update goes on: GET /v1/operations/{record.id} tells how far it is."
    elif _text(record.state) == "partial":
        message = "The new weights stand; the boards in 'failed' are still to load them."
    elif untried(record):
        message = (
            "Succeeded to update model weights. No board has loaded them yet: all of them sleep, "
            "and load them when they wake."
        )
    else:
        message = "Succeeded to update model weights."
    done = record.error is None and _text(record.state) == "succeeded"
    told: JsonObject = {"success": done, "message": message, "num_paused_requests": paused}
    return {**told, "untried": untried(record)}


def untried(record: OperationRecord) -> bool:
    """Return whether every board sleeps, so that none has loaded the weights of an update."""
    loaded = [one.details.get("loaded") for one in record.results.values() if one.good]
    return bool(loaded) and all(one == "asleep" for one in loaded)


def weights_entry(desired: Desired, model: str, boards: Iterable[BoardReport]) -> JsonObject:
    """Return what GET /weight_info says of one model's base weights, and what each board has."""
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


def base_entry(weights: Weights, boards: Iterable[BoardReport]) -> JsonObject:
    """Return base weights as answers have them: of the file in the model folder, as its boards
    report that.
    """
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
    """Return the sha256 of the base model's file that a board has loaded, or a word for why it is
    not known.
    """
    return board.base or board.own_digest or UNKNOWN


def own_digest(boards: Iterable[BoardReport]) -> str:
    """Return the sha256 of the file in the model folders of these boards, or ``hashing``,
    ``mixed`` where the boards have different files, or ``unknown``.
    """
    told = {board.own_digest for board in boards} - {"", UNREADABLE}
    if len(told) > 1:
        told.discard(HASHING)
    if len(told) > 1:
        return MIXED
    return told.pop() if told else UNKNOWN


def taken_entry(model: str, base: BaseVersion | None, facts: Mapping[str, object]) -> JsonObject:
    """Return the answer of POST /v1/weights: base weights that are on the head now."""
    if base is None:
        return {"id": OWN, "object": "weights", "model": model, "own": True, **facts}
    return {
        "id": f"{base.model}@{base.version}",
        "object": "weights",
        "model": base.model,
        "version": base.version,
        "sha256": base.digest,
        "bytes": base.size_bytes,
        "own": False,
        **facts,
    }


def _digest(base: BaseVersion | None) -> str:
    return "" if base is None else base.digest


def _text(value: str) -> str:
    """The plain string of an enum that is one."""
    return str.__str__(value)
