"""The named cases: what is played on what, what is compared, and which targets come of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from rkserve.bench import presets
from rkserve.bench.figures import Slo
from rkserve.bench.player import RunProgress
from rkserve.bench.presets import Bench, PresetOptions
from rkserve.bench.systems import RunningServers
from rkserve.bench.target import Target
from rkserve.bench.trace import make_trace
from tests.support.http.fake_openai import FakeOpenAi, serving
from tests.support.values.bench_load import at_once, small_trace

pytestmark = pytest.mark.slow

CAPACITY = PresetOptions(seconds=0.3, sessions=30, clients=2)


@pytest.fixture
def server() -> Iterator[FakeOpenAi]:
    with serving() as fake:
        yield fake


class Policies(RunningServers):
    """One server under the names of policies; some of them ask for other models than others."""

    time_factor = 0.001

    def __init__(self, server: FakeOpenAi, models: Mapping[str, str]) -> None:
        super().__init__([Target(name, server.url, model) for name, model in models.items()])


def bench_of(server: FakeOpenAi, **models: str) -> Bench:
    return Bench(Policies(server, models))


def names(server: FakeOpenAi) -> list[str]:
    return [one.messages[-1]["content"] for one in server.asked]


def test_all_policies_play_the_same_trace_and_are_compared_with_the_first(
    server: FakeOpenAi,
) -> None:
    bench = bench_of(server, round_robin="ok", least_load="ok", prefix="ok")
    found = presets.multi_turn(bench, PresetOptions(sessions=6))
    assert [run.figures.target for run in bench.runs] == ["round_robin", "least_load", "prefix"]
    assert [(one.target, one.to) for one in found.comparisons] == [
        ("least_load", "round_robin"),
        ("prefix", "round_robin"),
    ]
    third = len(names(server)) // 3
    assert sorted(names(server)[:third]) == sorted(names(server)[-third:])
    assert [one.what for one in found.verdicts] == [
        "prefix hit ratio: prefix / round_robin",
        "TTFT p50: prefix / round_robin",
        "TTFT p99: prefix / least_load",
    ]
    assert not found.verdicts[0].reached  # the fake has the same hits whatever it is called


def test_other_servers_are_held_to_no_target_of_ours(server: FakeOpenAi) -> None:
    found = presets.multi_turn(bench_of(server, a="ok", b="ok"), PresetOptions(sessions=3))
    assert (len(found.comparisons), list(found.verdicts)) == (1, [])


def test_where_a_server_says_nothing_of_caches_there_is_no_ratio_of_hits(
    server: FakeOpenAi,
) -> None:
    bench = bench_of(server, round_robin="no-usage", prefix="no-usage")
    found = presets.multi_turn(bench, PresetOptions(sessions=3))
    assert [one.what for one in found.verdicts] == ["TTFT p50: prefix / round_robin"]


def test_the_multi_turn_trace_has_the_size_that_it_is_known_by() -> None:
    trace = make_trace(presets.CONVERSATIONS, 1)
    assert len(trace.sessions) == 200
    assert trace.requests == pytest.approx(1000, rel=0.05)


def test_the_smoke_test_counts_what_was_not_answered(server: FakeOpenAi) -> None:
    bench = bench_of(server, a="ok", b="busy")
    found = presets.smoke(bench, PresetOptions())
    (verdict,) = found.verdicts
    answered, refused = (run.figures.refused_ms for run in bench.runs)
    assert answered is None
    assert refused is not None
    assert refused.count == bench.runs[1].figures.asked
    assert (verdict.measured, verdict.reached) == (0.0, False)
    assert server.most <= 2


def test_overload_judges_all_runs_by_the_limit_that_the_capacity_gave(server: FakeOpenAi) -> None:
    bench = bench_of(server, a="ok")
    presets.overload(bench, CAPACITY)
    capacity = bench.runs[0].figures
    assert capacity.e2e_ms is not None
    assert bench.slo.e2e_ms == pytest.approx(
        presets.LIMIT_FACTOR * capacity.e2e_ms.p50.value, abs=1
    )
    assert [run.played.plan.clients for run in bench.runs] == [2, None, None]
    assert bench.runs[2].played.plan.deadline_s == pytest.approx((bench.slo.e2e_ms or 0) / 1e3)


def test_overload_keeps_limits_that_were_given_and_deadlines_to_itself(server: FakeOpenAi) -> None:
    slo = Slo(e2e_ms=60_000)
    bench = Bench(Policies(server, {"a": "ok"}), slo)
    presets.overload(bench, replace(CAPACITY, slo=slo, tell_deadline=False, load=1.5))
    assert [run.figures.target for run in bench.runs][2] == "a, 1.5 x capacity"
    assert bench.slo == slo
    assert not any("x-request-timeout" in one.headers for one in server.asked)


def test_answers_side_by_side_are_asked_one_at_a_time_without_a_pause(server: FakeOpenAi) -> None:
    trace = small_trace(sessions=3, turns=2.0, think_s=1e6)
    found = presets.side_by_side(bench_of(server, a="ok", b="shouts"), trace, PresetOptions())
    (compared,) = found.more["captured"]
    assert (compared["targets"], compared["prompts"]) == (["a", "b"], trace.requests)
    assert server.most == 1


def test_progress_is_shown_for_each_run(server: FakeOpenAi) -> None:
    seen: list[tuple[str, RunProgress]] = []
    bench = bench_of(server, a="ok", b="ok")
    bench.show = lambda name, told: seen.append((name, told))
    presets.play_all(bench, at_once(4), PresetOptions(), "Load")
    assert {name for name, _ in seen} == {"a", "b"}
    last = seen[-1][1]
    assert (last.done, last.total, last.running, last.failed) == (4, 4, 0, 0)
