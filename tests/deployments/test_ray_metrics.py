"""The figures that Ray exports: from reports, seldom, and counted once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ray.util.metrics import Metric

from rkserve.core.board_report import BoardReport, BoardState
from rkserve.deployments.ray_metrics import EVERY_S, RayBoardMetrics, RayRouterMetrics

Recorded = tuple[str, float, Mapping[str, str]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """What Ray's metrics are given, with all tags."""
    found: list[Recorded] = []

    def record(metric: Any, value: float, tags: dict[str, str] | None = None) -> None:
        final = metric._get_final_tags(tags)
        metric._validate_tags(final)
        found.append((metric.info["name"], value, final))

    monkeypatch.setattr(Metric, "_record", record)
    return found


def report(state: BoardState = BoardState.READY, **figures: Any) -> BoardReport:
    return BoardReport("sim-0", "chat", state, **figures)


def test_a_board_exports_its_state_and_the_tokens_since_the_last_time(
    recorded: list[Recorded],
) -> None:
    now_s = 0.0
    metrics = RayBoardMetrics("sim-0", "chat", lambda: now_s)
    metrics.update(report(running=2, queued=3, completion_tokens=70))
    tags = {"board": "sim-0", "model": "chat"}
    assert recorded == [
        ("rkserve_board_ready", 1.0, tags),
        ("rkserve_board_running", 2, tags),
        ("rkserve_board_queued", 3, tags),
        ("rkserve_completion_tokens", 70, tags),
    ]
    recorded.clear()
    now_s = EVERY_S - 0.1
    metrics.update(report(completion_tokens=75))
    assert not recorded, "reports come every second"
    now_s = EVERY_S
    metrics.update(report(BoardState.RECOVERING, completion_tokens=80))
    assert ("rkserve_board_ready", 0.0, tags) in recorded
    assert ("rkserve_completion_tokens", 10, tags) in recorded
    recorded.clear()
    now_s = 2 * EVERY_S
    metrics.update(report(completion_tokens=80))
    assert "rkserve_completion_tokens" not in {name for name, _, _ in recorded}


def test_a_router_exports_its_queue_and_times_to_first_tokens(recorded: list[Recorded]) -> None:
    now_s = 0.0
    metrics = RayRouterMetrics("0", lambda: {"chat": {0: 2, 5: 1}, "vectors": {}}, lambda: now_s)
    for now_s in (0.0, 1.0, EVERY_S):  # noqa: B007 # the clock reads it
        metrics.update()
    chat, vectors = ({"router": "0", "model": model} for model in ("chat", "vectors"))
    once = [("rkserve_queue_depth", 3, chat), ("rkserve_queue_depth", 0, vectors)]
    assert recorded == once * 2
    recorded.clear()
    metrics.first_token("chat", 0.3)
    assert recorded == [("rkserve_ttft_seconds", 0.3, chat)]
