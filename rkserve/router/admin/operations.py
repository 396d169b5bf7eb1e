"""Operations on the cluster and its sleep, from the API's calls to the Coordinator's and back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from rkserve.api.admin.cluster_status import (
    BoardStatus,
    CoordinatorStatus,
    cluster_entry,
    is_paused_entry,
    is_sleeping_entry,
    weight_info,
)
from rkserve.api.admin.operations import (
    ACCEPTED,
    changed,
    operation_entry,
    operations_list,
    total_of,
)
from rkserve.api.admin.pause import (
    AbortCall,
    CacheResetBody,
    CallOptions,
    LabelBody,
    PauseCall,
    ResetBody,
    ResumeBody,
    parse_abort,
    parse_pause,
    parse_pause_generation,
)
from rkserve.api.admin.query import ControlRequest, ListQuery, ModelQuery
from rkserve.api.admin.sleep import (
    TAGS,
    SleepCall,
    WakeCall,
    parse_load,
    parse_sleep,
    parse_unload,
    parse_wake,
)
from rkserve.control.calls import (
    AbortAction,
    AnyAction,
    CacheResetAction,
    LabelAction,
    OperationRequest,
    PauseAction,
    ResumeAction,
    SleepAction,
    WakeAction,
)
from rkserve.control.operations import OperationOutcome
from rkserve.core.desired_state import Scope
from rkserve.core.errors import AdapterNotFound, BoardNotFound, ModelNotFound, RequestError
from rkserve.router.service import Service

OK = 200
AT_REST_S = 2.0  # for what boards sent before they stopped to reach this Router's clients
LISTED = 100


@dataclass(frozen=True)
class AdminAnswer:
    """The answer of an administrative call: status and body, as text or JSON."""

    status: int
    body: Mapping[str, object] | str
    headers: dict[str, str] = field(default_factory=dict)


class Operations:
    """Operations on the cluster as a whole."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._fleet = service.fleet
        self._cluster = service.cluster

    # -- pause and resume ---------------------------------------------------------------------

    async def pause(self, asked: ControlRequest) -> AdminAnswer:
        """Pause, in vLLM's form."""
        call = parse_pause(asked)
        outcome = await self._paused(call, asked)
        status = "pausing" if outcome.status == ACCEPTED else "paused"
        return made({"status": status, "mode": call.mode.value}, outcome)

    async def pause_generation(self, asked: ControlRequest) -> AdminAnswer:
        """Pause, in SGLang's form."""
        call = parse_pause_generation(asked)
        outcome = await self._paused(call, asked)
        told = {"message": "Generation paused successfully.", "status": "ok"}
        return made({**told, "mode": call.mode.value}, outcome)

    async def resume(self, asked: ControlRequest) -> AdminAnswer:
        """Resume, in vLLM's form."""
        outcome = await self._resumed(asked.read(ResumeBody), asked)
        status = "resuming" if outcome.status == ACCEPTED else "resumed"
        return made({"status": status}, outcome)

    async def continue_generation(self, asked: ControlRequest) -> AdminAnswer:
        """Resume, in SGLang's form."""
        outcome = await self._resumed(asked.read(ResumeBody), asked)
        return made({"message": "Generation continued successfully.", "status": "ok"}, outcome)

    async def is_paused(self, asked: ControlRequest) -> AdminAnswer:
        """Return whether any, all and each of the boards are paused."""
        model = self.one_model(asked)
        await self.look()
        reports = self._fleet.reports(model)
        return AdminAnswer(OK, is_paused_entry(self._cluster.desired, reports, model))

    async def _paused(self, call: PauseCall, asked: ControlRequest) -> OperationOutcome:
        scope = await self.scope(call.terms, call.adapter)
        action = PauseAction(
            models=scope.models,
            boards=scope.boards,
            adapter=scope.adapter,
            mode=call.mode,
            clear_cache=call.clear_cache,
            lease_s=call.lease_s,
        )
        outcome = await self.perform(action, call.terms, asked)
        if outcome.operation.over and outcome.operation.error is None:
            # The Coordinator's limit is not touched: all boards have stopped.
            await self._service.flows.at_rest(scope, AT_REST_S, outcome.emitted)
            if call.clear_cache:
                self._fleet.forget_prompts(scope.covers, files=False)
        return outcome

    async def _resumed(self, call: ResumeBody, asked: ControlRequest) -> OperationOutcome:
        scope = await self.scope(call.terms, call.adapter)
        action = ResumeAction(models=scope.models, boards=scope.boards, adapter=scope.adapter)
        return await self.perform(action, call.terms, asked)

    # -- requests, caches, labels -------------------------------------------------------------

    async def abort(self, asked: ControlRequest) -> AdminAnswer:
        """Abort requests, all or by ID."""
        return await self.end_requests(parse_abort(asked), asked)

    async def end_requests(self, call: AbortCall, asked: ControlRequest) -> AdminAnswer:
        """End requests, as either form asks for it."""
        scope = await self.scope(call.terms, None)
        action = AbortAction(models=scope.models, boards=scope.boards, request_ids=call.request_ids)
        outcome = await self.perform(action, call.terms, asked)
        aborted = total_of(outcome.operation, "aborted")
        return made({"status": "aborted", "aborted": aborted}, outcome)

    async def reset(self, asked: ControlRequest) -> AdminAnswer:
        """Clear KV caches, and forget the cached prefixes."""
        return await self.drop_caches(asked.read(ResetBody), asked)

    async def drop_caches(self, call: CacheResetBody, asked: ControlRequest) -> AdminAnswer:
        """Drop KV caches, as either form asks for it."""
        scope = await self.scope(call.terms, None)
        action = CacheResetAction(
            models=scope.models,
            boards=scope.boards,
            reset_running_requests=call.reset_running_requests,
        )
        outcome = await self.perform(action, call.terms, asked)
        self._fleet.forget_prompts(scope.covers, files=False)
        return made({"success": outcome.status == OK}, outcome)

    async def label(self, asked: ControlRequest) -> AdminAnswer:
        """Set the version label of a model's weights."""
        call = asked.read(LabelBody)
        model = self.one_of(call.terms.models)
        action = LabelAction(model=model, label=call.new_version, reset_step=call.reset_step)
        outcome = await self.perform(action, call.terms, asked)
        return made({"success": True, "new_version": call.new_version, "model": model}, outcome)

    async def weights(self, asked: ControlRequest) -> AdminAnswer:
        """Return the weights in service."""
        model = self.one_model(asked)
        await self.look()
        reports = self._fleet.reports()
        return AdminAnswer(
            OK, weight_info(self._cluster.desired, self._fleet.models, model, reports)
        )

    # -- looking ------------------------------------------------------------------------------

    async def look(self) -> None:
        """Refresh the desired state and the reports.

        The result includes everything that any Router answered to a client before this call. If the
        Coordinator is unreachable, the last desired state stays.
        """
        await asyncio.gather(self._cluster.catch_up(), self._fleet.refresh())

    async def listed(self, asked: ControlRequest) -> AdminAnswer:
        """List the latest operations."""
        return AdminAnswer(OK, operations_list(await self._cluster.operations(_limit(asked))))

    async def one(self, operation_id: str) -> AdminAnswer:
        """Describe one operation."""
        return AdminAnswer(OK, operation_entry(await self._cluster.operation(operation_id[:80])))

    async def audit(self, asked: ControlRequest) -> AdminAnswer:
        """List the latest entries of the audit log."""
        lines = await self._cluster.audit(_limit(asked))
        return AdminAnswer(OK, {"object": "list", "data": lines})

    async def glance(self, _asked: ControlRequest) -> AdminAnswer:
        """Return the totals of the cluster and of each board."""
        await self.look()
        rates = self._fleet.rates()
        boards = [
            BoardStatus(
                report,
                rate.prefill_tokens_per_s if (rate := rates.get(report.board_id)) else 0.0,
                rate.decode_tokens_per_s if rate else 0.0,
                self._service.models.position_bytes(report.model),
            )
            for report in self._fleet.reports()
        ]
        head = CoordinatorStatus(self._cluster.reachable, self._cluster.heard_s_ago)
        return AdminAnswer(
            OK, cluster_entry(self._cluster.desired, self._fleet.models, boards, head)
        )

    # -- what all of them share ---------------------------------------------------------------

    async def perform(
        self,
        action: AnyAction,
        terms: CallOptions,
        asked: ControlRequest,
        *,
        key: str | None = None,
        background: bool | None = None,
    ) -> OperationOutcome:
        """Perform an operation. ``key`` and ``background`` override those of the call."""
        return await self._cluster.perform(
            OperationRequest(
                action,
                who=asked.who,
                key=asked.key if key is None else key,
                timeout_s=terms.timeout_s,
                expected_epoch=terms.epoch,
                background=terms.background if background is None else background,
            )
        )

    def one_of(self, models: tuple[str, ...]) -> str:
        """Return the model of a call: the named, the only one, or the only generating one.

        Raises:
            RequestError: several models are possible.
        """
        self.check_models(models)
        among = models or tuple(self._fleet.models)
        if not models and len(generate := self._service.models.generating) == 1:
            among = generate  # a model for embeddings beside it has no adapters and no steps
        if len(among) > 1:
            names = ", ".join(repr(one) for one in among)
            raise RequestError(f"Say which 'model' it is for: one of {names}.", "model")
        return among[0]

    def check_models(self, models: Iterable[str]) -> None:
        """Raises ``ModelNotFound`` for one that is not served."""
        for model in models:
            if model not in self._fleet.models:
                raise ModelNotFound(model)

    def one_model(self, asked: ControlRequest) -> str | None:
        """Return the model of a query, None for all. Raises ``ModelNotFound``."""
        model = asked.read(ModelQuery).model
        self.check_models([] if model is None else [model])
        return model

    async def scope(self, terms: CallOptions, adapter: str | None) -> Scope:
        """Return the scope of a call. Raises an error for unknown names."""
        self.check_models(terms.models)
        if adapter is not None and not await self._service.models.names.has_adapter(
            adapter, terms.models
        ):
            raise AdapterNotFound(adapter)
        return Scope(terms.models, self._boards(terms), adapter)

    def _boards(self, terms: CallOptions) -> tuple[str, ...]:
        known = [
            report.board_id
            for report in self._fleet.reports()
            if not terms.models or report.model in terms.models
        ]
        for board in terms.boards:
            if board not in known:
                raise BoardNotFound(board[:80], "boards")
        chosen = dict.fromkeys(terms.boards)
        for pattern in terms.selector:
            found = [board for board in known if fnmatchcase(board, pattern)]
            if not found:
                raise BoardNotFound(pattern[:80], "selector")
            chosen |= dict.fromkeys(found)
        return tuple(chosen)


