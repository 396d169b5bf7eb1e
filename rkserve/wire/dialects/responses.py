"""Bodies of OpenAI's Responses API as chat calls; it knows that API's words and no models.

Every response stands for itself: what was said before comes with the request. What items of a
conversation can be read is in ``_ITEMS``, and what is refused in ``_REFUSED``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rkserve.errors import RequestError, UnsupportedParameter
from rkserve.wire import refusals
from rkserve.wire.conversation import Message
from rkserve.wire.dialects.arguments import as_object
from rkserve.wire.dialects.offered import offered
from rkserve.wire.fields import Fields, Range, as_fields, missing, quoted, wrong_type
from rkserve.wire.jsonbody import JsonObject, parse_object
from rkserve.wire.limits import MAX_TOOLS
from rkserve.wire.openai import ChatCall, read_model, read_shared
from rkserve.wire.thinking import EFFORTS, Wish, read_wish
from rkserve.wire.tooling import NO_TOOLS, Tools

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


@dataclass(frozen=True)
class ResponseCall(ChatCall):
    """A call of /v1/responses. ``echo`` is what its answer repeats of it."""

    echo: JsonObject = field(default_factory=dict)


def parse_response(body: bytes) -> ResponseCall:
    """Read the body of POST /v1/responses. Raises ``RequestError``."""
    fields = Fields(parse_object(body))
    model = read_model(fields)
    instructions = fields.text("instructions")
    messages = _input(fields)
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    refusals.refuse(fields, _REFUSED)
    shared = read_shared(fields)
    tools, limit = _tools(fields), fields.integer("max_output_tokens", Range(1))
    effort = None if (reasoning := fields.child("reasoning")) is None else _effort(reasoning)
    echo = {
        "instructions": instructions,
        "max_output_tokens": limit,
        "metadata": _metadata(fields),
        "temperature": shared["sampling"].get("temperature"),
        "top_p": shared["sampling"].get("top_p"),
        "parallel_tool_calls": tools.parallel,
        "tool_choice": _told_choice(tools),
        "tools": [_told(tool) for tool in tools.given],
        "reasoning": {"effort": effort, "summary": None},
    }
    return ResponseCall(
        model=model,
        max_tokens=limit,
        messages=tuple(messages),
        tools=tools,
        wish=_wish(fields, effort),
        echo=echo,
        **shared,
    )


def _never(_value: Any, _: Fields) -> bool:
    return False


def _off(value: Any, _: Fields) -> bool:
    return value is False


def _plain(value: Any, _: Fields) -> bool:
    form = value.get("format") if isinstance(value, dict) else None
    # The rest of it ("verbosity") is a hint.
    return isinstance(value, dict) and (
        form is None or (isinstance(form, dict) and form.get("type") == "text")
    )


# As ``refusals``: what would change the answer and cannot be honoured, with what asks for nothing.
_REFUSED: dict[str, refusals.Harmless] = {
    "previous_response_id": _never,
    "conversation": _never,
    "prompt": _never,
    "background": _off,
    "text": _plain,
    "truncation": lambda value, _: value == "disabled",
    "top_logprobs": lambda value, _: value == 0 and not isinstance(value, bool),
}


def _metadata(fields: Fields) -> JsonObject:
    found = fields.get("metadata") or {}
    if not isinstance(found, dict) or any(not isinstance(one, str) for one in found.values()):
        raise RequestError("Invalid 'metadata': an object of strings is expected.", "metadata")
    return found


def _effort(reasoning: Fields) -> str | None:
    return reasoning.choice("effort", *EFFORTS)


def _wish(fields: Fields, effort: str | None) -> Wish:
    """What is asked of thoughts: by ``reasoning``, or by rkserve's own keys."""
    names = ("enable_thinking", "reasoning_effort", "max_reasoning_tokens", "chat_template_kwargs")
    own = {name: fields.get(name) for name in names}
    return read_wish(Fields({**own, "reasoning_effort": effort or own["reasoning_effort"]}))


# -- tools ----------------------------------------------------------------------------------------


def _tools(fields: Fields) -> Tools:
    found = fields.get("tools")
    given = [] if found in (None, []) else fields.items("tools")
    if len(given) > MAX_TOOLS:
        raise RequestError(f"Invalid 'tools': at most {MAX_TOOLS} are read.", "tools")
    tools = tuple(_tool(as_fields(one, f"tools[{at}]")) for at, one in enumerate(given))
    forced, named, offers = _choice(fields)
    if (forced or named) and not tools:
        raise RequestError("'tool_choice' asks for a call, but there are no tools.", "tool_choice")
    if named is not None and all(tool["function"]["name"] != named for tool in tools):
        raise RequestError(
            f"Invalid 'tool_choice.name': there is no tool {quoted(named)}.", "tool_choice.name"
        )
    parallel = fields.maybe_flag("parallel_tool_calls") is not False
    return Tools(tools, forced, named, parallel) if tools and offers else NO_TOOLS


