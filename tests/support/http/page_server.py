"""The Router's routes on a real port, on scripted boards, for a browser to call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from rkserve.config.router import RouterConfig
from rkserve.core.child_process import free_port
from rkserve.core.messages import Delta
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    eventually,
    finished,
    report,
)
from tests.support.http.router_house import House, model


def words(text: str) -> list[Step]:
    """The events of an answer of a token for each word."""
    said = [word for word in text.split(" ") if word]
    pieces = [word if at == len(said) - 1 else f"{word} " for at, word in enumerate(said)]
    # What is asked for may have line breaks in it; a piece is a piece.
    return [accepted("a"), *(Delta(one, (7,)) for one in pieces), finished(len(pieces), cached=3)]


class PageServer:
    """A Router in a thread of its own. Steps that are gates are opened by their number."""

    def __init__(
        self,
        config: RouterConfig,
        *answers: Sequence[Step | int],
        served: ServedModel | None = None,
    ) -> None:
        """``served`` is another model than the house's usual one."""
        self._config, self._answers, self._served = config, answers, served
        self.gates: dict[int, asyncio.Event] = {}
        self.port = free_port()
        self._up = threading.Event()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.port}/"

    def open_gate(self, number: int) -> None:
        """Let the boards go on from there."""
        self._loop.call_soon_threadsafe(self.gates[number].set)

    def wait_until(self, look: Callable[[House], object]) -> None:
        """Wait for something to be so in the Router."""

        async def wait() -> None:
            await eventually(lambda: look(self.house))

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(60)

    @contextmanager
    def running(self) -> Iterator[PageServer]:
        """Serve while this is entered."""
        thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        thread.start()
        assert self._up.wait(60)
        try:
            yield self
        finally:
            self._server.should_exit = self._server.force_exit = True
            thread.join(60)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        served = self._served or model()
        told = report("a", model=served.folder.id, queue_limit=9)
        boards = FakeBoards([told], {"replica of a": self._scripts()})
        self.house = House(boards, self._config, served)
        await self.house.service.fleet.refresh()
        await self.house.cluster.refresh()
        settings: Any = {"log_level": "error", "lifespan": "off", "access_log": False}
        self._server = uvicorn.Server(
            uvicorn.Config(self.house.app, host="127.0.0.1", port=self.port, **settings)
        )
        serving = asyncio.ensure_future(self._server.serve())
        await eventually(lambda: self._server.started or serving.done())
        self._up.set()
        await serving

    def _scripts(self) -> list[Sequence[Step]]:
        return [[self._step(step) for step in steps] for steps in self._answers]

    def _step(self, step: Step | int) -> Step:
        if not isinstance(step, int):
            return step
        return self.gates.setdefault(step, asyncio.Event())
