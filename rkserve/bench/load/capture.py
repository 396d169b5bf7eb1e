"""Answers of two models, adapters or servers to the same prompts, and where they differ.

The second one gets the history with the first one's answers, so that both answer the same prompt in
every turn. It judges nothing: how much differs is measured by words, which of the two is better is
for whoever reads it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rkserve.bench.child import Json
from rkserve.bench.load.outcome import Outcome
from rkserve.bench.load.play import NO_ANSWER
from rkserve.bench.load.trace import Session, Trace
from rkserve.bench.tables import MISSING, figure, percent, table

Place = tuple[str, int]  # session and turn
WORDS = re.compile(r"\s+|[^\W_]+|.", re.DOTALL)
LONGEST_PROMPT = 400
MOST_WORDS = 4000  # beyond this comparing takes minutes


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt. ``first_at`` is the character from which on they differ."""

    session: str
    turn: int
    prompt: str
    answers: tuple[str, str]
    errors: tuple[str, str]
    reasons: tuple[str, str]
    tokens: tuple[int, int]
    first_at: int | None
    alike: float

    @property
    def same(self) -> bool:
        """Whether there are two answers, and they are the same one."""
        return self.first_at is None and not any(self.errors)


def with_answers(trace: Trace, outcomes: Sequence[Outcome]) -> Trace:
    """Return a trace whose conversations go on with these answers."""
    said = {_place(one): one.text or NO_ANSWER for one in outcomes}

    def answered(session: Session) -> Session:
        turns = (
            replace(turn, answer=said.get((session.name, number), NO_ANSWER))
            for number, turn in enumerate(session.turns)
        )
        return replace(session, turns=tuple(turns))

    return replace(trace, sessions=tuple(answered(one) for one in trace.sessions))


def pairs(trace: Trace, first: Sequence[Outcome], second: Sequence[Outcome]) -> list[Pair]:
    """Put the answers beside each other; a prompt that one of them was not asked is left out."""
    ours, theirs = ({_place(one): one for one in side} for side in (first, second))
    return [
        _pair(prompt, place, (ours[place], theirs[place]))
        for place, prompt in _prompts(trace)
        if place in ours and place in theirs
    ]


def render(names: tuple[str, str], found: Sequence[Pair]) -> str:
    """Return the comparison as Markdown."""
    same = sum(one.same for one in found)
    failed = sum(any(one.errors) for one in found)
    both = [one for one in found if not any(one.errors)]
    alike = sum(one.alike for one in both) / len(both) if both else 0.0
    rows = [
        ["prompts", figure(len(found), 0)],
        ["the same answer", figure(same, 0)],
        ["not answered by both", figure(failed, 0)],
        ["words in common, mean", percent(alike) if both else MISSING],
    ]
    parts = [
        f"## {names[0]} beside {names[1]}\n",
        table(["", "n"], rows),
        f"What only {names[0]} says is between `[-` and `-]`, what only {names[1]} says between "
        "`{+` and `+}`.\n",
        *(_block(names, one) for one in found if not one.same),
    ]
    return "\n".join(parts)


def to_json(names: tuple[str, str], found: Sequence[Pair]) -> Json:
    """Return the comparison as what JSON can say."""
    return {
        "targets": list(names),
        "prompts": len(found),
        "same": sum(one.same for one in found),
        "failed": sum(any(one.errors) for one in found),
        "pairs": [_json(names, one) for one in found],
    }


def marked(first: str, second: str) -> str:
    """Return both texts in one, with what only one of them has in brackets."""
    return "".join(_marked(first, second))


def _marked(first: str, second: str) -> Iterator[str]:
    ours, theirs = WORDS.findall(first), WORDS.findall(second)
    for tag, a, b, c, d in _matcher(ours, theirs).get_opcodes():
        if tag == "equal":
            yield "".join(ours[a:b])
            continue
        if a != b:
            yield f"[-{''.join(ours[a:b])}-]"
        if c != d:
            yield f"{{+{''.join(theirs[c:d])}+}}"


def _matcher(ours: Sequence[str], theirs: Sequence[str]) -> difflib.SequenceMatcher[str]:
    return difflib.SequenceMatcher(None, ours[:MOST_WORDS], theirs[:MOST_WORDS], autojunk=False)


def _pair(prompt: str, place: Place, both: tuple[Outcome, Outcome]) -> Pair:
    first, second = both
    return Pair(
        session=place[0],
        turn=place[1],
        prompt=prompt,
        answers=(first.text, second.text),
        errors=_two(both, lambda one: "" if one.ok else one.label),
        reasons=_two(both, lambda one: one.finish_reason),
        tokens=(first.completion_tokens, second.completion_tokens),
        first_at=_first_difference(first.text, second.text),
        alike=_matcher(WORDS.findall(first.text), WORDS.findall(second.text)).ratio(),
    )


def _first_difference(first: str, second: str) -> int | None:
    if first == second:
        return None
    pairs_of = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs_of if a != b), min(len(first), len(second)))


def _block(names: tuple[str, str], one: Pair) -> str:
    prompt = one.prompt[:LONGEST_PROMPT] + (" ..." if len(one.prompt) > LONGEST_PROMPT else "")
    told = [
        f"{name}: {error or f'{tokens} tokens, {reason}'}"
        for name, error, tokens, reason in zip(
            names, one.errors, one.tokens, one.reasons, strict=True
        )
    ]
    head = f"### {one.session}, turn {one.turn + 1}\n\n{'; '.join(told)}"
    return f"{head}\n\n{fenced(prompt)}\n{fenced(marked(*one.answers))}"


def fenced(text: str) -> str:
    """Return a block of code around a text, whatever is in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}\n"


def _json(names: tuple[str, str], one: Pair) -> Json:
    sides: Mapping[str, Json] = {
        name: {"text": text, "error": error, "finish_reason": reason, "tokens": tokens}
        for name, text, error, reason, tokens in zip(
            names, one.answers, one.errors, one.reasons, one.tokens, strict=True
        )
    }
    told = {"session": one.session, "turn": one.turn, "prompt": one.prompt}
    measured = {"same": one.same, "first_at": one.first_at, "alike": one.alike}
    return {**told, **measured, "answers": sides}


def _prompts(trace: Trace) -> Iterator[tuple[Place, str]]:
    for session in trace.sessions:
        for number, turn in enumerate(session.turns):
            yield (session.name, number), turn.user


def _place(one: Outcome) -> Place:
    return one.asked.session, one.asked.turn


def _two(both: tuple[Outcome, Outcome], of: Callable[[Outcome], str]) -> tuple[str, str]:
    return of(both[0]), of(both[1])
