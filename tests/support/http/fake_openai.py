"""A server that answers as OpenAI's do, or as none should; which way, the request's model says.

It runs in a thread of its own, so that a test may ask it from any loop, or from the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
USAGE = {"prompt_tokens": 20, "completion_tokens": 3}
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-rkserve-board: sim-0\r\n"
WORDS = ("one", " two", " three")
HANG = None  # instead of bytes: nothing more, and the connection stays open
CLOSE = b""  # instead of bytes: hang up
Part = bytes | None
Answer = Callable[["Asked"], list[Part]]


@dataclass(frozen=True)
class Asked:
    """A request that came."""

    path: str
    headers: dict[str, str]
    body: Json

    @property
    def messages(self) -> list[Json]:
        """The conversation."""
        found: list[Json] = self.body["messages"]
        return found


def data(value: Any) -> bytes:
    """Return an event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(text: str, **more: Any) -> bytes:
    return data({"choices": [{"index": 0, "delta": {"content": text}}], **more})


def end(**more: Any) -> bytes:
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    return data({"choices": [choice], "timings": {"queue_ms": 4.0}, **more})


def usage(cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return data({"choices": [], "usage": {**USAGE, **details}})


DONE = b"data: [DONE]\n\n"


def chunks(*events: bytes, last: bool = True) -> list[Part]:
    """Return a stream in chunks, each event in its own."""
    cut: list[Part] = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    return [STREAM + b"transfer-encoding: chunked\r\n\r\n", *cut, *([b"0\r\n\r\n"] if last else [])]


def whole(status: str, body: bytes, *headers: str, kind: str = "application/json") -> list[Part]:
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}"]
    return ["\r\n".join([*lines, *headers, "", ""]).encode() + body]


def said(*words: str) -> list[bytes]:
    return [delta(word) for word in words]


def ok(asked: Asked) -> list[Part]:
    """Answer as it should be; an earlier turn's tokens come from the cache."""
    cached = 16 if len(asked.messages) > 2 else 0
    return chunks(*said(*WORDS), end(), usage(cached), DONE)


def completion(_: Asked) -> list[Part]:
    texts = [data({"choices": [{"index": 0, "text": word}]}) for word in WORDS]
    return chunks(*texts, end(), usage(), DONE)


def echo(asked: Asked) -> list[Part]:
    return chunks(
        *said("You said: ", str(asked.messages[-1]["content"])[-8:]), end(), usage(), DONE
    )


def refusal(status: str, code: str, *headers: str) -> Answer:
    body = json.dumps({"error": {"message": "no", "code": code}}).encode()
    return lambda _: whole(status, body, *headers)


