"""Finding generations on boards and Routers, and controlling them.

A board decides which actions the state of a generation allows.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol

from rkserve.api.admin.caches import failures
from rkserve.api.admin.generations import (
    EditCall,
    control_answer,
    edit_of,
    generation_entry,
    generations_list,
    parse_edit,
    read_choice,
)
from rkserve.api.admin.query import ControlRequest
from rkserve.api.json.fields import JsonObject
from rkserve.core.board_report import (
    OTHER_ROUTERS,
    GenerationInfo,
    GenerationState,
    RouterGenerations,
)
from rkserve.core.errors import (
    BoardFailed,
    GenerationNotFound,
    RequestError,
    RkserveError,
    StateConflict,
    UpstreamUnable,
)
from rkserve.core.messages import ControlAction, Edit
from rkserve.fleet.board_table import BoardAddress
from rkserve.fleet.fleet import Answers, Fleet, merged
from rkserve.router.off_loop import off_loop
from rkserve.router.service import Service

log = logging.getLogger(__name__)

OK, MULTI_STATUS = 200, 207
# Attempts to find a generation, which may leave its board during the call.
MOVES = 3
# Used in place of a board's name, for choices without a board and for Routers.
_QUEUE = "queue"
_NO_BOARD_YET = "It waits for a board; abort it, or try again once it has one."
# The format of answer IDs. Other paths are rejected without a call to the boards.
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")


class GenerationPeers(Protocol):
    """The Routers of one application."""

    async def unassigned(self) -> list[GenerationInfo]:
        """Return the generations of all Routers that no board has.

        Raises:
            BoardFailed: they did not answer.
        """

    async def control_unassigned(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> RouterGenerations:
        """Control the choices of a generation that Routers have and no board.

        Raises:
            BoardFailed: they did not answer.
        """


@dataclass(frozen=True, slots=True)
class _Found:
    """Boards that may hold a generation; ``failed`` are those that could not be asked.

    If no board holds it, ``sure`` is False and the boards are all that answered: one of them may
    remember its end.
    """

    addresses: list[BoardAddress]
    sure: bool
    failed: dict[str, RkserveError]


class Generations:
    """The generations on all boards, including those of other Routers."""

    def __init__(self, service: Service, peers: GenerationPeers | None = None) -> None:
        """``peers`` are all Routers, if there are several."""
        self._service = service
        self._peers = peers
        self._fleet: Fleet = service.fleet
        self._config = service.config

    async def listed(self) -> JsonObject:
        """Return all generations without their texts, including those without a board."""
        answers, (others, failed) = await asyncio.gather(
            self._held(self._fleet.addresses()), self._others()
        )
        own = self._service.unassigned.infos()
        unassigned = {one.request_id: one for one in [*others, *own]}
        # Other Routers' generations at upstreams are with Routers, and so are this one's own.
        held = {one.request_id: one for one in merged(answers.found.values())}
        return {
            **generations_list(list({**unassigned, **held}.values())),
            "failed": failures({**answers.failed, **failed}),
        }

    async def one(self, generation: str) -> JsonObject:
        """Return one generation. Raises ``GenerationNotFound``, ``BoardFailed``."""
        _check_id(generation)
        held = self._fleet.holders(generation)
        waiting = _of(self._service.unassigned.infos(), generation, None)
        failed: dict[str, RkserveError] = {}
        if held or waiting:
            answers = await self._held(held)
        else:
            (_, answers), (others, failed) = await asyncio.gather(
                self._survey(generation, None), self._others()
            )
            waiting = _of(others, generation, None)
        found = _of(merged(answers.found.values()), generation, None) + waiting
        if not found:
            failed = {**answers.failed, **failed}
            raise _worst([*failed.values(), GenerationNotFound(generation)])
        return generation_entry(found)

    async def control(
        self, generation: str, action: ControlAction, asked: ControlRequest
    ) -> tuple[int, JsonObject]:
        """Pause, resume or abort; return status and answer. Raises ``RkserveError``."""
        return await self._act(generation, action, read_choice(asked), None)

    async def edit(self, generation: str, asked: ControlRequest) -> tuple[int, JsonObject]:
        """Edit a paused generation; return status and answer. Raises ``RkserveError``."""
        call = await off_loop(len(asked.body), partial(parse_edit, asked))
        return await self.apply(generation, call)

    async def apply(self, generation: str, call: EditCall) -> tuple[int, JsonObject]:
        """Apply a parsed edit."""
        return await self._act(generation, ControlAction.EDIT, call.choice, call)

    async def _act(
        self, generation: str, action: ControlAction, choice: int | None, call: EditCall | None
    ) -> tuple[int, JsonObject]:
        _check_id(generation)
        began_s = time.monotonic()
        for moves in range(MOVES):
            at, failed = await self._at_routers(generation, action, choice)
            if moves and action is ControlAction.ABORT:
                at = replace(at, done=(*at.done, *at.ended))  # it left its board and has ended
            if (at.known or at.ended) and not self._fleet.holders(generation, choice):
                # All remaining choices are at this Router, without a board.
                return _answered(action, at, began_s)
            found = await self._find(generation, choice)
            edit = None if call is None else await self._edit(found, call)
            answers = await self._fleet.ask(
                found.addresses,
                "control",
                generation,
                action,
                edit,
                choice,
                timeout_s=self._config.control_timeout_s,
            )
            done: list[GenerationInfo] = [*merged(answers.found.values()), *at.done]
            failed |= {**found.failed, **answers.failed}
            if done or at.refused or not await self._moved(generation, choice):
                break
        if not done and not at.refused and not at.ended:
            raise _worst([*failed.values(), GenerationNotFound(generation)])
        # Choices that have ended on other boards need no action.
        left = {board: exc for board, exc in answers.failed.items() if not _is_over(exc)}
        return _answered(action, replace(at, done=tuple(done)), began_s, left)

    async def _at_routers(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> tuple[RouterGenerations, dict[str, RkserveError]]:
        """Control choices without a board, at this Router or else at all others.

        The generation is ``known`` only if this Router has one of its choices.
        """
        own = self._service.unassigned.control(generation, action, choice)
        if self._peers is None or own.known or own.ended:
            return own, {}
        try:
            found = await self._peers.control_unassigned(generation, action, choice)
        except BoardFailed as exc:
            return RouterGenerations(), {OTHER_ROUTERS: exc}
        return replace(found, known=False), {}

    async def _moved(self, generation: str, choice: int | None) -> bool:
        """Return whether a generation has just left its board and is at a Router."""
        if _of(self._service.unassigned.infos(), generation, choice):
            return True
        others, _ = await self._others()
        return bool(_of(others, generation, choice))

    async def _others(self) -> tuple[list[GenerationInfo], dict[str, RkserveError]]:
        """Ask the other Routers for generations that no board has; return the failure, if any."""
        if self._peers is None:
            return [], {}
        try:
            return await self._peers.unassigned(), {}
        except BoardFailed as exc:
            return [], {OTHER_ROUTERS: exc}

    async def _find(self, generation: str, choice: int | None) -> _Found:
        """Look up the boards in this Router's table, or else ask all boards."""
        held = self._fleet.holders(generation, choice)
        if held:
            return _Found(held, True, {})
        addresses, answers = await self._survey(generation, choice)
        holding = _holding(answers, generation, choice)
        among = [address for address in addresses if address.board_id in (holding or answers.found)]
        return _Found(among, bool(holding), answers.failed)

    async def _survey(
        self, generation: str, choice: int | None
    ) -> tuple[list[BoardAddress], Answers[list[GenerationInfo]]]:
        """Ask all boards for their generations; repeat if some board has never reported.

        A newly started Router learns of boards a moment after the Routers that serve already.
        """
        addresses = self._fleet.addresses()
        answers = await self._held(addresses)
        if _holding(answers, generation, choice) or not await self._fleet.look_again():
            return addresses, answers
        addresses = self._fleet.addresses()
        return addresses, await self._held(addresses)

    async def _held(self, addresses: list[BoardAddress]) -> Answers[list[GenerationInfo]]:
        return await self._fleet.ask(
            addresses, "generations", timeout_s=self._config.report_timeout_s
        )

    async def _edit(self, found: _Found, call: EditCall) -> Edit:
        if not found.sure:
            return Edit()  # a board without the generation answers that before it checks the edit
        if len(found.addresses) > 1:  # with a single board, its own error says the same
            raise RequestError("The answer has several choices; name the one to edit.", "choice")
        served = self._service.models.by_name[found.addresses[0].model]
        work = partial(edit_of, call, served.renderer, served.folder.settings.context_length)
        return await off_loop(len(call.text or call.token_ids or ""), work)


