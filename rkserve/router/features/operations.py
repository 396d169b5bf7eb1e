"""Operations on the cluster, from the API's calls to the Coordinator's and back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from http import HTTPStatus

from rkserve.api.admin.cluster_status import (
    BoardStatus,
    CoordinatorEntry,
    cluster_entry,
    is_paused_entry,
    is_sleeping_entry,
    weight_info,
)
from rkserve.api.admin.operations import OK, changed, operation_entry, operations_list
from rkserve.api.admin.pause import CallOptions, OperationBody
from rkserve.api.admin.query import ControlRequest, ListQuery, ModelQuery
from rkserve.control.calls import (
    AbortAction,
    AnyAction,
    CacheResetAction,
    ModelAction,
    OperationRequest,
    PauseAction,
    ResumeAction,
    ScopedAction,
    SleepAction,
    WakeAction,
)
from rkserve.control.operations import OperationOutcome
from rkserve.core.desired_state import PauseMode, Scope
from rkserve.core.errors import (
    AdapterNotFound,
    BoardNotFound,
    ModelNotFound,
    RequestError,
    UpstreamUnable,
)
from rkserve.router.service import Service

AT_REST_S = 2.0  # for what boards sent before they stopped to reach this Router's clients
LISTED = 100
RETRY_AFTER_S = 3  # for a change that a board has failed: the board is replaced, or back in seconds


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

    # -- changes ------------------------------------------------------------------------------

    async def change(self, body: type[OperationBody], asked: ControlRequest) -> AdminAnswer:
        """Make the change that the parameters ``body`` ask for."""
        return await self.carry_out(asked.read(body), asked)

    async def carry_out(self, call: OperationBody, asked: ControlRequest) -> AdminAnswer:
        """Make a change whose parameters have been read."""
        return await self.within(await self.scope(call), call, asked)

    async def within(self, scope: Scope, call: OperationBody, asked: ControlRequest) -> AdminAnswer:
        """Make a change of a part of the cluster that is known already."""
        action = call.action(scope)
        outcome = await self.perform(action, call.terms, asked)
        await self._after(action, scope, outcome)
        answer = made(call.reply(outcome, self._cluster.desired), outcome)
        if isinstance(answer.body, str) or "error" in answer.body:
            return answer
        effects = {name: effect(action) for name in self._upstreams_in(scope)}
        return replace(answer, body={**answer.body, "upstreams": effects}) if effects else answer

    def _upstreams_in(self, scope: Scope) -> list[str]:
        if scope.adapter is not None:
            return []
        reports = (one for one in self._fleet.reports() if one.is_upstream)
        return [one.board_id for one in reports if scope.covers(one.board_id, one.model)]

    def _check_upstreams(self, action: AnyAction) -> None:
        """Raise ``UpstreamUnable`` for an action that is for upstreams by name, or by their model.

        The Coordinator knows boards only.
        """
        models = action.models if isinstance(action, ScopedAction) else ()
        if isinstance(action, ModelAction):
            models = (action.model,)
        boards = action.boards if isinstance(action, ScopedAction) else ()
        alone = self._service.upstreams.alone
        for one in (one for one in self._fleet.reports() if one.is_upstream):
            if one.board_id in boards or (one.model in models and one.model in alone):
                raise UpstreamUnable(one.board_id, action.kind.value)

    async def _after(self, action: AnyAction, scope: Scope, outcome: OperationOutcome) -> None:
        """Wait for what stopped boards have sent; forget cached prefixes that they have dropped."""
        if isinstance(action, CacheResetAction):
            self._fleet.forget_prompts(scope.covers, files=False)
        if not isinstance(action, PauseAction | SleepAction):
            return
        if outcome.operation.over and outcome.operation.error is None:
            # The Coordinator's limit is not touched: all boards have stopped.
            await self._service.flows.at_rest(scope, AT_REST_S, outcome.emitted)
            if isinstance(action, PauseAction) and action.clear_cache:
                self._fleet.forget_prompts(scope.covers, files=False)

    # -- looking ------------------------------------------------------------------------------

    async def is_paused(self, asked: ControlRequest) -> AdminAnswer:
        """Say whether boards are paused."""
        model = self.one_model(asked)
        await self.look()
        reports = self._fleet.reports(model)
        return AdminAnswer(OK, is_paused_entry(self._cluster.desired, reports, model))

    async def is_sleeping(self, asked: ControlRequest) -> AdminAnswer:
        """Say whether boards sleep."""
        model = self.one_model(asked)
        await self.look()
        reports = self._fleet.reports(model)
        return AdminAnswer(OK, is_sleeping_entry(self._cluster.desired, reports, model))

    async def weights(self, asked: ControlRequest) -> AdminAnswer:
        """Say which weights are served."""
        model = self.one_model(asked)
        await self.look()
        reports = self._fleet.reports()
        return AdminAnswer(
            OK, weight_info(self._cluster.desired, self._fleet.models, model, reports)
        )

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
        """Show totals of the cluster, and every board."""
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
        head = CoordinatorEntry(
            reachable=self._cluster.reachable, heard_s_ago=self._cluster.heard_s_ago
        )
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
        self._check_upstreams(action)
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

    async def scope(self, call: OperationBody) -> Scope:
        """Return the scope of a call. Raises an error for unknown names."""
        terms = call.terms
        if call.one_model:
            return Scope((self.one_of(terms.models),))
        self.check_models(terms.models)
        if terms.adapter is not None and not await self._service.models.names.has_adapter(
            terms.adapter, terms.models
        ):
            raise AdapterNotFound(terms.adapter)
        return Scope(terms.models, self._boards(terms), terms.adapter)

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


def effect(action: AnyAction) -> str:
    """Return the effect on an upstream of an action on the cluster, for its answer."""
    if isinstance(action, PauseAction | SleepAction):
        ends = action.mode is PauseMode.ABORT
        rest = "those that ran are aborted" if ends else "those that run go on"
        return f"takes no new requests; {rest}"
    if isinstance(action, ResumeAction | WakeAction):
        return "takes requests, unless another pause holds it"
    return "aborted" if isinstance(action, AbortAction) else "unchanged: this is for boards"


def made(body: Mapping[str, object], outcome: OperationOutcome) -> AdminAnswer:
    """Return the answer of an operation."""
    whole = changed(body, outcome.operation, applied=outcome.applied)
    return AdminAnswer(outcome.status, whole, headers_of(outcome))


def headers_of(outcome: OperationOutcome) -> dict[str, str]:
    """Return the time after which a failure by a board's fault is worth another call."""
    again = outcome.status == HTTPStatus.SERVICE_UNAVAILABLE
    return {"retry-after": str(RETRY_AFTER_S)} if again else {}


def _limit(asked: ControlRequest) -> int:
    return asked.read(ListQuery).limit or LISTED
