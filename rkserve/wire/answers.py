"""Events of boards to OpenAI's answers, streamed or whole; it knows JSON shapes, not transport.

One object belongs to one call. Per choice it is fed ``Delta`` values and one ``Finished``; the
usage of the whole call adds up in it. Prompt tokens count once per prompt, however many choices
answer it, and so do its cached tokens: those that every choice found in the cache. Streams tell of
pauses, and of words that an edit took back from a client that has them already; an answer in one
piece is just what it became.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from rkserve.messages import FIRST_LABEL, Delta, Finished, Paused, Timings
from rkserve.wire import sse
from rkserve.wire.jsonbody import JsonObject
from rkserve.wire.openai import ChatCall, CompletionCall


def fingerprint(model_id: str, release: str, adapter: str | None = None) -> str:
    """Return ``system_fingerprint``: equal for the same model, runtime release and adapter."""
    # The lengths keep ("ab", "c") and ("a", "bc") apart.
    parts = (model_id, release, adapter or "")
    content = "".join(f"{len(part)}:{part}" for part in parts)
    return f"fp_{hashlib.sha256(content.encode()).hexdigest()[:10]}"


@dataclass(frozen=True)
class Stamp:
    """What an answer comes from: the model, the runtime's release and versions of the weights.

    ``accepted`` has for each choice the version that its board would have begun with when it took
    it; what it was really generated with is known at its end. ``key_of`` returns the content of a
    version, which one that was made anew does not share, and None of one that it does not know. It
    is asked when a version is met: a long answer may end with one that was not there before.
    """

    model: str
    release: str
    accepted: tuple[str, ...] = (FIRST_LABEL,)
    key_of: Callable[[str], str | None] = lambda _version: None

    def fingerprint(self, versions: Iterable[str]) -> str:
        """Return ``system_fingerprint`` of what comes from these versions."""
        contents = dict.fromkeys(self._content(version) for version in versions)
        return fingerprint(self.model, self.release, ",".join(sorted(contents)))

    def _content(self, version: str) -> str:
        key = self.key_of(version)
        if key is not None:
            return key
        return "" if version == FIRST_LABEL else version


def completion_id(call: ChatCall | CompletionCall, unique: str) -> str:
    """Return the id of the answer to a call, which is also that of its generations."""
    return f"chatcmpl-{unique}" if isinstance(call, ChatCall) else f"cmpl-{unique}"


class _Answer(ABC):
    """What chat and completion answers share.

    ``created`` is in seconds since 1970.
    """

    _whole_object: ClassVar[str]
    _chunk_object: ClassVar[str]

    def __init__(
        self, call: ChatCall | CompletionCall, answer_id: str, created: int, stamp: Stamp
    ) -> None:
        self.id = answer_id
        self._model = call.model
        self._created = created
        self._stamp = stamp
        self._fingerprint = stamp.fingerprint(stamp.accepted)
        self._return_versions = call.return_weight_versions
        self._n = call.n
        self._choices = call.choices
        self._include_usage = call.include_usage
        self._tells_of_pauses = bool(call.pause_on)
        self._texts: list[list[str]] = [[] for _ in range(call.choices)]
        self._ends: dict[int, Finished] = {}
        self._frames: dict[int, sse.Frame] = {}

    def opening(self, index: int) -> bytes:  # noqa: ARG002 - completions open with nothing
        """Return what comes before the first delta of a choice."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the chunk of a delta; nothing if it brings no text and takes none back."""
        if delta.retract:
            piece = self._piece(index, delta.text, None)
            return sse.data({**self._chunk([piece]), "rkserve": {"retract": delta.retract}})
        if not delta.text:
            return b""
        frame = self._frames.get(index)
        if frame is None:
            piece = self._piece(index, sse.Frame.HOLE, None)
            frame = self._frames[index] = sse.Frame(self._chunk([piece]))
        return frame.fill(delta.text)

    def paused(self, index: int, paused: Paused) -> bytes:
        """Return what tells of a pause: a comment, and a chunk to clients that asked for pauses."""
        if not self._tells_of_pauses:
            return sse.PAUSED
        status = {
            "status": "paused",
            "choice": index,
            "by": paused.by,
            "tokens": paused.tokens,
            "kv": paused.kv.value,
        }
        return sse.PAUSED + sse.data({**self._chunk([]), "rkserve": status})

    def finish(self, index: int, finished: Finished) -> bytes:
        """Return the chunk that ends a choice."""
        self._ends[index] = finished
        piece = self._piece(index, "", finished.reason.value) | self._spans(index)
        told = {**self._seal([self._version(index)]), "timings": _timings([finished])}
        return sse.data({**self._chunk([piece]), **told})

    def usage_chunk(self) -> bytes:
        """Return the last chunk, which has no choices; nothing unless the client asked for it."""
        if not self._include_usage:
            return b""
        return sse.data({**self._chunk([]), "usage": self.usage()})

    def add(self, index: int, delta: Delta) -> None:
        """Take a delta of an answer that is sent whole."""
        texts = self._texts[index]
        if delta.retract:
            texts[:] = ["".join(texts)[: -delta.retract]]
        texts.append(delta.text)

    def end(self, index: int, finished: Finished) -> None:
        """Take the end of a choice of an answer that is sent whole."""
        self._ends[index] = finished

    def whole(self) -> JsonObject:
        """Return the answer. Every choice must have ended."""
        return {
            **self._head(self._whole_object),
            **self._seal(self.versions),
            "choices": [
                self._choice(i, "".join(self._texts[i]), self._ends[i].reason.value)
                | self._spans(i)
                for i in range(self._choices)
            ],
            "usage": self.usage(),
            "timings": _timings([self._ends[i] for i in range(self._choices)]),
        }

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
        """What tells of the weights: a board may have begun with others than it accepted with."""
        return {
            "system_fingerprint": self._stamp.fingerprint(versions),
            "weight_version": ", ".join(dict.fromkeys(versions)),
        }

    def _spans(self, index: int) -> JsonObject:
        """Which version each token of a choice that has ended comes from, where that was asked."""
        if not self._return_versions:
            return {}
        end = self._ends[index]
        spans = [
            {"version": span.version, "start": span.start, "end": span.end} for span in end.versions
        ]
        tokens = end.usage.completion_tokens
        whole = [{"version": self._version(index), "start": 0, "end": tokens}] if tokens else []
        return {"weight_versions": spans or whole}

    def usage(self) -> JsonObject:
        """Return the counts of the choices that have ended."""
        prompts: dict[int, list[Finished]] = {}
        for index, end in self._ends.items():
            prompts.setdefault(index // self._n, []).append(end)
        prompt = sum(ends[0].usage.prompt_tokens for ends in prompts.values())
        cached = sum(min(e.usage.cached_tokens for e in ends) for ends in prompts.values())
        completion = sum(end.usage.completion_tokens for end in self._ends.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _head(self, kind: str) -> JsonObject:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        chunk = {**self._head(self._chunk_object), "choices": choices}
        # As OpenAI: with include_usage every chunk has the key, and only the last one a value.
        return {**chunk, "usage": None} if self._include_usage else chunk

    @abstractmethod
    def _piece(self, index: int, text: str, reason: str | None) -> JsonObject:
        """One choice of a chunk."""

    @abstractmethod
    def _choice(self, index: int, text: str, reason: str) -> JsonObject:
        """One choice of a whole answer."""


class ChatAnswer(_Answer):
    """The answer to a call of /v1/chat/completions."""

    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        """Return the chunk that names the role, once per choice."""
        role = {"role": "assistant", "content": "", "refusal": None}
        return sse.data(self._chunk([_chat_piece(index, role, None)]))

    def _piece(self, index: int, text: str, reason: str | None) -> JsonObject:
        return _chat_piece(index, {"content": text} if text else {}, reason)

    def _choice(self, index: int, text: str, reason: str) -> JsonObject:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": reason,
        }


class CompletionAnswer(_Answer):
    """The answer to a call of /v1/completions."""

    _whole_object = _chunk_object = "text_completion"

    def _piece(self, index: int, text: str, reason: str | None) -> JsonObject:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _choice(self, index: int, text: str, reason: str) -> JsonObject:
        return self._piece(index, text, reason)


def _chat_piece(index: int, delta: dict[str, Any], reason: str | None) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _timings(ends: list[Finished]) -> JsonObject:
    """Board time as measured, added up over choices."""
    measured = [end.timings for end in ends]
    decode_ms, decode_tokens = _total(measured, "decode_ms"), _total(measured, "decode_tokens")
    told: JsonObject = {
        "queue_ms": round(_total(measured, "queue_ms"), 3),
        "prefill_ms": round(_total(measured, "prefill_ms"), 3),
        "prefill_tokens": _total(measured, "prefill_tokens"),
        "decode_ms": round(decode_ms, 3),
        "decode_tokens": decode_tokens,
        "tokens_per_s": round(decode_tokens * 1000 / decode_ms, 2) if decode_ms > 0 else None,
        "cached": sum(end.usage.cached_tokens for end in ends),
    }
    if paused_ms := _total(measured, "paused_ms"):
        told["paused_ms"] = round(paused_ms, 3)
    if (batch := max(timings.batch for timings in measured)) > 1:
        told["batch"] = batch
    if batch_wait_ms := _total(measured, "batch_wait_ms"):
        told["batch_wait_ms"] = round(batch_wait_ms, 3)
    if continued := _total(measured, "continued"):
        told["continued"] = continued
        told["lost_ms"] = round(_total(measured, "lost_ms"), 3)
    return told


def _total(measured: list[Timings], name: str) -> Any:
    return sum(getattr(timings, name) for timings in measured)
