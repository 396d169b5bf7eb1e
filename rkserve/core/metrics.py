"""Every metric of rkserve, built on a registry that is passed in.

Labels are few by design: group, model, board and status; never a request, user or prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rkserve.core.board_report import BoardReport, BoardState, Hardware

# From a cached prefix on a fast board (50 ms) to a long prompt on a slow one (minutes).
TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2, 2, 4, 8, 15, 30, 60, 120, 300)
# One generation at 3 to 45 tokens/s.
DURATION_BUCKETS_S = (0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
# Published rows decode 2.5 to 45 tokens/s and prefill 28 to 946.
DECODE_RATE_BUCKETS = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100)
# From a few boards to a thousand, and one that was delayed.
DECISION_BUCKETS_S = (2e-5, 5e-5, 1e-4, 2e-4, 4e-4, 1e-3, 5e-3, 0.02, 0.1)
# From a free board to the longest wait that a queue allows.
WAIT_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
# From a broadcast over loopback to a slow decode step, a drain and a large adapter on a slow disk.
CONTROL_BUCKETS_S = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 15, 60, 300, 900,
)  # fmt: skip
PREFILL_RATE_BUCKETS = (5, 10, 20, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1000, 1500, 2500)

# They double the series of every counter and histogram for the time at which each began.
disable_created_metrics()  # type: ignore[no-untyped-call] # the library has no annotation there

_BOARD_LABELS = ("board", "model")

_GAUGES: tuple[tuple[str, str, Callable[[BoardReport], float]], ...] = (
    ("rkserve_board_running", "Generations that run on the board.", lambda r: r.running),
    ("rkserve_board_queued", "Requests that wait for the board.", lambda r: r.queued),
    ("rkserve_board_paused", "Generations that are paused on the board.", lambda r: r.paused),
    ("rkserve_board_queue_limit", "Requests that may wait.", lambda r: r.queue_limit),
    ("rkserve_kv_positions", "Positions the live KV cache holds.", lambda r: r.kv_positions),
    (
        "rkserve_board_idle_seconds",
        "Time since the board's last request; 0 while it has work.",
        lambda r: r.idle_s,
    ),
    ("rkserve_kv_capacity", "Positions the KV cache can hold.", lambda r: r.context_len),
    (
        "rkserve_adapter_bytes",
        "LoRA adapters that are loaded, by the sizes of their files.",
        lambda r: r.adapter_bytes,
    ),
    (
        "rkserve_engine_memory_bytes",
        "Peak memory of the engine, as the runtime reports it.",
        lambda r: r.memory_mb * 2**20,
    ),
    ("rkserve_prompt_cache_bytes", "Prompt cache files on the board.", lambda r: r.cache_bytes),
)

_COUNTERS: tuple[tuple[str, str, Callable[[BoardReport], float]], ...] = (
    ("rkserve_board_requests", "Requests that the board took.", lambda r: r.requests),
    ("rkserve_prompt_tokens", "Prompt tokens of answers.", lambda r: r.prompt_tokens),
    ("rkserve_cached_tokens", "Prompt tokens found in the KV cache.", lambda r: r.cached_tokens),
    ("rkserve_completion_tokens", "Tokens of answers.", lambda r: r.completion_tokens),
    ("rkserve_prefill_tokens", "Tokens really prefilled.", lambda r: r.prefill_tokens),
    ("rkserve_prefill_seconds", "Time in prefill.", lambda r: r.prefill_ms / 1e3),
    ("rkserve_decode_tokens", "Tokens decoded.", lambda r: r.decode_tokens),
    ("rkserve_decode_seconds", "Time in decode.", lambda r: r.decode_ms / 1e3),
    ("rkserve_board_aborted", "Requests whose client left.", lambda r: r.aborted),
    ("rkserve_board_failed", "Requests that the board failed.", lambda r: r.failed),
    ("rkserve_engine_starts", "Engine processes that loaded.", lambda r: r.engine_starts),
    (
        "rkserve_engine_renewals",
        "Engines replaced in order: for the memory of adapters, or to load a prompt cache.",
        lambda r: r.engine_renewals,
    ),
    ("rkserve_pauses", "Times that a generation was paused.", lambda r: r.pauses),
    ("rkserve_parked", "Conversations whose KV cache was put on disk.", lambda r: r.parked),
    ("rkserve_restored", "Runs that began from a prompt cache file.", lambda r: r.restored),
    ("rkserve_batch_runs", "Runs of a batch.", lambda r: r.batch_runs),
    ("rkserve_batch_entries", "Generations in runs of a batch.", lambda r: r.batch_entries),
    (
        "rkserve_batch_tail_seconds",
        "Time that generations of a batch had ended while its run went on for others.",
        lambda r: r.batch_tail_ms / 1e3,
    ),
)

_GOVERNORS = ("cpu_governor", "npu_governor", "ddr_governor")

# Readings of a board's kernel; a figure that is unknown has no sample.
_HARDWARE: tuple[tuple[str, str, Callable[[Hardware], float | None]], ...] = (
    ("rkserve_npu_frequency_hertz", "Clock of the NPU now.", lambda h: h.npu_hz),
    (
        "rkserve_npu_max_frequency_hertz",
        "Highest clock that the NPU can be set to.",
        lambda h: h.npu_max_hz,
    ),
    ("rkserve_ddr_frequency_hertz", "Clock of the board's memory now.", lambda h: h.ddr_hz),
    (
        "rkserve_ddr_max_frequency_hertz",
        "Highest clock that the board's memory can be set to.",
        lambda h: h.ddr_max_hz,
    ),
    (
        "rkserve_ddr_load_ratio",
        "Share of the memory's bandwidth in use, as its clock driver counts.",
        lambda h: None if h.ddr_load is None else h.ddr_load / 100,
    ),
    (
        "rkserve_temperature_celsius",
        "Temperature of the NPU, or of the SoC where the NPU has no sensor.",
        lambda h: h.temperature_c,
    ),
    ("rkserve_memory_total_bytes", "Memory of the board.", lambda h: h.memory_total_bytes),
    (
        "rkserve_memory_available_bytes",
        "Memory that new work on the board could have.",
        lambda h: h.memory_available_bytes,
    ),
    (
        "rkserve_disk_total_bytes",
        "Size of the disk of the board's state folder.",
        lambda h: h.disk_total_bytes,
    ),
    (
        "rkserve_disk_free_bytes",
        "Bytes of that disk that are free.",
        lambda h: h.disk_free_bytes,
    ),
)


def _makers(
    registry: CollectorRegistry,
) -> tuple[partial[Counter], partial[Gauge], partial[Histogram]]:
    """Return the constructors of metrics on a registry."""
    return (
        partial(Counter, registry=registry),
        partial(Gauge, registry=registry),
        partial(Histogram, registry=registry),
    )


class RouterMetrics:
    """Metrics of one Router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        counter, gauge, histogram = _makers(registry)
        self.requests = counter(
            "rkserve_requests", "HTTP requests by route and status.", ("route", "status")
        )
        self.in_flight = gauge("rkserve_requests_in_flight", "Calls that are being answered.")
        self.ttft = histogram(
            "rkserve_ttft_seconds",
            "From a request's arrival at the Router to its first token.",
            ("model",),
            buckets=TTFT_BUCKETS_S,
        )
        self.duration = histogram(
            "rkserve_generation_seconds",
            "From a request's arrival at the Router to the end of its answer.",
            ("model",),
            buckets=DURATION_BUCKETS_S,
        )
        self.continuations = counter(
            "rkserve_continuations",
            "Times that a generation lost its board and went on, by how it was lost: crashed, "
            "hung, run_failed, gone, silent, out_of_order, unreachable, busy or lacking.",
            ("why",),
        )
        self.continuation = histogram(
            "rkserve_continuation_seconds",
            "From the loss of a generation's board to its next token.",
            buckets=CONTROL_BUCKETS_S,
        )
        self.held_time = histogram(
            "rkserve_held_seconds",
            "Time that a client's generation stood still, or waited at the Router, because the "
            "cluster held it: by an update (another version of an adapter or of the weights is "
            "served since), a sleep or a pause.",
            ("model", "by"),
            buckets=WAIT_BUCKETS_S,
        )
        self.circuits = counter(
            "rkserve_circuits_opened",
            "Times that a board was left alone for a while because requests kept failing there.",
        )
        self.hang_ups = counter("rkserve_hang_ups", "Answers whose client left before the end.")
        self.generation_errors = counter(
            "rkserve_generation_errors",
            "Generations that ended with an error, by its code.",
            ("code",),
        )
        self.queue_wait = histogram(
            "rkserve_queue_wait_seconds",
            "Time that a generation waited in the Router's queue for a place at a board.",
            ("model",),
            buckets=WAIT_BUCKETS_S,
        )
        self.turned_away = counter(
            "rkserve_turned_away",
            "Generations that got no place at a board, by the error's code; shed ones were in the "
            "queue and left it for more urgent ones, or for those of others.",
            ("model", "reason"),
        )
        self.board_seconds = counter(
            "rkserve_board_seconds",
            "Time for which generations had boards, also stepped and paused inside the runtime.",
            ["model"],
        )
        self.rate_limited = counter("rkserve_rate_limited", "Calls beyond the limits of their key.")
        self.goodput = counter(
            "rkserve_goodput_tokens",
            "Tokens of answers that ended in order and in time; boards generated others in vain.",
            ("model",),
        )
        self.embedded_texts = counter(
            "rkserve_embedded_texts", "Texts that became vectors.", ("model",)
        )
        self.embedded_tokens = counter(
            "rkserve_embedded_tokens", "Tokens of these texts.", ("model",)
        )
        self.prefix_tokens = counter(
            "rkserve_prefix_tokens",
            "Prompt tokens of generations that ended: what the Router expected to be found in "
            "their boards' KV caches (expected), and what was (found).",
            ("model", "what"),
        )
        self.decisions = counter(
            "rkserve_routing_decisions",
            "Choices of a board by what it should hold of the prompt: its live context (live), a "
            "file (file), nothing (none); or that waiting for one costs less time (wait).",
            ("model", "reuse"),
        )
        self.decision = histogram(
            "rkserve_routing_decision_seconds",
            "Time that one choice of a board took.",
            buckets=DECISION_BUCKETS_S,
        )
        self.prefill = histogram(
            "rkserve_request_prefill_seconds",
            "Time that a request's prefill took on its board, as the runtime counts it.",
            ("model",),
            buckets=TTFT_BUCKETS_S,
        )
        self.prefill_rate = histogram(
            "rkserve_request_prefill_tokens_per_second",
            "Tokens that a request prefilled each second; those from the KV cache do not count.",
            ("model",),
            buckets=PREFILL_RATE_BUCKETS,
        )
        self.decode_rate = histogram(
            "rkserve_request_decode_tokens_per_second",
            "Tokens that a request decoded each second.",
            ("model",),
            buckets=DECODE_RATE_BUCKETS,
        )

    def continued(self, word: str) -> None:
        """Count a failover of a generation; ``word`` is the kind of loss."""
        self.continuations.labels(word).inc()

    def opened(self) -> None:
        """Count an opened circuit breaker."""
        self.circuits.inc()

    def held(self, model: str, by: str, held_s: float) -> None:
        """Observe the duration of a hold of a generation by the cluster."""
        self.held_time.labels(model, by).observe(held_s)

    def back(self, took_s: float) -> None:
        """Observe the time from the end of a hold to the next token."""
        self.continuation.observe(took_s)

    def refused(self, model: str, reason: str) -> None:
        """Count a request without a reservation."""
        self.turned_away.labels(model, reason).inc()


