"""The bodies of OpenAI's Responses API: their model, and the chat calls that they become.

Earlier turns come with the request or from stored responses: a call names those that it needs, and
``remembered`` inserts them. Unsupported parameters are in ``_REFUSED``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SkipValidation

from rkserve.api.common.calls import ChatCall
from rkserve.api.common.parameters import (
    AnyObject,
    Effort,
    ModelName,
    OpenModel,
    OwnParameters,
    ReasoningParameters,
    SamplingParameters,
    StepParameters,
    Stops,
    ToolChoice,
    TopLogprobs,
)
from rkserve.api.json.fields import (
    MAX_MESSAGES,
    MAX_REFERENCES,
    MAX_TOOLS,
    Fields,
    JsonObject,
    JsonText,
    as_fields,
    parse_object,
    quoted,
)
from rkserve.api.parsing import sampling
from rkserve.api.parsing.sampling import (
    JSON_OBJECT,
    Named,
    SamplingOptions,
    schema_guide,
)
from rkserve.api.parsing.tool_choice import (
    ALLOWED,
    NO_TOOLS,
    RAW,
    ToolOptions,
    allowed,
    as_object,
    check_known,
    check_offered,
    read_definitions,
)
from rkserve.api.prompting.conversation import Message, read_shown, read_text
from rkserve.api.prompting.images import DETAILS, ImagePart, image_at
from rkserve.core.errors import RequestError, UnsupportedParameter

_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class ResponseCall(ChatCall):
    """A call of /v1/responses. ``echo`` holds the parameters that its answer repeats.

    ``items`` are the raw items of the input, and ``instructions`` precede them. ``previous`` is
    the response that it continues, and ``references`` are items of earlier ones, with their
    positions in the input. With ``store`` of None the server decides.
    """

    echo: JsonObject = field(default_factory=dict)
    items: tuple[JsonObject, ...] = ()
    instructions: str | None = None
    previous: str | None = None
    references: tuple[tuple[int, str], ...] = ()
    store: bool | None = None


def _no_metadata(value: object) -> object:
    # Some languages write an empty object as an empty array.
    return value or {}


class ReasoningEffort(OpenModel):
    """OpenAI's options of reasoning."""

    effort: Effort | None = None


class TextOptions(OpenModel):
    """The form of the text; the rest ("verbosity") is a hint."""

    format: SkipValidation[AnyObject | None] = None


class ResponseRequest(SamplingParameters, StepParameters, OwnParameters, ReasoningParameters):
    """The body of POST /v1/responses."""

    model: ModelName = Field(description="A model or an adapter.")
    input: SkipValidation[str | Annotated[list[AnyObject], Field(min_length=1)]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stop: Stops = ()
    tools: SkipValidation[Annotated[list[AnyObject], Field(max_length=MAX_TOOLS)] | None] = Field(
        None, description="Those of other types than `function` are left out."
    )
    max_tool_calls: int | None = Field(None, ge=1)
    safety_identifier: str | None = None
    service_tier: SkipValidation[str | None] = Field(None, description="There is one: `default`.")
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningEffort = Field(default_factory=ReasoningEffort)
    text: TextOptions = Field(default_factory=TextOptions)
    include: SkipValidation[list[str] | None] = None
    top_logprobs: TopLogprobs | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_no_metadata)] = Field({})
    truncation: SkipValidation[Literal["disabled"] | None] = None
    background: SkipValidation[Literal[False] | None] = None


def parse_response(body: bytes) -> ResponseCall:
    """Read the body of POST /v1/responses. Raises ``RequestError``."""
    values = parse_object(body)
    asked, fields = ResponseRequest.read(values), Fields(values)
    items = _items(fields)
    messages = conversation(asked.instructions, (), items)
    sampling.refuse_unsupported(fields, _REFUSED)
    tools, offer = _tools(asked, fields)
    steps, form = _steps(asked, fields)
    previous, effort = asked.previous_response_id or None, asked.reasoning.effort
    key = asked.prompt_cache_key
    echo = {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata,
        "safety_identifier": asked.safety_identifier,
        "prompt_cache_key": key if isinstance(key, str) else None,
        **offer,
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": form},
        "top_logprobs": steps.top_logprobs or 0,
        "previous_response_id": previous,
        "store": False,
    }
    return ResponseCall(
        model=asked.model,
        max_tokens=asked.max_output_tokens,
        messages=messages,
        prefill=_prefill(items),
        tools=tools,
        wish=asked.reasoning_options(effort),
        echo=echo,
        items=tuple(items),
        instructions=asked.instructions,
        previous=previous,
        references=_references(items),
        store=asked.store,
        steps=steps,
        sampling=asked.sampling(),
        stream=asked.stream,
        stop=asked.stop,
        **asked.own(),
    )


