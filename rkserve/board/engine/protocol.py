"""The ``Engine`` protocol and its values.

It knows no processes, pipes or frames: ``process`` implements it, and tests have a fake.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rkserve.core.errors import EngineDied
from rkserve.core.run_params import Confine, Embeds, EncoderStates, Picture, Pooling, Scored
from rkserve.native.engine_frames import StepParams
from rkserve.native.runtime import LoadParams, Perf, RunEnd, VisionParams

# Receives every token of a run: entry of the batch, token id, text, and whether the library still
# holds text back (``waiting``).
OnToken = Callable[[int, int, bytes, bool], None]
# Receives logprobs in a run of single steps: of the next token, or of the prompt (True).
OnScores = Callable[[bool, tuple[Scored, ...]], None]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The parameters of an engine process, which is confined to the files of ``reads`` and
    ``writes`` and those of the system.

    ``fence`` is the lock file that keeps two engines off one NPU. ``environ`` is added to the
    process's clean environment, and so are the variables of this process named in ``inherit``.
    ``pin_cpus`` are the cores it may run on; empty leaves all. The callables of ``params``
    (``tokenize``, ``embed``) do not cross the pipe and must be None. With ``allow_unlisted`` a
    later release than the listed ones is tried, and driven as one of them. ``cpu``: the library is
    llama.cpp.
    """

    library: str
    params: LoadParams
    fence: str
    cpu: bool = False
    text_mode: bool = False
    vision: VisionParams | None = None
    quirks: Mapping[str, bool] = field(default_factory=dict)
    allow_unlisted: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    inherit: tuple[str, ...] = ()
    confine: Confine = Confine.OFF
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    pin_cpus: tuple[int, ...] = ()
    fence_timeout_s: float = 15.0
    load_timeout_s: float = 120.0
    beat_s: float = 1.0


def with_weights(spec: EngineSpec, weights: Path | None) -> EngineSpec:
    """Return the parameters with another model file; None changes nothing."""
    if weights is None:
        return spec
    return replace(spec, params=replace(spec.params, model_path=str(weights)))


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The properties of a loaded engine's runtime.

    Every run takes exactly ``n_batch`` entries, or one where so many ``entries`` have runs of their
    own at the same time. ``confined`` has the means by which the process is confined, and what they
    lack.
    """

    release: str
    per_run_sampling: bool
    quirks: Mapping[str, bool]
    load_s: float
    n_batch: int = 1
    confined: str = "off"
    entries: int = 1

    @property
    def width(self) -> int:
        """The number of entries that a run takes."""
        return self.n_batch if self.entries == 1 else 1


@dataclass(frozen=True, slots=True)
class EntryCommand:
    """One entry of a batch: token ids, or in text mode the rendered prompt and no ids.

    Such a prompt may have ``images``, or be ``embeds`` and no text; then it is the only entry. So
    is one with the states of an ``encoder``, whose ids, if any, precede its text. Encoded images
    are shared among entries with the same ``images_of``.
    """

    ids: tuple[int, ...] = ()
    prompt_text: str | None = None
    images: tuple[Picture, ...] = ()
    images_of: int = 0
    embeds: Embeds | None = None
    encoder: EncoderStates | None = None


@dataclass(frozen=True, slots=True)
class RunCommand:
    """The command for one run; see ``RunParams`` for the common fields.

    Before the run, in this order: ``clear`` empties the whole KV cache of an idle handle; ``cut``
    clears half-open ranges of the paused entry 0, one call each, at the positions of that moment;
    ``release_cache`` releases the prompt cache, and ``load_cache`` loads another, which stays for
    later runs. If one of the first two fails, there is no run. A prompt cache is a convenience: one
    that cannot be loaded or released leaves its reason in ``RunEnded.cache_refused``.

    ``entry`` is the one that makes the run, where several do at the same time. ``resume`` resumes
    the paused run, under a new ``run_id``. With ``steps`` the engine makes the
    run of single steps; the library's ``sampling`` and ``max_new_tokens`` are not used. With
    ``pooling`` nothing is generated: the hidden states of the one entry become the ``vector`` of
    ``RunEnded``.
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
    entry: int = 0


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The end of a run.

    ``end`` is None for a run that was aborted before it began. ``kv_positions`` is the runtime's
    count for each entry of the KV cache now, and empty where it gave none. ``perf`` is zeros for a
    paused run. For a run of single steps, ``refused`` means that it failed by its parameters,
    ``cut`` that it ended at the engine's context limit, and ``aborted`` that the engine had the
    library abort a part of it. ``vector`` is float32 values, of a text with ``tokens`` tokens.
    ``encoded`` images were encoded; the others were cached.
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
        """True where the runtime finished the run, by itself or after an abort."""
        return self.end is RunEnd.FINISHED

    @property
    def reason(self) -> str:
        """The reason of a failed run."""
        return self.error or f"the runtime returned {self.return_code}"


