"""What is made of results: Markdown, plots, JSON, answers side by side; and watched processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from rkserve.bench.capture import marked, pairs, render, to_json, with_answers
from rkserve.bench.charts import (
    Chart,
    ChartLine,
    charts,
    decades,
    events_over_time,
    running,
    shares,
    svg,
    ticks,
)
from rkserve.bench.figures import compare, figures
from rkserve.bench.harness.child import BenchFailed
from rkserve.bench.harness.report import TargetVerdict, machine
from rkserve.bench.monitors import NamedProcesses, NamedProcessMonitor, parse_watched
from rkserve.bench.player import NO_ANSWER, PlayedRun, PlayOptions
from rkserve.bench.report import render as render_report
from rkserve.bench.report import summary
from rkserve.bench.results import BenchResults, RunResult, outcome_lines
from rkserve.bench.slo import Slo
from tests.support.values.bench_load import answered, at_once, failed, played

SLO = Slo(ttft_ms=1000)
SVG = "{http://www.w3.org/2000/svg}"


def result(run: PlayedRun) -> RunResult:
    return RunResult(run, figures(run, SLO))


def results(*runs: PlayedRun, **more: Any) -> BenchResults:
    about = {"trace": "2 sessions"}
    return BenchResults("Load", machine(), about, SLO, [result(one) for one in runs], **more)


FAST = played([answered(11.0, board="sim-0", cached_tokens=50), failed(12.0)], target="fast")
SLOW = played([answered(11.0, ttft_s=2.0, board="sim-1", cached_tokens=0)], target="slow")


# -- the report -----------------------------------------------------------------------------------


def row(text: str, begins: str) -> list[str]:
    line = next(one for one in text.splitlines() if one.startswith(f"| {begins}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_report_has_rates_latencies_errors_and_ratios() -> None:
    both = [compare(FAST, SLOW, SLO)]
    text = render_report(results(FAST, SLOW, comparisons=both), charts([FAST, SLOW]))
    assert row(text, "fast |")[:4] == ["fast", "2", "1", "1"]
    assert row(text, "TTFT: slow")[1] == "2 000.0"
    assert row(text, "refused 429 queue_full")[1:] == ["1", "0"]
    assert row(text, "fast / slow")[2] == "0.250 (0.250 to 0.250)"
    assert row(text, "sim-1")[1:] == ["0", "1"]
    assert "(ttft.svg)" in text
    assert "TTFT ≤ 1000 ms" in text


def test_a_missed_target_is_said() -> None:
    missed = TargetVerdict("TTFT p50: a / b", 0.5, 0.4, at_most=True)
    found = results(FAST, verdicts=[missed, TargetVerdict("answered", 1.0, 1.0, at_most=False)])
    assert row(summary(found), "TTFT p50: a / b")[-1] == "missed"
    assert row(summary(found), "answered")[-1] == "reached"
    assert found.missed == [missed]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        pytest.param(played([answered(11.0)], cpu_s=19.5), "98% of a core", id="busy itself"),
        pytest.param(played([answered(11.0, usage=False)]), "came without usage", id="no usage"),
        pytest.param(played([answered(11.0, streamed=False)]), "not streamed", id="not streamed"),
    ],
)
def test_figures_that_may_mislead_say_so(run: PlayedRun, said: str) -> None:
    assert said in summary(results(run))
    assert said in render_report(results(run))


def test_an_interrupted_benchmark_says_so() -> None:
    found = results(played([], interrupted=True), complete=False)
    assert "Interrupted" in summary(found)
    assert json.loads(json.dumps(found.to_json()))["complete"] is False


def test_a_closed_loop_says_what_it_cannot_see() -> None:
    closed = played([answered(11.0)], plan=PlayOptions(clients=2))
    assert "closed loop a slow server" in render_report(results(closed))
    assert "closed loop a slow server" not in render_report(results(FAST))


def test_errors_are_counted_over_all_runs() -> None:
    assert results(FAST, SLOW).error_share == pytest.approx(1 / 3)
    assert results().error_share == 0.0
    assert not results(FAST).unreachable


def test_json_says_all_figures_and_no_times_of_day() -> None:
    found = json.loads(json.dumps(results(FAST, comparisons=[compare(FAST, SLOW, SLO)]).to_json()))
    (run,) = found["runs"]
    assert run["ttft_ms"]["p50"] == {"value": pytest.approx(500.0), "low": None, "high": None}
    assert run["prefix"]["ratio"] == pytest.approx(0.5)
    assert run["errors"] == {"refused 429 queue_full": 1}
    assert found["comparisons"][0]["ratios"]["TTFT p50"]["value"] == pytest.approx(0.25)


def test_each_outcome_is_a_line_with_times_from_the_start_of_its_run() -> None:
    first, second = (json.loads(line) for line in outcome_lines([result(FAST)]))
    assert (first["run"], first["session"], first["kind"]) == ("fast", "s0", "ok")
    assert first["due_s"] == pytest.approx(1.0)
    assert first["text_s"] == pytest.approx([1.5, 1.6, 1.7, 1.8, 1.9])
    assert (second["kind"], second["end_s"]) == ("refused", None)


# -- plots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize(
    "points",
    [
        pytest.param([(1.0, 2.0)], id="one point"),
        pytest.param([(5.0, 0.0), (5.0, 0.0)], id="no extent"),
        pytest.param([(float(n + 1), float(n)) for n in range(10_000)], id="many"),
        pytest.param([], id="none"),
    ],
)
def test_whatever_is_drawn_is_svg_within_its_frame(
    points: list[tuple[float, float]], log_x: bool
) -> None:
    chart = Chart("A <title> & more", "x", "y", [ChartLine("a < b", points)], log_x=log_x)
    drawn = svg(chart)
    root = ET.fromstring(drawn)
    assert root.tag == f"{SVG}svg"
    assert len(drawn) < 40_000
    for pair in (root.find(f"{SVG}polyline").get("points") or "").split():  # type: ignore[union-attr] # there is one
        x, y = map(float, pair.split(","))
        assert 0 <= x <= 720
        assert 0 <= y <= 360


def test_a_line_begins_and_ends_where_it_should() -> None:
    drawn = ET.fromstring(svg(Chart("t", "x", "y", [ChartLine("a", [(0.0, 0.0), (10.0, 5.0)])])))
    line = drawn.find(f"{SVG}polyline")
    assert line is not None
    assert line.get("points") == "70.0,312.0 704.0,40.0"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        pytest.param(0, 10, [0, 2, 4, 6, 8, 10], id="tens"),
        pytest.param(0, 0.7, [0, 0.2, 0.4, 0.6], id="shares"),
        pytest.param(3, 3, [3], id="a point"),
        pytest.param(0, 1234, [0, 250, 500, 750, 1000], id="quarters"),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_ticks_of_decades() -> None:
    assert decades(3, 150) == pytest.approx([5, 10, 20, 50, 100])


def test_a_distribution_rises_to_all() -> None:
    assert shares([3.0, 1.0, 2.0, 2.0]) == [(1.0, 25.0), (2.0, 50.0), (2.0, 75.0), (3.0, 100.0)]


def test_running_requests_are_counted_from_due_to_over() -> None:
    run = played([answered(11.0), answered(11.5), failed(20.0)])
    counts = running(run)
    assert max(count for _, count in counts) == 2
    assert counts[-1][1] == 0


def test_no_text_is_no_line() -> None:
    assert events_over_time(played([failed(11.0)])) == []
    assert list(charts([played([failed(11.0)])])) == ["running"]


# -- side by side ---------------------------------------------------------------------------------


def test_what_only_one_of_two_texts_says_is_marked() -> None:
    assert marked("the red house", "the blue house") == "the [-red-]{+blue+} house"
    assert marked("same", "same") == "same"
    assert marked("", "new") == "{+new+}"


def test_both_answer_the_same_prompts() -> None:
    trace = at_once(1, turns=2)
    first = [answered(turn=0, text="one"), failed(turn=1)]
    given = with_answers(trace, first)
    assert [turn.answer for turn in given.sessions[0].turns] == ["one", NO_ANSWER]


def test_answers_are_put_beside_each_other() -> None:
    trace = at_once(4)
    said = {"s0": ("a b c", "a b c"), "s1": ("a b c", "a x c"), "s2": ("a", "a b")}
    first = [answered(session=name, text=one) for name, (one, _) in said.items()]
    second = [answered(session=name, text=two) for name, (_, two) in said.items()]
    found = pairs(trace, [*first, failed(session="s3")], [*second, answered(session="s3")])
    assert [one.first_at for one in found] == [None, 2, 1, None]
    assert [one.same for one in found] == [True, False, False, False]
    assert found[1].alike == pytest.approx(0.8)
    text = render(("left", "right"), found)
    assert "a [-b-]{+x+} c" in text
    assert "left: refused 429 queue_full" in text
    told = to_json(("left", "right"), found)
    assert (told["prompts"], told["same"], told["failed"]) == (4, 1, 1)
    assert told["pairs"][1]["answers"]["right"]["text"] == "a x c"


def test_a_prompt_that_was_not_asked_twice_is_left_out() -> None:
    assert pairs(at_once(1), [answered(text="a")], []) == []


def test_code_in_an_answer_cannot_end_its_block() -> None:
    text = "```\nrm -rf\n```"
    found = pairs(at_once(1), [answered(text=text)], [answered(text=f"{text} ")])
    assert "\n````\n" in render(("a", "b"), found)


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param("server=41", NamedProcesses("server", pid=41), id="pid"),
        pytest.param(
            "server=my server --x=1", NamedProcesses("server", text="my server --x=1"), id="text"
        ),
    ],
)
def test_processes_are_named_by_pid_or_command(given: str, expected: NamedProcesses) -> None:
    assert parse_watched(given) == expected


@pytest.mark.parametrize("given", ["server", "=41", "server="])
def test_a_process_without_a_name_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="name=pid"):
        parse_watched(given)


def test_a_process_is_measured_with_all_below_it() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    mark = f"watched-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", code, mark], stdin=subprocess.PIPE) as child:
        for watched in (NamedProcesses("it", pid=child.pid), NamedProcesses("it", text=mark)):
            watch = NamedProcessMonitor([watched])
            watch.start()
            use, memories = watch.stop()
            assert list(use.by_part_ms) == ["it"]
            assert use.wall_ms > 0
            assert all(one.rss > 0 for one in memories["it"])


def test_a_shell_that_only_names_a_process_is_not_taken_for_it() -> None:
    mark = f"watched-{os.getpid()}"
    code = f"from rkserve.bench.harness.procfs import *; print(pids_with(PROC, '{mark}'), end='')"
    found = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1"; true {mark}', sys.executable, code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.stdout == "[]"


def test_a_process_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="no process runs that is it"):
        NamedProcessMonitor([NamedProcesses("it", text="x")], root=tmp_path)


def test_what_is_too_long_to_compare_is_shown_all_the_same() -> None:
    words = " ".join(f"w{number}" for number in range(3000))
    assert marked(f"{words} end", f"{words} end") == f"{words} end"
    shown = marked(f"{words} one", f"{words} two")
    assert shown.startswith(words[:100])
    assert "one" in shown
    assert "two" in shown
