"""The part of the report about answers that follow a grammar. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.harness.pace import SMALL_PROFILE
from benchmarks.serving.guided import Answered, GuidedFound, Masked, rate
from rkserve.bench.tables import figure, table


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
