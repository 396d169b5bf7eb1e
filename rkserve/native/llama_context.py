"""A model that llama.cpp has loaded, with the KV cache of its sequences.

Each sequence is one entry's: its positions and their ids are known one by one. One call of the
library is made at a time, and a step computes tokens of several sequences (``shared_steps``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rkserve.core.errors import CallFailed, LoadFailed, Misuse, NativeError, NothingComputed
from rkserve.native.decl.llama_cpp import ffi as _ffi
from rkserve.native.runtime import LoadParams
from rkserve.native.shared_steps import Part, SharedSteps
from rkserve.sampling.draw import Row

MOST_PART = 512  # tokens of one sequence in a step
PIECE_BYTES = 64  # of most tokens; a longer one is asked for again
_NO_POOLING = 0
_FLOAT = 4

ffi: Any = _ffi  # of which the types know no function


@dataclass(slots=True)
class CachedSequence:
    """The KV cache of one entry: ``ids`` are those of its positions.

    They were computed with ``adapter``. A sequence is ``lost`` if a step failed during its run.
    """

    number: int
    ids: list[int] = field(default_factory=list)
    adapter: str | None = None
    lost: bool = False


TokenPart = Part[CachedSequence, Row]


class Library(Protocol):
    """The opened library."""

    lib: Any

    def model_params(self) -> Any:
        """Return the default parameters of a model."""

    def context_params(self) -> Any:
        """Return the default parameters of a context."""

    def errors(self) -> str:
        """Return the errors that it has logged since the last call."""


class LlamaContext:
    """The pointers of a loaded model, and the calls that its entries share.

    With several sequences all of their tokens are computed by one thread (``steps``), and outputs
    are copies; with one the caller's thread computes them, and outputs are in the library's memory
    until the next step. ``lock`` is held during each call that reads or changes the KV cache.
    """

    def __init__(self, library: Library, params: LoadParams) -> None:
        """Load the model. Raises ``LoadFailed``."""
        self._library, self._lib = library, library.lib
        self.params = params
        self._load(Path(params.model_path))
        self.lock = threading.RLock()
        self.running: set[int] = set()  # entries with a run
        self.closed = False
        self.sequences = tuple(CachedSequence(number) for number in range(params.n_batch))
        self.adapters: dict[str, tuple[Any, float]] = {}
        self._adapter: str | None = None  # that the next step computes with
        self.steps = SharedSteps(self.compute) if params.n_batch > 1 else None

    def _load(self, path: Path) -> None:
        lib, params = self._lib, self.params
        if not path.is_file():
            raise LoadFailed(f"the model {path} does not exist")
        model = lib.llama_model_load_from_file(str(path).encode(), self._library.model_params())
        if model == ffi.NULL:
            raise LoadFailed(f"llama.cpp: {path.name} was not loaded: {self._library.errors()}")
        given = self._library.context_params()
        given.n_ctx = params.max_context_len * params.n_batch
        given.n_ubatch = MOST_PART
        given.n_batch = room = MOST_PART + params.n_batch  # a part of a prompt, and tokens
        given.n_seq_max = params.n_batch
        given.pooling_type = _NO_POOLING  # embeddings are pooled by the engine
        if params.cpus:
            given.n_threads = given.n_threads_batch = len(params.cpus)
        context = lib.llama_init_from_model(model, given)
        if context == ffi.NULL:
            lib.llama_model_free(model)
            raise LoadFailed(f"llama.cpp: no context for {path.name}: {self._library.errors()}")
        self._model, self.pointer = model, context
        self._memory = lib.llama_get_memory(context)
        self._vocab = lib.llama_model_get_vocab(model)
        self.vocab_size = lib.llama_vocab_n_tokens(self._vocab)
        self.hidden_size = lib.llama_model_n_embd(model)
        self._batch = lib.llama_batch_init(room, 0, 1)

    def close(self) -> None:
        """Free the model; no run may go on."""
        self.closed = True
        if self.steps is not None:
            self.steps.close()
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self.pointer)
        self._lib.llama_model_free(self._model)  # and its adapters

    # -- tokens --------------------------------------------------------------------------------

    def piece(self, token: int) -> bytes:
        """Return the text of a token."""
        special = not self.params.skip_special_token
        size = PIECE_BYTES
        while True:
            text = ffi.new("char[]", size)
            count = self._lib.llama_token_to_piece(self._vocab, token, text, size, 0, special)
            if count >= 0:
                return bytes(ffi.buffer(text, count))
            size = -count

    def ends(self, token: int) -> bool:
        """Return whether a token ends generation."""
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    # -- steps ---------------------------------------------------------------------------------

    def compute(self, parts: Sequence[TokenPart], *, hidden: bool = False) -> None:
        """Compute the tokens of all parts in one call; fill in the outputs or the error of each.

        Outputs are logits, or hidden states with ``hidden``. After a failure of the library all
        sequences are empty, and lost to the runs that go on.
        """
        with self.lock:
            for part in parts:
                if part.sequence.lost:
                    part.error = CallFailed("llama_decode", -1, "a step before it failed")
            # In the order of sequences: otherwise the library reads the weights several times.
            going = sorted(
                (part for part in parts if part.error is None), key=lambda one: one.sequence.number
            )
            if not going:
                return
            self._fill(going)
            code = self._lib.llama_decode(self.pointer, self._batch)
            if code != 0:
                self._lose()
                reason = self._library.errors()
                for part in going:
                    part.error = CallFailed("llama_decode", code, reason)
                return
            self._read(going, hidden=hidden)

    def _fill(self, parts: Sequence[TokenPart]) -> None:
        batch, at = self._batch, 0
        for part in parts:
            sequence, first = part.sequence, len(part.sequence.ids)
            for i, token in enumerate(part.ids):
                batch.token[at] = token
                batch.pos[at] = first + i
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = sequence.number
                batch.logits[at] = i >= part.first_output
                at += 1
            sequence.ids += part.ids
        batch.n_tokens = at

    def _read(self, parts: Sequence[TokenPart], *, hidden: bool) -> None:
        at = 0
        for part in parts:
            outputs = range(at + part.first_output, at + len(part.ids))
            try:
                part.outputs = [self._output(index, hidden=hidden) for index in outputs]
            except NativeError as exc:
                part.error = exc
            at += len(part.ids)

    def _output(self, index: int, *, hidden: bool) -> Row:
        """Return the row of a token of the last step, by its index in it."""
        lib = self._lib
        get = lib.llama_get_embeddings_ith if hidden else lib.llama_get_logits_ith
        pointer = get(self.pointer, index)
        if pointer == ffi.NULL:
            raise NothingComputed("an output", self._library.errors() or "it gave no reason")
        size = self.hidden_size if hidden else self.vocab_size
        row = np.frombuffer(ffi.buffer(pointer, size * _FLOAT), np.float32)
        return row if self.steps is None else row.copy()

    def set_hidden(self, *, hidden: bool) -> None:
        """Have the next steps compute hidden states, or logits."""
        self._lib.llama_set_embeddings(self.pointer, hidden)

    # -- the KV cache --------------------------------------------------------------------------

    def _lose(self) -> None:
        self._lib.llama_memory_clear(self._memory, True)
        for sequence in self.sequences:
            sequence.ids.clear()
            sequence.lost = True

    def truncate(self, sequence: CachedSequence, kept: int = 0) -> None:
        """Keep the first positions; a model whose memory cannot be cut loses all of them."""
        with self.lock:
            if kept >= len(sequence.ids):
                return
            if kept and self._lib.llama_memory_seq_rm(self._memory, sequence.number, kept, -1):
                del sequence.ids[kept:]
                return
            self._lib.llama_memory_seq_rm(self._memory, sequence.number, -1, -1)
            sequence.ids.clear()

    def cut(self, sequence: CachedSequence, start: int, end: int) -> None:
        """Remove a range of positions; those behind it move up.

        Raises ``CallFailed``, and ``Misuse`` for a range that is reversed or outside.
        """
        with self.lock:
            size = len(sequence.ids)
            if not 0 <= start <= end <= size:
                raise Misuse(f"the range [{start}, {end}) is outside of {size} positions")
            if start == end:
                return
            if end < size and not self._lib.llama_memory_can_shift(self._memory):
                raise CallFailed("llama_memory_seq_add", -1, "this model's positions cannot move")
            number, memory = sequence.number, self._memory
            if not self._lib.llama_memory_seq_rm(memory, number, start, end):
                raise CallFailed("llama_memory_seq_rm", -1, self._library.errors())
            if end < size:
                self._lib.llama_memory_seq_add(memory, number, end, size, start - end)
            del sequence.ids[start:end]

    def save(self, sequence: CachedSequence, path: str) -> bool:
        """Write a sequence to a file; return False where that failed."""
        with self.lock:
            ids = ffi.new("llama_token[]", sequence.ids)
            written = self._lib.llama_state_seq_save_file(
                self.pointer, path.encode(), sequence.number, ids, len(sequence.ids)
            )
        return bool(written)

    def restore(self, sequence: CachedSequence, path: str) -> None:
        """Replace a sequence by the content of a file. Raises ``CallFailed``; it is empty then."""
        capacity = self.params.max_context_len
        with self.lock:
            self.truncate(sequence)
            ids, count = ffi.new("llama_token[]", capacity), ffi.new("size_t *")
            read = self._lib.llama_state_seq_load_file(
                self.pointer, path.encode(), sequence.number, ids, capacity, count
            )
            if read:
                sequence.ids[:] = list(ids[0 : count[0]])
                return
            self._lib.llama_memory_seq_rm(self._memory, sequence.number, -1, -1)
        raise CallFailed("llama_state_seq_load_file", -1, self._library.errors())

    # -- adapters ------------------------------------------------------------------------------

    def load_adapter(self, path: str, name: str, scale: float) -> None:
        """Load a LoRA adapter (GGUF). Raises ``CallFailed``; ``Misuse`` for a name in use."""
        if name in self.adapters:
            raise Misuse(f"an adapter {name!r} is loaded")
        with self.lock:
            found = self._lib.llama_adapter_lora_init(self._model, path.encode())
        if found == ffi.NULL:
            raise CallFailed("llama_adapter_lora_init", -1, self._library.errors())
        self.adapters[name] = (found, scale)

    def use_adapter(self, name: str | None, entry: int) -> None:
        """Compute with an adapter, or the base model, from the next step on.

        A context has one for all of its sequences. Raises ``Misuse`` where it is not loaded, or
        where runs of other entries use another one.
        """
        if name is not None and name not in self.adapters:
            raise Misuse(f"adapter {name!r} is not loaded")
        with self.lock:
            if name == self._adapter:
                return
            if self.running - {entry}:
                raise Misuse(
                    f"adapter {name!r} cannot be used beside {self._adapter!r}, which runs of other"
                    " entries use"
                )
            chosen = [] if name is None else [self.adapters[name]]
            pointers = ffi.new("llama_adapter_lora *[]", [one for one, _ in chosen] or 1)
            scales = ffi.new("float[]", [scale for _, scale in chosen] or 1)
            count = len(chosen)
            code = self._lib.llama_set_adapters_lora(self.pointer, pointers, count, scales)
            if code != 0:
                raise CallFailed("llama_set_adapters_lora", code, self._library.errors())
            self._adapter = name
