"""What a client has of an answer, and what the next delta brings it. Pure.

It compares what is shown now with what was given out before. Whoever collects the deltas knows the
whole transcript from them, so that another board can go on with it. How text becomes certain, and
what edits do, is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rkserve.board.answer.kv_plan import Ids, common_prefix
from rkserve.board.answer.transcript import Transcript
from rkserve.core.messages import Delta, Kind, Slot, Splice
from rkserve.core.run_params import Scored


class PendingDelta:
    """The text, ids and slots of one answer that were given out, and those that wait for it.

    ``certain`` slots may be given out; set it, and ``ids`` to how many of them are the answer's.
    """

    def __init__(
        self,
        prompt: Ids,
        slots: Sequence[Slot] = (),
        ids: int = 0,
        text: str = "",
        *,
        scored: bool = False,
    ) -> None:
        """That much was given out already, of a generation that began elsewhere.

        Ids that are ``scored`` are given out with their logprobs.
        """
        self._scored = scored
        self._given = [text]
        self._text, self._retract = "", 0
        self._prompt = prompt
        self._slots = len(slots)  # that were given out
        self._taken = ids  # so many ids of the answer
        self._parts: list[int] | None = []  # lengths of the texts since, each of one id
        self._rewritten = False
        self.certain, self.ids = len(slots), ids

    @property
    def pending(self) -> bool:
        """Whether ``take`` has something to return."""
        return bool(self._slots < self.certain or self._text or self._retract or self._rewritten)

    def add(self, ids: int, text: str, shown: str) -> None:
        """A piece of so many tokens was said, and of it, and those before, that is shown."""
        self._text += shown
        if self._parts is None or ids != 1 or text != shown:
            self._parts = None
        else:
            self._parts.append(len(text))

    def add_silent(self) -> None:
        """A token of the answer has no text: the end of it."""
        if self._parts is not None:
            self._parts.append(0)

    def show(self, shown: str) -> None:
        """All that is shown of the answer now."""
        given = "".join(self._given)
        same = common_prefix(given, shown)
        self._retract, self._text = len(given) - same, shown[same:]

    def rewrite(self, same_ids: int, same_slots: int) -> None:
        """The answer was changed behind so many ids and slots."""
        self._taken = min(self._taken, same_ids)
        self._slots = min(self._slots, same_slots)
        self._rewritten = True

    def take(self, transcript: Transcript, token_ids: Sequence[int]) -> Delta | None:
        """Return what came since the last call, or None.

        Ids are given out with their text. Those that an edit took back are not taken back here.
        """
        if not self.pending:
            return None
        ids, text = tuple(token_ids[self._taken : self.ids]), self._text
        parts = self._parts
        if (
            parts is None
            or self._rewritten
            or self._retract
            or len(parts) != len(ids)
            or sum(parts) != len(text)
        ):
            delta = Delta(text, ids, self._retract, splice=self._splice(transcript))
        else:
            delta = Delta(text, ids, lengths=tuple(parts) if len(parts) > 1 else ())
        if self._scored and ids:
            delta = replace(delta, logprobs=self._logprobs(transcript, len(ids)))
        if self._retract:
            self._given = ["".join(self._given)[: -self._retract]]
        self._given.append(text)
        self._taken, self._slots = self.ids, self.certain
        self._text, self._retract, self._parts, self._rewritten = "", 0, [], False
        return delta

    def _logprobs(self, transcript: Transcript, count: int) -> tuple[Scored | None, ...]:
        """Return those of the last ids that are certain."""
        found: list[Scored | None] = []
        for at in range(self.certain - 1, -1, -1):
            slot = transcript.slots[at]
            if len(found) == count:
                break
            if slot.kind is not Kind.INJECTED:
                found.append(slot.scored)
        return tuple(reversed(found))

    def _splice(self, transcript: Transcript) -> Splice:
        prompt = None if transcript.prompt == self._prompt else transcript.prompt
        self._prompt = transcript.prompt
        return Splice(self._slots, tuple(transcript.slots[self._slots : self.certain]), prompt)
