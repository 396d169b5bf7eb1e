"""What a kill run found: which answers are as they must be, and how long clients waited. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.control.answers import Answer


@dataclass(frozen=True, slots=True)
class Truth:
    """What an answer must be: its words, why it ends, and its usage."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, answer: Answer) -> Truth:
        """Return what this answer is."""
        usage = answer.exchange
        return cls(answer.text, answer.finish, usage.prompt_tokens, usage.completion_tokens)


@dataclass(frozen=True)
class Phase:
    """One kind of kill: how often, and what clients got meanwhile."""

    name: str
    kills: int
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class KillFigures:
    """What one phase came to.

    ``silences_ms`` are the longest between two pieces of text of each answer that went on once;
    ``waits_ms`` are the times from when the Router noticed a loss to the next token, of the same.
    ``flaws`` name the first answers that are not what they must be.
    """

    name: str
    kills: int
    answers: int
    continued: int
    continuations: int
    lost: int
    wrong: int
    silences_ms: tuple[float, ...]
    waits_ms: tuple[float, ...]
    calm_ms: tuple[float, ...]
    flaws: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether no request and no character was lost, and none came twice."""
        return self.lost == self.wrong == 0


def judge(phase: Phase, truths: Mapping[int, Truth]) -> KillFigures:
    """Hold every answer of a phase to what it must be, by its prompt."""
    lost = [one for one in phase.answers if one.exchange.error or not one.whole]
    whole = [one for one in phase.answers if not one.exchange.error and one.whole]
    wrong = [one for one in whole if Truth.of(one) != truths[one.prompt]]
    moved = [one for one in whole if one.continued]
    once = [one for one in moved if one.continued == 1]
    flaws = [f"lost: {one.exchange.error or 'no end'}" for one in lost]
    flaws += [_difference(one, truths[one.prompt]) for one in wrong]
    return KillFigures(
        phase.name,
        phase.kills,
        len(phase.answers),
        len(moved),
        sum(one.continued for one in moved),
        len(lost),
        len(wrong),
        tuple(silence for one in once if (silence := longest_silence_ms(one)) is not None),
        tuple(one.lost_ms for one in once),
        tuple(
            silence
            for one in whole
            if not one.continued and (silence := longest_silence_ms(one)) is not None
        ),
        tuple(flaws[:5]),
    )


def longest_silence_ms(answer: Answer) -> float | None:
    """Return the longest time between two pieces of an answer's text; None of fewer pieces."""
    gaps = (after - before for before, after in pairwise(answer.exchange.content_s))
    longest_s = max(gaps, default=None)
    return None if longest_s is None else longest_s * 1e3


def _difference(answer: Answer, truth: Truth) -> str:
    found = Truth.of(answer)
    if found.text == truth.text:
        return f"wrong: {found.finish} and {found.completion_tokens} tokens, not {truth.finish}"
    at = next(
        (n for n, (a, b) in enumerate(zip(found.text, truth.text, strict=False)) if a != b),
        min(len(found.text), len(truth.text)),
    )
    was, should = found.text[max(0, at - 10) : at + 20], truth.text[max(0, at - 10) : at + 20]
    return f"wrong at character {at} of {len(truth.text)}: {was!r}, not {should!r}"


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which this share of them is; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def total(found: Iterable[KillFigures]) -> KillFigures:
    """Return what all phases came to together."""
    every = list(found)
    return KillFigures(
        "all",
        sum(one.kills for one in every),
        sum(one.answers for one in every),
        sum(one.continued for one in every),
        sum(one.continuations for one in every),
        sum(one.lost for one in every),
        sum(one.wrong for one in every),
        tuple(ms for one in every for ms in one.silences_ms),
        tuple(ms for one in every for ms in one.waits_ms),
        tuple(ms for one in every for ms in one.calm_ms),
        (),
    )
