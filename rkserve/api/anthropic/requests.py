"""The bodies of Anthropic's Messages API: their models, and the chat calls that they become.

A conversation gets the same form as OpenAI's, so that templates and prompt caches are shared.
Supported blocks are in ``_BLOCKS``, unsupported parameters in ``_REFUSED``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, SkipValidation

from rkserve.api.common.calls import ChatCall
from rkserve.api.common.parameters import (
    AnyObject,
    ModelName,
    OpenModel,
    OwnParameters,
    ReasoningParameters,
    SamplingParameters,
    StepParameters,
    StopSequences,
)
from rkserve.api.json.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Fields,
    Range,
    missing,
    parse_object,
    quoted,
    wrong_type,
)
from rkserve.api.parsing import sampling
from rkserve.api.parsing.answer_parser import EFFORTS, ReasoningOptions
from rkserve.api.parsing.sampling import Named, schema_guide
from rkserve.api.parsing.tool_choice import (
    NO_TOOLS,
    ToolOptions,
    check_known,
    check_offered,
    read_definitions,
)
from rkserve.api.prompting.conversation import Message, check_prefill
from rkserve.api.prompting.images import image_at, image_file, shown
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.models.settings import CONTEXT_MAX

_AT_LEAST_ONE = Range(1)
_ROLES = ("user", "assistant", "system")
_CLEAR_THINKING = "clear_thinking_"  # dates follow
_LATE_EDITS = ("clear_tool_uses_", "compact_")
_USUAL_TRIGGER = {"type": "input_tokens", "value": 100_000}  # of these edits, in Anthropic's API
# Claude Code's first block of the system prompt. It is for the provider's billing, and differs
# between conversations, so that they would share no KV cache.
_ATTRIBUTION = "x-anthropic-billing-header:"
_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class AnthropicMessage(OpenModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyObject], Field(min_length=1)]


class CountRequest(SamplingParameters, StepParameters, OwnParameters, ReasoningParameters):
    """The body of POST /v1/messages/count_tokens."""

    model: ModelName = Field(description="A model or an adapter.")
    messages: SkipValidation[Annotated[list[AnthropicMessage], Field(min_length=1)]]
    system: SkipValidation[str | Annotated[list[AnyObject], Field(min_length=1)] | None] = None
    stop_sequences: StopSequences = ()
    stream: bool = False
    tools: SkipValidation[Annotated[list[AnyObject], Field(max_length=MAX_TOOLS)] | None] = Field(
        None, description="Those of other types than `custom` are left out."
    )
    tool_choice: SkipValidation[AnyObject | None] = None
    thinking: SkipValidation[AnyObject | None] = None
    output_config: SkipValidation[AnyObject | None] = None
    output_format: SkipValidation[AnyObject | None] = None
    metadata: SkipValidation[AnyObject | None] = None


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(ge=1)


def parse_messages(body: bytes) -> ChatCall:
    """Read the body of POST /v1/messages. Raises ``RequestError``."""
    values = parse_object(body)
    asked = MessagesRequest.read(values)
    return replace(_conversation(asked, Fields(values)), max_tokens=asked.max_tokens)


def parse_count(body: bytes) -> ChatCall:
    """Read the body of POST /v1/messages/count_tokens. Raises ``RequestError``."""
    values = parse_object(body)
    return _conversation(CountRequest.read(values), Fields(values))


def _conversation(asked: CountRequest, fields: Fields) -> ChatCall:
    messages = (*_system(fields), *_messages(fields))
    if prefill := messages[-1]["role"] == "assistant":
        check_prefill(messages, "messages")
    sampling.refuse_unsupported(fields, _REFUSED)
    own = asked.own()
    # Anthropic's user ID; other types than text are ignored, as in Anthropic's API.
    user = asked.metadata.get("user_id") if isinstance(asked.metadata, dict) else None
    if isinstance(user, str) and user:
        own["session"] = user
    return ChatCall(
        model=asked.model,
        max_tokens=None,
        messages=messages,
        prefill=prefill,
        tools=_tools(fields),
        wish=_wish(asked.reasoning_options(), fields),
        steps=asked.steps(fields, guide=_format(fields)),
        sampling=asked.sampling(),
        stop=asked.stop_sequences,
        stream=asked.stream,
        **own,
    )


def _format(fields: Fields) -> Named | None:
    """Read the answer's format from ``output_config``, or from its older name."""
    config = fields.child("output_config")
    found = None if config is None else config.child("format")
    older = fields.child("output_format")
    if found is not None and older is not None:
        raise RequestError(
            "'output_format' is the older name of 'output_config.format': send one of them.",
            "output_format",
        )
    form = found or older
    if form is None:
        return None
    if (kind := form.required_text("type")) != "json_schema":
        raise UnsupportedParameter(
            f"Unsupported format: {quoted(kind)}. Only 'json_schema' is known.", form.path("type")
        )
    return form.path("schema"), schema_guide(form)


