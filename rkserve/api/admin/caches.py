"""Parameters and answers of the calls about KV caches and prompt caches.

Unknown keys are refused, as in every call that changes the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    SkipValidation,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import NotRequired, TypedDict

from rkserve.api.admin.generations import (
    AT_ONCE,
    AT_RESUME,
    CHOICE_MEANS,
    Choice,
    FailedEntry,
    PositionRanges,
)
from rkserve.api.admin.pause import NAMES, read_names
from rkserve.api.admin.query import ControlRequest, ParameterKind, QueryOrBody
from rkserve.api.common.calls import ChatMessage, TextOrIds, read_prompt
from rkserve.api.common.output import public_message
from rkserve.api.common.renderer import PromptHeader, Renderer
from rkserve.api.json.fields import MAX_MODEL_CHARS, Fields, missing
from rkserve.api.json.schemas import Count, Seconds, one_of
from rkserve.api.prompting.conversation import Message, read_messages
from rkserve.core.board_report import CacheEntry, KvReport
from rkserve.core.errors import ContextOverflow, RequestError, RkserveError, UnsupportedParameter
from rkserve.core.files import check_cache_name

Failures = Mapping[str, RkserveError]  # by board

MaybeNames = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(read_names),
    WithJsonSchema(NAMES),
    ParameterKind.TEXTS,
]
Text = Annotated[str, Field(min_length=1)]


class KvSizeQuery(QueryOrBody):
    """The KV caches that are meant; all of them without a key."""

    model: Text | None = Field(
        None,
        description="Only boards of this model.",
        json_schema_extra={"maxLength": MAX_MODEL_CHARS},
    )
    boards: MaybeNames = Field(None, description="Only these boards.")
    board: MaybeNames = Field(None, description="Another name of `boards`.")

    @property
    def where(self) -> KvScope:
        """The scope. Raises ``RequestError``."""
        if self.board is not None and self.boards is not None:
            raise RequestError(
                "'board' and 'boards' are two names of one value; send one.", "boards"
            )
        name, boards = ("boards", self.boards) if self.board is None else ("board", self.board)
        if boards == ():
            raise RequestError(f"Invalid '{name}': empty array.", name)
        return KvScope(self.model, boards)


class KvClearBody(KvSizeQuery):
    """Either boards, or `ranges` of one paused `generation`."""

    all: bool | None = Field(None, description="All boards; needed if no other is named.")
    keep_system_prompt: bool | None = Field(None, description="Spare the system prompt (default).")
    generation: Text | None = Field(None, description="The id of a paused answer, not boards.")
    ranges: PositionRanges | None = Field(None, description="Positions of that answer's context.")
    choice: Choice | None = Field(None, description=CHOICE_MEANS)

    @model_validator(mode="after")
    def _check_place(self) -> KvClearBody:
        if self.generation is None:
            self._refuse(("ranges", "choice"), "needs 'generation': ranges are cleared of one only")
            _check_named(self.where, whole=bool(self.all))
        else:
            of_boards = ("model", "board", "boards", "keep_system_prompt", "all")
            self._refuse(of_boards, "does not go together with 'generation'")
            if self.ranges is None:
                raise missing("ranges")
        return self

    def _refuse(self, names: Iterable[str], why: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise RequestError(f"'{name}' {why}.", name)


class CacheBody(QueryOrBody):
    """A name, and either `prompt` or `messages`."""

    cache_name: Annotated[str, AfterValidator(lambda name: check_cache_name(name, "cache_name"))]
    prompt: (
        Annotated[
            TextOrIds,
            PlainValidator(lambda value: read_prompt(value, "prompt")),
            WithJsonSchema(
                {
                    "anyOf": [
                        {"type": "string", "minLength": 1},
                        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    ]
                }
            ),
            ParameterKind.TEXT,
        ]
        | None
    ) = None
    messages: SkipValidation[Annotated[list[ChatMessage], Field(min_length=1)] | None] = None

    @model_validator(mode="after")
    def _check_source(self) -> CacheBody:
        if self.messages is None and self.prompt is None:
            raise RequestError("Send what is to be cached as 'prompt' or 'messages'.", "prompt")
        if self.messages is not None and self.prompt is not None:
            raise RequestError("Send either 'prompt' or 'messages', not both.", "messages")
        return self


@dataclass(frozen=True)
class KvScope:
    """The KV caches that a call is about: of one model, of some boards, or of both; None is all."""

    model: str | None = None
    boards: tuple[str, ...] | None = None


@dataclass(frozen=True)
class BuildCall:
    """The body of POST /v1/cache/{model}: a name, and either a prompt or messages."""

    cache_name: str
    prompt: TextOrIds | None = None
    messages: tuple[Message, ...] = ()


def _check_named(where: KvScope, *, whole: bool) -> None:
    named = where != KvScope()
    if not named and not whole:
        raise RequestError(
            "Name what to clear: 'model', 'boards' or 'generation'. Send 'all': true to clear the "
            "KV caches of all boards.",
            "all",
        )
    if named and whole:
        raise RequestError("'all' does not go together with 'model' or 'boards'.", "all")


def parse_build(asked: ControlRequest) -> BuildCall:
    """Read POST /v1/cache/{model}. Raises ``RequestError``."""
    body = asked.read(CacheBody)
    if body.messages is None:
        return BuildCall(body.cache_name, body.prompt)
    return BuildCall(body.cache_name, messages=read_messages(Fields({"messages": body.messages})))


def ids_of(call: BuildCall, renderer: Renderer, context_len: int) -> tuple[int, ...]:
    """Return the token IDs for a prompt cache.

    Messages are rendered without the header of an answer, since the continuations differ.

    Raises:
        RequestError: the model cannot take them.
        ContextOverflow: they leave no room for anything else.
    """
    param = "messages" if call.prompt is None else "prompt"
    if renderer.tokenizer is None:
        raise UnsupportedParameter(
            "A prompt cache is kept by token ids, and this model is served without a tokenizer.",
            param,
        )
    if call.prompt is None:
        found = renderer.chat(call.messages, context_len, PromptHeader(answer=False))
    else:
        found = renderer.text(call.prompt, "prompt", context_len)
    if len(found.ids) >= context_len:
        raise ContextOverflow(len(found.ids), context_len, param)
    return found.ids


class KvEntry(TypedDict):
    """The KV cache of a board."""

    board: str
    model: str
    positions: Count
    entries: list[Count]
    capacity: Count
    bytes: Count | None
    status: Annotated[str, one_of(("ok", "cleared", "pending"))]
    applied: Annotated[
        str,
        one_of((AT_ONCE, AT_RESUME)),
        Field(
            description="`at_resume`: a paused generation's edits change it when that is resumed."
        ),
    ]
    positions_at_resume: Annotated[
        Count | None,
        Field(description="The positions that stay then; null where nothing is to be changed."),
    ]


class KvTotalEntry(TypedDict):
    """All of these KV caches together."""

    positions: Count
    capacity: Count
    bytes: Count | None


class KvCachesAnswer(TypedDict):
    """The contents of KV caches, by board and together."""

    object: Literal["list"]
    data: list[KvEntry]
    total: KvTotalEntry
    failed: list[FailedEntry]


class KvResultEntry(TypedDict):
    """A board whose KV cache was cleared."""

    status: str
    latency_ms: Seconds


class KvClearedAnswer(KvCachesAnswer):
    """The KV caches after they were cleared."""

    results: dict[str, KvResultEntry]


class BuiltEntry(TypedDict):
    """A board that built a prompt cache, or the reason that it did not."""

    board: str
    tokens: NotRequired[Count]
    bytes: NotRequired[Count]
    error: NotRequired[str]
    message: NotRequired[str]


class CacheBuilt(TypedDict):
    """A prompt cache on the boards of a model."""

    cache_name: str
    model: str
    tokens: Count
    boards: list[BuiltEntry]


class CacheBuiltAnswer(CacheBuilt):
    """A prompt cache, and whether boards that join build it, too."""

    kept: bool


class PromptCacheEntry(TypedDict):
    """A prompt cache of a board; one without a name is a parked conversation."""

    board: str
    cache_name: str | None
    parked: bool
    model: str
    adapter: str | None
    tokens: Count
    bytes: Count
    age_s: float
    idle_s: float


class KeptFailureEntry(TypedDict):
    """A board that could not build a kept cache."""

    board: str
    message: str


class KeptCacheEntry(TypedDict):
    """A prompt cache that boards build when they join."""

    cache_name: str
    adapter: str | None
    tokens: Count
    configured: bool
    failed: list[KeptFailureEntry]


class PromptCacheList(TypedDict):
    """The prompt caches of boards, those with a name first."""

    object: Literal["list"]
    data: list[PromptCacheEntry]
    failed: list[FailedEntry]


class PromptCachesAnswer(PromptCacheList):
    """The prompt caches of boards, and those that boards build when they join.

    These are null while the Coordinator is away.
    """

    kept: list[KeptCacheEntry] | None


class CacheDeletedAnswer(TypedDict):
    """A prompt cache that is gone."""

    cache_name: str
    deleted: Annotated[bool, WithJsonSchema({"const": True})]
    model: str
    boards: list[str]
    failed: list[FailedEntry]


def kv_list(reports: Sequence[KvReport], failed: Failures) -> KvCachesAnswer:
    """Return the contents of the KV caches, by board and in total.

    ``bytes`` is null if the model folder does not state the bytes of a position.
    """
    ordered = sorted(reports, key=lambda report: report.board_id)
    entries = [_kv_entry(report) for report in ordered]
    sizes = [size for entry in entries if (size := entry["bytes"]) is not None]
    return {
        "object": "list",
        "data": entries,
        "total": {
            "positions": sum(entry["positions"] for entry in entries),
            "capacity": sum(entry["capacity"] for entry in entries),
            "bytes": sum(sizes) if len(sizes) == len(entries) else None,
        },
        "failed": failures(failed),
    }


def _kv_entry(report: KvReport) -> KvEntry:
    positions, size = sum(report.entries), report.position_bytes
    return {
        "board": report.board_id,
        "model": report.model,
        "positions": positions,
        "entries": list(report.entries),
        "capacity": report.capacity,
        "bytes": None if size is None else positions * size,
        "status": report.status,
        "applied": AT_ONCE if report.at_resume is None else AT_RESUME,
        "positions_at_resume": report.at_resume,
    }


def caches_list(entries: Sequence[CacheEntry], failed: Failures) -> PromptCacheList:
    """Return the prompt caches of all boards, those with a name first."""
    ordered = sorted(entries, key=lambda e: (e.name is None, e.name or "", e.board_id, e.idle_s))
    return {
        "object": "list",
        "data": [_cache(entry) for entry in ordered],
        "failed": failures(failed),
    }


def _cache(entry: CacheEntry) -> PromptCacheEntry:
    return {
        "board": entry.board_id,
        "cache_name": entry.name,
        "parked": entry.name is None,
        "model": entry.model,
        "adapter": entry.adapter,
        "tokens": entry.tokens,
        "bytes": entry.file_bytes,
        "age_s": round(entry.age_s, 3),
        "idle_s": round(entry.idle_s, 3),
    }


def built(
    call: BuildCall, model: str, tokens: int, made: Sequence[CacheEntry], failed: Failures
) -> CacheBuilt:
    """Return the result of building a prompt cache."""
    boards: list[BuiltEntry] = [
        {"board": entry.board_id, "tokens": entry.tokens, "bytes": entry.file_bytes}
        for entry in made
    ]
    boards += [
        {"board": one["board"], "error": one["error"], "message": one["message"]}
        for one in failures(failed)
    ]
    return {
        "cache_name": call.cache_name,
        "model": model,
        "tokens": tokens,
        "boards": sorted(boards, key=lambda one: one["board"]),
    }


def failures(failed: Failures) -> list[FailedEntry]:
    """Return the errors by board."""
    return [
        {"board": board, "error": exc.code or exc.kind, "message": public_message(exc)}
        for board, exc in sorted(failed.items())
    ]
