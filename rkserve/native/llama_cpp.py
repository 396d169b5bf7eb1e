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
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from rkserve.core.block_hashes import common_prefix
from rkserve.core.errors import (
    CallFailed,
    LoadFailed,
    Misuse,
    NothingComputed,
    ReleaseRefused,
)
from rkserve.core.run_params import Sampling
from rkserve.native.binding.library import open_library
from rkserve.native.decl.llama_cpp import ffi as _ffi
from rkserve.native.library_file import CPU_EXTRA, LLAMA_CPP, LLAMA_CPP_RELEASE
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
PART_S, LEAST_PART, MOST_PART = 0.5, 32, 512
PIECE_BYTES = 64  # of most tokens; a longer one is asked for again
_WARN, _ERROR = 3, 4  # levels of ggml's log
_NO_POOLING = 0
_OWN_CHOICE = "pooling_type"  # in a warning that it is not the model's own
_FLOAT = 4

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
class _Sequence:
    """One entry of the batch: ``ids`` are those of its positions in the KV cache."""

    number: int
    ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Generation:
    """One entry's part of a run. ``token`` was delivered and is not computed yet."""

    sequence: _Sequence
    sampler: Sampler
    fast: bool  # the likeliest token is chosen, and nothing is added to its logit
    token: int = -1
    ended: bool = False

    def choose(self, row: Row) -> int:
        if self.fast:
            return int(np.argmax(row))
        token_id = self.sampler.choose(row)
        if token_id is None:
            raise NothingComputed(EvaluateMode.LOGITS.value, "no token has a finite logit")
        self.sampler.take(token_id)
        return token_id


@dataclass(frozen=True, slots=True)
class _Model:
    """The pointers of a loaded model."""

    model: Any
    context: Any
    memory: Any
    vocab: Any
    vocab_size: int
    hidden_size: int
    batch: Any


