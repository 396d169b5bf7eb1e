"""Frozen values that cross process borders: requests, events of an answer, and its control.

Transport (pickle between replicas, frames to the engine process) is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from rkserve.core.run_params import (
    Embeds,
    EncoderStates,
    Picture,
    Pooling,
    Sampling,
    Scored,
    Stepwise,
)
from rkserve.core.skew import crosses_versions


class FinishReason(str, Enum):
    """The reason for an answer's end, in OpenAI's terms."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    FILTERED = "content_filter"  # of upstreams only: they left out the rest of the answer


FIRST_LABEL = "default"  # of a base model's weights, until they are given a name


@crosses_versions
@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One version of a LoRA adapter, identified by its content.

    ``digest`` is the sha256 of ``adapters/<name>/<version>/adapter.rkllm``, in hexadecimal; a board
    whose file differs refuses it. ``scale`` is the scale that the adapter is loaded with.
    """

    name: str
    version: str
    digest: str
    scale: float = 1.0

    @property
    def label(self) -> str:
        """The name by which requests address exactly this version; answers contain it."""
        return f"{self.name}@{self.version}"

    @property
    def key(self) -> str:
        """Its name in the runtime; two contents or scales never share one."""
        return f"{self.label}-{self.digest[:12]}-{self.scale:g}"


class TokenOrigin(str, Enum):
    """The origin of a token after the prompt."""

    GENERATED = "generated"  # by the model
    APPENDED = "appended"  # part of the answer, by an edit or a hook
    INJECTED = "injected"  # context that is not part of the answer


@crosses_versions
@dataclass(frozen=True, slots=True)
class TranscriptToken:
    """One token after the prompt.

    ``waiting``: its text comes with that of later tokens. ``cleared``: a range clear removed it
    from the context; its text in the answer stays. ``scored`` is set if log-probabilities were
    requested and the model chose the token.
    """

    token_id: int
    data: bytes
    kind: TokenOrigin = TokenOrigin.GENERATED
    waiting: bool = False
    cleared: bool = False
    scored: Scored | None = None

    @property
    def unfinished(self) -> bool:
        """True for the model's beginning of a character that has not been emitted."""
        return self.waiting and self.kind is TokenOrigin.GENERATED


@crosses_versions
@dataclass(frozen=True, slots=True)
class Bound:
    """The weights that generated an answer so far: token index and version name of each change.

    ``adapter`` is the current one, chosen at epoch ``line_epoch`` of its versions.
    """

    marks: tuple[tuple[int, str], ...] = ()
    adapter: AdapterRef | None = None
    line_epoch: int = 0


@crosses_versions
@dataclass(frozen=True, slots=True)
class FailoverState:
    """The progress of a generation on earlier boards, from which another board continues.

    ``slots`` follow the prompt, which is ``prompt_ids`` if an edit changed it. The client has
    ``text`` of the answer and all its IDs. ``bound`` of None means no token yet. ``paused`` is its
    pause; with ``pause_over`` the pause requested by the last token is already over. This is
    continuation number ``times``. A ``suspect`` was in the run during which a board was lost, and
    shares its next run with no other generation. With ``scored`` the client already has the
    log-probabilities of the prompt.
    """

    slots: tuple[TranscriptToken, ...] = ()
    text: str = ""
    prompt_ids: tuple[int, ...] | None = None
    bound: Bound | None = None
    paused: Paused | None = None
    pause_over: bool = False
    times: int = 1
    suspect: bool = False
    scored: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far."""
        return sum(slot.kind is not TokenOrigin.INJECTED for slot in self.slots)


@crosses_versions
@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around a model's reasoning at the beginning of an answer.

    ``begun``: the prompt already contains the opening mark. After ``max_tokens`` of reasoning it is
    ended with ``closing_ids``, whose text is ``closing``; None means no limit. ``mark_ids`` are
    those of the mark ``close`` alone. In text mode the IDs are unknown, and both are empty.
    """

    open: str
    close: str
    begun: bool = False
    mark_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    closing: str = ""
    closing_ids: tuple[int, ...] = ()


# The prefill that a fetched file saves takes this many times as long as the fetch at least. It
# takes processor time of two boards and the network, and keeps a conversation in two places.
FETCH_GAIN = 2.0


