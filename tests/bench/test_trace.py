"""Traces: the same from the same seed, shaped as asked, and the same again from a file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.bench.processes import BenchFailed
from rkserve.bench.trace import (
    Arrivals,
    Trace,
    TraceSession,
    TraceShape,
    Turn,
    arrivals,
    lines_of,
    make_trace,
    read_trace,
    turns_of,
    write_trace,
    zipf_rank,
)

SHAPE = TraceShape(
    sessions=50,
    rate=2.0,
    turns=4.0,
    think_s=3.0,
    systems=3,
    system_words=30,
    priorities=(0, 10),
)
SECOND_AND_THIRD = [0.265389, 0.478113]  # sessions of that shape, in seconds


def test_the_same_seed_makes_the_same_trace_and_another_one_another() -> None:
    assert make_trace(SHAPE, 7) == make_trace(SHAPE, 7)
    assert make_trace(SHAPE, 7) != make_trace(SHAPE, 8)


def test_a_seed_means_the_same_on_every_machine() -> None:
    first = make_trace(SHAPE, 7).sessions[0]
    asked = first.turns[0].user
    assert (first.at_s, first.system, len(first.turns), first.turns[0].max_tokens) == (0, 0, 2, 74)
    assert asked.startswith("Write 4000 tokens about story number 0. through island toward about")
    assert [one.at_s for one in make_trace(SHAPE, 7).sessions[1:3]] == SECOND_AND_THIRD


def test_what_is_asked_does_not_move_when_it_is_asked() -> None:
    starts = [one.at_s for one in make_trace(SHAPE, 7).sessions]
    longer = replace(SHAPE, turns=2.0, user_words=90, systems=0, priorities=())
    assert [one.at_s for one in make_trace(longer, 7).sessions] == starts


@pytest.mark.parametrize("kind", list(Arrivals))
def test_sessions_arrive_in_order_at_the_rate_that_was_asked_for(kind: Arrivals) -> None:
    shape = TraceShape(sessions=8000, rate=4.0, arrivals=kind, burst=10)
    starts = arrivals(shape, Random(1))
    assert len(starts) == 8000
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(2000, rel=0.1)


def test_a_burst_arrives_at_one_moment() -> None:
    starts = arrivals(TraceShape(sessions=25, arrivals=Arrivals.BURSTS, burst=10), Random(1))
    assert sorted(Counter(starts).values()) == [5, 10, 10]


@given(
    sessions=st.integers(1, 300),
    turns=st.floats(1, 10),
    most=st.integers(1, 20),
    seed=st.integers(),
)
def test_sessions_have_as_many_turns_as_asked_as_far_as_the_limits_allow(
    sessions: int, turns: float, most: int, seed: int
) -> None:
    counts = turns_of(TraceShape(sessions=sessions, turns=turns, most_turns=most), Random(seed))
    assert len(counts) == sessions
    assert all(1 <= count <= most for count in counts)
    # Rounding moves each session by half a turn at most, and the cap can only take away.
    assert fmean(counts) <= turns + 1
    assert fmean(counts) >= min(turns, most) - 1


def test_few_sessions_talk_much() -> None:
    counts = sorted(turns_of(TraceShape(sessions=200, turns=5.0, most_turns=100), Random(1)))
    assert sum(counts[-20:]) > sum(counts[:100])


def test_the_first_system_prompts_are_the_popular_ones() -> None:
    rng = Random(1)
    drawn = Counter(zipf_rank(rng, 4, 1.0) for _ in range(20_000))
    assert drawn[0] / drawn[1] == pytest.approx(2.0, rel=0.1)
    assert drawn[0] / drawn[3] == pytest.approx(4.0, rel=0.15)


def test_lengths_and_pauses_have_the_mean_that_was_asked_for_and_no_endless_tail() -> None:
    shape = replace(SHAPE, sessions=2000, turns=3.0, user_words=50, answer_tokens=60)
    turns = [turn for one in make_trace(shape, 3).sessions for turn in one.turns]
    assert fmean(turn.max_tokens for turn in turns) == pytest.approx(60, rel=0.05)
    assert max(turn.max_tokens for turn in turns) <= 240
    later = [turn.think_s for one in make_trace(shape, 3).sessions for turn in one.turns[1:]]
    assert fmean(later) == pytest.approx(3.0, rel=0.05)
    assert all(one.turns[0].think_s == 0 for one in make_trace(shape, 3).sessions)


def test_no_two_questions_begin_alike() -> None:
    turns = [turn.user for one in make_trace(SHAPE, 7).sessions for turn in one.turns]
    assert len({text.partition(".")[0] for text in turns}) == len(turns)


def test_a_trace_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    recorded = TraceSession(
        "s1", 1.5, (Turn("Hi", 8, 0.5, "Hello"), Turn("Ünd?", 9)), None, {"n": 1}
    )
    trace = make_trace(SHAPE, 7)
    trace = Trace((*trace.sessions, replace(recorded, at_s=1e6)), trace.systems, {"seed": 7})
    write_trace(trace, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl") == trace


def test_sessions_of_a_file_are_played_in_the_order_in_which_they_begin(tmp_path: Path) -> None:
    trace = Trace(tuple(TraceSession(f"s{at}", float(at), (Turn("?", 1),)) for at in (2, 0, 1)))
    write_trace(trace, tmp_path / "trace.jsonl")
    assert [one.name for one in read_trace(tmp_path / "trace.jsonl").sessions] == ["s0", "s1", "s2"]


GOOD: dict[str, Any] = {"name": "s", "at_s": 0, "turns": [{"user": "?", "max_tokens": 1}]}


@pytest.mark.parametrize(
    ("session", "said"),
    [
        pytest.param("{oops", "JSONDecodeError", id="no JSON"),
        pytest.param([], "dictionary", id="no object"),
        pytest.param({**GOOD, "turns": []}, "turns", id="nothing is asked"),
        pytest.param({**GOOD, "at_s": -1}, "at_s", id="before the start"),
        pytest.param({**GOOD, "at_s": float("nan")}, "at_s", id="no number"),
        pytest.param({**GOOD, "system": 5}, "no system prompt 5", id="unknown system prompt"),
        pytest.param({"name": "s", "at_s": 0}, "turns", id="a field is missing"),
        pytest.param(
            {**GOOD, "turns": [{"user": "?", "max_tokens": 0}]}, "max_tokens", id="no tokens"
        ),
        pytest.param(
            {**GOOD, "turns": [{"user": "?", "max_tokens": 1, "think_s": -1}]},
            "think_s",
            id="think",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, session: Any, said: str) -> None:
    head = next(iter(lines_of(Trace(()))))
    line = session if isinstance(session, str) else json.dumps(session)
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{head}\n{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(BenchFailed, match=f"line 3: .*{said}"):
        read_trace(path)


@pytest.mark.parametrize("text", ["", "{}", '{"trace": "another/1", "systems": []}', "[1]"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BenchFailed, match="line 1: not a trace"):
        read_trace(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("system", "salt", "opening"),
    [
        pytest.param(None, "", None, id="neither"),
        pytest.param(0, "", "Be kind.", id="a shared prompt"),
        pytest.param(0, "7", "Run 7. Be kind.", id="the salt comes first"),
        pytest.param(None, "7", "Run 7.", id="only the salt"),
    ],
)
def test_what_a_conversation_begins_with(
    system: int | None, salt: str, opening: str | None
) -> None:
    session = TraceSession("s", 0.0, (Turn("?", 1),), system)
    expected = [] if opening is None else [{"role": "system", "content": opening}]
    assert Trace((session,), ("Be kind.",)).opening(session, salt) == expected
