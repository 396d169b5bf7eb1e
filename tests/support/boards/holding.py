"""A simulated board that is told what the cluster shall be, and clients whose answers are known."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rkserve.board.board import Board
from rkserve.board.engine.protocol import RunCommand
from rkserve.board.run.settings import BoardSettings
from rkserve.core.board_report import GenerationState
from rkserve.core.desired_state import (
    ActivePause,
    AdapterVersion,
    AdapterVersions,
    Adoption,
    Desired,
    InFlight,
    PauseMode,
    Scope,
)
from rkserve.core.messages import AdapterRef, GenerateRequest
from rkserve.native.binding.runtime import open_runtime
from rkserve.native.runtime import (
    LoadParams,
    RunEnd,
    RunParams,
    Runtime,
    SinkAction,
    Step,
    TokenInput,
    TokenPiece,
)
from rkserve.native.sim import models as sim_models
from rkserve.native.sim.build import ensure_built
from tests.support.boards.board_bench import Listener, until
from tests.support.boards.fakes import FakeEngine, Script
from tests.support.sim.sim_board import (
    CALM,
    CONTEXT_LEN,
    EOS_IDS,
    FOLDER,
    GREEDY,
    TOKENIZER,
    WEIGHTS,
    Sim,
    words,
)
from tests.support.sim.sim_driver import FAST

Test = TypeVar("Test", bound=Callable[..., object])

ALL_KINDS = {"1.2.3": ("1.2.3", 1), "1.3.0": ("1.3.0", 1), "batch": ("1.3.0", 3)}
# The older release alone and the newer one in a batch differ in all that a board does of its own.
KINDS = pytest.mark.parametrize(
    ("release", "n_batch"), [("1.2.3", 1), ("1.3.0", 3)], ids=["1.2.3", "batch"]
)


def in_turn(test: Test) -> Test:
    """Run a file's tests on both kinds of boards in turn; ``make test-long`` runs each on both."""
    turns: Callable[[Test], Test] = pytest.mark.turns("release", "n_batch")
    return turns(KINDS(test))


LINE = "tone"
PACE = 0.02  # about a millisecond a token
SAYING = "The tide of the river and the old lamp"


def seeded(count: int, short: int | None = None) -> pytest.MarkDecorator:
    """Return so many random tests, which take turns over the kinds of boards.

    ``make test`` makes ``short`` of them.
    """
    kinds = itertools.islice(itertools.cycle(ALL_KINDS.items()), count)
    return pytest.mark.parametrize(
        ("release", "n_batch", "seed"),
        [
            pytest.param(
                *of,
                seed,
                id=f"{name}-{seed}",
                marks=[pytest.mark.long] if short is not None and seed >= short else [],
            )
            for seed, (name, of) in enumerate(kinds)
        ],
    )


def version_of(content: bytes, version: str, name: str = LINE) -> AdapterVersion:
    ref = AdapterRef(name, version, hashlib.sha256(content).hexdigest())
    return AdapterVersion(ref, len(content))


@dataclass
class Governed:
    """A board, what it was told last, and the versions of one adapter that it has."""

    board: Board
    sim: Sim
    desired: Desired = field(default_factory=Desired)
    versions: dict[str, AdapterVersion] = field(default_factory=dict)
    number: int = 0

    def stage(self, name: str, seed: int) -> AdapterVersion:
        return self.stage_content(name, sim_models.render_adapter("Tone", seed=seed))

    def stage_content(self, name: str, content: bytes) -> AdapterVersion:
        version = self.versions[name] = version_of(content, name)
        staged = self.board.staged
        staged.begin(version)
        staged.chunk(version.ref.digest, 0, content)
        staged.commit(version)
        return version

    async def tell(self, **changes: Any) -> Adoption:
        self.desired = replace(self.desired, epoch=self.desired.epoch + 1, **changes)
        return await self.board.adopt(self.desired)

    async def hold(
        self,
        mode: PauseMode = PauseMode.KEEP,
        adapter: str | None = None,
        *,
        clear: bool = False,
        expires_s: float | None = None,
    ) -> Adoption:
        pause = ActivePause("op", Scope(adapter=adapter), mode, clear, 0.0, expires_s)
        return await self.tell(pauses=(pause,))

    async def release(self) -> Adoption:
        return await self.tell(pauses=())

    async def serve(
        self, active: str, in_flight: InFlight = InFlight.PIN, **changes: Any
    ) -> Adoption:
        line = AdapterVersions(
            FOLDER.id,
            LINE,
            self.versions[active],
            in_flight=in_flight,
            epoch=self.desired.epoch + 1,
            kept=tuple(self.versions.values()),
        )
        return await self.tell(lines=(line,), **changes)

    def ask(self, said: str = SAYING, max_tokens: int = 60, **extra: Any) -> Listener:
        self.number += 1
        request = GenerateRequest(
            f"g{self.number}/0", FOLDER.id, words(said), max_tokens, sampling=GREEDY, **extra
        )
        return Listener(self.board, request)

    def state(self, client: Listener) -> GenerationState:
        found = [
            info.state
            for info in self.board.generations()
            if info.request_id == client.asked.request_id
        ]
        return found[0] if found else GenerationState.ENDED

    def stand(self, tokens: int) -> None:
        """Let runs stand still after so many tokens, until the board interrupts one or ``pace``."""
        self.sim.gate(f"token:{tokens}", then=self.pace)

    async def said(self, client: Listener, tokens: int) -> None:
        """Wait until that client, who has just asked, has so many tokens; then see ``stand``."""
        self.stand(tokens)
        await until(lambda: len(client.ids) >= tokens)

    def pace(self) -> None:
        """Let runs go on."""
        self.sim.pace(PACE)

    def kill(self) -> None:
        os.kill(self.board.report().engine_pid, signal.SIGKILL)


