"""Bodies of the calls that put boards to sleep and wake them, and that unload and load models.

The models state names, ranges and meanings; which boards exist and how a call is carried out is
not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from rkserve.api.admin.pause import (
    LEASE_MEANS,
    MODE_MEANS,
    BoardsBody,
    CallOptions,
    ControlBody,
    Lease,
    Mode,
    names_of,
)
from rkserve.api.admin.query import ControlRequest, ParameterKind
from rkserve.api.json.body import JsonObject
from rkserve.core.desired_state import PauseMode, SleepLevel
from rkserve.core.errors import RequestError, UnsupportedParameter

WEIGHTS, KV_CACHE = "weights", "kv_cache"
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


class WakeBody(BoardsBody):
    """POST /wake_up: of a model the ``tags``, all without them."""

    tags: Tags = Field((), description="vLLM's.")


class LoadBody(ControlBody):
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


class UnloadBody(LoadBody):
    """POST /v1/models/unload: running requests are finished by default."""

    level: UnloadLevel = Field(
        int(SleepLevel.UNLOADED), description="1 unloads the model, 2 drops KV caches too."
    )
    mode: Mode = Field(PauseMode.WAIT, description=MODE_MEANS)
    lease_s: Lease | None = Field(None, description=LEASE_MEANS)
    wake_on_request: bool | None = Field(None, description=WAKE_MEANS)


@dataclass(frozen=True)
class SleepCall:
    """A sleep or unload. ``wakes``: a request ends it; None means as configured."""

    terms: CallOptions
    mode: PauseMode
    level: SleepLevel
    lease_s: float | None = None
    wakes: bool | None = False


@dataclass(frozen=True)
class WakeCall:
    """A wake-up or load: of a model the ``tags``, all without them."""

    terms: CallOptions
    tags: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Return whether nothing that is named stays asleep."""
        return frozenset(self.tags) != {WEIGHTS}


def parse_sleep(asked: ControlRequest) -> SleepCall:
    """Read POST /sleep."""
    return _sleep(asked.read(SleepBody))


def parse_unload(asked: ControlRequest) -> SleepCall:
    """Read POST /v1/models/unload."""
    return _sleep(asked.read(UnloadBody))


def _sleep(body: SleepBody | UnloadBody) -> SleepCall:
    level = SleepLevel(body.level)
    return SleepCall(body.terms, body.mode, level, body.lease_s, body.wake_on_request)


def parse_wake(asked: ControlRequest) -> WakeCall:
    """Read POST /wake_up."""
    body = asked.read(WakeBody)
    return WakeCall(body.terms, body.tags)


def parse_load(asked: ControlRequest) -> WakeCall:
    """Read POST /v1/models/load."""
    return WakeCall(asked.read(LoadBody).terms)
