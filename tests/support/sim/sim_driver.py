"""Drives the simulated runtime through cffi, with nothing of rkserve's binding in between.

It knows the vendor's structs and keeps what a run says. It refuses to judge: tests do. Children
that are meant to die import it too, which is why it holds no fixtures: those are in sim_fixtures.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cffi
from tokenizers import Tokenizer

from rkserve.native.binding.releases import RELEASES
from rkserve.native.sim import build
from tests.support.paths import PROJECT

if TYPE_CHECKING:  # children start in a third of the time without it
    import pytest

MODEL = PROJECT / "models" / "sim-chat"
NORMAL, WAITING, FINISH, ERROR = range(4)
PROMPT, TOKEN, EMBED, MULTIMODAL = range(4)
FAST = {"RKSIM_TIME_SCALE": "0", "RKSIM_LOAD_MS": "0", "RKSIM_MEMORY_MB": "1"}


@dataclass(frozen=True)
class Said:
    """What one callback says of one entry of a batch."""

    token_id: int
    text: bytes | None


@dataclass(frozen=True)
class Event:
    """One callback: what the result held, and the size of the KV cache at that moment.

    Of a batch it speaks of the first entry; ``said`` and ``kvs`` hold all of them. The final states
    have one result, whatever the batch.
    """

    state: int
    token_id: int
    text: bytes | None
    perf: tuple[float, int, float, int, float]
    kv: int
    said: tuple[Said, ...] = ()
    kvs: tuple[int, ...] = ()


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

    def ids_of(self, entry: int) -> list[int]:
        """The tokens of one entry of a batch, up to its end."""
        ids = [event.said[entry].token_id for event in self.tokens]
        return [token for token in ids if token >= 0]

    def reply_of(self, entry: int) -> str:
        return b"".join(event.said[entry].text or b"" for event in self.tokens).decode()

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
    name = f"{RELEASES[release].declarations}.h"
    ffi = cffi.FFI()
    ffi.cdef((PROJECT / "rkserve" / "native" / "decl" / name).read_text())
    return ffi, ffi.dlopen(str(build.ensure_built(release)))


class Sim:
    """One handle. Keyword arguments are fields of RKLLMParam; extend_ ones of its extend_param."""

    def __init__(self, release: str, **param: Any) -> None:
        self.release = release
        self.ffi, self.lib = opened(release)
        self.n_batch = max(1, param.get("extend_n_batch", 1))
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
        if "RKLLMCallback" in ffi.list_types()[0]:
            callbacks = ffi.new("RKLLMCallback *", self.callbacks())
            return self.lib.rkllm_init(handle, self.param, callbacks), handle[0]
        return self.lib.rkllm_init(handle, self.param, self._callback), handle[0]

    def callbacks(self) -> dict[str, Any]:
        """The fields of RKLLMCallback, which 1.3.0 introduced."""
        return {"result_callback": self._callback}

    def _on_result(self, result: Any, _userdata: Any, state: int) -> int:
        perf = result.perf
        self.last = result
        said = tuple(
            Said(each.token_id, bytes(self.ffi.string(each.text)) if each.text else None)
            for each in result[0 : self.n_batch if state == NORMAL else 1]
        )
        kvs = self.kvs
        event = Event(
            state,
            said[0].token_id,
            said[0].text,
            (
                perf.prefill_time_ms,
                perf.prefill_tokens,
                perf.generate_time_ms,
                perf.generate_tokens,
                perf.memory_usage_mb,
            ),
            kvs[0],
            said,
            kvs,
        )
        self.now.events.append(event)
        return self.answer(event, result) if self.answer else 0

    @property
    def kvs(self) -> tuple[int, ...]:
        sizes = self.ffi.new("int[]", [-1] * self.n_batch)
        assert self.lib.rkllm_get_kv_cache_size(self.handle, sizes) == 0
        return tuple(int(size) for size in sizes)

    @property
    def kv(self) -> int:
        return self.kvs[0]

    def fill(self, run_input: Any, given: str | list[int]) -> None:
        """Put text or token ids into an RKLLMInput, and keep them alive on self."""
        if isinstance(given, str):
            kept = self.ffi.new("char[]", given.encode())
            run_input.input_type, run_input.prompt_input = PROMPT, kept
        else:
            kept = self.ffi.new("int32_t[]", given)
            run_input.input_type = TOKEN
            run_input.token_input.input_ids = kept
            run_input.token_input.n_tokens = len(given)
        self._given.append(kept)

    def prepare_batch(
        self,
        given: Sequence[str | list[int]],
        *,
        role: bytes = b"user",
        thinking: bool = False,
        **infer: Any,
    ) -> tuple[Any, Any]:
        """RKLLMInputs and RKLLMInferParam, with everything they point to kept alive on self."""
        ffi = self.ffi
        self._role = ffi.new("char[]", role)
        self._given: list[Any] = []
        inputs = ffi.new("RKLLMInput[]", len(given))
        for at, each in enumerate(given):
            inputs[at].role, inputs[at].enable_thinking = self._role, thinking
            self.fill(inputs[at], each)
        if "sampling_params" in infer:
            self._sampling = ffi.new("RKLLMSamplingParam *", infer["sampling_params"])
            infer["sampling_params"] = self._sampling
        return inputs, ffi.new("RKLLMInferParam *", infer)

    def prepare(self, given: str | list[int], **how: Any) -> tuple[Any, Any]:
        """The same for one input."""
        self._inputs, params = self.prepare_batch([given], **how)
        return self._inputs + 0, params

    def run_batch(
        self, given: Sequence[str | list[int]], answer: Answer | None = None, **how: Any
    ) -> Run:
        """One rkllm_run of exactly these inputs; ``how``: role, thinking, RKLLMInferParam."""
        inputs, params = self.prepare_batch(given, **how)
        self.now, self.answer = Run(), answer
        self.now.code = self.lib.rkllm_run(self.handle, inputs, params, self.ffi.NULL)
        return self.now

    def run(self, given: str | list[int], answer: Answer | None = None, **how: Any) -> Run:
        return self.run_batch([given], answer, **how)

    def clear(self, *, keep_system: bool = False, span: tuple[int, int] | None = None) -> int:
        return self.clear_batch([span] if span else None, keep_system=keep_system)

    def clear_batch(
        self, spans: Sequence[tuple[int, int]] | None, *, keep_system: bool = False
    ) -> int:
        start = end = self.ffi.NULL
        if spans:
            start, end = (self.ffi.new("int[]", list(at)) for at in zip(*spans, strict=True))
        return int(self.lib.rkllm_clear_kv_cache(self.handle, int(keep_system), start, end))

    def destroy(self) -> int:
        return int(self.lib.rkllm_destroy(self.handle))


def start_child(body: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Run `body`, which finds this module's names, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", f"from tests.support.sim.sim_driver import *\n{body}\n"],
        env={**os.environ, **FAST, "PYTHONPATH": str(PROJECT), **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def child(body: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run `body` in a process of its own to its end: return code and output."""
    running = start_child(body, env)
    try:
        printed, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    return running.returncode, printed


