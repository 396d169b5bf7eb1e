"""The client process of the benchmarks: load, hang-ups and pauses, one connection per client.

Nothing is parsed during a measurement; see ``rkserve.bench.connection``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.harness.connection import WatchedConnection
from benchmarks.harness.exchange import (
    HangUp,
    InterruptedAnswer,
    PausedSpan,
    is_data,
    read_exchange,
    read_id,
    read_text,
)
from rkserve.bench.connection import OK, ConnectionLost, Incoming, request_bytes
from rkserve.bench.processes import BenchFailed, Json, OnProgress, serve_commands

CONTROL = "/v1/generations"
TEXTS_BETWEEN = 2  # pauses: the first text is the resumption's, the second one the decode's


class RetryingClient:
    """A client that asks one request after the other, on one connection where it is let."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._kept: WatchedConnection | None = None

    async def ask(self, request: bytes, until_s: float) -> Incoming:
        """Send a request and wait for its answer, or for ``until_s``. Raises ``ConnectionLost``.

        A server may hang up between two requests, which the second one crosses on its way; clients
        ask again then, and so does this one. It is no witness of losses: those before the first
        byte on a kept connection are hidden by that.
        """
        kept, self._kept = self._kept, None
        if kept is not None and not kept.closed:
            try:
                return await self._ask(kept, request, until_s)
            except ConnectionLost as exc:
                if exc.began:
                    raise
        return await self._ask(
            await WatchedConnection.open(self._host, self._port), request, until_s
        )

    async def _ask(self, connection: WatchedConnection, request: bytes, until_s: float) -> Incoming:
        incoming = None
        try:
            incoming = await connection.ask(request, until_s)
        finally:
            if incoming is not None and incoming.reusable:
                self._kept = connection
            else:
                connection.close()
        return incoming

    def close(self) -> None:
        """Hang up; once more does no harm."""
        if self._kept is not None:
            self._kept.close()


async def one_client(
    command: Json, requests: Sequence[bytes], start_s: float, found: list[Incoming]
) -> None:
    """Ask one request after the other, from ``start_s`` to the command's ``until_s``."""
    await asyncio.sleep(start_s)
    asker = RetryingClient(command["host"], command["port"])
    left = command.get("requests_each", -1)
    index = 0
    while left and time.monotonic() < command["until_s"]:
        request = requests[index % len(requests)]
        found.append(await asker.ask(request, command["until_s"]))
        index, left = index + 1, left - 1
    asker.close()


async def load(command: Json) -> list[Incoming]:
    """Be all clients of a command at once."""
    found: list[Incoming] = []
    requests = [request_bytes(command["host"], command["port"], b) for b in command["bodies"]]
    clients = command["clients"]
    await asyncio.gather(
        *(
            # Each begins with another prompt, and at another time: boards in step with each other
            # would all be caught in the same phase by the ends of the measurement.
            one_client(
                command,
                requests[shift % len(requests) :] + requests[: shift % len(requests)],
                command["stagger_s"] * shift / clients,
                found,
            )
            for shift in range(clients)
        )
    )
    return found


async def hang_up(command: Json) -> HangUp:
    """Leave an answer in mid-stream, with another request queued behind it on the same board.

    It leaves ``pause_s`` after both the answer has ``events`` events and the other request is in
    the queue, which the headers of its answer say.
    """
    host, port, until_s = command["host"], command["port"], command["until_s"]
    leaver, waiter = (
        await WatchedConnection.open(host, port),
        await WatchedConnection.open(host, port),
    )
    try:
        leaver.send(request_bytes(host, port, command["leaving"]))
        await leaver.reach(lambda answer: bool(answer.events), until_s)
        waiter.send(request_bytes(host, port, command["waiting"]))
        await waiter.reach(lambda answer: answer.status != 0, until_s)
        await leaver.reach(lambda answer: len(answer.events) >= command["events"], until_s)
        await asyncio.sleep(command["pause_s"])
        closed_s = time.monotonic()
        left = leaver.leave()
        behind = await waiter.answer(until_s)
    finally:
        leaver.close()
        waiter.close()
    return HangUp(read_exchange(left), closed_s, read_exchange(behind))


