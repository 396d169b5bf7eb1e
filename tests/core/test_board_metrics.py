"""The metrics of boards: every figure of a report is exported, on a registry that is passed in."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rkserve.core.board_metrics import BoardCollector
from rkserve.core.board_report import BoardReport, BoardState, CpuClock, Hardware

REPORT = BoardReport(
    board_id="sim-0",
    model="m",
    state=BoardState.READY,
    context_len=4096,
    kv_positions=10,
    running=1,
    queued=2,
    queue_limit=16,
    requests=3,
    prompt_tokens=40,
    cached_tokens=5,
    completion_tokens=60,
    aborted=7,
    failed=8,
    engine_starts=9,
    prefill_tokens=35,
    prefill_ms=1500.0,
    decode_tokens=61,
    decode_ms=2500.0,
    memory_mb=2.0,
    release="1.2.3",
    version="0.2.0",
    hardware=Hardware(
        soc="RK3588",
        npu_load=(48.0, 50.0, 9.0),
        npu_hz=900_000_000,
        npu_max_hz=1_000_000_000,
        npu_governor="rknpu_ondemand",
        cpu_clocks=(
            CpuClock("0-3", 1_800_000_000, 1_800_000_000, "ondemand"),
            CpuClock("4-5", 2_400_000_000, 2_400_000_000, "performance"),
            CpuClock("6-7"),
        ),
        ddr_hz=2_112_000_000,
        ddr_governor="dmc_ondemand",
        ddr_load=7.0,
        temperature_c=-4.5,
        driver_version="0.9.8",
        memory_total_bytes=16 * 2**30,
        memory_available_bytes=0,
        ddr_max_hz=2_112_000_000,
        disk_total_bytes=64 * 2**30,
        disk_free_bytes=1,
    ),
    crashes=(("SIGSEGV", 2), ("hung", 1)),
    cache_bytes=2**20,
)
HARDWARE = (
    "rkserve_npu_load_ratio",
    "rkserve_npu_frequency_hertz",
    "rkserve_npu_max_frequency_hertz",
    "rkserve_cpu_frequency_hertz",
    "rkserve_ddr_frequency_hertz",
    "rkserve_ddr_load_ratio",
    "rkserve_temperature_celsius",
    "rkserve_memory_total_bytes",
    "rkserve_memory_available_bytes",
    "rkserve_ddr_max_frequency_hertz",
    "rkserve_disk_total_bytes",
    "rkserve_disk_free_bytes",
    "rkserve_board_info",
)


def registry_of(*reports: BoardReport) -> CollectorRegistry:
    """A registry that exports the reports."""
    registry = CollectorRegistry()
    registry.register(BoardCollector(lambda: reports))
    return registry


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rkserve_board_running", 1),
        ("rkserve_board_queued", 2),
        ("rkserve_board_queue_limit", 16),
        ("rkserve_kv_positions", 10),
        ("rkserve_kv_capacity", 4096),
        ("rkserve_engine_memory_bytes", 2 * 1024 * 1024),
        ("rkserve_board_requests_total", 3),
        ("rkserve_prompt_tokens_total", 40),
        ("rkserve_cached_tokens_total", 5),
        ("rkserve_completion_tokens_total", 60),
        ("rkserve_prefill_tokens_total", 35),
        ("rkserve_prefill_seconds_total", 1.5),
        ("rkserve_decode_tokens_total", 61),
        ("rkserve_decode_seconds_total", 2.5),
        ("rkserve_board_aborted_total", 7),
        ("rkserve_board_failed_total", 8),
        ("rkserve_engine_starts_total", 9),
        ("rkserve_npu_frequency_hertz", 900e6),
        ("rkserve_npu_max_frequency_hertz", 1e9),
        ("rkserve_ddr_frequency_hertz", 2112e6),
        ("rkserve_ddr_load_ratio", 0.07),
        ("rkserve_temperature_celsius", -4.5),
        ("rkserve_memory_total_bytes", 16 * 1024**3),
        ("rkserve_memory_available_bytes", 0),
    ],
)
def test_a_board_s_figures_are_exported_in_base_units(name: str, value: float) -> None:
    # Those of the machine do not depend on the model.
    labels = {"board": "sim-0"} if name in HARDWARE else {"board": "sim-0", "model": "m"}
    assert registry_of(REPORT).get_sample_value(name, labels) == value


@pytest.mark.parametrize("state", BoardState)
def test_a_board_s_state_is_there_and_ready_always(state: BoardState) -> None:
    registry = registry_of(replace(REPORT, state=state))
    found = {
        sample.labels["state"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "rkserve_board_state"
    }
    assert found == {"ready": 0, state.value: 1}


def test_a_lost_board_has_no_figures() -> None:
    lost = replace(REPORT, board_id="sim-1", state=BoardState.LOST)
    families = list(registry_of(REPORT, lost).collect())
    found = {f.name for f in families for s in f.samples if s.labels["board"] == "sim-1"}
    assert found == {"rkserve_board_state"}


def test_each_core_of_the_npu_has_its_own_load() -> None:
    registry = registry_of(REPORT)
    loads = [
        registry.get_sample_value("rkserve_npu_load_ratio", {"board": "sim-0", "core": core})
        for core in ("0", "1", "2", "3")
    ]
    assert loads == [0.48, 0.5, 0.09, None]


def test_each_group_of_cpus_has_its_own_clock() -> None:
    registry = registry_of(REPORT)
    clocks = [
        registry.get_sample_value("rkserve_cpu_frequency_hertz", {"board": "sim-0", "cpus": cpus})
        for cpus in ("0-3", "4-5", "6-7")
    ]
    assert clocks == [1_800_000_000, 2_400_000_000, None]


def test_what_a_board_is_stands_in_labels() -> None:
    labels = {
        "board": "sim-0",
        "model": "m",
        "soc": "RK3588",
        "driver": "0.9.8",
        "cpu_governor": "ondemand,performance",
        "npu_governor": "rknpu_ondemand",
        "ddr_governor": "dmc_ondemand",
        "release": "1.2.3",
        "version": "0.2.0",
    }
    assert registry_of(REPORT).get_sample_value("rkserve_board_info", labels) == 1


def test_the_ends_of_engines_are_counted_by_kind() -> None:
    registry, labels = registry_of(REPORT), {"board": "sim-0", "model": "m"}
    found = [
        registry.get_sample_value("rkserve_engine_crashes_total", {**labels, "kind": kind})
        for kind in ("SIGSEGV", "hung", "exit")
    ]
    assert found == [2, 1, None]
    assert registry.get_sample_value("rkserve_prompt_cache_bytes", labels) == 2**20


def samples_of(registry: CollectorRegistry) -> set[str]:
    """The names of all families that have a sample."""
    return {family.name for family in registry.collect() if family.samples}


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        pytest.param(REPORT.hardware, set(HARDWARE), id="everything is known"),
        pytest.param(Hardware(), {"rkserve_board_info"}, id="nothing is known"),
        pytest.param(None, set(), id="the board was not asked"),
        pytest.param(
            Hardware(npu_load=(0.0,)),
            {"rkserve_board_info", "rkserve_npu_load_ratio"},
            id="an idle core is no unknown one",
        ),
    ],
)
def test_an_unknown_figure_has_no_sample(hardware: Hardware | None, expected: set[str]) -> None:
    found = samples_of(registry_of(replace(REPORT, hardware=hardware)))
    assert found & set(HARDWARE) == expected


def test_every_figure_of_the_hardware_is_exported() -> None:
    # Notes are sentences; they are for GET /v1/boards.
    figures = {field.name for field in fields(Hardware)} - {"notes"}
    assert REPORT.hardware is not None
    for name in figures:
        blank = replace(REPORT.hardware, **{name: getattr(Hardware(), name)})
        before, after = (
            generate_latest(registry_of(replace(REPORT, hardware=hardware)))
            for hardware in (REPORT.hardware, blank)
        )
        assert before != after, name


def test_without_boards_there_are_no_samples_and_no_errors() -> None:
    assert b"sim-0" not in generate_latest(registry_of())


def test_only_drained_boards_have_a_sample_of_it() -> None:
    registry = registry_of(replace(REPORT, board_id="sim-1", drained=True), REPORT)
    lines = generate_latest(registry).decode().splitlines()
    drained = [line for line in lines if line.startswith("rkserve_board_drained")]
    assert drained == ['rkserve_board_drained{board="sim-1",model="m"} 1.0']
