"""Frozen values in which a board says how it is, and what it holds.

Nothing here knows how a value travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rkserve.core.messages import Kv

# What stands in for a file's sha256 while it is computed, and where it cannot be.
HASHING = "hashing"
UNREADABLE = "unreadable"


class GenerationState(str, Enum):
    """Where a generation on a board is, as whoever controls it sees it."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    GENERATING = "generating"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    ABORTING = "aborting"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Emitted:
    """How many tokens each generation that a board holds has so far, by the request's id."""

    board_id: str
    tokens: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class GenerationInfo:
    """One generation that a board holds, now.

    ``tokens`` are those of the answer so far, ``context_tokens`` those of the whole context: the
    prompt, the answer and what edits injected. ``kv_positions`` are the leading
    ones that a range may be cleared in: those in the KV cache, or all where it will be recomputed.
    ``partial_output`` is the answer's text so far. ``kv`` is known while it is paused. ``paused_s``
    is the time that it has been paused, all pauses together.
    """

    request_id: str
    board_id: str
    model: str
    state: GenerationState
    prompt_tokens: int
    tokens: int
    context_tokens: int
    kv_positions: int = 0
    partial_output: str = ""
    kv: Kv | None = None
    adapter: str | None = None
    native_pause: bool = False
    paused_by: str | None = None
    age_s: float = 0.0
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RouterGenerations:
    """The choices of a generation that a Router knows and no board has, after a control call.

    ``done`` are those that the call changed, ``refused`` those that it cannot be done to without a
    board, and ``ended`` those that an earlier abort has ended here. ``known``: the Router has some
    choice of it, here or on a board.
    """

    done: tuple[GenerationInfo, ...] = ()
    refused: tuple[GenerationInfo, ...] = ()
    ended: tuple[GenerationInfo, ...] = ()
    known: bool = False


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One prompt cache file of a board. ``name`` is None for a parked conversation; ``digest`` is
    that of the token ids of a named one.
    """

    board_id: str
    model: str
    name: str | None
    tokens: int
    file_bytes: int
    adapter: str | None = None
    age_s: float = 0.0
    idle_s: float = 0.0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class KvReport:
    """What the KV cache of a board holds, in positions over all entries of a batch.

    ``entries`` are the positions of each entry. ``position_bytes`` is None where the model folder
    does not say what a position takes. ``status`` is ``ok``, or after a clear ``cleared`` or
    ``pending`` (it is done when the run that is going on has ended). ``at_resume``: the run that is
    paused in there was edited, and so many of its positions stay when it is resumed; None where
    nothing is going to be cut out.
    """

    board_id: str
    model: str
    entries: tuple[int, ...]
    capacity: int
    position_bytes: int | None = None
    status: str = "ok"
    at_resume: int | None = None


class BoardState(str, Enum):
    """What a board is doing, as operators see it."""

    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    HUNG = "hung"
    QUARANTINED = "quarantined"
    FAILED = "failed"
    STOPPED = "stopped"
    ASLEEP = "asleep"  # its model is unloaded, by the operator's wish or because nobody used it
    JOINING = "joining"  # it is well, and waits to be told, or to be given, what it shall serve
    LOST = "lost"  # the Router's word for a board that no longer answers


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a board's kernel says of its hardware now; None or empty is unknown, ``notes`` say why.

    ``npu_load`` has one percentage per core, and ``ddr_load`` is one too. ``npu_max_hz`` is the
    highest clock that the NPU can be set to. ``temperature_c`` is the NPU's, or the SoC's where
    the NPU has no sensor of its own.
    """

    soc: str = ""
    npu_load: tuple[float, ...] = ()
    npu_hz: int | None = None
    npu_max_hz: int | None = None
    ddr_hz: int | None = None
    ddr_governor: str = ""
    ddr_load: float | None = None
    temperature_c: float | None = None
    driver_version: str = ""
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionFigures:
    """What a board did with one version of the weights; counters run since its replica's start.

    ``version`` is ``name@version`` of an adapter, or the label of the base model.
    """

    version: str
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class BoardReport:
    """What a board says of itself; counters run since the replica's start.

    ``replica`` addresses the replica that wrote it and changes when that is replaced; ``board_id``
    changes only if the board's node is named anew. ``kv_positions`` of ``context_len`` hold the
    live context. ``paused`` generations are paused now, ``pauses`` there were; conversations were
    ``parked`` in and ``restored`` from prompt cache files; ``adapters`` are the keys of those that
    are loaded, whose files have ``adapter_bytes``. Of the ``engine_starts``, ``engine_renewals``
    replaced an engine that was well. A run of a batch holds ``batch_entries`` / ``batch_runs``
    generations on average; ``batch_tail_ms`` is how long finished ones kept their places while a
    run went on. ``reason`` says why a board that is not ready is not, and what it last recovered
    from otherwise. ``epoch`` is that of what it obeys, None before it was told; ``hold`` is the
    mode in which it is paused as a whole, or empty; ``missing`` versions of adapters it still
    needs, and those in ``staged`` (keys) it has on its disk. ``versions`` are what it has generated
    with. It sleeps at ``level``, None where it is awake, and has had no request for ``idle_s``, nor
    was its model loaded in that time. ``base`` is the sha256 of the model's file that it has loaded
    instead of that in its model folder, or empty. ``holdings`` are the contexts that it holds and
    can use again, as ``chains`` packs them. ``own_digest`` is the sha256 of the file in its model
    folder, ``HASHING`` until that is computed, ``UNREADABLE`` where the file cannot be read, or
    empty where the board has no such file; ``own_bytes`` is that file's size. ``serving`` has the
    name and the sha256 of each adapter as a request without a version gets it on this board.
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
    engine_renewals: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    decode_tokens: int = 0
    decode_ms: float = 0.0
    memory_mb: float = 0.0
    library: str = ""
    replica: str = ""
    hardware: Hardware | None = None
    paused: int = 0
    n_batch: int = 1
    adapters: tuple[str, ...] = ()
    adapter_bytes: int = 0
    pauses: int = 0
    parked: int = 0
    restored: int = 0
    batch_runs: int = 0
    batch_entries: int = 0
    batch_tail_ms: float = 0.0
    epoch: int | None = None
    hold: str = ""
    missing: int = 0
    staged: tuple[str, ...] = ()
    versions: tuple[VersionFigures, ...] = ()
    level: int | None = None
    idle_s: float = 0.0
    base: str = ""
    holdings: bytes = b""
    own_digest: str = ""
    own_bytes: int = 0
    serving: tuple[tuple[str, str], ...] = ()