async def talk(command: Json) -> Incoming:
    """Ask once."""
    host, port = command["host"], command["port"]
    connection = await WatchedConnection.open(host, port)
    try:
        request = request_bytes(host, port, command["body"])
        return await connection.ask(request, command["until_s"])
    finally:
        connection.close()


async def interrupt(command: Json) -> InterruptedAnswer:
    """Pause an answer and resume it, once for each of ``pauses_s``, and read it to its end.

    Each of these is how long after a text the pause is asked for. What arrives within ``rest_s`` of
    the pause's answer belongs to it; then the resumption is asked for.
    """
    host, port, until_s = command["host"], command["port"], command["until_s"]
    talker, controller = (
        await WatchedConnection.open(host, port),
        await WatchedConnection.open(host, port),
    )
    pauses: list[PausedSpan] = []
    try:
        talker.send(request_bytes(host, port, command["body"]))
        await talker.reach(lambda answer: any(is_data(e) for _, e in answer.events), until_s)
        control = GenerationControl(controller, command, read_id(talker.so_far))
        for wait_s in command["pauses_s"]:
            wanted = _data_events(talker.so_far) + TEXTS_BETWEEN
            await talker.reach(partial(_has_data_events, wanted), until_s)
            await asyncio.sleep(wait_s)
            asked_s, answered_s, said = await control.post("pause")
            await asyncio.sleep(command["rest_s"])
            resumed_s, _, _ = await control.post("resume")
            pauses.append(PausedSpan(asked_s, answered_s, resumed_s, said["kv"], said["tokens"]))
        answer = await talker.answer(until_s)
    finally:
        talker.close()
        controller.close()
    return InterruptedAnswer(read_exchange(answer), read_text(answer), tuple(pauses))


class GenerationControl:
    """Calls that control one generation, on a connection of their own."""

    def __init__(self, connection: WatchedConnection, command: Json, generation: str) -> None:
        self._connection = connection
        self._command = command
        self._generation = generation

    async def post(self, action: str) -> tuple[float, float, Json]:
        """Return when it was asked and answered, and the answer. Raises ``BenchFailed``."""
        path = f"{CONTROL}/{self._generation}/{action}"
        host, port, until_s = (self._command[key] for key in ("host", "port", "until_s"))
        incoming = await self._connection.ask(request_bytes(host, port, {}, path), until_s)
        words = b"".join(event for _, event in incoming.events).decode(errors="replace")
        if incoming.status != OK or incoming.done_s is None:
            raise BenchFailed(f"{action} was answered by HTTP {incoming.status}: {words}")
        said: Json = json.loads(words)
        return incoming.sent_s, incoming.done_s, said


def _data_events(answer: Incoming) -> int:
    return sum(is_data(event) for _, event in answer.events)


def _has_data_events(wanted: int, answer: Incoming) -> bool:
    return _data_events(answer) >= wanted


def carry_out(command: Json, _: OnProgress) -> dict[str, Any]:
    """Execute one command and return its result."""
    try:
        if command["do"] == "hang up":
            return asdict(asyncio.run(hang_up(command)))
        if command["do"] == "interrupt":
            return asdict(asyncio.run(interrupt(command)))
        if command["do"] == "talk":
            answer = asyncio.run(talk(command))
            return {"exchange": read_exchange(answer).to_json(), "text": read_text(answer)}
        incoming = asyncio.run(load(command))
    except OSError as exc:
        raise BenchFailed(f"the cluster cannot be reached: {exc}") from exc
    return {"exchanges": [read_exchange(one).to_json() for one in incoming]}


if __name__ == "__main__":
    serve_commands(carry_out)
