"""Requests of all APIs whose answers are known, and the reading of these answers. Pure.

All are greedy: the same question has the same answer, streamed or not, in mid-traffic or after a
failover.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.exchange import Truth, is_data
from benchmarks.harness.processes import chat_body
from rkserve.bench.connection import CHAT, Incoming
from rkserve.bench.processes import Json

COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
ADAPTER = "tone"
STREAMED = ", streamed"
SAID = ("Write 4000 tokens about story number {}.", "Greet me in many languages, number {}.")
ORDINARY = 8  # questions of each kind, and conversations
PIECES = 4  # texts of a call for embeddings


class MisshapenAnswer(Exception):
    """An answer that is complete by HTTP, and is not one of its API."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request by its number, of a kind of traffic. ``api`` names the form of its answers.

    Questions with the same ``same`` must have the same text.
    """

    number: int
    kind: str
    api: str
    path: str
    body: Json
    same: str

    @property
    def streamed(self) -> bool:
        """True if the answer comes as events."""
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """The end of a complete answer: its truth, or its error, and the stamps of rkserve."""

    truth: Truth | None
    error: Json | None = None
    name: str = ""
    version: str = ""
    continued: int = 0


@dataclass(frozen=True, slots=True)
class RequestSet:
    """Questions that need no answer of another one: ``single`` by kind, and an adapter's."""

    single: Mapping[str, Sequence[Question]]
    adapter: Sequence[Question]


def ordinary_questions(model: str, tokens: int) -> RequestSet:
    """Return the questions that need no answer of another one."""
    single: dict[str, list[Question]] = {}
    numbers = iter(range(1_000_000))

    def add(kind: str, api: str, path: str, body: Json, same: str) -> None:
        question = Question(next(numbers), kind, api, path, body, same)
        single.setdefault(kind, []).append(question)

    for n in range(ORDINARY):
        text = SAID[n % len(SAID)].format(n)
        turn = [{"role": "user", "content": text}]
        for end, stream in (("", False), (STREAMED, True)):
            chat = chat_body(model, turn, tokens)
            if not stream:
                del chat["stream"], chat["stream_options"]
            add(f"chat{end}", "openai", CHAT, chat, f"chat {n}")
            plain = {k: v for k, v in chat.items() if k != "messages"} | {"prompt": text}
            add(f"completion{end}", "openai", COMPLETIONS, plain, f"completion {n}")
            made = {"model": model, "input": text, "max_output_tokens": tokens, "temperature": 0}
            more: Json = {"stream": True} if stream else {}
            add(f"response{end}", "responses", RESPONSES, {**made, "store": True, **more}, f"r {n}")
            sent = {"model": model, "messages": turn, "max_tokens": tokens, "temperature": 0}
            add(f"message{end}", "anthropic", MESSAGES, {**sent, **more}, f"message {n}")
        texts = [f"{text} Part {piece}." for piece in range(PIECES)]
        add("embedding", "embedding", EMBEDDINGS, {"model": model, "input": texts}, f"e {n}")
    adapter = [
        Question(
            next(numbers),
            "adapter, streamed",
            "openai",
            CHAT,
            chat_body(
                ADAPTER,
                [{"role": "user", "content": SAID[0].format(100 + n)}],
                tokens,
                return_weight_versions=True,
            ),
            f"adapter {n}",
        )
        for n in range(ORDINARY)
    ]
    return RequestSet(single, adapter)


def next_turn(number: int, model: str, tokens: int, history: Sequence[Json], talk: int) -> Question:
    """Return the next question of a conversation, behind its history so far."""
    turn = len(history) // 2
    asked = {"role": "user", "content": SAID[turn % len(SAID)].format(1000 + 10 * talk + turn)}
    body = chat_body(model, [*history, asked], tokens)
    return Question(number, "conversation", "openai", CHAT, body, f"talk {talk}.{turn}")


# -- answers ---------------------------------------------------------------------------------------


def read_given(question: Question, incoming: Incoming) -> ReadAnswer:
    """Read an answer with status 200 that is complete by HTTP. Raises ``MisshapenAnswer``."""
    try:
        if question.streamed:
            return _STREAMS[question.api](_data(incoming))
        return _WHOLE[question.api](json.loads(_text(incoming)))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
        raise MisshapenAnswer(f"{question.kind}: {exc!r}: {_text(incoming)[-200:]}") from exc


def error_of(incoming: Incoming) -> Json | None:
    """Return the error object of an answer that is a refusal; None where it has none."""
    try:
        error = json.loads(_text(incoming))["error"]
    except (ValueError, KeyError, TypeError):
        return None
    good = isinstance(error, dict) and all(
        isinstance(error.get(k), str) for k in ("message", "type")
    )
    return error if good else None