def _answered(
    action: ControlAction,
    at: RouterGenerations,
    began_s: float,
    failed: Mapping[str, RkserveError] = MappingProxyType({}),
) -> tuple[int, JsonObject]:
    """Return status and answer. Raises ``StateConflict`` if no choice could be changed."""
    if not at.done:
        if not at.refused:
            raise StateConflict(action.value, GenerationState.ENDED.value)
        raise _refusal(action, at.refused[0])
    answer = control_answer(action, at.done)
    log.info(
        "%s of %s done in %.1f ms: %s",
        action.value,
        at.done[0].request_id.rpartition("/")[0],
        (time.monotonic() - began_s) * 1e3,
        "; ".join(_summary(info) for info in at.done),
    )
    left = dict(failed)
    if at.refused:
        left[_QUEUE] = _refusal(action, at.refused[0])
    return (MULTI_STATUS, {**answer, "failed": failures(left)}) if left else (OK, answer)


def _summary(info: GenerationInfo) -> str:
    """Return a choice for the log: location, progress and age, without text."""
    where = info.board_id or "no board"
    choice = info.request_id.rpartition("/")[2]
    return (
        f"choice {choice} on {where} is {info.state.value} after {info.tokens} tokens and "
        f"{info.age_s:.3f} s, of which {info.paused_s:.3f} s paused"
    )


