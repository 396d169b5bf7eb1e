"""Parameters and answers of the calls that control generations.

Unknown keys are refused: these calls change something, and a mistyped key must not be taken for one
that was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rkserve.api.admin.query import ControlRequest, ParameterKind, ParameterKinds
from rkserve.api.common.renderer import Renderer
from rkserve.api.json.body import JsonObject
from rkserve.api.json.fields import ANY, Fields, Range, as_integer, wrong_type
from rkserve.api.json.limits import MAX_CHOICES, MAX_CLEAR_RANGES
from rkserve.core.board_report import GenerationInfo, GenerationState
from rkserve.core.errors import RequestError
from rkserve.core.messages import ControlAction, Edit

Ranges = tuple[tuple[int, int], ...]

_NOT_NEGATIVE = Range(0)
_CHANGES: ParameterKinds = {
    "replace_last": ParameterKind.NUMBER,
    "text": ParameterKind.TEXT,
    "token_ids": ParameterKind.JSON,
    "clear": ParameterKind.JSON,
}
_CHOICE: ParameterKinds = {"choice": ParameterKind.NUMBER}
_EDIT: ParameterKinds = {**_CHANGES, **_CHOICE, "role": ParameterKind.TEXT}
_STATUS = {
    ControlAction.PAUSE: "paused",
    ControlAction.EDIT: "paused",
    ControlAction.RESUME: "resumed",
    ControlAction.ABORT: "aborted",
}
# When a change takes effect in the KV cache; a generation's context changes at once.
AT_ONCE, AT_RESUME = "at_once", "at_resume"
_SHOWS_TEXT = (ControlAction.PAUSE, ControlAction.EDIT)


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

    Raises:
        RequestError: with the ``param`` at fault.
    """
    return choice_of(asked.fields(_CHOICE))


def parse_edit(asked: ControlRequest) -> EditCall:
    """Read an edit.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    fields = asked.fields(_EDIT)
    if all(fields.get(name) is None for name in _CHANGES):
        raise RequestError(
            f"An edit needs at least one of {', '.join(repr(name) for name in _CHANGES)}."
        )
    role = fields.choice("role", "assistant", "tool")
    text, token_ids = fields.text("text"), fields.integers("token_ids")
    _check_words(role, text, token_ids)
    return EditCall(
        choice=choice_of(fields),
        replace_last=fields.integer("replace_last", _NOT_NEGATIVE) or 0,
        text=text,
        token_ids=token_ids,
        tool=role == "tool",
        clear=ranges_of(fields, "clear") if fields.get("clear") is not None else (),
    )


def _check_words(role: str | None, text: str | None, token_ids: tuple[int, ...] | None) -> None:
    if text is not None and token_ids is not None:
        raise RequestError("Send either 'text' or 'token_ids', not both.", "token_ids")
    if role is not None and text is None and token_ids is None:
        raise RequestError("'role' says whose 'text' or 'token_ids' it is; send one.", "role")
    if text == "" and role != "tool":  # a tool's result may be empty
        raise RequestError("Invalid 'text': empty string.", "text")
    if token_ids == ():
        raise RequestError("Invalid 'token_ids': empty array.", "token_ids")


def choice_of(fields: Fields) -> int | None:
    """Read the index of a choice."""
    return fields.integer("choice", Range(0, MAX_CHOICES - 1))


def ranges_of(fields: Fields, name: str) -> Ranges:
    """Read half-open ranges of positions; the board checks their upper bound."""
    found, path = fields.items(name), fields.path(name)
    if len(found) > MAX_CLEAR_RANGES:
        raise RequestError(
            f"Invalid '{path}': array too long. Expected at most {MAX_CLEAR_RANGES} ranges, but "
            f"got {len(found)}.",
            path,
        )
    return tuple(_range(value, f"{path}[{index}]") for index, value in enumerate(found))


def _range(value: object, path: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:  # noqa: PLR2004 - a start and an end
        raise wrong_type(path, "an array [start, end]", value)
    start, end = (as_integer(one, f"{path}[{at}]", ANY) for at, one in enumerate(value))
    if not 0 <= start <= end:
        raise RequestError(
            f"Invalid '{path}': a range begins at 0 or later and does not end before it begins, "
            f"but this is [{start}, {end}).",
            path,
        )
    return start, end


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


def _progress(info: GenerationInfo) -> JsonObject:
    return {
        "partial_output": info.partial_output,
        "tokens": info.tokens,
        "context_tokens": info.context_tokens,
        "kv": None if info.kv is None else info.kv.value,
        "kv_positions": info.kv_positions,
        "can_resume": info.state is GenerationState.PAUSED,
    }


def _entry(info: GenerationInfo) -> JsonObject:
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
