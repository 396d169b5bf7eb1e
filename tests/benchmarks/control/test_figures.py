"""The control benchmark's judgement: late tokens, lost ones, versions, and what grows."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control.__main__ import REPORT, options
from benchmarks.control.answers import Answer, Call, Span
from benchmarks.control.cases import Played, Staged
from benchmarks.control.checks import (
    Checked,
    Era,
    Said,
    began,
    check,
    eras,
    flaws_of_truth,
    truth,
)
from benchmarks.control.figures import (
    REFUSED,
    PauseFigures,
    RoundFigures,
    StagedFigures,
    SwitchFigures,
    pause_figures,
    phases_ms,
    refusals,
    switch_figures,
    verdicts,
)
from benchmarks.control.measure import CASES, FULL, QUICK
from benchmarks.control.report import ControlResults, render
from benchmarks.harness.exchange import Exchange
from benchmarks.harness.figures import Spread
from benchmarks.harness.growth import Belongings, Growth, Sample, growth, sample
from rkserve.bench.processes import BenchFailed, CpuUse
from rkserve.bench.results import Machine

A, B = "tone@a", "tone@b"
MB = 1_000_000
GOOD = Checked(4, 0, 0, 0, 0, 0, 3)


def answer(sent_s: float = 0.0, version: str = A, **changes: Any) -> Answer:
    """One that waits 1 s, is prefilled for 0.5 s and then brings three tokens, one a second."""
    of_exchange = {
        "content_s": tuple(sent_s + 1.5 + n for n in range(3)),
        "end_s": sent_s + 4.0,
        "completion_tokens": 3,
        "queue_ms": 1000.0,
        "prefill_ms": 500.0,
        **changes.pop("exchange", {}),
    }
    plain = Answer(
        exchange=Exchange(sent_s, **of_exchange),
        prompt=0,
        text="abc",
        finish="length",
        stamp=version,
        version=version,
        spans=(Span(version, 0, 3),),
    )
    return replace(plain, **changes)


def call(
    what: str, asked_s: float, answered_s: float, status: int = 200, *ms: float, **body: Any
) -> Call:
    results = {f"sim-{n}": {"status": "done", "latency_ms": one} for n, one in enumerate(ms)}
    return Call(what, asked_s, answered_s, status, {"results": results, **body})


SAID = {(A, 0): Said("abc", 3), (B, 0): Said("xyz", 3)}
# Served is A, from 10 to 10.1 s it is on its way to B, and at 20 s back to A.
TIMES = eras(A, [(call("b", 10.0, 10.1), B), (call("a", 20.0, 20.1), A)])


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "found"),
    [
        pytest.param(answer(), {}, id="as it must be"),
        pytest.param(answer(text="ab"), {"wrong": 1}, id="a token was lost"),
        pytest.param(answer(text="abbc"), {"wrong": 1}, id="a token came twice"),
        pytest.param(
            answer(exchange={"completion_tokens": 4}),
            {"wrong": 1, "unstamped": 1},
            id="a token more is counted than there should be, and it has no version",
        ),
        pytest.param(
            answer(spans=(Span(A, 0, 1), Span(B, 1, 3)), version=B),
            {"wrong": 1, "mixed": 1},
            id="two versions",
        ),
        pytest.param(answer(stamp=""), {"unstamped": 1}, id="no header"),
        pytest.param(answer(stamp="", early=True), {}, id="headers before a board accepted it"),
        pytest.param(replace(answer(), version=""), {"unstamped": 1}, id="none at the end"),
        pytest.param(answer(spans=()), {"unstamped": 1}, id="no spans"),
        pytest.param(
            answer(spans=(Span(A, 0, 1), Span(A, 2, 3))), {"unstamped": 1}, id="a gap in the spans"
        ),
        pytest.param(answer(stamp=B), {}, id="accepted before a switch, and begun after it"),
        pytest.param(answer(prompt=7), {"wrong": 1}, id="nobody knows what is right"),
        pytest.param(answer(finish="abort"), {"aborted": 1}, id="aborted"),
        pytest.param(answer(exchange={"end_s": None}), {"aborted": 1}, id="without an end"),
        pytest.param(answer(exchange={"error": "boom"}), {"aborted": 1}, id="an error"),
    ],
)
def test_each_way_to_be_wrong_is_counted_by_its_name(one: Answer, found: dict[str, int]) -> None:
    checked = check([one], SAID, [Era(A)])

    names = ("aborted", "wrong", "mixed", "unstamped", "stale")
    assert {name: n for name in names if (n := getattr(checked, name))} == found


@pytest.mark.parametrize(
    ("sent_s", "version", "stale", "decided"),
    [
        pytest.param(0.0, A, 0, 1, id="before the switch"),
        pytest.param(0.0, B, 1, 1, id="too early for the new one"),
        pytest.param(9.05, A, 0, 0, id="in the middle of the switch, the old one"),
        pytest.param(9.05, B, 0, 0, id="in the middle of the switch, the new one"),
        pytest.param(8.5, A, 0, 1, id="sent and begun before it, ended after it: pinned"),
        pytest.param(9.2, A, 1, 1, id="sent before it, begun after it, with the old one"),
        pytest.param(9.2, B, 0, 1, id="sent before it, begun after it, with the new one"),
        pytest.param(12.0, A, 1, 1, id="sent after it, with the old one"),
        pytest.param(22.0, A, 0, 1, id="after the switch back"),
    ],
)
def test_a_version_is_stale_once_its_successor_was_acknowledged(
    sent_s: float, version: str, stale: int, decided: int
) -> None:
    said = {(version, 0): Said("abc", 3)}

    checked = check([answer(sent_s, version)], said, TIMES)

    assert (checked.stale, checked.decided) == (stale, decided)


def test_a_paused_answer_may_have_waited_after_it_began() -> None:
    assert began(answer(5.0)) == pytest.approx((6.0, 6.0))
    assert began(answer(5.0, paused_ms=10.0)) == pytest.approx((5.0, 6.5))
    assert began(answer(5.0, exchange={"content_s": ()})) == (6.0, math.inf)


def test_a_paused_answer_may_have_been_prefilled_again_after_its_first_text() -> None:
    """Its first text at 10.3 s and prefills of 1 s in all do not mean that it began at 9.3 s."""
    prefilled_often = {"content_s": (10.3, 11.5, 12.5), "prefill_ms": 1000.0}
    late = answer(9.0, B, paused_ms=500.0, exchange=prefilled_often)

    assert began(late) == pytest.approx((9.0, 10.3))
    assert check([late], {(B, 0): Said("abc", 3)}, TIMES).stale == 0


def test_a_switch_that_was_undone_leaves_its_version_allowed_only_while_it_was_tried() -> None:
    times = eras(A, [(call("b", 10.0, 11.0, 504), B), (call("b", 20.0, 21.0), B)])

    assert times == [
        Era(B, 10.0, 11.0),
        Era(A, -math.inf, 21.0),
        Era(B, 20.0, math.inf),
    ]


def test_a_switch_that_some_boards_have_not_followed_yet_is_in_force() -> None:
    times = eras(A, [(call("b", 10.0, 11.0, 207), B)])

    assert times == [Era(A, -math.inf, 11.0), Era(B, 10.0, math.inf)]
    assert check([answer(12.0, A)], SAID, times).stale == 1
    assert check([answer(12.0, B)], SAID, times).stale == 0


def test_what_is_right_is_told_by_answers_of_one_version() -> None:
    assert truth([answer(), answer(version=B, text="xyz")]) == SAID
    assert flaws_of_truth([answer(), answer()]) == []
    assert flaws_of_truth([]) == ["no answer at all"]
    assert flaws_of_truth([answer(spans=())] * 2) == ["2 x 0 versions, ended by 'length'"]
    assert flaws_of_truth([answer(exchange={"error": "boom"})]) == ["1 x boom"]


def test_errors_are_quoted_the_most_frequent_first() -> None:
    broken = [answer(exchange={"error": word}) for word in ("boom", "bang", "boom")]

    assert check(broken, SAID, [Era(A)]).errors == ("2 x boom", "1 x bang")


# -- pauses ---------------------------------------------------------------------------------------


def pauses(*texts_s: float) -> PauseFigures:
    """Figures of one pause, answered after 60 ms, and resumed half a second later."""
    calls = [call("pause", 10.0, 10.06, 200, 20.0, 55.0, 40.0), call("resume", 10.5, 10.52)]
    one = answer(exchange={"content_s": texts_s})
    return pause_figures(calls, [one, answer(100.0)], step_ms=50.0)


def test_a_pause_is_timed_to_its_answer_and_a_resumption_to_each_next_text() -> None:
    figures = pauses(9.9, 10.05, 10.9, 11.0)

    assert figures.answered_ms.p99 == pytest.approx(60)
    assert figures.skew_ms.p99 == pytest.approx(35)
    assert (figures.boards_ms.count, figures.boards_ms.p50) == (3, 40.0)
    assert figures.resumed_ms.p50 == pytest.approx(400)
    assert figures.resume_answered_ms.p50 == pytest.approx(20)
    assert (figures.count, figures.refused, figures.late, figures.latest_ms) == (1, 0, 0, 0)


def test_a_text_after_the_answer_is_late_and_one_after_the_resume_call_is_not() -> None:
    figures = pauses(9.9, 10.07, 10.08, 10.51, 11.0)

    assert figures.late == 2
    assert figures.latest_ms == pytest.approx(20)


def test_pauses_that_say_nothing_are_a_failure() -> None:
    refused = [call("pause", 0, 1, 504, error={"message": "too slow"}), call("resume", 1, 2)]
    with pytest.raises(BenchFailed, match="pause: HTTP 504, too slow"):
        pause_figures(refused, [answer()], 50.0)
    with pytest.raises(BenchFailed, match="interrupted any answer"):
        pauses(9.0, 9.5)


@pytest.mark.parametrize(("step_ms", "reached"), [(10.1, True), (9.9, False)])
def test_a_pause_may_take_the_slowest_step_and_50_ms(step_ms: float, reached: bool) -> None:
    figures = replace(pauses(9.9, 11.0), step_ms=step_ms)

    first, *others = verdicts((figures, GOOD), [], None, None)

    assert first.reached is reached
    assert all(one.reached for one in others)


# -- switches, staging ----------------------------------------------------------------------------


def switches(**changes: Any) -> SwitchFigures:
    calls = [
        call("b", 1.0, 1.1, 200, 10.0, 40.0, phases={"hold": 60.0, "switch": 5.0}),
        call("a", 2.0, 2.3, 200, 10.0, 30.0, phases={"hold": 80.0, "switch": 5.0}),
        call("b", 3.0, 3.3, 409, error={"message": "busy"}),
    ]
    return replace(switch_figures("atomic", calls, GOOD), **changes)


def test_switches_are_timed_whole_by_phase_and_between_boards() -> None:
    figures = switches()

    assert (figures.count, figures.refused) == (2, 1)
    assert figures.took_ms.p50 == pytest.approx(200)
    assert figures.skew_ms == Spread.of([30.0, 20.0])
    assert list(figures.phases_ms) == ["hold", "switch"]
    assert figures.phases_ms["hold"].p50 == pytest.approx(70)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        pytest.param({"refused": 0}, [], id="none"),
        pytest.param({}, [REFUSED], id="a call was refused"),
        pytest.param(
            {"refused": 0, "checked": Checked(9, 1, 1, 1, 1, 1, 9)},
            [
                "answers aborted",
                "answers with tokens lost or doubled",
                "answers of several versions",
                "answers without their version",
                "answers that were stale",
            ],
            id="answers that are not what they must be",
        ),
        pytest.param(
            {"refused": 0, "skew_ms": Spread.of([51.0])},
            ["first to last board, p99"],
            id="boards apart",
        ),
    ],
)
def test_each_bar_of_a_switch_has_its_verdict(changes: dict[str, Any], missed: list[str]) -> None:
    found = verdicts(None, [switches(**changes)], None, None)

    names = [one.what.partition(": ")[2] for one in found if not one.reached]
    assert names == missed


def test_a_switch_whose_boards_were_not_timed_has_no_skew() -> None:
    figures = switch_figures("rolling", [call("b", 1.0, 1.1)], GOOD)

    assert figures.skew_ms is None
    assert all(one.unit != "ms" for one in verdicts(None, [figures], None, None))
    apart = replace(figures, skew_ms=Spread.of([9000.0]))
    assert all(one.reached for one in verdicts(None, [apart], None, None)), (
        "boards take turns in it"
    )
    with pytest.raises(BenchFailed, match="no switch was answered"):
        switch_figures("rolling", [call("b", 1.0, 1.1, 409)], GOOD)


@pytest.mark.parametrize(("took_ms", "reached"), [(5300.0, True), (5340.0, False)])
def test_a_large_adapter_has_5_s_beyond_the_simulated_loading(
    took_ms: float, reached: bool
) -> None:
    figures = StagedFigures(32 << 20, 8, Spread.of([took_ms]), 320.0, {})

    (verdict,) = verdicts(None, [], figures, None)

    assert verdict.reached is reached


def test_refusals_are_told_once_each() -> None:
    calls = [call("a", 0, 1, 409, error={"message": "busy"}) for _ in range(3)]
    assert refusals([*calls, call("b", 0, 1)]) == ["a: HTTP 409, busy"]
    assert phases_ms([{}, {"phases": {"x": 1.0}}])["x"].count == 1


# -- growth ---------------------------------------------------------------------------------------


def samples(count: int, rss_each: int = 0, files_each: int = 0) -> list[Sample]:
    return [
        Sample(n, {"router": Belongings(100 * MB + n * rss_each, 50 + n * files_each, 20)})
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        pytest.param(samples(40), [], id="nothing grows"),
        pytest.param(samples(40, rss_each=MB), ["memory"], id="memory"),
        pytest.param(samples(40, files_each=1), ["files"], id="files"),
        pytest.param(
            [
                *samples(10, files_each=5),
                *[replace(one, rounds=one.rounds + 10) for one in samples(30)],
            ],
            [],
            id="only while it warms up",
        ),
    ],
)
def test_growth_is_from_the_second_quarter_to_the_last(
    found: list[Sample], missed: list[str]
) -> None:
    (grown,) = growth(found)

    assert grown.rounds == pytest.approx(20, abs=1)
    assert [v.what.rpartition(" ")[2] for v in grown.verdicts() if not v.reached] == missed


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        pytest.param({}, [], id="as it must be"),
        pytest.param({"refused": 1}, [f"rounds: {REFUSED}"], id="a call was refused"),
        pytest.param(
            {"checked": replace(GOOD, wrong=2, stale=1)},
            ["rounds: answers with tokens lost or doubled", "rounds: answers that were stale"],
            id="answers that are not what they must be",
        ),
        pytest.param(
            {"growth": growth(samples(40, files_each=1))}, ["files"], id="something grows"
        ),
    ],
)
def test_rounds_have_bars_for_calls_answers_and_what_is_kept(
    changes: dict[str, Any], missed: list[str]
) -> None:
    figures = replace(RoundFigures(40, 0, GOOD, growth(samples(40))), **changes)

    found = [one.what for one in verdicts(None, [], None, figures) if not one.reached]

    assert [what.rpartition(" ")[2] if what.endswith("files") else what for what in found] == missed


def test_a_few_samples_say_nothing_and_ray_s_own_processes_are_only_shown() -> None:
    assert growth(samples(7)) == []
    assert Growth("proxy", 9, Belongings(1, 1, 1), Belongings(9, 9, 9)).verdicts() == []


def test_belongings_are_added_up_over_the_processes_of_a_part(tmp_path: Path) -> None:
    for pid, parent, command in (
        (10, 1, "python -m rkserve.bench.cluster"),
        (11, 10, "ray::ServeReplica:rkserve:Board-sim"),
        (12, 10, "ray::ServeReplica:rkserve:Board-sim"),
        (13, 10, "ray::ServeReplica:rkserve:Coordinator"),
        (14, 10, "raylet"),
    ):
        place = tmp_path / str(pid)
        (place / "fd").mkdir(parents=True)
        for number in range(3):
            (place / "fd" / str(number)).touch()
        (place / "stat").write_text(f"{pid} (x) S {parent} " + " ".join(["0"] * 40))
        (place / "cmdline").write_bytes(command.replace(" ", "\0").encode())
        ending = pid == 12  # the kernel has taken its memory already
        (place / "status").write_text(
            "Name:\tx\nThreads:\t7\n" + ("" if ending else "VmRSS:\t2000 kB\n")
        )

    found = sample(tmp_path, [10], rounds=5)

    assert found == Sample(
        5,
        {
            "board replica": Belongings(2000 * 1024, 3, 7),
            "coordinator": Belongings(2000 * 1024, 3, 7),
        },
    )


# -- the command and its page ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "cases", "writes"),
    [
        pytest.param([], CASES, REPORT, id="a full run writes the page"),
        pytest.param(["--quick"], CASES, None, id="a quick one does not"),
        pytest.param(["--cases", "staged,pauses"], ("pauses", "staged"), None, id="nor some cases"),
        pytest.param(["--quick", "--output", "x.md"], CASES, Path("x.md"), id="unless asked"),
    ],
)
def test_the_page_is_only_written_from_a_full_run(
    arguments: list[str], cases: tuple[str, ...], writes: Path | None
) -> None:
    asked = options(arguments)

    assert (asked.cases, asked.output) == (cases, writes)
    assert asked.size == (QUICK if "--quick" in arguments else FULL)


def test_the_number_of_rounds_can_be_chosen() -> None:
    assert options(["--rounds", "1000"]).size == replace(FULL, rounds=1000)


@pytest.mark.parametrize(
    "arguments", [["--rounds", "6"], ["--rounds", "9"], ["--rounds", "x"], ["--cases", "sleep"]]
)
def test_what_cannot_be_measured_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        options(arguments)


def results() -> ControlResults:
    calls = [call("pause", 10.0, 10.06, 200, 20.0, 55.0), call("resume", 10.5, 10.52)]
    played = Played([answer()], calls, SAID)
    rounds = RoundFigures(40, 0, GOOD, growth(samples(40)))
    staged = StagedFigures(32 << 20, 8, Spread.of([900.0]), 320.0, {"stage": Spread.of([400.0])})
    figures = pauses(9.9, 10.07, 11.0)
    switched = switches()
    return ControlResults(
        machine=Machine(2, "a processor", 16.0, {"Python": "3.11"}),
        verdicts=verdicts((figures, GOOD), [switched], staged, rounds),
        pauses=(played, figures, GOOD),
        switches=[(played, switched)],
        staged=([Staged(900.0, {"phases": {"stage": 400.0}})], staged),
        rounds=(played, rounds),
        cpu={"pauses": CpuUse(2)},
    )


def test_the_page_has_every_bar_with_its_verdict_and_the_figures_behind_it() -> None:
    found = results()

    text = render(found)

    rows = [line for line in text.splitlines() if line.startswith("|")]
    for verdict in found.verdicts:
        (row,) = (row for row in rows if row.startswith(f"| {verdict.what} "))
        assert row.endswith("reached |" if verdict.reached else "missed |")
    assert "was asked for: 1 (the last one after 10.0 ms)" in text
    assert "| pause call to its answer, decode steps" in text
    assert "- atomic: Of 4 answers 0 were aborted" in text
    assert "32 MiB" in text
    assert "40 rounds of pause, switch" in text
    assert f"{REFUSED[0].upper()}{REFUSED[1:]}: 0." in text
    assert "nan" not in text


def test_a_page_of_one_case_says_nothing_of_the_others() -> None:
    text = render(replace(results(), pauses=None, switches=(), rounds=None, cpu={}))

    sections = [line for line in text.splitlines() if line.startswith("## ")]
    assert sections == [
        "## What it must reach",
        "## A large adapter on its way to all boards",
        "## How",
    ]


def test_answers_travel_as_json() -> None:
    one = answer()

    assert Answer.from_json(json.loads(json.dumps(asdict(one)))) == one
