"""The deadline of a run, and limits from measured speeds; time is an argument."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.board.rules.hang_limits import (
    EngineSpeeds,
    RecentTimes,
    RunKind,
    RunPhase,
    RunShape,
    RunTimeouts,
    StoppedTime,
    Watchdog,
    limits_of,
)

PATIENCE = RunTimeouts(first_token_s=30, prefill_per_token_s=0.5, token_s=10, abort_s=2)
GENERATION, STEPS = RunKind.GENERATION, RunKind.STEPS


def watchdog(tokens: int = 20, now_s: float = 100.0) -> Watchdog:
    return Watchdog(EngineSpeeds(PATIENCE), RunShape(prompt=tokens), now_s)


@pytest.mark.parametrize(("tokens", "deadline_s"), [(0, 130.0), (20, 140.0), (4096, 2178.0)])
def test_prefill_may_take_longer_the_more_there_is(tokens: int, deadline_s: float) -> None:
    assert watchdog(tokens).deadline_s == deadline_s


@pytest.mark.parametrize(
    ("steps", "phase", "deadline_s", "nearer"),
    [
        pytest.param(["t101"], RunPhase.DECODE, 111, True, id="the first token brings it nearer"),
        pytest.param(["t139"], RunPhase.DECODE, 149, False, id="a late first token"),
        pytest.param(["t101", "t105"], RunPhase.DECODE, 115, False, id="each token moves it"),
        pytest.param(["a101"], RunPhase.PREFILL, 140, False, id="an abort does not cut prefill"),
        pytest.param(["a101", "t120"], RunPhase.RETURN, 122, True, id="after prefill it counts"),
        pytest.param(["t101", "a102"], RunPhase.RETURN, 104, True, id="an abort brings it nearer"),
        pytest.param(["t101", "a102", "t103"], RunPhase.RETURN, 104, False, id="a straggler"),
        pytest.param(["t101", "a102", "a103"], RunPhase.RETURN, 104, False, id="two aborts"),
        pytest.param(["t101", "p105"], RunPhase.PAUSE, 115, False, id="a pause has a token's time"),
        pytest.param(["t101", "p105", "t109"], RunPhase.PAUSE, 115, False, id="text is held back"),
        pytest.param(["p101", "t105"], RunPhase.PAUSE, 115, True, id="a pause asked for early"),
        pytest.param(["t101", "p102", "a103"], RunPhase.RETURN, 105, True, id="abort over pause"),
        pytest.param(["t101", "x105"], RunPhase.DECODE, 115, False, id="a stop is not counted"),
        pytest.param(["t104", "x105"], RunPhase.DECODE, 115, False, id="nor ahead of time"),
    ],
)
def test_the_deadline_follows_the_run(
    steps: list[str], phase: RunPhase, deadline_s: float, nearer: bool
) -> None:
    dog = watchdog()
    before_s = dog.deadline_s
    for step in steps:
        before_s = dog.deadline_s
        now_s = float(step[1:])
        if step[0] == "x":
            dog.excuse(4.0, now_s)
        else:
            {"t": dog.token, "a": dog.aborted, "p": dog.paused}[step[0]](now_s)
    assert (dog.phase, dog.deadline_s, dog.deadline_s < before_s) == (phase, deadline_s, nearer)


def test_the_verdict_names_what_did_not_come_and_the_limit() -> None:
    dog = watchdog()
    assert dog.verdict(141.0) == "the first token did not come within 41.0 s; the limit is 40.0 s"
    dog.token(132.0)
    assert "the next token did not come within 10.5 s; the limit is 10.0 s" in dog.verdict(142.5)
    dog.aborted(143.0)
    assert "the end of the run after the abort did not come within 2.0" in dog.verdict(145.0)


# -- the extraordinary parts of a run -------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        pytest.param(RunShape(), {}, id="the library's own"),
        pytest.param(RunShape(STEPS), {"abort_s": 12}, id="steps with a context that is kept"),
        pytest.param(
            RunShape(STEPS, again=100), {"token_s": 60, "abort_s": 62}, id="sent again each time"
        ),
        pytest.param(
            RunShape(STEPS, optimistic=True),
            {"first_token_s": 50, "token_s": 30, "abort_s": 32},
            id="corrected by steps",
        ),
        pytest.param(RunShape(saves_cache=True), {"token_s": 40, "abort_s": 32}, id="a file"),
        pytest.param(RunShape(images=2), {"first_token_s": 90}, id="two images"),
    ],
)
def test_a_run_may_be_silent_for_as_long_as_its_longest_step(
    shape: RunShape, changes: dict[str, float]
) -> None:
    assert limits_of(shape, PATIENCE, PATIENCE) == replace(PATIENCE, **changes)


# -- measured limits ------------------------------------------------------------------------------


def measured(
    token_s: float, prompt_token_s: float = 0.005, timeouts: RunTimeouts = PATIENCE
) -> EngineSpeeds:
    speeds = EngineSpeeds(timeouts)
    for _ in range(RecentTimes.FEW):
        speeds.token(GENERATION, token_s)
        speeds.prompt(GENERATION, 100, 100 * prompt_token_s)
    return speeds


@pytest.mark.parametrize(
    ("token_s", "limit_s"),
    [(0.02, 3.0), (0.15, 3.0), (0.25, 5.0), (0.5, 10.0), (2.0, 10.0)],
)
def test_the_next_token_is_due_after_twenty_times_the_usual_one(
    token_s: float, limit_s: float
) -> None:
    found = measured(token_s).limits(RunShape())
    assert found.token_s == pytest.approx(limit_s)
    assert found.abort_s == pytest.approx(2 + min(4 * token_s, 10))


@pytest.mark.parametrize(
    ("prompt", "limit_s"),
    [
        pytest.param(1, 3 + 10 * 64 * 0.005, id="short: as long as one of 64 tokens"),
        pytest.param(400, 3 + 10 * 400 * 0.005, id="long: by its length"),
    ],
)
def test_a_prompt_gets_ten_times_its_usual_time(prompt: int, limit_s: float) -> None:
    shape = RunShape(prompt=prompt)
    dog = Watchdog(measured(0.1), shape, 0.0)
    assert dog.deadline_s == pytest.approx(limit_s)


def test_a_prompt_has_time_for_those_of_other_entries() -> None:
    def deadline_s(speeds: EngineSpeeds, prompt: int) -> float:
        return Watchdog(speeds, RunShape(prompt=prompt, entries=4), 0.0).deadline_s

    assert deadline_s(measured(0.1), 400) == pytest.approx(3 + 4 * 3 * 10 * 400 * 0.005)
    settings = PATIENCE.first_token_s + 400 * PATIENCE.prefill_per_token_s
    assert deadline_s(EngineSpeeds(PATIENCE), 400) == pytest.approx(4 * settings)
    slow = measured(0.1, prompt_token_s=1.0)
    assert deadline_s(slow, 400) == pytest.approx(3 + 4 * 400 * PATIENCE.prefill_per_token_s)


def test_short_prompts_say_nothing_of_long_ones() -> None:
    speeds = EngineSpeeds(PATIENCE)
    for _ in range(RecentTimes.FEW):
        speeds.prompt(GENERATION, 8, 0.1)
    assert Watchdog(speeds, RunShape(prompt=8), 0.0).deadline_s == pytest.approx(4.0)
    assert Watchdog(speeds, RunShape(prompt=64), 0.0).deadline_s == pytest.approx(62.0)


@pytest.mark.parametrize(
    ("shape", "field", "value"),
    [
        pytest.param(RunShape(usual=False), "first_token_s", 30, id="the first run after a load"),
        pytest.param(RunShape(loads_cache=True), "first_token_s", 30, id="a file is read"),
        pytest.param(RunShape(saves_cache=True), "token_s", 33, id="a file is written"),
        pytest.param(RunShape(images=1, usual=False), "first_token_s", 60, id="an image"),
        pytest.param(RunShape(RunKind.POOLING), "first_token_s", 30, id="no embedding was timed"),
        pytest.param(RunShape(STEPS), "token_s", 10, id="no step was timed"),
    ],
)
def test_what_was_not_measured_keeps_its_setting(shape: RunShape, field: str, value: float) -> None:
    assert getattr(measured(0.01).limits(shape), field) == pytest.approx(value)


def test_a_few_values_are_needed() -> None:
    speeds = EngineSpeeds(PATIENCE)
    for _ in range(RecentTimes.FEW - 1):
        speeds.token(GENERATION, 0.01)
    assert speeds.limits(RunShape()).token_s == 10
    speeds.token(GENERATION, 0.01)
    assert speeds.limits(RunShape()).token_s == 3


def test_a_large_lower_bound_leaves_the_settings() -> None:
    patient = replace(PATIENCE, least_s=1000.0)
    found = measured(0.01, timeouts=patient).limits(RunShape(prompt=100))
    assert (found.first_token_s, found.token_s) == (30, 10)


def test_a_slow_down_counts_within_three_tokens_and_a_speed_up_late() -> None:
    times = RecentTimes()
    for _ in range(100):
        times.add(0.1)
    seen = []
    for _ in range(3):
        times.add(0.3)
        seen.append(times.usual_s)
    assert seen == [0.1, 0.1, 0.3]
    for _ in range(60):
        times.add(0.3)
    for _ in range(31):
        times.add(0.1)
        assert times.usual_s == 0.3
    times.add(0.1)
    assert times.usual_s == 0.1


times_s = st.lists(st.floats(0.0, 100.0), min_size=5, max_size=140)


@given(times_s, st.data())
def test_a_longer_time_never_shortens_a_limit(values: list[float], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    longer = [*values[:at], values[at] + data.draw(st.floats(0.0, 100.0)), *values[at + 1 :]]
    found = []
    for series in (values, longer):
        speeds = EngineSpeeds(PATIENCE)
        for value in series:
            speeds.token(GENERATION, value)
        found.append(speeds.limits(RunShape()).token_s)
    assert 3.0 <= found[0] <= found[1] <= 10.0


def throttled(token_s: float, seed: int, seconds: float) -> tuple[int, int]:
    """Play a board that is throttled to a third in half of the time, and stands still for 2 s now
    and then; return how many tokens it gave, and how often the watchdog would have ended it.
    """
    rng, speeds, now_s = random.Random(seed), EngineSpeeds(RunTimeouts()), 0.0
    tokens = kills = 0
    while now_s < seconds:
        prompt = rng.choice((5, 60, 64, 500, 3000))
        dog = Watchdog(speeds, RunShape(prompt=prompt), now_s)
        began_s = now_s
        aborted_at = rng.randrange(400)
        for at in range(rng.randrange(1, 400)):
            slow = 3.0 if now_s % 600 > 300 else 1.0
            usual_s = max(prompt, 20) * token_s / 40 if at == 0 else token_s
            now_s += slow * usual_s * rng.uniform(0.8, 1.2) + (2.0 if rng.random() < 0.02 else 0.0)
            kills += now_s > dog.deadline_s
            dog.token(now_s)
            if at == 0:
                speeds.prompt(GENERATION, prompt, now_s - began_s)
            tokens += 1
            if at == aborted_at:
                dog.aborted(now_s)
                now_s += slow * token_s + 2.0
                kills += now_s > dog.deadline_s
                break
    return tokens, kills


@pytest.mark.parametrize("token_s", [0.01, 0.04, 0.1, 0.15, 0.3, 0.5, 1.0, 2.0])
def test_an_hour_of_throttling_and_stops_ends_no_engine(token_s: float) -> None:
    tokens, kills = throttled(token_s, seed=int(token_s * 100), seconds=3600.0)
    assert tokens > 500
    assert kills == 0


@pytest.mark.parametrize("token_s", [0.01, 0.1, 0.15])
def test_a_hang_is_noticed_within_three_and_a_half_seconds(token_s: float) -> None:
    speeds = measured(token_s)
    dog = Watchdog(speeds, RunShape(prompt=20), 0.0)
    now_s = 0.0
    for _ in range(10):
        now_s += token_s
        dog.token(now_s)
    assert dog.deadline_s - now_s <= 3.0
    slower = Watchdog(measured(0.3), RunShape(prompt=20), 0.0)
    slower.token(1.0)
    assert slower.deadline_s == pytest.approx(7.0), "20 times the usual time"


def test_each_entry_of_a_batch_has_its_own_rhythm() -> None:
    speeds = EngineSpeeds(PATIENCE)
    dog = Watchdog(speeds, RunShape(), 0.0)
    for step in range(1, 9):
        for entry in range(4):
            dog.token(step * 0.4, entry)
    assert speeds.limits(RunShape()).token_s == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("at_s", "lost_s"),
    [(0.2, 0.0), (0.5, 0.0), (0.74, 0.0), (2.5, 2.0), (60.5, 60.0)],
)
def test_a_late_look_is_time_in_which_the_process_stood_still(at_s: float, lost_s: float) -> None:
    stopped = StoppedTime()
    assert stopped.look(100.0) == 0.0, "nothing was due"
    stopped.due(0.5)
    assert stopped.look(at_s) == lost_s
    assert stopped.look(200.0) == 0.0
