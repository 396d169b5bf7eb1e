"""Bodies of the calls that pause, resume, abort and reset, in rkserve's, vLLM's and SGLang's forms.

The models state names, ranges and meanings; which boards exist and how a call is carried out is
not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from rkserve.api.admin.query import ControlRequest, ParameterKind, QueryOrBody
from rkserve.api.common.calls import REQUEST_PREFIX, named_answer
from rkserve.api.json.body import JsonObject
from rkserve.api.json.fields import wrong_type
from rkserve.api.json.limits import (
    MAX_LABEL_CHARS,
    MAX_LEASE_S,
    MAX_MODEL_CHARS,
    MAX_NAMED,
    MAX_TIMEOUT_S,
)
from rkserve.core.desired_state import PauseMode
from rkserve.core.errors import RequestError, UnsupportedParameter

_ANSWERS = ("chatcmpl-", "cmpl-", "resp_", "msg_", REQUEST_PREFIX)  # of ids that are no names

# SGLang's modes: the mode, and whether the KV cache of running requests is dropped.
_SGLANG = {
    "abort": (PauseMode.ABORT, True),
    "retract": (PauseMode.KEEP, True),
    "in_place": (PauseMode.KEEP, False),
}
_NAME: JsonObject = {"type": "string", "minLength": 1, "maxLength": MAX_MODEL_CHARS}
NAMES: JsonObject = {"anyOf": [_NAME, {"type": "array", "items": _NAME, "maxItems": MAX_NAMED}]}


def read_names(value: object, info: ValidationInfo) -> tuple[str, ...]:
    """Read the names of a field."""
    assert info.field_name is not None
    return names_of(value, info.field_name)


def names_of(value: object, name: str) -> tuple[str, ...]:
    """Read a string, or a list of strings that may be empty, without repeats."""
    if isinstance(value, tuple):
        return value
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


def _label(label: str, info: ValidationInfo) -> str:
    assert info.field_name is not None
    return check_label(label, info.field_name)


def refused(why: str) -> AfterValidator:
    """Return the check of a peer's flag that may only be false; ``why`` completes the error."""

    def check(value: bool, info: ValidationInfo) -> bool:
        if value:
            raise UnsupportedParameter(f"Unsupported parameter: {why}", info.field_name)
        return value

    return AfterValidator(check)


ONLY_FALSE = WithJsonSchema({"const": False})
Names = Annotated[
    tuple[str, ...], BeforeValidator(read_names), WithJsonSchema(NAMES), ParameterKind.TEXTS
]
Label = Annotated[
    str, AfterValidator(_label), WithJsonSchema({**_NAME, "maxLength": MAX_LABEL_CHARS})
]
Name = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
Lease = Annotated[float, Field(gt=0, le=MAX_LEASE_S)]
Mode = Annotated[PauseMode, Field(strict=False)]

MODE_MEANS = "What becomes of requests that run."
LEASE_MEANS = "Seconds after which it ends itself."


@dataclass(frozen=True)
class CallOptions:
    """The part of the cluster, time limit and expected epoch of a call.

    Empty tuples mean all. ``selector`` holds board ids or shell patterns.
    """

    models: tuple[str, ...] = ()
    boards: tuple[str, ...] = ()
    selector: tuple[str, ...] = ()
    timeout_s: float | None = None
    background: bool = False
    epoch: int | None = None


class ControlBody(QueryOrBody):
    """Parameters of every call that changes the cluster."""

    model: Names = Field((), description="Models that are meant; all without it, or the only one.")
    models: Names = Field((), description="Another name of `model`.")
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = Field(
        None, description="Seconds that it may take."
    )
    background: bool = Field(
        default=False,
        alias="async",
        description="Answer 202 at once, and tell by the operation how it goes on.",
    )
    epoch: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Only if the cluster is at this epoch, else 409."
    )

    @model_validator(mode="after")
    def _check_models(self) -> ControlBody:
        if self.model and self.models:
            raise RequestError(
                "'model' and 'models' are two names of one value; send one.", "models"
            )
        return self

    @property
    def terms(self) -> CallOptions:
        """Those parameters as one value."""
        return CallOptions(
            models=self.model or self.models,
            timeout_s=self.timeout_s,
            background=self.background,
            epoch=self.epoch,
        )


class BoardsBody(ControlBody):
    """Parameters of a call that may name boards."""

    boards: Names = Field((), description="Boards that are meant; all without it.")
    selector: Names = Field((), description="Shell patterns of boards that are meant.")

    @model_validator(mode="after")
    def _check_boards(self) -> BoardsBody:
        if self.boards and self.selector:
            raise RequestError("Send either 'boards' or 'selector', not both.", "selector")
        return self

    @property
    def terms(self) -> CallOptions:
        """Those parameters as one value."""
        return replace(super().terms, boards=self.boards, selector=self.selector)


class ResumeBody(BoardsBody):
    """POST /resume and POST /continue_generation."""

    adapter: Name | None = Field(None, description="Only requests for this adapter.")


