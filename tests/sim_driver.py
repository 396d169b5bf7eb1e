"""Drives the simulated runtime through cffi, with nothing of rkserve's binding in between.

It knows the vendor's structs and keeps what a run says. It refuses to judge: tests do. Children
that are meant to die import it too, which is why it holds no fixtures: those are in sim_fixtures.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cffi
from tokenizers import Tokenizer

from rkserve.native.sim import build

if TYPE_CHECKING:  # children start in a third of the time without it
    import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))  # make_sim_chat is a script, and tests look into it
MODEL = ROOT / "models" / "sim-chat"
NORMAL, WAITING, FINISH, ERROR = range(4)
PROMPT, TOKEN, EMBED, MULTIMODAL = range(4)
FAST = {"RKSIM_TIME_SCALE": "0", "RKSIM_LOAD_MS": "0", "RKSIM_MEMORY_MB": "1"}


@dataclass(frozen=True)
class Event:
    """One callback: what the result held, and the size of the KV cache at that moment."""

    state: int
    token_id: int
    text: bytes | None
    perf: tuple[float, int, float, int, float]
    kv: int


@dataclass
class Run:
    """One rkllm_run: its return code and its callbacks."""

    code: int = -99
    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[Event]:
        return [event for event in self.events if event.state in {NORMAL, WAITING}]

    @property
    def ids(self) -> list[int]:
        return [event.token_id for event in self.tokens]

    @property
    def reply(self) -> str:
        return b"".join(event.text or b"" for event in self.tokens).decode()

    @property
    def finish(self) -> Event:
        (event,) = (event for event in self.events if event.state == FINISH)
        return event


Answer = Callable[[Event, Any], int]


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def chat(*turns: str, system: str = "You are a helpful assistant.") -> list[int]:
    """Token ids of a conversation: user, assistant, user, ... and the header of the answer."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n"
    for at, turn in enumerate(turns):
        text += f"<|im_start|>{('user', 'assistant')[at % 2]}\n{turn}<|im_end|>\n"
    return ids_of(text + "<|im_start|>assistant\n")


@functools.cache
def opened(release: str) -> tuple[Any, Any]:
    name = "rkllm_1_3.h" if release == "1.3.0" else "rkllm_1_2.h"
    ffi = cffi.FFI()
    ffi.cdef((ROOT / "rkserve" / "native" / "decl" / name).read_text())
    return ffi, ffi.dlopen(str(build.ensure_built(release)))


