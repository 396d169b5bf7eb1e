"""Parameters and answers of the calls that control generations.

Unknown keys are refused: these calls change something, and a mistyped key must not be taken for one
that was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import NotRequired, TypedDict

from rkserve.api.admin.query import ControlRequest, QueryOrBody
from rkserve.api.common.renderer import Renderer
from rkserve.api.json.fields import (
    MAX_CHOICES,
    MAX_CLEAR_RANGES,
    JsonObject,
)
from rkserve.api.json.schemas import Count, one_of
from rkserve.core.board_report import GenerationInfo, GenerationState
from rkserve.core.errors import RequestError
from rkserve.core.messages import ControlAction, Edit

Ranges = tuple[tuple[int, int], ...]
StateName = Annotated[str, one_of(GenerationState)]

_STATUS = {
    ControlAction.PAUSE: "paused",
    ControlAction.EDIT: "paused",
    ControlAction.RESUME: "resumed",
    ControlAction.ABORT: "aborted",
}
# When a change takes effect in the KV cache; a generation's context changes at once.
AT_ONCE, AT_RESUME = "at_once", "at_resume"
_SHOWS_TEXT = (ControlAction.PAUSE, ControlAction.EDIT)


CHOICE_MEANS = "Which choice is meant; all without it."
Choice = Annotated[int, Field(ge=0, le=MAX_CHOICES - 1)]


def _ordered(value: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= value[0] <= value[1]:
        about = f"expected [start, end] with 0 <= start <= end; got {[*value]}"
        raise PydanticCustomError("range", about)
    return value


_POSITION: JsonObject = {"type": "integer", "minimum": 0}
_RANGE: JsonObject = {"type": "array", "items": _POSITION, "minItems": 2, "maxItems": 2}
# Half-open ranges of positions; the board checks their upper bound.
PositionRanges = Annotated[
    tuple[
        Annotated[tuple[int, int], Field(strict=False), AfterValidator(_ordered)],
        ...,
    ],
    Field(strict=False, min_length=1, max_length=MAX_CLEAR_RANGES),
    WithJsonSchema({"type": "array", "items": _RANGE, "minItems": 1, "maxItems": MAX_CLEAR_RANGES}),
]


class ChoiceBody(QueryOrBody):
    """A pause, resumption or abort of a generation."""

    choice: Choice | None = Field(None, description=CHOICE_MEANS)


class EditBody(ChoiceBody):
    """An edit: at least one of `replace_last`, `text`, `token_ids` and `clear`."""

    replace_last: Count | None = None
    text: str | None = None
    token_ids: Annotated[list[int], Field(json_schema_extra={"minItems": 1})] | None = None
    role: Literal["assistant", "tool"] | None = None
    clear: PositionRanges | None = None

    @model_validator(mode="after")
    def _check_words(self) -> EditBody:
        text, token_ids = self.text, self.token_ids
        given = (self.replace_last, text, token_ids, self.clear)
        if all(one is None for one in given):
            names = ", ".join(repr(name) for name in ("replace_last", "text", "token_ids", "clear"))
            raise RequestError(f"An edit needs at least one of {names}.")
        if text is not None and token_ids is not None:
            raise RequestError("Send either 'text' or 'token_ids', not both.", "token_ids")
        if self.role is not None and text is None and token_ids is None:
            raise RequestError("'role' says whose 'text' or 'token_ids' it is; send one.", "role")
        if text == "" and self.role != "tool":  # a tool's result may be empty
            raise RequestError("Invalid 'text': empty string.", "text")
        if token_ids == []:
            raise RequestError("Invalid 'token_ids': empty array.", "token_ids")
        return self


@dataclass(frozen=True)
class EditCall:
    """The body of an edit. ``tool``: it inserts a tool's result instead of the model's text.

    At most one of ``text`` and ``token_ids`` is set. ``choice`` of None means all choices.
    """

    choice: int | None = None
    replace_last: int = 0
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    tool: bool = False
    clear: Ranges = ()


def read_choice(asked: ControlRequest) -> int | None:
    """Read the choice that a pause, resume or abort names; None for all.

    Raises ``RequestError``.
    """
    return asked.read(ChoiceBody).choice


def parse_edit(asked: ControlRequest) -> EditCall:
    """Read an edit. Raises ``RequestError``."""
    body = asked.read(EditBody)
    return EditCall(
        choice=body.choice,
        replace_last=body.replace_last or 0,
        text=body.text,
        token_ids=None if body.token_ids is None else tuple(body.token_ids),
        tool=body.role == "tool",
        clear=body.clear or (),
    )


class ProgressEntry(TypedDict):
    """The progress of a generation."""

    tokens: Count
    context_tokens: Count
    kv: Annotated[str, one_of(("kept", "recomputed"))] | None
    kv_positions: Count
    can_resume: bool
    partial_output: NotRequired[str]


class GenerationEntry(TypedDict):
    """One choice of an answer that runs or is paused."""

    id: str
    object: Literal["generation"]
    choice: Count
    board: str
    model: str
    adapter: str | None
    state: StateName
    prompt_tokens: Count
    tokens: Count
    context_tokens: Count
    kv_positions: Count
    kv: Annotated[str, one_of(("kept", "recomputed"))] | None
    native_pause: bool
    paused_by: str | None
    age_s: float


class ChoiceEntry(GenerationEntry):
    """One choice with its text."""

    can_resume: bool
    partial_output: str
    status: StateName


class GenerationAnswer(ChoiceEntry):
    """The first choice, with all choices if there are several."""

    choices: NotRequired[list[ChoiceEntry]]


class FailedEntry(TypedDict):
    """A board that failed."""

    board: str
    error: str
    message: str


class GenerationsAnswer(TypedDict):
    """The generations of all callers, without text."""

    object: Literal["list"]
    data: list[GenerationEntry]
    failed: list[FailedEntry]


Applied = Annotated[
    str, one_of((AT_RESUME,)), Field(description="Of an edit: when the KV cache follows it.")
]


class ControlledEntry(ProgressEntry):
    """The result of an action on one choice."""

    id: str
    choice: Count
    status: Annotated[str, one_of(("paused", "resumed", "aborted"))]
    state: StateName
    board: str
    applied: NotRequired[Applied]


class ControlledAnswer(ControlledEntry):
    """The first choice, with all choices if there are several."""

    choices: NotRequired[list[ControlledEntry]]
    failed: NotRequired[list[FailedEntry]]


def edit_of(call: EditCall, renderer: Renderer, context_len: int) -> Edit:
    """Return the edit of a call, in the model's token IDs.

    Raises:
        RequestError: an ID out of the vocabulary, or a tool's result that the template refuses.
        UnsupportedParameter: text for a model without a tokenizer.
        ContextOverflow: the text is hopelessly long.
    """
    if call.token_ids is not None:
        ids, text = call.token_ids, renderer.given(call.token_ids, "token_ids")
    elif call.text is None:
        ids, text = (), ""
    elif call.tool:
        ids, text = renderer.tool_turn(call.text, context_len), call.text
    else:
        ids, text = renderer.words(call.text, context_len), call.text
    return Edit(
        replace_last=call.replace_last,
        ids=ids,
        text="" if call.tool else text,  # injected text is not part of the answer
        injected=call.tool,
        clear=call.clear,
    )


def generations_list(found: Sequence[GenerationInfo]) -> JsonObject:
    """Return the answer of GET /v1/generations: the oldest first, without text."""
    ordered = sorted(found, key=lambda info: (-info.age_s, info.request_id))
    return {"object": "list", "data": [_entry(info) for info in ordered]}


def generation_entry(found: Sequence[GenerationInfo]) -> JsonObject:
    """Return the answer of GET /v1/generations/{id}."""
    return _over_choices(
        [{**_entry(info), **_progress(info), "status": info.state.value} for info in found]
    )


def control_answer(action: ControlAction, found: Sequence[GenerationInfo]) -> JsonObject:
    """Return the result of an action on a generation."""
    return _over_choices([_controlled(action, info) for info in found])


def _controlled(action: ControlAction, info: GenerationInfo) -> JsonObject:
    progress = _progress(info)
    if action not in _SHOWS_TEXT:
        del progress["partial_output"]
    generation, choice = _split(info)
    applied = {"applied": AT_RESUME} if action is ControlAction.EDIT else {}
    return {
        "id": generation,
        "choice": choice,
        "status": _STATUS[action],
        **applied,
        "state": info.state.value,
        "board": info.board_id,
        **progress,
    }


def _over_choices(entries: list[JsonObject]) -> JsonObject:
    """Return the first choice, with all choices if there are several."""
    ordered = sorted(entries, key=lambda entry: int(entry["choice"]))
    return {**ordered[0], "choices": ordered} if len(ordered) > 1 else ordered[0]


def _progress(info: GenerationInfo) -> ProgressEntry:
    return {
        "partial_output": info.partial_output,
        "tokens": info.tokens,
        "context_tokens": info.context_tokens,
        "kv": None if info.kv is None else info.kv.value,
        "kv_positions": info.kv_positions,
        "can_resume": info.state is GenerationState.PAUSED,
    }


def _entry(info: GenerationInfo) -> GenerationEntry:
    generation, choice = _split(info)
    return {
        "id": generation,
        "object": "generation",
        "choice": choice,
        "board": info.board_id,
        "model": info.model,
        "adapter": info.adapter,
        "state": info.state.value,
        "prompt_tokens": info.prompt_tokens,
        "tokens": info.tokens,
        "context_tokens": info.context_tokens,
        "kv_positions": info.kv_positions,
        "kv": None if info.kv is None else info.kv.value,
        "native_pause": info.native_pause,
        "paused_by": info.paused_by,
        "age_s": round(info.age_s, 3),
    }


def _split(info: GenerationInfo) -> tuple[str, int]:
    """Split a request ID into the answer's ID and the choice's index."""
    generation, _, choice = info.request_id.rpartition("/")
    return generation, int(choice)
