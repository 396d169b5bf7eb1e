"""``rkserve bench``: exit codes, reports, captures, interruptions, presets and traces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rkserve.bench.trace import read_trace
from rkserve.cli.context import Exit
from tests.support.http.fake_openai import FakeOpenAi, serving
from tests.support.http.terminal import QUICK, bench, plain, report

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0


@pytest.fixture
def server() -> Iterator[FakeOpenAi]:
    with serving() as fake:
        yield fake


def test_a_broken_trace_is_named(server: FakeOpenAi, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("{}")
    code, _, err = bench("run", "--url", server.url, "--trace", str(tmp_path / "trace.jsonl"))
    assert code == Exit.FAILED
    assert "line 1: not a trace" in err


def test_the_same_trace_is_played_against_each(server: FakeOpenAi) -> None:
    urls = ("--url", f"a={server.url}", "--url", f"b={server.url}")
    code, found = report("run", *QUICK, *urls)
    assert code == Exit.DONE
    assert [run["target"] for run in found["runs"]] == ["a", "b"]
    (compared,) = found["comparisons"]
    assert (compared["target"], compared["to"]) == ("b", "a")
    asked = [one.messages[-1]["content"] for one in server.asked]
    assert sorted(asked[:4]) == sorted(asked[4:])
    # Nothing that the first run left in a cache serves the second.
    openings = {one.messages[0]["content"] for one in server.asked}
    assert openings == {"Run 0.", "Run 1."}


def test_overload_asks_for_the_capacity_and_three_times_that(server: FakeOpenAi) -> None:
    words = ("--seconds", "0.3", "--sessions", "30", "--clients", "2", "--url", server.url)
    code, found = report("overload", *words)
    assert code in (Exit.DONE, Exit.PARTLY)  # how it ends is the machine's matter
    runs = found["runs"]
    assert [run["target"] for run in runs] == [
        "server, capacity",
        "server, 1 x capacity",
        "server, 3 x capacity",
    ]
    assert runs[2]["asked"] == pytest.approx(3 * runs[1]["asked"], abs=3)
    assert found["slo"]["e2e_ms"] > 0
    told = [one.headers.get("x-request-timeout") for one in server.asked]
    assert told[0] is None
    assert float(told[-1] or 0) == pytest.approx(found["slo"]["e2e_ms"] / 1e3)


def test_a_server_without_any_capacity_cannot_be_overloaded(server: FakeOpenAi) -> None:
    code, _, err = bench("overload", "--sessions", "4", "--url", server.url, "--model", "busy")
    assert code == Exit.FAILED
    assert "answered nothing" in err


def test_answers_are_shown_side_by_side(server: FakeOpenAi, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--model", "ok", "--model", "shouts", "--sessions", "2", "--out", str(out))
    code, printed, _ = bench("compare", "--url", server.url, *words)
    assert code == Exit.DONE
    assert "[-one-]{+ONE+} two three" in printed
    assert "[-one-]{+ONE+} two three" in (out / "report.md").read_text()
    (captured,) = json.loads((out / "results.json").read_text())["captured"]
    assert (captured["prompts"], captured["same"]) == (2, 0)


def test_the_second_of_two_gets_the_history_of_the_first(server: FakeOpenAi) -> None:
    words = ("--model", "ok", "--model", "shouts", "--sessions", "1", "--turns", "2")
    assert bench("compare", "--url", server.url, *words)[0] == Exit.DONE
    histories = [one.messages[:-1] for one in server.asked if len(one.messages) > 2]
    assert len(histories) == 2
    assert histories[0] == histories[1]


def test_a_trace_is_made_and_played_again(server: FakeOpenAi, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    shape = ("--seed", "5", "--sessions", "3", "--rate", "100", "--turns", "2", "--systems", "1")
    assert bench("trace", *shape, "--output", str(path))[0] == Exit.DONE
    assert bench("trace", *shape)[1] == path.read_text()
    trace = read_trace(path)
    assert bench("run", "--url", server.url, "--trace", str(path))[0] == Exit.DONE
    assert len(server.asked) == trace.requests == 6


def captured(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "captured.jsonl").read_text().splitlines()]


def test_several_runs_are_played_and_their_spread_is_shown(server: FakeOpenAi) -> None:
    urls = ("--url", f"a={server.url}", "--url", f"b={server.url}")
    code, found = report("run", *QUICK, "--runs", "3", *urls)
    assert code == Exit.DONE
    names = [f"{name}, run {number}" for name in ("a", "b") for number in (1, 2, 3)]
    assert [run["target"] for run in found["runs"]] == names
    assert [(one["target"], one["to"]) for one in found["comparisons"]] == list(
        zip(names[3:], names[:3], strict=True)
    )
    for name in ("a", "b"):
        told = found["spread"][name]["TTFT p50, ms"]
        medians = [
            run["ttft_ms"]["p50"]["value"]
            for run in found["runs"]
            if run["target"].startswith(f"{name},")
        ]
        assert (told["least"], told["most"], told["runs"]) == (min(medians), max(medians), 3)
        assert told["mean"] == pytest.approx(sum(medians) / 3)
        assert found["spread"][name]["errors"]["deviation"] == 0
    # Each run has a salt of its own: nothing that one left in a cache helps the next.
    openings = {asked.messages[0]["content"][:8] for asked in server.asked}
    assert len(openings) == 6
    _, out, _ = bench("run", *QUICK, "--runs", "2", "--url", server.url)
    assert "Spread over the runs" in out


def test_compare_shows_all_prompts_uncut_where_that_is_asked(
    server: FakeOpenAi, tmp_path: Path
) -> None:
    models = ("--model", "ok", "--model", "completion")
    shape = ("--sessions", "2", "--user-words", "400", "--systems", "1", "--url", server.url)
    _, out, _ = bench("compare", *shape, *models)
    prompt = server.asked[0].messages[-1]["content"]
    assert len(prompt) > 400
    assert prompt not in out, "equal answers are only counted"
    _, out, _ = bench("compare", *shape, *models, "--all-prompts")
    assert prompt in out
    assert server.asked[0].messages[0]["content"] in out, "the system prompt, too"
    assert out.count("### ") == 2


@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param(("run", *QUICK), Exit.DONE, id="measured"),
        pytest.param(("run", *QUICK, "--model", "busy"), Exit.FAILED, id="nothing was answered"),
        pytest.param(("smoke",), Exit.DONE, id="smoke"),
        pytest.param(("smoke", "--model", "fails"), Exit.FAILED, id="smoke, nothing answered"),
    ],
)
def test_exit_codes(server: FakeOpenAi, words: tuple[str, ...], code: Exit) -> None:
    assert bench(*words, "--url", server.url)[0] == code


@pytest.mark.parametrize(
    ("allowed", "code"),
    [pytest.param("0.4", Exit.PARTLY, id="too many"), pytest.param("0.5", Exit.DONE, id="allowed")],
)
def test_errors_are_counted_against_what_is_allowed(
    server: FakeOpenAi, allowed: str, code: Exit
) -> None:
    urls = ("--url", f"good={server.url}", "--url", f"bad={server.url}")
    models = ("--model", "ok", "--model", "busy")
    assert bench("run", *QUICK, *urls, *models, "--max-errors", allowed)[0] == code


def test_a_url_without_a_server_is_named() -> None:
    with serving() as gone:
        pass
    code, _, err = bench("smoke", "--url", gone.url)
    assert code == Exit.UNREACHABLE
    assert "cannot be reached" in err
    code, out, _ = bench("run", *QUICK, "--url", gone.url, "--model", "ok")
    assert code == Exit.UNREACHABLE
    assert "connect ECONNREFUSED" in out


def test_a_folder_gets_the_report_its_plots_and_all_outcomes(
    server: FakeOpenAi, tmp_path: Path
) -> None:
    out = tmp_path / "made" / "here"
    code, printed, _ = bench("run", *QUICK, "--turns", "2", "--url", server.url, "--out", str(out))
    assert code == Exit.DONE
    text = (out / "report.md").read_text()
    assert "## Rates" in printed
    for name in ("ttft", "gaps", "end-to-end", "running"):
        assert f"({name}.svg)" in text
        assert (out / f"{name}.svg").read_text().startswith("<svg")
    found = json.loads((out / "results.json").read_text())
    lines = (out / "outcomes.jsonl").read_text().splitlines()
    assert len(lines) == found["runs"][0]["asked"] == 8
    assert found["runs"][0]["prefix"]["cached"] > 0


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="ctrl-c"),
        pytest.param(signal.SIGTERM, id="kill", marks=pytest.mark.long),
    ],
)
def test_what_is_interrupted_prints_what_there_is(
    server: FakeOpenAi, tmp_path: Path, number: int
) -> None:
    out = tmp_path / "out"
    words = ["run", "--url", server.url, "--model", "hangs", "--sessions", "3", "--rate", "1000"]
    with subprocess.Popen(
        [sys.executable, "-m", "rkserve", "bench", *words, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        deadline_s = time.monotonic() + PATIENCE_S
        while len(server.asked) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        child.send_signal(number)
        printed, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, err) == (Exit.INTERRUPTED, "")
    assert "Interrupted: these are the figures of what there was." in printed
    assert json.loads((out / "results.json").read_text())["runs"][0]["cut"] == 3


def test_help_says_the_exit_codes() -> None:
    code, printed, _ = bench("--help")
    assert code == Exit.DONE
    assert "Exit codes" in plain(printed)


BOARD = {
    "id": "sim-0",
    "memory_mb": 1689.2,
    "hardware": {"npu_load": [40.0, 60.0], "npu_hz": 10**9, "memory_available_bytes": 2 * 10**9},
}


def test_a_capture_has_whole_prompts_answers_figures_and_boards(
    server: FakeOpenAi, tmp_path: Path
) -> None:
    server.boards = [BOARD, {**BOARD, "id": "sim-1", "memory_mb": 1.0}]
    shape = ("--sessions", "2", "--rate", "500", "--systems", "1", "--system-words", "900")
    words = ("run", *shape, "--turns", "2", "--think", "0.001", "--clients", "1", "--capture")
    code, _, err = bench(*words, "--url", server.url, "--out", str(tmp_path))
    assert (code, err) == (0, "")
    told = captured(tmp_path)
    assert len(told) == len(server.asked)
    for one, asked in zip(told, server.asked, strict=True):
        assert one["messages"] == asked.messages, "the whole prompt, history included"
        assert one["settings"] == {"max_tokens": asked.body["max_tokens"], "temperature": 0}
        assert (one["answer"], one["error"], one["model"]) == ("one two three", "", "ok")
        assert one["usage"]["completion_tokens"] == 3
        assert one["timings"] == {"queue_ms": 4.0}
        assert one["ttft_ms"] > 0
        rate = one["tokens_per_s"]
        assert rate is None or rate > 0, "None where a busy client read the answer at once"
        assert one["board"] == "sim-0"
        figures = one["board_figures"]
        assert (figures["npu_load_mean"], figures["memory_mb"]) == (50.0, 1689.2)
        assert figures["memory_available_mb"] == 2000.0
    report = (tmp_path / "captured.md").read_text()
    for one in told:
        assert all(message["content"] in report for message in one["messages"])
    assert "| sim-0 |" in report
    assert "50 %" in report
    assert "captured" not in (tmp_path / "outcomes.jsonl").read_text()


def test_a_capture_keeps_thoughts_calls_errors_and_fences(
    server: FakeOpenAi, tmp_path: Path
) -> None:
    urls = ("--url", f"a={server.url}", "--url", f"b={server.url}")
    models = ("--model", "thinks", "--model", "busy")
    words = ("run", *QUICK, "--capture", "--max-errors", "1", "--out", str(tmp_path))
    assert bench(*words, *urls, *models)[0] == Exit.DONE
    told = captured(tmp_path)
    good = [one for one in told if one["run"] == "a"]
    assert {(one["thoughts"], one["answer"]) for one in good} == {("well, yes", "```four```")}
    assert good[0]["tool_calls"] == [{"name": "look", "arguments": '{"a": 1}'}]
    refused = [one for one in told if one["run"] == "b"]
    assert {one["error"] for one in refused} == {"refused 429 queue_full: no"}
    assert all(one["messages"] and one["ttft_ms"] is None for one in refused)
    report = (tmp_path / "captured.md").read_text()
    assert "````\n```four```\n````" in report, "a text with a fence in it stays in its own"
    assert "lists no boards" in report
    assert told[0]["board_figures"] is None


def test_a_capture_needs_a_place(server: FakeOpenAi) -> None:
    code, _, err = bench("run", *QUICK, "--capture", "--url", server.url)
    assert code == Exit.USAGE
    assert "--out" in err
    assert server.asked == []


def test_without_capture_nothing_is_kept(server: FakeOpenAi, tmp_path: Path) -> None:
    assert bench("run", *QUICK, "--url", server.url, "--out", str(tmp_path))[0] == Exit.DONE
    assert not (tmp_path / "captured.jsonl").exists()
    assert "one two three" not in (tmp_path / "outcomes.jsonl").read_text()
