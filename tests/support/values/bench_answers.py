"""Answers, events and readings of processes, as the benchmark would have found them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.harness.exchange import Exchange, HangUp, InterruptedAnswer, PausedSpan
from benchmarks.serving.oneboard_figures import BatchCost, Batches, BatchPace, BatchRun, ParkedRound
from rkserve.api.common import output
from rkserve.bench.processes import MachineTimes, ProcessIdentity, ProcessReading, Stat


def answer(sent_s: float, first_s: float, end_s: float, board: str = "sim-0") -> Exchange:
    """One of 5 tokens, evenly spread."""
    step = (end_s - first_s) / 4
    texts = tuple(first_s + step * index for index in range(5))
    return Exchange(
        sent_s, texts, end_s, board=board, prompt_tokens=128, completion_tokens=5, queue_ms=100.0
    )


def back_to_back(board: str, count: int, offset_s: float = 0.0) -> list[Exchange]:
    """Runs of 2 s that follow each other at once: 2.5 tokens/s."""
    starts = [offset_s + 2.0 * index for index in range(count)]
    return [answer(start, start + 0.5, start + 2.0, board) for start in starts]


def left_at(closed_s: float, free_after_s: float = 0.05, **of_next: Any) -> HangUp:
    """A client that left, and an answer that was prefilled for 380 ms once the board was free."""
    first_s = closed_s + free_after_s + 0.38
    behind = replace(answer(closed_s - 0.1, first_s, first_s + 1), prefill_ms=380.0)
    left = Exchange(closed_s - 1, (closed_s - 0.2, closed_s - 0.1), board="sim-0")
    return HangUp(left, closed_s, replace(behind, **of_next))


def reading(at_s: float, busy_ms: float, **cpu_ms: float) -> ProcessReading:
    processes = {
        ProcessIdentity(number, 0): (
            part,
            Stat(ProcessIdentity(number, 0), 1, spent, nice=15, zombie=False),
        )
        for number, (part, spent) in enumerate(cpu_ms.items())
    }
    return ProcessReading(at_s, processes, MachineTimes(busy_ms, stolen_ms=at_s * 10))


def chunk(text: str | None, **more: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return output.data({"choices": choices, **more})


USAGE = {
    "prompt_tokens": 128,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 3},
}
EVENTS = (
    chunk("", id="role"),
    output.PING,
    chunk("Hello"),
    chunk(" wörld"),
    output.data({"choices": [{"delta": {}}], "timings": {"queue_ms": 12.5, "prefill_ms": 7.0}}),
    chunk(None, usage=USAGE) + output.DONE,
)
HEAD = b"HTTP/1.1 200 OK\r\nX-Rkserve-Board: sim-1\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(parts: tuple[bytes, ...]) -> list[bytes]:
    return [b"%x\r\n%s\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"]


def parked_round(number: int = 0, **of_returned: Any) -> ParkedRound:
    """Cold it takes 2 s to the first text, restored 0.5; who has it parked waits 0.6 for it."""
    at_s = 100.0 * number
    first = replace(answer(at_s, at_s + 2, at_s + 3), prompt_tokens=1000)
    returned = replace(
        answer(at_s + 20, at_s + 20.5, at_s + 21.5),
        prompt_tokens=1027,
        cached_tokens=1005,
        prefill_tokens=22,
        end_s=at_s + 22.1,
    )
    return ParkedRound(
        first=first,
        displacing=answer(at_s + 10, at_s + 10.8, at_s + 12),
        returned=replace(returned, **of_returned),
        calm=answer(at_s + 30, at_s + 30.2, at_s + 31),
    )


def interrupted(text: str = "abcde", kv: str = "kept", **of_answer: Any) -> InterruptedAnswer:
    """A text every 0.1 s, paused between the third and the fourth for 1 s, and once at 0.45."""
    content_s = (10.1, 10.2, 10.3, 11.4, 11.45)
    whole = replace(answer(10.0, 10.1, 11.5), content_s=content_s)
    pauses = (
        PausedSpan(asked_s=10.25, answered_s=10.31, resumed_s=11.3, kv=kv, tokens=3),
        PausedSpan(asked_s=11.41, answered_s=11.42, resumed_s=11.43, kv=kv, tokens=4),
    )
    return InterruptedAnswer(replace(whole, **of_answer), text, pauses)


def batches() -> Batches:
    """Steps of 2 us a batch, and 10 of them in a second times the gain."""
    costs = [
        BatchCost(n, tuple(BatchRun(1000, 1000 * n, 0.0, 0.1, cpu_s) for cpu_s in (2e-3, 9, 1e-3)))
        for n in (1, 4)
    ]
    paces = [
        BatchPace(1, "none", BatchRun(11, 11, 5.0, 6.0, 0.0)),
        BatchPace(4, "none", BatchRun(11, 44, 5.0, 9.0, 0.0)),
        BatchPace(4, "bound", BatchRun(11, 44, 5.0, 6.0, 0.0)),
    ]
    return Batches(costs, paces)
