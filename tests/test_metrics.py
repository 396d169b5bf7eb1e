"""The metrics: every figure of a report is exported, on a registry that is passed in."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rkserve.messages import BoardReport, BoardState
from rkserve.metrics import BoardCollector, RouterMetrics

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
    ],
)
def test_a_board_s_figures_are_exported_in_base_units(name: str, value: float) -> None:
    registry = registry_of(REPORT)
    assert registry.get_sample_value(name, {"board": "sim-0", "model": "m"}) == value


def test_a_board_is_in_one_state_and_in_no_other() -> None:
    registry = registry_of(REPORT)
    values = {
        state: registry.get_sample_value(
            "rkserve_board_state", {"board": "sim-0", "model": "m", "state": state.value}
        )
        for state in BoardState
    }
    assert values.pop(BoardState.READY) == 1
    assert set(values.values()) == {0}


def test_without_boards_there_are_no_samples_and_no_errors() -> None:
    assert b"sim-0" not in generate_latest(registry_of())


def test_two_routers_in_one_process_do_not_share_figures() -> None:
    one, other = CollectorRegistry(), CollectorRegistry()
    RouterMetrics(one).hang_ups.inc()
    RouterMetrics(other)
    assert one.get_sample_value("rkserve_hang_ups_total") == 1
    assert other.get_sample_value("rkserve_hang_ups_total") == 0


def test_the_exposition_parses_as_prometheus_text() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    registry = registry_of(REPORT)
    metrics = RouterMetrics(registry)
    metrics.requests.labels("/v1/models", "200").inc()
    metrics.ttft.labels("m").observe(0.3)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert all(family.documentation for family in families)
    assert len({family.name for family in families}) == len(families)
