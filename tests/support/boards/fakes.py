"""A scripted engine that obeys the ``Engine`` protocol, and the loop that board tests run in."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rkserve.board.engine.protocol import EngineFacts, OnScores, OnToken, RunCommand, RunEnded
from rkserve.core.block_hashes import common_prefix
from rkserve.core.errors import CallFailed, EngineDied, Misuse, NativeError
from rkserve.native.runtime import Perf, RunEnd

T = TypeVar("T")
EOS = 2
QUIRKS = {"append_tokens_with_history": True, "kv_valid_after_abort": False}
# The next token of an entry, given what its context holds; None where the answer has ended.
Model = Callable[[int, tuple[int, ...]], "tuple[int, bytes] | None"]


# While a loop runs its objects stay in the two young generations: to look through these for errors
# takes microseconds, and through all that a test session keeps most of many tests' time.
RECENT = 1
THRESHOLD = (50_000, 100, 100)


def run_loop(work: Coroutine[Any, Any, T], limit_s: float = 120.0) -> T:
    """Run ``work`` in a loop of its own; fail for every error that nobody else would hear of."""
    return settled(work, limit_s, asyncio.run)


def settled(
    work: Coroutine[Any, Any, T], limit_s: float, run: Callable[[Coroutine[Any, Any, T]], T]
) -> T:
    """Let ``run`` do the work; what ``run_loop`` promises."""
    unheard: list[Mapping[str, Any]] = []

    async def main() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        result = await asyncio.wait_for(work, limit_s)
        gc.collect(RECENT)  # a future that dies with an exception nobody has seen says so here
        await asyncio.sleep(0)
        return result

    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLD)
    try:
        result = run(main())
        gc.collect(RECENT)
    finally:
        gc.set_threshold(*before)
    assert not unheard, unheard
    return result


def tokens_of(*texts: str) -> list[tuple[int, bytes]]:
    """Return one token for each text; its id is 100 and up."""
    return [(100 + at, text.encode()) for at, text in enumerate(texts)]


@dataclass
class Script:
    """What the fake does with one run: emit ``tokens`` until an abort or the limit, then end.

    ``others`` are the tokens of entry 1 and up. A ``model`` is asked instead of both, so that what
    was edited shows. ``hang_at`` and ``die_at`` are positions; a ``deaf`` run ignores aborts and
    pauses. ``waiting`` are positions where text is held back and no pause is granted. ``prefill``
    is waited for first, and not cut by an abort; ``late`` tokens still come after one, and
    ``pace_s`` lies between tokens, besides the ``stalls`` before some positions. ``kv_off``
    falsifies the KV sizes that are reported.
    """

    tokens: list[tuple[int, bytes]]
    hang_at: int | None = None
    die_at: int | None = None
    deaf: bool = False
    late: int = 0
    pace_s: float = 0.0
    prefill: asyncio.Event | None = None
    end: RunEnd | None = RunEnd.FINISHED
    kv_off: int = 0
    raises: Exception | None = None
    others: tuple[list[tuple[int, bytes]], ...] = ()
    model: Model | None = None
    waiting: frozenset[int] = frozenset()
    stalls: Mapping[int, float] = field(default_factory=dict)

    def token(self, entry: int, at: int, context: list[int]) -> tuple[int, bytes] | None:
        """Return the entry's token at position ``at``; None after its last one."""
        if self.model is not None:
            return None if at and context[-1:] == [EOS] else self.model(entry, tuple(context))
        tokens = [self.tokens, *self.others][entry] if entry <= len(self.others) else []
        return tokens[at] if at < len(tokens) else None


@dataclass
class Play:
    """A run that is going on, or paused: its script, and how far it got."""

    script: Script
    keep_history: bool
    at: int = 0
    unsent: list[int] = field(default_factory=list)  # entries that have just got a token


