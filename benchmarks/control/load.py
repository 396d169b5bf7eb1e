"""Clients that ask without a pause, and a controller beside them, in one process with one clock.

The controller plays a plan: after a wait it makes a call, one after the other. It knows HTTP and
the plan's form, and not what the calls do; what came of it is read in ``control_answers``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.control.answers import Answer, Call, read_answer, read_call
from rkserve.bench.child import BenchFailed, Json, OnProgress, serve_commands
from rkserve.bench.connection import CHAT, Connection, request_bytes

REFUSED_S = 0.5  # a client that was refused does not ask again at once


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
        connection = await Connection.open(self._host, self._port)
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
            connection = await Connection.open(self._host, self._port)
            try:
                for done, step in enumerate(plan, start=1):
                    await asyncio.sleep(step["wait_s"])
                    self._calls.append(await self._call(connection, step))
                    self._tell({"done": done, "of": len(plan), "answers": len(self._answers)})
            finally:
                connection.close()
            await asyncio.sleep(self._command["after_s"])
        self._played.set()

    async def _call(self, connection: Connection, step: Json) -> Call:
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


if __name__ == "__main__":
    serve_commands(carry_out)