class LlamaCppRuntime:
    """One loaded model; ``Runtime`` documents its methods.

    Inputs are token ids. The KV cache holds exactly the ids of ``kv_cache_sizes`` positions: after
    a run the prompt and all generated tokens but the last one, which was not computed. A run
    without ``keep_history`` computes its prompt from where it differs from them.
    """

    def __init__(self, library: LlamaLibrary, quirks: Mapping[str, bool]) -> None:
        self._library, self._lib = library, library.lib
        self._quirks = quirks
        self._loaded: _Model | None = None
        self._params: LoadParams | None = None
        self._sequences: list[_Sequence] = []
        self._adapters: dict[str, tuple[Any, float]] = {}
        self._adapter: str | None = None  # of the positions in the KV cache
        self._unowned = False  # they are from a file: the next run's adapter is theirs
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

    # -- load and destroy ----------------------------------------------------------------------

    def load(self, params: LoadParams) -> None:
        """Load the model. Raises ``LoadFailed``, ``Misuse``."""
        if self._loaded is not None:
            raise Misuse("a model is loaded")
        if params.use_cross_attn:
            raise LoadFailed("llama.cpp: encoder output is not supported")
        lib, path = self._lib, Path(params.model_path)
        if not path.is_file():
            raise LoadFailed(f"the model {path} does not exist")
        model = lib.llama_model_load_from_file(str(path).encode(), self._library.model_params())
        if model == ffi.NULL:
            raise LoadFailed(f"llama.cpp: {path.name} was not loaded: {self._library.errors()}")
        given = self._library.context_params()
        given.n_ctx = params.max_context_len * params.n_batch
        given.n_batch = given.n_ubatch = MOST_PART
        given.n_seq_max = params.n_batch
        given.pooling_type = _NO_POOLING  # embeddings are pooled by the engine
        if params.cpus:
            given.n_threads = given.n_threads_batch = len(params.cpus)
        context = lib.llama_init_from_model(model, given)
        if context == ffi.NULL:
            lib.llama_model_free(model)
            raise LoadFailed(f"llama.cpp: no context for {path.name}: {self._library.errors()}")
        vocab = lib.llama_model_get_vocab(model)
        self._params = params
        self._sequences = [_Sequence(number) for number in range(params.n_batch)]
        self._loaded = _Model(
            model,
            context,
            lib.llama_get_memory(context),
            vocab,
            lib.llama_vocab_n_tokens(vocab),
            lib.llama_model_n_embd(model),
            lib.llama_batch_init(max(MOST_PART, params.n_batch), 0, 1),
        )

    def destroy(self) -> None:
        """Free the model."""
        loaded = self._idle(paused=True)
        self._loaded = None
        self._lib.llama_batch_free(loaded.batch)
        self._lib.llama_free(loaded.context)
        self._lib.llama_model_free(loaded.model)  # and its adapters
        self._adapters.clear()
        self._sequences, self._paused = [], None

    # -- runs ----------------------------------------------------------------------------------

    def run(self, params: RunParams, sink: Sink) -> RunOutcome:
        """Generate until the end, a pause or an abort; see ``Runtime``."""
        loaded = self._idle(paused=params.resume)
        inputs = self._inputs(params)
        if params.resume and self._paused is None:
            raise Misuse("no run is paused")
        if params.resume and self._paused is not None and params.adapter != self._paused.adapter:
            raise Misuse("a paused run is resumed with its own adapter")
        if len(inputs) > 1 and (params.keep_history or params.resume or params.save_cache):
            raise Misuse("a batch keeps no history, is not resumed, and saves no prompt cache")
        with self._owned():
            self._use_adapter(params.adapter)
            self._paused = None
            return self._generate(loaded, params, inputs, sink)

    def _generate(
        self, loaded: _Model, params: RunParams, inputs: list[Ids], sink: Sink
    ) -> RunOutcome:
        assert self._params is not None
        sampling = params.sampling or self._params.sampling
        limit = params.max_new_tokens or self._params.max_new_tokens
        begun_s, computed = time.monotonic(), 0
        seats: list[_Generation] = []
        rows: list[Row] = []
        history = params.resume or params.keep_history
        for sequence, ids in zip(self._sequences, inputs, strict=True):
            unheld = self._unheld(loaded, sequence, ids, history=history)
            parts = list(self._compute(loaded, sequence, unheld))
            computed += sum(parts)
            if sum(parts) < len(unheld):  # aborted
                seats.clear()
                break
            row = self._row(loaded, parts[-1] - 1)
            seats.append(self._seat(sequence, sampling))
            # The library has one buffer for outputs: the next entry's prompt overwrites it.
            rows.append(row.copy() if len(inputs) > 1 else row)
        first_s = time.monotonic()
        made, end = 0, RunEnd.FINISHED
        while seats and not all(seat.ended for seat in seats):
            chosen = [
                None if seat.ended else seat.choose(row)
                for seat, row in zip(seats, rows, strict=True)
            ]
            made += sum(token is not None for token in chosen)
            action = sink(tuple(self._piece(loaded, token) for token in chosen))
            for seat, token in zip(seats, chosen, strict=True):
                if token is not None:
                    seat.token = token
                    seat.ended = self._is_last(loaded, seat)
            limit -= 1
            if self._stop or limit <= 0 or all(seat.ended for seat in seats):
                break
            if action is SinkAction.PAUSE:
                if len(seats) > 1:
                    raise Misuse("a batch cannot be paused")
                self._paused, end = params, RunEnd.PAUSED
                break
            rows = self._step(loaded, seats, rows)
        if params.save_cache is not None and end is RunEnd.FINISHED:
            self._save(loaded, params.save_cache)
        perf = Perf(
            prefill_ms=(first_s - begun_s) * 1e3,
            prefill_tokens=computed,
            decode_ms=(time.monotonic() - first_s) * 1e3,
            decode_tokens=made,
            memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        )
        return RunOutcome(end, perf if end is RunEnd.FINISHED else Perf(), 0)

    def _seat(self, sequence: _Sequence, sampling: Sampling) -> _Generation:
        greedy = sampling.temperature == 0 or sampling.top_k == 1
        plain = sampling.repeat_penalty == 1.0 and not (
            sampling.frequency_penalty or sampling.presence_penalty
        )
        sampler = Sampler(sampling, seed=secrets.randbits(63), context=sequence.ids)
        return _Generation(sequence, sampler, greedy and plain)

    def _piece(self, loaded: _Model, token: int | None) -> TokenPiece | None:
        if token is None:
            return None
        assert self._params is not None
        special = not self._params.skip_special_token
        size = PIECE_BYTES
        while True:
            text = ffi.new("char[]", size)
            count = self._lib.llama_token_to_piece(loaded.vocab, token, text, size, 0, special)
            if count >= 0:
                return TokenPiece(token, bytes(ffi.buffer(text, count)))
            size = -count

    def _is_last(self, loaded: _Model, seat: _Generation) -> bool:
        assert self._params is not None
        if len(seat.sequence.ids) >= self._params.max_context_len:
            return True
        ends = not self._params.ignore_eos_token
        return ends and bool(self._lib.llama_vocab_is_eog(loaded.vocab, seat.token))

    def _unheld(
        self, loaded: _Model, sequence: _Sequence, ids: Ids, *, history: bool, afresh: bool = False
    ) -> Ids:
        """Cut the sequence to its common prefix with ``ids``; return the ids behind it, at least
        the last one. With ``history`` nothing is cut, and with ``afresh`` nothing is kept.
        """
        assert self._params is not None
        if not ids:
            raise Misuse("an input is empty")
        total = len(ids) + (len(sequence.ids) if history else 0)
        if total > self._params.max_context_len:
            raise Misuse(
                f"{total} tokens do not fit into a context of {self._params.max_context_len}"
            )
        if history:
            return ids
        common = 0 if afresh else common_prefix(tuple(sequence.ids), ids)
        self._truncate(loaded, sequence, min(common, len(ids) - 1))
        return ids[len(sequence.ids) :]

    def _compute(
        self, loaded: _Model, sequence: _Sequence, ids: Ids, *, every: bool = False
    ) -> Iterator[int]:
        """Append ``ids`` to the sequence in parts; yield the number of tokens of each.

        It ends early in an aborted run. The last token has an output, with ``every`` each one.
        """
        at = 0
        while at < len(ids) and not self._stop:
            part, began_s = ids[at : at + self._part], time.monotonic()
            at += len(part)
            first_output = 0 if every else len(part) - (at == len(ids))
            self._decode(loaded, [(sequence, one, i >= first_output) for i, one in enumerate(part)])
            if len(part) == self._part:
                rate = len(part) / max(time.monotonic() - began_s, 1e-6)
                self._part = max(LEAST_PART, min(MOST_PART, int(rate * PART_S)))
            yield len(part)

    def _step(self, loaded: _Model, seats: list[_Generation], rows: list[Row]) -> list[Row]:
        """Compute the delivered token of each running entry; return the logits after them."""
        running = [seat for seat in seats if not seat.ended]
        self._decode(loaded, [(seat.sequence, seat.token, True) for seat in running])
        found = iter(range(len(running)))
        return [
            row if seat.ended else self._row(loaded, next(found))
            for seat, row in zip(seats, rows, strict=True)
        ]

    def _decode(self, loaded: _Model, tokens: Sequence[tuple[_Sequence, int, bool]]) -> None:
        """Compute tokens, each behind the last position of its sequence.

        Raises:
            CallFailed: the library failed; the sequences are empty then.
        """
        batch = loaded.batch
        batch.n_tokens = len(tokens)
        for i, (sequence, token, wanted) in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = len(sequence.ids)
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence.number
            batch.logits[i] = wanted
            sequence.ids.append(token)
        code = self._lib.llama_decode(loaded.context, batch)
        if code != 0:
            self._forget(loaded)
            raise CallFailed("llama_decode", code, self._library.errors())

    def _row(self, loaded: _Model, index: int) -> Row:
        """Return the logits of an output of the last ``_decode``, in the library's memory."""
        raw = self._output(self._lib.llama_get_logits_ith, loaded, loaded.vocab_size, index)
        return np.frombuffer(raw, np.float32)

    def _output(self, get: Callable[..., Any], loaded: _Model, size: int, index: int) -> Any:
        """Return the buffer of an output of the last ``_decode``: so many floats."""
        pointer = get(loaded.context, index)
        if pointer == ffi.NULL:
            raise NothingComputed("an output", self._library.errors() or "it gave no reason")
        return ffi.buffer(pointer, size * _FLOAT)

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
        loaded = self._idle()
        if len(self._sequences) > 1:
            raise Misuse("rows are computed without a batch only")
        if not isinstance(given, TokenInput):
            raise Misuse("llama.cpp takes token ids")
        (sequence,) = self._sequences
        hidden = mode is EvaluateMode.HIDDEN
        get = self._lib.llama_get_embeddings_ith if hidden else self._lib.llama_get_logits_ith
        columns = loaded.hidden_size if hidden else loaded.vocab_size
        rows: list[bytes] = []
        with self._owned():
            self.release_prompt_cache()
            self._use_adapter(adapter)
            # Rows of reused positions would be missing.
            afresh = hidden or not last
            ids = self._unheld(loaded, sequence, given.ids, history=keep_history, afresh=afresh)
            self._lib.llama_set_embeddings(loaded.context, hidden)
            try:
                left, count = len(ids), 0
                for count in self._compute(loaded, sequence, ids, every=not last):
                    left -= count
                    outputs = range(count if not last else 0)
                    rows += [bytes(self._output(get, loaded, columns, i)) for i in outputs]
                if last and not left:
                    rows = [bytes(self._output(get, loaded, columns, count - 1))]
            finally:
                self._lib.llama_set_embeddings(loaded.context, False)
        if left:
            raise NothingComputed(mode.value, "it was aborted")
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
        """Remove ranges of positions from a paused handle's KV cache; those behind move up."""
        loaded = self._idle(paused=True)
        if self._paused is None:
            raise Misuse("ranges can be cleared only while a run is paused")
        if len(ranges) != len(self._sequences):
            raise Misuse(f"{len(ranges)} ranges for {len(self._sequences)} entries")
        for sequence, (start, end) in zip(self._sequences, ranges, strict=True):
            size = len(sequence.ids)
            if not 0 <= start <= end <= size:
                raise Misuse(f"the range [{start}, {end}) is outside of {size} positions")
            if start == end:
                continue
            if end < size and not self._lib.llama_memory_can_shift(loaded.memory):
                raise CallFailed("llama_memory_seq_add", -1, "this model's positions cannot move")
            number, memory = sequence.number, loaded.memory
            if not self._lib.llama_memory_seq_rm(memory, number, start, end):
                raise CallFailed("llama_memory_seq_rm", -1, self._library.errors())
            if end < size:
                self._lib.llama_memory_seq_add(memory, number, end, size, start - end)
            del sequence.ids[start:end]

    def kv_cache_sizes(self) -> tuple[int, ...]:
        """Return the number of positions in the KV cache of each entry."""
        return tuple(len(sequence.ids) for sequence in self._sequences)

    def _truncate(self, loaded: _Model, sequence: _Sequence, kept: int) -> None:
        """Keep the first positions; a model whose memory cannot be cut loses all of them."""
        if kept >= len(sequence.ids):
            return
        if kept and self._lib.llama_memory_seq_rm(loaded.memory, sequence.number, kept, -1):
            del sequence.ids[kept:]
            return
        self._lib.llama_memory_seq_rm(loaded.memory, sequence.number, -1, -1)
        sequence.ids.clear()

    def _forget(self, loaded: _Model) -> None:
        self._lib.llama_memory_clear(loaded.memory, True)
        for sequence in self._sequences:
            sequence.ids.clear()
        self._unowned = False

    # -- adapters and prompt caches ------------------------------------------------------------

    def load_adapter(self, path: str, name: str, scale: float = 1.0) -> None:
        """Load a LoRA adapter (GGUF). Raises ``CallFailed``; ``Misuse`` for a name in use."""
        loaded = self._idle()
        if name in self._adapters:
            raise Misuse(f"an adapter {name!r} is loaded")
        found = self._lib.llama_adapter_lora_init(loaded.model, path.encode())
        if found == ffi.NULL:
            raise CallFailed("llama_adapter_lora_init", -1, self._library.errors())
        self._adapters[name] = (found, scale)

    def _use_adapter(self, name: str | None) -> None:
        """Use an adapter, or the base model; positions of another one are given up."""
        loaded = self._idle(paused=True, running=True)
        if name is not None and name not in self._adapters:
            raise Misuse(f"adapter {name!r} is not loaded")
        if name == self._adapter and not self._unowned:
            return
        if not self._unowned:
            self._forget(loaded)
        chosen = [] if name is None else [self._adapters[name]]
        pointers = ffi.new("llama_adapter_lora *[]", [one for one, _ in chosen] or 1)
        scales = ffi.new("float[]", [scale for _, scale in chosen] or 1)
        code = self._lib.llama_set_adapters_lora(loaded.context, pointers, len(chosen), scales)
        if code != 0:
            raise CallFailed("llama_set_adapters_lora", code, self._library.errors())
        self._adapter, self._unowned = name, False

    def _save(self, loaded: _Model, path: str) -> None:
        (sequence,) = self._sequences
        ids = ffi.new("llama_token[]", sequence.ids)
        written = self._lib.llama_state_seq_save_file(
            loaded.context, path.encode(), sequence.number, ids, len(sequence.ids)
        )
        if not written:  # as the vendor's library: the run is over, and its answer is good
            sys.stderr.write(f"E llama.cpp: {path} was not written: {self._library.errors()}\n")

    def load_prompt_cache(self, path: str) -> None:
        """Replace the KV cache by the content of a file; see ``Runtime``."""
        loaded = self._idle()
        if len(self._sequences) > 1:
            raise Misuse("a batch has no prompt caches")
        assert self._params is not None
        (sequence,), capacity = self._sequences, self._params.max_context_len
        self._forget(loaded)
        ids, count = ffi.new("llama_token[]", capacity), ffi.new("size_t *")
        read = self._lib.llama_state_seq_load_file(
            loaded.context, path.encode(), sequence.number, ids, capacity, count
        )
        if not read:
            self._forget(loaded)
            raise CallFailed("llama_state_seq_load_file", -1, self._library.errors())
        sequence.ids[:] = list(ids[0 : count[0]])
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

    def _idle(self, *, paused: bool = False, running: bool = False) -> _Model:
        """Return the model of an idle handle, or also a ``paused`` or ``running`` one."""
        if self._loaded is None:
            raise Misuse("no model is loaded")
        if self._running and not running:
            raise Misuse("a run is going on")
        if self._paused is not None and not paused:
            raise Misuse("a run is paused: resume or drain it first")
        return self._loaded

    @contextmanager
    def _owned(self) -> Iterator[None]:
        self._stop, self._running = False, True
        try:
            yield
        finally:
            self._running = False

    def _inputs(self, params: RunParams) -> list[Ids]:
        if len(params.inputs) != len(self._sequences):
            raise Misuse(f"{len(params.inputs)} inputs for {len(self._sequences)} entries")
        found: list[Ids] = []
        for given in params.inputs:
            if not isinstance(given, TokenInput):
                raise Misuse("llama.cpp takes token ids")
            found.append(given.ids)
        return found
