"""The part of an answer that all dialects share: text, finish reasons, usage and timings.

Each choice is fed ``Delta`` values and one ``Finished``. Prompt tokens count once per prompt,
however many choices answer it, and so do its cached tokens: those that every choice found in the
cache.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from rkserve.api.common import output
from rkserve.api.common.calls import ChatCall, CompletionCall
from rkserve.api.common.logprobs import ChoiceTokens, SpecialTokens, TokenTexts
from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import Count, Seconds
from rkserve.api.parsing.answer_parser import PLAIN, AnswerParser, ParserOptions
from rkserve.api.parsing.tools.base import Part, Retraction, TextPart
from rkserve.core.messages import FIRST_LABEL, Delta, Finished, FinishReason, Paused, Timings
from rkserve.core.run_params import Sampling

AnyCall = ChatCall | CompletionCall
FinishedBy = Literal["stop", "length", "tool_calls", "function_call", "abort", "content_filter"]


class PromptDetails(TypedDict):
    """Details about the tokens of prompts."""

    cached_tokens: Count


class CompletionDetails(TypedDict):
    """Details about the tokens of answers."""

    reasoning_tokens: Count


class UsageAnswer(TypedDict):
    """Counts of tokens."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TimingsAnswer(TypedDict):
    """Board time as measured, added up over choices."""

    queue_ms: Seconds
    prefill_ms: Seconds
    prefill_tokens: Count
    decode_ms: Seconds
    decode_tokens: Count
    tokens_per_s: float | None
    cached: Count
    paused_ms: NotRequired[Seconds]
    batch: NotRequired[Count]
    batch_wait_ms: NotRequired[Seconds]
    encode_ms: NotRequired[Seconds]
    cache_ms: NotRequired[Seconds]
    continued: NotRequired[Count]
    lost_ms: NotRequired[Seconds]
    boards: NotRequired[list[str]]


class WeightSpan(TypedDict):
    """The version of the weights behind some tokens of an answer."""

    version: str
    start: Count
    end: Count


class WeightSpans(TypedDict):
    """The versions of an answer's tokens, where they were asked for."""

    weight_versions: NotRequired[list[WeightSpan]]


def fingerprint(model_id: str, release: str, adapter: str | None = None) -> str:
    """Return ``system_fingerprint``: equal for the same model, runtime release and adapter."""
    # The lengths keep ("ab", "c") and ("a", "bc") apart.
    parts = (model_id, release, adapter or "")
    content = "".join(f"{len(part)}:{part}" for part in parts)
    return f"fp_{hashlib.sha256(content.encode()).hexdigest()[:10]}"


@dataclass(frozen=True)
class AnswerOrigin:
    """The origin of an answer: the model, the runtime's release and the versions of the weights.

    ``accepted`` holds, by choice, the version that the board would have used on admission; the
    version that it did use is known at the end. ``key_of`` returns the content key of a version,
    which changes when the version is made anew, and None for an unknown version. It is called
    when a version is first met: a long answer may end with one that did not exist before.
    ``prompt_tokens`` counts the first prompt, 0 where only the board can count. ``reading`` holds
    the options of the answer parser. ``lexicon`` is set if the answer lists single tokens or its
    prompt. Tokens in ``ends`` end an answer. ``sampling`` holds the values in force.
    """

    model: str
    release: str
    accepted: tuple[str, ...] = (FIRST_LABEL,)
    key_of: Callable[[str], str | None] = lambda _version: None
    prompt_tokens: int = 0
    reading: ParserOptions = PLAIN
    lexicon: TokenTexts | None = None
    sampling: Sampling = field(default_factory=Sampling)
    ends: frozenset[int] = frozenset()

    def fingerprint(self, versions: Iterable[str]) -> str:
        """Return the ``system_fingerprint`` for these versions."""
        contents = dict.fromkeys(self._content(version) for version in versions)
        return fingerprint(self.model, self.release, ",".join(sorted(contents)))

    def _content(self, version: str) -> str:
        key = self.key_of(version)
        if key is not None:
            return key
        return "" if version == FIRST_LABEL else version


