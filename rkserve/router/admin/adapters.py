"""Calls for LoRA adapters: uploads to the Coordinator, and the versions in service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from rkserve.api.admin.lora import (
    AdapterPushed,
    LoadAdapterCall,
    NewAdapter,
    check_name,
    lines_list,
    parse_load,
    parse_named,
    parse_register,
    parse_rollout,
    parse_unload,
    parse_upload,
)
from rkserve.api.admin.operations import REFUSED, envelope
from rkserve.api.admin.pause import CallOptions
from rkserve.api.admin.query import ControlRequest
from rkserve.control.calls import (
    AdapterPromoteAction,
    AdapterRetireAction,
    AdapterRollbackAction,
    AdapterRolloutAction,
    AdapterStageAction,
    DeclaredArtifact,
)
from rkserve.control.operations import ControlOperation, OperationOutcome, OperationState
from rkserve.core.desired_state import AdapterVersion
from rkserve.core.errors import AdapterExists, AdapterNotFound, RequestError
from rkserve.router.admin.operations import OK, AdminAnswer, Operations, made
from rkserve.router.service import Service


@dataclass(frozen=True)
class _Pushed:
    """The outcome of a new version: staged everywhere, and then rolled out if requested."""

    version: AdapterVersion
    model: str
    staged: OperationOutcome
    rolled: OperationOutcome | None

    @property
    def last(self) -> OperationOutcome:
        """The outcome to answer with."""
        return self.rolled or self.staged


class Adapters:
    """The adapters of the cluster."""

    def __init__(self, service: Service, operations: Operations) -> None:
        self._service = service
        self._cluster = service.cluster
        self._operations = operations

    async def listed(self, asked: ControlRequest) -> AdminAnswer:
        """Return every version of every line, with its boards."""
        model = self._operations.one_model(asked)
        models = self._service.fleet.models if model is None else [model]
        await self._operations.look()
        desired = self._cluster.desired
        return AdminAnswer(OK, lines_list(desired, self._service.fleet.reports(model), models))

    # -- new versions -------------------------------------------------------------------------

    async def upload(
        self, asked: ControlRequest, parts: AsyncIterator[bytes], announced: int | None
    ) -> AdminAnswer:
        """Store an uploaded file; ``announced`` is the length given by the client."""
        push = parse_upload(asked)
        model = self._model_for(push)
        if None not in (push.size, announced) and push.size != announced:
            raise RequestError("'size' is not the length of the body.", "size")
        size = announced if push.size is None else push.size
        version = await self._cluster.upload(
            parts,
            _claim(push, model, size),
            {"scale": push.scale, "base_model": model},
        )
        assert isinstance(version, AdapterVersion)
        return _told(await self._bring(push, model, version, asked))

    async def register(self, asked: ControlRequest) -> AdminAnswer:
        """Register a file by path or URL."""
        push = parse_register(asked)
        return _told(await self._registered(push, self._model_for(push), asked))

    async def load(self, asked: ControlRequest) -> AdminAnswer:
        """Register and serve a file, in vLLM's form."""
        call = parse_load(asked)
        outcome = await self._rolled_before(call.push, asked)
        if outcome is None:
            outcome = await self._loaded(call, asked)
        return _worded(f"Success: LoRA adapter '{call.push.name}' added successfully.", outcome)

    async def unload(self, asked: ControlRequest) -> AdminAnswer:
        """Retire an adapter, in vLLM's form."""
        terms, name = parse_unload(asked)
        model = await self._model_of(name, terms, asked)
        outcome = await self._retire(model, name, None, terms, asked)
        return _worded(f"Success: LoRA adapter '{name}' removed successfully.", outcome)

    async def _rolled_before(
        self, push: NewAdapter, asked: ControlRequest
    ) -> OperationOutcome | None:
        """Return the outcome of an earlier call with the same key, if any."""
        earlier = await self._earlier(asked.key)
        if earlier is None:
            return None
        model = next(iter(push.terms.models), earlier.params.get("model"))
        version = push.version or earlier.params.get("version")
        return await self._roll_out(push, str(model), str(version), asked)

    async def _loaded(self, call: LoadAdapterCall, asked: ControlRequest) -> OperationOutcome:
        name, model = call.push.name, self._model_for(call.push)
        # An earlier call that got no further than staging is continued.
        again = call.again or await self._earlier(_staging_key(asked)) is not None
        if not again and await self._service.models.names.has_adapter(name, (model,)):
            raise AdapterExists(
                f"The lora adapter '{name}' has already been loaded. To load another version "
                "of it, set 'load_inplace' to true.",
                "lora_name",
            )
        return (await self._registered(call.push, model, asked)).last

    async def _registered(self, push: NewAdapter, model: str, asked: ControlRequest) -> _Pushed:
        kind, place = ("url", push.url) if push.path is None else ("path", push.path)
        assert place is not None  # one of the two is there
        version = await self._cluster.register(kind, place, _claim(push, model), push.scale)
        return await self._bring(push, model, version, asked)

    async def _bring(
        self, push: NewAdapter, model: str, version: AdapterVersion, asked: ControlRequest
    ) -> _Pushed:
        """Stage a version on every board, and roll it out."""
        ref = version.ref
        action = AdapterStageAction(
            model=model,
            name=ref.name,
            version=ref.version,
            digest=ref.digest,
            scale=ref.scale,
            size_bytes=version.size_bytes,
        )
        alone = not push.activate
        staged = await self._operations.perform(
            action,
            push.terms,
            asked,
            key=asked.key if alone else _staging_key(asked),
            background=push.terms.background and alone,
        )
        if alone or staged.operation.state is not OperationState.SUCCEEDED:
            return _Pushed(version, model, staged, None)
        rolled = await self._roll_out(push, model, ref.version, asked)
        return _Pushed(version, model, staged, rolled)

    async def _roll_out(
        self, push: NewAdapter, model: str, version: str, asked: ControlRequest
    ) -> OperationOutcome:
        action = AdapterRolloutAction(
            model=model, name=push.name, version=version, **push.rollout.params()
        )
        # The epoch that the caller expects was that before the staging.
        terms = replace(push.terms, epoch=None)
        return await self._operations.perform(action, terms, asked)

    # -- known versions -----------------------------------------------------------------------

    async def rollout(self, asked: ControlRequest, name: str) -> AdminAnswer:
        """Roll out a staged version."""
        terms, version, rollout = parse_rollout(asked)
        model = await self._model_of(name, terms, asked)
        action = AdapterRolloutAction(model=model, name=name, version=version, **rollout.params())
        outcome = await self._operations.perform(action, terms, asked)
        return made({"name": name, "version": version, "model": model}, outcome)

    async def rollback(self, asked: ControlRequest, name: str) -> AdminAnswer:
        """Roll back to the previous version."""
        return await self._decide(AdapterRollbackAction, asked, name)

    async def promote(self, asked: ControlRequest, name: str) -> AdminAnswer:
        """Promote the canary to all requests."""
        return await self._decide(AdapterPromoteAction, asked, name)

    async def delete(self, asked: ControlRequest, name: str, version: str | None) -> AdminAnswer:
        """Retire a version, or a whole adapter."""
        terms = parse_named(asked)
        if version is not None:
            check_name(version, "version")
        model = await self._model_of(name, terms, asked)
        outcome = await self._retire(model, name, version, terms, asked)
        told = {"name": name, "version": version, "model": model, "deleted": True}
        return made(told, outcome)

    async def _decide(
        self,
        kind: type[AdapterRollbackAction | AdapterPromoteAction],
        asked: ControlRequest,
        name: str,
    ) -> AdminAnswer:
        terms = parse_named(asked)
        model = await self._model_of(name, terms, asked)
        outcome = await self._operations.perform(kind(model=model, name=name), terms, asked)
        line = self._cluster.desired.line(model, name)
        active = None if line is None or line.active is None else line.active.ref.version
        return made({"name": name, "model": model, "version": active}, outcome)

    async def _retire(
        self, model: str, name: str, version: str | None, terms: CallOptions, asked: ControlRequest
    ) -> OperationOutcome:
        action = AdapterRetireAction(model=model, name=name, version=version)
        return await self._operations.perform(action, terms, asked)

    # -- names --------------------------------------------------------------------------------

    def _model_for(self, push: NewAdapter) -> str:
        """Return the model of a new version. Raises ``RequestError``."""
        if push.name in self._service.fleet.models:
            raise AdapterExists(f"'{push.name}' is the name of a model.", "name")
        known = self._models_of(push.name)
        if not push.terms.models and len(known) == 1:
            return known[0]
        return self._operations.one_of(push.terms.models)

    async def _model_of(self, name: str, terms: CallOptions, asked: ControlRequest) -> str:
        """Return the model of a line. Raises ``AdapterNotFound``, ``RequestError``."""
        check_name(name, "name")
        self._operations.check_models(terms.models)
        earlier = await self._earlier(asked.key)
        had = None if earlier is None else earlier.params.get("model")
        if isinstance(had, str) and had in (terms.models or (had,)):
            return had  # the earlier call may itself have removed the line
        known = [one for one in self._models_of(name) if one in (terms.models or (one,))]
        if not known:
            raise AdapterNotFound(name)
        if len(known) > 1:
            raise RequestError(
                f"Several models have an adapter '{name}': say which 'model'.", "model"
            )
        return known[0]

    async def _earlier(self, key: str | None) -> ControlOperation | None:
        """Return the operation of an earlier call with the same idempotency key, if any."""
        return None if key is None else await self._cluster.operation_by_key(key)

    def _models_of(self, name: str) -> list[str]:
        served = self._service.fleet.models
        lines = self._cluster.desired.lines
        return [line.model for line in lines if line.name == name and line.model in served]


