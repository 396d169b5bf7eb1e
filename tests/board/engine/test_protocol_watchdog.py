"""The deadline of a run; time is an argument."""

from __future__ import annotations

import pytest

from rkserve.board.engine.protocol import RunPhase, RunTimeouts, Watchdog

PATIENCE = RunTimeouts(first_token_s=30, prefill_per_token_s=0.5, token_s=10, abort_s=2)


def watchdog(tokens: int = 20, now_s: float = 100.0) -> Watchdog:
    return Watchdog(PATIENCE, tokens, now_s)


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
    ],
)
def test_the_deadline_follows_the_run(
    steps: list[str], phase: RunPhase, deadline_s: float, nearer: bool
) -> None:
    dog = watchdog()
    for step in steps:
        event = {"t": dog.token, "a": dog.aborted, "p": dog.paused}[step[0]]
        last = event(float(step[1:]))
    assert (dog.phase, dog.deadline_s, last) == (phase, deadline_s, nearer)


def test_the_verdict_names_what_did_not_come() -> None:
    dog = watchdog()
    assert dog.verdict(131.0) == "the first token did not come within 31.0 s"
    dog.token(132.0)
    assert dog.verdict(142.5) == "the next token did not come within 10.5 s"
    dog.aborted(143.0)
    assert dog.verdict(145.0) == "the end of the run after the abort did not come within 2.0 s"
