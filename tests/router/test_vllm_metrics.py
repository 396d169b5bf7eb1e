"""vLLM's names, labels and meanings, which programs of others rely on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from rkserve.core.answer_metrics import HANG_UP
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.messages import Finished, FinishReason, Timings, Usage
from rkserve.core.metrics import RouterMetrics
from rkserve.router.vllm_metrics import LoraCalls, VllmClusterCollector, VllmRouterCollector

MODEL = {"model_name": "chat", "engine": "0"}


def value(collector: Collector, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry.get_sample_value(name, labels)


def finished(reason: FinishReason, prompt: int, tokens: int) -> Finished:
    return Finished(reason, Usage(prompt, tokens), Timings(0, 0, 0, 0, 0, 0))


@pytest.fixture
def router() -> VllmRouterCollector:
    metrics = RouterMetrics(CollectorRegistry())
    metrics.expect("chat", embeds=False)
    metrics.ttft.labels("chat").observe(0.3)
    metrics.duration.labels("chat").observe(2.0)
    metrics.queue_wait.labels("chat").observe(0.1)
    figures = metrics.answers("chat")
    figures.gaps.observe(0.05, 4)
    figures.finished(finished(FinishReason.STOP, 100, 20))
    figures.finished(finished(FinishReason.LENGTH, 50, 30))
    figures.finished(finished(FinishReason.ABORT, 10, 0))
    figures.broken(HANG_UP, 2)
    metrics.prefix_tokens.labels("chat", "expected").inc(90)
    metrics.prefix_tokens.labels("chat", "found").inc(60)
    return VllmRouterCollector(metrics)


@pytest.mark.parametrize(
    ("name", "expected", "labels"),
    [
        ("vllm:time_to_first_token_seconds_count", 1, {}),
        ("vllm:time_to_first_token_seconds_sum", 0.3, {}),
        ("vllm:time_to_first_token_seconds_bucket", 0, {"le": "0.25"}),
        ("vllm:time_to_first_token_seconds_bucket", 1, {"le": "0.5"}),
        ("vllm:e2e_request_latency_seconds_sum", 2.0, {}),
        ("vllm:inter_token_latency_seconds_count", 4, {}),
        ("vllm:inter_token_latency_seconds_bucket", 4, {"le": "0.05"}),
        ("vllm:request_queue_time_seconds_count", 1, {}),
        ("vllm:request_prompt_tokens_count", 3, {}),
        ("vllm:request_generation_tokens_sum", 50, {}),
        ("vllm:prompt_tokens_total", 160, {}),
        ("vllm:generation_tokens_total", 50, {}),
        ("vllm:prefix_cache_queries_total", 160, {}),
        ("vllm:prefix_cache_hits_total", 60, {}),
        ("vllm:request_success_total", 1, {"finished_reason": "stop"}),
        ("vllm:request_success_total", 1, {"finished_reason": "length"}),
        ("vllm:request_success_total", 3, {"finished_reason": "abort"}),
        ("vllm:request_success_total", 0, {"finished_reason": "error"}),
    ],
)
def test_a_router_s_figures_have_vllms_names(
    router: VllmRouterCollector, name: str, expected: float, labels: dict[str, str]
) -> None:
    assert value(router, name, **MODEL, **labels) == pytest.approx(expected)


def board(name: str, model: str = "chat", **figures: Any) -> BoardReport:
    return BoardReport(name, model, BoardState.READY, **figures)


def cluster(reports: Iterable[BoardReport], **queued: int) -> VllmClusterCollector:
    lora = LoraCalls(4, ("calm", "tone"), ("pirate",))
    return VllmClusterCollector(["chat", "other"], reports, queued, lora, 1_700_000_000.5)


def test_the_boards_of_a_cluster_are_one_server() -> None:
    of = cluster(
        [
            board("a", running=1, queued=2, kv_positions=1024, context_len=4096),
            board("b", running=1, kv_positions=3072, context_len=4096),
            board("c", "other", running=5),
        ],
        chat=3,
    )
    assert value(of, "vllm:num_requests_running", **MODEL) == 2
    assert value(of, "vllm:num_requests_waiting", **MODEL) == 5
    assert value(of, "vllm:kv_cache_usage_perc", **MODEL) == 0.5
    other = {**MODEL, "model_name": "other"}
    assert value(of, "vllm:num_requests_running", **other) == 5
    assert value(of, "vllm:kv_cache_usage_perc", **other) == 0.0  # its context is unknown
    labels = {
        "max_lora": "4",
        "waiting_lora_adapters": "pirate",
        "running_lora_adapters": "calm,tone",
    }
    assert value(of, "vllm:lora_requests_info", **labels) == 1_700_000_000.5


def test_without_boards_nothing_runs() -> None:
    of = cluster([], chat=1)
    assert value(of, "vllm:num_requests_running", **MODEL) == 0
    assert value(of, "vllm:num_requests_waiting", **MODEL) == 1
