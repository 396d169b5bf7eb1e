"""Frozen values in which a board reports its state and the contents of its caches.

Transport is elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from rkserve.core.messages import Kv
from rkserve.core.skew import crosses_versions

# What stands in for a file's sha256 while it is computed, and where it cannot be.
HASHING = "hashing"
UNREADABLE = "unreadable"
# In place of the sha256 of the model folder's file: boards have different files, or none is known.
MIXED = "mixed"
UNKNOWN = "unknown"
OTHER_ROUTERS = "other Routers"  # in the place of a board's name, in an error
# In place of a platform: a server with OpenAI's API, which one Router reports.
UPSTREAM = "upstream"


class GenerationState(str, Enum):
    """The state of a generation on a board, as request control sees it."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    GENERATING = "generating"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    ABORTING = "aborting"
    ENDED = "ended"


@crosses_versions
@dataclass(frozen=True, slots=True)
class Emitted:
    """The token count so far of each generation on a board, by request ID."""

    board_id: str
    tokens: tuple[tuple[str, int], ...]


@crosses_versions
@dataclass(frozen=True, slots=True)
class GenerationInfo:
    """One generation on a board, now.

    ``tokens`` are those of the answer so far, ``context_tokens`` those of the whole context:
    prompt, answer and injected tokens. A range may be cleared within the first ``kv_positions``:
    those in the KV cache, or all if the cache will be recomputed. ``partial_output`` is the
    answer's text so far. ``kv`` is known while it is paused. ``paused_s`` is the total time of all
    its pauses.
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


@crosses_versions
@dataclass(frozen=True, slots=True)
class RouterGenerations:
    """The choices of a generation that a Router holds and no board does, after a control call.

    ``done`` were changed by the call, ``refused`` need a board for it, and ``ended`` were ended
    here by an earlier abort. ``known``: the Router holds some choice of the generation, here or on
    a board.
    """

    done: tuple[GenerationInfo, ...] = ()
    refused: tuple[GenerationInfo, ...] = ()
    ended: tuple[GenerationInfo, ...] = ()
    known: bool = False

    def plus(self, other: RouterGenerations) -> RouterGenerations:
        """Return both together."""
        return RouterGenerations(
            (*self.done, *other.done),
            (*self.refused, *other.refused),
            (*self.ended, *other.ended),
            self.known or other.known,
        )


@crosses_versions
@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One prompt cache file of a board. ``name`` is None for a parked conversation; ``digest`` is
    that of the token IDs of a named one.
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


@crosses_versions
@dataclass(frozen=True, slots=True)
class KvReport:
    """The contents of a board's KV cache, in positions over all entries of a batch.

    ``entries`` are the positions of each entry. ``position_bytes`` is None if the model folder does
    not state the size of a position. ``status`` is ``ok``, or after a clear ``cleared`` or
    ``pending`` (done when the current run has ended). ``at_resume``: the paused run was edited and
    keeps this many of its positions when it resumes; None if nothing will be removed.
    """

    board_id: str
    model: str
    entries: tuple[int, ...]
    capacity: int
    position_bytes: int | None = None
    status: str = "ok"
    at_resume: int | None = None


class BoardState(str, Enum):
    """The state of a board, as operators see it."""

    FETCHING = "fetching"  # its replica fetches the model from the head, and has no engine yet
    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    HUNG = "hung"
    QUARANTINED = "quarantined"
    FAILED = "failed"
    STOPPED = "stopped"
    ASLEEP = "asleep"  # its model is unloaded, by an operator or because it was unused
    JOINING = "joining"  # healthy; it waits for its desired state or for files
    LOST = "lost"  # set by a Router for a board that no longer answers


class TrialVerdict(str, Enum):
    """The result of a trial of an adapter."""

    PASSED = "passed"
    REFUSED = "refused"
    CRASHED = "crashed_on_load"
    HUNG = "hung_on_load"


@crosses_versions
@dataclass(frozen=True, slots=True)
class AdapterTrial:
    """The trial of an adapter's content on one board, in an engine that served nothing.

    ``digest`` is the sha256 of the file and ``title`` its ``name@version`` at that time. ``reason``
    is empty for one that passed. ``at_s`` is in seconds since 1970. The result is of the file with
    that ``scale`` on base weights with the sha256 ``base``, empty for those of the model folder, in
    a ``release`` of the runtime, empty if it is unknown.
    """

    model: str
    digest: str
    verdict: TrialVerdict
    title: str = ""
    board_id: str = ""
    reason: str = ""
    at_s: float = 0.0
    scale: float = 1.0
    base: str = ""
    release: str = ""

    @property
    def subject(self) -> tuple[str, str, float, str, str]:
        """The subject of the trial: a later result of the same one replaces it."""
        return (self.model, self.digest, self.scale, self.base, self.release)

    @property
    def passed(self) -> bool:
        """Return whether boards may load it."""
        return self.verdict is TrialVerdict.PASSED


@crosses_versions
@dataclass(frozen=True, slots=True)
class CpuClock:
    """A clock that ``cpus`` share, such as ``"4-7"``, with its highest value and its governor."""

    cpus: str
    hz: int | None = None
    max_hz: int | None = None
    governor: str = ""


@crosses_versions
@dataclass(frozen=True, slots=True)
class EngineUse:
    """Resources of an engine process.

    ``memory_bytes`` is its anonymous memory, without mapped files. ``files`` are open files, of at
    most ``most_files``; None: not readable, or without a limit.
    """

    memory_bytes: int
    files: int | None = None
    most_files: int | None = None


@crosses_versions
@dataclass(frozen=True, slots=True)
class Hardware:
    """A reading of a board's hardware from its kernel; None or empty is unknown, with the reasons
    in ``notes``, where findings are, too: a stuck job, or a governor that costs speed.

    ``npu_load`` has one percentage per core, 100 where ``notes`` names a stuck job; ``ddr_load`` is
    a percentage too. ``npu_max_hz`` and ``ddr_max_hz`` are the highest clocks that they can be set
    to. ``temperature_c`` is the NPU's, or the SoC's if the NPU has no sensor of its own. The disk
    is that of the board's state folder.
    """

    soc: str = ""
    npu_load: tuple[float, ...] = ()
    npu_hz: int | None = None
    npu_max_hz: int | None = None
    npu_governor: str = ""
    cpu_clocks: tuple[CpuClock, ...] = ()
    ddr_hz: int | None = None
    ddr_governor: str = ""
    ddr_load: float | None = None
    temperature_c: float | None = None
    driver_version: str = ""
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    notes: tuple[str, ...] = ()
    ddr_max_hz: int | None = None
    disk_total_bytes: int | None = None
    disk_free_bytes: int | None = None


@crosses_versions
@dataclass(frozen=True, slots=True)
class VersionFigures:
    """A board's counters for one version of the weights, since the start of its replica.

    ``version`` is ``name@version`` of an adapter, or the version name of the base weights.
    ``tokens`` are decoding steps, as the runtime counts them in ``decode_ms``: one less than the
    tokens of each run, whose first token is a part of prefill.
    """

    version: str
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    decode_ms: float = 0.0


@crosses_versions
@dataclass(frozen=True, slots=True)
class FetchProgress:
    """The progress of a board that fetches its model.

    ``bytes_per_s`` is that of the last seconds, 0 before the first bytes. ``source`` is the board
    that sent the latest piece, or ``head``. ``corrupted`` counts pieces that were fetched again.
    """

    fetched_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    source: str = ""
    corrupted: int = 0


class CopyState(str, Enum):
    """The state of a node's copy of a model of the catalogue."""

    FETCHING = "fetching"
    PRESENT = "present"
    STAGED = "staged"  # whole, beside an earlier version, which it replaces at the next start
    FAILED = "failed"  # it is not fetched any more until that is asked for again


