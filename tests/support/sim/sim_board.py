"""A board or a bare engine process over the simulated runtime and its model, for tests."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from tokenizers import Tokenizer

from rkserve.board.board import Board
from rkserve.board.engine.process import EngineProcess
from rkserve.board.engine.protocol import (
    EngineFacts,
    EngineSpec,
    OnScores,
    OnToken,
    RunCommand,
    RunEnded,
    with_weights,
)
from rkserve.board.rules.hang_limits import RunTimeouts
from rkserve.board.run.settings import BoardSettings
from rkserve.core.messages import AdapterRef, GenerateRequest, Kv
from rkserve.core.run_params import Sampling
from rkserve.models.adapters import adapters
from rkserve.models.folder import ModelFolder, open_model_folder
from rkserve.native.runtime import LoadParams
from rkserve.native.sim import models as sim_models
from rkserve.native.sim.build import ensure_built
from tests.support.boards.board_bench import collect, until
from tests.support.paths import PROJECT
from tests.support.sim.releases import BOTH

Test = TypeVar("Test", bound=Callable[..., object])

FOLDER = open_model_folder(PROJECT / "models" / "sim-chat")
WEIGHTS = FOLDER.require_weights()
TOKENIZER = Tokenizer.from_file(str(FOLDER.path / "tokenizer.json"))
CONTEXT_LEN = FOLDER.settings.context_length
EOS_IDS = frozenset(FOLDER.settings.eos_token_ids)
# Penalties would make the choice depend on more than the context.
GREEDY = Sampling(temperature=0.0, top_k=1, repeat_penalty=1.0)
# A machine that is busy with other things is not a library that hangs.
CALM = RunTimeouts(first_token_s=30.0, token_s=30.0, abort_s=30.0, least_s=30.0)
UNHURRIED = 0.5  # 30 ms for a token: what is asked of the engine is there before the next one


def both_releases(test: Test) -> Test:
    """Run a file's tests on both releases in turn, and so the cases of each test.

    ``make test-long`` runs each case on both. Most differences of the releases are the binding's,
    whose tests run on both.
    """
    turns: Callable[[Test], Test] = pytest.mark.turns("release")
    return turns(pytest.mark.parametrize("release", BOTH)(test))


def chat(*turns: str) -> tuple[int, ...]:
    """Return the ids of a conversation that begins and ends with the user."""
    return tuple(TOKENIZER.encode(chat_text(*turns)).ids)


def chat_text(*turns: str) -> str:
    """Return a conversation that begins and ends with the user, as the chat template writes it."""
    text = ""
    for at, turn in enumerate(turns):
        text += f"<|im_start|>{'assistant' if at % 2 else 'user'}\n{turn}<|im_end|>\n"
    return f"{text}<|im_start|>assistant\n"


def words(text: str) -> tuple[int, ...]:
    """Return the ids of a text as it stands."""
    return tuple(TOKENIZER.encode(text).ids)


class Tap:
    """An engine that notes what is asked of it, and can hold back what it says.

    ``hold(count)``: of the next run, the board hears ``count`` tokens of entry 0 and then, until
    it has asked for a pause or an abort, nothing more. So a test decides exactly which token the
    board's word comes after, however fast the library is and however busy the machine.
    """

    def __init__(self, engine: EngineProcess, noted: int | None = None) -> None:
        """``noted`` commands, ends and calls are kept, the last ones; None keeps all."""
        self.engine = engine
        self.facts: EngineFacts = engine.facts
        self.pid, self.died = engine.pid, engine.died
        self.commands: deque[RunCommand] = deque(maxlen=noted)
        self.ends: deque[RunEnded] = deque(maxlen=noted)
        self.called: deque[str] = deque(maxlen=noted)
        self.tokens = 0  # of all runs
        # Told of every token when the board has taken it, and whether its text is still to come.
        self.heard: Callable[[bool], None] = lambda _: None
        # Told when the board has asked for a pause or an abort, and when a run is over.
        self.asked: Callable[[], None] = lambda: None
        self.over: Callable[[], None] = lambda: None
        self._hold: int | None = None
        self._held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer: list[tuple[int, int, bytes, bool]] | None = None
        self._flush: Callable[[], None] = lambda: None
        self._inner: asyncio.Future[RunEnded] | None = None  # of the newest run

    def hold(self, count: int) -> asyncio.Future[None]:
        """Hold the next run's words back after ``count`` tokens; the future says that it does."""
        self._hold, self._held = count, asyncio.get_running_loop().create_future()
        return self._held

    def run(
        self, command: RunCommand, on_token: OnToken, on_scores: OnScores | None = None
    ) -> asyncio.Future[RunEnded]:
        """See ``Engine``."""
        self.commands.append(command)
        heard, hold, held = 0, self._hold, self._held
        self._hold = None
        outer: asyncio.Future[RunEnded] = asyncio.get_running_loop().create_future()

        def tell(entry: int, token_id: int, data: bytes, waiting: bool) -> None:
            nonlocal heard
            if self._buffer is not None:
                self._buffer.append((entry, token_id, data, waiting))
                return
            heard += entry == 0
            if entry == 0 and heard == hold:
                self._buffer = []  # before the board hears it: what it asks for then lets go
                held.set_result(None)
            on_token(entry, token_id, data, waiting)
            self.heard(waiting)

        def count(entry: int, token_id: int, data: bytes, waiting: bool) -> None:
            self.tokens += 1
            tell(entry, token_id, data, waiting)

        def end() -> None:
            if self._buffer is None and inner.done() and not outer.done():
                if inner.exception() is None:
                    self.ends.append(inner.result())
                    outer.set_result(inner.result())
                else:
                    outer.set_exception(inner.exception() or AssertionError)

        def flush() -> None:
            buffer, self._buffer = self._buffer, None
            for said in buffer or ():
                tell(*said)
            end()

        self._flush = flush
        self._inner = inner = self.engine.run(command, count, on_scores)
        # The board may have given the run up, as it does with one that hangs.
        inner.add_done_callback(lambda done: done.cancelled() or done.exception())
        inner.add_done_callback(lambda _: self.over())
        inner.add_done_callback(lambda _: end())
        return outer

    def pause(self, run_id: int) -> None:
        """See ``Engine``."""
        self.engine.pause(run_id)
        self._let_go()

    def abort(self, run_id: int) -> None:
        """See ``Engine``."""
        self.engine.abort(run_id)
        self._let_go()

    def release(self) -> None:
        """Let the board hear what was held back, although it has asked for nothing."""
        self._let_go()

    def _let_go(self) -> None:
        if self._inner is not None and not self._inner.done():
            self.asked()
        if self._buffer is not None:
            asyncio.get_running_loop().call_soon(self._flush)

    def call(self, method: str, **args: Any) -> asyncio.Future[Any]:
        """See ``Engine``."""
        self.called.append(method)
        return self.engine.call(method, **args)

    def silent_s(self) -> float:
        """See ``Engine``."""
        return self.engine.silent_s()

    async def stop(self) -> None:
        """See ``Engine``."""
        await self.engine.stop()

    async def kill(self) -> bool:
        """See ``Engine``."""
        return await self.engine.kill()


