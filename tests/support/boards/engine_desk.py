"""An engine on a scripted runtime, without a process: what is said to it and what it sends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rkserve.core.errors import NativeError
from rkserve.native import engine_frames
from rkserve.native.engine.process import EngineServer
from rkserve.native.engine_frames import FrameKind, FrameReader
from rkserve.native.runtime import (
    Perf,
    RunEnd,
    RunOutcome,
    RunParams,
    Runtime,
    Sink,
    SinkAction,
    Step,
)


class Scripted:
    """A runtime that notes every call. A run hands out ``steps``, with ``between`` before them."""

    release, per_run_sampling = "1.3.0", True
    quirks: Mapping[str, bool] = {"q": True}

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.errors: dict[str, NativeError] = {}
        self.values: dict[str, Any] = {"kv_cache_sizes": (7,)}
        self.during: dict[str, Callable[[], None]] = {}
        self.steps: list[Step] = []
        self.between: dict[int, Callable[[], None]] = {}
        self.verdicts: list[SinkAction] = []
        self.heard_abort = threading.Event()
        self.deaf_until = 0  # no abort is noticed before this step

    @property
    def entries(self) -> tuple[Scripted, ...]:
        return (self,)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, (*args, kwargs) if kwargs else args))
            self.during.get(name, lambda: None)()
            if name in self.errors:
                raise self.errors[name]
            return self.values.get(name)

        return call

    def clear_kv_range(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.__getattr__("clear_kv_range")(ranges)
        sizes = zip(self.values["kv_cache_sizes"], ranges, strict=False)
        self.values["kv_cache_sizes"] = tuple(size - (end - start) for size, (start, end) in sizes)

    def abort(self) -> None:
        self.calls.append(("abort", ()))
        self.heard_abort.set()

    def run(self, params: RunParams, sink: Sink) -> RunOutcome:
        self.calls.append(("run", params))
        if "run" in self.errors:
            raise self.errors["run"]
        for at, step in enumerate(self.steps):
            self.between.get(at, lambda: None)()
            if self.heard_abort.is_set() and at >= self.deaf_until:
                break
            self.verdicts.append(sink(step))
            waiting = any(piece is not None and piece.waiting for piece in step)
            if self.verdicts[-1] is SinkAction.PAUSE and not waiting:
                return RunOutcome(RunEnd.PAUSED, Perf(), 0)
        return RunOutcome(RunEnd.FINISHED, Perf(1.0, 2, 3.0, 4, 5.0), 0)

    def made(self, *names: str) -> list[tuple[str, Any]]:
        return [call for call in self.calls if call[0] in names]


class Desk:
    """An engine, its runtime, and the frames that it sent, one list per ``put``."""

    def __init__(self, place: Path) -> None:
        self.runtime = Scripted()
        self.puts: list[list[tuple[FrameKind, bytes]]] = []
        self.engine = EngineServer(self, lambda *_: cast(Runtime, self.runtime))
        self.place = place

    def put(self, frame: bytes) -> None:
        self.puts.append(list(FrameReader().feed(frame)))

    def close(self) -> None:
        raise AssertionError("nobody stopped the engine")

    @property
    def last(self) -> tuple[FrameKind, dict[str, Any]]:
        kind, payload = self.puts[-1][-1]
        return kind, engine_frames.unpack(payload)

    def tokens(self) -> list[list[tuple[int, int, int, bytes, bool]]]:
        return [
            [engine_frames.unpack_token(payload) for _, payload in put]
            for put in self.puts
            if all(kind is FrameKind.TOKEN for kind, _ in put)
        ]

    def load(self, n_batch: int = 1, *, use_cross_attn: bool = False) -> None:
        params = {
            "model_path": "m",
            "max_context_len": 64,
            "max_new_tokens": 64,
            "sampling": {},
            "cpus": [4, 5],
            "n_batch": n_batch,
            "use_cross_attn": use_cross_attn,
            "image_tags": ["a", "b", "c"],
        }
        command = {
            "library": "lib.so",
            "cpu": False,
            "params": params,
            "fence": str(self.place / "fence"),
            "fence_timeout_s": 0.0,
            "text_mode": False,
            "vision": None,
            "quirks": {},
            "pin_cpus": [],
        }
        self.do(FrameKind.LOAD, command)

    def do(self, kind: FrameKind, value: dict[str, Any]) -> None:
        """Let the runner do what such a frame asks for."""
        [(kind, payload)] = FrameReader().feed(engine_frames.pack(kind, value))
        self.engine.carry_out(kind, payload)

    def say(self, kind: FrameKind, run_id: int) -> None:
        """Say what interrupts a run, as the reading thread does."""
        self.engine.command(kind, engine_frames.pack(kind, {"run_id": run_id})[5:])

    def run(self, run_id: int = 1, *entries: tuple[int, ...], **changes: Any) -> dict[str, Any]:
        """Make a run and return how it ended."""
        frame = self.run_frame(run_id, *(entries or ((5, 6),)), **changes)
        [(kind, payload)] = FrameReader().feed(frame)
        self.engine.carry_out(kind, payload)
        kind, ended = self.last
        assert (kind, ended["run_id"]) == (FrameKind.ENDED, run_id)
        return ended

    def run_frame(self, run_id: int, *entries: tuple[int, ...], **changes: Any) -> bytes:
        plain: dict[str, Any] = {
            "texts": [None] * len(entries),
            "keep_history": False,
            "clear": False,
            "resume": False,
            "cut": [],
            "sampling": None,
            "max_new_tokens": None,
            "adapter": None,
            "load_cache": None,
            "release_cache": False,
            "save_cache": None,
            "steps": None,
            "pooling": None,
        }
        return engine_frames.pack_run(run_id, plain | changes, entries)
