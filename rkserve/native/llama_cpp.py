"""llama.cpp as a ``Runtime``: models of GGUF files on the cores of a CPU.

The library is the one inside the wheel ``xllamacpp`` (extra ``rkserve[cpu]``), driven through
llama.cpp's own C interface rather than the wheel's server: only there a caller appends to a KV
cache, cuts it, reads logits and knows the id of every token. Tokens are chosen by
``rkserve.sampling``, as in runs of single steps.

llama.cpp changes its structs of parameters from release to release and has no version in its ABI.
``LlamaLibrary`` therefore refuses a library whose default parameters are not laid out as declared.
"""

from __future__ import annotations

import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from rkserve.core.block_hashes import common_prefix
from rkserve.core.errors import (
    LoadFailed,
    Misuse,
    NothingComputed,
    ReleaseRefused,
)
from rkserve.core.run_params import Sampling
from rkserve.native.binding.library import open_library
from rkserve.native.decl.llama_cpp import ffi as _ffi
from rkserve.native.library_file import CPU_EXTRA, LLAMA_CPP, LLAMA_CPP_RELEASE
from rkserve.native.llama_context import (
    MOST_PART,
    CachedSequence,
    LlamaContext,
    TokenPart,
)
from rkserve.native.quirks import quirks_for
from rkserve.native.runtime import (
    CrossAttention,
    EvaluateMode,
    LoadParams,
    Matrix,
    Perf,
    RunEnd,
    RunInput,
    RunOutcome,
    RunParams,
    Sink,
    SinkAction,
    TokenInput,
    TokenPiece,
)
from rkserve.sampling.draw import Row, Sampler

RELEASE = LLAMA_CPP_RELEASE  # whose structs are declared: llama.cpp b11549
# What RKLLM is not trusted with, by the names of its quirks: llama.cpp's memory is under control of
# the caller, position by position.
ABILITIES: Mapping[str, bool] = {
    "pause_with_history": True,
    "clear_range_with_history": True,
    "drain_by_limit": True,
    "abort_in_callback": True,
    "prompt_cache_after_abort": True,
    "prompt_cache_load_with_history": True,
    "prompt_cache_save_with_history": True,
    "prompt_cache_portable": True,
    "prefix_reuse_in_ram": True,
    "append_tokens_with_history": True,
    "kv_valid_after_abort": True,
    "waiting_token_id_valid": True,
    "logits_with_history": True,
    "fewer_cpus_than_cores": True,
}
# A prompt is computed in parts, because an abort takes effect between two of them: in as many
# tokens as the last part's speed makes of this time, and at least as many as matrices profit from.
PART_S, LEAST_PART = 0.5, 32
_WARN, _ERROR = 3, 4  # levels of ggml's log
_OWN_CHOICE = "pooling_type"  # in a warning that it is not the model's own

ffi: Any = _ffi  # of which the types know no function

Ids = tuple[int, ...]


