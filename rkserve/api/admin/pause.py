"""Bodies of the calls that pause, resume and reset the cluster, in rkserve's and its peers' forms.

It knows names, ranges and the peers' words; which boards there are, and what becomes of a call,
it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rkserve.api.admin.query import ControlRequest, ParameterKind, ParameterKinds
from rkserve.api.common.calls import REQUEST_PREFIX, named_answer
from rkserve.api.json.fields import Fields, Range, wrong_type
from rkserve.api.json.limits import (
    MAX_LABEL_CHARS,
    MAX_LEASE_S,
    MAX_MODEL_CHARS,
    MAX_NAMED,
    MAX_TIMEOUT_S,
)
from rkserve.core.desired_state import PauseMode
from rkserve.core.errors import RequestError, UnsupportedParameter

COMMON: ParameterKinds = {
    "model": ParameterKind.TEXTS,
    "models": ParameterKind.TEXTS,
    "timeout_s": ParameterKind.NUMBER,
    "async": ParameterKind.FLAG,
    "epoch": ParameterKind.NUMBER,
}
PLACES: ParameterKinds = {**COMMON, "boards": ParameterKind.TEXTS, "selector": ParameterKind.TEXTS}
_RESUME: ParameterKinds = {**PLACES, "adapter": ParameterKind.TEXT}
_HOLD: ParameterKinds = {**_RESUME, "mode": ParameterKind.TEXT, "lease_s": ParameterKind.NUMBER}
_PAUSE: ParameterKinds = {
    **_HOLD,
    "clear_cache": ParameterKind.FLAG,
    "wait_for_inflight_requests": ParameterKind.FLAG,
}
_RESET: ParameterKinds = {
    **PLACES,
    "reset_running_requests": ParameterKind.FLAG,
    "reset_external": ParameterKind.FLAG,
}
_ABORT: ParameterKinds = {**PLACES, "request_ids": ParameterKind.TEXTS}
_LABEL: ParameterKinds = {
    **COMMON,
    "new_version": ParameterKind.TEXT,
    "abort_all_requests": ParameterKind.FLAG,
    "reset_step": ParameterKind.FLAG,
}

_ANSWERS = ("chatcmpl-", "cmpl-", "resp_", "msg_", REQUEST_PREFIX)  # of ids that are no names

# SGLang's modes: what becomes of running requests, and whether their KV cache is given up.
_SGLANG = {
    "abort": (PauseMode.ABORT, True),
    "retract": (PauseMode.KEEP, True),
    "in_place": (PauseMode.KEEP, False),
}


@dataclass(frozen=True)
class CallOptions:
    """What every call may say: of which part of the cluster, for how long, and from what epoch on.

    Empty tuples are all. ``selector`` are ids of boards or shell patterns.
    """

    models: tuple[str, ...] = ()
    boards: tuple[str, ...] = ()
    selector: tuple[str, ...] = ()
    timeout_s: float | None = None
    background: bool = False
    epoch: int | None = None


@dataclass(frozen=True)
class PauseCall:
    """A pause that is asked for."""

    terms: CallOptions
    mode: PauseMode
    clear_cache: bool
    adapter: str | None = None
    lease_s: float | None = None


@dataclass(frozen=True)
class ResumeCall:
    """What shall go on."""

    terms: CallOptions
    adapter: str | None = None


@dataclass(frozen=True)
class ResetCall:
    """KV caches that shall be dropped, those of running requests too where that is said."""

    terms: CallOptions
    running: bool = False


@dataclass(frozen=True)
class AbortCall:
    """Requests that shall end, by the ids of their answers; None are all."""

    terms: CallOptions
    request_ids: tuple[str, ...] | None = None


@dataclass(frozen=True)
class LabelCall:
    """A new name for the weights of a model, of which a trainer begins anew with ``reset_step``."""

    terms: CallOptions
    label: str
    reset_step: bool = False


def parse_pause(asked: ControlRequest) -> PauseCall:
    """Read POST /pause, vLLM's form: what runs is aborted, and caches are cleared, by default."""
    fields = asked.fields(_PAUSE)
    mode = fields.choice("mode", *(one.value for one in PauseMode))
    clear = fields.maybe_flag("clear_cache")
    # vLLM's older name of one mode, which goes before the default and not before another mode.
    if fields.flag("wait_for_inflight_requests"):
        if mode not in (None, PauseMode.WAIT.value):
            raise RequestError(
                "'wait_for_inflight_requests' means 'mode': 'wait', but 'mode' is another one.",
                "wait_for_inflight_requests",
            )
        mode = PauseMode.WAIT.value
    return _pause(fields, PauseMode(mode or PauseMode.ABORT), clear is None or clear)