class PauseBody(ResumeBody):
    """POST /pause in vLLM's form: running requests are aborted and caches cleared by default."""

    mode: Mode | None = Field(None, description=MODE_MEANS)
    lease_s: Lease | None = Field(None, description=LEASE_MEANS)
    clear_cache: bool = Field(True, description="Drop KV caches too; true unless it is said.")
    wait_for_inflight_requests: bool = Field(
        False, description="vLLM's older name of `mode`: `wait`."
    )

    @model_validator(mode="after")
    def _check_mode(self) -> PauseBody:
        if self.wait_for_inflight_requests and self.mode not in (None, PauseMode.WAIT):
            raise RequestError(
                "'wait_for_inflight_requests' means 'mode': 'wait', but 'mode' is another one.",
                "wait_for_inflight_requests",
            )
        return self


class PauseGenerationBody(ResumeBody):
    """POST /pause_generation in SGLang's form."""

    mode: Literal["abort", "retract", "in_place"] = Field("abort", description="SGLang's modes.")
    lease_s: Lease | None = Field(None, description=LEASE_MEANS)


class CacheResetBody(BoardsBody):
    """Parameters of the calls that drop KV caches, also those of running requests."""

    reset_running_requests: bool = Field(False, description="Those of running requests too.")


class ResetBody(CacheResetBody):
    """POST /reset_prefix_cache."""

    reset_external: Annotated[
        bool,
        refused(
            "there is no KV cache outside of the boards. Prompt caches are deleted by DELETE "
            "/v1/cache/{model}/{cache_name}."
        ),
        ONLY_FALSE,
    ] = Field(False, description="There is no KV cache outside of the boards.")


class FlushBody(CacheResetBody):
    """GET or POST /flush_cache in SGLang's form."""

    timeout: Annotated[float, Field(ge=0, le=MAX_TIMEOUT_S)] = Field(
        0.0, description="Seconds to wait until no request runs."
    )


class AbortBody(BoardsBody):
    """POST /abort_requests; without IDs, all requests."""

    request_ids: Names = Field((), description="The ids of answers; all without it.")


class AbortOneBody(BoardsBody):
    """POST /abort_request in SGLang's form."""

    rid: Annotated[str, Field(max_length=MAX_MODEL_CHARS)] | None = Field(
        None, description="The id of an answer, or a client's own."
    )
    abort_all: bool = Field(False, description="All requests.")
    abort_message: str | None = Field(None, description="SGLang's; it is not told.")


class LabelBody(ControlBody):
    """POST /update_weight_version. With ``reset_step`` the trainer's steps begin anew."""

    new_version: Label = Field(description="The new label of the weights.")
    abort_all_requests: Annotated[
        bool, refused("a new label aborts nothing; POST /abort_requests does."), ONLY_FALSE
    ] = Field(False, description="A label aborts nothing.")
    reset_step: bool = Field(False, description="The trainer's steps begin anew.")


@dataclass(frozen=True)
class PauseCall:
    """A pause, in either form."""

    terms: CallOptions
    mode: PauseMode
    clear_cache: bool
    adapter: str | None = None
    lease_s: float | None = None


@dataclass(frozen=True)
class AbortCall:
    """Requests to abort, by the IDs of their answers; None means all."""

    terms: CallOptions
    request_ids: tuple[str, ...] | None = None


def parse_pause(asked: ControlRequest) -> PauseCall:
    """Read POST /pause."""
    body = asked.read(PauseBody)
    # vLLM's older name of the mode takes precedence over the default.
    default = PauseMode.WAIT if body.wait_for_inflight_requests else PauseMode.ABORT
    mode = body.mode or default
    return PauseCall(body.terms, mode, body.clear_cache, body.adapter, body.lease_s)


def parse_pause_generation(asked: ControlRequest) -> PauseCall:
    """Read POST /pause_generation."""
    body = asked.read(PauseGenerationBody)
    mode, clear = _SGLANG[body.mode]
    return PauseCall(body.terms, mode, clear, body.adapter, body.lease_s)


def parse_abort(asked: ControlRequest) -> AbortCall:
    """Read POST /abort_requests."""
    body = asked.read(AbortBody)
    return abort_of(body.terms, body.request_ids)


def parse_abort_one(asked: ControlRequest) -> AbortCall:
    """Read POST /abort_request."""
    body = asked.read(AbortOneBody)
    if body.abort_all:
        return AbortCall(body.terms)
    if not body.rid:
        raise RequestError("Say which request: 'rid', or 'abort_all': true for all.", "rid")
    return abort_of(body.terms, (body.rid,))


def abort_of(terms: CallOptions, given: tuple[str, ...]) -> AbortCall:
    """Return the call for IDs of answers, or for names that clients gave their requests."""
    named = (named_answer(name) for name in given if not name.startswith(_ANSWERS))
    return AbortCall(terms, (*given, *named) or None)