@asynccontextmanager
async def governed(
    place: Path, release: str = "1.3.0", n_batch: int = 1, **changes: Any
) -> AsyncIterator[Governed]:
    sim = Sim(place, release, sampling=GREEDY)
    sim.pace(PACE)
    settings: dict[str, Any] = {
        "patience": CALM,
        "n_batch": n_batch,
        # Long enough for those who ask together to run together on a machine that is busy.
        "batch_window_s": 0.1,
        "queue_limit": 64,
        "staged_dir": place / "staged",
        "max_adapters": 8,
        "crash_limit": 1000,
        "vocab_size": TOKENIZER.get_vocab_size(),
        **changes,
    }
    async with sim.board(**settings) as board:
        yield Governed(board, sim)


# -- what nobody interrupts -------------------------------------------------------------------


@functools.cache
def own_runtime(seed: int = 0) -> Runtime:
    """Return a handle in this process, for all tests: starting an engine takes longer than most.

    Its weights are those of the model folder, or with a ``seed`` others made of them.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        for name, value in FAST.items():
            patched.setenv(name, value)
        content = WEIGHTS.read_bytes()
        file = Path(folder) / "model.rkllm"
        file.write_bytes(sim_models.reseed(content, seed) if seed else content)
        runtime = open_runtime(ensure_built("1.3.0"))
        runtime.load(LoadParams(str(file), CONTEXT_LEN, CONTEXT_LEN, sampling=GREEDY))
    return runtime


@functools.cache
def load_own_adapter(content: bytes, key: str, seed: int = 0) -> None:
    """Load an adapter into ``own_runtime``. No two contents have the same key."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adapter.rkllm"
        file.write_bytes(content)
        own_runtime(seed).load_adapter(str(file), key)


def own_answer(
    ids: tuple[int, ...], count: int, adapter: str | None = None, seed: int = 0
) -> list[TokenPiece]:
    """Return what the model says after these ids, in this process."""
    pieces: list[TokenPiece] = []

    def sink(step: Step) -> SinkAction:
        pieces.extend(piece for piece in step if piece is not None)
        return SinkAction.CONTINUE

    params = RunParams((TokenInput(ids),), max_new_tokens=count, adapter=adapter)
    assert own_runtime(seed).run(params, sink).end is RunEnd.FINISHED
    return pieces


class OwnEngine(FakeEngine):
    """An engine without a process: a fake that generates what ``own_runtime`` does."""

    def __init__(self) -> None:
        quirks = {"append_tokens_with_history": False, "prefix_reuse_in_ram": True}
        super().__init__(self._script, quirks=quirks)

    def _script(self, command: RunCommand) -> Script:
        assert not command.keep_history, "this engine gets every prompt as a whole"
        if command.adapter is not None:
            path, scale = self.adapters[command.adapter]
            assert scale == 1.0, "this engine knows no other scale"
            load_own_adapter(Path(path).read_bytes(), command.adapter)
        [entry], limit = command.entries, command.max_new_tokens
        assert limit is not None
        pieces = own_answer(entry.ids, limit, command.adapter)
        return Script(
            [(piece.token_id, piece.text) for piece in pieces],
            waiting=frozenset(at for at, piece in enumerate(pieces) if piece.waiting),
        )


@asynccontextmanager
async def undisturbed(place: Path) -> AsyncIterator[Governed]:
    """A board of release 1.3.0 without an engine process, whose answers others are held to."""
    settings = BoardSettings(
        "calm",
        FOLDER.id,
        CONTEXT_LEN,
        EOS_IDS,
        patience=CALM,
        sampling=GREEDY,
        queue_limit=64,
        staged_dir=place / "staged",
        max_adapters=8,
        vocab_size=TOKENIZER.get_vocab_size(),
    )

    async def start(_: Path | None) -> OwnEngine:
        return OwnEngine()

    board = Board(settings, start)
    await board.start()
    try:
        yield Governed(board, Sim(place))
    finally:
        await board.stop()


class Oracle:
    """What the simulated model says with each version of an adapter, in this process."""

    def stage(self, version: AdapterVersion, content: bytes) -> None:
        load_own_adapter(content, version.ref.key)

    def says(self, ids: tuple[int, ...], count: int, ref: AdapterRef | None = None) -> list[int]:
        pieces = own_answer(ids, count, None if ref is None else ref.key)
        return [piece.token_id for piece in pieces]

    def check(self, client: Listener, versions: dict[str, AdapterVersion]) -> None:
        """Every token is what its version says after what was there before it."""
        assert client.finished is not None, client.error
        assert client.text == TOKENIZER.decode(client.ids, skip_special_tokens=True)
        spans = client.finished.versions
        borders = [0, *(span.end for span in spans)]
        assert borders == [*(span.start for span in spans), len(client.ids)]
        for span in spans:
            name = span.version.removeprefix(f"{LINE}@")
            ref = versions[name].ref if name in versions else None
            assert (ref is None) == (span.version == "default"), span
            before = (*client.asked.prompt_ids, *client.ids[: span.start])
            expected = self.says(before, span.end - span.start, ref)
            assert client.ids[span.start : span.end] == expected, span


async def rest(seconds: float = 0.03) -> None:
    """Let the board do what it would, were it not held."""
    await asyncio.sleep(seconds)