def remembered(
    call: ResponseCall,
    before: Iterable[JsonObject],
    referenced: Mapping[str, JsonObject],
    *,
    stored: bool,
) -> ResponseCall:
    """Return the call with its earlier turns, and with the final value of ``store``.

    ``before`` are the items of the conversation so far, and ``referenced`` has each of its
    ``references``.
    """
    items = [*call.items]
    for at, item_id in call.references:
        items[at] = referenced[item_id]
    return replace(
        call,
        messages=conversation(call.instructions, before, items),
        items=tuple(items),
        references=(),
        echo={**call.echo, "store": stored},
    )


# As in ``unsupported``: parameters that would change the answer.
_REFUSED: dict[str, sampling.Harmless] = {
    **sampling.UNSUPPORTED,
    **sampling.UNSUPPORTED_TOKENS,
    "conversation": sampling.never,
    "prompt": sampling.never,
    "background": sampling.only(False),
    "truncation": sampling.only("disabled"),
}


def _steps(asked: ResponseRequest, fields: Fields) -> tuple[SamplingOptions, JsonObject]:
    """Return the sampling options and the text format, and their echo."""
    text = fields.child("text")
    form = None if text is None else text.child("format")
    guide, form_entry = (None, {"type": "text"}) if form is None else _format(form)
    included = fields.get("include") not in (None, []) and _LOGPROBS in fields.items("include")
    top = asked.top_logprobs
    # OpenAI requires both keys; the number is sufficient, and 0 is its default.
    wanted = (top or 0) if included or top else None
    return asked.steps(fields, wanted, guide), form_entry


def _format(form: Fields) -> tuple[Named | None, JsonObject]:
    kind = form.required_text("type")
    if kind == "text":
        return None, {"type": kind}
    if kind == "json_object":
        return (form.path("type"), JSON_OBJECT), {"type": kind}
    if kind != "json_schema":
        raise UnsupportedParameter(
            f"Unsupported format: {quoted(kind)}. Supported are 'text', 'json_object' and "
            "'json_schema'.",
            form.path("type"),
        )
    guide = schema_guide(form)
    form.maybe_flag("strict")  # always to the letter
    form_entry = {"type": kind, "name": form.text("name") or "", "schema": form.get("schema")}
    form_entry |= {"strict": True, "description": form.text("description")}
    return (form.path("schema"), guide), form_entry


# -- tools ----------------------------------------------------------------------------------------


def _tools(asked: ResponseRequest, fields: Fields) -> tuple[ToolOptions, JsonObject]:
    """Return the tools of a call, and their echo."""
    offer = read_definitions(fields, "function", "parameters")
    parallel, most = asked.parallel_tool_calls, asked.max_tool_calls
    form_entry = {
        "parallel_tool_calls": parallel,
        "max_tool_calls": most,
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": [_tool_entry(tool, offer.strict) for tool in offer.given],
    }
    chosen = _chosen(fields, offer)
    if not chosen.given:
        return replace(NO_TOOLS, left_out=offer.left_out), form_entry
    return replace(chosen, parallel=parallel, max_calls=most), form_entry


def _chosen(fields: Fields, offer: ToolOptions) -> ToolOptions:
    """Return the tools that ``tool_choice`` leaves of those offered, and what it demands."""
    value, name = fields.get("tool_choice"), "tool_choice"
    if not isinstance(value, dict):
        word = fields.choice(name, "none", "auto", "required")
        if word == "required":
            check_offered(offer.given, name)
        return NO_TOOLS if word == "none" else replace(offer, forced=word == "required")
    choice = as_fields(value, name)
    if value.get("type") == ALLOWED:
        given, forced = allowed(choice, offer.given, lambda tool: tool, offer.left_out)
        if forced:
            check_offered(given, name)
        return replace(offer, given=given, forced=forced)
    if (kind := choice.required_text("type")) != "function":
        raise UnsupportedParameter(
            f"Unsupported 'tool_choice': {quoted(kind)}. Only 'function' is known.",
            choice.path("type"),
        )
    named = choice.required_text("name")
    check_offered(offer.given, name)
    check_known(named, offer.given, choice.path("name"))
    return replace(offer, forced=True, named=named)