class Engine(Protocol):
    """A loaded engine."""

    facts: EngineFacts
    pid: int
    died: asyncio.Future[str]

    def run(
        self, command: RunCommand, on_token: OnToken, on_scores: OnScores | None = None
    ) -> asyncio.Future[RunEnded]:
        """Start a run. The future fails with ``EngineDied`` if the process ends first.

        Raises:
            FrameCorrupt: the command cannot be encoded; nothing was sent.
        """

    def pause(self, run_id: int) -> None:
        """Pause the run at its next possible token; returns at once.

        The caller has to know whether the runtime can pause such a run. A run that has not begun or
        has ended is not affected, and an abort has priority.
        """

    def abort(self, run_id: int) -> None:
        """Abort the run; returns at once."""

    def call(self, method: str, *, entry: int = 0, **args: Any) -> asyncio.Future[Any]:
        """Make one call of the runtime between runs; it is queued behind earlier ones.

        ``drain()``, ``clear_kv(keep_system_prompt)``, ``kv_sizes()`` (a tuple),
        ``load_adapter(path, name, scale)``, ``release_cache()``; the first two, ``kv_sizes`` and
        the last concern the one ``entry`` where several run. The future fails with
        ``EngineDied``, or with the runtime's ``NativeError``.
        """

    def silent_s(self) -> float:
        """Seconds since the last sign of life."""

    async def stop(self) -> None:
        """Stop an idle or paused engine in order, by force if it does not end."""

    async def kill(self) -> bool:
        """End it by SIGTERM, then SIGKILL. False if it survives both."""


UNLOADED_REASON = "its model is unloaded"
_SIGNAL = re.compile(r"killed by (SIG[A-Z0-9]+)")


def end_kind(reason: str) -> str:
    """Return the kind of an engine's end, for counting: the name of a signal, or ``exit``."""
    found = _SIGNAL.search(reason)
    return "exit" if found is None else found[1]


class UnloadedEngine:
    """The ``Engine`` of a sleeping board: ended, empty, and without effect."""

    pid = 0

    def __init__(self, board_id: str, facts: EngineFacts) -> None:
        """``facts`` are those of the unloaded engine."""
        self._board_id = board_id
        self.facts = facts
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.died.set_result(UNLOADED_REASON)

    def run(
        self, command: RunCommand, on_token: OnToken, on_scores: OnScores | None = None
    ) -> asyncio.Future[RunEnded]:
        """Fail with ``EngineDied``."""
        del command, on_token, on_scores
        return self._refused()

    def call(self, method: str, *, entry: int = 0, **args: Any) -> asyncio.Future[Any]:
        """Fail with ``EngineDied``."""
        del method, entry, args
        return self._refused()

    def _refused(self) -> asyncio.Future[Any]:
        refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        refused.set_exception(EngineDied(self._board_id, UNLOADED_REASON))
        return refused

    def pause(self, run_id: int) -> None:
        """Do nothing: there is no run."""

    def abort(self, run_id: int) -> None:
        """Do nothing: there is no run."""

    def silent_s(self) -> float:
        """Return 0: no sign of life is expected."""
        return 0.0

    async def stop(self) -> None:
        """Do nothing: it has ended."""

    async def kill(self) -> bool:
        """Return True: it has ended."""
        return True