class FakeEngine:
    """One run at a time, a token per turn of the loop, and KV caches that are only ids.

    A resumed run goes on with its script. Only the board's own mistakes fail an assertion; what
    the real engine would refuse is refused in its way.
    """

    def __init__(
        self,
        scripts: Callable[[RunCommand], Script],
        *,
        per_run: bool = True,
        n_batch: int = 1,
        quirks: Mapping[str, bool] = QUIRKS,
    ) -> None:
        release = "1.3.0" if per_run else "1.2.3"
        self.facts = EngineFacts(release, per_run, quirks, load_s=0.0, n_batch=n_batch)
        self.pid = 4711
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.commands: list[RunCommand] = []
        self.disk_s = 0.0  # what it takes to write a prompt cache
        self.aborts: list[int] = []
        self.pauses: list[int] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.call_errors: dict[str, NativeError] = {}  # by method: what its next call fails with
        self.call_gate: asyncio.Event | None = None  # what calls wait for, as if the library hung
        self.begin_gate: asyncio.Event | None = None  # what runs wait for before they begin
        self.kvs: list[list[int]] = [[] for _ in range(n_batch)]
        self.adapters: dict[str, tuple[str, float]] = {}
        self.cache: list[int] | None = None  # the ids of the prompt cache that is loaded
        self.left: list[int] = []  # what the last run without history left, where that is reused
        self.forgetful = False  # it is not reused, whatever the quirk says
        self.no_release = False  # the library cannot forget a prompt cache
        self.system_prompt = 0  # positions that a clear can spare
        self.blind_to_caches = False  # a cache that is loaded saves nothing
        self.silence_s = 0.0
        self.silences: list[float] = []  # what the next looks find, before ``silence_s`` again
        self.immortal = self.stopped = False
        self._scripts = scripts
        self._paused: Play | None = None
        self._current: int | None = None  # the run that has begun, and the pause it is asked for
        self._wish: int | None = None
        self._running: asyncio.Task[Any] | None = None
        self._queue = asyncio.Lock()  # calls and runs, in order

    @property
    def kv(self) -> list[int]:
        return self.kvs[0]

    @property
    def paused(self) -> bool:
        return self._paused is not None

    # -- runs ---------------------------------------------------------------------------------

    def run(
        self,
        command: RunCommand,
        on_token: OnToken,
        on_scores: OnScores | None = None,
    ) -> asyncio.Future[RunEnded]:
        self.commands.append(command)
        play = self._paused if command.resume else None
        if play is None:
            play = Play(self._scripts(command), command.keep_history)
        if play.script.raises is not None:
            raise play.script.raises
        assert len(command.entries) == self.facts.n_batch, "not one entry for each place"
        assert self._running is None or self._running.done(), "two runs at once"
        return self._start(lambda: self._begin(command, play, on_token), run=True)

    async def _begin(self, command: RunCommand, play: Play, on_token: OnToken) -> RunEnded:
        if self.begin_gate is not None:
            await self.begin_gate.wait()
            if command.run_id in self.aborts:
                return RunEnded(None, Perf(), 0, (), None)
        return await self._run(command, play, on_token)

    async def _run(self, command: RunCommand, play: Play, on_token: OnToken) -> RunEnded:
        refused, cache_refused = self._refusal(command, play), None
        if refused is not None:
            return RunEnded(RunEnd.FAILED, Perf(), -1, (), refused)
        self._current = command.run_id
        if play.script.prefill is not None:
            await play.script.prefill.wait()
        for start, end in command.cut:
            del self.kv[start:end]
        if not command.resume:
            cache_refused = self._use_caches(command)
            self._begin_context(command)
        prefilled = self._prefill(command)
        self._paused = None
        if await self._play(command, play, on_token):
            self._paused = play
            for entry in play.unsent:  # its last token is not in the KV cache: to be sent again
                self.kvs[entry].pop()
            return RunEnded(RunEnd.PAUSED, Perf(), 0, self._sizes(play), None, cache_refused)
        if command.save_cache is not None:
            await asyncio.sleep(self.disk_s)
            await asyncio.to_thread(Path(command.save_cache).write_text, json.dumps(self.kv))
        perf = Perf(1.0, prefilled, 1.0, len(self.kv), 1.0)
        ended = RunEnded(play.script.end, perf, 0, self._sizes(play), None, cache_refused)
        if not play.keep_history:
            self._leave()
        return ended

    def _begin_context(self, command: RunCommand) -> None:
        if command.clear or command.keep_history:
            self.left = []
        if command.clear or not command.keep_history:
            self.kvs = [[] for _ in self.kvs]

    def _leave(self) -> None:
        """End a single turn, which may leave its context to the next one."""
        reuses = self.facts.quirks.get("prefix_reuse_in_ram", False) and not self.forgetful
        self.left = list(self.kv) if reuses else []
        self.kvs = [[] for _ in self.kvs]

    def _refusal(self, command: RunCommand, play: Play) -> str | None:
        if command.resume != self.paused:
            return f"'run' is not allowed while the handle is {'paused' if self.paused else 'idle'}"
        if command.adapter is not None and command.adapter not in self.adapters:
            return f"adapter {command.adapter} is not loaded"
        if command.resume and command.keep_history != play.keep_history:
            return "a paused run is resumed with the keep_history that it was started with"
        size = len(self.kv)
        for start, end in command.cut:
            if not 0 <= start < end <= size:
                return f"the range {start} to {end} is not in a cache of {size}"
            size -= end - start
        return None

    def _use_caches(self, command: RunCommand) -> str | None:
        if command.release_cache:
            if self.no_release:
                return "rkllm_release_prompt_cache returned -1"
            self.cache = None
        if command.load_cache is not None:
            try:
                self.cache = json.loads(Path(command.load_cache).read_text())
            except (OSError, ValueError) as exc:
                self.cache = None
                return f"rkllm_load_prompt_cache returned -1 ({exc})"
        return None

    def _prefill(self, command: RunCommand) -> int:
        entries = command.entries
        cached = 0
        if self.cache is not None and not self.kv and not self.blind_to_caches:
            # What both begin with is not computed again, all but the last id.
            cached = common_prefix(tuple(self.cache), entries[0].ids[:-1])
        if not command.resume:
            cached = max(cached, common_prefix(tuple(self.left), entries[0].ids))
        for kv, entry in zip(self.kvs, entries, strict=True):
            kv.extend(entry.ids)
        return sum(len(entry.ids or entry.prompt_text or ()) for entry in entries) - cached

    async def _play(self, command: RunCommand, play: Play, on_token: OnToken) -> bool:
        """Give out tokens; return whether the run was paused."""
        script, late, given = play.script, play.script.late, 0
        while given != command.max_new_tokens:
            step = [(n, script.token(n, play.at, kv)) for n, kv in enumerate(self.kvs)]
            live = [(n, *token) for n, token in step if token is not None]
            await self._trouble(script, play.at)
            if command.run_id in self.aborts and not script.deaf:
                if late == 0:
                    break
                late -= 1
            if not live:
                break
            if self._emit(play, live, on_token) and self._pauses(command.run_id):
                return True
            given += 1
            await asyncio.sleep(script.pace_s)
        if script.model is not None:  # it needed to see the EOS that ended an entry
            self.kvs = [kv[:-1] if kv[-1:] == [EOS] else kv for kv in self.kvs]
        return False

    async def _trouble(self, script: Script, at: int) -> None:
        await asyncio.sleep(script.stalls.get(at, 0.0))
        if at == script.die_at:
            self.die("SIGSEGV")
        if at in (script.hang_at, script.die_at):
            await asyncio.Event().wait()

    def _emit(self, play: Play, live: list[tuple[int, int, bytes]], on_token: OnToken) -> bool:
        """Give out one step; return whether the library would pause after it."""
        waiting = play.at in play.script.waiting
        play.at += 1
        play.unsent = []
        for entry, token_id, data in live:
            on_token(entry, token_id, data, waiting)
            if token_id != EOS or play.script.model is not None:
                self.kvs[entry].append(token_id)
                play.unsent.append(entry)
        return not waiting and not play.script.deaf

    def _pauses(self, run_id: int) -> bool:
        return run_id == self._wish and run_id not in self.aborts

    def _sizes(self, play: Play) -> tuple[int, ...]:
        return tuple(len(kv) + play.script.kv_off for kv in self.kvs)

    # -- everything else ----------------------------------------------------------------------

    def call(self, method: str, **args: Any) -> asyncio.Future[Any]:
        self.calls.append((method, args))
        return self._start(lambda: self._call(method, args), run=False)

    async def _call(self, method: str, args: dict[str, Any]) -> Any:
        if self.call_gate is not None:
            await self.call_gate.wait()
        if (error := self.call_errors.pop(method, None)) is not None:
            raise error
        if (method == "drain") != self.paused and method != "kv_sizes":
            state = "paused" if self.paused else "idle"
            raise Misuse(f"'{method}' is not allowed while the handle is {state}")
        return getattr(self, f"_call_{method}")(**args)

    def _call_drain(self) -> None:
        if self._paused is not None and not self._paused.keep_history:
            self.kvs = [[] for _ in self.kvs]
        self._paused = None

    def _call_clear_kv(self, keep_system_prompt: bool = False) -> None:
        self.left = []
        kept = self.system_prompt if keep_system_prompt else 0
        self.kvs = [kv[:kept] for kv in self.kvs]

    def _call_kv_sizes(self) -> tuple[int, ...]:
        return tuple(len(kv) for kv in self.kvs)

    def _call_load_adapter(self, path: str, name: str, scale: float = 1.0) -> None:
        if name in self.adapters:
            raise Misuse(f"an adapter {name} is loaded already")
        if not Path(path).is_file():
            raise CallFailed("rkllm_load_lora", -1)
        self.adapters[name] = (path, scale)

    def _call_release_cache(self) -> None:
        self.cache = None

    def _start(self, work: Callable[[], Coroutine[Any, Any, T]], *, run: bool) -> asyncio.Future[T]:
        """Do ``work`` behind what was asked for before, unless the engine dies first."""
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self.died.done():
            ended.set_exception(EngineDied("fake", self.died.result()))
            return ended

        async def in_turn() -> T:
            async with self._queue:
                return await work()

        task = asyncio.create_task(in_turn())
        if run:
            self._running = task
        task.add_done_callback(lambda done: self._settle(done, ended))
        self.died.add_done_callback(lambda _: task.cancel())
        return ended

    def _settle(self, task: asyncio.Task[T], ended: asyncio.Future[T]) -> None:
        if ended.done():
            return
        if task.cancelled():
            ended.set_exception(EngineDied("fake", self.died.result()))
        elif (exc := task.exception()) is not None:
            ended.set_exception(exc)
        else:
            ended.set_result(task.result())

    def die(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(reason)

    def pause(self, run_id: int) -> None:
        self.pauses.append(run_id)
        if run_id == self._current:
            self._wish = run_id

    def abort(self, run_id: int) -> None:
        self.aborts.append(run_id)

    def silent_s(self) -> float:
        return self.silences.pop(0) if self.silences else self.silence_s

    async def stop(self) -> None:
        self.stopped = True
        self.die("stopped")

    async def kill(self) -> bool:
        await asyncio.sleep(0.02)  # signals take their time: the board is seen to be hung
        if not self.immortal:
            self.die("killed")
        return not self.immortal
