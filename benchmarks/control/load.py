"""Clients that ask without a pause, and a controller beside them, in one process with one clock.

The controller plays a plan: after a wait it makes a call, one after the other. Its results are
read in ``answers``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.control.answers import Answer, Call, read_answer, read_call
from benchmarks.harness.connection import WatchedConnection
from rkserve.bench.connection import CHAT, request_bytes
from rkserve.bench.processes import BenchFailed, Json, OnProgress, serve_commands

REFUSED_S = 0.5  # a client that was refused does not ask again at once
LIMIT_S = 240.0


class Load:
    """The clients and the controller of one command.

    ``bodies`` are the prompts, of which client n begins with the nth. Each client makes
    ``requests_each`` answers, or as many as it can until the plan is played and ``after_s`` are
    over; it then finishes the one that it has begun. All paths are below ``prefix``.
    """

    def __init__(self, command: Json, tell: OnProgress) -> None:
        self._command, self._tell = command, tell
        self._host, self._port = command["host"], command["port"]
        self._until_s: float = command["until_s"]
        self._requests = [self._request(CHAT, body) for body in command["bodies"]]
        self._played = asyncio.Event()
        self._answers: list[Answer] = []
        self._calls: list[Call] = []

    async def run(self) -> tuple[list[Answer], list[Call]]:
        """Do it all. Raises ``BenchFailed`` where a connection is lost or the time is over."""
        clients = self._command["clients"]
        tasks = [asyncio.create_task(self._client(number)) for number in range(clients)]
        tasks.append(asyncio.create_task(self._control(self._command.get("plan", ()))))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return self._answers, self._calls

    async def _client(self, number: int) -> None:
        # At another time each: boards in step would all be caught in the same phase by a pause.
        await asyncio.sleep(self._command["stagger_s"] * number / self._command["clients"])
        connection = await WatchedConnection.open(self._host, self._port)
        left = self._command.get("requests_each", -1)
        prompt = number % len(self._requests)
        try:
            while left and (left > 0 or not self._played.is_set()):
                incoming = await connection.ask(self._requests[prompt], self._until_s)
                answer = read_answer(incoming, prompt)
                self._answers.append(answer)
                if not answer.whole:
                    raise BenchFailed("an answer did not end in time")
                if answer.exchange.error:
                    await asyncio.sleep(REFUSED_S)
                prompt, left = (prompt + 1) % len(self._requests), left - 1
        finally:
            connection.close()

    async def _control(self, plan: Sequence[Json]) -> None:
        if plan:
            await asyncio.sleep(self._command["warm_s"])
            connection = await WatchedConnection.open(self._host, self._port)
            try:
                for done, step in enumerate(plan, start=1):
                    await asyncio.sleep(step["wait_s"])
                    self._calls.append(await self._call(connection, step))
                    self._tell({"done": done, "of": len(plan), "answers": len(self._answers)})
            finally:
                connection.close()
            await asyncio.sleep(self._command["after_s"])
        self._played.set()

    async def _call(self, connection: WatchedConnection, step: Json) -> Call:
        connection.send(self._request(step["path"], step["body"]))
        asked_s = connection.so_far.sent_s
        incoming, answered_s = await connection.answer_at(self._until_s)
        return read_call(step["what"], asked_s, answered_s, incoming)

    def _request(self, path: str, body: Json) -> bytes:
        prefix = self._command.get("prefix", "")
        return request_bytes(self._host, self._port, body, prefix + path)


def carry_out(command: Json, tell: OnProgress) -> dict[str, Any]:
    """Do what one command asks for and return what came of it."""
    command = {**command, "until_s": time.monotonic() + command["timeout_s"]}

    async def run() -> tuple[list[Answer], list[Call]]:
        return await Load(command, tell).run()

    try:
        answers, calls = asyncio.run(run())
    except OSError as exc:
        raise BenchFailed(f"the cluster cannot be reached: {exc}") from exc
    except json.JSONDecodeError as exc:
        raise BenchFailed(f"an answer is not JSON: {exc}") from exc
    return {"answers": [asdict(one) for one in answers], "calls": [asdict(one) for one in calls]}


class _Endless(Load):
    """The clients of a load, without a controller: they go on until they are told to leave off."""

    def __init__(self, command: Json) -> None:
        super().__init__(command, lambda _: None)
        self.stop = asyncio.Event()

    async def _control(self, plan: Sequence[Json]) -> None:
        await self.stop.wait()
        await super()._control(plan)


class Streams:
    """So many clients, each with one answer at a time, from ``start`` to ``stop``."""

    def __init__(
        self,
        address: tuple[str, int],
        bodies: Sequence[Json],
        clients: int,
        limit_s: float = LIMIT_S,
    ) -> None:
        host, port = address
        self._limit_s = limit_s
        command = {
            "host": host,
            "port": port,
            "bodies": list(bodies),
            "clients": clients,
            "stagger_s": 0.5,
            "until_s": time.monotonic() + limit_s,
            "warm_s": 0.0,
            "after_s": 0.0,
        }
        self._load = _Endless(command)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="streams", daemon=True)
        self._answers: list[Answer] = []
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> list[Answer]:
        """Let every client end the answer that it has begun. Raises ``BenchFailed``."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has ended just now
                self._loop.call_soon_threadsafe(self._leave_off)
        self._thread.join(self._limit_s)
        if self._failure is not None:
            raise BenchFailed(f"the clients failed: {self._failure}") from self._failure
        return self._answers

    def _leave_off(self) -> None:
        self._load.stop.set()

    def _run(self) -> None:
        try:
            self._answers, _ = self._loop.run_until_complete(self._load.run())
        except Exception as exc:  # noqa: BLE001 - it is raised where the streams are stopped
            self._failure = exc
        finally:
            self._loop.close()


@contextlib.contextmanager
def streams(
    address: tuple[str, int], bodies: Sequence[Json], clients: int, answers: list[Answer]
) -> Iterator[None]:
    """Keep clients asking while the block runs, and add what they got to ``answers`` afterwards."""
    one = Streams(address, bodies, clients)
    one.start()
    try:
        yield
    finally:
        answers += one.stop()


def ask_once(address: tuple[str, int], bodies: Sequence[Json]) -> list[Answer]:
    """Ask each of these once. Raises ``BenchFailed``."""
    host, port = address
    command = {
        "host": host,
        "port": port,
        "bodies": list(bodies),
        "clients": len(bodies),
        "requests_each": 1,
        "stagger_s": 0.0,
        "until_s": time.monotonic() + LIMIT_S,
    }
    return asyncio.run(Load(command, lambda _: None).run())[0]


if __name__ == "__main__":
    serve_commands(carry_out)
