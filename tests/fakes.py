"""A scripted engine that obeys the ``Engine`` protocol, and the loop that board tests run in."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rkserve.board.engine import EngineFacts, OnToken, RunCommand, RunEnded
from rkserve.errors import EngineDied
from rkserve.native.runtime import Perf, RunEnd

T = TypeVar("T")
EOS = 2
QUIRKS = {"append_tokens_with_history": True, "kv_valid_after_abort": False}


def run_loop(work: Coroutine[Any, Any, T], limit_s: float = 30.0) -> T:
    """Run ``work`` in a loop of its own; fail for every error that nobody else would hear of."""
    unheard: list[Mapping[str, Any]] = []

    async def main() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        result = await asyncio.wait_for(work, limit_s)
        gc.collect()  # a future that dies with an exception nobody has seen says so here
        await asyncio.sleep(0)
        return result

    result = asyncio.run(main())
    gc.collect()
    assert not unheard, unheard
    return result


def tokens_of(*texts: str) -> list[tuple[int, bytes]]:
    """Return one token for each text; its id is 100 and up."""
    return [(100 + at, text.encode()) for at, text in enumerate(texts)]


@dataclass
class Script:
    """What the fake does with one run: emit ``tokens`` until an abort or the limit, then end.

    ``hang_at`` and ``die_at`` are positions; a ``deaf`` run ignores aborts. ``prefill`` is waited
    for first, and not cut by an abort; ``late`` tokens still come after one, and ``pace_s`` lies
    between tokens. ``kv_off`` falsifies the KV size that is reported.
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


class FakeEngine:
    """One run at a time, a token per turn of the loop, and a KV cache that is only counted."""

    def __init__(self, scripts: Callable[[RunCommand], Script], *, per_run: bool = True) -> None:
        release = "1.3.0" if per_run else "1.2.3"
        self.facts = EngineFacts(release, per_run_sampling=per_run, quirks=QUIRKS, load_s=0.0)
        self.pid = 4711
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.commands: list[RunCommand] = []
        self.aborts: list[int] = []
        self.kv: list[int] = []
        self.silence_s = 0.0
        self.silences: list[float] = []  # what the next looks find, before ``silence_s`` again
        self.immortal = self.stopped = False
        self._scripts = scripts
        self._busy = False

    def run(self, command: RunCommand, on_token: OnToken) -> asyncio.Future[RunEnded]:
        ended: asyncio.Future[RunEnded] = asyncio.get_running_loop().create_future()
        self.commands.append(command)
        script = self._scripts(command)
        if script.raises is not None:
            raise script.raises
        if self.died.done():
            ended.set_exception(EngineDied("fake", self.died.result()))
            return ended
        assert not self._busy, "two runs at once"
        self._busy = True
        task = asyncio.create_task(self._play(command, script, on_token))
        task.add_done_callback(lambda done: self._settle(done, ended))
        self.died.add_done_callback(lambda _: task.cancel())
        return ended

    async def _play(self, command: RunCommand, script: Script, on_token: OnToken) -> RunEnded:
        if script.prefill is not None:
            await script.prefill.wait()
        self.kv = [*([] if command.clear else self.kv), *command.ids]
        late, limit = script.late, command.max_new_tokens
        for at, (token_id, data) in enumerate(script.tokens[:limit]):
            await asyncio.sleep(0)
            if at == script.die_at:
                self.die("SIGSEGV")
            if at in (script.hang_at, script.die_at):
                await asyncio.Event().wait()
            if command.run_id in self.aborts and not script.deaf:
                if late == 0:
                    break
                late -= 1
            on_token(token_id, data)
            self.kv += [token_id] * (token_id != EOS)
            await asyncio.sleep(script.pace_s)
        perf = Perf(1.0, len(command.ids or command.prompt_text or ()), 1.0, len(self.kv), 1.0)
        return RunEnded(script.end, perf, 0, len(self.kv) + script.kv_off, None)

    def _settle(self, task: asyncio.Task[RunEnded], ended: asyncio.Future[RunEnded]) -> None:
        self._busy = False
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
