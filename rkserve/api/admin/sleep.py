"""Bodies of the calls that put boards to sleep and wake them, unload and load models.

It knows names, ranges and the peers' words; which boards there are, and what becomes of a call,
it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from rkserve.api.admin.pause import COMMON, CallOptions, terms_of, texts
from rkserve.api.admin.query import ControlRequest, ParameterKind, ParameterKinds
from rkserve.api.json.fields import Fields, Range
from rkserve.api.json.limits import MAX_LEASE_S
from rkserve.core.desired_state import PauseMode, SleepLevel
from rkserve.core.errors import RequestError, UnsupportedParameter

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)

_PLACES: ParameterKinds = {**COMMON, "boards": ParameterKind.TEXTS, "selector": ParameterKind.TEXTS}
_REST: ParameterKinds = {
    "level": ParameterKind.NUMBER,
    "mode": ParameterKind.TEXT,
    "lease_s": ParameterKind.NUMBER,
    "wake_on_request": ParameterKind.FLAG,
}
_SLEEP: ParameterKinds = {**_PLACES, **_REST, "tags": ParameterKind.TEXTS}
_WAKE: ParameterKinds = {**_PLACES, "tags": ParameterKind.TEXTS}
_UNLOAD: ParameterKinds = {**COMMON, **_REST}


@dataclass(frozen=True)
class SleepCall:
    """A sleep that is asked for. ``wakes`` says whether a request ends it; None: as configured."""

    terms: CallOptions
    mode: PauseMode
    level: SleepLevel
    lease_s: float | None = None
    wakes: bool | None = False


@dataclass(frozen=True)
class WakeCall:
    """What shall wake up: of a model the ``tags``, all where there are none."""

    terms: CallOptions
    tags: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether nothing of what is named sleeps on."""
        return frozenset(self.tags) != {WEIGHTS}


def parse_sleep(asked: ControlRequest) -> SleepCall:
    """Read POST /sleep, vLLM's form: level 1, and what runs is aborted, by default."""
    fields = asked.fields(_SLEEP)
    check_tags(fields)
    return _sleep(fields, PauseMode.ABORT, wakes=fields.flag("wake_on_request"))


def parse_unload(asked: ControlRequest) -> SleepCall:
    """Read POST /v1/models/unload: what runs comes to its end by default."""
    fields = asked.fields(_UNLOAD)
    call = _sleep(fields, PauseMode.WAIT, wakes=fields.maybe_flag("wake_on_request"))
    _require_model(call.terms)
    if call.level is SleepLevel.PAUSED:
        raise RequestError("'level' must be 1 or 2: at 0 a model stays loaded.", "level")
    return call


def parse_wake(asked: ControlRequest) -> WakeCall:
    """Read POST /wake_up."""
    fields = asked.fields(_WAKE)
    return WakeCall(terms_of(fields), _tags(fields))


def _tags(fields: Fields) -> tuple[str, ...]:
    tags = texts(fields, "tags")
    for tag in tags:
        if tag not in TAGS:
            raise RequestError(
                f"Invalid 'tags': expected some of {', '.join(TAGS)}, got '{tag[:40]}'.", "tags"
            )
    return tags


def check_tags(fields: Fields) -> None:
    """Hold the memory that is to be freed to what a board can free. Raises ``RequestError``."""
    tags = _tags(fields)
    if tags and WEIGHTS not in tags:
        raise UnsupportedParameter(
            "Unsupported parameter: 'tags' without 'weights'. A board's KV cache is a part of its "
            "loaded model; POST /reset_prefix_cache drops what is in it.",
            "tags",
        )


def parse_load(asked: ControlRequest) -> WakeCall:
    """Read POST /v1/models/load."""
    call = WakeCall(terms_of(asked.fields(COMMON)))
    _require_model(call.terms)
    return call


def _sleep(fields: Fields, mode: PauseMode, wakes: bool | None) -> SleepCall:
    asked_mode = fields.choice("mode", *(one.value for one in PauseMode))
    level = fields.integer("level", Range(SleepLevel.PAUSED, SleepLevel.DROPPED))
    return SleepCall(
        terms=terms_of(fields),
        mode=mode if asked_mode is None else PauseMode(asked_mode),
        level=SleepLevel.UNLOADED if level is None else SleepLevel(level),
        lease_s=fields.number("lease_s", Range(0, MAX_LEASE_S, above=True)),
        wakes=wakes,
    )


def _require_model(terms: CallOptions) -> None:
    if len(terms.models) != 1:
        raise RequestError("Say which model: 'model' names one.", "model")