def _staging_key(asked: ControlRequest) -> str | None:
    """Return the key of the staging operation, so that a repeated call finds both operations."""
    return None if asked.key is None else f"{asked.key}:stage"


def _claim(push: NewAdapter, model: str, size: int | None = None) -> DeclaredArtifact:
    return DeclaredArtifact(
        push.name,
        push.version,
        model,
        size,
        push.sha256,
        parameters=push.parameters,
        base_digest=push.base_digest,
    )


def _told(pushed: _Pushed) -> AdminAnswer:
    ref = pushed.version.ref
    body: AdapterPushed = {
        "name": ref.name,
        "version": ref.version,
        "model": pushed.model,
        "label": ref.label,
        "sha256": ref.digest,
        "bytes": pushed.version.size_bytes,
        "scale": ref.scale,
        "activated": pushed.rolled is not None and pushed.rolled.status == OK,
    }
    if pushed.rolled is not None:
        staged = pushed.staged
        body["staging"] = envelope(staged.operation, applied=staged.applied)
    return made(body, pushed.last)


def _worded(text: str, outcome: OperationOutcome) -> AdminAnswer:
    """Return vLLM's text on success, else the operation."""
    if outcome.status != OK:
        return made({"message": text if outcome.status < REFUSED else ""}, outcome)
    operation = outcome.operation
    return AdminAnswer(OK, text, {"x-operation-id": operation.id, "x-epoch": str(operation.epoch)})
