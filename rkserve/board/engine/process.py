"""The engine process as seen from the board: spawned, driven by frames, and ended reliably.

It handles pipes, signals and frames; the meaning of a run is the board's business.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rkserve.board.engine.protocol import (
    EngineFacts,
    EngineSpec,
    OnScores,
    OnToken,
    RunCommand,
    RunEnded,
)
from rkserve.core.child_process import ChildProcess, clean_environ
from rkserve.core.errors import (
    CallFailed,
    EngineDied,
    LibraryMissing,
    LoadFailed,
    Misuse,
    NativeError,
    ReleaseRefused,
)
from rkserve.core.logs import ENGINE
from rkserve.core.request_record import apart
from rkserve.core.run_params import Confine
from rkserve.native import engine_frames
from rkserve.native.engine_frames import FrameKind
from rkserve.native.runtime import Perf, RunEnd

log = logging.getLogger(__name__)

STDERR_LINES = 40
ERROR_LINES = 3
MAX_LINE = 1 << 16
PROGRAM = "rkserve.native.engine.process"
SIM_CONTROL = "RKSIM_CONTROL"  # of a simulated library, which notes beside it what it has done
NOT_CONFINED = "it did not load its model confined, and it does without"
# The library logs to one pipe and the engine writes frames to another: the log may lag this far
# behind.
WORDS_LAG_S = 0.05
REFUSALS: Mapping[str, type[NativeError]] = {
    refusal.__name__: refusal for refusal in (LibraryMissing, ReleaseRefused, LoadFailed, Misuse)
}


class _Pipe(asyncio.Protocol):
    """The engine's frames. An asyncio stream reader would be woken for every token."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self.over = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Take bytes of frames."""
        self._take(data)

    def connection_lost(self, _: Exception | None) -> None:
        """Note the end of the pipe."""
        if not self.over.done():
            self.over.set_result(None)


