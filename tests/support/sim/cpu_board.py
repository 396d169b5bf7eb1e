"""A board on llama.cpp with the trained model, in the place of a simulated one.

Suites that interrupt simulated boards at chosen tokens run on it unchanged: a library in front of
llama.cpp (tests/support/c/gated_llama.c) obeys gates and paces as the simulated runtime does.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from tokenizers import Tokenizer

from rkserve.board.engine.protocol import EngineSpec
from rkserve.core.messages import Kv
from rkserve.models.folder import ModelFolder, open_model_folder
from rkserve.native.library_file import llama_cpp_library
from tests.support.paths import PROJECT, TESTS
from tests.support.sim.releases import BOTH
from tests.support.sim.sim_board import Sim, chat_text
from tests.support.values.tiny_gguf import write_lora

Test = TypeVar("Test", bound=Callable[..., object])

TINY = open_model_folder(PROJECT / "models" / "tiny-docs")
TINY_TOKENIZER = Tokenizer.from_file(str(TINY.path / "tokenizer.json"))
WEIGHTS = TINY.require_weights(cpu=True)
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"  # of its chat template
# An adapter of random weights with which questions have other answers, whose likeliest tokens still
# lead by 0.6 or more: most seeds bring a tie about.
ADAPTER: Mapping[str, Any] = {"size": 128, "layers": 4, "scale": 0.14, "seed": 8}


def every_kind(test: Test) -> Test:
    """Run a file's tests on a CPU, and in turn on both releases of the simulated runtime."""
    kinds = [(Sim, release) for release in BOTH] + [(Cpu, "llama.cpp")]
    names = [*BOTH, "cpu"]
    turns: Callable[[Test], Test] = pytest.mark.turns("release")
    return turns(pytest.mark.parametrize(("kind", "release"), kinds, ids=names)(test))


@functools.cache
def gated_library() -> Path:
    """Return the library with gates, compiled for the wheel that is installed."""
    wheel, source = llama_cpp_library(), TESTS / "support" / "c" / "gated_llama.c"
    of = hashlib.sha256(source.read_bytes() + bytes(wheel)).hexdigest()[:16]
    made = source.parent / "build" / f"gated_llama-{of}.so"
    if made.exists():
        return made
    made.parent.mkdir(exist_ok=True)
    part = made.with_name(f"{made.name}.{os.getpid()}")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(part)]
    links = ["-Wl,--no-as-needed", str(wheel), "-ldl"]
    subprocess.run([*command, f'-DWHEEL="{wheel}"', str(source), *links], check=True)
    return part.replace(made)


@dataclass
class Cpu(Sim):
    """A board that computes on one core; ``release`` is of no meaning."""

    FOLDER: ClassVar[ModelFolder] = TINY
    QUESTIONS: ClassVar[Mapping[str, str]] = {
        "plain": "Count to 40",
        "multi-byte": "Greet me in many languages",
    }
    STOPPED: ClassVar[Kv] = Kv.KEPT
    PAUSES_AT_LIMIT: ClassVar[bool] = False

    release: str = "llama.cpp"
    model: Path = WEIGHTS

    def library(self) -> Path:
        """See ``Sim.library``."""
        return gated_library()

    def spec(self, n_batch: int = 1) -> EngineSpec:
        """See ``Sim.spec``."""
        spec = super().spec(n_batch)
        core = min(os.sched_getaffinity(0))
        return replace(spec, params=replace(spec.params, cpus=(core,)), cpu=True)

    def _write_adapter(self, path: Path, title: str, seed: int) -> None:
        assert seed == 1, "other adapters have to be looked for"
        write_lora(path, **ADAPTER)

    @classmethod
    def chat(cls, *turns: str) -> tuple[int, ...]:
        """See ``Sim.chat``."""
        return tuple(TINY_TOKENIZER.encode(SYSTEM + chat_text(*turns)).ids)
