"""A simulated board that is given other base weights, and what each of them would have said."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rkserve.board.board import Board
from rkserve.core.desired_state import AdapterVersion, Adoption, BaseVersion, InFlight, Weights
from rkserve.core.messages import AdapterRef
from rkserve.native.sim.models import reseed
from tests.support.boards.board_bench import Listener
from tests.support.boards.fakes import run_loop
from tests.support.boards.holding import Governed, governed, load_own_adapter, own_answer
from tests.support.sim.sim_board import FOLDER, TOKENIZER, Sim

CONTENT = FOLDER.require_weights().read_bytes()
# What can be wrong with a file, and what the library says then.
BROKEN = {
    "truncated": (CONTENT[:-100], "damaged file"),
    "magic": (b"NOMODEL!" + CONTENT[8:], "invalid rknn llm model magic"),
    "platform": (reseed(CONTENT, 9, platform="RK3562"), "target_platform does not match"),
}


def base_of(content: bytes, label: str) -> BaseVersion:
    digest = hashlib.sha256(content).hexdigest()
    return BaseVersion(FOLDER.id, label, digest, len(content))


def give(board: Board, content: bytes, label: str) -> BaseVersion:
    """Bring weights to the board's disk."""
    base = base_of(content, label)
    board.intake.begin(base)
    board.intake.chunk(base.digest, 0, content)
    board.intake.commit(base)
    return base


@dataclass
class Rebased:
    """A governed board, and the weights that it has on its disk, by their labels."""

    told: Governed
    bases: dict[str, BaseVersion] = field(default_factory=dict)

    @property
    def board(self) -> Board:
        return self.told.board

    @property
    def sim(self) -> Sim:
        return self.told.sim

    async def switch(
        self, label: str, in_flight: InFlight = InFlight.SWITCH, **changes: Any
    ) -> Adoption:
        """Tell the board to have these; ``default`` are those of the model folder."""
        weights = Weights(FOLDER.id, label, base=self.bases.get(label), in_flight=in_flight)
        return await self.told.tell(weights=(weights,), **changes)

    async def midway(
        self, tokens: int = 5, *, slowly: float | None = None, **extra: Any
    ) -> Listener:
        """Return a client of a run of which the board hears no more than so many tokens.

        With ``slowly`` the library stands there too, and goes on at that pace; see ``Sim.hold``.
        """
        held = self.sim.tap.hold(tokens) if slowly is None else self.sim.hold(tokens, slowly)
        client = self.told.ask(**{"max_tokens": 60, **extra})
        await held
        return client


LIMIT_S = 60.0
SEEDS = {"w1": 1, "w2": 2}


class Voices:
    """What the model says with each of the weights, by handles that have nothing else."""

    def stage(self, version: AdapterVersion, content: bytes, *labels: str) -> None:
        """Load an adapter beside these weights."""
        for label in labels:
            load_own_adapter(content, version.ref.key, SEEDS.get(label, 0))

    def says(
        self, label: str, ids: tuple[int, ...], count: int, ref: AdapterRef | None = None
    ) -> list[int]:
        key = None if ref is None else ref.key
        return [piece.token_id for piece in own_answer(ids, count, key, SEEDS.get(label, 0))]

    def check(self, client: Listener, *labels: str) -> None:
        """Every token is what its weights say after what was there before it, in this order."""
        assert client.finished is not None, client.error
        assert client.text == TOKENIZER.decode(client.ids, skip_special_tokens=True)
        spans = client.finished.versions
        if labels:
            assert tuple(span.version for span in spans) == labels
        borders = [0, *(span.end for span in spans)]
        assert borders == [*(span.start for span in spans), len(client.ids)]
        for span in spans:
            before = (*client.asked.prompt_ids, *client.ids[: span.start])
            expected = self.says(span.version, before, span.end - span.start)
            assert client.ids[span.start : span.end] == expected, span


def _contents() -> list[tuple[str, bytes]]:
    return [(label, reseed(CONTENT, seed)) for label, seed in SEEDS.items()]


@asynccontextmanager
async def rebased(place: Path, *args: Any, **extra: Any) -> AsyncIterator[Rebased]:
    """A board whose state lies in ``place``: it can be opened there again."""
    extra = {"weights_dir": place / "weights", "base_file": place / "b.base", **extra}
    async with governed(place, *args, **extra) as told:
        yield Rebased(told)


Body = Callable[[Rebased, Voices], Coroutine[Any, Any, None]]


def play(place: Path, body: Body, *args: Any, **extra: Any) -> None:
    """Run ``body`` with a board that has been told something, and has w1 and w2 on its disk."""

    async def main() -> None:
        async with rebased(place, *args, **extra) as it:
            for label, content in _contents():
                it.bases[label] = give(it.board, content, label)
            await it.switch("default")
            await body(it, Voices())

    run_loop(main(), LIMIT_S)


def started(call: Coroutine[Any, Any, Adoption]) -> asyncio.Task[Adoption]:
    return asyncio.create_task(call)