def _tool(tool: Fields) -> JsonObject:
    if (kind := tool.required_text("type")) != "function":
        raise UnsupportedParameter(
            f"Unsupported tool: {quoted(kind)}. Only functions are known, which the client itself "
            "carries out.",
            tool.path("type"),
        )
    return offered(tool, "parameters")


def _choice(fields: Fields) -> tuple[bool, str | None, bool]:
    """Return whether a tool must be called, which, and whether any may be."""
    value = fields.get("tool_choice")
    if not isinstance(value, dict):
        word = fields.choice("tool_choice", "none", "auto", "required")
        return word == "required", None, word != "none"
    choice = as_fields(value, "tool_choice")
    if (kind := choice.required_text("type")) != "function":
        raise UnsupportedParameter(
            f"Unsupported 'tool_choice': {quoted(kind)}. Only 'function' is known.",
            choice.path("type"),
        )
    return True, choice.required_text("name"), True


def _told(tool: JsonObject) -> JsonObject:
    function = tool["function"]
    rest = {"name": function["name"], "parameters": function["parameters"], "strict": False}
    return {"type": "function", "description": function.get("description"), **rest}


def _told_choice(tools: Tools) -> Any:
    if tools.named is not None:
        return {"type": "function", "name": tools.named}
    return "required" if tools.forced else "auto" if tools.given else "none"


# -- what was said before -------------------------------------------------------------------------


def _input(fields: Fields) -> list[Message]:
    value = fields.get("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    turns = _Turns()
    for index, item in enumerate(fields.items("input")):
        of = as_fields(item, f"input[{index}]")
        kind = of.text("type") or "message"
        read = _ITEMS.get(kind)
        if read is None:
            raise UnsupportedParameter(
                f"Unsupported item: {quoted(kind)}. This server reads "
                f"{', '.join(repr(one) for one in _ITEMS)}.",
                of.path("type"),
            )
        read(of, turns)
    return list(turns.messages())


class _Turns:
    """Messages as templates want them: thoughts and calls are part of the assistant's turn."""

    def __init__(self) -> None:
        self._found: list[Message] = []
        self._thoughts = ""

    def message(self, role: str, content: str) -> None:
        """Somebody said that."""
        self._found.append({"role": role, "content": content, **self._thought(role)})

    def think(self, text: str) -> None:
        """The assistant thought that, before it said what follows."""
        self._thoughts += text

    def call(self, call: Message) -> None:
        """The assistant called a tool, in the turn that it had begun."""
        last = self._found[-1] if self._found else None
        if last is None or last["role"] != "assistant":
            self.message("assistant", "")
        self._found[-1].setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, content: str) -> None:
        """That came of a call."""
        self._found.append({"role": "tool", "content": content, "tool_call_id": call_id})

    def messages(self) -> Iterator[Message]:
        """All that was said."""
        yield from self._found

    def _thought(self, role: str) -> Message:
        thoughts, self._thoughts = self._thoughts, ""
        return {"reasoning_content": thoughts} if thoughts and role == "assistant" else {}


def _message(item: Fields, turns: _Turns) -> None:
    role = item.choice("role", *_ROLES)
    if role is None:
        raise missing(item.path("role"))
    turns.message(_ROLES[role], _text(item, "content"))


def _call(item: Fields, turns: _Turns) -> None:
    function = {
        "name": item.required_text("name"),
        "arguments": as_object(item.text("arguments") or ""),
    }
    call_id = item.required_text("call_id")
    turns.call({"id": call_id, "type": "function", "function": function})


def _result(item: Fields, turns: _Turns) -> None:
    turns.result(item.required_text("call_id"), _text(item, "output"))


def _reasoning(item: Fields, turns: _Turns) -> None:
    if item.get("content") not in (None, []):
        for index, part in enumerate(item.items("content")):
            turns.think(as_fields(part, f"{item.path('content')}[{index}]").text("text") or "")


_ITEMS: dict[str, Callable[[Fields, _Turns], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "reasoning": _reasoning,
}


def _text(fields: Fields, name: str) -> str:
    """Read a string or a list of parts, which are joined without anything between them."""
    value, path = fields.get(name), fields.path(name)
    if isinstance(value, str):
        return value
    if value is not None and not isinstance(value, list):
        raise wrong_type(path, "a string or an array of parts", value)
    return "".join(
        _part(as_fields(part, f"{path}[{index}]")) for index, part in enumerate(fields.items(name))
    )


def _part(part: Fields) -> str:
    kind = part.required_text("type")
    key = _TEXTS.get(kind)
    if key is None:
        raise UnsupportedParameter(
            f"Unsupported part: {quoted(kind)}. This server reads text only.", part.path("type")
        )
    if (text := part.text(key)) is None:
        raise missing(part.path(key))
    return text
