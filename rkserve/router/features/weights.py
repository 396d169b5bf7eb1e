"""Calls for LoRA adapters, base weights and trainers' weight updates: upload, registration,
loading, and the versions in service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import TypeVar

from rkserve.api.admin.lora import (
    AdapterBody,
    AdapterPushed,
    LoadAdapterBody,
    NamedRolloutBody,
    RegisterBody,
    RolloutBody,
    UnloadAdapterBody,
    UploadBody,
    check_name,
    lines_list,
)
from rkserve.api.admin.operations import OK, REFUSED, changed, envelope, total_of
from rkserve.api.admin.pause import CallOptions, ControlBody
from rkserve.api.admin.query import ControlRequest
from rkserve.api.admin.weights import (
    OWN,
    DiskBody,
    NewWeightsBody,
    UpdateBody,
    check_fits,
    disk_body,
    read_weights,
    taken_entry,
    update_body,
)
from rkserve.api.json.fields import JsonObject
from rkserve.control.calls import (
    AdapterPromoteAction,
    AdapterRetireAction,
    AdapterRollbackAction,
    AdapterStageAction,
    DeclaredArtifact,
    RebaseAction,
    WeightUpdateAction,
)
from rkserve.control.operations import ControlOperation, OperationOutcome, OperationState
from rkserve.core.desired_state import AdapterVersion, Artifact, BaseVersion, Scope
from rkserve.core.errors import (
    AdapterExists,
    AdapterNotFound,
    ArtifactNotFound,
    Forbidden,
    RequestError,
)
from rkserve.router.features.operations import AdminAnswer, Operations, headers_of, made
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
        """List adapters, their versions, and which boards have them."""
        model = self._operations.one_model(asked)
        models = self._service.fleet.models if model is None else [model]
        await self._operations.look()
        desired, reports = self._cluster.desired, self._service.fleet.reports(model)
        versions = [one for line in desired.lines for one in line.versions]
        manifests = await self._cluster.manifests({one.digest for one in versions})
        return AdminAnswer(OK, lines_list(desired, reports, models, manifests))

    # -- new versions -------------------------------------------------------------------------

    async def upload(
        self, asked: ControlRequest, parts: AsyncIterator[bytes], announced: int | None
    ) -> AdminAnswer:
        """Store an uploaded file; ``announced`` is the length given by the client."""
        push = ControlRequest(asked.query).read(UploadBody)
        require_admin(asked, older=push.allow_older)
        model = self._model_for(push)
        claim = push.claim(model, _size(push.size, announced), asked.who)
        version = await self._cluster.upload(
            parts, claim, {"scale": push.scale, "base_model": model}
        )
        assert isinstance(version, AdapterVersion)
        return _answer_of(await self._bring(push, model, version, asked))

    async def register(self, asked: ControlRequest) -> AdminAnswer:
        """Register a file by path or URL."""
        push = asked.read(RegisterBody)
        require_admin(asked, older=push.allow_older)
        return _answer_of(await self._registered(push, self._model_for(push), asked))

    async def load(self, asked: ControlRequest) -> AdminAnswer:
        """Take and serve an adapter, in vLLM's words."""
        call = asked.read(LoadAdapterBody)
        outcome = await self._rolled_before(call.push, asked)
        if outcome is None:
            outcome = await self._loaded(call, asked)
        return _worded(f"Success: LoRA adapter '{call.lora_name}' added successfully.", outcome)

    async def unload(self, asked: ControlRequest) -> AdminAnswer:
        """Serve an adapter no more, in vLLM's words."""
        call = asked.read(UnloadAdapterBody)
        name = call.lora_name
        model = await self._model_of(name, call.terms, asked)
        outcome = await self._retire(model, name, None, call.terms, asked)
        return _worded(f"Success: LoRA adapter '{name}' removed successfully.", outcome)

    async def _rolled_before(
        self, push: RegisterBody, asked: ControlRequest
    ) -> OperationOutcome | None:
        """Return the outcome of an earlier call with the same key, if any."""
        earlier = await self._earlier(asked.key)
        if earlier is None:
            return None
        model = next(iter(push.terms.models), earlier.params.get("model"))
        version = push.version or earlier.params.get("version")
        return await self._roll_out(push, str(model), push.name, str(version), asked)

    async def _loaded(self, call: LoadAdapterBody, asked: ControlRequest) -> OperationOutcome:
        name, model = call.lora_name, self._model_for(call.push)
        # An earlier call that got no further than staging is continued.
        again = call.load_inplace or await self._earlier(_staging_key(asked)) is not None
        if not again and await self._service.models.names.has_adapter(name, (model,)):
            raise AdapterExists(
                f"The lora adapter '{name}' has already been loaded. To load another version "
                "of it, set 'load_inplace' to true.",
                "lora_name",
            )
        return (await self._registered(call.push, model, asked)).last

    async def _registered(self, push: RegisterBody, model: str, asked: ControlRequest) -> _Pushed:
        claim = push.claim(model, who=asked.who)
        version = await self._cluster.register(*push.source, claim, push.scale)
        assert isinstance(version, AdapterVersion)  # so says the claim
        return await self._bring(push, model, version, asked)

    async def _bring(
        self, push: AdapterBody, model: str, version: AdapterVersion, asked: ControlRequest
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
            force=push.force,
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
        rolled = await self._roll_out(push, model, push.name, ref.version, asked)
        return _Pushed(version, model, staged, rolled)

    async def _roll_out(
        self, push: RolloutBody, model: str, name: str, version: str, asked: ControlRequest
    ) -> OperationOutcome:
        # The epoch that the caller expects was that before the staging.
        terms = replace(push.terms, epoch=None)
        return await self._operations.perform(push.rollout(model, name, version), terms, asked)

    # -- known versions -----------------------------------------------------------------------

    async def rollout(self, asked: ControlRequest, name: str) -> AdminAnswer:
        """Roll out a staged version."""
        call = asked.read(NamedRolloutBody)
        model = await self._model_of(name, call.terms, asked)
        action = call.rollout(model, name, call.version)
        outcome = await self._operations.perform(action, call.terms, asked)
        return made({"name": name, "version": call.version, "model": model}, outcome)

    async def rollback(self, asked: ControlRequest, name: str) -> AdminAnswer:
        """Roll back to the previous version."""
        return await self._decide(AdapterRollbackAction, asked, name)

    async def promote(self, asked: ControlRequest, name: str) -> AdminAnswer:
        """Promote the canary to all requests."""
        return await self._decide(AdapterPromoteAction, asked, name)

    async def delete(self, asked: ControlRequest, name: str, version: str | None) -> AdminAnswer:
        """Retire a version, or a whole adapter."""
        terms = asked.read(ControlBody).terms
        if version is not None:
            check_name(version, "version")
        model = await self._model_of(name, terms, asked)
        outcome = await self._retire(model, name, version, terms, asked)
        body = {"name": name, "version": version, "model": model, "deleted": True}
        return made(body, outcome)

    async def _decide(
        self,
        kind: type[AdapterRollbackAction | AdapterPromoteAction],
        asked: ControlRequest,
        name: str,
    ) -> AdminAnswer:
        terms = asked.read(ControlBody).terms
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

    def _model_for(self, push: AdapterBody) -> str:
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
            raise RequestError(f"Several models have an adapter '{name}': give 'model'.", "model")
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


def require_admin(asked: ControlRequest, *, older: bool) -> None:
    """Raise ``Forbidden`` for a lower signed version, unless the caller may do everything."""
    if older and not asked.admin:
        raise Forbidden("'allow_older' needs a key with the scope 'admin'.", "allow_older")


def _size(declared: int | None, announced: int | None) -> int | None:
    """Return the length of an upload. Raises ``RequestError`` for two different ones."""
    if None not in (declared, announced) and declared != announced:
        raise RequestError("'size' is not the length of the body.", "size")
    return announced if declared is None else declared


def _answer_of(pushed: _Pushed) -> AdminAnswer:
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


A = TypeVar("A", RebaseAction, WeightUpdateAction)


class WeightsControl:
    """The weights of the cluster's models."""

    def __init__(self, service: Service, operations: Operations) -> None:
        self._service = service
        self._cluster = service.cluster
        self._operations = operations

    # -- a trainer's updates ------------------------------------------------------------------

    async def receive(self, asked: ControlRequest) -> AdminAnswer:
        """Serve a trainer's weights everywhere, from one instant on.

        Raises:
            ArtifactRefused, ArtifactNotFound: the artifact does not match the call.
            StaleWeights, OperationConflict: the update is too old, or another operation is running.
        """
        update = asked.read(UpdateBody)
        model = self._model_of(update)
        action = WeightUpdateAction(
            model=model,
            step=update.version,
            in_flight=update.in_flight,
            **await self._meant(update, model, asked),
        )
        outcome = await self._operations.perform(action, update.terms, asked)
        if action.name is None:
            self._forget_prompts(model)
        return made(update_body(outcome.operation), outcome)

    async def _meant(self, update: UpdateBody, model: str, asked: ControlRequest) -> JsonObject:
        """Return the parameters that name the artifact, after checking it."""
        earlier = await self._earlier(asked, WeightUpdateAction)
        name, _, version = update.weights.rpartition("@")
        if name != model:
            if earlier is None:
                found = await self._cluster.find_weights(model, update.weights)
                check_fits(update, found.version, found.parameters)
            return {"name": name, "version": version}
        if earlier is not None:
            return {"version": version, **_content(earlier)}
        found = await self._cluster.find_weights(model, update.weights)
        check_fits(update, found.version, found.parameters)
        base = found.version
        return {"version": version, "digest": base.digest, "size_bytes": base.size_bytes}

    def _model_of(self, update: UpdateBody) -> str:
        """Return the model of a call: named, or the one with such an adapter."""
        name = update.weights.rpartition("@")[0]
        served = self._service.fleet.models
        if not update.terms.models:
            if name in served:
                return name
            lines = self._cluster.desired.lines
            having = {line.model for line in lines if line.name == name and line.model in served}
            if len(having) == 1:
                return having.pop()
        return self._operations.one_of(update.terms.models)

    # -- from the head's disk -----------------------------------------------------------------

    async def from_disk(self, asked: ControlRequest) -> AdminAnswer:
        """Load other base weights, board by board."""
        update = asked.read(DiskBody)
        model = self._operations.one_of(update.terms.models)
        action = RebaseAction(
            model=model,
            model_path=update.model_path,
            label=update.weight_version,
            in_flight=update.handling,
            max_unavailable=update.max_unavailable,
            **await self._base(update, model, asked),
        )
        outcome = await self._operations.perform(action, update.terms, asked)
        self._forget_prompts(model)
        return _in_sglangs_words(outcome)

    async def _base(self, update: DiskBody, model: str, asked: ControlRequest) -> JsonObject:
        """Return the parameters that name the base weights; empty for the folder's file."""
        earlier = await self._earlier(asked, RebaseAction)
        if earlier is not None:
            return _content(earlier)
        base = await self._found(update.model_path, model, asked.who)
        if base is None:
            return {"digest": None, "size_bytes": None}
        return {"digest": base.digest, "size_bytes": base.size_bytes}

    async def _found(self, place: str, model: str, who: str) -> BaseVersion | None:
        if place == OWN:
            return None
        if "/" in place:
            claim = DeclaredArtifact(model, None, model, base=True, who=who)
            return _base(await self._cluster.register("path", place, claim))
        if place.rpartition("@")[0] != model:
            raise ArtifactNotFound(
                f"'{place[:80]}' is neither an absolute path of the head node, nor '{OWN}', nor "
                f"'{model}@<version>'.",
                "model_path",
            )
        found = (await self._cluster.find_weights(model, place)).version
        assert isinstance(found, BaseVersion)  # of a model's own name there is nothing else
        return found

    # -- to the head's store ------------------------------------------------------------------

    async def register(self, asked: ControlRequest) -> AdminAnswer:
        """Register base weights by path or URL."""
        new = read_weights(asked, from_body=False)
        require_admin(asked, older=new.allow_older)
        model = self._operations.one_of(new.terms.models)
        base = await self._cluster.register(*new.source, new.claim(model, new.size, asked.who))
        return _taken(new, model, _base(base))

    async def upload(
        self, asked: ControlRequest, parts: AsyncIterator[bytes], announced: int | None
    ) -> AdminAnswer:
        """Store uploaded base weights; ``announced`` is the length given by the client."""
        new = read_weights(asked, from_body=True)
        require_admin(asked, older=new.allow_older)
        model = self._operations.one_of(new.terms.models)
        claim = new.claim(model, _size(new.size, announced), asked.who)
        base = await self._cluster.upload(parts, claim, {"base_model": model})
        return _taken(new, model, _base(base))

    # -- what all of them share ---------------------------------------------------------------

    async def _earlier(self, asked: ControlRequest, kind: type[A]) -> A | None:
        """Return the action of an earlier call with the same key, if any.

        Its file is not read again, and may be gone.
        """
        if asked.key is None:
            return None
        found = await self._cluster.operation_by_key(asked.key)
        return found.action if found is not None and isinstance(found.action, kind) else None

    def _forget_prompts(self, model: str) -> None:
        """Forget cached prefixes, which other weights invalidate."""
        self._service.fleet.forget_prompts(Scope(models=(model,)).covers)


def _content(earlier: RebaseAction | WeightUpdateAction) -> JsonObject:
    return {"digest": earlier.digest, "size_bytes": earlier.size_bytes}


def _base(found: Artifact | None) -> BaseVersion | None:
    assert found is None or isinstance(found, BaseVersion)  # so says the claim
    return found


def _taken(new: NewWeightsBody, model: str, base: BaseVersion | None) -> AdminAnswer:
    return AdminAnswer(OK, taken_entry(model, base, len(new.parameters)))


def _in_sglangs_words(outcome: OperationOutcome) -> AdminAnswer:
    """Return SGLang's body also for failures, because its clients read ``success``."""
    operation = outcome.operation
    body = disk_body(operation, outcome.status, total_of(operation, "stopped"))
    record = changed({}, operation, applied=outcome.applied)
    return AdminAnswer(outcome.status, {**body, **record}, headers_of(outcome))