def _tool_entry(tool: JsonObject, strict: frozenset[str]) -> JsonObject:
    function = tool["function"]
    name = function["name"]
    rest = {"name": name, "parameters": function["parameters"], "strict": name in strict}
    return {"type": "function", "description": function.get("description"), **rest}


# -- earlier turns --------------------------------------------------------------------------------


def _items(fields: Fields) -> list[JsonObject]:
    """Return the raw items of the input; a text is one message."""
    value = fields.get("input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    fields.objects("input", MAX_MESSAGES)
    return fields.items("input")


def _prefill(items: Sequence[JsonObject]) -> bool:
    """Return whether the answer continues the last message, which is unfinished (as in vLLM)."""
    last = items[-1]
    message = last.get("type") in (None, "message") and last.get("role") == "assistant"
    return message and last.get("status") in ("in_progress", "incomplete")


def _references(items: Iterable[JsonObject]) -> tuple[tuple[int, str], ...]:
    found = tuple(
        (at, item["id"]) for at, item in enumerate(items) if item.get("type") == REFERENCE
    )
    if len(found) > MAX_REFERENCES:
        raise RequestError(
            f"Invalid 'input': at most {MAX_REFERENCES} items may be references.", "input"
        )
    return found


REFERENCE = "item_reference"
_IMAGE = "input_image"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def conversation(
    instructions: str | None, before: Iterable[JsonObject], items: Iterable[JsonObject]
) -> tuple[Message, ...]:
    """Return a conversation for the template. Raises ``RequestError``."""
    turns = _Turns()
    if instructions:
        turns.message("system", instructions)
    for index, item in enumerate(before):
        _read(as_fields(item, f"previous_response_id[{index}]"), turns)
    for index, item in enumerate(items):
        _read(as_fields(item, f"input[{index}]"), turns)
    return tuple(turns.messages)


def _read(item: Fields, turns: _Turns) -> None:
    kind = item.text("type") or "message"
    if (read := _ITEMS.get(kind)) is None:
        raise UnsupportedParameter(
            f"Unsupported item: {quoted(kind)}. This server reads "
            f"{', '.join(repr(one) for one in _ITEMS)}.",
            item.path("type"),
        )
    read(item, turns)


class _Turns:
    """Messages as templates take them: reasoning and calls are part of the assistant's turn."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts = ""

    def message(self, role: str, content: str | list[str | ImagePart]) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": content, **self._thought(role)})

    def think(self, text: str) -> None:
        """Add reasoning to the assistant's turn."""
        self._thoughts += text

    def call(self, call: Message) -> None:
        """Add a tool call to the assistant's turn."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant":
            self.message("assistant", "")
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, content: str) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})

    def _thought(self, role: str) -> Message:
        thoughts, self._thoughts = self._thoughts, ""
        return {"reasoning_content": thoughts} if thoughts and role == "assistant" else {}


def _message(item: Fields, turns: _Turns) -> None:
    role = item.required_choice("role", *_ROLES)
    shown = read_shown(item, _TEXTS, _IMAGE, _image) if role == "user" else _text(item, "content")
    turns.message(_ROLES[role], shown)


def _image(part: Fields) -> ImagePart:
    if part.get("file_id") is not None:
        raise UnsupportedParameter(
            "Unsupported image: this server keeps no files. Send it as 'image_url', with a data "
            "URI.",
            part.path("file_id"),
        )
    part.choice("detail", *DETAILS)
    return image_at(part.required_text("image_url"), part.path("image_url"))


def _call(item: Fields, turns: _Turns) -> None:
    text = item.text("arguments") or ""
    found = as_object(text)
    # Valid JSON stays unchanged, so that the model's own text is found in the KV cache.
    arguments = found if RAW in found or not text.strip() else JsonText(found, text)
    function = {"name": item.required_text("name"), "arguments": arguments}
    call_id = item.required_text("call_id")
    turns.call({"id": call_id, "type": "function", "function": function})


def _result(item: Fields, turns: _Turns) -> None:
    turns.result(item.required_text("call_id"), _text(item, "output"))


def _reasoning(item: Fields, turns: _Turns) -> None:
    if item.get("content") not in (None, []):
        for part in item.objects("content", MAX_MESSAGES):
            turns.think(part.text("text") or "")


def _reference(item: Fields, _turns: _Turns) -> None:
    # References are resolved before the conversation is rendered.
    item.required_text("id")


_ITEMS: dict[str, Callable[[Fields, _Turns], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "reasoning": _reasoning,
    REFERENCE: _reference,
}


def _text(fields: Fields, name: str) -> str:
    return read_text(fields, name, _TEXTS, _IMAGE)
