"""The parts of the report about one board, the token path and grammars. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.harness.figures import Spread
from benchmarks.harness.prompts import NEW_TOKENS, PROMPT_TOKENS, SMALL_PROFILE
from benchmarks.serving.guided import Answered, GuidedFound, Masked, rate
from benchmarks.serving.oneboard_figures import HISTORY_TOKENS, Batches, ParkedFigures, PauseFigures
from benchmarks.serving.tokenpath import AGAINST, STREAM_TOKENS, STREAMS, TOKEN_MS
from benchmarks.serving.tokenpath_figures import PATH, LoadTaken, WayFigures
from rkserve.bench.figures import Ratio
from rkserve.bench.results import MISSING, figure, table


def parked_section(found: ParkedFigures) -> str:
    """Note what came of (e)."""
    rows = [
        _spread_row("TTFT of a returning conversation, ms", found.returned_ttft_ms, found.ttft),
        _spread_row(f"TTFT of {HISTORY_TOKENS} tokens that are new, ms", found.cold_ttft_ms),
        _spread_row(
            "TTFT of the one that displaces it, ms", found.displacing_ttft_ms, found.displacing
        ),
        _spread_row("TTFT of one that displaces nothing, ms", found.calm_ttft_ms),
        _spread_row("last text to end, returned, ms", found.save_ms),
        _spread_row("last text to end, new, ms", found.unsaved_ms),
    ]
    tokens = (
        ("prompt", found.prompt_tokens),
        ("cached_tokens", found.cached_tokens),
        ("prefill_tokens", found.prefill_tokens),
        ("of them new", found.new_tokens),
    )
    counts = table(
        ["", *(name for name, _ in tokens)],
        [["tokens of a returning prompt", *(figure(value, 0) for _, value in tokens)]],
    )
    return (
        "## (e) A conversation that lost its board and came back\n\n"
        f"{table(['', 'p50', 'p99', 'to the next row'], rows)}\n"
        f"{counts}\n"
        f"{found.rounds} rounds on one board (`{SMALL_PROFILE}`), through the cluster: a "
        f"conversation of {HISTORY_TOKENS} tokens that are new to the board is answered, another "
        f"one of {PROMPT_TOKENS} takes the board, and the first comes back with its history and a "
        "new turn, so with a longer prompt than it is held to. The one that displaces it waits "
        "until its KV cache is on disk; no file is written at the end of an answer (the last two "
        "rows). "
        f"{found.learning_rounds} rounds before these are not counted: a board parks by the chance "
        "of a return that it has seen, and computed the conversation again in "
        f"{found.learning_anew} of them. Medians of token counts. **The disk is simulated**: "
        "114 688 bytes a token at 200 MB/s (`RKSIM_DISK_MB_PER_S`), an assumption; an SD card is "
        "slower, NVMe faster. The file's sha256 and its fsync are real work of this machine, "
        "but of a file with holes in it.\n"
    )


def _spread_row(name: str, of: Spread, to_next: Ratio | None = None) -> list[str]:
    quotient = MISSING
    if to_next is not None:
        quotient = f"{to_next.value:.3f} ({to_next.low:.3f} to {to_next.high:.3f})"
    return [name, figure(of.p50), figure(of.p99), quotient]


def pauses_section(kinds: Sequence[PauseFigures]) -> str:
    """Note what came of (f)."""
    rows = [
        [f"{what}, KV {one.kv}", *_in_ms_and_steps(spread, one.step_ms)]
        for one in kinds
        for what, spread in (
            ("pause call to its answer", one.answered_ms),
            ("pause call to last token", one.last_ms),
            ("resume call to next token", one.resumed_ms),
        )
    ]
    largest = ", ".join(f"{figure(one.largest_last_ms)} ms ({one.kv})" for one in kinds)
    counts = ", ".join(f"{one.count} ({one.kv})" for one in kinds)
    return (
        "## (f) Pausing and resuming an answer\n\n"
        f"{table(['', 'p50, ms', 'p99, ms', 'p50, steps', 'p99, steps'], rows)}\n"
        f"Pauses: {counts}, each at a random moment of a decode step of {kinds[0].step_ms:.1f} ms, "
        f"over HTTP on one board (`{SMALL_PROFILE}`), seen from the client. The latest last token: "
        f"{largest}; it counts as 0 ms where none came after the call. All interrupted answers say "
        "what they say uninterrupted. With the KV cache kept a resumption prefills one token; "
        f"recomputed, all of the {PROMPT_TOKENS} tokens and the answer so far.\n"
    )


def _in_ms_and_steps(spread: Spread, step_ms: float) -> list[str]:
    ms = (spread.p50, spread.p99)
    return [*(figure(one) for one in ms), *(figure(one / step_ms, 2) for one in ms)]


def batches_section(found: Batches) -> str:
    """Note what came of (g)."""
    costs = [
        [str(one.n_batch), figure(one.us_per_token, 2), figure(one.us_per_step, 2)]
        for one in found.costs
    ]
    gains = list(dict.fromkeys(pace.gain for pace in found.paces))
    sizes = sorted({pace.n_batch for pace in found.paces})
    paces = [[str(size), *(figure(found.rate(size, gain), 2) for gain in gains)] for size in sizes]
    return (
        "## (g) Batches in the binding\n\n"
        f"{table(['n_batch', 'CPU per token, us', 'CPU per step, us'], costs)}\n"
        "The binding alone, without engine, board and cluster, with boards that take no time. The "
        "simulated library's own work, which a real one does on the NPU, is in it.\n\n"
        f"{table(['tokens/s, all entries', *(f'gain {gain}' for gain in gains)], paces)}\n"
        f"At the pace of `{SMALL_PROFILE}`, from the first step to the last. **These gains are an "
        "input of the simulator and no measurement**: no figures are published of a batch on "
        "these NPUs, and the default is none. The table shows that what the runtime gains is not "
        "lost on the way through the binding, and nothing about hardware.\n"
    )


def tokenpath_section(ways: Sequence[WayFigures]) -> str:
    """Return case (h)."""
    return (
        "## (h) The token path\n\n"
        f"{STREAMS} boards with a token each {TOKEN_MS:.0f} ms, and one stream of {NEW_TOKENS} "
        f"tokens or one of {STREAM_TOKENS} on each. Every way has a Ray of its own, one after the "
        "other. CPU is that of proxy, Router and boards (without their engines) for one token; "
        "*above idle* leaves out what the same processes take without requests, in "
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


def guided_section(found: GuidedFound) -> str:
    """Return case (i)."""
    native = rate(found.answers[0][1])
    again = next(rate(answers) for way, answers in found.answers if "sent again" in way.name)
    rows = [
        [
            way.name,
            _median(answers, lambda one: one.tokens, 0),
            _median(answers, lambda one: one.first_s * 1e3, 0),
            _median(answers, lambda one: one.whole_s, 2),
            figure(rate(answers), 2),
            figure(rate(answers) / native, 3),
            figure(rate(answers) / again, 2),
            _median(answers, lambda one: one.cpu_s * 1e3 / one.tokens, 2),
        ]
        for way, answers in found.answers
    ]
    head = ["", "tokens", "first, ms", "whole, s", "tokens/s"]
    head += ["of native", "of sent again", "CPU per token, ms"]
    masks = [_masked(one) for one in found.masks]
    columns = ["vocabulary", "taken in, ms", "grammar, ms", "mask p50, ms", "mask max, ms"]
    return (
        "## (i) Answers that follow a grammar\n\n"
        f"{table(head, rows)}\n"
        f"The binding alone at the pace of `{SMALL_PROFILE}`, asked to repeat an object of four "
        "members, without a grammar and with its schema; medians of "
        f"{len(found.answers[0][1])}. Tokens/s are those of the whole answer. **How long a step "
        "of logits takes is the simulator's assumption**: as a prefill of what is sent, which for "
        "one token is less than a step of decoding, so steps that keep their context look better "
        "here than they can be. Steps write with other tokens than the model does where the schema "
        "leaves no choice, and so the simulated model goes on in other words; once it has strayed "
        "it does not come back to what it was to say, and strays again. The CPU time has the "
        "simulated library's work in it.\n\n"
        f"{table([*columns, 'check p50, ms'], masks)}\n"
        "Masks of the same schema, with made-up vocabularies, on one thread. Steps need a mask for "
        "each token, optimistic runs a check, and a mask only where the model strays. A vocabulary "
        "is taken in once for each engine, the grammar for each answer.\n"
    )


def _median(answers: Sequence[Answered], of: Callable[[Answered], float], digits: int) -> str:
    return figure(statistics.median(of(one) for one in answers), digits)


def _masked(one: Masked) -> list[str]:
    return [
        figure(one.size, 0),
        figure(one.vocabulary_ms, 0),
        figure(one.grammar_ms),
        figure(statistics.median(one.mask_ms), 3),
        figure(max(one.mask_ms), 2),
        figure(statistics.median(one.check_ms), 4),
    ]
