"""Outcomes and runs of the load generator, as they would have been found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rkserve.bench.outcome import OutcomeKind, RequestOutcome, SentRequest
from rkserve.bench.player import PlayedRun, PlayOptions
from rkserve.bench.trace import Trace, TraceSession, TraceShape, Turn, make_trace

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
) -> RequestOutcome:
    """An answer of so many tokens, evenly spread."""
    first_s = due_s + ttft_s
    texts = tuple(first_s + step_s * number for number in range(tokens))
    told = {"prompt_tokens": 100, "completion_tokens": tokens, "usage": True, **more}
    asked = SentRequest(session, turn, due_s, due_s + late_s)
    end_s = texts[-1] + 0.05
    return RequestOutcome(
        asked, OutcomeKind.OK, text_s=texts, end_s=end_s, over_s=end_s, status=200, **told
    )


def failed(
    due_s: float = 10.0,
    kind: OutcomeKind = OutcomeKind.REFUSED,
    code: str = "429 queue_full",
    **more: Any,
) -> RequestOutcome:
    asked = SentRequest(more.pop("session", "s0"), more.pop("turn", 0), due_s, due_s)
    return RequestOutcome(asked, kind, code, over_s=due_s + 0.1, **more)


def played(
    outcomes: Sequence[RequestOutcome],
    *,
    target: str = "server",
    window_s: tuple[float, float] = (10.0, 20.0),
    **more: Any,
) -> PlayedRun:
    told: dict[str, Any] = {
        "plan": PlayOptions(),
        "start_s": 10.0,
        "end_s": 30.0,
        "lag_ms": (0.1, 0.2),
        "cpu_s": 1.0,
        "interrupted": False,
    }
    return PlayedRun(target, outcomes=tuple(outcomes), window_s=window_s, **{**told, **more})


def at_once(sessions: int, turns: int = 1) -> Trace:
    """Sessions that all begin at the start, without any pause."""
    made = tuple(
        TraceSession(f"s{number}", 0.0, tuple(Turn(f"question {turn}", 8) for turn in range(turns)))
        for number in range(sessions)
    )
    return Trace(made)


def small_trace(**shape: Any) -> Trace:
    return make_trace(TraceShape(**{"sessions": 20, "rate": 5.0, **shape}), seed=1)
