"""The objects of GET /v1/models and GET /v1/boards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Annotated, Any, Literal, get_type_hints

from typing_extensions import NotRequired, TypedDict

from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import Count, one_of
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import AdapterVersion, AdapterVersions, Desired, SleepLevel
from rkserve.core.errors.requests import without_folders
from rkserve.models.adapters import Adapter
from rkserve.models.settings import EmbeddingSettings, VisionSettings

OWNER = "rkserve"


class ListedBoard(TypedDict):
    """A board of a model."""

    id: str
    state: str
    reason: str
    release: str
    platform: str
    library: str
    node: str


class VisionFacts(TypedDict):
    """Facts about the images that a model takes."""

    image_tokens: Count


class ModelFacts(TypedDict):
    """rkserve's own facts about a model, or about an adapter and its version."""

    context_length: Count
    state: NotRequired[
        Literal["ready", "loading", "fetching", "paused", "asleep", "drained", "failed"]
    ]
    embedding: NotRequired[JsonObject | None]
    vision: NotRequired[VisionFacts | None]
    boards: NotRequired[list[ListedBoard]]
    adapter: NotRequired[str]
    scale: NotRequired[float | None]
    version: NotRequired[str | None]
    digest: NotRequired[str | None]
    bytes: NotRequired[Count]
    broken: NotRequired[str | None]
    candidate: NotRequired[str | None]
    weight: NotRequired[float | None]
    versions: NotRequired[list[JsonObject]]


class ModelAnswer(TypedDict):
    """OpenAI's model with Anthropic's keys beside them. An adapter has a `parent`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    rkserve: ModelFacts
    parent: NotRequired[str]


class ModelsAnswer(TypedDict):
    """OpenAI's list of models, which is all of Anthropic's pages, too."""

    object: Literal["list"]
    data: list[ModelAnswer]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


def model_entry(
    model_id: str,
    created: int,
    context_length: int,
    boards: Iterable[BoardReport],
    desired: Desired,
    *,
    embedding: EmbeddingSettings | None = None,
    vision: VisionSettings | None = None,
) -> JsonObject:
    """Return OpenAI's Model object, with rkserve's own facts under one key.

    ``embedding`` and ``vision`` are the settings of models with these abilities. ``created`` is in
    seconds since 1970. A board that does not serve is listed with its reason.
    """
    ordered = sorted(boards, key=lambda board: board.board_id)
    facts = {
        "context_length": context_length,
        "state": model_state(desired, ordered),
        "embedding": None if embedding is None else embedding.model_dump(),
        "vision": None if vision is None else {"image_tokens": vision.tokens},
        "boards": [_board(board) for board in ordered],
    }
    return _entry(model_id, created, facts)


def model_state(desired: Desired, boards: Iterable[BoardReport]) -> str:
    """Return the state of a model in one word.

    ``ready``: a board serves. ``loading``: no board serves yet. ``fetching``: the boards still
    fetch the model. ``paused``: the boards are paused
    with their model loaded. ``asleep``: it is unloaded. ``drained``: an operator has drained the
    boards. ``failed``: no board can serve. A model without a board's report is loading.
    """
    found = {_state(desired, board) for board in boards} or {"loading"}
    return next(state for state in _STATES if state in found)


_STATES = ("ready", "loading", "fetching", "paused", "asleep", "drained", "failed")
_COMING = (BoardState.LOADING, BoardState.RECOVERING, BoardState.JOINING, BoardState.ASLEEP)


def _state(desired: Desired, board: BoardReport) -> str:
    target = desired.target(board.board_id, board.model)
    if board.state is BoardState.FETCHING:
        return "fetching"
    if board.state is not BoardState.READY and board.state not in _COMING:
        return "failed"
    if target.drained:
        return "drained"
    if target.level is not None and target.level > SleepLevel.PAUSED:
        return "asleep"
    if board.state is not BoardState.READY:
        return "loading"
    return "ready" if target.hold is None else "paused"


def adapter_entry(
    model_id: str,
    created: int,
    context_length: int,
    versions: Sequence[Adapter],
    named: str | None = None,
) -> JsonObject:
    """Return the Model object of an adapter, whose ``versions`` are in order.

    ``named`` is the version that the request named; None means the newest.
    """
    meant = next((a for a in versions if a.version == named), versions[-1])
    name = f"{model_id}:{meant.name if named is None else meant.label}"
    facts = {
        "context_length": context_length,
        "adapter": meant.name,
        "scale": meant.scale,
        **_version(meant),
        "versions": [_version(one) for one in versions],
    }
    return _entry(name, created, facts) | {"parent": model_id}


def line_entry(
    created: int, context_length: int, line: AdapterVersions, named: str | None = None
) -> JsonObject:
    """Return the Model object of an adapter in the desired state.

    ``named`` is the version that the request named; None means the active one.
    """
    meant = line.active if named is None else line.version(named)
    name = f"{line.model}:{line.name if named is None else f'{line.name}@{named}'}"
    facts = {
        "context_length": context_length,
        "adapter": line.name,
        "scale": None if meant is None else meant.ref.scale,
        **_line_version(meant),
        "candidate": None if line.candidate is None else line.candidate.ref.version,
        "weight": line.weight,
        "versions": [{**_line_version(one), "scale": one.ref.scale} for one in line.versions],
    }
    return _entry(name, created, facts) | {"parent": line.model}


def models_list(entries: Sequence[JsonObject]) -> JsonObject:
    """Return the answer of GET /v1/models: OpenAI's list, which is all of Anthropic's pages too."""
    data = list(entries)
    return {
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _entry(name: str, created: int, facts: JsonObject) -> JsonObject:
    """Return OpenAI's object with the keys that Anthropic's clients read at the same path."""
    written = datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "type": "model",
        "display_name": name,
        "created_at": written,
        "lifecycle": "active",
        "rkserve": facts,
    }


class CircuitEntry(TypedDict):
    """The Router's circuit breaker for a board."""

    state: str
    reason: str


