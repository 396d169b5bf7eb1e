"""The cluster on paper: boards obey the rules of real ones; the same seed is the same run."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale import __main__ as command
from benchmarks.scale.board import Disk, PaperBoard
from benchmarks.scale.cases import (
    OTHERS,
    OWN,
    cluster,
    decide,
    jain,
    load,
    outcome,
    quantile,
    remember,
)
from benchmarks.scale.conversations import Context, Shape, length, talk
from benchmarks.scale.other_routers import RayPrefix, TwoChoices
from benchmarks.scale.own_router import OwnRouter
from benchmarks.scale.rollout import Course, Rolling
from benchmarks.scale.router import Request
from benchmarks.scale.simulation import Seen, World
from rkserve.control.calls import Strategy
from rkserve.router.queue.admission import QueueTerms

pytestmark = pytest.mark.slow

SMALL = Shape(sessions=12, rate=2.0, think_s=5, turns=3)
SYSTEM_PROMPTS = {-1: 0, 0: 40, 1: 25}
CONTEXTS = st.builds(
    lambda session, system, tokens: Context(session, system, SYSTEM_PROMPTS[system], tokens),
    st.integers(0, 2),
    st.sampled_from(sorted(SYSTEM_PROMPTS)),
    st.integers(1, 400),
)


def board(**disk: object) -> PaperBoard:
    (one,) = cluster(1, disk=Disk(**disk))  # type: ignore[arg-type]
    return one


@given(CONTEXTS, CONTEXTS)
def test_contexts_agree_as_far_as_their_ids_do(one: Context, other: Context) -> None:
    ids, others = one.ids(), other.ids()
    assert (len(ids), len(others)) == (one.tokens, other.tokens)
    same = 0
    while same < min(len(ids), len(others)) and ids[same] == others[same]:
        same += 1
    assert one.common(other) == same
    assert one.extends(other) == (ids[: len(others)] == others and len(ids) > len(others))


def test_a_paper_board_extends_what_is_live_and_computes_only_the_rest() -> None:
    one, prompt = board(), Context(1, 0, 40, 300)
    first = one.run(prompt, 20)
    second = one.run(prompt.cut(360), 20)
    assert (first.cached, second.cached) == (0, 319)
    assert first.prefill_ms == one.profile.prefill_ms(300)
    assert second.prefill_ms == one.profile.prefill_ms(41, 319)
    assert one.files == []


def test_a_paper_board_parks_what_another_conversation_displaces_and_reads_it_again() -> None:
    one, mine, other = board(), Context(1, 0, 40, 300), Context(2, 0, 40, 300)
    one.run(mine, 20)
    displacing = one.run(other, 20)
    assert [file.tokens for file in one.files] == [319]
    assert displacing.ttft_ms > displacing.prefill_ms
    back = one.run(mine.cut(400), 20)
    assert back.cached == 319
    assert one.live is None, "a run from a file leaves nothing live"
    assert [(file.session, file.tokens) for file in one.files] == [(2, 319), (1, 419)]


def test_a_paper_board_without_a_disk_forgets_what_is_displaced() -> None:
    one, mine = board(budget_tokens=0), Context(1, 0, 40, 300)
    one.run(mine, 20)
    one.run(Context(2, 0, 40, 300), 20)
    assert one.run(mine.cut(400), 20).cached == 0
    assert one.files == []


def test_the_disk_of_a_paper_board_is_bounded_and_the_longest_unused_goes() -> None:
    one = board(budget_tokens=1000)
    for session in range(6):
        one.run(Context(session, -1, 0, 300), 20)
    assert [file.session for file in one.files] == [2, 3, 4]


def played(name: str, seed: int) -> Seen:
    there, rng = cluster(3), Random(seed)
    router = OwnRouter(name, there, rng) if name in OWN else OTHERS[name](there, rng)
    return World(SMALL, there, router, seed).run()


@pytest.mark.parametrize("name", [*OWN, *OTHERS])
def test_everybody_is_answered_and_the_same_seed_is_the_same_run(name: str) -> None:
    one, again, other = played(name, 1), played(name, 1), played(name, 2)
    assert one == again != other
    assert one.refused == 0
    assert one.ended >= SMALL.sessions
    assert min(one.wait_ms) == 0
    assert all(ttft > wait for ttft, wait in zip(one.ttft_ms, one.wait_ms, strict=True))


def test_prefixes_are_found_again_more_often_than_by_turns() -> None:
    hits = {name: played(name, 1) for name in ("round_robin", "prefix")}
    ratio = {name: seen.cached / seen.prompt for name, seen in hits.items()}
    assert ratio["prefix"] > 1.3 * ratio["round_robin"]


def test_rays_router_sends_a_conversation_where_it_was_and_strangers_elsewhere() -> None:
    there = cluster(4)
    router = RayPrefix(there, Random(1))
    shape = Shape(sessions=4, systems=0)
    asked: list[str] = []
    for number in range(4):
        one = talk(shape, 1, number, 3)
        for _ in range(3):
            one.note(shape)
            request = Request("r", one.context, 10, QueueTerms(), one, 0.0)
            asked.append(router.choose(request, 0.0).name)
    places = [set(asked[at : at + 3]) for at in range(0, 12, 3)]
    assert all(len(place) == 1 for place in places)
    assert len(set().union(*places)) > 1


def test_two_choices_never_takes_the_longer_queue() -> None:
    there = cluster(2)
    router = TwoChoices(there, Random(1))
    shape = Shape(sessions=2)
    for number in range(10):
        one = talk(shape, 1, number, 1)
        router.offer(Request(str(number), one.context, 10, QueueTerms(), one, 0.0), 0.0)
    assert [router.length(board) for board in there] == [5, 5]


@pytest.mark.parametrize("strategy", [Strategy.ROLLING, Strategy.ATOMIC])
@pytest.mark.parametrize("dies", [0.0, 0.4])
def test_a_rollout_on_paper_ends_with_one_version_everywhere(
    strategy: Strategy, dies: float
) -> None:
    rolling = Rolling(20, strategy, 3, Course(dies=dies))
    found = rolling.run()
    assert (found.boards, found.state) == (20, "succeeded")
    assert rolling.serving() == {"v2"}
    assert (found.died > 0) == (dies > 0)
    assert found.took_s >= found.staged_s > 0


def test_under_overload_as_much_is_done_in_time_as_at_capacity_and_keys_share() -> None:
    full, over = (load(1, 4, factor, lambda _: None) for factor in (1.0, 3.0))
    assert over.good_per_s >= full.good_per_s
    assert over.refused > full.refused
    assert over.fairness > 0.9


def test_memory_is_counted_for_each_context() -> None:
    found = remember(200, 600)
    assert found.contexts == 200
    assert 50 < found.bytes_each < 5000


def test_decisions_are_timed_with_all_boards_known() -> None:
    found = decide(1, 20, samples=20)
    assert (found.boards, found.contexts) == (20, 2000)
    assert 0 < found.decide_p50_us <= found.decide_p99_us


@pytest.mark.parametrize(
    ("shares", "index"),
    [([1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([], 1.0)],
    ids=["equal", "one has all", "nobody"],
)
def test_fairness(shares: list[float], index: float) -> None:
    assert jain(shares) == pytest.approx(index)


def test_figures_of_nothing_are_zero() -> None:
    assert quantile([], 0.5) == 0
    router = OwnRouter("prefix", cluster(1), Random(1))
    assert outcome("none", Seen(), router.spent, 1).hit == 0


def test_lengths_have_the_mean_that_is_asked_for() -> None:
    rng = Random(1)
    drawn = [length(rng, 50, 0.5) for _ in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(50, rel=0.05)
    assert max(drawn) <= 200


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        pytest.param([], command.REPORT, id="a full run"),
        pytest.param(["--output", "here.md"], Path("here.md"), id="one for elsewhere"),
        pytest.param(["--boards", "100"], None, id="a smaller cluster"),
        pytest.param(["--sessions", "100"], None, id="fewer sessions"),
        pytest.param(["--cases", "growth", "memory"], None, id="some cases"),
    ],
)
def test_only_a_full_run_writes_the_page(arguments: list[str], output: Path | None) -> None:
    assert command.options(arguments).output == output


def test_the_command_writes_a_report_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, figures = tmp_path / "report.md", tmp_path / "figures.json"
    cases = ["growth", "memory", "overload", "rollouts", "decisions"]
    arguments = ["--boards", "2", "--sessions", "6", "--output", str(report)]
    arguments += ["--json", str(figures), "--cases", *cases]
    assert command.main(arguments) == 0
    text = report.read_text(encoding="utf-8")
    assert capsys.readouterr().out == text
    for title in ("Growth", "Memory of the index", "Overload", "Rollouts", "Decisions"):
        assert f"## {title}" in text
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert [one["boards"] for one in found["grown"]] == [2, 2]
    assert found["policies"] == {}
