"""Work off the event loop, which would delay token streams: long bodies, and new grammars.

Long bodies are parsed and tokenized in threads. Grammars of clients are compiled on trial in
separate processes before a board gets them, and the results are cached, because clients send the
same schema with every request. New grammars wait in a queue per key for a small pool of processes,
of which one key never gets all, so that hostile grammars of one key do not block those of another.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeVar

from rkserve.core.child_process import ChildProcess
from rkserve.core.errors import RateLimited, RequestError
from rkserve.core.run_params import Guide
from rkserve.router.queue.admission import ANONYMOUS
from rkserve.sampling.trial import LIMIT_S, MAX_CHARS, PROGRAM, ask, refuse, too_long

T = TypeVar("T")

# Shorter bodies are parsed and tokenized in about a millisecond, less than the switch to a thread
# costs the token streams of other requests.
INLINE_BODY_BYTES = 8192
# A tokenizer takes some 500 bytes for each character: few long bodies are worked on at once.
_PROMPTS = ThreadPoolExecutor(2, thread_name_prefix="long bodies")
# Counting has its own thread, so that it does not delay prompts.
_COUNTS = ThreadPoolExecutor(1, thread_name_prefix="counting")
# After longer bodies the allocator is made to return memory; by itself it keeps all of it.
_TRIM_BYTES = 128 * 1024


async def off_loop(size: int, work: Callable[[], T], *, counts: bool = False) -> T:
    """Return the result of ``work`` on a body of ``size`` bytes, from a thread if the body is long.

    Work that still waits for a thread is cancelled with its caller. ``counts`` selects the thread
    for requests that generate nothing, such as /tokenize.
    """
    if size <= INLINE_BODY_BYTES:
        return work()
    pool = _COUNTS if counts else _PROMPTS
    return await asyncio.get_running_loop().run_in_executor(pool, partial(_done, size, work))


def _done(size: int, work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        if size >= _TRIM_BYTES and os.name == "posix":
            # Freed memory goes back to the system, where the C library can.
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)


KEPT = 128
# Starting takes a moment, and the answer may wait for a processor.
PATIENCE_S = 30.0
# Of one line; a grammar has its limit, and JSON makes up to six characters of one.
_LINE_BYTES = 16 * MAX_CHARS


@dataclass(eq=False, slots=True)
class _Trial:
    """One grammar of one key in trial or in the queue; ``listeners`` requests wait for it."""

    guide: Guide
    flow: str
    done: asyncio.Future[str | None]
    listeners: int = 0
    task: asyncio.Task[None] | None = None


class GrammarChecker:
    """The grammars of one Router. Use from one event loop."""

    def __init__(
        self, processes: int = 2, waiting_per_key: int = 16, *, keys: bool = False
    ) -> None:
        """At most ``waiting_per_key`` new grammars of one key wait.

        With several ``keys``, one key gets all processes but one at most.
        """
        self._processes, self._waiting_per_key = processes, waiting_per_key
        self.share(among_keys=keys)
        # By key and grammar: the time that another key's grammar takes would tell that it is known.
        self._known: OrderedDict[tuple[str, Guide], str | None] = OrderedDict()
        self._trials: dict[tuple[str, Guide], _Trial] = {}
        self._queues: dict[str, deque[_Trial]] = {}  # by key
        self._begun: Counter[str] = Counter()  # the number of each key's last trial
        self._numbers = count(1)
        self._running: Counter[str] = Counter()
        self._idle: list[TrialProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def share(self, *, among_keys: bool) -> None:
        """Leave a process to others than one key, or give all to the only one."""
        self._per_key = max(1, self._processes - 1) if among_keys else self._processes

    async def check(self, guide: Guide, param: str, flow: str = ANONYMOUS) -> None:
        """Check a grammar of a key's owner.

        Raises:
            RequestError: it cannot be used; names ``param``.
            RateLimited: too many new grammars of that key wait.
        """
        if (reason := too_long(guide)) is not None:
            refuse(reason, param)
        if (flow, guide) in self._known:
            self._known.move_to_end((flow, guide))
            reason = self._known[flow, guide]
        else:
            reason = await self._result(guide, flow)
        if reason is not None:
            refuse(reason, param)

    async def close(self) -> None:
        """Stop the processes."""
        self._queues.clear()
        for trial in self._trials.values():
            if trial.task is not None:
                trial.task.cancel()
            else:
                trial.done.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        idle, self._idle = self._idle, []
        for process in idle:
            await process.close()

    # -- turns --------------------------------------------------------------------------------

    async def _result(self, guide: Guide, flow: str) -> str | None:
        """Return the result of a trial; cancel a trial that no request waits for."""
        trial = self._trials.get((flow, guide)) or self._queued(guide, flow)
        trial.listeners += 1
        try:
            # Shielded: others may wait for the same.
            return await asyncio.shield(trial.done)
        finally:
            trial.listeners -= 1
            if not trial.listeners and not trial.done.done():
                self._drop(trial)

    def _queued(self, guide: Guide, flow: str) -> _Trial:
        queue = self._queues.setdefault(flow, deque())
        if len(queue) >= self._waiting_per_key:
            raise RateLimited(f"{len(queue)} new grammars that wait to be checked", int(LIMIT_S))
        trial = _Trial(guide, flow, asyncio.get_running_loop().create_future())
        self._trials[flow, guide] = trial
        queue.append(trial)
        self._pump()
        return trial

    def _drop(self, trial: _Trial) -> None:
        self._trials.pop((trial.flow, trial.guide), None)
        if trial.task is not None:
            trial.task.cancel()  # which ends its process
        elif (queue := self._queues.get(trial.flow)) is not None:
            queue.remove(trial)
            if not queue:
                del self._queues[trial.flow]

    def _pump(self) -> None:
        """Start as many trials as allowed, one of each key in turn."""
        while self._running.total() < self._processes:
            may = [flow for flow in self._queues if self._running[flow] < self._per_key]
            if not may:
                return
            # The key whose last trial began longest ago.
            flow = min(may, key=lambda one: self._begun[one])
            self._begun[flow] = next(self._numbers)
            queue = self._queues[flow]
            trial = queue.popleft()
            if not queue:
                del self._queues[flow]
            self._running[flow] += 1
            trial.task = asyncio.get_running_loop().create_task(self._run(trial))
            self._tasks.add(trial.task)
            trial.task.add_done_callback(self._tasks.discard)

    async def _run(self, trial: _Trial) -> None:
        try:
            reason = await self._tried(trial.guide)
        except asyncio.CancelledError:
            trial.done.cancel()
            raise
        except Exception as exc:  # noqa: BLE001 - raised by the requests that wait for it
            trial.done.set_exception(exc)
        else:
            self._remember(trial, reason)
            trial.done.set_result(reason)
        finally:
            self._running[trial.flow] -= 1
            if self._trials.get((trial.flow, trial.guide)) is trial:
                del self._trials[trial.flow, trial.guide]
            self._pump()

    def _remember(self, trial: _Trial, reason: str | None) -> None:
        """Cache a result; evict the least recently used one of the largest key."""
        self._known[trial.flow, trial.guide] = reason
        if len(self._known) > KEPT:
            counts = Counter(flow for flow, _ in self._known)
            most, _ = counts.most_common(1)[0]
            oldest = next(known for known in self._known if known[0] == most)
            del self._known[oldest]

    async def _tried(self, guide: Guide) -> str | None:
        process = self._idle.pop() if self._idle else TrialProcess()
        try:
            reason = await process.tried(guide)
        except BaseException:
            await process.close()  # it may still work on what is wanted no more
            raise
        self._idle.append(process)
        return reason


@dataclass(eq=False, slots=True)
class TrialProcess:
    """A process that tries one grammar at a time; started on first use."""

    _child: ChildProcess | None = None
    _output: asyncio.StreamReader = field(init=False)

    async def tried(self, guide: Guide) -> str | None:
        """Return the error in a grammar, if any. Raises ``RequestError`` if the trial failed."""
        try:
            child = self._child or await self._started()
            if not child.stdin.is_closing():
                child.stdin.write(ask(guide).encode())
            line = await self._line()
        except (TimeoutError, asyncio.TimeoutError) as exc:  # two classes before Python 3.11
            raise RequestError(
                f"The grammar could not be tried within {PATIENCE_S:g} s: the Router is busy with "
                "other things."
            ) from exc
        if line is not None:
            reason: str | None = json.loads(line)
            return reason
        self._child = None
        if await self._ended(child) == -signal.SIGVTALRM:
            return f"it takes longer than {LIMIT_S:g} s to compile."
        return "it takes too much memory to compile."

    async def close(self) -> None:
        """Stop the process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await self._ended(child)

    async def _started(self) -> ChildProcess:
        self._output = asyncio.StreamReader(_LINE_BYTES)
        child = self._child = await ChildProcess.start(
            (sys.executable, "-m", PROGRAM), out=asyncio.StreamReaderProtocol(self._output)
        )
        if await self._line() is None:
            raise RuntimeError("the process that tries grammars has ended at its start")
        return child

    async def _line(self) -> bytes | None:
        """Return the next line of output; None after the end."""
        line = await asyncio.wait_for(self._output.readline(), PATIENCE_S)
        return bytes(line) if line else None

    async def _ended(self, child: ChildProcess) -> int:
        """Return the exit code, after the process has ended."""
        await self._output.read()  # to the end of its output: that is no matter of time
        code = await child.wait()
        child.close()
        return code
