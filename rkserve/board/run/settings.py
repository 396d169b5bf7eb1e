"""The settings of one board. Values only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from rkserve.board.answer.hooks import HookFactory
from rkserve.board.rules.hang_limits import RunTimeouts
from rkserve.board.storage.prompt_cache import CacheStore
from rkserve.core.errors import RequestError
from rkserve.core.messages import CacheOffer, CacheQuery, CacheSource, GenerateRequest
from rkserve.core.run_params import EncoderShape, Guided, Sampling

# Yields the offer of another board's prompt cache file, then its content. Raises ``RkserveError``
# and ``OSError``.
FetchCache = Callable[[CacheSource, CacheQuery], AsyncGenerator[CacheOffer | bytes, None]]


@dataclass(frozen=True, slots=True)
class BoardSettings:
    """The settings of one board. Times in seconds, lengths in tokens.

    ``sampling`` is loaded with the model: on 1.2.x every request gets it. ``model_dir`` is the
    model folder whose adapters are served; None serves none. ``staged_dir`` is the board's folder
    for transferred adapters, which have priority; None accepts none. ``hooks`` are put around every
    generation, before its own. A ``governed`` board serves nothing before it has adopted a desired
    state (``Board.adopt``). ``load_patience_s`` is how long an adapter trial waits for the end of a
    run before interrupting it, and
    ``adapter_load_s`` how long the library may read an adapter, perhaps from a slow card.
    ``asleep_file`` marks a sleeping board for its next replica, and
    ``base_file`` the loaded base weights of ``weights_dir``, the folder of transferred ones. Base
    weights that failed to load rest for ``base_rest_s`` before the next try, then for twice that.
    In ``text_mode`` prompts are texts, and token ids are not known; otherwise ``tokenizer_file``
    gives their texts, where answers are made of single steps. A board with ``vision`` takes images,
    and one with ``hidden_size`` embeddings of that size. The decoder of an encoder-decoder model
    needs states of the shape ``encoder``, of up to ``encoder_tokens`` tokens. ``guided`` selects
    how answers with a grammar are made. ``ledgers_dir`` is the board's folder for copies of the
    ledger; None keeps none. ``own_file`` is the base model in the model folder, and
    ``own_digest_file`` caches its sha256. Each ``engine_growth_period_s`` an engine that has grown
    by more than ``engine_growth_bytes`` is replaced; 0: none is. ``disk_bytes_per_s`` is the
    rate of a simulated disk of ``caches``; that of a real one is measured at the start. Boards
    exchange files of ``caches`` by ``fetch_cache`` at up to ``share_bytes_per_s``; 0: they do not.
    """

    board_id: str
    model: str
    context_len: int
    eos_ids: frozenset[int]
    sampling: Sampling = field(default_factory=Sampling)
    platform: str = ""
    node: str = ""
    library: str = ""
    queue_limit: int = 16
    queue_timeout_s: float = 300.0
    patience: RunTimeouts = field(default_factory=RunTimeouts)
    crash_limit: int = 3
    crash_window_s: float = 60.0
    quarantine_s: float = 60.0
    silence_timeout_s: float = 10.0
    engine_growth_bytes: int = 0
    engine_growth_period_s: float = 30.0
    n_batch: int = 1
    batch_window_s: float = 0.02
    pause_hold_s: float = 30.0
    pause_timeout_s: float = 600.0
    max_paused: int = 32
    model_dir: Path | None = None
    staged_dir: Path | None = None
    max_adapters: int = 4
    max_adapter_bytes: int | None = None
    kv_position_bytes: int | None = None
    caches: CacheStore | None = None
    disk_bytes_per_s: float | None = None
    share_bytes_per_s: float = 0.0
    fetch_cache: FetchCache | None = None
    park: bool = True
    park_min_tokens: int = 256
    vocab_size: int | None = None
    tokenizer_file: Path | None = None
    hooks: tuple[HookFactory, ...] = ()
    governed: bool = False
    load_patience_s: float = 2.0
    adapter_load_s: float = 60.0
    text_mode: bool = False
    vision: bool = False
    hidden_size: int | None = None
    encoder: EncoderShape | None = None
    encoder_tokens: int = 0
    guided: Guided = Guided.AUTO
    weights_dir: Path | None = None
    base_file: Path | None = None
    base_rest_s: float = 30.0
    asleep_file: Path | None = None
    ledgers_dir: Path | None = None
    own_file: Path | None = None
    own_digest_file: Path | None = None

    def ignored(self, request: GenerateRequest) -> tuple[str, ...]:
        """Return the requested sampling values that differ from fixed ones of the runtime."""
        if request.stepwise is not None:
            return ()  # rkserve samples by itself
        return tuple(
            name
            for name in request.sampling_asked
            if getattr(request.sampling, name) != getattr(self.sampling, name)
        )

    def check_steps(self, request: GenerateRequest, *, apart: bool = False) -> None:
        """Raise ``RequestError`` where an answer cannot be made of single steps here.

        ``apart``: of several requests at once, each has a run of its own.
        """
        if request.stepwise is None:
            return
        if self.n_batch > 1 and not apart:
            why = "its boards serve batches, of which RKLLM computes no logits"
        elif self.text_mode or self.tokenizer_file is None:
            why = "it is served without a tokenizer"
        elif not self.eos_ids:
            why = "its folder names no tokens that end an answer (eos_token_ids)"
        else:
            return
        raise RequestError(
            f"The model '{self.model}' can only generate as RKLLM itself does, without seed, "
            f"logprobs, logit_bias, min_p, best_of and grammars: {why}."
        )

    def check_images(self, request: GenerateRequest) -> None:
        """Raise ``RequestError`` for images that the model or this request does not allow."""
        if request.images and not self.vision:
            raise RequestError(f"The model '{self.model}' takes no images.", "messages")
        if request.images and (request.stepwise is not None or request.use_cache is not None):
            raise RequestError(
                "Answers about images are generated as RKLLM itself does, and from no prompt cache."
            )

    def check_embeds(self, request: GenerateRequest) -> None:
        """Raise ``RequestError`` for embeddings that the library would read beyond their end."""
        embeds = request.embeds
        if embeds is None:
            return
        if embeds.columns != self.hidden_size:
            known = "not known" if self.hidden_size is None else f"{self.hidden_size}"
            raise RequestError(
                f"Embeddings of {embeds.columns} numbers do not fit the model '{self.model}': its "
                f"hidden_size is {known} on this board.",
                "prompt_embeds",
            )
        if self.n_batch > 1 or request.stepwise is not None or request.use_cache is not None:
            raise RequestError(
                "Answers to 'prompt_embeds' are generated as RKLLM itself does, from no prompt "
                "cache, and not on boards that serve batches (n_batch).",
                "prompt_embeds",
            )

    def check_encoder(self, request: GenerateRequest) -> None:
        """Raise ``RequestError`` for states that the library would read beyond their end.

        A request without states must not be answered from those of another one, which the library
        keeps.
        """
        states = request.encoder
        if states is None and self.encoder is None:
            return
        if states is None:
            why = "needs 'cross_attention', an encoder's output, with every prompt"
        elif self.encoder is None:
            why = "takes no 'cross_attention'"
        elif states.shape != self.encoder or not 1 <= states.tokens <= self.encoder_tokens:
            why = f"takes 'cross_attention' of other sizes than those on board {self.board_id}"
        elif request.embeds is not None or request.images or request.stepwise is not None:
            why = "generates as RKLLM itself does, and from text or token ids only"
        elif request.use_cache is not None:
            why = "uses no prompt cache with 'cross_attention'"
        else:
            return
        raise RequestError(f"The model '{self.model}' {why}.", "cross_attention")