class EngineProcess:
    """The real ``Engine``: a child process. Build it with ``start``."""

    def __init__(self, board_id: str) -> None:
        loop = asyncio.get_running_loop()
        self._board_id = board_id
        self._reader = engine_frames.FrameReader()
        self._runs: dict[int, tuple[OnToken, OnScores | None, asyncio.Future[RunEnded]]] = {}
        self._entries: dict[int, int] = {}  # of runs, where several entries have them
        self._vectors: dict[int, tuple[int, bytes]] = {}  # of runs whose end follows
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._loaded: asyncio.Future[EngineFacts] = loop.create_future()
        self._last_sign_s = loop.time()
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)  # since the engine was last idle
        self.died: asyncio.Future[str] = loop.create_future()
        self.facts = EngineFacts("", per_run_sampling=False, quirks={}, load_s=0.0)
        self._pipe = _Pipe(self._take)
        self._log = asyncio.StreamReader()
        self._child: ChildProcess
        self.pid: int
        self._tasks: tuple[asyncio.Task[None], asyncio.Task[None]]

    @classmethod
    async def start(cls, board_id: str, spec: EngineSpec) -> EngineProcess:
        """Spawn an engine and load the model.

        Raises:
            NativeError: ``LibraryMissing``, ``ReleaseRefused`` or ``LoadFailed``, with the
                library's error lines, if any. One that crashed or took too long has a cause.
        """
        engine = cls(board_id)
        # Its pipes and tasks outlive the request that it is started for.
        spawning: asyncio.Task[None] = apart(asyncio.create_task, engine._spawn(spec))
        try:
            await spawning
            await engine._load(spec)
        except BaseException:
            # A cancellation may come after the process has started, and before this task resumes.
            if not spawning.cancelled() and spawning.exception() is None:
                await engine.kill()
            raise
        return engine

    async def _spawn(self, spec: EngineSpec) -> None:
        self._child = await ChildProcess.start(
            (sys.executable, "-m", PROGRAM, str(spec.beat_s), _confinement(spec)),
            out=self._pipe,
            err=asyncio.StreamReaderProtocol(self._log),
            environ=_environ(spec),
        )
        self.pid = self._child.pid
        self._tasks = (
            asyncio.create_task(self._follow(), name="engine frames"),
            asyncio.create_task(self._read_log(), name="engine log"),
        )

    async def _load(self, spec: EngineSpec) -> None:
        if (spec.params.tokenize, spec.params.embed) != (None, None):
            raise LoadFailed("callables cannot be handed to an engine process: tokenize, embed")
        command = {
            "library": spec.library,
            "cpu": spec.cpu,
            "params": asdict(spec.params),
            "fence": spec.fence,
            "fence_timeout_s": spec.fence_timeout_s,
            "text_mode": spec.text_mode,
            "vision": _vision(spec),
            "quirks": dict(spec.quirks),
            "allow_unlisted": spec.allow_unlisted,
            "trial_timeout_s": spec.load_timeout_s / 2,  # the engine loads the model in the rest
            "pin_cpus": list(spec.pin_cpus),
        }
        self._send(engine_frames.pack(FrameKind.LOAD, command))
        timeout_s = spec.load_timeout_s + spec.fence_timeout_s
        await asyncio.wait(
            (self._loaded, self.died),
            timeout=timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._loaded.done():
            self.facts = self._loaded.result()
        elif self.died.done():
            died = EngineDied(self._board_id, self.died.result())
            raise LoadFailed(
                f"the library crashed while it loaded the model: {died.reason}"
            ) from died
        else:
            self._loaded.cancel()
            late = f"the model was not loaded within {timeout_s:.0f} s"
            raise LoadFailed(late) from TimeoutError(late)

    def run(
        self, command: RunCommand, on_token: OnToken, on_scores: OnScores | None = None
    ) -> asyncio.Future[RunEnded]:
        """Start a run; see ``Engine``."""
        params = {
            "texts": [entry.prompt_text for entry in command.entries],
            "keep_history": command.keep_history,
            "clear": command.clear,
            "resume": command.resume,
            "cut": command.cut,
            "sampling": dict(command.sampling) if command.sampling else None,
            "max_new_tokens": command.max_new_tokens,
            "adapter": command.adapter,
            "load_cache": command.load_cache,
            "release_cache": command.release_cache,
            "save_cache": command.save_cache,
            "steps": command.steps.as_json() if command.steps is not None else None,
            "pooling": None if command.pooling is None else command.pooling.value,
            "entry": command.entry,
        }
        ids = tuple(entry.ids for entry in command.entries)
        shown: list[bytes] = []
        for entry in command.entries:
            for picture in entry.images:
                shown.append(engine_frames.pack_picture(command.run_id, picture, entry.images_of))
            if entry.embeds is not None:
                shown.append(engine_frames.pack_embeds(command.run_id, entry.embeds))
            if entry.encoder is not None:
                shown.append(engine_frames.pack_encoder(command.run_id, entry.encoder))
        frame = b"".join((*shown, engine_frames.pack_run(command.run_id, params, ids)))
        future: asyncio.Future[RunEnded] = asyncio.get_running_loop().create_future()
        if self._ask(frame, future):
            self._runs[command.run_id] = (on_token, on_scores, future)
            if command.entry:
                self._entries[command.run_id] = command.entry
        return future

    def call(self, method: str, *, entry: int = 0, **args: Any) -> asyncio.Future[Any]:
        """Make one call of the runtime; see ``Engine``."""
        call_id = next(self._call_ids)
        frame = engine_frames.pack(
            FrameKind.CALL, {"call_id": call_id, "method": method, "args": args, "entry": entry}
        )
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._ask(frame, future):
            self._calls[call_id] = future
        return future

    def _ask(self, frame: bytes, future: asyncio.Future[Any]) -> bool:
        """Send a command; where the engine has died, fail ``future`` at once."""
        if self.died.done():
            future.set_exception(EngineDied(self._board_id, self.died.result()))
            return False
        if not self._runs and not self._calls:
            self._stderr.clear()  # an error line of an earlier run must not explain this one
        self._send(frame)
        return True

    def pause(self, run_id: int) -> None:
        """Pause the run at its next token; see ``Engine``."""
        self._interrupt(FrameKind.PAUSE, run_id)

    def abort(self, run_id: int) -> None:
        """Abort the run; returns at once."""
        self._interrupt(FrameKind.ABORT, run_id)

    def _interrupt(self, kind: FrameKind, run_id: int) -> None:
        entry = self._entries.get(run_id, 0)
        self._send(engine_frames.pack(kind, {"run_id": run_id, "entry": entry}))

    def silent_s(self) -> float:
        """Seconds since the last frame."""
        return asyncio.get_running_loop().time() - self._last_sign_s

    async def stop(self) -> None:
        """Stop an engine without a run in order: destroy, then exit; kill it after 5 s."""
        self._send(engine_frames.pack(FrameKind.STOP, {}))
        if not await self._gone(5.0):
            await self.kill()

    async def kill(self) -> bool:
        """SIGTERM, 2 s, SIGKILL, 5 s. False if even that did not end it (a stuck driver call)."""
        for number, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
            self._child.send_signal(number)
            if await self._gone(patience_s):
                return True
        log.error("engine %d of board %s survives SIGKILL", self.pid, self._board_id)
        return False

    async def _gone(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait({self.died}, timeout=timeout_s)
        return bool(done)

    def _send(self, frame: bytes) -> None:
        stdin = self._child.stdin
        if not stdin.is_closing():  # the engine has just died; its EOF tells the board
            stdin.write(frame)

    def _take(self, chunk: bytes) -> None:
        """Parse frames of the engine."""
        try:
            self._last_sign_s = asyncio.get_running_loop().time()
            for kind, payload in self._reader.feed(chunk):
                self._dispatch(kind, payload)
        except Exception:
            # A corrupt stream, or a bug in a token's receiver. The rest of the stream cannot be
            # parsed.
            log.exception("board %s: the engine's frames cannot be read", self._board_id)
            self._child.kill()
            self._child.stdout.close()

    async def _follow(self) -> None:
        """Wait for the engine's end, and fail all waiting calls."""
        try:
            await self._pipe.over
            self._fail_waiting(await self._describe_end())
        except asyncio.CancelledError:  # the loop ends, and the engine with its pipes
            self._child.close()
            raise

    def _dispatch(self, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.TOKEN:
            run_id, entry, token_id, text, waiting = engine_frames.unpack_token(payload)
            if run_id in self._runs:
                self._runs[run_id][0](entry, token_id, text, waiting)
        elif kind is FrameKind.VECTOR:
            self._note_vector(*engine_frames.unpack_vector(payload))
        elif kind is FrameKind.SCORES:
            run_id, prompt, found = engine_frames.unpack_scores(payload)
            on_scores = self._runs[run_id][1] if run_id in self._runs else None
            if on_scores is not None:
                on_scores(prompt, found)
        elif kind is FrameKind.ENDED:
            self._end(engine_frames.unpack(payload))
        elif kind is FrameKind.RESULT:
            self._answer(engine_frames.unpack(payload))
        elif kind is FrameKind.LOADED and not self._loaded.done():
            self._loaded.set_result(EngineFacts(**engine_frames.unpack(payload)))
        elif kind is FrameKind.LOAD_FAILED:
            loop = asyncio.get_running_loop()
            loop.call_later(WORDS_LAG_S, self._refuse, engine_frames.unpack(payload))

    def _note_vector(self, run_id: int, tokens: int, vector: bytes) -> None:
        """Keep the vector until the end of its run."""
        if run_id in self._runs:
            self._vectors[run_id] = (tokens, vector)

    def _end(self, facts: dict[str, Any]) -> None:
        end = None if facts["end"] == "unstarted" else RunEnd(facts["end"])
        tokens, vector = self._vectors.pop(facts["run_id"], (0, b""))
        ended = RunEnded(
            end=end,
            perf=Perf(**facts.get("perf", {})),
            return_code=facts.get("return_code", 0),
            kv_positions=tuple(facts.get("kv_positions", ())),
            error=facts.get("error"),
            cache_refused=facts.get("cache_refused"),
            refused=facts.get("refused", False),
            cut=facts.get("cut", False),
            aborted=facts.get("aborted", False),
            vector=vector,
            tokens=tokens,
            encoded=facts.get("encoded", 0),
        )
        if end is RunEnd.FAILED or ended.cache_refused is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(WORDS_LAG_S, self._settle, facts["run_id"], ended)
        else:
            self._settle(facts["run_id"], ended)

    def _settle(self, run_id: int, ended: RunEnded) -> None:
        _, _, future = self._runs.pop(run_id, (None, None, None))
        self._entries.pop(run_id, None)
        if future is None or future.done():
            return
        if ended.end is RunEnd.FAILED:
            ended = replace(ended, error=self._explained(ended.error))
            self._stderr.clear()  # reported now; it must not explain later failures
        elif ended.cache_refused is not None:
            ended = replace(ended, cache_refused=self._explained(ended.cache_refused))
        future.set_result(ended)

    def _answer(self, result: dict[str, Any]) -> None:
        if "error" in result:
            loop = asyncio.get_running_loop()
            loop.call_later(WORDS_LAG_S, self._fail_call, result["call_id"], result["error"])
            return
        future = self._calls.pop(result["call_id"], None)
        if future is not None and not future.done():
            value = result["value"]
            future.set_result(tuple(value) if isinstance(value, list) else value)

    def _fail_call(self, call_id: int, error: dict[str, Any]) -> None:
        future = self._calls.pop(call_id, None)
        if future is not None and not future.done():
            future.set_exception(self._native_error(error["kind"], error["args"]))
        self._stderr.clear()  # reported now, as above

    def _native_error(self, kind: str, args: list[Any]) -> NativeError:
        if kind == CallFailed.__name__:
            function, code, *_ = args
            return CallFailed(function, code, self._logged(""))
        return REFUSALS.get(kind, NativeError)(self._explained(args[0]))

    def _refuse(self, facts: dict[str, Any]) -> None:
        if not self._loaded.done():
            refusal = REFUSALS.get(facts["kind"], LoadFailed)
            self._loaded.set_exception(refusal(self._explained(facts["message"])))

    def _explained(self, message: str | None) -> str | None:
        """Return ``message`` with the library's error lines, which its return codes never explain.

        Several lines, because the last one is often only "rkllm_init failed".
        """
        logged = self._logged(message or "")
        if not logged:
            return message
        return f"{message} (the library logged: {logged})" if message else logged

    def _logged(self, known: str) -> str:
        lines = [line for line in self._stderr if line.startswith("E ")][-ERROR_LINES:]
        return "; ".join(line for line in lines if line not in known)

    async def _read_log(self) -> None:
        while True:
            try:
                line = await self._log.readline()
            except ValueError:  # longer than the stream's limit; the rest follows
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()[:MAX_LINE]
            self._stderr.append(text)
            extra = {ENGINE: self.pid}
            log.info("board %s engine %d: %s", self._board_id, self.pid, text, extra=extra)

    async def _describe_end(self) -> str:
        """Return how the process ended: the signal or code, and the library's last error lines."""
        code = await self._child.wait()
        await asyncio.wait({self._tasks[1]}, timeout=1.0)  # the log's end may still be in the pipe
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if -code in _MEANINGS:
            how = f"{how}, {_MEANINGS[signal.Signals(-code)]}"
        words = max(reversed(self._stderr), key=_weight, default="")
        words = words if _weight(words) else ""
        return f"the engine process ended ({how}{': ' + words if words else ''})"

    def _fail_waiting(self, reason: str) -> None:
        self.died.set_result(reason)
        self._child.close()
        waiting = [*(future for _, _, future in self._runs.values()), *self._calls.values()]
        self._runs, self._calls = {}, {}
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDied(self._board_id, reason))


class EngineStarts:
    """The starts of one board's engines, with the confinement that works there."""

    def __init__(self, board_id: str) -> None:
        self._board_id = board_id
        self._works: bool | None = None  # confinement; None before an engine was loaded

    async def start(self, spec: EngineSpec, *, trusted: bool) -> EngineProcess:
        """Start an engine; see ``EngineProcess.start``.

        With ``Confine.AUTO`` it is started without confinement where the library refuses a
        ``trusted`` model in a confined process, until one has loaded: later a refusal is due to the
        file. One that crashed or took too long is never repeated unconfined.
        """
        if spec.confine is not Confine.AUTO:
            return await EngineProcess.start(self._board_id, spec)
        if self._works is not False:
            try:
                engine = await EngineProcess.start(self._board_id, spec)
            except (LoadFailed, LibraryMissing) as exc:
                if self._works or not trusted or exc.__cause__ is not None:
                    raise
                log.warning("board %s: %s; it is tried without confinement", self._board_id, exc)
            else:
                self._works = True
                return engine
        engine = await EngineProcess.start(self._board_id, replace(spec, confine=Confine.OFF))
        self._works = False
        engine.facts = replace(engine.facts, confined=f"off: {NOT_CONFINED}")
        log.warning("board %s: its engine is not confined: %s", self._board_id, NOT_CONFINED)
        return engine


_MEANINGS = {
    signal.SIGILL: "an instruction that this CPU lacks: this build of the library is not for this "
    "CPU; install one that is",
    signal.SIGBUS: "memory that cannot be read: a mapped file, the model or the library, is cut "
    "short or damaged on the disk, or the driver does not fit the library; compare checksums, see "
    "dmesg, and try another release or driver",
}


def _confinement(spec: EngineSpec) -> str:
    """Return the files that an engine may use, for its command line."""
    vision = () if spec.vision is None else (spec.vision.library, spec.vision.model)
    model = Path(spec.params.model_path)
    files = [Path(one) for one in (spec.library, *vision)]
    # A link in the model's folder may lead elsewhere, and the kernel looks at its end. A GGUF file
    # may lie among a person's own.
    files += [] if spec.cpu else [model]
    folders = {str(one.parent) for file in files for one in (file, file.resolve())}
    folders |= {str(model), str(model.resolve())}
    environ = _environ(spec)
    # Of the libraries that the vendor's depends on. An empty entry is the working folder.
    searched = environ.get("LD_LIBRARY_PATH", "").split(":")
    folders |= {one for one in searched if one and Path(one).is_dir()}
    control = environ.get(SIM_CONTROL)
    return json.dumps(
        {
            "mode": spec.confine.value,
            "read": sorted({*folders, *spec.reads}),
            "lock": spec.fence,
            "write": [*spec.writes, *([str(Path(control).parent)] if control else [])],
            "programs": spec.allow_unlisted,
        }
    )


def _environ(spec: EngineSpec) -> dict[str, str]:
    return {**clean_environ(spec.inherit), **spec.environ}


def _weight(line: str) -> int:
    """Return the weight of a log line for explaining the engine's end; the last of the heaviest
    wins.

    ``faulthandler`` writes after the library, and names only the signal.
    """
    if "GGML_ASSERT" in line or line.startswith("E "):
        return 2
    return 1 if line.startswith("Fatal Python error") else 0


def _vision(spec: EngineSpec) -> dict[str, Any] | None:
    if spec.vision is None:
        return None
    return {
        **asdict(spec.vision),
        "library": str(spec.vision.library),
        "model": str(spec.vision.model),
    }