class DialectAnswer(ABC):
    """The answer to a call, base of those of all dialects. ``created`` is in seconds since 1970.

    ``delta`` and ``finish`` stream it; ``add``, ``end`` and ``whole`` collect it.
    """

    def __init__(self, call: AnyCall, answer_id: str, created: int, stamp: AnswerOrigin) -> None:
        self.id = answer_id
        self._model = call.model
        self._created = created
        self._stamp = stamp
        self._return_versions = call.return_weight_versions
        self._tells_of_pauses = bool(call.pause_on)
        self._tries = call.tries
        self._tokens: list[ChoiceTokens] = []
        if stamp.lexicon is not None:
            self._tokens = [ChoiceTokens() for _ in range(call.choices)]
        self._specials: list[SpecialTokens] = []
        if call.special_tokens and stamp.lexicon is not None:
            known = stamp.lexicon.known
            self._specials = [SpecialTokens(known, stamp.ends) for _ in range(call.choices)]
        self._include_stop = call.include_stop
        self._choices = call.choices
        self._speeches = [AnswerParser(stamp.reading) for _ in range(call.choices)]
        self._ends: dict[int, Finished] = {}

    def speech(self, index: int) -> AnswerParser:
        """Return the parser of a choice, with its text, reasoning and tool calls."""
        return self._speeches[index]

    # -- streamed -------------------------------------------------------------------------------

    def opening(self, index: int) -> bytes:  # noqa: ARG002 - most dialects open with nothing
        """Return the bytes before the first delta of a choice."""
        return b""

    @abstractmethod
    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the bytes of a delta; nothing if it neither adds nor retracts anything."""

    def paused(self, index: int, paused: Paused) -> bytes:  # noqa: ARG002 - a comment has no facts
        """Return the bytes of a pause."""
        return output.PAUSED

    @abstractmethod
    def finish(self, index: int, finished: Finished) -> bytes:
        """Return the bytes that end a choice, with the parts that were held back."""

    def closing(self) -> bytes:
        """Return the bytes after the last choice."""
        return output.DONE

    def broken(self, exc: BaseException) -> bytes:
        """Return the bytes that end a stream which breaks."""
        return output.broken_stream(exc)

    # -- whole ----------------------------------------------------------------------------------

    def add(self, index: int, delta: Delta) -> list[Part]:
        """Add a delta of a choice, and return its parts."""
        return self._speeches[index].feed(self._taken(index, delta))

    @abstractmethod
    def whole(self) -> JsonObject:
        """Return the whole answer. Every choice must have ended."""

    # -- for dialects ---------------------------------------------------------------------------

    def _parts(self, index: int, delta: Delta) -> list[Part]:
        """Return the parts of a delta. Plain text, the path of most tokens, needs no parser."""
        if self._tokens or not self._stamp.reading.plain:
            return DialectAnswer.add(self, index, delta)
        found: list[Part] = [Retraction(delta.retract)] if delta.retract else []
        return [*found, TextPart(delta.text)] if delta.text else found

    def _taken(self, index: int, delta: Delta) -> Delta:
        """Count the tokens of a delta; return it with all visible text."""
        if self._tokens:
            self._tokens[index].add(delta)
        return self._specials[index].named(delta) if self._specials else delta

    def end(self, index: int, finished: Finished) -> list[Part]:
        """End a choice, and return the parts that were held back."""
        self._ends[index] = finished
        tail = ""
        if self._specials and self._include_stop and finished.reason is FinishReason.STOP:
            tail = self._specials[index].tail(self._tokens[index].last)
        parts = self._speeches[index].feed(Delta(tail, ())) if tail else []
        return [*parts, *self._speeches[index].end()]

    @property
    def versions(self) -> list[str]:
        """The version of each choice's last token, or the one it was accepted with until then."""
        return [self._version(index) for index in range(self._choices)]

    def _version(self, index: int) -> str:
        end = self._ends.get(index)
        if end is not None and end.versions:
            return end.versions[-1].version
        return self._stamp.accepted[min(index, len(self._stamp.accepted) - 1)]

    def _seal(self, versions: list[str]) -> JsonObject:
        """Return the keys about the weights: the version may have changed since admission."""
        return {
            "system_fingerprint": self._stamp.fingerprint(versions),
            "weight_version": ", ".join(dict.fromkeys(versions)),
        }

    def _spans(self, index: int) -> JsonObject:
        """Return the version of each token of a finished choice, if requested."""
        if not self._return_versions:
            return {}
        end = self._ends[index]
        spans = [
            {"version": span.version, "start": span.start, "end": span.end} for span in end.versions
        ]
        tokens = end.usage.completion_tokens
        whole = [{"version": self._version(index), "start": 0, "end": tokens}] if tokens else []
        return {"weight_versions": spans or whole}

    def usage(self) -> UsageAnswer:
        """Return the counts of the choices that have ended."""
        prompts: dict[int, list[Finished]] = {}
        for index, end in self._ends.items():
            prompts.setdefault(index // self._tries, []).append(end)
        prompt = sum(ends[0].usage.prompt_tokens for ends in prompts.values())
        cached = sum(min(e.usage.cached_tokens for e in ends) for ends in prompts.values())
        completion = sum(end.usage.completion_tokens for end in self._ends.values())
        thoughts = sum(end.usage.reasoning_tokens for end in self._ends.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": thoughts},
        }


def retracted(
    void: Retraction,
    names: tuple[str, ...] = ("retract", "retract_reasoning", "retract_tool_calls"),
) -> JsonObject:
    """Return a retraction's counts of characters, reasoning and calls by ``names``, without 0."""
    counts = zip(names, (void.words, void.thoughts, void.calls), strict=False)
    return {name: count for name, count in counts if count}


def pause_status(index: int, paused: Paused) -> JsonObject:
    """Return the stream's status for a paused choice."""
    return {
        "status": "paused",
        "choice": index,
        "by": paused.by,
        "tokens": paused.tokens,
        "kv": paused.kv.value,
    }


def timings_of(ends: list[Finished]) -> TimingsAnswer:
    """Return the measured board times, added up over choices."""
    measured = [end.timings for end in ends]
    decode_ms, decode_tokens = _total(measured, "decode_ms"), _total(measured, "decode_tokens")
    timings: TimingsAnswer = {
        "queue_ms": round(_total(measured, "queue_ms"), 3),
        "prefill_ms": round(_total(measured, "prefill_ms"), 3),
        "prefill_tokens": _total(measured, "prefill_tokens"),
        "decode_ms": round(decode_ms, 3),
        "decode_tokens": decode_tokens,
        "tokens_per_s": round(decode_tokens * 1000 / decode_ms, 2) if decode_ms > 0 else None,
        "cached": sum(end.usage.cached_tokens for end in ends),
    }
    if paused_ms := _total(measured, "paused_ms"):
        timings["paused_ms"] = round(paused_ms, 3)
    if (batch := max(timings.batch for timings in measured)) > 1:
        timings["batch"] = batch
    if batch_wait_ms := _total(measured, "batch_wait_ms"):
        timings["batch_wait_ms"] = round(batch_wait_ms, 3)
    if encode_ms := _total(measured, "encode_ms"):
        timings["encode_ms"] = round(encode_ms, 3)
    if cache_ms := _total(measured, "cache_ms"):
        timings["cache_ms"] = round(cache_ms, 3)
    if continued := _total(measured, "continued"):
        timings["continued"] = continued
        timings["lost_ms"] = round(_total(measured, "lost_ms"), 3)
    if boards := [board for timings in measured for board in timings.boards]:
        timings["boards"] = list(dict.fromkeys(boards))
    return timings


def _total(measured: list[Timings], name: str) -> Any:
    return sum(getattr(timings, name) for timings in measured)


@dataclass(frozen=True)
class Dialect:
    """The reader and the answers of one API.

    ``parse`` reads a body, or raises ``RequestError``. ``answer`` takes a call, its ID (which
    begins with ``prefix``), the time in seconds since 1970 and the origin. ``ping`` keeps a silent
    stream open, also before a board has accepted it; ``broken`` ends one without an answer.
    """

    parse: Callable[[bytes], AnyCall]
    answer: Callable[[AnyCall, str, int, AnswerOrigin], DialectAnswer]
    prefix: str
    ping: Callable[[AnyCall], bytes] = lambda _call: output.PING
    broken: Callable[[BaseException], bytes] = output.broken_stream
    headers: Mapping[str, str] = field(default_factory=lambda: output.HEADERS)
