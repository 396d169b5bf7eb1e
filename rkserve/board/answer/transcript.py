"""The token ids of one generation: the prompt, the answer, what edits put in and took out. Pure.

It checks what an edit asks for and knows nothing of text, hooks or runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress, pairwise

from rkserve.board.answer.kv_plan import Ids, Range
from rkserve.core.errors import RequestError
from rkserve.core.messages import Kind, Slot


class Transcript:
    """The ids of one generation in order. Edits return a changed copy or raise."""

    def __init__(self, prompt: Ids, slots: Iterable[Slot] = ()) -> None:
        self._prompt = prompt  # without what was cleared
        self.slots = list(slots)

    @property
    def context(self) -> Ids:
        """What a run that goes on has to hold."""
        return (*self._prompt, *(slot.token_id for slot in self.slots if not slot.cleared))

    @property
    def prompt(self) -> Ids:
        """The prompt, less what edits have cleared of it."""
        return self._prompt

    @property
    def answer(self) -> list[int]:
        """The ids of the answer."""
        return [slot.token_id for slot in self.slots if slot.kind is not Kind.INJECTED]

    def drop_unfinished(self) -> int:
        """Drop the beginning of a character at the end, and return how many tokens that were.

        What the runtime held back of it is lost with the interruption, and whoever continues
        makes these tokens again.
        """
        before = len(self.slots)
        while self.slots and self.slots[-1].unfinished:
            self.slots.pop()
        return before - len(self.slots)

    def cleared(self, ranges: Sequence[Range], held: int) -> Transcript:
        """Return a copy without these half-open ranges of the first ``held`` positions.

        Raises:
            RequestError: a range is outside of the cache, turned round, or overlaps another one.
        """
        context = self.context
        live = [True] * len(context)
        for start, end in ordered(ranges, min(held, len(context))):
            live[start:end] = [False] * (end - start)
        position, slots = len(self._prompt), []
        for slot in self.slots:
            if not slot.cleared:
                slots.append(slot if live[position] else replace(slot, cleared=True))
                position += 1
            else:
                slots.append(slot)
        return Transcript(tuple(compress(self._prompt, live)), slots)

    def spliced(self, take_back: int, ids: Ids, text: str, kind: Kind) -> Transcript:
        """Return a copy with ``ids`` in place of the last tokens of the answer.

        Raises:
            RequestError: there are not so many, or they are part of a piece that is one.
        """
        copy = Transcript(self._prompt, self.slots[: self._cut(take_back)])
        copy.drop_unfinished()
        if not ids:
            if text:
                raise RequestError("text cannot be put in without its token ids", "text")
            return copy
        try:
            data = text.encode()
        except UnicodeEncodeError as exc:
            raise RequestError(f"the text is not valid Unicode: {exc.reason}", "text") from None
        # Its text cannot be told apart by tokens, so it is shown with the last of them.
        copy.slots += [Slot(token_id, b"", kind, waiting=True) for token_id in ids[:-1]]
        copy.slots.append(Slot(ids[-1], data, kind))
        return copy

    def _cut(self, take_back: int) -> int:
        """Return the slot from which the last tokens of the answer are taken back."""
        cut, kinds = len(self.slots), [slot.kind for slot in self.slots]
        own = kinds[::-1].index(Kind.INJECTED) if Kind.INJECTED in kinds else cut
        if not 0 <= take_back <= own:
            where = "it holds" if own == cut else "it holds since what was injected last"
            raise RequestError(
                f"{take_back} tokens of the answer cannot be replaced: {own} is what {where}",
                "replace_last",
            )
        cut -= take_back
        before = self.slots[cut - 1] if cut else None
        if before is not None and before.waiting and before.kind is Kind.APPENDED:
            raise RequestError(
                f"taking back {take_back} tokens would cut words in two that were put in as one "
                "piece; take back all of them or none",
                "replace_last",
            )
        return cut


def ordered(ranges: Sequence[Range], held: int) -> list[Range]:
    """Return the ranges that are not empty, the last one first.

    In that order each can be cleared by itself: it moves no position of those that follow.

    Raises:
        RequestError: a range is outside of the cache, turned round, or overlaps another one.
    """
    for start, end in ranges:
        if not 0 <= start <= end <= held:
            raise RequestError(
                f"the range [{start}, {end}) is outside of the cache, which holds {held} positions",
                "clear",
            )
    found = sorted(((start, end) for start, end in ranges if start < end), reverse=True)
    for (start, _), (other, end) in pairwise(found):
        if end > start:
            raise RequestError(
                f"the ranges [{other}, {end}) and [{start}, ...) to clear overlap", "clear"
            )
    return found
