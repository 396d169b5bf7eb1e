"""What the board asks of an engine, and what it hears: the ``Engine`` protocol and its values.

It knows no processes, pipes or frames: ``process`` does the talking, and tests have a fake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rkserve.core.errors import EngineDied
from rkserve.core.run_params import Embeds, EncoderStates, Picture, Pooling, Scored
from rkserve.native.runtime import LoadParams, Perf, RunEnd, VisionParams
from rkserve.native.step_params import StepParams

# What a run gives for every token: entry of the batch, token id, text, and whether the library
# still holds text back (``waiting``). See ``TokenPiece``.
OnToken = Callable[[int, int, bytes, bool], None]
# What a run of single steps gives before a token, or of its prompt (True): logprobs.
OnScores = Callable[[bool, tuple[Scored, ...]], None]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine process is started with.

    ``fence`` is the lock file that keeps two engines off one NPU. ``environ`` is added to the
    process's environment. ``pin_cpus`` are the cores it may run on; empty leaves all. The callables
    of ``params`` (``tokenize``, ``embed``) do not cross the pipe and must be None.
    """

    library: str
    params: LoadParams
    fence: str
    text_mode: bool = False
    vision: VisionParams | None = None
    quirks: Mapping[str, bool] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    pin_cpus: tuple[int, ...] = ()
    fence_timeout_s: float = 15.0
    load_timeout_s: float = 120.0
    beat_s: float = 1.0


def with_weights(spec: EngineSpec, weights: Path | None) -> EngineSpec:
    """Return what an engine with another model file is started with; None changes nothing."""
    if weights is None:
        return spec
    return replace(spec, params=replace(spec.params, model_path=str(weights)))


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a loaded engine says of its runtime. Every run takes exactly ``n_batch`` entries."""

    release: str
    per_run_sampling: bool
    quirks: Mapping[str, bool]
    load_s: float
    n_batch: int = 1


@dataclass(frozen=True, slots=True)
class EntryCommand:
    """One entry of a batch: token ids, or in text mode the rendered prompt and no ids.

    Such a prompt may have ``images``, or be ``embeds`` and no text; then it is the only entry. So
    is one with the states of an ``encoder``, whose ids, if it has any, go before its text.
    """

    ids: tuple[int, ...] = ()
    prompt_text: str | None = None
    images: tuple[Picture, ...] = ()
    embeds: Embeds | None = None
    encoder: EncoderStates | None = None


@dataclass(frozen=True, slots=True)
class RunCommand:
    """One run as the engine is asked for it; see ``RunParams`` for the common meanings.

    Before the run, in this order: ``clear`` empties the whole KV cache of an idle handle; ``cut``
    clears half-open ranges of the paused entry 0, one call each, with positions as they are at that
    moment; ``release_cache`` forgets the prompt cache, and ``load_cache`` loads another, which
    stays for later runs. If one of the first two fails, there is no run. A cache is a convenience:
    one that cannot be loaded or released leaves its reason in ``RunEnded.cache_refused``.

    ``resume`` goes on with the paused run, under a new ``run_id``. With ``steps`` the engine makes
    the run of single steps; ``sampling`` and ``max_new_tokens`` are the library's, and not used.
    With ``pooling`` nothing is generated: the hidden states of the one entry become the ``vector``
    of ``RunEnded``.
    """

    run_id: int
    entries: tuple[EntryCommand, ...]
    keep_history: bool = False
    clear: bool = False
    resume: bool = False
    cut: tuple[tuple[int, int], ...] = ()
    sampling: Mapping[str, float] | None = None
    max_new_tokens: int | None = None
    adapter: str | None = None
    load_cache: str | None = None
    release_cache: bool = False
    save_cache: str | None = None
    steps: StepParams | None = None
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class RunEnded:
    """How a run ended.

    ``end`` is None for a run that was aborted before it began. ``kv_positions`` is what the runtime
    says each entry's KV cache holds now, and empty where it would not say. ``perf`` is zeros for a
    run that was paused. Of a run of single steps, ``refused`` says that it failed by what it was
    asked for, ``cut`` that it ended at the room that the engine has for a context, and ``aborted``
    that the engine had the library abort a part of it. ``vector``
    are float32 values, of a text with so many ``tokens``. So many images were ``encoded``; the rows
    of others were known.
    """

    end: RunEnd | None
    perf: Perf
    return_code: int
    kv_positions: tuple[int, ...]
    error: str | None
    cache_refused: str | None = None
    refused: bool = False
    cut: bool = False
    aborted: bool = False
    vector: bytes = b""
    tokens: int = 0
    encoded: int = 0

    @property
    def in_order(self) -> bool:
        """Whether the runtime finished the run, by itself or after an abort."""
        return self.end is RunEnd.FINISHED


class Engine(Protocol):
    """A loaded engine, as the board uses it."""

    facts: EngineFacts
    pid: int
    died: asyncio.Future[str]

    def run(
        self, command: RunCommand, on_token: OnToken, on_scores: OnScores | None = None
    ) -> asyncio.Future[RunEnded]:
        """Start a run. The future fails with ``EngineDied`` if the process ends first.

        Raises:
            FrameCorrupt: the command cannot travel; nothing was sent.
        """

    def pause(self, run_id: int) -> None:
        """Ask the run to pause at its next token that may; returns at once.

        Whether the runtime may pause such a run is the caller's to know. A run that has not begun
        or has ended is not concerned, and an abort outweighs this.
        """

    def abort(self, run_id: int) -> None:
        """Ask for the run's end; returns at once."""

    def call(self, method: str, **args: Any) -> asyncio.Future[Any]:
        """Make one call of the runtime between runs; it waits in the engine for those before it.

        ``drain()``, ``clear_kv(keep_system_prompt)``, ``kv_sizes()`` (a tuple),
        ``load_adapter(path, name, scale)``, ``release_cache()``. The future fails with
        ``EngineDied``, or with the ``NativeError`` that the runtime raised.
        """

    def silent_s(self) -> float:
        """Seconds since the last sign of life."""

    async def stop(self) -> None:
        """End an idle or paused engine in order, by force if it does not."""

    async def kill(self) -> bool:
        """End it by SIGTERM, then SIGKILL. False if it is still there after that."""


UNLOADED_REASON = "its model is unloaded"


class UnloadedEngine:
    """The ``Engine`` of a board without one: it has ended, holds nothing, and does nothing."""

    pid = 0

    def __init__(self, board_id: str, facts: EngineFacts) -> None:
        """``facts`` are those of the engine before it."""
        self._board_id = board_id
        self.facts = facts
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.died.set_result(UNLOADED_REASON)

    def run(
        self, command: RunCommand, on_token: OnToken, on_scores: OnScores | None = None
    ) -> asyncio.Future[RunEnded]:
        """There is nobody to make it."""
        del command, on_token, on_scores
        return self._refused()

    def call(self, method: str, **args: Any) -> asyncio.Future[Any]:
        """There is nobody to make it."""
        del method, args
        return self._refused()

    def _refused(self) -> asyncio.Future[Any]:
        refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        refused.set_exception(EngineDied(self._board_id, UNLOADED_REASON))
        return refused

    def pause(self, run_id: int) -> None:
        """There is no run."""

    def abort(self, run_id: int) -> None:
        """There is no run."""

    def silent_s(self) -> float:
        """Nothing is expected of it."""
        return 0.0

    async def stop(self) -> None:
        """It has ended."""

    async def kill(self) -> bool:
        """It has ended."""
        return True
