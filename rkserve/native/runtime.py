"""What a vendor runtime can do, said without C: the ``Runtime`` protocol and its values.

Calls are synchronous and block. One thread owns the handle; ``abort`` and ``is_running`` may come
from another one. Nothing here knows cffi, asyncio, HTTP or Ray.
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
    """What the sink of a run wants after a token. Stopping is ``abort``, never a verdict."""

    CONTINUE = "continue"
    PAUSE = "pause"


class RunEnd(Enum):
    """How a run ended, as the library showed it."""

    FINISHED = "finished"
    PAUSED = "paused"
    FAILED = "failed"


# Called by the library of 1.3.0 where a model has no tokenizer of its own: text to token ids.
Tokenize = Callable[[str], Sequence[int]]
# Called where a model has no embedding layer: token ids to float32 rows, one per id, as raw bytes.
Embed = Callable[[tuple[int, ...]], bytes]


@dataclass(frozen=True, slots=True)
class LoadParams:
    """What ``init`` is told. ``max_new_tokens`` is the ceiling of every run on 1.2.x.

    ``cpus`` are the big cores that the library may use; empty leaves its own default.
    ``n_batch`` is how many inputs each run takes, neither more nor fewer. ``embed_flash`` keeps the
    embedding table on disk; None leaves the library's default. ``image_tags`` (start, end, content)
    surround images on 1.2.x, which takes them here and not with the input. ``ignore_eos_token``,
    ``tokenize`` and ``embed`` exist since 1.3.0.
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
    """What an engine sees with: an encoder, its library, and what the two are known to be.

    The encoder makes ``tokens`` rows of an image of ``width`` times ``height`` pixels. ``tags``
    (start, end, content) surround them. Rows of up to ``cache_bytes`` are kept.
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
    """Token ids, taken verbatim: no template is applied."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Text that the runtime tokenizes itself, after its chat template if one is set."""

    text: str
    role: str = "user"
    enable_thinking: bool = False


@dataclass(frozen=True, slots=True)
class EmbedInput:
    """Embeddings instead of ids: float32 ``[n_tokens][embedding size]``, row-major, raw bytes.

    The library reads what the model's embedding size says, unchecked: the bytes must divide by
    ``n_tokens`` into whole rows, and their size is the caller's word.
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

    ``n_tokens`` are those of one frame, ``n_frames`` those of one video.
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
    """Text with one ``<image>`` or ``<video>`` for each image or video that comes with it."""

    text: str
    image: Image | None = None
    video: Video | None = None
    role: str = "user"
    enable_thinking: bool = False


RunInput = TokenInput | PromptInput | EmbedInput | MultimodalInput


@dataclass(frozen=True, slots=True)
class RunParams:
    """One run. ``sampling`` and ``max_new_tokens`` of None leave the values of init.

    ``inputs`` are exactly ``n_batch`` of the load. With ``keep_history`` an input is appended to
    the live context, which then also keeps what is generated; without it the context is dropped
    when the run finishes. ``adapter`` is the name that ``load_adapter`` gave; None is the base
    model. The KV cache is written to the file ``save_cache`` when the run ends. A live context
    that another adapter computed has to be cleared before a run with ``keep_history``.

    A paused handle takes one kind of run: ``resume``, which appends its input and goes on. It has
    to be asked for, because the library would continue the old text under any new prompt.
    """

    inputs: tuple[RunInput, ...]
    keep_history: bool = False
    sampling: Sampling | None = None
    max_new_tokens: int | None = None
    resume: bool = False
    adapter: str | None = None
    save_cache: str | None = None


class EvaluateMode(Enum):
    """What ``evaluate`` computes for every position of its input."""

    HIDDEN = "the last hidden layer"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Matrix:
    """float32 ``[rows][columns]``, row-major raw bytes: a copy, the library's own is gone."""

    rows: int
    columns: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """What an encoder hands to a decoder; float32 raw bytes, ``positions`` are int32."""

    k_cache: bytes
    v_cache: bytes
    mask: bytes
    positions: bytes
    n_tokens: int


class TokenPiece(NamedTuple):
    """One token as the callback brought it; a tuple, because one is made for every token.

    ``text`` holds raw bytes and may end inside a UTF-8 character; it is empty for a token whose
    text the library still holds back (``waiting``) or hides (special tokens).
    """

    token_id: int
    text: bytes
    waiting: bool = False


# What one callback brought: a piece per entry of the batch, None for an entry that has ended.
Step = tuple[TokenPiece | None, ...]


