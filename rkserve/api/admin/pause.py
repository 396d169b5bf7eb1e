"""Calls that pause, resume, abort, reset and label, in rkserve's, vLLM's and SGLang's forms.

Each body names its parameters, the operation that it begins and its own part of the answer;
``CALLS`` has their paths. Which boards exist and how an operation is carried out is not known here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from rkserve.api.admin.operations import ACCEPTED, OK, Envelope, total_of
from rkserve.api.admin.query import Name, ParameterKind, QueryOrBody
from rkserve.api.common.calls import REQUEST_PREFIX, named_answer
from rkserve.api.json.fields import (
    MAX_LABEL_CHARS,
    MAX_LEASE_S,
    MAX_MODEL_CHARS,
    MAX_NAMED,
    MAX_TIMEOUT_S,
    JsonObject,
    wrong_type,
)
from rkserve.api.json.schemas import Count, Example, one_of
from rkserve.control.calls import (
    AbortAction,
    AnyAction,
    CacheResetAction,
    LabelAction,
    PauseAction,
    ResumeAction,
)
from rkserve.control.operations import OperationOutcome
from rkserve.core.desired_state import Desired, PauseMode, Scope
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


def _label(label: str, info: ValidationInfo) -> str:
    param = info.field_name
    # It is sent in a header, where several are separated by commas.
    fits = 1 <= len(label) <= MAX_LABEL_CHARS
    if not fits or not all("!" <= one <= "~" and one != "," for one in label):
        raise RequestError(
            f"Invalid '{param}': it has at most {MAX_LABEL_CHARS} printable ASCII characters, "
            "without spaces and commas.",
            param,
        )
    return label


def refused(why: str = "", harmless: object = False) -> AfterValidator:
    """Return the check of a peer's parameter that may have one value only, mostly false.

    ``why`` completes the error; without it the error names the parameter.
    """

    def check(value: object, info: ValidationInfo) -> object:
        if value != harmless:
            about = why or f"'{info.field_name}'."
            raise UnsupportedParameter(f"Unsupported parameter: {about}", info.field_name)
        return value

    return AfterValidator(check)


ONLY_FALSE = WithJsonSchema({"const": False})
Names = Annotated[
    tuple[str, ...], BeforeValidator(read_names), WithJsonSchema(NAMES), ParameterKind.TEXTS
]
Label = Annotated[
    str, AfterValidator(_label), WithJsonSchema({**_NAME, "maxLength": MAX_LABEL_CHARS})
]
Lease = Annotated[float, Field(gt=0, le=MAX_LEASE_S)]
Mode = Annotated[PauseMode, Field(strict=False)]

MODE_MEANS = "What becomes of requests that run."
LEASE_MEANS = "Seconds after which it ends itself."


@dataclass(frozen=True)
class CallOptions:
    """The part of the cluster, time limit and expected epoch of a call.

    Empty tuples mean all. ``selector`` holds board ids or shell patterns. With ``adapter`` only
    requests for that adapter are meant.
    """

    models: tuple[str, ...] = ()
    boards: tuple[str, ...] = ()
    selector: tuple[str, ...] = ()
    adapter: str | None = None
    timeout_s: float | None = None
    background: bool = False
    epoch: int | None = None


class ControlBody(QueryOrBody):
    """Parameters of every call that changes the cluster."""

    model: Names = Field((), description="Models that are meant; all without it, or the only one.")
    models: Names = Field((), description="Another name of `model`.")
    timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S, description="The time limit.")
    background: bool = Field(
        default=False,
        alias="async",
        description="Answer 202 at once; the operation shows its progress.",
    )
    epoch: int | None = Field(None, ge=0, description="Only at this epoch of the cluster, or 409.")

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


class OperationBody(ControlBody):
    """Parameters of a call that is one operation; with ``one_model`` it is about one model."""

    one_model: ClassVar[bool] = False

    @abstractmethod
    def action(self, scope: Scope) -> AnyAction:
        """Return the operation; ``scope`` has the boards that the parameters mean."""

    @abstractmethod
    def reply(self, outcome: OperationOutcome, desired: Desired) -> Mapping[str, object]:
        """Return the call's own part of the answer, in addition to the ``Envelope``."""


