"""The control benchmark's clients and controller, against a server that can be paused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.control.answers import Answer, Call, Span, read_answer
from benchmarks.control.figures import pause_figures
from benchmarks.control.load import Load
from rkserve.api.common import output
from rkserve.bench.connection import CHAT, Incoming
from rkserve.bench.processes import BenchFailed, Json
from tests.support.values.bench_answers import HEAD, USAGE, chunk, chunked

WORDS = 30
STAMPED = HEAD.replace(b"\r\n\r\n", b"\r\nX-Weight-Version: tone@a\r\n\r\n")


class Cluster:
    """It streams a word every 10 ms to everybody, pauses and resumes, and refuses what is asked."""

    def __init__(self, late: bool = False, refused: int = 0) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.serving: list[asyncio.Task[None] | None] = []
        self._late, self._refused = late, refused
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.split(b"content-length: ")[1])
                body = json.loads(await reader.readexactly(size))
                path = head.split(b" ")[1].decode()
                self.asked.append((path, body))
                if path == CHAT:
                    await self._stream(writer, body["prompt"])
                else:
                    self._control(writer, path)
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, prompt: str) -> None:
        if self._refused:
            self._refused -= 1
            writer.write(b"HTTP/1.1 503 Paused\r\ncontent-length: 4\r\n\r\nbusy")
            return
        choice = {
            "index": 0,
            "delta": {},
            "finish_reason": "length",
            "weight_versions": [{"version": "tone@a", "start": 0, "end": WORDS}],
        }
        timings = {"queue_ms": 5.0, "prefill_ms": 1.0, "paused_ms": 2.5}
        usage = {**USAGE, "completion_tokens": WORDS}
        words = [chunk(f"{prompt}{n} ") for n in range(WORDS)]
        told = {"weight_version": "tone@a", "timings": timings}
        last = output.data({"choices": [choice], **told})
        writer.write(STAMPED)
        for part in chunked((output.PING, *words, last, chunk(None, usage=usage), output.DONE)):
            if not self._late:
                await self.goes_on.wait()
            writer.write(part)
            await asyncio.sleep(0.01)

    def _control(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path == "/pause":
            self.goes_on.clear()
        else:
            self.goes_on.set()
        said = json.dumps({"results": {"sim-0": {"latency_ms": 1.5}, "sim-1": {}}}).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(said)
        writer.write(head + said)


def step(what: str, wait_s: float) -> Json:
    return {"what": what, "path": f"/{what}", "body": {"as": what}, "wait_s": wait_s}


async def load(
    cluster: Cluster, plan: list[Json], told: list[Json], limit_s: float = 30, **more: Any
) -> tuple[list[Answer], list[Call]]:
    async with await asyncio.start_server(cluster.serve, "127.0.0.1", 0) as server:
        command = {
            "host": "127.0.0.1",
            "port": server.sockets[0].getsockname()[1],
            "bodies": [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}],
            "clients": 4,
            "plan": plan,
            "stagger_s": 0.02,
            "warm_s": 0.05,
            "after_s": 0.05,
            "until_s": time.monotonic() + limit_s,
            **more,
        }
        try:
            return await Load(command, told.append).run()
        finally:
            cluster.goes_on.set()
            await asyncio.gather(*(task for task in cluster.serving if task is not None))


PLAN = [step("pause", 0.02), step("resume", 0.1), step("pause", 0.04), step("resume", 0.1)]


def test_a_plan_is_played_while_all_clients_ask_and_every_answer_is_read_to_its_end() -> None:
    cluster = Cluster()
    told: list[Json] = []

    answers, calls = asyncio.run(load(cluster, PLAN, told))

    assert [one.what for one in calls] == ["pause", "resume"] * 2
    control = [(path, body) for path, body in cluster.asked if path != CHAT]
    assert control == [(f"/{one['what']}", one["body"]) for one in PLAN]
    assert [(one["done"], one["of"]) for one in told] == [(n, 4) for n in range(1, 5)]
    assert len(answers) >= 4
    for one in answers:
        letter = "abc"[one.prompt]
        assert one.text == "".join(f"{letter}{n} " for n in range(WORDS))
        assert (one.stamp, one.version, one.finish) == ("tone@a", "tone@a", "length")
        assert one.spans == (Span("tone@a", 0, WORDS),)
        assert one.paused_ms == 2.5
        assert one.exchange.completion_tokens == WORDS
    assert {one.prompt for one in answers} == {0, 1, 2}
    assert calls[0].latencies_ms == [1.5]
    for pause, resume in zip(calls[::2], calls[1::2], strict=True):
        assert pause.asked_s < pause.answered_s < resume.asked_s < resume.answered_s
    assert Call(**json.loads(json.dumps(asdict(calls[0])))) == calls[0]


def test_what_a_cluster_writes_before_its_answer_is_not_late() -> None:
    answers, calls = asyncio.run(load(Cluster(), PLAN, []))

    figures = pause_figures(calls, answers, step_ms=10.0)

    assert (figures.count, figures.late) == (2, 0)
    assert figures.resumed_ms.count > 0


def test_what_a_cluster_that_does_not_stop_writes_is_late() -> None:
    answers, calls = asyncio.run(load(Cluster(late=True), PLAN, []))

    figures = pause_figures(calls, answers, step_ms=10.0)

    assert figures.late > 10
    pairs = zip(calls[::2], calls[1::2], strict=True)
    longest_s = max(resume.asked_s - pause.answered_s for pause, resume in pairs)
    assert 0 < figures.latest_ms <= longest_s * 1e3


def test_each_client_can_make_so_many_answers_without_a_plan() -> None:
    cluster = Cluster()

    answers, calls = asyncio.run(load(cluster, [], [], clients=3, requests_each=2))

    assert calls == []
    assert sorted(one.prompt for one in answers) == [0, 0, 1, 1, 2, 2]


def test_who_is_refused_asks_again_a_little_later() -> None:
    answers, _ = asyncio.run(load(Cluster(refused=1), [], [], clients=1, requests_each=2))

    refused, good = answers
    assert refused.exchange.error == "HTTP 503: busy"
    assert (refused.text, refused.version) == ("", "")
    assert good.exchange.error == ""
    assert good.exchange.sent_s - refused.exchange.sent_s >= 0.5


def test_an_answer_that_never_ends_is_a_failure() -> None:
    with pytest.raises(BenchFailed, match="did not end in time"):
        asyncio.run(load(Cluster(), [step("pause", 0.0)], [], limit_s=0.5))


def test_an_answer_without_versions_is_read_all_the_same() -> None:
    incoming = Incoming(sent_s=0.0)
    incoming.feed(HEAD + b"".join(chunked((chunk("a"), chunk(None, usage=USAGE)))), 1.0)

    found = read_answer(incoming, 3)

    assert (found.prompt, found.text, found.stamp, found.version, found.spans) == (
        3,
        "a",
        "",
        "",
        (),
    )