class LlamaLibrary:
    """The opened library. Its log's warnings and errors go to stderr.

    Raises:
        LibraryMissing: it cannot be opened.
        ReleaseRefused: it lacks a function, or its parameters are laid out otherwise.
    """

    def __init__(self, path: Path) -> None:
        self.lib: Any = open_library(ffi, path, "llama.cpp")
        try:
            release = version(LLAMA_CPP)
        except PackageNotFoundError:
            release = "unknown"
        self.release = f"llama.cpp {release}"
        self._errors: list[str] = []
        try:
            self._check()
        except (AttributeError, ffi.error) as exc:
            raise ReleaseRefused(
                f"{LLAMA_CPP} {release} is not laid out as {RELEASE}, the release that rkserve was "
                f"written for ({exc}). Install that one: {CPU_EXTRA}."
            ) from exc
        self._on_log = ffi.callback("ggml_log_callback", self._note)
        self.lib.llama_log_set(self._on_log, ffi.NULL)
        self.lib.llama_backend_init()

    def _check(self) -> None:
        """Compare the default parameters with those of the declared layout."""
        model, context = self.model_params(), self.context_params()
        known = (
            (model.n_gpu_layers, -1),
            (model.split_mode, 1),
            (model.main_gpu, 0),
            (_flags(model, "vocab_only", "check_tensors", "use_extra_bufts"), (0, 0, 1)),
            (_flags(model, "no_host", "no_alloc"), (0, 0)),
            ((context.n_ctx, context.n_batch, context.n_ubatch), (512, 2048, 512)),
            ((context.n_seq_max, context.n_outputs_max), (1, 0)),
            ((context.pooling_type, context.attention_type), (-1, -1)),
            ((context.type_k, context.type_v), (1, 1)),
            (_flags(context, "embeddings", "offload_kqv", "no_perf"), (0, 1, 1)),
            (_flags(context, "op_offload", "swa_full", "kv_unified"), (1, 1, 0)),
        )
        for found, expected in known:
            if found != expected:
                raise AttributeError(f"a default parameter is {found}, not {expected}")
        for name in dir(self.lib):  # all that are declared
            getattr(self.lib, name)

    def model_params(self) -> Any:
        """Return the default parameters of a model."""
        return self.lib.llama_model_default_params()

    def context_params(self) -> Any:
        """Return the default parameters of a context."""
        return self.lib.llama_context_default_params()

    def _note(self, level: int, text: Any, _: Any) -> None:
        if level in (_WARN, _ERROR):
            line = ffi.string(text).decode("utf-8", "replace").strip()
            if level == _ERROR:
                self._errors.append(line)
            elif _OWN_CHOICE in line:
                return
            sys.stderr.write(f"{'E' if level == _ERROR else 'W'} llama.cpp: {line}\n")

    def errors(self) -> str:
        """Return the errors that it has logged since the last call."""
        lines, self._errors = self._errors, []
        return "; ".join(lines)


def _flags(params: Any, *names: str) -> tuple[int, ...]:
    # As bytes: to read a bool that is neither 0 nor 1 is undefined.
    whole = ffi.buffer(ffi.addressof(params))
    offsets = dict(ffi.typeof(params).fields)
    return tuple(whole[offsets[name].offset][0] for name in names)


def open_llama_cpp(path: Path, quirks: Mapping[str, bool] | None = None) -> LlamaCppRuntime:
    """Open the library at ``path`` (``library_file.llama_cpp_library``); ``quirks`` are overrides.

    Raises:
        LibraryMissing, ReleaseRefused: see ``LlamaLibrary``.
        ConfigError: an override is not in the quirk table.
    """
    return LlamaCppRuntime(LlamaLibrary(path), quirks_for(ABILITIES, quirks))


@dataclass(slots=True)
class _Choice:
    """The choice of a run's tokens."""

    sampler: Sampler
    fast: bool  # the likeliest token is chosen, and nothing is added to its logit

    def of(self, row: Row) -> int:
        """Return the next token. Raises ``NothingComputed``."""
        if self.fast:
            return int(np.argmax(row))
        token_id = self.sampler.choose(row)
        if token_id is None:
            raise NothingComputed(EvaluateMode.LOGITS.value, "no token has a finite logit")
        self.sampler.take(token_id)
        return token_id


def _choice(sampling: Sampling, context: Sequence[int]) -> _Choice:
    greedy = sampling.temperature == 0 or sampling.top_k == 1
    plain = sampling.repeat_penalty == 1.0 and not (
        sampling.frequency_penalty or sampling.presence_penalty
    )
    sampler = Sampler(sampling, seed=secrets.randbits(63), context=context)
    return _Choice(sampler, greedy and plain)


