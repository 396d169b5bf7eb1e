"""Checks of answers under control: whole, of one version, stamped, never stale. Pure.

Each answer is compared with the uninterrupted answer of its version to the same prompt, and its
version with the time at which the answer began.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.control.answers import ABORTED, Answer, Call
from rkserve.bench.connection import OK

SHOWN = 5  # errors that a report quotes
IN_FORCE = (OK, 207)  # on all boards, or on some, and on its way to the others


@dataclass(frozen=True, slots=True)
class Said:
    """A version's answer to a prompt, and its number of tokens."""

    text: str
    tokens: int


Truth = Mapping[tuple[str, int], Said]  # by version and number of the prompt


@dataclass(frozen=True, slots=True)
class Era:
    """A time in which a version may begin an answer. Seconds of the clients' clock."""

    version: str
    from_s: float = -math.inf
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Checked:
    """Numbers of ``answers`` with each kind of error.

    ``aborted`` ended early or with an error, ``wrong`` have lost, doubled or changed tokens,
    ``mixed`` have tokens of several versions, ``unstamped`` do not say whose all of their tokens
    are, and ``stale`` began with a version whose successor had been acknowledged. ``decided`` of
    them began at a time at which only one version would have been right.
    """

    answers: int
    aborted: int
    wrong: int
    mixed: int
    unstamped: int
    stale: int
    decided: int
    errors: tuple[str, ...] = ()


def truth(answers: Iterable[Answer]) -> dict[tuple[str, int], Said]:
    """Return what versions say, from uninterrupted answers of one version."""
    return {
        (one.spans[0].version, one.prompt): Said(one.text, one.exchange.completion_tokens)
        for one in answers
    }


def flaws_of_truth(answers: Sequence[Answer]) -> list[str]:
    """Note what makes answers unfit to hold others to."""
    found = Counter(
        one.exchange.error or f"{len(one.spans)} versions, ended by {one.finish!r}"
        for one in answers
        if one.exchange.error or len(one.spans) != 1 or one.finish == ABORTED
    )
    flaws = [f"{count} x {flaw}" for flaw, count in found.items()]
    return flaws if answers else ["no answer at all"]


def eras(first: str, switches: Iterable[tuple[Call, str]]) -> list[Era]:
    """Return when which version may begin an answer: ``first``, then those switched to in turn.

    While a switch is on its way both may. One that failed was undone by the time of its answer; one
    that some boards had not followed yet is in force, and what those still answer is stale.
    """
    found: list[Era] = []
    version, since_s = first, -math.inf
    for call, after in switches:
        if call.status not in IN_FORCE:
            found.append(Era(after, call.asked_s, call.answered_s))
            continue
        found.append(Era(version, since_s, call.answered_s))
        version, since_s = after, call.asked_s
    return [*found, Era(version, since_s)]


def check(answers: Sequence[Answer], said: Truth, times: Sequence[Era]) -> Checked:
    """Hold answers to what they must be. What had no end or an error is only ``aborted``."""
    good = [one for one in answers if not _aborted(one)]
    errors = Counter(_reason(one) for one in answers if _aborted(one))
    allowed = [_allowed(one, times) for one in good]
    return Checked(
        answers=len(answers),
        aborted=len(answers) - len(good),
        wrong=sum(_wrong(one, said) for one in good),
        mixed=sum(len({span.version for span in one.spans}) > 1 for one in good),
        unstamped=sum(not _stamped(one) for one in good),
        stale=sum(
            bool(one.spans) and one.spans[0].version not in may
            for one, may in zip(good, allowed, strict=True)
        ),
        decided=sum(len(may) == 1 for may in allowed),
        errors=tuple(f"{count} x {reason}" for reason, count in errors.most_common(SHOWN)),
    )


def began(answer: Answer) -> tuple[float, float]:
    """Between which moments an answer's first run began, by what its timings say.

    It waited for the board after it was sent, and its prefill ended before its first text. An
    answer that was paused may have waited again, later, and its prefills are told as one sum, of
    which any part may lie behind its first text.
    """
    sent_s, exchange = answer.exchange.sent_s, answer.exchange
    first_s = exchange.content_s[0] if exchange.content_s else math.inf
    if answer.paused_ms:
        return sent_s, first_s
    from_s = sent_s + exchange.queue_ms / 1e3
    return from_s, max(from_s, first_s - exchange.prefill_ms / 1e3)


def _allowed(answer: Answer, times: Sequence[Era]) -> set[str]:
    from_s, until_s = began(answer)
    return {era.version for era in times if era.from_s <= until_s and era.until_s >= from_s}


def _aborted(answer: Answer) -> bool:
    return bool(answer.exchange.error) or not answer.whole or answer.finish == ABORTED


def _reason(answer: Answer) -> str:
    return answer.exchange.error or (ABORTED if answer.whole else "the answer did not end")


def _stamped(answer: Answer) -> bool:
    """Return whether its headers, its end and its spans name the version of each token."""
    if not (answer.stamp or answer.early) or not answer.version or not answer.spans:
        return False
    ends = [0, *(span.end for span in answer.spans)]
    starts = [*(span.start for span in answer.spans), answer.exchange.completion_tokens]
    return ends == starts and answer.version == answer.spans[-1].version


def _wrong(answer: Answer, said: Truth) -> bool:
    versions = {span.version for span in answer.spans} or {answer.version}
    if len(versions) != 1:
        return True
    right = said.get((versions.pop(), answer.prompt))
    return right != Said(answer.text, answer.exchange.completion_tokens)