def _refusal(action: ControlAction, info: GenerationInfo) -> RkserveError:
    if info.board_id:  # only an upstream's generation is with a Router and at a board
        return UpstreamUnable(info.board_id, f"{action.value} a generation")
    reason = _NO_BOARD_YET if info.state is GenerationState.QUEUED else ""
    return StateConflict(action.value, info.state.value, reason)


def _holding(
    answers: Answers[list[GenerationInfo]], generation: str, choice: int | None
) -> set[str]:
    return {board for board, infos in answers.found.items() if _of(infos, generation, choice)}


def _check_id(generation: str) -> None:
    if not _ID.fullmatch(generation):
        raise GenerationNotFound(generation[:80])


def _of(
    infos: Iterable[GenerationInfo], generation: str, choice: int | None
) -> list[GenerationInfo]:
    """Return the entries of one generation, or of one of its choices."""
    if choice is None:
        return [info for info in infos if info.request_id.startswith(f"{generation}/")]
    return [info for info in infos if info.request_id == f"{generation}/{choice}"]


def _is_over(exc: RkserveError) -> bool:
    if isinstance(exc, StateConflict):
        return exc.state == GenerationState.ENDED.value
    return isinstance(exc, GenerationNotFound)


def _worst(errors: list[RkserveError]) -> RkserveError:
    """Return the most important error for the client."""

    def rank(exc: RkserveError) -> int:
        if isinstance(exc, GenerationNotFound):
            return 3  # only if all boards and Routers have answered
        if isinstance(exc, BoardFailed):
            return 2
        return 1 if _is_over(exc) else 0

    return min(errors, key=rank)