class LlamaCppRuntime:
    """One entry of a loaded model; ``Runtime`` documents its methods.

    Inputs are token ids. The KV cache holds exactly the ids of ``kv_cache_sizes`` positions: after
    a run the prompt and all generated tokens but the last one, which was not computed. A run
    without ``keep_history`` computes its prompt from where it differs from them.

    A model that is loaded with ``n_batch`` has so many ``entries``, each with a KV cache and runs
    of its own, whose tokens are computed together. The first one loads and destroys it.
    """

    def __init__(
        self,
        library: LlamaLibrary,
        quirks: Mapping[str, bool],
        context: LlamaContext | None = None,
        number: int = 0,
    ) -> None:
        """``context`` is given to the other entries of a loaded model."""
        self._library, self._quirks = library, quirks
        self._context, self._number = context, number
        self._others: tuple[LlamaCppRuntime, ...] = ()
        self._unowned = False  # its positions are from a file: the next run's adapter is theirs
        self._part = MOST_PART // 4
        self._paused: RunParams | None = None
        self._running = self._stop = False

    # -- facts ---------------------------------------------------------------------------------

    @property
    def release(self) -> str:
        """The name and version of the library."""
        return self._library.release

    @property
    def per_run_sampling(self) -> bool:
        """True: a run may carry sampling and a token limit."""
        return True

    @property
    def image_tags_at_load(self) -> bool:
        """False: it takes no images."""
        return False

    @property
    def quirks(self) -> Mapping[str, bool]:
        """The values of the quirks by name."""
        return self._quirks

    @property
    def entries(self) -> tuple[LlamaCppRuntime, ...]:
        """The entries of the loaded model, this one first."""
        return (self, *self._others)

    # -- load and destroy ----------------------------------------------------------------------

    def load(self, params: LoadParams) -> None:
        """Load the model. Raises ``LoadFailed``, ``Misuse``."""
        if self._context is not None:
            raise Misuse("a model is loaded")
        if params.use_cross_attn:
            raise LoadFailed("llama.cpp: encoder output is not supported")
        self._context = context = LlamaContext(self._library, params)
        self._others = tuple(
            LlamaCppRuntime(self._library, self._quirks, context, number)
            for number in range(1, params.n_batch)
        )

    def destroy(self) -> None:
        """Free the model."""
        context = self._idle(paused=True)
        if context.running:
            raise Misuse("a run is going on")
        self._context, self._paused, self._others = None, None, ()
        context.close()

    # -- runs ----------------------------------------------------------------------------------

    def run(self, params: RunParams, sink: Sink) -> RunOutcome:
        """Generate until the end, a pause or an abort; see ``Runtime``."""
        context = self._idle(paused=params.resume)
        ids = _input(params)
        if params.resume and self._paused is None:
            raise Misuse("no run is paused")
        if params.resume and self._paused is not None and params.adapter != self._paused.adapter:
            raise Misuse("a paused run is resumed with its own adapter")
        with self._owned(context) as sequence:
            self._use_adapter(context, params.adapter)
            self._paused = None
            return self._generate(context, sequence, params, ids, sink)

    def _generate(
        self,
        context: LlamaContext,
        sequence: CachedSequence,
        params: RunParams,
        ids: Ids,
        sink: Sink,
    ) -> RunOutcome:
        begun_s, computed, row = time.monotonic(), 0, None
        unheld = self._unheld(context, ids, history=params.resume or params.keep_history)
        for count, rows in self._compute(context, unheld):
            computed += count
            row = rows[-1] if rows else None
        first_s, made, end = time.monotonic(), 0, RunEnd.FINISHED
        if row is not None:  # else it was aborted
            made, end = self._answer(context, sequence, params, row, sink)
        if params.save_cache is not None and end is RunEnd.FINISHED:
            self._save(context, params.save_cache)
        perf = Perf(
            prefill_ms=(first_s - begun_s) * 1e3,
            prefill_tokens=computed,
            decode_ms=(time.monotonic() - first_s) * 1e3,
            decode_tokens=made,
            memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        )
        return RunOutcome(end, perf if end is RunEnd.FINISHED else Perf(), 0)

    def _answer(
        self,
        context: LlamaContext,
        sequence: CachedSequence,
        params: RunParams,
        row: Row,
        sink: Sink,
    ) -> tuple[int, RunEnd]:
        """Choose and deliver tokens; return their number, and the end of the run."""
        choice = _choice(params.sampling or context.params.sampling, sequence.ids)
        limit, made = params.max_new_tokens or context.params.max_new_tokens, 0
        while True:
            token = choice.of(row)
            action = sink((TokenPiece(token, context.piece(token)),))
            made += 1
            if self._stop or made >= limit or self._is_last(context, sequence, token):
                return made, RunEnd.FINISHED
            if action is SinkAction.PAUSE:
                self._paused = params
                return made, RunEnd.PAUSED
            (row,) = self._decode(context, (token,), 0)

    def _is_last(self, context: LlamaContext, sequence: CachedSequence, token: int) -> bool:
        if len(sequence.ids) >= context.params.max_context_len:
            return True
        return not context.params.ignore_eos_token and context.ends(token)

    def _unheld(
        self, context: LlamaContext, ids: Ids, *, history: bool, afresh: bool = False
    ) -> Ids:
        """Cut the sequence to its common prefix with ``ids``; return the ids behind it, at least
        the last one. With ``history`` nothing is cut, and with ``afresh`` nothing is kept.
        """
        sequence, limit = self._sequence(context), context.params.max_context_len
        if not ids:
            raise Misuse("an input is empty")
        total = len(ids) + (len(sequence.ids) if history else 0)
        if total > limit:
            raise Misuse(f"{total} tokens do not fit into a context of {limit}")
        if history:
            return ids
        common = 0 if afresh else common_prefix(tuple(sequence.ids), ids)
        context.truncate(sequence, min(common, len(ids) - 1))
        return ids[len(sequence.ids) :]

    def _compute(
        self, context: LlamaContext, ids: Ids, *, every: bool = False, hidden: bool = False
    ) -> Iterator[tuple[int, list[Row]]]:
        """Append ``ids`` to the sequence in parts; yield the number of tokens and the outputs of
        each.

        It ends early in an aborted run. The last token has an output, with ``every`` each one.
        """
        at = 0
        while at < len(ids) and not self._stop:
            shared = None if context.steps is None or context.steps.alone else context.steps
            size = self._part if shared is None else shared.prompt
            part, began_s = ids[at : at + size], time.monotonic()
            at += len(part)
            first_output = 0 if every else len(part) - (at == len(ids))
            rows = self._decode(context, part, first_output, hidden=hidden)
            if shared is None and len(part) == size:
                rate = len(part) / max(time.monotonic() - began_s, 1e-6)
                self._part = max(LEAST_PART, min(MOST_PART, int(rate * PART_S)))
            yield len(part), rows

    def _decode(
        self, context: LlamaContext, ids: Ids, first_output: int, *, hidden: bool = False
    ) -> list[Row]:
        """Compute tokens behind the last position; return the outputs from ``first_output`` on.

        Raises:
            CallFailed: the library failed; all sequences are empty then.
        """
        part = TokenPart(self._sequence(context), ids, first_output)
        if context.steps is not None:
            return context.steps.compute(self._number, part)
        context.compute((part,), hidden=hidden)
        if part.error is not None:
            raise part.error
        return part.outputs

    def run_async(
        self, params: RunParams, sink: Sink, ended: Callable[[RunOutcome | BaseException], None]
    ) -> None:
        """Raise ``Misuse``: all runs block."""
        del params, sink, ended
        raise Misuse("llama.cpp has no asynchronous runs")

    def poll_async(self) -> bool:
        """Return False: no asynchronous run goes on."""
        return False

    def drain(self) -> None:
        """End a paused run: its positions stay."""
        self._idle(paused=True)
        if self._paused is None:
            raise Misuse("no run is paused")
        self._paused = None

    def evaluate(
        self,
        given: RunInput,
        mode: EvaluateMode,
        *,
        keep_history: bool = False,
        adapter: str | None = None,
        last: bool = False,
    ) -> Matrix:
        """Compute one row per position of ``given``; see ``Runtime``."""
        context = self._idle()
        hidden = mode is EvaluateMode.HIDDEN
        if hidden and context.steps is not None:
            raise Misuse("hidden states are computed without a batch only")
        if not isinstance(given, TokenInput):
            raise Misuse("llama.cpp takes token ids")
        rows: list[bytes] = []
        with self._owned(context):
            self.release_prompt_cache()
            self._use_adapter(context, adapter)
            # Rows of reused positions would be missing.
            afresh = hidden or not last
            left = ids = self._unheld(context, given.ids, history=keep_history, afresh=afresh)
            if hidden:
                context.set_hidden(hidden=True)
            try:
                for count, found in self._compute(context, ids, every=not last, hidden=hidden):
                    left = left[count:]
                    rows += [row.tobytes() for row in found]
            finally:
                if hidden:
                    context.set_hidden(hidden=False)
        if left:
            raise NothingComputed(mode.value, "it was aborted")
        columns = context.hidden_size if hidden else context.vocab_size
        return Matrix(len(rows), columns, b"".join(rows))

    def abort(self) -> None:
        """Request the end of the run at its next token; a no-op without a run."""
        if self._running:
            self._stop = True

    def is_running(self) -> bool:
        """Return whether a run is going on."""
        return self._running

    # -- the KV cache --------------------------------------------------------------------------

    def clear_kv_cache(self, *, keep_system_prompt: bool = False) -> None:
        """Empty the KV cache. It knows no system prompt apart from the rest."""
        del keep_system_prompt
        self._forget(self._idle())

    def clear_kv_range(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Remove a range of positions from a paused entry's KV cache; those behind move up."""
        context = self._idle(paused=True)
        if self._paused is None:
            raise Misuse("ranges can be cleared only while a run is paused")
        if len(ranges) != 1:
            raise Misuse(f"{len(ranges)} ranges; a run has one entry")
        context.cut(self._sequence(context), *ranges[0])

    def kv_cache_sizes(self) -> tuple[int, ...]:
        """Return the number of positions in the KV cache of this entry."""
        return () if self._context is None else (len(self._sequence(self._context).ids),)

    def _forget(self, context: LlamaContext) -> None:
        context.truncate(self._sequence(context))
        self._unowned = False

    # -- adapters and prompt caches ------------------------------------------------------------

    def load_adapter(self, path: str, name: str, scale: float = 1.0) -> None:
        """Load a LoRA adapter (GGUF) for all entries, of which none may run.

        Raises ``CallFailed``; ``Misuse`` for a name in use.
        """
        context = self._idle()
        if context.running:
            raise Misuse("a run is going on")
        context.load_adapter(path, name, scale)

    def _use_adapter(self, context: LlamaContext, name: str | None) -> None:
        """Use an adapter, or the base model; positions of another one are given up."""
        context.use_adapter(name, self._number)
        sequence = self._sequence(context)
        if sequence.adapter != name and not self._unowned:
            self._forget(context)
        sequence.adapter, self._unowned = name, False

    def _save(self, context: LlamaContext, path: str) -> None:
        if not context.save(self._sequence(context), path):
            # As the vendor's library: the run is over, and its answer is good.
            sys.stderr.write(f"E llama.cpp: {path} was not written: {self._library.errors()}\n")

    def load_prompt_cache(self, path: str) -> None:
        """Replace the KV cache by the content of a file; see ``Runtime``."""
        context = self._idle()
        self._unowned = False
        context.restore(self._sequence(context), path)
        self._unowned = True

    def release_prompt_cache(self) -> None:
        """Give up the positions of a file that no run has used; others belong to their run."""
        if self._unowned:
            self._forget(self._idle(running=True))

    def set_chat_template(self, system: str, prefix: str, postfix: str) -> None:
        """Do nothing: inputs are token ids, which have no template."""
        del system, prefix, postfix

    def set_function_tools(self, system: str, tools: str, response_tag: str) -> None:
        """Raise ``Misuse``: inputs are token ids."""
        del system, tools, response_tag
        raise Misuse("llama.cpp takes token ids, which hold their tools already")

    def set_cross_attention(self, given: CrossAttention) -> None:
        """Raise ``Misuse``: there is no encoder output."""
        del given
        raise Misuse("llama.cpp takes no encoder output")

    # -- the owner -----------------------------------------------------------------------------

    def _idle(self, *, paused: bool = False, running: bool = False) -> LlamaContext:
        """Return the model of an idle entry, or also of a ``paused`` or ``running`` one."""
        if self._context is None or self._context.closed:
            raise Misuse("no model is loaded")
        if self._running and not running:
            raise Misuse("a run is going on")
        if self._paused is not None and not paused:
            raise Misuse("a run is paused: resume or drain it first")
        return self._context

    def _sequence(self, context: LlamaContext) -> CachedSequence:
        return context.sequences[self._number]

    @contextmanager
    def _owned(self, context: LlamaContext) -> Iterator[CachedSequence]:
        sequence, steps = self._sequence(context), context.steps
        self._stop, self._running = False, True
        with context.lock:
            context.running.add(self._number)
            sequence.lost = False
        try:
            with nullcontext() if steps is None else steps.run(self._number):
                yield sequence
        finally:
            self._running = False
            with context.lock:
                context.running.discard(self._number)


def _input(params: RunParams) -> Ids:
    if len(params.inputs) != 1:
        raise Misuse(f"{len(params.inputs)} inputs; each entry has runs of its own")
    (given,) = params.inputs
    if not isinstance(given, TokenInput):
        raise Misuse("llama.cpp takes token ids")
    return given.ids
