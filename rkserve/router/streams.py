"""The open streams of one Router, and the tokens that each has delivered to its client.

When a board pauses, its last tokens may still be on the way to the client. A pause is answered
after they have arrived.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rkserve.core.board_report import Emitted
from rkserve.core.desired_state import Scope
from rkserve.core.messages import Delta, Finished, GenerateRequest, Paused
from rkserve.fleet.board_table import BoardAddress
from rkserve.fleet.fleet import Answers, Fleet

log = logging.getLogger(__name__)

# Written tokens still pass Ray's proxy, and the answer to the pause call, on another connection,
# may overtake them: by up to 3 ms on a machine loaded with three times its cores. There is no
# acknowledgement, so a fixed time is added.
PASSAGE_S = 0.02
_NOTHING: Mapping[str, int] = {}


@dataclass(slots=True)
class _OpenStream:
    """One choice of a streamed answer. ``tokens`` have been written to the client's connection.

    ``stopped_at`` is the board's token count at the latest pause event of the stream.
    """

    request_id: str
    adapter: str | None
    tokens: int = 0
    stopped_at: int = 0


class OpenStreams:
    """All open streams of a Router. Use from one event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._flows: dict[str, _OpenStream] = {}
        self._moved = asyncio.Event()
        self._sent_s = -math.inf  # the time of the latest write to any stream

    def __len__(self) -> int:
        return len(self._flows)

    def enter(self, request: GenerateRequest) -> None:
        """Add a stream."""
        name = request.line if request.adapter is None else request.adapter.name
        self._flows[request.request_id] = _OpenStream(request.request_id, name)

    def sent(self, request_id: str, event: Delta | Paused | Finished) -> None:
        """Note that an event, and all before it, was written to the client's connection."""
        flow = self._flows.get(request_id)
        if flow is None:
            return
        if isinstance(event, Delta):
            flow.tokens += len(event.token_ids)
            self._sent_s = asyncio.get_running_loop().time()
        elif isinstance(event, Paused):
            # The count includes tokens whose text is held back until it is complete; a later delta
            # brings them.
            flow.stopped_at = event.tokens
        else:
            del self._flows[request_id]
        self._moved.set()

    def leave(self, request_ids: Iterable[str]) -> None:
        """Remove streams, however they ended."""
        for request_id in request_ids:
            self._flows.pop(request_id, None)
        self._moved.set()

    async def at_rest(
        self, scope: Scope, timeout_s: float, known: Mapping[str, int] = _NOTHING
    ) -> bool:
        """Wait until the streams of a scope have delivered all tokens of their boards.

        The boards have stopped; ``known`` are the token counts of generations at that time. Boards
        are asked only for others, which have just begun or ended. Return False after ``timeout_s``,
        for example because a client does not read.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        goals = await self._goals(scope, timeout_s, known)
        while any(self._is_short_of(request_id, goal) for request_id, goal in goals.items()):
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), max(0.0, deadline_s - loop.time()))
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                log.warning("a stream still brings what its board sent before a pause")
                return False
        await asyncio.sleep(max(0.0, self._sent_s + PASSAGE_S - loop.time()))
        return True

    def _is_short_of(self, request_id: str, goal: int | None) -> bool:
        flow = self._flows.get(request_id)
        return flow is not None and (goal is None or max(flow.tokens, flow.stopped_at) < goal)

    async def _goals(
        self, scope: Scope, timeout_s: float, known: Mapping[str, int]
    ) -> dict[str, int | None]:
        """Return the final token count of each stream; None if it has ended on its board.

        Only the board knows: a generation that has not begun has no pause event, and an event that
        arrived may belong to an earlier pause.
        """
        meant = {
            flow.request_id: seats
            for flow in self._flows.values()
            if scope.adapter in (None, flow.adapter) and (seats := self._seats(flow, scope))
        }
        goals: dict[str, int | None] = {one: known[one] for one in meant if one in known}
        meant = {one: seats for one, seats in meant.items() if one not in goals}
        if not meant:
            return goals
        asked = {seat.board_id: seat for seats in meant.values() for seat in seats}
        answers: Answers[Emitted] = await self._fleet.ask(
            asked.values(), "emitted", timeout_s=timeout_s, together=True
        )
        tokens = dict(pair for said in answers.said.values() for pair in said.tokens)
        # The count of a board that does not answer is unknown; its streams are not awaited.
        goals |= {
            request_id: tokens.get(request_id)
            for request_id, seats in meant.items()
            if all(seat.board_id in answers.said for seat in seats)
        }
        return goals

    def _seats(self, flow: _OpenStream, scope: Scope) -> list[BoardAddress]:
        completion, _, choice = flow.request_id.rpartition("/")
        seats = self._fleet.holders(completion, int(choice))
        return [seat for seat in seats if scope.covers(seat.board_id, seat.model)]
