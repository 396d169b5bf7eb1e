"""The part of the report about the token path. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.pace import NEW_TOKENS
from benchmarks.serving.tokenpath import AGAINST, STREAM_TOKENS, STREAMS, TOKEN_MS
from benchmarks.serving.tokenpath_figures import PATH, LoadTaken, WayFigures
from rkserve.bench.tables import figure, table


def tokenpath_section(ways: Sequence[WayFigures]) -> str:
    """Return case (h)."""
    return (
        "## (h) The token path\n\n"
        f"{STREAMS} boards with a token each {TOKEN_MS:.0f} ms, and one stream of {NEW_TOKENS} "
        f"tokens or one of {STREAM_TOKENS} on each. Every way has a Ray of its own, one after the "
        "other. CPU is that of proxy, Router and boards (without their engines) for one token; "
        "*above idle* leaves out what the same processes take while nobody asks for anything, in "
        "the same time.\n\n"
        f"{_costs(ways)}\n"
        f"{_paces(ways)}\n"
        f"The boards of a real cluster have cores of their own; here {STREAMS} of them share "
        "those of Router and proxy, and one board alone shows what the way itself takes. "
        "TTFT is given as what it is above the runtime's own: without the prefill that the board "
        "reports, and without the same difference of the binding alone.\n\n"
        f"{_prompts(ways)}\n"
        f"Long prompts are sent beside {AGAINST} streams. *Answered* is the time to the answer's "
        "headers: a board has taken the request, or, with 220 KB, which fit no context of the "
        "runtime, it was read, counted and refused. *Held up* is the largest gap between two "
        f"tokens of any other stream meanwhile, less {TOKEN_MS:.0f} ms; *calm* is the same for "
        "stretches as long in which nothing else went on.\n"
    )


def _costs(ways: Sequence[WayFigures]) -> str:
    rows = []
    for streams in (1, STREAMS):
        base = _load(ways[0], streams).cost
        for way in ways:
            cost = _load(way, streams).cost
            rows.append(
                [
                    f"{way.name}, {streams} stream{'s' * (streams > 1)}",
                    *(figure(cost.by_part[part], 3) for part in PATH),
                    figure(cost.gross, 3),
                    figure(cost.net, 3),
                    figure(cost.gross / base.gross, 3),
                    figure(cost.net / base.net, 3),
                ]
            )
    head = ["CPU per token, ms", *PATH, "together", "above idle", "of the plain way", "above idle"]
    return table(head, rows)


def _paces(ways: Sequence[WayFigures]) -> str:
    rows = [
        [
            way.name,
            *(figure(value, 1) for value in (way.lone_added_ms.p50, way.lone_added_ms.p99)),
            *(figure(value, 1) for value in (way.one.added_ms.p50, way.one.added_ms.p99)),
            *(figure(value, 1) for value in (way.many.added_ms.p50, way.many.added_ms.p99)),
            *(figure(value, 1) for value in (way.many.figures.gap_ms.p50, _p99_gap(way))),
            figure(way.many.figures.rate, 0),
            figure(way.many.figures.tokens_per_event, 2),
            figure(way.ceiling.rate, 0),
        ]
        for way in ways
    ]
    head = [
        *("", "TTFT added, 1 stream, 1 board, p50, ms", "p99", f"{STREAMS} boards, p50, ms", "p99"),
        *(f"{STREAMS} streams, p50, ms", "p99"),
        *("inter-token p50, ms", "p99", "tokens/s", "tokens per event", "ceiling, tokens/s"),
    ]
    return table(head, rows)


def _p99_gap(way: WayFigures) -> float:
    return way.many.figures.gap_ms.p99


def _prompts(ways: Sequence[WayFigures]) -> str:
    rows = [
        [
            f"{way.name}, {shown.size // 1000} KB",
            figure(shown.answered_ms.p50, 1),
            figure(shown.held_up_ms.p50, 1),
            figure(shown.largest_ms, 1),
            figure(shown.calm_ms.p50, 1),
            figure(shown.calm_largest_ms, 1),
        ]
        for way in ways
        for shown in way.shown
    ]
    head = ["", "answered p50, ms", "held up p50, ms", "largest", "calm p50, ms", "largest"]
    return table(head, rows)


def _load(way: WayFigures, streams: int) -> LoadTaken:
    return way.one if streams == 1 else way.many
