"""Weight updates by trainers, and base weights: upload, registration and loading."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TypeVar

from rkserve.api.admin.operations import changed, total_of
from rkserve.api.admin.query import ControlRequest
from rkserve.api.admin.weights import (
    OWN,
    DiskUpdate,
    NewWeights,
    WeightUpdate,
    check_fits,
    disk_body,
    parse_disk,
    parse_update,
    parse_weights,
    taken_entry,
    update_body,
)
from rkserve.api.json.body import JsonObject
from rkserve.control.calls import DeclaredArtifact, RebaseAction, WeightUpdateAction
from rkserve.control.operations import OperationOutcome
from rkserve.core.desired_state import BaseVersion, Scope
from rkserve.core.errors import ArtifactNotFound, RequestError
from rkserve.router.admin.operations import OK, AdminAnswer, Operations, made
from rkserve.router.service import Service

A = TypeVar("A", RebaseAction, WeightUpdateAction)


class WeightsControl:
    """The weights of the cluster's models."""

    def __init__(self, service: Service, operations: Operations) -> None:
        self._service = service
        self._cluster = service.cluster
        self._operations = operations

    # -- a trainer's updates ------------------------------------------------------------------

    async def receive(self, asked: ControlRequest) -> AdminAnswer:
        """Switch all boards to a trainer's weights at one instant, in PipelineRL's form.

        Raises:
            ArtifactRefused, ArtifactNotFound: the artifact does not match the call.
            StaleWeights, OperationConflict: the update is too old, or another operation is running.
        """
        update = parse_update(asked)
        model = self._model_of(update)
        action = WeightUpdateAction(
            model=model,
            step=update.step,
            in_flight=update.in_flight,
            **await self._meant(update, model, asked),
        )
        outcome = await self._operations.perform(action, update.terms, asked)
        if action.name is None:
            self._forget_prompts(model)
        return made(update_body(outcome.operation), outcome)

    async def _meant(self, update: WeightUpdate, model: str, asked: ControlRequest) -> JsonObject:
        """Return the parameters that name the artifact, after checking it."""
        earlier = await self._earlier(asked, WeightUpdateAction)
        name, _, version = update.artifact.rpartition("@")
        if name != model:
            if earlier is None:
                found = await self._cluster.find_weights(model, update.artifact)
                check_fits(update, found.version, found.parameters)
            return {"name": name, "version": version}
        if earlier is not None:
            return {"version": version, **_content(earlier)}
        found = await self._cluster.find_weights(model, update.artifact)
        check_fits(update, found.version, found.parameters)
        base = found.version
        return {"version": version, "digest": base.digest, "size_bytes": base.size_bytes}

    def _model_of(self, update: WeightUpdate) -> str:
        """Return the model of a call: named, or the one with such an adapter."""
        name = update.artifact.rpartition("@")[0]
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
        """Load other base weights board by board, in SGLang's form."""
        update = parse_disk(asked)
        model = self._operations.one_of(update.terms.models)
        action = RebaseAction(
            model=model,
            model_path=update.place,
            label=update.label,
            in_flight=update.in_flight,
            max_unavailable=update.max_unavailable,
            **await self._base(update, model, asked),
        )
        outcome = await self._operations.perform(action, update.terms, asked)
        self._forget_prompts(model)
        return _in_sglangs_words(outcome)

    async def _base(self, update: DiskUpdate, model: str, asked: ControlRequest) -> JsonObject:
        """Return the parameters that name the base weights; empty for the folder's file."""
        earlier = await self._earlier(asked, RebaseAction)
        if earlier is not None:
            return _content(earlier)
        base = await self._found(update.place, model)
        if base is None:
            return {"digest": None, "size_bytes": None}
        return {"digest": base.digest, "size_bytes": base.size_bytes}

    async def _found(self, place: str, model: str) -> BaseVersion | None:
        if place == OWN:
            return None
        if "/" in place:
            claim = DeclaredArtifact(model, None, model, base=True)
            return await self._cluster.register_model("path", place, claim)
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
        new = parse_weights(asked, from_body=False)
        kind, place = ("url", new.url) if new.path is None else ("path", new.path)
        assert place is not None  # one of the two is there
        model = self._operations.one_of(new.terms.models)
        return _taken(
            new, model, await self._cluster.register_model(kind, place, _claim(new, model))
        )

    async def upload(
        self, asked: ControlRequest, parts: AsyncIterator[bytes], announced: int | None
    ) -> AdminAnswer:
        """Store uploaded base weights; ``announced`` is the length given by the client."""
        new = parse_weights(asked, from_body=True)
        model = self._operations.one_of(new.terms.models)
        if None not in (new.size, announced) and new.size != announced:
            raise RequestError("'size' is not the length of the body.", "size")
        size = announced if new.size is None else new.size
        claim = replace(_claim(new, model), size_bytes=size)
        base = await self._cluster.upload(parts, claim, {"base_model": model})
        assert isinstance(base, BaseVersion)  # so says the claim
        return _taken(new, model, base)

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


def _claim(new: NewWeights, model: str) -> DeclaredArtifact:
    return DeclaredArtifact(
        model, new.version, model, new.size, new.sha256, base=True, parameters=new.parameters
    )


def _taken(new: NewWeights, model: str, base: BaseVersion | None) -> AdminAnswer:
    return AdminAnswer(OK, taken_entry(model, base, len(new.parameters)))


def _in_sglangs_words(outcome: OperationOutcome) -> AdminAnswer:
    """Return SGLang's body also for failures, because its clients read ``success``."""
    operation = outcome.operation
    body = disk_body(operation, outcome.status, total_of(operation, "stopped"))
    told = changed({}, operation, applied=outcome.applied)
    return AdminAnswer(outcome.status, {**body, **told})
