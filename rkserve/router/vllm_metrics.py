"""The figures that vLLM has too, under vLLM's names and labels, for programs that read those.

Names, labels and meanings are those of vLLM's V1 engine. Histograms keep the bounds of rkserve,
which a quantile does not depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rkserve.core.answer_metrics import ERROR, HANG_UP
from rkserve.core.board_report import BoardReport
from rkserve.core.messages import FinishReason
from rkserve.core.metrics import RouterMetrics

_LABELS = ("model_name", "engine")
_ENGINE = "0"  # vLLM numbers the engines of one server
# vLLM's reasons, each with those of rkserve.
_REASONS: Mapping[str, tuple[str, ...]] = {
    "stop": (FinishReason.STOP.value,),
    "length": (FinishReason.LENGTH.value,),
    "abort": (FinishReason.ABORT.value, HANG_UP),
    "error": (ERROR,),
}


class VllmRouterCollector(Collector):
    """Exports one Router's own figures; vLLM has no label for Routers, and the figures get one."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._histograms: tuple[tuple[str, str, Histogram | Collector], ...] = (
            ("time_to_first_token_seconds", "time to first token in seconds", metrics.ttft),
            ("e2e_request_latency_seconds", "e2e request latency in seconds", metrics.duration),
            ("inter_token_latency_seconds", "inter-token latency in seconds", metrics.gaps),
            ("request_queue_time_seconds", "time spent in WAITING phase", metrics.queue_wait),
            ("request_prompt_tokens", "number of prefill tokens", metrics.prompt_length),
            ("request_generation_tokens", "number of generation tokens", metrics.answer_length),
        )

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        for name, text, source in self._histograms:
            yield from _renamed(source.collect(), f"vllm:{name}", f"Histogram of {text}.")
        yield self._success()
        prompt, answer = self._metrics.prompt_length, self._metrics.answer_length
        yield _counter("prompt_tokens", "Number of prefill tokens processed.", _sums(prompt))
        yield _counter("generation_tokens", "Number of generation tokens processed.", _sums(answer))
        yield _counter(
            "prefix_cache_queries", "Prefix cache queries, in tokens of prompts.", _sums(prompt)
        )
        found = {
            sample.labels["model"]: sample.value
            for family in self._metrics.prefix_tokens.collect()
            for sample in family.samples
            if sample.labels["what"] == "found"
        }
        yield _counter("prefix_cache_hits", "Prefix cache hits, in cached tokens.", found)

    def _success(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success",
            "Count of requests that ended, by their reason.",
            labels=(*_LABELS, "finished_reason"),
        )
        counts = {
            (sample.labels["model"], sample.labels["reason"]): sample.value
            for found in self._metrics.finish_reasons.collect()
            for sample in found.samples
        }
        for model in dict.fromkeys(model for model, _ in counts):
            for reason, ours in _REASONS.items():
                count = sum(counts.get((model, one), 0.0) for one in ours)
                family.add_metric((model, _ENGINE, reason), count)
        return family


def _renamed(found: Iterable[Metric], name: str, text: str) -> Iterator[Metric]:
    for family in found:
        renamed = Metric(name, text, family.type)
        for sample in family.samples:
            labels = dict(sample.labels)
            labels = {"model_name": labels.pop("model"), "engine": _ENGINE, **labels}
            renamed.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
        yield renamed


def _sums(histogram: Histogram) -> dict[str, float]:
    return {
        sample.labels["model"]: sample.value
        for family in histogram.collect()
        for sample in family.samples
        if sample.name.endswith("_sum")
    }


def _counter(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
    for model, value in values.items():
        family.add_metric((model, _ENGINE), value)
    return family


@dataclass(frozen=True, slots=True)
class LoraCalls:
    """The adapters of calls at all Routers: those that run, those that wait, and how many may be
    loaded on a board.
    """

    most: int = 0
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class VllmClusterCollector(Collector):
    """Exports the state of all boards and Routers of a cluster as that of one vLLM server."""

    def __init__(
        self,
        models: Sequence[str],
        reports: Iterable[BoardReport],
        queued: Mapping[str, int],
        lora: LoraCalls,
        now_s: float,
    ) -> None:
        """``queued`` are the generations in the queues of all Routers, by model."""
        self._models, self._queued, self._lora, self._now_s = models, queued, lora, now_s
        self._reports = list(reports)

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        running = GaugeMetricFamily(
            "vllm:num_requests_running",
            "Number of requests in model execution batches.",
            labels=_LABELS,
        )
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting",
            "Number of requests waiting to be processed.",
            labels=_LABELS,
        )
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            labels=_LABELS,
        )
        for model in self._models:
            boards = [report for report in self._reports if report.model == model]
            running.add_metric((model, _ENGINE), sum(one.running for one in boards))
            queued = self._queued.get(model, 0) + sum(one.queued for one in boards)
            waiting.add_metric((model, _ENGINE), queued)
            capacity = sum(one.context_len for one in boards)
            taken = sum(one.kv_positions for one in boards)
            usage.add_metric((model, _ENGINE), min(1.0, taken / capacity) if capacity else 0.0)
        yield running
        yield waiting
        yield usage
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Running stats on lora requests; the value is the time.",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        names = (",".join(self._lora.waiting), ",".join(self._lora.running))
        lora.add_metric((str(self._lora.most), *names), self._now_s)
        yield lora