@dataclass(frozen=True)
class ControlCall:
    """A path that takes the parameters ``body`` and answers with ``answer``."""

    path: str
    body: type[OperationBody]
    answer: type[Envelope]
    summary: str
    example: Example = field(default_factory=Example)
    tag: str = "Cluster"


class BoardsBody(OperationBody):
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
    """POST /resume."""

    adapter: Name | None = Field(None, description="Only requests for this adapter.")

    @property
    def terms(self) -> CallOptions:
        """Those parameters as one value."""
        return replace(super().terms, adapter=self.adapter)

    def action(self, scope: Scope) -> AnyAction:
        return ResumeAction(models=scope.models, boards=scope.boards, adapter=scope.adapter)

    def reply(self, outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        return {"status": "resuming" if outcome.status == ACCEPTED else "resumed"}


class ContinueBody(ResumeBody):
    """POST /continue_generation in SGLang's form."""

    def reply(self, _outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        return {"message": "Generation continued successfully.", "status": "ok"}


class PauseBody(ResumeBody):
    """POST /pause in vLLM's form: running requests are aborted and caches cleared by default."""

    mode: Mode | None = Field(None, description=MODE_MEANS)
    lease_s: Lease | None = Field(None, description=LEASE_MEANS)
    clear_cache: bool = Field(True, description="Drop KV caches too; the default is true.")
    wait_for_inflight_requests: bool = Field(False, description="vLLM's older `mode`: `wait`.")

    @model_validator(mode="after")
    def _check_mode(self) -> PauseBody:
        if self.wait_for_inflight_requests and self.mode not in (None, PauseMode.WAIT):
            raise RequestError(
                "'wait_for_inflight_requests' means 'mode': 'wait', but 'mode' is another one.",
                "wait_for_inflight_requests",
            )
        return self

    @property
    def meant(self) -> PauseMode:
        """The mode; vLLM's older name of it takes precedence over the default."""
        default = PauseMode.WAIT if self.wait_for_inflight_requests else PauseMode.ABORT
        return self.mode or default

    def action(self, scope: Scope) -> AnyAction:
        return _pause(scope, self.meant, self.lease_s, clear_cache=self.clear_cache)

    def reply(self, outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        status = "pausing" if outcome.status == ACCEPTED else "paused"
        return {"status": status, "mode": self.meant.value}


class PauseGenerationBody(ResumeBody):
    """POST /pause_generation in SGLang's form."""

    mode: Literal["abort", "retract", "in_place"] = Field("abort", description="SGLang's modes.")
    lease_s: Lease | None = Field(None, description=LEASE_MEANS)

    def action(self, scope: Scope) -> AnyAction:
        mode, clear_cache = _SGLANG[self.mode]
        return _pause(scope, mode, self.lease_s, clear_cache=clear_cache)

    def reply(self, _outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        result = {"message": "Generation paused successfully.", "status": "ok"}
        return {**result, "mode": _SGLANG[self.mode][0].value}


def _pause(
    scope: Scope, mode: PauseMode, lease_s: float | None, *, clear_cache: bool
) -> PauseAction:
    return PauseAction(
        models=scope.models,
        boards=scope.boards,
        adapter=scope.adapter,
        mode=mode,
        clear_cache=clear_cache,
        lease_s=lease_s,
    )


class CacheResetBody(BoardsBody):
    """Parameters of the calls that drop KV caches, also those of running requests."""

    reset_running_requests: bool = Field(False, description="Those of running requests too.")

    def action(self, scope: Scope) -> AnyAction:
        return CacheResetAction(
            models=scope.models,
            boards=scope.boards,
            reset_running_requests=self.reset_running_requests,
        )

    def reply(self, outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        return {"success": outcome.status == OK}


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

    timeout: float = Field(0.0, ge=0, le=MAX_TIMEOUT_S, description="Seconds to wait for idleness.")


class AnyAbortBody(BoardsBody):
    """Parameters of the calls that end requests."""

    @property
    @abstractmethod
    def ids(self) -> tuple[str, ...]:
        """The ids of answers, or names that clients gave their requests; empty means all."""

    def action(self, scope: Scope) -> AnyAction:
        named = (named_answer(name) for name in self.ids if not name.startswith(_ANSWERS))
        request_ids = (*self.ids, *named) or None
        return AbortAction(models=scope.models, boards=scope.boards, request_ids=request_ids)

    def reply(self, outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        return {"status": "aborted", "aborted": total_of(outcome.operation, "aborted")}


class AbortBody(AnyAbortBody):
    """POST /abort_requests; without IDs, all requests."""

    request_ids: Names = Field((), description="The ids of answers; all without it.")

    @property
    def ids(self) -> tuple[str, ...]:
        return self.request_ids


class AbortOneBody(AnyAbortBody):
    """POST /abort_request in SGLang's form."""

    rid: str | None = Field(None, max_length=MAX_MODEL_CHARS, description="Of an answer, or own.")
    abort_all: bool = Field(False, description="All requests.")
    abort_message: str | None = Field(None, description="SGLang's; not used.")

    @model_validator(mode="after")
    def _check_which(self) -> AbortOneBody:
        if not self.abort_all and not self.rid:
            raise RequestError("Say which request: 'rid', or 'abort_all': true for all.", "rid")
        return self

    @property
    def ids(self) -> tuple[str, ...]:
        return () if self.abort_all or self.rid is None else (self.rid,)


class LabelBody(OperationBody):
    """POST /update_weight_version. With ``reset_step`` the trainer's steps begin anew."""

    one_model: ClassVar[bool] = True
    new_version: Label = Field(description="The new label of the weights.")
    abort_all_requests: Annotated[
        bool, refused("a new label aborts nothing; POST /abort_requests does."), ONLY_FALSE
    ] = Field(False, description="A label aborts nothing.")
    reset_step: bool = Field(False, description="The trainer's steps begin anew.")

    def action(self, scope: Scope) -> AnyAction:
        (model,) = scope.models
        return LabelAction(model=model, label=self.new_version, reset_step=self.reset_step)

    def reply(self, outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        model = outcome.operation.params["model"]
        return {"success": True, "new_version": self.new_version, "model": model}


ModeName = Annotated[str, one_of(PauseMode)]


class StatusDone(Envelope):
    """A change of the state of boards."""

    status: str


class PauseDone(StatusDone):
    """A pause."""

    mode: ModeName


class MessageDone(StatusDone):
    """A change in SGLang's form."""

    message: str


class PauseMessageDone(MessageDone):
    """A pause in SGLang's form."""

    mode: ModeName


class AbortDone(StatusDone):
    """Ended requests."""

    aborted: Count


class SuccessDone(Envelope):
    """A change that tells its success."""

    success: bool


class LabelDone(SuccessDone):
    """The new label of a model's weights."""

    new_version: str
    model: str


CALLS = (
    ControlCall(
        "/pause",
        PauseBody,
        PauseDone,
        "Pause boards, and answer when they have stopped.",
        Example({"mode": "keep"}),
    ),
    ControlCall("/resume", ResumeBody, StatusDone, "Let paused boards go on."),
    ControlCall(
        "/pause_generation",
        PauseGenerationBody,
        PauseMessageDone,
        "Pause, in SGLang's words.",
        Example({"mode": "retract"}),
    ),
    ControlCall("/continue_generation", ContinueBody, MessageDone, "Resume, in SGLang's words."),
    ControlCall(
        "/abort_requests",
        AbortBody,
        AbortDone,
        "End requests.",
        Example({"request_ids": ["chatcmpl-1"]}),
    ),
    ControlCall(
        "/abort_request",
        AbortOneBody,
        AbortDone,
        "End a request, in SGLang's words.",
        Example({"rid": "chatcmpl-1"}),
        "Trainers",
    ),
    ControlCall("/reset_prefix_cache", ResetBody, SuccessDone, "Drop KV caches."),
    ControlCall(
        "/update_weight_version",
        LabelBody,
        LabelDone,
        "Name a model's weights anew.",
        Example({"model": "sim-chat", "new_version": "step-7"}),
    ),
)
