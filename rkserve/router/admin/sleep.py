"""Sleep and wake calls, and models loaded and unloaded, as operations of the Coordinator."""

from __future__ import annotations

from rkserve.api.admin.cluster_status import is_sleeping_entry
from rkserve.api.admin.operations import ACCEPTED
from rkserve.api.admin.query import ControlRequest
from rkserve.api.admin.sleep import (
    TAGS,
    SleepCall,
    WakeCall,
    parse_load,
    parse_sleep,
    parse_unload,
    parse_wake,
)
from rkserve.control.calls import OperationOutcome
from rkserve.control.operations import OperationKind
from rkserve.core.desired_state import Scope
from rkserve.router.admin.operations import AT_REST_S, OK, AdminAnswer, Operations, made, places
from rkserve.router.service import Service


class SleepControl:
    """Sleep, wake, load and unload of models."""

    def __init__(self, service: Service, operations: Operations) -> None:
        self._service = service
        self._operations = operations

    async def sleep(self, asked: ControlRequest) -> AdminAnswer:
        """Put boards to sleep, in vLLM's form."""
        call = parse_sleep(asked)
        outcome = await self._slept(call, asked)
        status = "falling_asleep" if outcome.status == ACCEPTED else "sleeping"
        told = {"status": status, "level": int(call.level), "mode": call.mode.value}
        return made(told, outcome)

    async def wake(self, asked: ControlRequest) -> AdminAnswer:
        """Wake boards, in vLLM's form."""
        call = parse_wake(asked)
        outcome = await self._woken(call, asked)
        status = "awake" if call.whole else "sleeping"
        told = {
            "status": "waking" if outcome.status == ACCEPTED else status,
            "tags": list(call.tags or TAGS),
        }
        return made(told, outcome)

    async def is_sleeping(self, asked: ControlRequest) -> AdminAnswer:
        """Return whether any, all and each of the boards sleep."""
        model = self._operations.one_model(asked)
        await self._operations.look()
        reports = self._service.fleet.reports(model)
        return AdminAnswer(OK, is_sleeping_entry(self._service.cluster.desired, reports, model))

    async def unload(self, asked: ControlRequest) -> AdminAnswer:
        """Unload a model from all of its boards."""
        call = parse_unload(asked)
        outcome = await self._slept(call, asked)
        status = "unloading" if outcome.status == ACCEPTED else "asleep"
        return made({**_model(call), "status": status, "level": int(call.level)}, outcome)

    async def load(self, asked: ControlRequest) -> AdminAnswer:
        """Load a model on all of its boards."""
        call = parse_load(asked)
        outcome = await self._woken(call, asked)
        status = "ready" if outcome.status == OK else "loading"
        return made({**_model(call), "status": status}, outcome)

    async def _slept(self, call: SleepCall, asked: ControlRequest) -> OperationOutcome:
        scope = await self._operations.scope(call.terms, None)
        params = {
            **_places(scope),
            "mode": call.mode.value,
            "level": int(call.level),
            "lease_s": call.lease_s,
            "wakes": call.wakes,
        }
        outcome = await self._operations.perform(OperationKind.SLEEP, params, call.terms, asked)
        if outcome.operation.over and outcome.operation.error is None:
            # The Coordinator's limit is not touched: all boards have stopped.
            await self._service.flows.at_rest(scope, AT_REST_S)
        return outcome

    async def _woken(self, call: WakeCall, asked: ControlRequest) -> OperationOutcome:
        scope = await self._operations.scope(call.terms, None)
        params = {**_places(scope), "tags": list(call.tags)}
        return await self._operations.perform(OperationKind.WAKE, params, call.terms, asked)


def _places(scope: Scope) -> dict[str, object]:
    found = places(scope)
    del found["adapter"]
    return found


def _model(call: SleepCall | WakeCall) -> dict[str, object]:
    return {"id": call.terms.models[0], "object": "model"}
