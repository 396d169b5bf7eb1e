"""A board or a bare engine process over the simulated runtime and its model, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from board_bench import collect
from fakes import run_loop
from tokenizers import Tokenizer

from rkserve.board.board import Board, BoardSettings
from rkserve.board.engine import EngineProcess, EngineSpec, RunCommand
from rkserve.board.watchdog import Patience
from rkserve.messages import GenerateRequest
from rkserve.modelfolder import open_model_folder
from rkserve.native.runtime import LoadParams
from rkserve.native.sim.build import ensure_built

FOLDER = open_model_folder(Path(__file__).parents[1] / "models" / "sim-chat")
TOKENIZER = Tokenizer.from_file(str(FOLDER.path / "tokenizer.json"))
CONTEXT_LEN = FOLDER.settings.context_length

both_releases = pytest.mark.parametrize("release", ["1.2.3", "1.3.0"])


def chat(*turns: str) -> tuple[int, ...]:
    """Return the ids of a conversation that begins and ends with the user."""
    text = ""
    for at, turn in enumerate(turns):
        text += f"<|im_start|>{'assistant' if at % 2 else 'user'}\n{turn}<|im_end|>\n"
    return tuple(TOKENIZER.encode(f"{text}<|im_start|>assistant\n").ids)


@dataclass
class Sim:
    """One simulated board's place on disk, and how its engine is started."""

    place: Path
    release: str = "1.3.0"
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def control(self) -> Path:
        return self.place / "control"

    def fault(self, line: str) -> None:
        """Let the library misbehave; it looks at the file's time and size."""
        self.control.write_text(f"fault={line}\ntime_scale=0\n")

    def spec(self) -> EngineSpec:
        return EngineSpec(
            library=str(ensure_built(self.release)),
            params=LoadParams(str(FOLDER.require_weights()), CONTEXT_LEN, CONTEXT_LEN),
            fence=str(self.place / "npu.fence"),
            environ={
                "RKSIM_TIME_SCALE": "0",
                "RKSIM_LOAD_MS": "0",
                "RKSIM_STRICT": "1",
                "RKSIM_CONTROL": str(self.control),
                **self.environ,
            },
            fence_timeout_s=5.0,
            load_timeout_s=30.0,
            beat_s=0.1,
        )

    @asynccontextmanager
    async def engine(self, **changes: Any) -> AsyncIterator[EngineProcess]:
        engine = await EngineProcess.start("b", replace(self.spec(), **changes))
        try:
            yield engine
        finally:
            assert await engine.kill()

    @asynccontextmanager
    async def board(self, **changes: Any) -> AsyncIterator[Board]:
        patience = Patience(first_token_s=1.0, token_s=1.0, abort_s=0.3)
        settings = BoardSettings(
            "b", FOLDER.id, CONTEXT_LEN, frozenset(FOLDER.settings.eos_token_ids), patience=patience
        )
        spec = self.spec()
        board = Board(replace(settings, **changes), lambda: EngineProcess.start("b", spec))
        await board.start()
        try:
            yield board
        finally:
            await board.stop()


class Recorder:
    """Collects the tokens of one run."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.data = b""
        self.first = asyncio.Event()

    def __call__(self, token_id: int, data: bytes) -> None:
        self.ids.append(token_id)
        self.data += data
        self.first.set()


def command(ids: tuple[int, ...], run_id: int = 1, **extra: Any) -> RunCommand:
    return RunCommand(run_id, ids, clear=False, keep_history=True, **extra)


def in_loop(body: Callable[[Sim], Coroutine[Any, Any, None]]) -> Callable[[Sim], None]:
    def test(sim: Sim) -> None:
        run_loop(body(sim))

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


async def ask(board: Board, ids: tuple[int, ...], **extra: Any) -> list[Any]:
    extra = {"max_tokens": 100, **extra}
    return await collect(board.generate(GenerateRequest("r", FOLDER.id, ids, **extra)))