def parse_pause_generation(asked: ControlRequest) -> PauseCall:
    """Read POST /pause_generation, SGLang's form."""
    fields = asked.fields(_HOLD)
    mode, clear = _SGLANG[fields.choice("mode", *_SGLANG) or "abort"]
    return _pause(fields, mode, clear)


def parse_resume(asked: ControlRequest) -> ResumeCall:
    """Read POST /resume, or POST /continue_generation."""
    fields = asked.fields(_RESUME)
    return ResumeCall(terms_of(fields), _optional(fields, "adapter"))


def parse_reset(asked: ControlRequest) -> ResetCall:
    """Read POST /reset_prefix_cache, or POST /flush_cache."""
    fields = asked.fields(_RESET)
    if fields.flag("reset_external"):
        raise UnsupportedParameter(
            "Unsupported parameter: there is no KV cache outside of the boards. Prompt caches are "
            "deleted by DELETE /v1/cache/{model}/{cache_name}.",
            "reset_external",
        )
    return ResetCall(terms_of(fields), fields.flag("reset_running_requests"))


def parse_abort(asked: ControlRequest) -> AbortCall:
    """Read POST /abort_requests; no ids, or none in the list, are all requests."""
    fields = asked.fields(_ABORT)
    given = texts(fields, "request_ids")
    # Ids of answers, or what clients have named their requests.
    named = (named_answer(name) for name in given if not name.startswith(_ANSWERS))
    return AbortCall(terms_of(fields), (*given, *named) or None)


def parse_label(asked: ControlRequest) -> LabelCall:
    """Read POST /update_weight_version."""
    fields = asked.fields(_LABEL)
    if fields.flag("abort_all_requests"):
        raise UnsupportedParameter(
            "Unsupported parameter: a new label aborts nothing; POST /abort_requests does.",
            "abort_all_requests",
        )
    label = check_label(fields.required_text("new_version"), "new_version")
    return LabelCall(terms_of(fields), label, fields.flag("reset_step"))


def check_label(label: str, param: str) -> str:
    """Return a label that weights may have. Raises ``RequestError``."""
    # It is sent in a header, where several are separated by commas.
    fits = 1 <= len(label) <= MAX_LABEL_CHARS
    if not fits or not all("!" <= one <= "~" and one != "," for one in label):
        raise RequestError(
            f"Invalid '{param}': it has at most {MAX_LABEL_CHARS} printable ASCII characters, "
            "without spaces and commas.",
            param,
        )
    return label


def terms_of(fields: Fields) -> CallOptions:
    """Read what every call may say. Raises ``RequestError``."""
    models = texts(fields, "model")
    also = texts(fields, "models")
    if models and also:
        raise RequestError("'model' and 'models' are two names of one value; send one.", "models")
    boards, selector = texts(fields, "boards"), texts(fields, "selector")
    if boards and selector:
        raise RequestError("Send either 'boards' or 'selector', not both.", "selector")
    return CallOptions(
        models=models or also,
        boards=boards,
        selector=selector,
        timeout_s=fields.number("timeout_s", Range(0, MAX_TIMEOUT_S, above=True)),
        background=fields.flag("async"),
        epoch=fields.integer("epoch", Range(0)),
    )


def texts(fields: Fields, name: str) -> tuple[str, ...]:
    """Read a string, or a list of strings that may be empty, without repeats."""
    value: Any = fields.get(name)
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list):
        raise wrong_type(name, "a string or an array of strings", value)
    if len(found) > MAX_NAMED:
        raise RequestError(f"Invalid '{name}': it may name {MAX_NAMED} at most.", name)
    for index, one in enumerate(found):
        if not isinstance(one, str):
            raise wrong_type(f"{name}[{index}]", "a string", one)
        if not 1 <= len(one) <= MAX_MODEL_CHARS:
            raise RequestError(
                f"Invalid '{name}[{index}]': a name has 1 to {MAX_MODEL_CHARS} characters.", name
            )
    return tuple(dict.fromkeys(found))


def _pause(fields: Fields, mode: PauseMode, clear_cache: bool) -> PauseCall:
    return PauseCall(
        terms=terms_of(fields),
        mode=mode,
        clear_cache=clear_cache,
        adapter=_optional(fields, "adapter"),
        lease_s=fields.number("lease_s", Range(0, MAX_LEASE_S, above=True)),
    )


def _optional(fields: Fields, name: str) -> str | None:
    return None if fields.get(name) is None else fields.required_text(name)
