"""Frozen values that cross a process: requests, the events of an answer, what controls it.

Nothing here knows how a value travels (pickle between replicas, frames to the engine process).
"""

from __future__ import annotations

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


class FinishReason(str, Enum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


FIRST_LABEL = "default"  # of a base model's weights, until somebody names them


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One version of a LoRA adapter of the model folder, by its content.

    ``digest`` is the sha256 of ``adapters/<name>/<version>/adapter.rkllm``, in hexadecimal: a board
    whose file differs refuses it. ``scale`` is what the adapter is loaded with.
    """

    name: str
    version: str
    digest: str
    scale: float = 1.0

    @property
    def label(self) -> str:
        """The name by which a request asks for exactly this one, and answers say it."""
        return f"{self.name}@{self.version}"

    @property
    def key(self) -> str:
        """The name under which the runtime holds it: two contents or scales never share one."""
        return f"{self.label}-{self.digest[:12]}-{self.scale:g}"


class TokenOrigin(str, Enum):
    """Where a token after the prompt comes from."""

    GENERATED = "generated"  # by the model
    APPENDED = "appended"  # the answer's own words, by an edit or a hook
    INJECTED = "injected"  # context that is not part of the answer


@dataclass(frozen=True, slots=True)
class TranscriptToken:
    """One token after the prompt.

    ``waiting``: its text comes with that of the tokens behind it. ``cleared``: a range clear took
    it out of the context; what it says in the answer stays. ``scored`` is there where logprobs were
    asked for and the model has chosen it.
    """

    token_id: int
    data: bytes
    kind: TokenOrigin = TokenOrigin.GENERATED
    waiting: bool = False
    cleared: bool = False
    scored: Scored | None = None

    @property
    def unfinished(self) -> bool:
        """The model's beginning of a character, of which nothing was shown."""
        return self.waiting and self.kind is TokenOrigin.GENERATED


@dataclass(frozen=True, slots=True)
class Bound:
    """The weights of an answer so far: from which token on it is which version, by labels.

    ``adapter`` is the one that its runs have now, bound by a line of ``line_epoch``.
    """

    marks: tuple[tuple[int, str], ...] = ()
    adapter: AdapterRef | None = None
    line_epoch: int = 0


@dataclass(frozen=True, slots=True)
class FailoverState:
    """What boards before have made of a generation, which another one goes on with.

    ``slots`` come after the prompt, which is ``prompt_ids`` where an edit has changed it. The
    client has ``text`` of the answer, and all ids of the slots that belong to it. ``bound`` of None
    has no token yet. ``paused`` is how it rests; with ``pause_over`` the last token's own pause, if
    it asks for one, was made already. It goes on for the ``times``-th time. One that is a
    ``suspect`` had the run that a board was lost in: it shares its next one with nobody. The
    client has the logprobs of the prompt if it was ``scored``.
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


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks what it thinks before it answers, at the beginning of an answer.

    ``begun``: the prompt has opened the block already. After ``max_tokens`` within it
    ``closing_ids`` end it, which say ``closing``; None lets the model think for as long as it
    likes. ``mark_ids`` are those of the mark ``close`` alone. In text mode nobody knows ids, and
    both are empty.
    """

    open: str
    close: str
    begun: bool = False
    mark_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    closing: str = ""
    closing_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation: a transcript to continue and how.

    ``prompt_ids`` are token ids of the model's vocabulary, at least one. A model folder without a
    tokenizer is served in text mode: ``prompt_ids`` is empty then and ``prompt_text`` is the whole
    rendered prompt, tokenized by the runtime. ``sampling`` is complete;
    ``sampling_asked`` names the fields that the client set itself, so that a runtime which cannot
    change them says so. ``max_tokens`` counts generated tokens; it is 0 where only the prompt's
    logprobs are wanted. ``stop`` holds non-empty strings.

    ``stepwise`` is there where the runtime's own sampling cannot do what was asked for: the answer
    is then made of single steps, with all of ``sampling`` but mirostat, on every release.

    ``adapter`` of None is the base model. ``native_pause`` starts the run so that the runtime
    itself can pause it with its KV cache kept, at the price of no reuse of the live context. It
    pauses by itself after text that completes one of ``pause_on_text``, or after one of
    ``pause_on_ids``. ``use_cache`` names a prompt cache to begin from.

    With ``line`` (the name of an adapter) ``adapter`` is None until the board binds the request to
    the version that it serves, by the ``session`` it belongs to; a board that has not adopted
    ``min_epoch`` refuses it. ``keep_version`` forbids to switch it to another version later. One
    that is not ``patient`` is refused by a board that sleeps: another one is awake.

    A prompt with ``images`` is one in text mode too, also of a model with a tokenizer: its text has
    one ``<image>`` for each of them, in their order. ``counted`` tokens are what it should have.

    With ``embeds`` they are the prompt, and ``prompt_text`` is empty. Such an answer is generated
    in one go: there are no embeddings of its own tokens to continue from.

    With the states of an ``encoder`` the prompt is ``decoder_ids`` and ``prompt_text`` is empty, or
    in text mode the prompt is ``prompt_text``. Such an answer is generated in one go too: the KV
    cache depends on these states, and token ids do not tell it from others.

    ``once``: nobody will go on from the answer, so that its KV cache is not worth a file. It shares
    none with requests of another ``salt``; see ``origins``.

    ``thinking`` is there where the model may think before it answers. ``continued`` is what was
    generated of it elsewhere. All limits and counts are those of the whole answer.

    One of ``stop_ids`` ends the answer as an EOS token does. With ``include_stop`` the text that
    ended it, of a stop string or of one of ``stop_ids``, is part of the answer.
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
    embeds: Embeds | None = None
    encoder: EncoderStates | None = None
    decoder_ids: tuple[int, ...] = ()

    @property
    def in_one_go(self) -> bool:
        """Return whether the answer cannot go on from what was generated before."""
        return self.embeds is not None or self.encoder is not None


@dataclass(frozen=True, slots=True)
class EmbedRequest(GenerateRequest):
    """Vectors of texts instead of an answer; it is sent, queued and bound as a generation is.

    Each of ``inputs`` has at least one token id. In text mode ``texts`` are there in their place.
    ``prompt_ids`` are empty, and ``max_tokens`` is 0.
    """

    inputs: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    pooling: Pooling = Pooling.LAST


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation. ``cached_tokens`` of the prompt were not prefilled again.

    ``reasoning_tokens`` of the answer are what the model thought first, with the marks around it.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """What the board measured, in milliseconds; prefill and decode are the runtime's own figures.

    ``queue_ms`` is the wait for the board, ``paused_ms`` the time between pauses and resumptions.
    ``encode_ms`` went into images before the prefill. ``prefill_tokens`` were really prefilled. A
    generation that was interrupted adds up its runs; the runtime says nothing of a run that it
    paused, so that one is measured by the board's clock.
    ``batch`` is how many generations shared the run at most (all times are the board's then), and
    ``batch_wait_ms`` what this one waited for the batch to fill. Of one that was ``continued`` so
    many times on other boards, or on the same one after it had failed, the figures are those of the
    last board, and ``lost_ms`` is the time from each loss to the next event of the answer.
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


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of an answer: the board has taken the request, started or queued it.

    ``sampling_ignored`` names the asked-for fields that this runtime cannot change per run.
    ``version`` is that of the weights that it would start with now: ``name@version`` of an adapter,
    or the label of the base model. ``epoch`` is the one that the board obeys. ``adapter`` is that
    version, as a line of ``line_epoch`` has chosen it.
    """

    board_id: str
    release: str
    queued_ahead: int
    sampling_ignored: tuple[str, ...] = ()
    version: str = FIRST_LABEL
    epoch: int = 0
    adapter: AdapterRef | None = None
    line_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Splice:
    """What comes after the prompt is changed: ``slots`` follow the first ``keep`` of before.

    ``prompt_ids`` are the prompt's own as an edit has left them; None where it did not touch them.
    """

    keep: int
    slots: tuple[TranscriptToken, ...]
    prompt_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that is certain, with the ids generated since the last delta (text may be empty).

    An edit may take back what was given out: ``retract`` characters at the end of the answer so
    far are void, before ``text`` is added.

    Whoever has all deltas can let another board go on. Mostly each id has its own part of ``text``:
    a single one all of it, several so many characters each as ``lengths`` say. Where that is not so
    (hooks, text that is held back, characters of several tokens, edits) ``splice`` says what the
    transcript has become. ``bound`` is there where the weights have changed. A delta that is made
    while the generation is ``paused``, by an edit, does not end the pause; any other one does, also
    an empty one.

    ``logprobs`` were asked for: one for each id, None for one that the model has not chosen.
    ``prompt`` has those of the prompt's ids from its second on, once.
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
        """Whether it only adds ids, each with its own part of the text."""
        return not (self.retract or self.splice or self.bound or self.paused or self.prompt)

    @property
    def parts(self) -> tuple[int, ...]:
        """How many characters of the text each id of one without a ``splice`` has."""
        if self.lengths or not self.token_ids:
            return self.lengths
        return (len(self.text), *[0] * (len(self.token_ids) - 1))


def merged(first: Delta, second: Delta) -> Delta | None:
    """Return two deltas that follow each other as one; None where that would lose something."""
    if not (first.plain and second.plain):
        return None
    if any(delta.text and not delta.token_ids for delta in (first, second)):
        return None
    ids = (*first.token_ids, *second.token_ids)
    lengths = (*first.parts, *second.parts) if len(ids) > 1 else ()
    logprobs = (*first.logprobs, *second.logprobs)
    return Delta(first.text + second.text, ids, lengths=lengths, logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class Paused:
    """The generation has paused; nothing follows until it is resumed or ends.

    ``by`` is the reason of the hook or the entry of ``pause_on`` that paused it, and None for a
    call. ``tokens`` are those of the answer so far.
    """

    by: str | None
    tokens: int
    kv: Kv


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The tokens ``[start, end)`` of an answer, generated with one version of the weights."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of an answer that ended well. ``versions`` cover all of its tokens, in order.

    ``stopped_by`` is the stop string that ended it, None where something else did.
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    versions: tuple[VersionSpan, ...] = ()
    stopped_by: str | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """One vector per text of an ``EmbedRequest``, in their order: float32 raw bytes, pooled, and
    otherwise as they were computed. ``Finished`` follows.
    """

    vectors: tuple[bytes, ...]


Event = Accepted | Delta | Paused | Embedded | Finished


class Kv(str, Enum):
    """What became, or will become, of the KV cache of an interrupted generation."""

    KEPT = "kept"
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class Edit:
    """A change to a paused generation, applied in this order.

    ``clear`` removes the half-open ranges of context positions ``[start, end)`` from the KV cache;
    the answer's text stays. ``replace_last`` takes back so many tokens of the answer. ``ids`` are
    then appended: as the answer's own words, given out as ``text``; or with ``injected`` as context
    that is not part of the answer, such as the result of a tool.
    """

    replace_last: int = 0
    ids: tuple[int, ...] = ()
    text: str = ""
    injected: bool = False
    clear: tuple[tuple[int, int], ...] = ()


class ControlAction(str, Enum):
    """What can be asked of a generation."""

    PAUSE = "pause"
    EDIT = "edit"
    RESUME = "resume"
    ABORT = "abort"
