"""The ``Runtime`` protocol of a vendor runtime, and its values, without C.

Calls block. One thread owns the handle; ``abort`` and ``is_running`` may be called from another
thread. This module knows no cffi, asyncio, HTTP or Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from rkserve.core.run_params import Sampling


class CallState(IntEnum):
    """The third argument of the result callback, by the vendor's numbers."""

    NORMAL = 0
    WAITING = 1
    FINISH = 2
    ERROR = 3


class SinkAction(Enum):
    """The return value of a run's sink. A run is stopped by ``abort``, not by a sink action."""

    CONTINUE = "continue"
    PAUSE = "pause"


class RunEnd(Enum):
    """The end of a run, as the library reported it."""

    FINISHED = "finished"
    PAUSED = "paused"
    FAILED = "failed"


# Text to token ids; called by the library (1.3.0) for a model without a tokenizer of its own.
Tokenize = Callable[[str], Sequence[int]]
# Token ids to float32 rows, one per id, as raw bytes; called for a model without embedding layer.
Embed = Callable[[tuple[int, ...]], bytes]


@dataclass(frozen=True, slots=True)
class LoadParams:
    """The parameters of ``init``. On 1.2.x ``max_new_tokens`` limits every run.

    ``cpus`` are the big cores that the library may use; empty leaves the library's default. Each
    run takes exactly ``n_batch`` inputs. ``embed_flash`` keeps the embedding table on disk; None
    leaves the library's default. ``image_tags`` (start, end, content) surround images on 1.2.x,
    which takes them here and not with the input. ``ignore_eos_token``, ``tokenize`` and ``embed``
    exist since 1.3.0.
    """

    model_path: str
    max_context_len: int
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    n_keep: int = -1
    skip_special_token: bool = True
    base_domain_id: int = 0
    cpus: tuple[int, ...] = ()
    n_batch: int = 1
    embed_flash: bool | None = None
    use_cross_attn: bool = False
    ignore_eos_token: bool = False
    image_tags: tuple[str, str, str] = ("", "", "")
    tokenize: Tokenize | None = None
    embed: Embed | None = None


@dataclass(frozen=True, slots=True)
class VisionParams:
    """An engine's image encoder: library, model file and sizes.

    The encoder turns an image of ``width`` times ``height`` pixels into ``tokens`` rows. ``tags``
    (start, end, content) surround them. The cache holds rows of up to ``cache_bytes``.
    """

    library: Path
    model: Path
    width: int
    height: int
    tokens: int
    tags: tuple[str, str, str]
    cores: int = 1
    cache_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class TokenInput:
    """Token ids, used verbatim: no template is applied."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Text that the runtime tokenizes, after applying its chat template if one is set."""

    text: str
    role: str = "user"
    enable_thinking: bool = False


@dataclass(frozen=True, slots=True)
class EmbedInput:
    """Embeddings instead of ids: float32 ``[n_tokens][embedding size]``, row-major, raw bytes.

    The library reads rows of the model's embedding size without a check: the caller guarantees the
    row size, and the bytes must divide by ``n_tokens`` into whole rows.
    """

    data: bytes
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Image:
    """Embeddings of all images of one prompt: float32 ``[n_images * n_tokens][size]``, raw bytes.

    ``tags`` (start, end, content) go with the input on 1.3.0 and with the load on 1.2.x. ``width``
    and ``height`` are in pixels.
    """

    data: bytes
    n_tokens: int
    n_images: int
    width: int
    height: int
    tags: tuple[str, str, str] = ("", "", "")


@dataclass(frozen=True, slots=True)
class Video:
    """Embeddings of all videos of one prompt (1.3.0): float32, frame by frame, raw bytes.

    ``n_tokens`` is the number of tokens per frame, ``n_frames`` the number of frames per video.
    """

    data: bytes
    n_tokens: int
    n_frames: int
    n_videos: int
    width: int
    height: int
    tags: tuple[str, str, str] = ("", "", "")


@dataclass(frozen=True, slots=True)
class MultimodalInput:
    """Text with one ``<image>`` or ``<video>`` for each of its images or videos."""

    text: str
    image: Image | None = None
    video: Video | None = None
    role: str = "user"
    enable_thinking: bool = False


RunInput = TokenInput | PromptInput | EmbedInput | MultimodalInput


@dataclass(frozen=True, slots=True)
class RunParams:
    """The parameters of one run. ``sampling`` and ``max_new_tokens`` of None keep those of init.

    ``inputs`` has exactly ``n_batch`` entries, or one where entries have runs of their own. With
    ``keep_history`` an input is appended to the
    live context, which then also keeps the generated tokens; without it the context is dropped
    when the run finishes. ``adapter`` is a name given to ``load_adapter``; None is the base model.
    The KV cache is written to the file ``save_cache`` when the run ends. A live context that was
    computed with another adapter has to be cleared before a run with ``keep_history``.

    A paused handle takes one kind of run: ``resume``, which appends its input and continues. The
    flag is explicit because the library would continue the old text under any new prompt.
    """

    inputs: tuple[RunInput, ...]
    keep_history: bool = False
    sampling: Sampling | None = None
    max_new_tokens: int | None = None
    resume: bool = False
    adapter: str | None = None
    save_cache: str | None = None