class FetchEntry(TypedDict):
    """The progress of a board that fetches its model; `source` is a board, or `head`."""

    fetched_bytes: int
    total_bytes: int
    bytes_per_s: float
    source: str
    corrupted: int


# A board's own report under its names, with other types where JSON has others.
_REPORT: dict[str, Any] = get_type_hints(BoardReport) | {
    "id": str,
    "object": Literal["board"],
    "circuit": CircuitEntry,
    "state": Annotated[str, one_of(BoardState)],
    "serving": dict[str, str],
    "hardware": dict[str, Any] | None,
    "fetch": FetchEntry | None,
    "adapters": list[str],
    "staged": list[str],
    "versions": list[dict[str, Any]],
    "crashes": dict[str, int],
}
_NOT_TOLD = ("board_id", "holdings")
_TYPED: Any = TypedDict  # the type checker knows no keys that are computed
BoardAnswer = _TYPED(
    "BoardAnswer", {name: kind for name, kind in _REPORT.items() if name not in _NOT_TOLD}
)
BoardAnswer.__doc__ = "A board as its own report has it; counters run since its replica's start."


class BoardsAnswer(TypedDict):
    """All boards."""

    object: Literal["list"]
    data: list[BoardAnswer]  # type: ignore[valid-type] # a type made at run time


def board_entry(board: BoardReport, circuit: tuple[str, str]) -> JsonObject:
    """Return a board's report, under the report's names.

    ``circuit`` is the state of the Router's circuit breaker, and its reason.
    """
    entry = asdict(board)
    del entry["holdings"]  # hashes, and of use to Routers only
    entry["serving"] = dict(board.serving)
    entry["crashes"] = dict(board.crashes)
    entry |= {"state": board.state.value, "reason": without_folders(board.reason)}
    entry["last_recovery"] = without_folders(board.last_recovery)
    state, reason = circuit
    entry["circuit"] = {"state": state, "reason": without_folders(reason)}
    return {"id": entry.pop("board_id"), "object": "board", **entry}


def boards_list(boards: Iterable[tuple[BoardReport, tuple[str, str]]]) -> JsonObject:
    """Return the answer of GET /v1/boards: each board with its circuit."""
    return {"object": "list", "data": [board_entry(*board) for board in boards]}


def _version(adapter: Adapter) -> JsonObject:
    return {
        "version": adapter.version,
        "digest": adapter.digest or None,
        "bytes": adapter.size_bytes,
        "broken": without_folders(adapter.broken) or None,
    }


def _line_version(version: AdapterVersion | None) -> JsonObject:
    if version is None:
        return {"version": None, "digest": None, "bytes": 0, "broken": None}
    return {
        "version": version.ref.version,
        "digest": version.ref.digest,
        "bytes": version.size_bytes,
        "broken": None,
    }


def _board(board: BoardReport) -> JsonObject:
    names = ("release", "platform", "library", "node")
    return {
        "id": board.board_id,
        "state": board.state.value,
        "reason": without_folders(board.reason),
        **{name: getattr(board, name) for name in names},
    }
