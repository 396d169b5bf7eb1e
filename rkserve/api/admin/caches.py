"""Parameters and answers of the calls about KV caches and prompt caches.

Unknown keys are refused, as in every call that changes the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rkserve.api.admin.generations import AT_ONCE, AT_RESUME, Ranges, choice_of, ranges_of
from rkserve.api.admin.pause import texts
from rkserve.api.admin.query import ControlRequest, ParameterKind, ParameterKinds
from rkserve.api.common.calls import TextOrIds, read_prompt
from rkserve.api.common.output import told
from rkserve.api.common.renderer import PromptHeader, Renderer
from rkserve.api.json.body import JsonObject
from rkserve.api.json.fields import Fields, missing
from rkserve.api.prompting.conversation import Message, read_messages
from rkserve.core.board_report import CacheEntry, KvReport
from rkserve.core.errors import ContextOverflow, RequestError, RkserveError, UnsupportedParameter

Failures = Mapping[str, RkserveError]  # by board

_WHERE: ParameterKinds = {
    "model": ParameterKind.TEXT,
    "board": ParameterKind.TEXTS,
    "boards": ParameterKind.TEXTS,
}
_OF_BOARDS: ParameterKinds = {
    **_WHERE,
    "keep_system_prompt": ParameterKind.FLAG,
    "all": ParameterKind.FLAG,
}
_OF_A_GENERATION: ParameterKinds = {
    "generation": ParameterKind.TEXT,
    "ranges": ParameterKind.JSON,
    "choice": ParameterKind.NUMBER,
}
_CLEAR: ParameterKinds = {**_OF_BOARDS, **_OF_A_GENERATION}
_BUILD: ParameterKinds = {
    "cache_name": ParameterKind.TEXT,
    "prompt": ParameterKind.TEXT,
    "messages": ParameterKind.JSON,
}


@dataclass(frozen=True)
class KvScope:
    """The KV caches that a call is about: of one model, of some boards, or of both; None is all."""

    model: str | None = None
    boards: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ClearCall:
    """POST /v1/cache/kv/clear: either of boards, or of one paused generation."""

    keep_system_prompt: bool = True
    where: KvScope = KvScope()
    generation: str | None = None
    choice: int | None = None
    ranges: Ranges = ()


@dataclass(frozen=True)
class BuildCall:
    """The body of POST /v1/cache/{model}: a name, and either a prompt or messages."""

    cache_name: str
    prompt: TextOrIds | None = None
    messages: tuple[Message, ...] = ()


def parse_size(asked: ControlRequest) -> KvScope:
    """Read GET /v1/cache/kv/size.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    return _places(asked.fields(_WHERE))


def parse_clear(asked: ControlRequest) -> ClearCall:
    """Read POST /v1/cache/kv/clear, which clears only the caches that it names.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    fields = asked.fields(_CLEAR)
    if fields.get("generation") is None:
        _refuse(fields, ("ranges", "choice"), "needs 'generation': ranges are cleared of one only")
        where, keep = _places(fields), fields.maybe_flag("keep_system_prompt")
        _check_named(where, whole=fields.flag("all"))
        return ClearCall(keep is None or keep, where)
    _refuse(fields, _OF_BOARDS, "does not go together with 'generation'")
    return ClearCall(
        generation=fields.required_text("generation"),
        choice=choice_of(fields),
        ranges=ranges_of(fields, "ranges"),
    )


def _places(fields: Fields) -> KvScope:
    if fields.get("board") is not None and fields.get("boards") is not None:
        raise RequestError("'board' and 'boards' are two names of one value; send one.", "boards")
    name = "boards" if fields.get("board") is None else "board"
    boards = None if fields.get(name) is None else texts(fields, name)
    if boards == ():
        raise RequestError(f"Invalid '{name}': empty array.", name)
    model = None if fields.get("model") is None else fields.required_text("model")
    return KvScope(model, boards)


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


def _refuse(fields: Fields, names: Iterable[str], why: str) -> None:
    for name in names:
        if fields.get(name) is not None:
            raise RequestError(f"'{name}' {why}.", name)


def parse_build(asked: ControlRequest) -> BuildCall:
    """Read POST /v1/cache/{model}.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    fields = asked.fields(_BUILD)
    name = fields.cache_name("cache_name")
    if name is None:
        raise missing("cache_name")
    prompt = fields.get("prompt")
    if fields.get("messages") is None:
        if prompt is None:
            raise RequestError("Send what is to be cached as 'prompt' or 'messages'.", "prompt")
        return BuildCall(name, read_prompt(prompt, "prompt"))
    if prompt is not None:
        raise RequestError("Send either 'prompt' or 'messages', not both.", "messages")
    return BuildCall(name, messages=read_messages(fields))


def check_delete(asked: ControlRequest) -> None:
    """Read DELETE /v1/cache/{model}/{cache_name}, which takes no parameters.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    asked.fields({})


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


def kv_list(reports: Sequence[KvReport], failed: Failures) -> JsonObject:
    """Return the contents of the KV caches, by board and in total.

    ``bytes`` is null if the model folder does not state the bytes of a position.
    """
    ordered = sorted(reports, key=lambda report: report.board_id)
    entries = [_kv_entry(report) for report in ordered]
    sizes = [entry["bytes"] for entry in entries]
    return {
        "object": "list",
        "data": entries,
        "total": {
            "positions": sum(entry["positions"] for entry in entries),
            "capacity": sum(entry["capacity"] for entry in entries),
            "bytes": None if None in sizes else sum(sizes),
        },
        "failed": failures(failed),
    }


def _kv_entry(report: KvReport) -> JsonObject:
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


def caches_list(entries: Sequence[CacheEntry], failed: Failures) -> JsonObject:
    """Return the prompt caches of all boards, those with a name first."""
    ordered = sorted(entries, key=lambda e: (e.name is None, e.name or "", e.board_id, e.idle_s))
    return {
        "object": "list",
        "data": [{"board": entry.board_id, **_cache(entry)} for entry in ordered],
        "failed": failures(failed),
    }


def _cache(entry: CacheEntry) -> JsonObject:
    return {
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
) -> JsonObject:
    """Return the result of building a prompt cache."""
    boards: list[JsonObject] = [
        {"board": entry.board_id, "tokens": entry.tokens, "bytes": entry.file_bytes}
        for entry in made
    ]
    return {
        "cache_name": call.cache_name,
        "model": model,
        "tokens": tokens,
        "boards": sorted([*boards, *failures(failed)], key=lambda one: str(one["board"])),
    }


def failures(failed: Failures) -> list[JsonObject]:
    """Return the errors by board."""
    return [
        {"board": board, "error": exc.code or exc.kind, "message": told(exc)}
        for board, exc in sorted(failed.items())
    ]