@functools.cache
def probe(source: str, release: str, sanitize: str | None = None) -> Path:
    """A C program of this folder, linked to the simulated runtime and instrumented as it is."""
    library = build.ensure_built(release, sanitize=sanitize)
    program = library.with_name(f"{source}-{library.stem}")
    command = [
        *build.compiler(),
        *("-std=gnu11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"),
        *([f"-fsanitize={sanitize}"] if sanitize else []),
        f"-DRKSIM_RELEASE={build.RELEASES[release]}",
        f"-I{build.DECLARATIONS}",
        *(
            str(PROJECT / "tests" / "support" / "c" / f"{source}.c"),
            str(library),
            f"-Wl,-rpath,{library.parent}",
        ),
    ]
    # A rename, as the library's: two test runs at once must not write into each other's program.
    with tempfile.TemporaryDirectory(prefix=".building-", dir=library.parent) as scratch:
        fresh = Path(scratch) / program.name
        subprocess.run([*command, "-o", str(fresh)], check=True)
        fresh.replace(program)
    return program


def run_probe(program: Path, *arguments: str, time_scale: str = "0") -> tuple[int, str, str]:
    """Its return code, and what it printed on stdout and on stderr."""
    done = subprocess.run(
        [program, MODEL / "model.rkllm", *arguments],
        env={**os.environ, **FAST, "RKSIM_TIME_SCALE": time_scale},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def wait_idle(sim: Sim) -> None:
    wait_for(lambda: not sim.lib.rkllm_is_running(sim.handle))


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


class Gate:
    """The gate of the boards of a test, in their control file."""

    def __init__(self, control: Path) -> None:
        self.control, self.opened_s = control, 0.0
        self.sign = control.with_name(f"{control.name}.gate")

    def _say(self, *lines: str) -> None:
        fresh = self.control.with_name("fresh")
        fresh.write_text("\n".join(lines))
        fresh.replace(self.control)

    def shut(self, where: str) -> None:
        self._say(f"gate={where}", "time_scale=0")

    def open(self, time_scale: float = 0) -> None:
        self.opened_s = time.monotonic()
        self._say(f"time_scale={time_scale:g}")

    def wait(self) -> None:
        """Wait until a run stands there; it stays."""
        self.sign.unlink(missing_ok=True)
        wait_for(self.sign.exists)

    def thread(self, do: Callable[[], Any], time_scale: float = 0) -> threading.Thread:
        """Do it once a run stands at the gate, and then open that."""

        def work() -> None:
            self.wait()
            do()
            self.open(time_scale)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


def violations(capfd: pytest.CaptureFixture[str]) -> list[str]:
    lines = capfd.readouterr().err.splitlines()
    return [line.rpartition(": ")[2] for line in lines if "rkllm-sim: violation:" in line]
