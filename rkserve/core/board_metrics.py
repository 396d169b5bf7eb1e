"""The metrics of boards, from their latest reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rkserve.core.board_report import BoardReport, BoardState, Hardware

_BOARD_LABELS = ("board", "model")
# Figures of the machine do not depend on the model; at 50 boards each label costs some kilobytes.
_MACHINE_LABELS = ("board",)

# Without a sample where the figure is None: 50 boards are to fit into 300 kB.
_GAUGES: tuple[tuple[str, str, Callable[[BoardReport], float | None]], ...] = (
    ("rkserve_board_running", "Generations that run on the board.", lambda r: r.running),
    ("rkserve_board_queued", "Requests that wait for the board.", lambda r: r.queued),
    ("rkserve_board_paused", "Generations that are paused on the board.", lambda r: r.paused),
    (
        "rkserve_board_drained",
        "1 if the board takes no new requests; no sample otherwise.",
        lambda r: 1 if r.drained else None,
    ),
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

_COUNTERS: tuple[tuple[str, str, Callable[[BoardReport], float | None]], ...] = (
    ("rkserve_board_requests", "Requests that the board took.", lambda r: r.requests),
    ("rkserve_prompt_tokens", "Prompt tokens of answers.", lambda r: r.prompt_tokens),
    ("rkserve_cached_tokens", "Prompt tokens found in the KV cache.", lambda r: r.cached_tokens),
    ("rkserve_completion_tokens", "Tokens of answers.", lambda r: r.completion_tokens),
    ("rkserve_prefill_tokens", "Tokens really prefilled.", lambda r: r.prefill_tokens),
    ("rkserve_prefill_seconds", "Time in prefill.", lambda r: r.prefill_ms / 1e3),
    ("rkserve_decode_tokens", "Tokens decoded.", lambda r: r.decode_tokens),
    ("rkserve_decode_seconds", "Time in decode.", lambda r: r.decode_ms / 1e3),
    (
        "rkserve_board_aborted",
        "Requests that left before their end: of clients that hung up, and those that began just "
        "when their Router moved them from the board's queue to a free board.",
        lambda r: r.aborted,
    ),
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
    (
        "rkserve_prompt_cache_seconds",
        "Time of writing and reading prompt cache files, in which the board does nothing else; no "
        "sample before the first.",
        lambda r: (r.cache_write_ms + r.cache_read_ms) / 1e3 or None,
    ),
    (
        "rkserve_prompt_cache_fetched",
        "Prompt cache files that the board has fetched from others; no sample before the first.",
        lambda r: r.cache_fetched or None,
    ),
    (
        "rkserve_prompt_cache_fetched_bytes",
        "Their size.",
        lambda r: r.cache_fetched_bytes or None,
    ),
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


class BoardCollector(Collector):
    """Exports the boards' latest reports; a scrape makes no call to a board.

    A lost board has a state and no figures: its last ones may be older than those that another
    Router has reported of it, and a counter that falls looks to Prometheus like one that begins
    again.
    """

    def __init__(self, reports: Callable[[], Iterable[BoardReport]]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield one family per figure."""
        reports = list(self._reports())
        state = GaugeMetricFamily(
            "rkserve_board_state",
            "1 for the board's state; ready is there with 0 while it is in another one.",
            labels=(*_BOARD_LABELS, "state"),
        )
        for report in reports:
            for one in dict.fromkeys((BoardState.READY, report.state)):
                labels = (report.board_id, report.model, one.value)
                state.add_metric(labels, float(report.state is one))
        yield state
        reports = [report for report in reports if report.state is not BoardState.LOST]
        for made, figures in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, figure in figures:
                family = made(name, text, labels=_BOARD_LABELS)
                for report in reports:
                    if (value := figure(report)) is not None:
                        family.add_metric((report.board_id, report.model), value)
                yield family
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
        labels=(*_MACHINE_LABELS, "core"),
    )
    info = GaugeMetricFamily(
        "rkserve_board_info",
        "Always 1; the labels are the board's SoC, NPU driver, governors, and the releases of the "
        "runtime and of rkserve (version).",
        labels=(*_BOARD_LABELS, "soc", "driver", *_GOVERNORS, "release", "version"),
    )
    cpu = GaugeMetricFamily(
        "rkserve_cpu_frequency_hertz",
        "Clock of these CPUs now.",
        labels=(*_MACHINE_LABELS, "cpus"),
    )
    for report, hardware in known:
        board = report.board_id
        for core, percent in enumerate(hardware.npu_load):
            load.add_metric((board, str(core)), percent / 100)
        for clock in hardware.cpu_clocks:
            if clock.hz is not None:
                cpu.add_metric((board, clock.cpus), clock.hz)
        of_cpus = ",".join(sorted({clock.governor for clock in hardware.cpu_clocks} - {""}))
        governors = (of_cpus, hardware.npu_governor, hardware.ddr_governor)
        names = (hardware.soc, hardware.driver_version, *governors)
        info.add_metric((board, report.model, *names, report.release, report.version), 1.0)
    yield load
    yield cpu
    yield info
    for name, text, figure in _HARDWARE:
        gauge = GaugeMetricFamily(name, text, labels=_MACHINE_LABELS)
        for report, hardware in known:
            value = figure(hardware)
            if value is not None:
                gauge.add_metric((report.board_id,), value)
        yield gauge