class CoordinatorMetrics:
    """Metrics of the Coordinator. Kinds and phases are those of operations."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge, histogram = _makers(registry)
        self.operations = counter(
            "rkserve_operations",
            "Operations that are over, by kind and how they ended; pauses, resumptions, staging, "
            "rollouts and rollbacks are kinds, 'failed' and 'undone' are failures.",
            ("kind", "state"),
        )
        self.refused = counter(
            "rkserve_operations_refused",
            "Control calls that were refused before they began, by the error's code.",
            ("kind", "code"),
        )
        self.running = gauge("rkserve_operations_running", "Operations that go on now.")
        self.duration = histogram(
            "rkserve_operation_seconds",
            "From a control call's arrival to the end of what it asked for.",
            ("kind",),
            buckets=CONTROL_BUCKETS_S,
        )
        self.phase = histogram(
            "rkserve_operation_phase_seconds",
            "Time that operations spent in one phase, such as staging or switching.",
            ("kind", "phase"),
            buckets=CONTROL_BUCKETS_S,
        )
        self.broadcast = histogram(
            "rkserve_broadcast_seconds",
            "From the broadcast of the desired state to the last board's answer.",
            buckets=CONTROL_BUCKETS_S,
        )
        self.skew = histogram(
            "rkserve_broadcast_skew_seconds",
            "From the first board's answer to the last one's.",
            buckets=CONTROL_BUCKETS_S,
        )
        self.staged_bytes = counter("rkserve_staged_bytes", "Bytes of adapters brought to boards.")
        self.stage = histogram(
            "rkserve_stage_seconds",
            "Time that one adapter took to be on one board's disk, verified.",
            buckets=CONTROL_BUCKETS_S,
        )
        self.board_failures = counter(
            "rkserve_control_failures",
            "Control calls that a board failed or did not answer, by method and error code.",
            ("method", "code"),
        )
        self.reconciled = counter(
            "rkserve_reconciliations",
            "Boards brought to the desired state outside of an operation: joined, restarted, or "
            "left behind by one.",
        )
        self.leases_expired = counter(
            "rkserve_leases_expired",
            "Pauses that ended because they were neither renewed nor resumed in time.",
        )
        self.epoch = gauge("rkserve_desired_epoch", "Epoch of the desired state.")
        self.pauses_in_force = gauge("rkserve_pauses_in_force", "Pauses of parts of the cluster.")
        self.sleeps_in_force = gauge("rkserve_sleeps_in_force", "Sleeps of parts of the cluster.")
        self.idle_unloads = counter(
            "rkserve_idle_unloads",
            "Models that were put to sleep because they were unused, by the operation's result.",
            ("model", "state"),
        )
        self.requested_wakes = counter(
            "rkserve_requested_wakes",
            "Wake-ups of models that a request asked for, by how they ended.",
            ("model", "state"),
        )
        self.behind = gauge("rkserve_boards_behind", "Boards that do not obey that epoch yet.")


class QueueCollector(Collector):
    """Exports the queue lengths of this Router, counted at each scrape."""

    def __init__(self, depths: Callable[[], Mapping[str, Mapping[int, int]]]) -> None:
        self._depths = depths

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one figure for each model and priority with waiting requests."""
        waiting = GaugeMetricFamily(
            "rkserve_queue_depth",
            "Generations that wait at the Router for a place at a board, by priority.",
            labels=("model", "priority"),
        )
        for model, counts in self._depths().items():
            for priority, count in sorted({0: 0, **counts}.items()):
                waiting.add_metric((model, str(priority)), count)
        yield waiting