class EvaluateMode(Enum):
    """The kind of rows that ``evaluate`` computes, one per position of its input."""

    HIDDEN = "the last hidden layer"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Matrix:
    """float32 ``[rows][columns]``, row-major raw bytes, copied out of the library's memory."""

    rows: int
    columns: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Encoder output for a decoder; float32 raw bytes, ``positions`` are int32."""

    k_cache: bytes
    v_cache: bytes
    mask: bytes
    positions: bytes
    n_tokens: int


class TokenPiece(NamedTuple):
    """One token of a callback; a tuple for speed, because one is made for every token.

    ``text`` holds raw bytes and may end inside a UTF-8 character; it is empty for a token whose
    text the library delays (``waiting``) or hides (special tokens).
    """

    token_id: int
    text: bytes
    waiting: bool = False


# The tokens of one callback: one per entry of the batch, None for an entry that has ended.
Step = tuple[TokenPiece | None, ...]


@dataclass(frozen=True, slots=True)
class Perf:
    """The runtime's own figures of a run, which it reports at FINISH only; zeros without FINISH.

    ``encode_ms`` is measured by the engine: the time that encoding the images took before the run.
    """

    prefill_ms: float = 0.0
    prefill_tokens: int = 0
    decode_ms: float = 0.0
    decode_tokens: int = 0
    memory_mb: float = 0.0
    encode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of a run. ``return_code`` is the library's."""

    end: RunEnd
    perf: Perf
    return_code: int


Sink = Callable[[Step], SinkAction]


class Runtime(Protocol):
    """One handle of the vendor's library. Every method raises ``Misuse`` in the wrong state.

    A handle that is loaded for a batch makes runs of ``n_batch`` inputs, which begin and end
    together, or has so many ``entries``, each with runs and a KV cache of its own.
    """

    @property
    def release(self) -> str:
        """The detected release, for example ``1.2.3``; an unlisted one is marked as such."""

    @property
    def per_run_sampling(self) -> bool:
        """True if ``RunParams`` may carry sampling and a token limit (1.3.0 and later)."""

    @property
    def image_tags_at_load(self) -> bool:
        """True if ``LoadParams`` carries the image tags (1.2.x), and not each image."""

    @property
    def quirks(self) -> Mapping[str, bool]:
        """The values of the quirks by name; see ``native.quirks``."""

    @property
    def entries(self) -> Sequence[Runtime]:
        """The entries that may run at the same time, each called by a thread of its own.

        This handle is the first, which loads and destroys, and the only one where a run takes all
        inputs of a batch. Known once a model is loaded.
        """

    def load(self, params: LoadParams) -> None:
        """Create the handle. Raises ``LoadFailed``."""

    def run(self, params: RunParams, sink: Sink) -> RunOutcome:
        """Generate until the end, a pause or an abort; ``sink`` is called for every step.

        An exception of the sink aborts the run and is raised here after the library returned. A
        resumption that the library refuses is drained: every FAILED run leaves the handle idle.
        """

    def run_async(
        self, params: RunParams, sink: Sink, ended: Callable[[RunOutcome | BaseException], None]
    ) -> None:
        """Start a run on a thread of the library; ``ended`` is called once, on that thread.

        An asynchronous run cannot be paused. Raises ``Misuse`` on a release whose asynchronous
        runs are broken, and ``CallFailed`` where the library refuses it.
        """

    def poll_async(self) -> bool:
        """Check an asynchronous run; return True while it continues.

        The library never calls back for a run whose input it cannot read. If it reports twice, a
        moment apart, that no run is going on, ``ended`` is called here, on this thread.
        """

    def drain(self) -> None:
        """End a paused run by one more token and a regular end.

        A full clear of a paused handle crashed in the field. Raises ``CallFailed``.
        """

    def evaluate(
        self,
        given: RunInput,
        mode: EvaluateMode,
        *,
        keep_history: bool = False,
        adapter: str | None = None,
        last: bool = False,
    ) -> Matrix:
        """Compute one row per position of ``given``; with ``last`` only the last row is returned.

        Raises ``CallFailed``, ``NothingComputed``, and ``Misuse`` with a batch, or where a quirk
        forbids the combination.
        """

    def abort(self) -> None:
        """Request the end of the run at its next token; a no-op without a run."""

    def is_running(self) -> bool:
        """Return the library's own report of a running run."""

    def clear_kv_cache(self, *, keep_system_prompt: bool = False) -> None:
        """Empty the KV cache of an idle handle. Raises ``CallFailed``."""

    def clear_kv_range(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Remove half-open ranges of positions from a paused handle's KV cache, one per entry.

        An empty range (``(0, 0)``) leaves its entry as it is. Raises ``CallFailed``, and ``Misuse``
        for a range that is reversed or outside of the cache.
        """

    def kv_cache_sizes(self) -> tuple[int, ...]:
        """Return the number of positions in the KV cache of each entry. Raises ``CallFailed``."""

    def load_adapter(self, path: str, name: str, scale: float = 1.0) -> None:
        """Load a LoRA adapter into an idle handle; only ``destroy`` unloads it.

        Raises ``CallFailed`` if the library refuses the file, ``Misuse`` for a name in use.
        """

    def load_prompt_cache(self, path: str) -> None:
        """Load a cache file for the next runs without history, in place of the previous one.

        The adapter of the first run that follows is taken as the adapter of the file: its caller is
        responsible for that. A run with another adapter, or ``evaluate``, releases the file first.
        Raises ``CallFailed``, and ``Misuse`` after an aborted run where a quirk forbids it.
        """

    def release_prompt_cache(self) -> None:
        """Release the loaded cache file. Raises ``CallFailed``."""

    def set_chat_template(self, system: str, prefix: str, postfix: str) -> None:
        """Replace the model's chat template for PROMPT input. Raises ``CallFailed``."""

    def set_function_tools(self, system: str, tools: str, response_tag: str) -> None:
        """Describe tools (JSON text) to the model for PROMPT input. Raises ``CallFailed``."""

    def set_cross_attention(self, given: CrossAttention) -> None:
        """Set the encoder output. Raises ``CallFailed``; ``Misuse`` if not loaded for it."""

    def destroy(self) -> None:
        """Free the handle; allowed on an idle or paused one only. Raises ``CallFailed``."""