def _clears_nothing(value: Any, _: Fields) -> bool:
    """Return whether edits of the conversation have no effect on prompts."""
    if not isinstance(value, dict):
        return False
    edits = value.get("edits", [])
    return isinstance(edits, list) and all(map(_is_harmless_edit, edits))


def _is_harmless_edit(edit: Any) -> bool:
    if not isinstance(edit, dict) or not isinstance(kind := edit.get("type"), str):
        return False
    if kind.startswith(_CLEAR_THINKING):
        return edit.get("keep") in ("all", {"type": "all"})
    trigger = edit.get("trigger") or _USUAL_TRIGGER
    if not kind.startswith(_LATE_EDITS) or not isinstance(trigger, dict):
        return False
    at = trigger.get("value")
    return trigger.get("type") == "input_tokens" and isinstance(at, int) and at >= CONTEXT_MAX


# As in ``unsupported``: parameters that would change the answer, with values without effect.
_REFUSED: dict[str, sampling.Harmless] = {
    **sampling.UNSUPPORTED,
    **sampling.UNSUPPORTED_TOKENS,
    "mcp_servers": sampling.empty,
    "context_management": _clears_nothing,
    "container": sampling.never,
}


def _tools(fields: Fields) -> ToolOptions:
    """Read the client-side tools of ``tools`` and ``tool_choice``."""
    offer = read_definitions(fields, "custom", "input_schema", default="custom")
    choice = fields.child("tool_choice")
    kind = None if choice is None else choice.choice("type", "auto", "any", "tool", "none")
    if choice is None or kind is None:
        return offer
    parallel = not choice.flag("disable_parallel_tool_use")
    if kind == "none":
        return replace(NO_TOOLS, left_out=offer.left_out)
    named = choice.required_text("name") if kind == "tool" else None
    if kind != "auto":
        check_offered(offer.given, "tool_choice")
    if named is not None:
        check_known(named, offer.given, choice.path("name"))
    return replace(offer, forced=kind != "auto", named=named, parallel=parallel)


def _wish(own: ReasoningOptions, fields: Fields) -> ReasoningOptions:
    """Read the reasoning options; without any there is no reasoning, as in Anthropic's API."""
    config, thinking = fields.child("output_config"), fields.child("thinking")
    effort = None if config is None else config.choice("effort", *EFFORTS)
    kind = "disabled" if thinking is None else thinking.required_text("type")
    if thinking is None or kind == "disabled":
        if own.enabled is not None:
            return own
        return ReasoningOptions(enabled=False, variables=own.variables)
    if kind not in ("enabled", "adaptive"):
        raise RequestError(
            f"Invalid '{thinking.path('type')}': {quoted(kind)}. Supported values are: 'enabled', "
            "'adaptive', 'disabled'.",
            thinking.path("type"),
        )
    most = thinking.integer("budget_tokens", _AT_LEAST_ONE)
    return ReasoningOptions(enabled=True, effort=effort, max_tokens=most, variables=own.variables)


def _system(fields: Fields) -> Iterator[Message]:
    if fields.get("system") is None:
        return
    text = "".join(one for one in _texts(fields, "system") if not one.startswith(_ATTRIBUTION))
    yield {"role": "system", "content": text}


