"""The report's sections on cases (e) to (g), as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.figures import Spread
from benchmarks.harness.pace import PROMPT_TOKENS, SMALL_PROFILE
from benchmarks.serving.batches import Batches
from benchmarks.serving.interrupted import PauseFigures
from benchmarks.serving.parked import HISTORY_TOKENS, ParkedFigures
from rkserve.bench.figures import Ratio
from rkserve.bench.tables import MISSING, figure, table


def parked_section(found: ParkedFigures) -> str:
    """Say what came of (e)."""
    rows = [
        _spread_row("TTFT of a returning conversation, ms", found.returned_ttft_ms, found.ttft),
        _spread_row(f"TTFT of {HISTORY_TOKENS} tokens that are new, ms", found.cold_ttft_ms),
        _spread_row("TTFT of who has it parked, ms", found.displacing_ttft_ms, found.displacing),
        _spread_row("TTFT of who finds nothing to park, ms", found.calm_ttft_ms),
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
        "new turn, so with a longer prompt than it is held to. Who takes the board waits until the "
        "other's KV cache is on disk; the answer of who came back ends when its longer KV cache "
        "is. Medians of token counts. **The disk is simulated**: 114 688 bytes a token at 200 MB/s "
        "(`RKSIM_DISK_MB_PER_S`), an assumption; an SD card is slower, NVMe faster. The file's "
        "sha256 and its fsync, for which the board stays occupied, are real work of this machine, "
        "but of a file with holes in it.\n"
    )


def _spread_row(name: str, of: Spread, to_next: Ratio | None = None) -> list[str]:
    quotient = MISSING
    if to_next is not None:
        quotient = f"{to_next.value:.3f} ({to_next.low:.3f} to {to_next.high:.3f})"
    return [name, figure(of.p50), figure(of.p99), quotient]


def pauses_section(kinds: Sequence[PauseFigures]) -> str:
    """Say what came of (f)."""
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
    """Say what came of (g)."""
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
        "input of the simulator and no measurement**: nobody has published what a batch gains on "
        "these NPUs, and the default is none. The table shows that what the runtime gains is not "
        "lost on the way through the binding, and nothing about hardware.\n"
    )
