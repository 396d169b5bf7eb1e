"""Truths of a soak's questions, asked while nothing is disturbed, and asked again at its end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.harness.exchange import Truth
from benchmarks.soak.judge import Ending, Outcome
from benchmarks.soak.questions import Question, ReadAnswer, RequestSet, next_turn
from rkserve.bench.processes import BenchFailed

AT_ONCE = 8
LEARNED = 4096
FIRST_OF_TALKS = 100_000
TALKS, TURNS = 6, 3


@dataclass(frozen=True)
class Script:
    """All questions with their truths; those of the adapter have one for each seed of it.

    ``seed_of`` returns the seed of a version's content. Where that is new during the run,
    the first answer to a question is the truth of all later ones.
    """

    single: Mapping[str, Sequence[Question]]
    conversations: Sequence[Sequence[Question]]
    adapter: Sequence[Question]
    truths: Mapping[int, Truth]
    adapter_truths: Mapping[tuple[int, int], Truth]
    seed_of: Callable[[str], int | None]
    learned: OrderedDict[tuple[int, int], Truth] = field(default_factory=OrderedDict)

    @classmethod
    def untried(cls, questions: RequestSet, seed_of: Callable[[str], int | None]) -> Script:
        """Return the questions without truths."""
        return cls(questions.single, (), questions.adapter, {}, {}, seed_of)

    @property
    def plain(self) -> list[Question]:
        """All questions that need no adapter."""
        return [
            *(one for kind in self.single.values() for one in kind),
            *(one for talk in self.conversations for one in talk),
        ]

    def truth(self, question: Question, read: ReadAnswer) -> Truth | None:
        """Return what an answer must be; None where its version is none that was pushed."""
        if question.number in self.truths:
            return self.truths[question.number]
        seed = self.seed_of(read.version)
        if seed is None:
            return None
        key = (seed, question.number)
        if key in self.adapter_truths:
            return self.adapter_truths[key]
        if key not in self.learned and read.truth is not None and not read.continued:
            self.learned[key] = read.truth
            while len(self.learned) > LEARNED:
                self.learned.popitem(last=False)
        return self.learned.get(key, read.truth)


Ask = Callable[[Script, Question], Awaitable[Outcome]]


async def answers(ask: Ask, script: Script, questions: Sequence[Question]) -> list[Outcome]:
    """Ask these, some at a time, and return their outcomes in their order."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(question: Question) -> Outcome:
        async with places:
            return await ask(script, question)

    return [*await asyncio.gather(*(one(question) for question in questions))]


async def with_truths(ask: Ask, script: Script, model: str, tokens: int) -> Script:
    """Ask everything that needs no adapter, twice. Raises ``BenchFailed`` where that differs."""
    known = await _known(ask, script)
    talks: list[list[Question]] = []
    numbers = iter(range(FIRST_OF_TALKS, FIRST_OF_TALKS + TALKS * TURNS))
    for talk in range(TALKS):
        history: list[dict[str, str]] = []
        turns: list[Question] = []
        for _ in range(TURNS):
            question = next_turn(next(numbers), model, tokens, history, talk)
            (truth,) = await _asked(ask, script, [question])
            known[question.number] = truth
            turns.append(question)
            said = {"role": "assistant", "content": truth.text}
            history = [*question.body["messages"], said]
        talks.append(turns)
    full = replace(script, conversations=talks, truths=known)
    _check_alike(full)
    for outcome in await answers(ask, full, full.plain):
        if outcome.ending is not Ending.WHOLE or outcome.found != outcome.truth:
            raise BenchFailed(f"the same prompt was answered differently at rest: {outcome}")
    return full


async def with_adapter_truths(ask: Ask, script: Script, seed: int) -> Script:
    """Ask the adapter's questions, whose content of this seed is served."""
    found = await _asked(ask, script, script.adapter)
    pairs = zip(script.adapter, found, strict=True)
    more = {(seed, one.number): truth for one, truth in pairs}
    return replace(script, adapter_truths={**script.adapter_truths, **more})


async def _known(ask: Ask, script: Script) -> dict[int, Truth]:
    questions = script.plain
    found = await _asked(ask, script, questions)
    return {one.number: truth for one, truth in zip(questions, found, strict=True)}


async def _asked(ask: Ask, script: Script, questions: Sequence[Question]) -> list[Truth]:
    found = []
    for outcome in await answers(ask, script, questions):
        if outcome.ending is not Ending.WHOLE or outcome.found is None or outcome.continued:
            raise BenchFailed(f"an answer broke before the first fault: {outcome}")
        found.append(outcome.found)
    return found


def _check_alike(script: Script) -> None:
    """Refuse truths of which a streamed one is another text than a whole one."""
    texts: dict[str, str] = {}
    for one in script.plain:
        text = script.truths[one.number].text
        if texts.setdefault(one.same, text) != text:
            raise BenchFailed(f"{one.kind} of '{one.same}' differs from the same without streaming")