MESSAGE = {"choices": [{"message": {"content": "all at once"}, "finish_reason": "stop"}]}
CALL = {"index": 0, "id": "c", "function": {"name": "look", "arguments": ""}}
MORE = {"index": 0, "function": {"arguments": '{"a": 1}'}}
ANSWERS: dict[str, Answer] = {
    "ok": ok,
    "completion": completion,
    "echo": echo,
    "shouts": lambda _: chunks(*said("ONE", " two", " three"), end(), usage(), DONE),
    "no-usage": lambda _: chunks(*said(*WORDS), end(), DONE),
    "null-details": lambda _: chunks(
        *said(*WORDS), end(), data({"usage": {**USAGE, "prompt_tokens_details": None}}), DONE
    ),
    "crlf": lambda _: chunks(
        *(one.replace(b"\n", b"\r\n") for one in (*said(*WORDS), end(), usage(), DONE))
    ),
    "until-closed": lambda _: [
        b"HTTP/1.0 200 OK\r\n\r\n",
        *said(*WORDS),
        end(),
        usage(),
        DONE,
        CLOSE,
    ],
    "whole": lambda _: whole("200 OK", json.dumps({**MESSAGE, "usage": USAGE}).encode()),
    "busy": refusal("429 Too Many Requests", "queue_full", "retry-after: 7"),
    "refused": lambda _: whole(
        "400 Bad Request",
        b'{"error": {"message": "max_tokens is too large", "param": "max_tokens"}}',
    ),
    "forbidden": lambda _: whole(
        "401 Unauthorized", b'{"error": {"message": "Incorrect API key provided: sk-secret"}}'
    ),
    "page": lambda _: whole("200 OK", b"<html>welcome</html>", kind="text/html; charset=utf-8"),
    "long-line": lambda _: chunks(*said("one"), *[b"data: " + b"a" * 600_000] * 2, DONE),
    "down": lambda _: whole("502 Bad Gateway", b"<html>nothing</html>", kind="text/html"),
    "fails": lambda _: chunks(*said("one"), data({"error": {"message": "x", "code": "lost"}})),
    "fails-oddly": lambda _: chunks(*said("one"), data({"error": "a word"})),
    "truncated": lambda _: chunks(*said("one")),
    "thinks": lambda _: chunks(
        data({"choices": [{"index": 0, "delta": {"reasoning_content": "well, "}}]}),
        data({"choices": [{"index": 0, "delta": {"reasoning_content": "yes"}}]}),
        data({"choices": [{"index": 0, "delta": {"tool_calls": [CALL]}}]}),
        data({"choices": [{"index": 0, "delta": {"tool_calls": [MORE]}}]}),
        *said("```four```"),
        end(),
        usage(),
        DONE,
    ),
    "empty": lambda _: chunks(end(), usage(), DONE),
    "hangs": lambda _: [HANG],
    "hangs-after-head": lambda _: [*chunks(last=False), HANG],
    "hangs-in-mid-answer": lambda _: [*chunks(*said("one"), last=False), HANG],
    "pings": lambda _: [*chunks(*[b": ping\n\n"] * 3, last=False), HANG],
    "closes": lambda _: [CLOSE],
    "closes-in-mid-answer": lambda _: [*chunks(*said("one"), last=False), CLOSE],
    "no-http": lambda _: [b"220 smtp.example.org ESMTP\r\n", HANG],
    "bad-length": lambda _: [b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n", HANG],
    "bad-chunk": lambda _: [STREAM + b"transfer-encoding: chunked\r\n\r\nzz\r\n", HANG],
    "negative-chunk": lambda _: [STREAM + b"transfer-encoding: chunked\r\n\r\n-5\r\nabc", HANG],
    "endless-line": lambda _: [
        STREAM + b"transfer-encoding: chunked\r\n\r\n",
        *[b"a" * 60_000] * 3,
        HANG,
    ],
    "no-json": lambda _: chunks(*said("one"), b"data: {oops\n\n", DONE),
    "no-object": lambda _: chunks(*said("one"), b"data: [1, 2]\n\n", DONE),
    "no-event": lambda _: chunks(*said("one"), b"oops\n\n", DONE),
    "no-utf8": lambda _: chunks(*said("one"), b'data: {"a": "\xff\xfe"}\n\n', DONE),
    "deep": lambda _: chunks(*said("one"), b"data: " + b"[" * 100_000 + b"\n\n", DONE),
    "odd-types": lambda _: chunks(
        data({"choices": 7, "usage": [1], "timings": "x"}),
        data({"choices": [None, {"delta": 3, "text": 5, "finish_reason": "stop"}]}),
        data({"usage": {"prompt_tokens": -1, "completion_tokens": "3"}}),
        DONE,
    ),
}


@dataclass
class FakeOpenAi:
    """Its address, models and requests, and the highest number of requests at once."""

    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    running: int = 0
    most: int = 0
    models: list[Json] = field(default_factory=lambda: [{"id": "ok"}])
    boards: list[Json] | None = None  # a server without boards answers 404
    failures: int = 0  # of the next requests to "twice-down"

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer what comes on one connection."""
        self.connections += 1
        # Streams of Python 3.11 stumble over a handler that ends by being cancelled.
        ends = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ends):
            while await self._answer(reader, writer):
                pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode().strip().split("\r\n")
        pairs = (line.partition(": ") for line in lines)
        headers = {name.lower(): value for name, _, value in pairs}
        path = first.split()[1]
        if first.startswith("GET"):
            listed = self.boards if path.endswith("/boards") else self.models
            if listed is None:
                return await _write(writer, reader, whole("404 Not Found", b"{}"))
            told = json.dumps({"data": listed}).encode()
            return await _write(writer, reader, whole("200 OK", told))
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        asked = Asked(path, headers, body)
        self.asked.append(asked)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            model = body["model"]
            if model == "twice-down":
                model, self.failures = "down" if self.failures > 0 else "ok", self.failures - 1
            return await _write(writer, reader, ANSWERS[model](asked))
        finally:
            self.running -= 1


async def _write(
    writer: asyncio.StreamWriter, reader: asyncio.StreamReader, parts: list[Part]
) -> bool:
    """Return whether the connection is to be kept."""
    for part in parts:
        if part is HANG:
            await reader.read()  # until the client hangs up
            return False
        if part == CLOSE:
            return False
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.001)  # so that events arrive one by one
    return True


@contextmanager
def serving() -> Iterator[FakeOpenAi]:
    """Give a server that runs for as long as the block lasts."""
    loop, fake, ready = asyncio.new_event_loop(), FakeOpenAi(), threading.Event()
    over = asyncio.Event()

    async def whole_life() -> None:
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.port = server.sockets[0].getsockname()[1]
        ready.set()
        await over.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(whole_life(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        loop.close()