def _messages(fields: Fields) -> Iterator[Message]:
    for message in fields.objects("messages", MAX_MESSAGES):
        role = message.required_choice("role", *_ROLES)
        if message.get("content") is None:
            raise missing(message.path("content"))
        yield from _read_message(message, role)


def _read_message(message: Fields, role: str) -> Iterator[Message]:
    """Return a message as templates take it: tool results become separate messages."""
    if isinstance(message.get("content"), str):
        yield {"role": role, "content": message.get("content")}
        return
    turn, begun = _begun(role), False
    for block in _blocks(message, "content"):
        result = _read_block(block, role, turn)
        if result is None:
            begun = True
            continue
        if begun:
            yield _done(turn)
            turn, begun = _begun(role), False
        yield result
    if begun:
        yield _done(turn)


def _begun(role: str) -> Message:
    """Return a turn whose content is a list of texts and images until ``_done``."""
    return {"role": role, "content": []}


def _done(turn: Message) -> Message:
    return {**turn, "content": shown(turn["content"])}


def _blocks(fields: Fields, name: str) -> Iterator[Fields]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise wrong_type(fields.path(name), "a string or an array of content blocks", value)
    yield from fields.objects(name, MAX_MESSAGES)


def _read_block(block: Fields, role: str, turn: Message) -> Message | None:
    """Add a block to a turn, or return it as a separate message."""
    kind = block.required_text("type")
    read = _BLOCKS.get((role, kind))
    if read is None:
        raise UnsupportedParameter(
            f"Unsupported content block: {quoted(kind)} in a message of the role '{role}'. This "
            f"server reads {', '.join(repr(kind) for of, kind in _BLOCKS if of == role)} there.",
            block.path("type"),
        )
    return read(block, turn)


def _text_block(block: Fields, turn: Message) -> None:
    turn["content"].append(block.any_text("text"))


def _image(block: Fields, turn: Message) -> None:
    source = block.required_child("source")
    kind = source.required_choice("type", "base64", "url")
    if kind == "url":
        turn["content"].append(image_at(source.required_text("url"), source.path("url")))
        return
    source.choice("media_type", *_MEDIA_TYPES)  # the type is read from the file
    turn["content"].append(image_file(source.required_text("data"), source.path("data")))


def _tool_use(block: Fields, turn: Message) -> None:
    given = block.child("input")
    function = {
        "name": block.required_text("name"),
        "arguments": {} if given is None else block.get("input"),
    }
    call = {"id": block.required_text("id"), "type": "function", "function": function}
    turn.setdefault("tool_calls", []).append(call)


def _tool_result(block: Fields, _: Message) -> Message:
    content = "" if block.get("content") is None else _text(block, "content")
    call_id = block.required_text("tool_use_id")
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _thoughts(block: Fields, turn: Message) -> None:
    """Join reasoning of earlier turns; the model folder decides whether it is used."""
    text = block.text("thinking")
    if text:
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text


def _hidden_thoughts(_block: Fields, _turn: Message) -> None:
    """Ignore encrypted reasoning."""


_BLOCKS: dict[tuple[str, str], Callable[[Fields, Message], Message | None]] = {
    ("user", "text"): _text_block,
    ("user", "image"): _image,
    ("user", "tool_result"): _tool_result,
    ("assistant", "text"): _text_block,
    ("assistant", "tool_use"): _tool_use,
    ("assistant", "thinking"): _thoughts,
    ("assistant", "redacted_thinking"): _hidden_thoughts,
    ("system", "text"): _text_block,
}


def _text(fields: Fields, name: str) -> str:
    """Read a string or a list of text blocks, which are joined without anything between them."""
    return "".join(_texts(fields, name))


def _texts(fields: Fields, name: str) -> Iterator[str]:
    value = fields.get(name)
    if isinstance(value, str):
        yield value
        return
    for block in _blocks(fields, name):
        kind = block.required_text("type")
        if kind != "text":
            raise UnsupportedParameter(
                f"Unsupported content block: {quoted(kind)}. This server reads text only.",
                block.path("type"),
            )
        yield block.any_text("text")
