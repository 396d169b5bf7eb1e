"""Outcomes and runs of the load generator, as they would have been found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rkserve.bench.making import Shape, make_trace
from rkserve.bench.outcome import Asked, Kind, Outcome
from rkserve.bench.play import Plan, Played
from rkserve.bench.trace import Session, Trace, Turn

# Nothing that a test waits for may end by a clock.
PATIENT_S = 300.0


def answered(
    due_s: float = 10.0,
    *,
    session: str = "s0",
    turn: int = 0,
    ttft_s: float = 0.5,
    tokens: int = 5,
    step_s: float = 0.1,
    late_s: float = 0.0,
    **more: Any,
) -> Outcome:
    """An answer of so many tokens, evenly spread."""
    first_s = due_s + ttft_s
    texts = tuple(first_s + step_s * number for number in range(tokens))
    told = {"prompt_tokens": 100, "completion_tokens": tokens, "usage": True, **more}
    asked = Asked(session, turn, due_s, due_s + late_s)
    end_s = texts[-1] + 0.05
    return Outcome(asked, Kind.OK, text_s=texts, end_s=end_s, over_s=end_s, status=200, **told)


def failed(
    due_s: float = 10.0, kind: Kind = Kind.REFUSED, code: str = "429 queue_full", **more: Any
) -> Outcome:
    asked = Asked(more.pop("session", "s0"), more.pop("turn", 0), due_s, due_s)
    return Outcome(asked, kind, code, over_s=due_s + 0.1, **more)


def played(
    outcomes: Sequence[Outcome],
    *,
    target: str = "server",
    window_s: tuple[float, float] = (10.0, 20.0),
    **more: Any,
) -> Played:
    told: dict[str, Any] = {
        "plan": Plan(),
        "start_s": 10.0,
        "end_s": 30.0,
        "lag_ms": (0.1, 0.2),
        "cpu_s": 1.0,
        "interrupted": False,
    }
    return Played(target, outcomes=tuple(outcomes), window_s=window_s, **{**told, **more})


def at_once(sessions: int, turns: int = 1) -> Trace:
    """Sessions that all begin at the start, without any pause."""
    made = tuple(
        Session(f"s{number}", 0.0, tuple(Turn(f"question {turn}", 8) for turn in range(turns)))
        for number in range(sessions)
    )
    return Trace(made)


def small_trace(**shape: Any) -> Trace:
    return make_trace(Shape(**{"sessions": 20, "rate": 5.0, **shape}), seed=1)