@crosses_versions
@dataclass(frozen=True, slots=True)
class CacheSource:
    """A board with a prompt cache file, for another board that fetches it from there.

    ``key`` opens that board's cache files and nothing else of its channel, ``fingerprint`` is the
    SHA-256 of its certificate, empty where nothing is encrypted. ``tokens`` of the prompt are
    expected in the file. The Router expects the prefill of a token to take ``prefill_ms`` on the
    board that fetches, which may have no measurement yet.
    """

    board_id: str
    host: str
    port: int
    tokens: int
    key: bytes = field(repr=False)  # must not be logged
    fingerprint: bytes = b""
    prefill_ms: float = 0.0


@crosses_versions
@dataclass(frozen=True, slots=True)
class CacheQuery:
    """A request of a board for another one's prompt cache file.

    It is for the file that shares most with ``ids``, computed under ``origin``. Both boards have
    the same ``compatibility``, a hash of all on which a file depends.
    """

    compatibility: int
    origin: str | None
    ids: tuple[int, ...]


@crosses_versions
@dataclass(frozen=True, slots=True)
class CacheOffer:
    """The file that answers a ``CacheQuery``: its positions, size and SHA-256."""

    ids: tuple[int, ...]
    file_bytes: int
    sha256: str


@crosses_versions
@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation: a transcript to continue and its options.

    ``prompt_ids`` are token IDs of the model's vocabulary, at least one. A model folder without a
    tokenizer is served in text mode: ``prompt_ids`` is empty and ``prompt_text`` is the whole
    rendered prompt, tokenized by the runtime. ``sampling`` is complete; ``sampling_asked`` names
    the fields set by the client, so that a runtime that cannot change them can report it.
    ``max_tokens`` counts generated tokens; it is 0 if only the prompt's log-probabilities are
    wanted. ``stop`` holds non-empty strings.

    ``stepwise`` is set if the runtime's own sampling cannot serve the request: the answer is then
    generated in single steps, with all of ``sampling`` except mirostat, on every release.

    ``adapter`` of None is the base model. ``native_pause`` starts the run so that the runtime
    itself can pause it with its KV cache kept, at the price of no reuse of the live context. The
    run pauses itself after text that completes one of ``pause_on_text``, or after one of
    ``pause_on_ids``. ``use_cache`` names a prompt cache to start from.

    With ``line`` (the name of an adapter) ``adapter`` is None until the board binds the request to
    the version that it serves, by the request's ``session``; a board that has not adopted
    ``min_epoch`` refuses it. ``keep_version`` forbids a later switch to another version. A sleeping
    board refuses a request that is not ``patient``: another board is awake.

    A prompt with ``images`` is in text mode too, also for a model with a tokenizer: its text has
    one ``<image>`` for each of them, in their order. ``counted`` is its expected number of tokens.

    ``embeds`` replace the prompt, and ``prompt_text`` is empty. Such an answer cannot be continued:
    there are no embeddings of its own tokens.

    With the states of an ``encoder`` the prompt is ``decoder_ids`` and ``prompt_text`` is empty, or
    in text mode the prompt is ``prompt_text``. Such an answer cannot be continued either: the KV
    cache depends on these states, which token IDs do not identify.

    ``once``: the answer will not be continued, so its KV cache is not saved to a file. It shares no
    KV cache with requests of another ``salt``; see ``block_hashes``.

    ``thinking`` is set if the model may reason before it answers. ``continued`` is the part
    generated elsewhere. All limits and counts are those of the whole answer.

    One of ``stop_ids`` ends the answer as an EOS token does. With ``include_stop`` the text that
    ended it, of a stop string or of one of ``stop_ids``, is part of the answer.

    ``source`` is a board that holds a prompt cache file for the prompt, where fetching it should be
    faster than the prefill.
    """

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    sampling_asked: tuple[str, ...] = ()
    strict_sampling: bool = False
    stop: tuple[str, ...] = ()
    prompt_text: str | None = None
    adapter: AdapterRef | None = None
    native_pause: bool = False
    pause_on_text: tuple[str, ...] = ()
    pause_on_ids: tuple[int, ...] = ()
    use_cache: str | None = None
    line: str | None = None
    session: str = ""
    min_epoch: int = 0
    keep_version: bool = False
    patient: bool = True
    continued: FailoverState | None = None
    thinking: Thinking | None = None
    stepwise: Stepwise | None = None
    images: tuple[Picture, ...] = ()
    counted: int = 0
    once: bool = False
    salt: str = ""
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False
    source: CacheSource | None = None
    embeds: Embeds | None = None
    encoder: EncoderStates | None = None
    decoder_ids: tuple[int, ...] = ()

    @property
    def in_one_go(self) -> bool:
        """True if the answer cannot be continued after an interruption."""
        return self.embeds is not None or self.encoder is not None

    @property
    def adapter_name(self) -> str | None:
        """The name of the adapter, bound or not; None is the base model."""
        return self.line if self.adapter is None else self.adapter.name


@crosses_versions
@dataclass(frozen=True, slots=True)
class EmbedRequest(GenerateRequest):
    """A request for vectors of texts; sent, queued and bound like a generation.

    Each of ``inputs`` has at least one token ID. In text mode ``texts`` replace them.
    ``prompt_ids`` are empty, and ``max_tokens`` is 0.
    """

    inputs: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    pooling: Pooling = Pooling.LAST


@crosses_versions
@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation. ``cached_tokens`` of the prompt were not prefilled again.

    ``reasoning_tokens`` of the answer are those of the reasoning, including its marks.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@crosses_versions
@dataclass(frozen=True, slots=True)
class Timings:
    """The board's measurements, in milliseconds; prefill and decode are the runtime's own figures.

    ``queue_ms`` is the wait for the board, ``paused_ms`` the total time of pauses. Images took
    ``encode_ms`` before the prefill. ``cache_ms`` went into prompt cache files, apart from the
    prefill: parking the conversation that this one displaced, reading its own, writing it again.
    ``prefill_tokens`` were actually prefilled. An interrupted
    generation adds up its runs; the runtime reports nothing for a run that it paused, so that one
    is measured by the board's clock. ``batch`` is the largest number of generations that shared the
    run (all times are the board's then), and ``batch_wait_ms`` the wait of this one for the batch
    to fill. ``continued`` counts failovers, to other boards or to the same one after a failure; the
    figures are then those of the last board, and ``lost_ms`` is the time from each loss to the next
    event of the answer. ``boards`` generated the answer, in this order; the Router adds them.
    """

    queue_ms: float
    prefill_ms: float
    prefill_tokens: int
    decode_ms: float
    decode_tokens: int
    memory_mb: float
    paused_ms: float = 0.0
    batch: int = 1
    batch_wait_ms: float = 0.0
    continued: int = 0
    lost_ms: float = 0.0
    encode_ms: float = 0.0
    cache_ms: float = 0.0
    boards: tuple[str, ...] = ()


@crosses_versions
@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of an answer: the board has started or queued the request.

    ``sampling_ignored`` names the requested fields that this runtime cannot change per run.
    ``version`` is that of the weights it would start with now: ``name@version`` of an adapter, or
    the version name of the base weights. ``epoch`` is the one that the board obeys. ``adapter`` is
    that version, chosen at ``line_epoch`` of the adapter's versions. With ``waits`` it is in the
    board's queue, and a ``QueueChange`` follows when it has the board.
    """

    board_id: str
    release: str
    queued_ahead: int
    sampling_ignored: tuple[str, ...] = ()
    version: str = FIRST_LABEL
    epoch: int = 0
    adapter: AdapterRef | None = None
    line_epoch: int = 0
    waits: bool = False


@crosses_versions
@dataclass(frozen=True, slots=True)
class QueueChange:
    """The request has left the board's queue and has the board; or, with ``waits``, it is in the
    queue again, without the board.

    Board time is counted by it; clients do not get it.
    """

    waits: bool


@crosses_versions
@dataclass(frozen=True, slots=True)
class Splice:
    """A replacement of tokens after the prompt: ``slots`` follow the first ``keep`` of the previous
    ones.

    ``prompt_ids`` are the prompt's own after an edit; None if it left them unchanged.
    """

    keep: int
    slots: tuple[TranscriptToken, ...]
    prompt_ids: tuple[int, ...] | None = None


@crosses_versions
@dataclass(frozen=True, slots=True)
class Delta:
    """Final text, with the IDs generated since the last delta (text may be empty).

    An edit may retract emitted text: the last ``retract`` characters of the answer so far are void,
    before ``text`` is appended.

    All deltas together suffice to continue on another board. Usually each ID has its own part of
    ``text``: a single one all of it, several the numbers of characters in ``lengths``. Otherwise
    (hooks, held-back text, characters of several tokens, edits) ``splice`` has the new transcript.
    ``bound`` is set if the weights have changed. A delta made while the generation is ``paused``,
    by an edit, does not end the pause; any other one does, also an empty one.

    ``logprobs``, if requested: one for each ID, None for one that the model did not choose.
    ``prompt`` has those of the prompt's IDs from its second on, once.
    """

    text: str
    token_ids: tuple[int, ...]
    retract: int = 0
    lengths: tuple[int, ...] = ()
    splice: Splice | None = None
    bound: Bound | None = None
    paused: bool = False
    logprobs: tuple[Scored | None, ...] = ()
    prompt: tuple[Scored, ...] = ()

    @property
    def plain(self) -> bool:
        """True if it only appends IDs, each with its own part of the text."""
        return not (self.retract or self.splice or self.bound or self.paused or self.prompt)

    @property
    def parts(self) -> tuple[int, ...]:
        """The number of characters of each ID's text in a delta without a ``splice``."""
        if self.lengths or not self.token_ids:
            return self.lengths
        return (len(self.text), *[0] * (len(self.token_ids) - 1))


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of a tool call that an upstream has parsed: its name first, then its arguments.

    ``index`` counts the calls of the answer; ``arguments`` are JSON text.
    """

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class UpstreamDelta(Delta):
    """A delta of an upstream, which parses its answers itself and names no token ID.

    ``reasoning`` precedes ``text``, and ``calls`` follow it. ``counted`` is the number of tokens:
    one for each event of the upstream, and with the last delta the rest of the number in its usage.
    """

    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    counted: int = 0


def merged(first: Delta, second: Delta) -> Delta | None:
    """Return two consecutive deltas as one; None if that would lose information."""
    if isinstance(first, UpstreamDelta) and isinstance(second, UpstreamDelta):
        return _merged_parts(first, second)
    if not (first.plain and second.plain):
        return None
    if any(delta.text and not delta.token_ids for delta in (first, second)):
        return None
    ids = (*first.token_ids, *second.token_ids)
    lengths = (*first.parts, *second.parts) if len(ids) > 1 else ()
    logprobs = (*first.logprobs, *second.logprobs)
    return Delta(first.text + second.text, ids, lengths=lengths, logprobs=logprobs)


def _merged_parts(first: UpstreamDelta, second: UpstreamDelta) -> UpstreamDelta | None:
    """Return two deltas of an upstream as one; None if their parts would change their order."""
    if (first.text and second.reasoning) or (first.calls and (second.text or second.reasoning)):
        return None
    return UpstreamDelta(
        first.text + second.text,
        (),
        reasoning=first.reasoning + second.reasoning,
        calls=(*first.calls, *second.calls),
        counted=first.counted + second.counted,
    )


# Gets a delta in the turn of the loop in which it was made.
PassDelta = Callable[[Delta], None]


@crosses_versions
@dataclass(frozen=True, slots=True)
class Paused:
    """The generation has paused; nothing follows until it is resumed or ends.

    ``by`` is the reason given by the hook, or the entry of ``pause_on`` that matched; None for a
    call. ``tokens`` are those of the answer so far.
    """

    by: str | None
    tokens: int
    kv: Kv


@crosses_versions
@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The tokens ``[start, end)`` of an answer, generated with one version of the weights."""

    version: str
    start: int
    end: int


@crosses_versions
@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a successful answer. ``versions`` cover all of its tokens, in order.

    ``stopped_by`` is the stop string that ended it, None if something else did.
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    versions: tuple[VersionSpan, ...] = ()
    stopped_by: str | None = None


@crosses_versions
@dataclass(frozen=True, slots=True)
class Embedded:
    """One vector per text of an ``EmbedRequest``, in their order: float32 raw bytes, pooled,
    otherwise as computed. ``Finished`` follows.
    """

    vectors: tuple[bytes, ...]


Event = Accepted | QueueChange | Delta | Paused | Embedded | Finished


class Kv(str, Enum):
    """The fate of an interrupted generation's KV cache."""

    KEPT = "kept"
    RECOMPUTED = "recomputed"


@crosses_versions
@dataclass(frozen=True, slots=True)
class Edit:
    """A change to a paused generation, applied in this order.

    ``clear`` removes the half-open ranges of context positions ``[start, end)`` from the KV cache;
    the answer's text stays. ``replace_last`` removes that many tokens of the answer. ``ids`` are
    then appended: as part of the answer, emitted as ``text``, or with ``injected`` as context that
    is not part of the answer, such as the result of a tool.
    """

    replace_last: int = 0
    ids: tuple[int, ...] = ()
    text: str = ""
    injected: bool = False
    clear: tuple[tuple[int, int], ...] = ()


class ControlAction(str, Enum):
    """A control call on a generation."""

    PAUSE = "pause"
    EDIT = "edit"
    RESUME = "resume"
    ABORT = "abort"