def _text(incoming: Incoming) -> str:
    return b"\n\n".join(event for _, event in incoming.events).decode(errors="replace")


def _data(incoming: Incoming) -> list[Any]:
    """Return the values of all events; ``[DONE]`` is None."""
    found: list[Any] = []
    for _, event in incoming.events:
        for line in event.split(b"\n"):
            if is_data(line):
                text = line.partition(b": ")[2]
                found.append(None if text == b"[DONE]" else json.loads(text))
    return found


def _openai_whole(body: Json) -> ReadAnswer:
    choice, usage = body["choices"][0], body["usage"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    truth = Truth(text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])
    return ReadAnswer(truth, name=body["id"], version=_version(body), continued=_continued(body))


def _openai_stream(values: Sequence[Any]) -> ReadAnswer:
    text, finish = "", ""
    usage: Json = {}
    last: Json = {}
    for value in values:
        if value is None:
            continue
        if value.get("error"):
            return ReadAnswer(None, value["error"])
        choice = (value.get("choices") or [{}])[0]
        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        finish = choice.get("finish_reason") or finish
        usage = value.get("usage") or usage
        last |= {k: v for k in ("id", "timings") if (v := value.get(k))}
        spans = choice.get("weight_versions") or value.get("weight_versions")
        if spans:
            last["weight_versions"] = spans
    if not values or values[-1] is not None or not finish:
        raise MisshapenAnswer("a stream ended in order without its end")
    truth = Truth(text, finish, usage["prompt_tokens"], usage["completion_tokens"])
    return ReadAnswer(truth, name=last["id"], version=_version(last), continued=_continued(last))


def _response_whole(body: Json) -> ReadAnswer:
    if body.get("error"):
        return ReadAnswer(None, body["error"])
    text = "".join(part["text"] for item in body["output"] for part in item["content"])
    usage = body["usage"]
    truth = Truth(text, body["status"], usage["input_tokens"], usage["output_tokens"])
    return ReadAnswer(truth, name=body["id"], continued=_continued(body))


def _response_stream(values: Sequence[Any]) -> ReadAnswer:
    text = ""
    for value in values:
        if value is None:
            continue
        if value["type"] in ("response.failed", "error"):
            return ReadAnswer(None, value.get("response", value).get("error") or value)
        if value["type"] == "response.output_text.delta":
            text += value["delta"]
        if value["type"] in ("response.completed", "response.incomplete"):
            read = _response_whole(value["response"])
            if read.truth is not None and read.truth.text != text:
                raise MisshapenAnswer("the deltas of a response are not its text")
            return read
    raise MisshapenAnswer("a stream ended in order without its end")


def _message_whole(body: Json) -> ReadAnswer:
    text = "".join(part["text"] for part in body["content"])
    truth = _message_truth(text, body["stop_reason"], body["usage"])
    return ReadAnswer(truth, name=body["id"], continued=_continued(body))


def _message_stream(values: Sequence[Any]) -> ReadAnswer:
    text, name = "", ""
    end: Json = {}
    for value in values:
        kind = value["type"]
        if kind == "error":
            return ReadAnswer(None, value["error"])
        if kind == "message_start":
            name = value["message"]["id"]
        elif kind == "content_block_delta":
            text += value["delta"]["text"]
        elif kind == "message_delta":
            end = value
        elif kind == "message_stop":
            truth = _message_truth(text, end["delta"]["stop_reason"], end["usage"])
            return ReadAnswer(truth, name=name, continued=_continued(end))
    raise MisshapenAnswer("a stream ended in order without its end")


def _message_truth(text: str, reason: str, usage: Json) -> Truth:
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return Truth(text, reason, prompt, usage["output_tokens"])


def _embedding_whole(body: Json) -> ReadAnswer:
    """Return the vectors as the digest of their figures, which differ in no bit."""
    vectors = [one["embedding"] for one in sorted(body["data"], key=lambda one: one["index"])]
    digest = hashlib.sha256(json.dumps(vectors).encode()).hexdigest()
    return ReadAnswer(Truth(digest, f"{len(vectors)} vectors", body["usage"]["prompt_tokens"], 0))


def _continued(body: Json) -> int:
    return int((body.get("timings") or {}).get("continued", 0))


def _version(body: Json) -> str:
    """Return the version of all tokens; several are named by their order."""
    spans = body.get("weight_versions") or ()
    return "+".join(dict.fromkeys(str(span["version"]) for span in spans))


_WHOLE: Mapping[str, Callable[[Json], ReadAnswer]] = {
    "openai": _openai_whole,
    "responses": _response_whole,
    "anthropic": _message_whole,
    "embedding": _embedding_whole,
}
_STREAMS: Mapping[str, Callable[[Sequence[Any]], ReadAnswer]] = {
    "openai": _openai_stream,
    "responses": _response_stream,
    "anthropic": _message_stream,
}
