"""Clients whose answers can be foretold, also after edits, for tests that interrupt at random.

Each asks a board to repeat words that nobody else asks for. What an edited answer goes on with is
what an uninterrupted run over the edited context says, for the simulated model knows nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rkserve.board.board import Board
from rkserve.core.board_report import GenerationInfo, GenerationState
from rkserve.core.errors import RequestError, RkserveError
from rkserve.core.messages import (
    AdapterRef,
    ControlAction,
    Delta,
    Edit,
    Finished,
    FinishReason,
    GenerateRequest,
)
from tests.support.boards.board_bench import collect
from tests.support.sim.sim_board import EOS_IDS, FOLDER, GREEDY, TOKENIZER, chat, words

T = TypeVar("T")

PAD = TOKENIZER.token_to_id("<|pad|>")  # the model says it now and then; it has no text
FOREIGN = ("你好", "Grüße", "🍵", "שלום", "नमस्ते", "crème")


@dataclass
class Slot:
    """A token after the prompt, as an edit sees it."""

    token_id: int
    injected: bool = False
    glued: bool = False  # the next one belongs to the same words, put in by an edit
    cleared: bool = False


@dataclass
class Ledger:
    """What an edited generation must consist of, kept beside the board's own account."""

    prompt: list[int]
    batched: bool = False
    slots: list[Slot] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        return [slot.token_id for slot in self.slots if not slot.injected]

    @property
    def context(self) -> tuple[int, ...]:
        live = (slot.token_id for slot in self.slots if not slot.cleared)
        return (*self.prompt, *live)

    @property
    def replaceable(self) -> int:
        """How many tokens of the answer were said since the last injected one."""
        kinds = [slot.injected for slot in reversed(self.slots)]
        return kinds.index(True) if True in kinds else len(kinds)

    def said(self, ids: Sequence[int]) -> None:
        """The answer has become this: the model has gone on."""
        known = self.answer
        assert list(ids[: len(known)]) == known
        self.slots += [Slot(token_id) for token_id in ids[len(known) :]]

    def allows(self, edit: Edit, positions: int) -> bool:
        """Whether the edit asks for what is there."""
        ranges = sorted(r for r in edit.clear if r[0] < r[1])
        if any(not 0 <= start <= end <= positions for start, end in edit.clear):
            return False
        if any(one[1] > other[0] for one, other in itertools.pairwise(ranges)):
            return False
        if any(not 0 <= token_id < TOKENIZER.get_vocab_size() for token_id in edit.ids):
            return False
        if not 0 <= edit.replace_last <= self.replaceable:
            return False
        left = self.slots[: len(self.slots) - edit.replace_last]
        return not (left and left[-1].glued) and (bool(edit.ids) or not edit.text)

    def apply(self, edit: Edit) -> None:
        """Do what the board does to an edit that it allows."""
        position, prompt = 0, []
        gone = {at for start, end in edit.clear for at in range(start, end)}
        for token_id in self.prompt:
            if position not in gone:
                prompt.append(token_id)
            position += 1
        for slot in self.slots:
            if not slot.cleared:
                slot.cleared = position in gone
                position += 1
        self.prompt = prompt
        del self.slots[len(self.slots) - edit.replace_last :]
        # In a batch a token without a text may be the beginning of a character.
        while self.batched and self.slots and self.slots[-1].token_id == PAD:
            self.slots.pop()
        last = len(edit.ids) - 1
        self.slots += [
            Slot(token_id, edit.injected, glued=at < last and not edit.injected)
            for at, token_id in enumerate(edit.ids)
        ]