@dataclass(frozen=True, slots=True)
class Perf:
    """The runtime's own figures of a run, which it fills at FINISH only; zeros without one.

    ``encode_ms`` are ours: what the images took before the run.
    """

    prefill_ms: float = 0.0
    prefill_tokens: int = 0
    decode_ms: float = 0.0
    decode_tokens: int = 0
    memory_mb: float = 0.0
    encode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a run left behind. ``return_code`` is the library's."""

    end: RunEnd
    perf: Perf
    return_code: int


Sink = Callable[[Step], SinkAction]


class Runtime(Protocol):
    """One handle of the vendor's library. Every method raises ``Misuse`` in the wrong state."""

    @property
    def release(self) -> str:
        """The detected release, for example ``1.2.3``."""

    @property
    def per_run_sampling(self) -> bool:
        """Whether ``RunParams`` may carry sampling and a token limit (1.3.0 and later)."""

    @property
    def quirks(self) -> Mapping[str, bool]:
        """What this release may be trusted with, by name; see ``native.quirks``."""

    def load(self, params: LoadParams) -> None:
        """Create the handle. Raises ``LoadFailed``."""

    def run(self, params: RunParams, sink: Sink) -> RunOutcome:
        """Generate until the end, a pause or an abort; ``sink`` is called for every step.

        An exception of the sink aborts the run and is raised here after the library returned. A
        resumption that the library refuses is drained: whatever ends FAILED leaves the handle idle.
        """

    def run_async(
        self, params: RunParams, sink: Sink, ended: Callable[[RunOutcome | BaseException], None]
    ) -> None:
        """Start a run on a thread of the library's; ``ended`` is called once, on that thread.

        An asynchronous run cannot be paused. Raises ``Misuse`` on a release whose asynchronous
        runs are broken, and ``CallFailed`` where the library refuses it.
        """

    def poll_async(self) -> bool:
        """Look after an asynchronous run; True while it goes on.

        A run whose input the library cannot read never calls back. Where the library says, twice
        and a moment apart, that nothing is running, ``ended`` is called here, on this thread.
        """

    def drain(self) -> None:
        """End a paused run without resuming it: one token more, then its proper end.

        A full clear of a paused handle is what crashed others. Raises ``CallFailed``.
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
        """Compute one row per position of ``given``, of which only the ``last`` may be wanted.

        Raises ``CallFailed``, ``NothingComputed``, and ``Misuse`` with a batch, or where a quirk
        forbids the combination.
        """

    def abort(self) -> None:
        """Ask a run to end at the next token; does nothing where none is running."""

    def is_running(self) -> bool:
        """Whether the library says that a run is going on."""

    def clear_kv_cache(self, *, keep_system_prompt: bool = False) -> None:
        """Empty the KV cache of an idle handle. Raises ``CallFailed``."""

    def clear_kv_range(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Cut half-open ranges of positions out of a paused handle's KV cache, one per entry.

        An empty range (``(0, 0)``) leaves its entry alone. Raises ``CallFailed``, and ``Misuse``
        for a range that is backwards or outside of the cache.
        """

    def kv_cache_sizes(self) -> tuple[int, ...]:
        """Positions that the KV cache holds, for each entry. Raises ``CallFailed``."""

    def load_adapter(self, path: str, name: str, scale: float = 1.0) -> None:
        """Add a LoRA adapter to an idle handle; nothing takes it away again but ``destroy``.

        Raises ``CallFailed`` where the library refuses the file, ``Misuse`` for a name in use.
        """

    def load_prompt_cache(self, path: str) -> None:
        """Offer a cache file to the next runs without history, in place of the one before.

        The first run that follows says under which adapter the file was computed: its caller has
        to know. A run under another one, or ``evaluate``, has the file released first. Raises
        ``CallFailed``, and ``Misuse`` after an aborted run where a quirk forbids it.
        """

    def release_prompt_cache(self) -> None:
        """Forget the cache file that was loaded. Raises ``CallFailed``."""

    def set_chat_template(self, system: str, prefix: str, postfix: str) -> None:
        """Replace the model's own template for PROMPT input. Raises ``CallFailed``."""

    def set_function_tools(self, system: str, tools: str, response_tag: str) -> None:
        """Describe tools (JSON text) to the model for PROMPT input. Raises ``CallFailed``."""

    def set_cross_attention(self, given: CrossAttention) -> None:
        """Hand over an encoder's output. Raises ``CallFailed``, ``Misuse`` if not loaded for it."""

    def destroy(self) -> None:
        """Free the handle; allowed on an idle or paused one only. Raises ``CallFailed``."""
