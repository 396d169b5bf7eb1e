"""Clients that ask without a pause for as long as a fault takes, in a thread of their own.

The clock is the machine's monotonic one, so that what they saw and what was done beside them can
be told before from after. It knows nothing of faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from benchmarks.control.answers import Answer
from benchmarks.control.load import Load
from rkserve.bench.child import BenchFailed, Json

LIMIT_S = 240.0


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
