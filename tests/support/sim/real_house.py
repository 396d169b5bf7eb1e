"""A Router without Ray in front of boards with real engines, whose HTTP API tests call and wait."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from rkserve.board.board import Board
from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore
from rkserve.config.router import RouterConfig
from rkserve.core.board_report import BoardReport
from rkserve.core.messages import Event, GenerateRequest
from rkserve.local.generation import LoopThread
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import FakeBoards
from tests.support.http.router_house import House
from tests.support.sim.sim_board import Sim

CACHE_BYTES = 1 << 28


@dataclass
class RealBoards(FakeBoards):
    """One group of boards that are asked themselves."""

    boards: Mapping[str, Board] = field(default_factory=dict)  # by their replicas

    async def open(
        self, request: GenerateRequest, replica: str, take: object = None
    ) -> AsyncGenerator[Event, None]:
        self.opened.append((replica, request))
        self.running += 1
        try:
            async with aclosing(self.boards[replica].generate(request)) as events:
                async for event in events:
                    yield event
        finally:
            self.running -= 1

    async def ask(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        assert timeout_s > 0
        found = getattr(self.boards[replica], method)(*args)
        return await found if hasattr(found, "__await__") else found

    async def reports(self) -> list[BoardReport]:
        return [replace(board.report(), replica=name) for name, board in self.boards.items()]


@dataclass
class RealHouse:
    """The HTTP API of such a Router. Its loop has a thread of its own, so that a file's tests can
    share the boards.
    """

    thread: LoopThread
    house: House
    sim: Sim

    @property
    def model(self) -> str:
        """The model's id."""
        return self.sim.FOLDER.id

    def question(self, name: str = "plain") -> str:
        """One of the questions whose answers are long."""
        return self.sim.QUESTIONS[name]

    def send(self, method: str, path: str, **rest: Any) -> httpx.Response:
        """Make one request."""
        return self.thread.call(self.house(method, path, **rest))

    def post(self, path: str, **body: Any) -> Any:
        """Post a body that names the model; return the answer's JSON, which must be a good one."""
        response = self.send("POST", path, json={"model": self.model, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """Post a body that wants a stream; return its JSON events, whichever way they are sent."""
        body = {"model": self.model, "stream": True, **body}
        response = self.send("POST", path, json=body)
        assert response.status_code == 200, response.text
        lines = (line.removeprefix("data: ") for line in response.text.splitlines())
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextmanager
def real_house(sim: Sim, **settings: Any) -> Iterator[RealHouse]:
    """A Router in front of one board with a real engine, which has prompt caches."""
    thread, exits = LoopThread(), AsyncExitStack()

    async def opened() -> House:
        fingerprint = CacheFingerprint("m", sim.release)
        store = CacheStore(Path(sim.place / "cache"), fingerprint, CACHE_BYTES)
        usual = {"caches": store, "tokenizer_file": sim.FOLDER.tokenizer_file}
        board = await exits.enter_async_context(sim.board(**{**usual, **settings}))
        links = RealBoards([], boards={"replica of b": board})
        house = House(links, RouterConfig(), ServedModel.open(sim.FOLDER))
        exits.push_async_callback(house.service.guiding.close)
        return house

    try:
        house = thread.call(opened())
        yield RealHouse(thread, house, sim)
        house.expect_nothing_left()
    finally:
        thread.call(exits.aclose())
        thread.close()