class Sim:
    """One handle. Keyword arguments are fields of RKLLMParam; extend_ ones of its extend_param."""

    def __init__(self, release: str, **param: Any) -> None:
        self.release = release
        self.ffi, self.lib = opened(release)
        self.now = Run()
        self.answer: Answer | None = None
        self.last: Any = None
        self._callback = self.ffi.callback("LLMResultCallback", self._on_result, error=0)
        self.code, self.handle = self._init(param)

    def _init(self, param: dict[str, Any]) -> tuple[int, Any]:
        ffi = self.ffi
        self.param = ffi.new("RKLLMParam *", self.lib.rkllm_createDefaultParam())
        self._model = ffi.new("char[]", os.fsencode(param.pop("model", MODEL / "model.rkllm")))
        self.param.model_path = self._model
        defaults = {"max_context_len": 4096, "max_new_tokens": -1, "top_k": 1}
        for name, value in {**defaults, **param}.items():
            if name.startswith("extend_"):
                setattr(self.param.extend_param, name.removeprefix("extend_"), value)
            else:
                setattr(self.param, name, ffi.NULL if value is None else value)
        handle = ffi.new("LLMHandle *")
        if self.release == "1.3.0":
            callbacks = ffi.new("RKLLMCallback *", {"result_callback": self._callback})
            return self.lib.rkllm_init(handle, self.param, callbacks), handle[0]
        return self.lib.rkllm_init(handle, self.param, self._callback), handle[0]

    def _on_result(self, result: Any, _userdata: Any, state: int) -> int:
        perf = result.perf
        self.last = result
        event = Event(
            state,
            result.token_id,
            bytes(self.ffi.string(result.text)) if result.text else None,
            (
                perf.prefill_time_ms,
                perf.prefill_tokens,
                perf.generate_time_ms,
                perf.generate_tokens,
                perf.memory_usage_mb,
            ),
            self.kv,
        )
        self.now.events.append(event)
        return self.answer(event, result) if self.answer else 0

    @property
    def kv(self) -> int:
        size = self.ffi.new("int[1]", [-1])
        assert self.lib.rkllm_get_kv_cache_size(self.handle, size) == 0
        return int(size[0])

    def prepare(
        self, given: str | list[int], *, role: bytes = b"user", thinking: bool = False, **infer: Any
    ) -> tuple[Any, Any]:
        """RKLLMInput and RKLLMInferParam, with everything they point to kept alive on self."""
        ffi = self.ffi
        self._role = ffi.new("char[]", role)
        run_input = ffi.new("RKLLMInput *", {"role": self._role, "enable_thinking": thinking})
        if isinstance(given, str):
            self._given = ffi.new("char[]", given.encode())
            run_input.input_type, run_input.prompt_input = PROMPT, self._given
        else:
            self._given = ffi.new("int32_t[]", given)
            run_input.input_type = TOKEN
            run_input.token_input.input_ids = self._given
            run_input.token_input.n_tokens = len(given)
        if "sampling_params" in infer:
            self._sampling = ffi.new("RKLLMSamplingParam *", infer["sampling_params"])
            infer["sampling_params"] = self._sampling
        return run_input, ffi.new("RKLLMInferParam *", infer)

    def run(
        self,
        given: str | list[int],
        answer: Answer | None = None,
        *,
        role: bytes = b"user",
        thinking: bool = False,
        **infer: Any,
    ) -> Run:
        run_input, params = self.prepare(given, role=role, thinking=thinking, **infer)
        self.now, self.answer = Run(), answer
        self.now.code = self.lib.rkllm_run(self.handle, run_input, params, self.ffi.NULL)
        return self.now

    def clear(self, *, keep_system: bool = False, span: tuple[int, int] | None = None) -> int:
        start, end = (self.ffi.new("int[1]", [at]) for at in span) if span else (self.ffi.NULL,) * 2
        return int(self.lib.rkllm_clear_kv_cache(self.handle, int(keep_system), start, end))

    def destroy(self) -> int:
        return int(self.lib.rkllm_destroy(self.handle))


def start_child(body: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Run `body`, which finds this module's names, in a process of its own."""
    paths = [str(ROOT), str(ROOT / "tests")]
    return subprocess.Popen(
        [sys.executable, "-c", f"from sim_driver import *\n{body}\n"],
        env={**os.environ, **FAST, "PYTHONPATH": os.pathsep.join(paths), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def child(body: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run `body` in a process of its own to its end: return code and output."""
    running = start_child(body, env)
    try:
        printed, _ = running.communicate(timeout=30)
    finally:
        running.kill()
    return running.returncode, printed


class Aborted:
    """Abort from another thread after so many tokens, and keep what came after."""

    def __init__(self, sim: Sim, after: int) -> None:
        self.sim, self.after, self.seen = sim, after, 0

    def __call__(self, event: Event, _result: Any) -> int:
        self.seen += event.state == NORMAL
        if self.seen == self.after and event.state == NORMAL:
            thread = threading.Thread(
                target=self.sim.lib.rkllm_abort, args=(self.sim.handle,), daemon=True
            )
            thread.start()
            thread.join()
        return 0


def violations(capfd: pytest.CaptureFixture[str]) -> list[str]:
    lines = capfd.readouterr().err.splitlines()
    return [line.rpartition(": ")[2] for line in lines if "rkllm-sim: violation:" in line]
