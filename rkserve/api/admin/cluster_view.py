"""The schemas of the cluster's view: verdict, live events, a board's history, and usage.

The events of ``GET /v1/cluster/events`` describe one JSON document. The first event, ``snapshot``,
has the whole of it; each ``delta`` is a JSON Merge Patch (RFC 7396) of it: objects are merged key
by key, ``null`` removes a key, and everything else replaces. A key with an unknown value is
therefore left out instead of being ``null``.

Figures that change all the time stand in ``now``: for each column the values of all boards, in the
order of ``order``. A column without changes is not sent again. ``tick`` counts the samples: a
reader that keeps histories appends ``now`` to them whenever it changes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from rkserve.api.json.schemas import Count, RequestModel, Seconds, one_of
from rkserve.core.answer_metrics import DAYS_KEPT
from rkserve.core.board_report import BoardState
from rkserve.verdicts.facts import WindowName

VerdictName = Literal["READY", "DEGRADED", "NOT READY"]
Place = Literal["board", "head", "anywhere"]
# Proxies in between may buffer without bound for a reader that does not read; it comes back.
MAX_SECONDS = 900.0
USUAL_DAYS = 8


class ReasonEntry(TypedDict):
    """A reason for a verdict: one rule that fires, for the cluster, a model or some boards.

    `figure` is the worst one, and `limit` the value that it is compared with, both in `unit`.
    `command` mends it, or is a comment where none can; `run_on` is the place to type it: on each of
    `boards`, on the head, or anywhere. `runbook` is the page and anchor in the documentation.
    """

    rule: str
    severity: Literal["critical", "warning"]
    sentence: str
    boards: list[str]
    model: NotRequired[str]
    figure: NotRequired[float]
    limit: NotRequired[float]
    unit: NotRequired[str]
    evidence: list[str]
    command: str
    run_on: Place
    runbook: str


class VerdictEntry(TypedDict):
    """The verdict on the cluster, with at most five reasons, the gravest first.

    `more` counts the reasons beyond these.
    """

    verdict: VerdictName
    reasons: list[ReasonEntry]
    more: Count


class RoutersEntry(TypedDict):
    """The Routers whose figures are in the answer, and those that did not answer in time."""

    up: list[str]
    silent: list[str]


class VerdictAnswer(VerdictEntry):
    """The verdict on the cluster."""

    object: Literal["cluster.verdict"]
    at_s: float
    epoch: int
    boards: Count
    ready: Count
    routers: RoutersEntry


class CircuitView(TypedDict):
    """The Router's circuit breaker for a board, where it is not closed."""

    state: str
    reason: str


class FetchView(TypedDict):
    """The progress of a board that fetches its model."""

    fetched_bytes: int
    total_bytes: int
    bytes_per_s: float
    source: str


class BoardEntry(TypedDict):
    """A board without its figures: the facts that change rarely.

    `state_since_s` is in seconds since 1970. `rules` are the names of the rules that fire for it.
    `behind` is the number of epochs that it lags. `hold` is the mode of a pause in force, and
    `level` the depth of a sleep; `drained` is there, and true, if it takes no new requests.
    `expected_tokens_per_s` is the decoding speed that its SoC and model should reach, on the
    `basis` given. `crashes` counts the engines that ended out of order since the replica's start.
    """

    state: Annotated[str, one_of(BoardState)]
    state_since_s: float
    reason: NotRequired[str]
    rules: NotRequired[list[str]]
    model: str
    weights: str
    adapters: NotRequired[list[str]]
    epoch: NotRequired[int]
    behind: NotRequired[Count]
    hold: NotRequired[str]
    level: NotRequired[int]
    drained: NotRequired[Literal[True]]
    circuit: NotRequired[CircuitView]
    fetch: NotRequired[FetchView]
    node: NotRequired[str]
    soc: NotRequired[str]
    runtime: NotRequired[str]
    driver: NotRequired[str]
    version: NotRequired[str]
    expected_tokens_per_s: NotRequired[float]
    basis: NotRequired[str]
    npu_cores: NotRequired[Count]
    npu_max_mhz: NotRequired[Count]
    ddr_max_mhz: NotRequired[Count]
    memory_total_mb: NotRequired[Count]
    disk_total_mb: NotRequired[Count]
    disk_free_mb: NotRequired[Count]
    prompt_cache_mb: NotRequired[Count]
    kv_capacity: Count
    queue_limit: Count
    engine_starts: Count
    crashes: NotRequired[dict[str, Count]]
    last_recovery: NotRequired[str]


