"""Frozen values that cross a process: requests, the events of an answer, a board's report.

Nothing here knows how a value travels (pickle between replicas, frames to the engine process).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class FinishReason(str, Enum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling values of one generation; ranges are checked at the API's border.

    ``temperature`` 0 means greedy. ``repeat_penalty`` is RKLLM's (1.0 = off); the two OpenAI
    penalties are additive (0.0 = off).
    """

    temperature: float = 0.8
    top_p: float = 0.9
    top_k: int = 40
    repeat_penalty: float = 1.1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation: a transcript to continue and how.

    ``prompt_ids`` are token ids of the model's vocabulary, at least one. A model folder without a
    tokenizer is served in text mode: ``prompt_ids`` is empty then and ``prompt_text`` is the whole
    rendered prompt, tokenized by the runtime. ``sampling`` is complete;
    ``sampling_asked`` names the fields that the client set itself, so that a runtime which cannot
    change them says so. ``max_tokens`` counts generated tokens. ``stop`` holds non-empty strings.
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


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation. ``cached_tokens`` of the prompt were not prefilled again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """What the board measured, in milliseconds; prefill and decode are the runtime's own figures.

    ``queue_ms`` is the wait for the board. ``prefill_tokens`` were really prefilled.
    """

    queue_ms: float
    prefill_ms: float
    prefill_tokens: int
    decode_ms: float
    decode_tokens: int
    memory_mb: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of an answer: the board has taken the request, started or queued it.

    ``sampling_ignored`` names the asked-for fields that this runtime cannot change per run.
    """

    board_id: str
    release: str
    queued_ahead: int
    sampling_ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that is certain, with the ids generated since the last delta (text may be empty)."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of an answer that ended well."""

    reason: FinishReason
    usage: Usage
    timings: Timings


Event = Accepted | Delta | Finished


class BoardState(str, Enum):
    """What a board is doing, as operators see it."""

    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    HUNG = "hung"
    QUARANTINED = "quarantined"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"  # the Router's word for a board that no longer answers


@dataclass(frozen=True, slots=True)
class BoardReport:
    """What a board says of itself; counters run since the replica's start.

    ``replica`` addresses the replica that wrote it and changes when that is replaced; ``board_id``
    changes only if the board's node is named anew. ``kv_positions`` of ``context_len`` hold the
    live context. ``reason`` says why a board that is not ready is not, and what it last recovered
    from otherwise.
    """

    board_id: str
    model: str
    state: BoardState
    reason: str = ""
    release: str = ""
    platform: str = ""
    node: str = ""
    pid: int = 0
    engine_pid: int = 0
    context_len: int = 0
    kv_positions: int = 0
    running: int = 0
    queued: int = 0
    queue_limit: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    aborted: int = 0
    failed: int = 0
    engine_starts: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    decode_tokens: int = 0
    decode_ms: float = 0.0
    memory_mb: float = 0.0
    library: str = ""
    replica: str = ""