@dataclass
class Talk:
    """One client and what it got so far; ``wrong`` says what was."""

    board: Board
    number: int
    request: GenerateRequest
    expected: str  # when nobody touches it, without a limit
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    error: RkserveError | None = None
    aborted: bool = False
    hung_up: bool = False
    ledger: Ledger | None = None  # from the first edit on

    def __post_init__(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        try:
            async with aclosing(self.board.generate(self.request)) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        self.text = self.text[: len(self.text) - event.retract] + event.text
                        self.ids += event.token_ids
                    elif isinstance(event, Finished):
                        self.finished = event
        except RkserveError as exc:
            self.error = exc

    @property
    def batched(self) -> bool:
        return self.board.report().n_batch > 1

    @property
    def id(self) -> str:
        """What control calls it."""
        return self.request.request_id.partition("/")[0]

    @property
    def over(self) -> bool:
        return self.task.done()

    def info(self) -> GenerationInfo | None:
        """What the board says of it; None where it has ended."""
        found = [i for i in self.board.generations() if i.request_id == self.request.request_id]
        return found[0] if found else None

    @property
    def state(self) -> GenerationState:
        info = self.info()
        return info.state if info else GenerationState.ENDED

    async def hang_up(self) -> None:
        self.hung_up = self.hung_up or not self.over
        self.task.cancel()
        await asyncio.wait({self.task})

    async def caught_up(self, tokens: int) -> None:
        """Wait until everything that a paused answer has was read."""
        for _ in range(CATCH_UP):
            if len(self.ids) == tokens or self.over:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{tokens} tokens are told, and given: {self.ids}; {self}")

    @property
    def editable(self) -> bool:
        """Whether what it becomes by an edit can be foretold."""
        return not self.request.stop and self.expected.isascii()

    def would_allow(self, edit: Edit, positions: int) -> bool:
        """Whether the paused answer allows the edit, where the KV cache holds ``positions``."""
        ledger = self.ledger or Ledger(list(self.request.prompt_ids), self.batched)
        ledger.said(self.ids)
        return ledger.allows(edit, positions)

    async def edit(self, rolls: random.Random, *, bad: bool) -> str | None:
        """Edit it in some way; return what came of it, None where it is not paused (any more)."""
        info = self.info()
        if info is None or info.state is not GenerationState.PAUSED:
            return None
        await self.caught_up(info.tokens)
        info = self.info()
        if info is None or info.state is not GenerationState.PAUSED:
            return None
        return self._edit_now(bad_edit(rolls, info) if bad else any_edit(rolls, info), info)

    def _edit_now(self, edit: Edit, info: GenerationInfo) -> str:
        """Without a turn of the loop between the look, the edit and its entry."""
        allowed = self.would_allow(edit, info.kv_positions)
        changed: GenerationInfo | None = None
        try:
            [changed] = at_once(self.board.control(self.id, ControlAction.EDIT, edit))
        except RequestError:
            now = self.info()
            assert now is not None
            same = replace(now, age_s=info.age_s, paused_s=info.paused_s)
            assert same == info, "it was refused, and something changed"
        assert allowed is (changed is not None), edit
        if changed is None:
            return "edit invalid"
        self.edited(edit)
        assert self.ledger is not None
        assert changed.tokens == len(self.ledger.answer)
        assert changed.context_tokens == len(self.ledger.context)
        return "edit"

    def edited(self, edit: Edit) -> None:
        """An edit of the paused answer was taken by the board."""
        if self.ledger is None:
            self.ledger = Ledger(list(self.request.prompt_ids), self.batched)
        before = self.ids
        self.ledger.said(before)
        self.ledger.apply(edit)
        after, same = self.ledger.answer, 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        self.ids = before[:same]

    # -- the end --------------------------------------------------------------------------------

    async def check(self) -> None:
        """Hold what it got to what it must be. Raises AssertionError."""
        assert self.over
        assert self.error is None, self.error
        if self.ledger is None:
            self._check_plain()
        if self.hung_up:
            return
        assert self.finished is not None
        assert self.aborted or self.finished.reason is not FinishReason.ABORT
        assert self.finished.usage.completion_tokens == len(self.ids), self
        if self.ledger is not None:
            await self._check_edited(self.ledger)

    def _check_plain(self) -> None:
        assert self.expected.startswith(self.text), (self.text, self.expected)
        if self.hung_up or self.finished is None or self.finished.reason is FinishReason.ABORT:
            return
        if self.finished.reason is FinishReason.LENGTH:
            assert len(self.ids) == self.request.max_tokens
            assert self.text == said(self.ids)
        elif self.request.stop:
            assert self.text == self.expected.partition(self.request.stop[0])[0]
        else:
            assert self.text == self.expected == said(self.ids)
            assert self.ids[-1] in EOS_IDS

    async def _check_edited(self, ledger: Ledger) -> None:
        known = ledger.answer
        assert self.ids[: len(known)] == known
        assert self.text == said(self.ids)
        assert self.finished is not None
        rest, room = self.ids[len(known) :], self.request.max_tokens - len(known)
        if room <= 0 or (known and known[-1] in EOS_IDS):
            assert rest == []
            return
        oracle = GenerateRequest(
            f"oracle-{self.number}/0",
            FOLDER.id,
            ledger.context,
            room,
            sampling=GREEDY,
            adapter=self.request.adapter,
        )
        events = await collect(self.board.generate(oracle))
        told = [i for event in events if isinstance(event, Delta) for i in event.token_ids]
        if self.finished.reason is FinishReason.ABORT:
            assert told[: len(rest)] == rest
        else:
            assert told == rest, (said(told), said(rest))


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of what has nothing to wait for, without a turn of the loop."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise AssertionError(f"{work} waits")


def said(ids: Sequence[int]) -> str:
    """What these tokens say."""
    return TOKENIZER.decode(list(ids), skip_special_tokens=True)


@dataclass
class Asking:
    """What a new client asks for."""

    native: bool = False
    adapter: AdapterRef | None = None
    limit: int | None = None
    stop: bool = False
    multi_byte: bool = False
    pause_on: bool = False

    def talk(self, board: Board, number: int, rolls: random.Random) -> Talk:
        said = [f"{rolls.choice(WORDS)}{number}" for _ in range(rolls.randint(3, 12))]
        if self.multi_byte:
            said = [f"{word}{rolls.choice(FOREIGN)}" for word in said]
        middle = said[len(said) // 2]
        request = GenerateRequest(
            f"g{number}/0",
            FOLDER.id,
            chat(f"Repeat after me: {' '.join(said)}"),
            400 if self.limit is None else self.limit,
            sampling=GREEDY,
            adapter=self.adapter,
            native_pause=self.native,
            stop=(middle,) if self.stop else (),
            pause_on_text=(middle,) if self.pause_on else (),
        )
        return Talk(board, number, request, " ".join(said))


WORDS = ("north", "boat", "lamp", "river", "stone", "green", "apple", "cloud")

CATCH_UP = 1000  # turns of the loop; a board that has something to give needs a few
INSERTS = (" and then some", "!", " Stop.", "\n", " one two three")


def any_edit(rolls: random.Random, info: GenerationInfo) -> Edit:
    """Return an edit that is mostly sensible."""
    kind = rolls.randrange(8)
    text = rolls.choice(INSERTS)
    ids = words(text)
    size = max(info.kv_positions, 1)
    start = rolls.randrange(size)
    end = min(size, start + rolls.randrange(6))
    table = {
        0: Edit(replace_last=rolls.randint(0, min(info.tokens, 9))),
        1: Edit(ids=ids, text=text),
        2: Edit(replace_last=rolls.randint(0, min(info.tokens, 3)), ids=ids, text=text),
        3: Edit(ids=ids, text="", injected=True),
        4: Edit(clear=((start, end),)),
        5: Edit(clear=((start, end), (end, min(size, end + 2))), ids=ids, text=text),
        6: Edit(),
        7: Edit(clear=((start, end),), replace_last=min(info.tokens, 1)),
    }
    return table[kind]


def bad_edit(rolls: random.Random, info: GenerationInfo) -> Edit:
    """Return an edit that no generation allows."""
    beyond = info.kv_positions + 1
    return rolls.choice(
        (
            Edit(clear=((0, beyond),)),
            Edit(clear=((beyond, beyond + 5),)),
            Edit(clear=((2, 1),)),
            Edit(clear=((-1, 0),)),
            Edit(ids=(TOKENIZER.get_vocab_size(),), text="x"),
            Edit(ids=(-1,), text="x"),
            Edit(replace_last=info.tokens + 1),
            Edit(replace_last=-1),
            Edit(text="without ids"),
        )
    )