class StreamCollector(Collector):
    """Exports the transport of tokens from boards to this Router."""

    def __init__(self, counts: Callable[[], tuple[Mapping[str, int], int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield both figures."""
        streams, connections = self._counts()
        taken = CounterMetricFamily(
            "rkserve_token_streams",
            "Generations by the way that their tokens took from the board: "
            "a connection of its own (channel), or Ray (ray).",
            labels=("path",),
        )
        for path, count in streams.items():
            taken.add_metric((path,), count)
        yield taken
        yield GaugeMetricFamily(
            "rkserve_channels", "Boards that send tokens over a connection.", value=connections
        )


class BoardCollector(Collector):
    """Exports the boards' latest reports; a scrape makes no call to a board."""

    def __init__(self, reports: Callable[[], Iterable[BoardReport]]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield one family per figure."""
        reports = list(self._reports())
        state = GaugeMetricFamily(
            "rkserve_board_state", "1 for the board's state.", labels=(*_BOARD_LABELS, "state")
        )
        for report in reports:
            for known in BoardState:
                labels = (report.board_id, report.model, known.value)
                state.add_metric(labels, float(report.state is known))
        yield state
        for name, text, figure in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_BOARD_LABELS)
            for report in reports:
                gauge.add_metric((report.board_id, report.model), figure(report))
            yield gauge
        for name, text, figure in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_BOARD_LABELS)
            for report in reports:
                counter.add_metric((report.board_id, report.model), figure(report))
            yield counter
        crashes = CounterMetricFamily(
            "rkserve_engine_crashes",
            "Engines that ended out of order, by kind: a signal, exit, hung, silent, runs_failed "
            "or internal.",
            labels=(*_BOARD_LABELS, "kind"),
        )
        for report in reports:
            for kind, count in report.crashes:
                crashes.add_metric((report.board_id, report.model, kind), count)
        yield crashes
        yield from _hardware(reports)


def _hardware(reports: Iterable[BoardReport]) -> Iterator[GaugeMetricFamily]:
    known = [(report, report.hardware) for report in reports if report.hardware is not None]
    load = GaugeMetricFamily(
        "rkserve_npu_load_ratio",
        "Share of the last second in which the NPU's core worked.",
        labels=(*_BOARD_LABELS, "core"),
    )
    info = GaugeMetricFamily(
        "rkserve_board_info",
        "Always 1; the labels say what the board is.",
        labels=(*_BOARD_LABELS, "soc", "driver", *_GOVERNORS, "release"),
    )
    cpu = GaugeMetricFamily(
        "rkserve_cpu_frequency_hertz",
        "Clock of these CPUs now.",
        labels=(*_BOARD_LABELS, "cpus"),
    )
    for report, hardware in known:
        board = (report.board_id, report.model)
        for core, percent in enumerate(hardware.npu_load):
            load.add_metric((*board, str(core)), percent / 100)
        for clock in hardware.cpu_clocks:
            if clock.hz is not None:
                cpu.add_metric((*board, clock.cpus), clock.hz)
        of_cpus = ",".join(sorted({clock.governor for clock in hardware.cpu_clocks} - {""}))
        governors = (of_cpus, hardware.npu_governor, hardware.ddr_governor)
        names = (hardware.soc, hardware.driver_version, *governors, report.release)
        info.add_metric((*board, *names), 1.0)
    yield load
    yield cpu
    yield info
    for name, text, figure in _HARDWARE:
        gauge = GaugeMetricFamily(name, text, labels=_BOARD_LABELS)
        for report, hardware in known:
            value = figure(hardware)
            if value is not None:
                gauge.add_metric((report.board_id, report.model), value)
        yield gauge
