"""``rkserve bench``: its presets and traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rkserve.bench.trace import read_trace
from rkserve.cli.context import Exit
from tests.support.http.bench_terminal import QUICK, bench, report
from tests.support.http.fake_openai import FakeOpenAi, serving


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