def made(body: Mapping[str, object], outcome: OperationOutcome) -> AdminAnswer:
    """Return the answer of an operation."""
    told = changed(body, outcome.operation, applied=outcome.applied)
    return AdminAnswer(outcome.status, told)


def _limit(asked: ControlRequest) -> int:
    return asked.read(ListQuery).limit or LISTED


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
        # Part of a sleep was ended, now or before; without a sleep there is no part.
        pauses = self._service.cluster.desired.pauses
        partly = outcome.applied or any(pause.level is not None for pause in pauses)
        status = "sleeping" if partly and not call.whole else "awake"
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
        action = SleepAction(
            models=scope.models,
            boards=scope.boards,
            mode=call.mode,
            level=call.level,
            lease_s=call.lease_s,
            wakes=call.wakes,
        )
        outcome = await self._operations.perform(action, call.terms, asked)
        if outcome.operation.over and outcome.operation.error is None:
            # The Coordinator's limit is not touched: all boards have stopped.
            await self._service.flows.at_rest(scope, AT_REST_S)
        return outcome

    async def _woken(self, call: WakeCall, asked: ControlRequest) -> OperationOutcome:
        scope = await self._operations.scope(call.terms, None)
        action = WakeAction(models=scope.models, boards=scope.boards, tags=call.tags)
        return await self._operations.perform(action, call.terms, asked)


def _model(call: SleepCall | WakeCall) -> dict[str, object]:
    return {"id": call.terms.models[0], "object": "model"}