@crosses_versions
@dataclass(frozen=True, slots=True)
class ModelCopy:
    """A node's copy of a model of the catalogue; ``reason`` explains what it waits for."""

    state: CopyState
    version: str = ""
    reason: str = ""
    fetch: FetchProgress = FetchProgress()


@crosses_versions
@dataclass(frozen=True, slots=True)
class LedgerCopy:
    """A compressed backup of a cluster's ledger on a board; ``digest`` is of the compressed file.

    Its number orders the copies of a cluster: clocks of boards without a battery begin in 1970.
    ``made_s`` is the time of the backup by the head's clock, in seconds since 1970.
    """

    cluster: str
    number: int
    made_s: int
    digest: str
    size_bytes: int

    @property
    def key(self) -> str:
        """Its name among the files that boards have."""
        return f"ledger-{self.cluster}-{self.digest[:12]}"

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"copy {self.number} of the ledger of cluster {self.cluster}"


@crosses_versions
@dataclass(frozen=True, slots=True)
class BoardReport:
    """A board's report; counters run since the start of its replica.

    ``replica`` addresses the replica that wrote it and changes with the replica; ``board_id``
    changes only if the board's node is renamed. The live context takes ``kv_positions`` of
    ``context_len``. ``paused`` generations are paused now, ``pauses`` counts all pauses;
    conversations were ``parked`` in and ``restored`` from prompt cache files, whose transfers are
    counted by ``cache_*_bytes`` and ``cache_*_ms``, with the rates in bytes/s that the board
    reckons with, None before the first transfer; ``adapters`` are
    the keys of the loaded ones, whose files have ``adapter_bytes``. Of the ``engine_starts``,
    ``engine_renewals`` replaced a healthy engine. A batched run holds ``batch_entries`` /
    ``batch_runs`` generations on average; ``batch_tail_ms`` is the time that finished
    generations kept their batch entries while the run continued. ``reason`` explains why a
    board is not ready, and is empty if it is; ``last_recovery`` is why its engine was last
    replaced. ``epoch`` is that of the desired state that it obeys, None before the first one;
    ``hold`` is the mode of a pause of the whole board, or empty; ``missing`` is the number of
    adapter versions that it still needs; ``staged`` are the keys of those on its disk.
    ``on_head`` is true for a board of the head's own node.
    ``versions`` are those that it has generated with. ``level`` is the depth of its sleep, None
    when awake; ``idle_s`` is the time since its last request or model load. ``base`` is the
    sha256 of a loaded model file other than the one in its model folder, or empty. ``holdings``
    are its reusable contexts, packed by ``block_hashes``. ``own_digest`` is the sha256 of the
    file in its model folder, ``HASHING`` until it is computed, ``UNREADABLE`` if the file
    cannot be read, or empty if there is none; ``own_bytes`` is that file's size. ``serving``
    has the name and the sha256 of each adapter as served to requests without a version. ``fetch``
    is set until a model of the catalogue is there and loaded; the board can only report meanwhile.
    ``copy`` is the version of its copy of such a model.
    ``version`` is that of rkserve on the board. ``crashes`` counts the engines that ended out of
    order, by kind: the name of a signal, ``exit``, ``hung``, ``silent``, ``runs_failed`` or
    ``internal``. ``cache_bytes`` is the size of its prompt cache files. A ``drained`` board takes
    no new requests. ``confined`` has the means by which its engine process is confined. ``trying``
    is the key of an adapter whose trial has the board's engine now, or empty. Its ``n_batch``
    generations begin and end together, or one by one where it ``joins``.
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
    cache_written_bytes: int = 0
    cache_write_ms: float = 0.0
    cache_read_bytes: int = 0
    cache_read_ms: float = 0.0
    cache_fetched: int = 0
    cache_fetched_bytes: int = 0
    cache_fetch_ms: float = 0.0
    cache_sent: int = 0
    cache_sent_bytes: int = 0
    cache_write_rate: float | None = None
    cache_read_rate: float | None = None
    batch_runs: int = 0
    batch_entries: int = 0
    batch_tail_ms: float = 0.0
    epoch: int | None = None
    hold: str = ""
    missing: int = 0
    staged: tuple[str, ...] = ()
    on_head: bool = False
    versions: tuple[VersionFigures, ...] = ()
    level: int | None = None
    idle_s: float = 0.0
    base: str = ""
    holdings: bytes = b""
    own_digest: str = ""
    own_bytes: int = 0
    serving: tuple[tuple[str, str], ...] = ()
    last_recovery: str = ""
    fetch: FetchProgress | None = None
    copy: str = ""
    version: str = ""
    crashes: tuple[tuple[str, int], ...] = ()
    cache_bytes: int = 0
    confined: str = ""
    drained: bool = False
    trying: str = ""
    joins: bool = False

    @property
    def is_upstream(self) -> bool:
        """Return whether it is a server with OpenAI's API, as its Router sees it."""
        return self.platform == UPSTREAM


def own_digest(boards: Iterable[BoardReport]) -> str:
    """Return the sha256 of the file in the model folders of these boards, or ``hashing``,
    ``mixed`` if the boards have different files, or ``unknown``.
    """
    digests = {board.own_digest for board in boards} - {"", UNREADABLE}
    if len(digests) > 1:
        digests.discard(HASHING)
    if len(digests) > 1:
        return MIXED
    return digests.pop() if digests else UNKNOWN


def next_round(now_s: float, interval_s: float, phase: float = 0.0) -> float:
    """Return the next instant of periodic calls to boards: a multiple of ``interval_s`` that is at
    least half of it away.

    The processes of a machine call at the same instants. A wake-up costs an idle board more than
    an answer: three readers of its report wake it once.

    Args:
        now_s: the monotonic time in seconds, which all processes of a machine have in common.
        interval_s: more than 0.
        phase: shifts all instants by this part of the interval, 0 to 1.
    """
    shift_s = phase * interval_s
    return (math.floor((now_s - shift_s) / interval_s + 0.5) + 1) * interval_s + shift_s