class RequestEntry(TypedDict):
    """A request in flight. `since_s` is its arrival in seconds since 1970.

    `model` is there while it has no `board`, of whose model it is otherwise. `failovers` counts the
    boards that it has lost. `key` is the name of its API key, for the operator only.
    """

    phase: Literal["queued", "prefill", "decode", "paused", "moving"]
    since_s: float
    board: NotRequired[str]
    model: NotRequired[str]
    failovers: NotRequired[Count]
    key: NotRequired[str]


class OperationView(TypedDict):
    """An operation that goes on or has ended in the last minutes, for the operator only.

    ``subject`` is the adapter's version, or the boards or models, that it is about; an operation of
    the whole cluster has none.
    """

    kind: str
    state: str
    phase: str
    done: Count
    failed: Count
    total: Count
    created_s: float
    finished_s: NotRequired[float]
    subject: NotRequired[str]
    who: NotRequired[str]
    error: NotRequired[str]


class PauseView(TypedDict):
    """A pause or sleep in force, by the operation that made it."""

    models: list[str]
    boards: list[str]
    adapter: NotRequired[str]
    mode: str
    level: NotRequired[int]
    since_s: float
    expires_s: NotRequired[float]


class RolloutView(TypedDict):
    """An adapter version on its way to all boards of a model."""

    model: str
    adapter: str
    active: NotRequired[str]
    candidate: str
    previous: NotRequired[str]
    switched: Count
    total: Count
    weight: float


class WindowEntry(TypedDict):
    """The requests of one model within a window of time, over all Routers that answered.

    A request is `good` if it was answered in order and its first token came within the target,
    `late` if only the latter failed, and `failed` if the service failed it. Percentiles are
    estimated from histograms, and left out below 20 requests.
    """

    good: Count
    late: Count
    failed: Count
    turned_away: Count
    ttft_p95_s: NotRequired[Seconds]
    queue_wait_p95_s: NotRequired[Seconds]


class ModelView(TypedDict):
    """A model: its weights, the requests that wait at the Router, and its windows of traffic."""

    weights: str
    step: NotRequired[int]
    boards: Count
    ready: Count
    waiting: Count
    traffic: dict[WindowName, WindowEntry]


class ViewDocument(TypedDict):
    """The document that the events of a cluster describe."""

    object: Literal["cluster.view"]
    version: str
    operator: bool
    router: str
    routers: RoutersEntry
    every_s: float
    tick: Count
    at_s: float
    epoch: int
    coordinator: Literal["reachable", "unreachable"]
    verdict: VerdictEntry
    models: dict[str, ModelView]
    pauses: dict[str, PauseView]
    rollouts: dict[str, RolloutView]
    order: list[str]
    now: dict[str, list[float | None]]
    boards: dict[str, BoardEntry]
    requests: dict[str, RequestEntry]
    operations: dict[str, OperationView]


class StateSpan(TypedDict):
    """A state and the number of points that it lasted."""

    state: Annotated[str, one_of(BoardState)]
    points: Count


class HistoryEntry(TypedDict):
    """The history of all boards for sparklines: by board and column, the latest value last.

    Each point is the mean of `every_s` seconds, and of its states the worst one.
    """

    every_s: float
    end_s: float
    columns: dict[str, dict[str, list[float | None]]]
    states: dict[str, list[StateSpan]]


class ViewQuery(RequestModel):
    """Query of the live events."""

    seconds: float | None = Field(
        None,
        ge=0,
        le=MAX_SECONDS,
        description="The stream ends after so many seconds, with 0 after the snapshot. Without it, "
        "and at the latest, after 900.",
    )


class SnapshotEvent(TypedDict):
    """The data of the event `snapshot`."""

    view: ViewDocument
    history: HistoryEntry


class BoardHistoryAnswer(TypedDict):
    """The last 30 minutes of one board: a point every `every_s` seconds, the latest last."""

    object: Literal["board.history"]
    board: str
    every_s: float
    end_s: float
    states: list[StateSpan]
    columns: dict[str, list[float | None]]


class UsageQuery(RequestModel):
    """Query of the usage."""

    days: int = Field(
        USUAL_DAYS,
        ge=1,
        le=DAYS_KEPT,
        description="The number of days (UTC), the current one included; the default is 8.",
    )


class KeyUsageEntry(TypedDict):
    """The usage of one API key on one day (UTC). `anonymous` has the calls without an API key."""

    day: str
    key: str
    requests: Count
    prompt_tokens: Count
    completion_tokens: Count
    board_s: Seconds


class KeyUsageAnswer(TypedDict):
    """The usage of all keys, the latest day first, over the Routers that answered.

    `unstored` are the Routers whose node could not store usage: their counts begin with their
    start.
    """

    object: Literal["list"]
    data: list[KeyUsageEntry]
    routers: RoutersEntry
    unstored: list[str]
