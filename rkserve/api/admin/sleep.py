"""Calls that put boards to sleep and wake them, and that unload and load models; see ``pause``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from rkserve.api.admin.operations import ACCEPTED, OK
from rkserve.api.admin.pause import (
    LEASE_MEANS,
    MODE_MEANS,
    BoardsBody,
    ControlCall,
    Lease,
    Mode,
    ModeName,
    OperationBody,
    StatusDone,
    names_of,
)
from rkserve.api.admin.query import ParameterKind
from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import Count, Example
from rkserve.control.calls import KV_CACHE, WEIGHTS, AnyAction, SleepAction, WakeAction
from rkserve.control.operations import OperationOutcome
from rkserve.core.desired_state import Desired, PauseMode, Scope, SleepLevel
from rkserve.core.errors import RequestError, UnsupportedParameter

TAGS = (WEIGHTS, KV_CACHE)
_TAG: JsonObject = {"type": "string", "enum": list(TAGS)}


def _tags(value: object) -> tuple[str, ...]:
    tags = names_of(value, "tags")
    for tag in tags:
        if tag not in TAGS:
            raise RequestError(
                f"Invalid 'tags': expected some of {', '.join(TAGS)}, got '{tag[:40]}'.", "tags"
            )
    return tags


Tags = Annotated[
    tuple[str, ...],
    BeforeValidator(_tags),
    WithJsonSchema({"anyOf": [_TAG, {"type": "array", "items": _TAG}]}),
    ParameterKind.TEXTS,
]
Level = Annotated[int, Field(ge=SleepLevel.PAUSED, le=SleepLevel.DROPPED)]
UnloadLevel = Annotated[int, Field(ge=SleepLevel.UNLOADED, le=SleepLevel.DROPPED)]
WAKE_MEANS = "Whether the next request ends the sleep."


class SleepBody(BoardsBody):
    """POST /sleep in vLLM's form: level 1, and running requests are aborted, by default."""

    level: Level = Field(
        int(SleepLevel.UNLOADED),
        description="0 keeps the model loaded, 1 unloads it, 2 drops KV caches too.",
    )
    mode: Mode = Field(PauseMode.ABORT, description=MODE_MEANS)
    lease_s: Lease | None = Field(None, description=LEASE_MEANS)
    wake_on_request: bool = Field(False, description=WAKE_MEANS)
    tags: Tags = Field((), description="vLLM's.")

    @model_validator(mode="after")
    def _check_tags(self) -> SleepBody:
        if self.tags and WEIGHTS not in self.tags:
            raise UnsupportedParameter(
                "Unsupported parameter: 'tags' without 'weights'. A board's KV cache is a part of "
                "its loaded model; POST /reset_prefix_cache drops what is in it.",
                "tags",
            )
        return self

    def action(self, scope: Scope) -> AnyAction:
        level = SleepLevel(self.level)
        return _sleep(scope, self.mode, level, self.lease_s, wakes=self.wake_on_request)

    def reply(self, outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        status = "falling_asleep" if outcome.status == ACCEPTED else "sleeping"
        return {"status": status, "level": self.level, "mode": self.mode.value}


class WakeBody(BoardsBody):
    """POST /wake_up: of a model the ``tags``, all without them."""

    tags: Tags = Field((), description="vLLM's.")

    def action(self, scope: Scope) -> AnyAction:
        return WakeAction(models=scope.models, boards=scope.boards, tags=self.tags)

    def reply(self, outcome: OperationOutcome, desired: Desired) -> Mapping[str, object]:
        # Part of a sleep was ended, now or before; without a sleep there is no part.
        partly = outcome.applied or any(pause.level is not None for pause in desired.pauses)
        held = partly and frozenset(self.tags) == {WEIGHTS}
        status = "waking" if outcome.status == ACCEPTED else "sleeping" if held else "awake"
        return {"status": status, "tags": list(self.tags or TAGS)}


class LoadBody(OperationBody):
    """POST /v1/models/load, for one model."""

    @classmethod
    def needed(cls) -> tuple[str, ...]:
        """See ``RequestModel``."""
        return ("model",)

    @model_validator(mode="after")
    def _check_model(self) -> LoadBody:
        if len(self.terms.models) != 1:
            raise RequestError("Say which model: 'model' names one.", "model")
        return self

    def action(self, scope: Scope) -> AnyAction:
        return WakeAction(models=scope.models, boards=scope.boards, tags=())

    def reply(self, outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        status = "ready" if outcome.status == OK else "loading"
        return {"id": self.terms.models[0], "object": "model", "status": status}


class UnloadBody(LoadBody):
    """POST /v1/models/unload: running requests are finished by default."""

    level: UnloadLevel = Field(
        int(SleepLevel.UNLOADED), description="1 unloads the model, 2 drops KV caches too."
    )
    mode: Mode = Field(PauseMode.WAIT, description=MODE_MEANS)
    lease_s: Lease | None = Field(None, description=LEASE_MEANS)
    wake_on_request: bool | None = Field(None, description=WAKE_MEANS)

    def action(self, scope: Scope) -> AnyAction:
        level = SleepLevel(self.level)
        return _sleep(scope, self.mode, level, self.lease_s, wakes=self.wake_on_request)

    def reply(self, outcome: OperationOutcome, desired: Desired) -> Mapping[str, object]:
        status = "unloading" if outcome.status == ACCEPTED else "asleep"
        return {**super().reply(outcome, desired), "status": status, "level": self.level}


def _sleep(
    scope: Scope, mode: PauseMode, level: SleepLevel, lease_s: float | None, *, wakes: bool | None
) -> SleepAction:
    return SleepAction(
        models=scope.models,
        boards=scope.boards,
        mode=mode,
        level=level,
        lease_s=lease_s,
        wakes=wakes,
    )


class SleepDone(StatusDone):
    """A sleep."""

    level: Count
    mode: ModeName


class WakeDone(StatusDone):
    """The end of a sleep."""

    tags: list[str]


class ModelLoadDone(StatusDone):
    """A model that is loaded on all of its boards."""

    id: str
    object: Literal["model"]


class ModelUnloadDone(ModelLoadDone):
    """A model that is unloaded from all of its boards."""

    level: Count


_ONE = Example({"model": "sim-chat"})
_BOTH_TAGS = Example({"tags": [WEIGHTS, KV_CACHE]})
CALLS = (
    ControlCall(
        "/sleep",
        SleepBody,
        SleepDone,
        "Put boards to sleep, and answer when their models are unloaded.",
        Example(query={"level": "1", "mode": "wait"}),
    ),
    ControlCall(
        "/wake_up", WakeBody, WakeDone, "Wake boards, and answer when their models are loaded."
    ),
    ControlCall("/wakeup", WakeBody, WakeDone, "Wake boards, in Ray's words."),
    ControlCall(
        "/v1/models/load",
        LoadBody,
        ModelLoadDone,
        "Load a model on all of its boards.",
        _ONE,
    ),
    ControlCall(
        "/v1/models/unload",
        UnloadBody,
        ModelUnloadDone,
        "Unload a model from all of its boards.",
        _ONE,
    ),
    ControlCall(
        "/release_memory_occupation",
        SleepBody,
        SleepDone,
        "Unload models, in SGLang's words.",
        _BOTH_TAGS,
        "Trainers",
    ),
    ControlCall(
        "/resume_memory_occupation",
        WakeBody,
        WakeDone,
        "Load models again, in SGLang's words.",
        _BOTH_TAGS,
        "Trainers",
    ),
)