@dataclass
class Sim:
    """One simulated board's place on disk, and how its engine is started."""

    FOLDER: ClassVar[ModelFolder] = FOLDER
    QUESTIONS: ClassVar[Mapping[str, str]] = {
        "plain": "Write 64 tokens",
        # Characters of two to four bytes, most of which are several tokens; it is cut at 64 tokens.
        "multi-byte": "Greet me in many languages",
    }
    STOPPED: ClassVar[Kv] = Kv.RECOMPUTED  # the KV cache of a generation that was stopped to pause
    PAUSES_AT_LIMIT: ClassVar[bool] = True  # a run may also pause at the last token of its limit

    place: Path
    release: str = "1.3.0"
    environ: dict[str, str] = field(default_factory=dict)
    quirks: Mapping[str, bool] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    heard: Callable[[bool], None] = lambda _: None  # of each tap, from its start
    noted: int | None = None  # see ``Tap``
    taps: list[Tap] = field(default_factory=list)  # one for each engine of ``board``
    _then: Callable[[], None] | None = None  # see ``gate``
    _opened: bool = False  # by the board
    _slowly: float = UNHURRIED
    _orders: int = 0
    model: Path = WEIGHTS  # what it loads unless it was given other weights
    loads: list[Path] = field(default_factory=list)  # what ``board`` has tried to load

    @property
    def control(self) -> Path:
        return self.place / "control"

    @property
    def tap(self) -> Tap:
        """The tap of the newest engine."""
        return self.taps[-1]

    def _order(self, *lines: str) -> None:
        """Replace the control file as a whole: half of it would be another order.

        The library tells files apart by inode, size and time. Of two that follow each other within
        a tick of the clock, the second may get the inode that the one before the first had.
        """
        fresh = self.place / "control.new"
        self._orders = self._orders % 99 + 1
        fresh.write_text("".join(f"{line}\n" for line in (*lines, "#" * self._orders)))
        fresh.replace(self.control)

    def fault(self, line: str) -> None:
        """Let the library misbehave; it looks at the file's time and size."""
        self._order(f"fault={line}", "time_scale=0")

    def leak(self, mb: float, files: int) -> None:
        """Let each run keep memory and files for ever."""
        self._order(f"leak_mb={mb:g}", f"leak_files={files}", "time_scale=0")

    def pace(self, time_scale: float) -> None:
        """Open the gate, and let the library be that fast from its next token on."""
        self._then, self._opened = None, False
        self._order(f"time_scale={time_scale:g}")

    def gate(
        self, where: str, then: Callable[[], None] | None = None, slowly: float = UNHURRIED
    ) -> None:
        """Let each run stand still there, ``prefill`` or ``token:5``, until ``pace`` is called.

        With ``then`` the board opens the gate as well, by asking for a pause or an abort. The
        library goes on at the pace ``slowly``, so that it hears of that before the answer is over,
        and at the end of the run ``then`` is called.
        """
        if self._opened:  # a run is on its way to its end: what is meant for the next comes then
            self._then = lambda: self.gate(where, then, slowly)
            return
        self._then, self._slowly = then, slowly
        self._order(f"gate={where}", "time_scale=0")

    def hold(self, count: int, slowly: float = UNHURRIED) -> asyncio.Future[None]:
        """Hold the next run's words back after ``count`` tokens, and the library there too.

        See ``Tap.hold`` and ``gate``; without the latter the library may be done meanwhile.
        """
        self.gate(f"token:{count}", lambda: self.pace(0), slowly)
        return self.tap.hold(count)

    def _asked(self) -> None:
        if self._then is not None and not self._opened:
            self._opened = True
            self._order(f"time_scale={self._slowly:g}")

    def _over(self) -> None:
        if self._then is not None and self._opened:
            then, self._then, self._opened = self._then, None, False
            then()

    async def at_gate(self) -> None:
        """Wait until a run stands at the gate; it stays there."""
        sign = self.control.with_name(f"{self.control.name}.gate")
        sign.unlink(missing_ok=True)  # of an engine that was killed there
        await until(sign.exists)

    def adapter(self, title: str, seed: int = 1) -> AdapterRef:
        """Put a LoRA adapter into the model folder of this board's own, ``models``."""
        place = self.models / "adapters" / title / "1"
        place.mkdir(parents=True)
        self._write_adapter(place / "adapter.rkllm", title, seed)
        found = {adapter.name: adapter for adapter in adapters(self.models)}
        return found[title].ref()

    def _write_adapter(self, path: Path, title: str, seed: int) -> None:
        sim_models.write_adapter(path, title, seed=seed)

    @property
    def models(self) -> Path:
        return self.place / self.FOLDER.id

    @classmethod
    def chat(cls, *turns: str) -> tuple[int, ...]:
        """Return the ids of a conversation with this kind of board, see ``chat_text``."""
        return chat(*turns)

    @classmethod
    def asked(cls, question: str) -> tuple[int, ...]:
        """Return the ids of one of ``QUESTIONS``."""
        return cls.chat(cls.QUESTIONS[question])

    def library(self) -> Path:
        """Return the library that its engines load."""
        return ensure_built(self.release)

    def spec(self, n_batch: int = 1) -> EngineSpec:
        context_len = self.FOLDER.settings.context_length
        return EngineSpec(
            library=str(self.library()),
            params=LoadParams(
                str(self.model),
                context_len,
                context_len,
                sampling=self.sampling,
                n_batch=n_batch,
            ),
            fence=str(self.place / "npu.fence"),
            quirks=self.quirks,
            environ={
                "RKSIM_TIME_SCALE": "0",
                "RKSIM_LOAD_MS": "0",
                "RKSIM_STRICT": "1",
                "RKSIM_CONTROL": str(self.control),
                **self.environ,
            },
            fence_timeout_s=30.0,
            load_timeout_s=60.0,
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
        settings = BoardSettings(
            "b",
            self.FOLDER.id,
            self.FOLDER.settings.context_length,
            frozenset(self.FOLDER.settings.eos_token_ids),
            patience=CALM,
            sampling=self.sampling,
            model_dir=self.models,
            disk_bytes_per_s=1e15,
        )
        settings = replace(settings, **changes)
        spec = self.spec(settings.n_batch)

        async def start(weights: Path | None) -> Tap:
            chosen = with_weights(spec, weights)
            self.loads.append(Path(chosen.params.model_path))
            self.taps.append(Tap(await EngineProcess.start("b", chosen), self.noted))
            self.tap.heard, self.tap.asked, self.tap.over = self.heard, self._asked, self._over
            return self.tap

        board = Board(settings, start)
        await board.start()
        try:
            yield board
        finally:
            await board.stop()


@dataclass(frozen=True)
class Belongings:
    """What a process has: threads, open files, resident memory."""

    threads: int
    files: int
    resident_kb: int

    @classmethod
    def of(cls, pid: int | None = None) -> Belongings:
        place = Path(f"/proc/{pid or os.getpid()}")
        status = dict(
            line.split(":", 1)
            for line in (place / "status").read_text().splitlines()
            if ":" in line
        )
        return cls(
            threads=int(status["Threads"]),
            files=sum(1 for _ in (place / "fd").iterdir()),
            resident_kb=int(status["VmRSS"].split()[0]),
        )


def released() -> Belongings:
    """What this process has when it has given back what it does not use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return Belongings.of()


async def ask(board: Board, ids: tuple[int, ...], **extra: Any) -> list[Any]:
    extra = {"max_tokens": 100, **extra}
    return await collect(board.generate(GenerateRequest("r", FOLDER.id, ids, **extra)))
