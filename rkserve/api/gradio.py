"""Gradio's HTTP API, as far as chat clients use it: functions, calls and events.

``gradio_client`` reads the configuration and the signatures, posts a call with positional
arguments, and reads its outputs from an event stream in another request. The functions are
``/chat``, and the two of the vendor's ``gradio_server.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field, SkipValidation
from typing_extensions import TypedDict

from rkserve.api.common import output
from rkserve.api.common.answer import AnswerOrigin, AnyCall, Dialect, DialectAnswer
from rkserve.api.common.calls import parse_chat
from rkserve.api.common.output import error_object
from rkserve.api.common.parameters import OpenModel
from rkserve.api.json.fields import Fields, JsonObject, Range, as_fields, parse_object, wrong_type
from rkserve.api.json.schemas import Count, RequestModel
from rkserve.api.parsing.tools.base import Part, Retraction, TextPart
from rkserve.core.errors import RequestError, RouteNotFound
from rkserve.core.messages import Delta, Finished, Paused

PREFIX = "/gradio_api"
# The release of this protocol, by which clients choose their code.
GRADIO = "5.49.1"
# The client closes its stream by itself once nothing is pending: no race with a close message.
PROTOCOL = "sse_v2.1"
MAX_SESSION_CHARS = 128
SessionHash = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_CHARS)]
MAX_TOKENS = 1_000_000  # more than any context; an infinity is no number of tokens
_USER, _ASSISTANT = "user", "assistant"

_STRING: JsonObject = {"type": "string"}
_MESSAGES: JsonObject = {"type": "array", "items": {"type": "object"}}
_WHOLE: JsonObject = {"type": "number"}


@dataclass(frozen=True)
class GradioParameter:
    """One input or output of a function. ``default`` is None where a value is required."""

    name: str
    label: str
    component: str
    schema: JsonObject
    python: str
    default: Any = None
    example: Any = "Hello!"


@dataclass(frozen=True)
class GradioFunction:
    """One function of the API; its number in the configuration is its index in ``FUNCTIONS``."""

    name: str
    inputs: tuple[GradioParameter, ...]
    outputs: tuple[GradioParameter, ...]


_MESSAGE = GradioParameter("message", "Message", "Textbox", _STRING, "str")
_USER_MESSAGE = GradioParameter("user_message", "Message", "Textbox", _STRING, "str")
_HISTORY = GradioParameter("history", "History", "JSON", _MESSAGES, "list[dict]", [], [])
_RESPONSE = GradioParameter("response", "Response", "Textbox", _STRING, "str")
CHAT = GradioFunction(
    "chat",
    (
        _MESSAGE,
        _HISTORY,
        GradioParameter("system_prompt", "System prompt", "Textbox", _STRING, "str", "", ""),
        GradioParameter("model", "Model", "Textbox", _STRING, "str", "", ""),
        GradioParameter("max_tokens", "Max tokens (0: no limit)", "Number", _WHOLE, "float", 0, 0),
    ),
    (_RESPONSE,),
)
# The vendor's client calls these two in turn, with the history that the one before returned.
TAKE_INPUT = GradioFunction("get_user_input", (_USER_MESSAGE, _HISTORY), (_RESPONSE, _HISTORY))
ANSWER_HISTORY = GradioFunction("get_RKLLM_output", (_HISTORY,), (_HISTORY,))
FUNCTIONS = (CHAT, TAKE_INPUT, ANSWER_HISTORY)


class GradioCallRequest(OpenModel):
    """`data` are the arguments in order; those left out at the end take their defaults."""

    data: list[Any]
    session_hash: SkipValidation[str | None] = None


class GradioJoinRequest(OpenModel):
    """A call of a session."""

    data: list[Any]
    fn_index: int = Field(ge=0, le=len(FUNCTIONS) - 1)
    session_hash: SessionHash


class SessionQuery(RequestModel):
    """The query of a session's events."""

    session_hash: SessionHash = Field(description="The session of the calls.")


class GradioCancelRequest(OpenModel):
    """A call to end."""

    event_id: Annotated[str, Field(min_length=1)]
    session_hash: SkipValidation[str | None] = None
    fn_index: SkipValidation[Count | None] = None


class GradioEvent(TypedDict):
    """A call that waits for its events to be read."""

    event_id: str


class GradioConfig(TypedDict):
    """The configuration that Gradio's clients read."""

    version: str
    api_prefix: str
    protocol: str
    title: str
    mode: str
    space_id: None
    is_space: bool
    auth_required: bool
    connect_heartbeat: bool
    enable_queue: bool
    show_error: bool
    max_file_size: None
    components: list[JsonObject]
    dependencies: list[JsonObject]


class GradioInfo(TypedDict):
    """The arguments and outputs of each function."""

    named_endpoints: JsonObject
    unnamed_endpoints: JsonObject


class GradioCancelled(TypedDict):
    """A call that was there and has ended, or was not there."""

    success: bool


def configuration(title: str) -> GradioConfig:
    """Return the body of ``GET /config``: every parameter as a component of its own."""
    components: list[JsonObject] = []

    def numbered(parameters: Sequence[GradioParameter]) -> list[int]:
        numbers = range(len(components) + 1, len(components) + len(parameters) + 1)
        components.extend(map(_component, numbers, parameters))
        return list(numbers)

    dependencies = [
        {
            "id": number,
            "api_name": one.name,
            "inputs": numbered(one.inputs),
            "outputs": numbered(one.outputs),
            "types": {"generator": one != TAKE_INPUT, "cancel": False},
            "targets": [],
            "cancels": [],
            "backend_fn": True,
            "js": None,
            "queue": True,
            "batch": False,
            "show_api": True,
            "api_visibility": "public",
        }
        for number, one in enumerate(FUNCTIONS)
    ]
    return {
        "version": GRADIO,
        "api_prefix": PREFIX,
        "protocol": PROTOCOL,
        "title": title,
        "mode": "blocks",
        "space_id": None,
        "is_space": False,
        "auth_required": False,
        "connect_heartbeat": False,
        "enable_queue": True,
        "show_error": True,
        "max_file_size": None,
        "components": components,
        "dependencies": dependencies,
    }


def _component(number: int, of: GradioParameter) -> JsonObject:
    kind = of.component.lower()
    return {
        "id": number,
        "type": kind,
        "props": {"name": kind, "label": of.label},
        "skip_api": False,
        "api_info": of.schema,
    }


def signatures() -> GradioInfo:
    """Return the body of ``GET /gradio_api/info``."""
    named = {
        f"/{one.name}": {
            "parameters": [_signature(parameter) for parameter in one.inputs],
            "returns": [_return(parameter) for parameter in one.outputs],
            "show_api": True,
            "api_visibility": "public",
        }
        for one in FUNCTIONS
    }
    return {"named_endpoints": named, "unnamed_endpoints": {}}


def _return(of: GradioParameter) -> JsonObject:
    return {
        "label": of.label,
        "type": of.schema,
        "python_type": {"type": of.python, "description": ""},
        "component": of.component,
    }


def _signature(of: GradioParameter) -> JsonObject:
    return {
        **_return(of),
        "parameter_name": of.name,
        "parameter_has_default": of.default is not None,
        "parameter_default": of.default,
        "example_input": of.example,
    }


# -- calls ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradioCall:
    """A posted call. ``data`` holds its positional arguments."""

    function: GradioFunction
    data: tuple[Any, ...]
    session: str = ""


def read_join(body: bytes) -> GradioCall:
    """Read the body of ``POST /gradio_api/queue/join``. Raises ``RequestError``."""
    asked = GradioJoinRequest.read(parse_object(body))
    function = FUNCTIONS[asked.fn_index]
    return GradioCall(function, _data(asked.data, function), asked.session_hash)


def read_call(name: str, body: bytes) -> GradioCall:
    """Read the body of ``POST /gradio_api/call/{name}``.

    Raises:
        RouteNotFound: there is no such function.
        RequestError: with the ``param`` at fault.
    """
    function = next((one for one in FUNCTIONS if one.name == name), None)
    if function is None:
        known = ", ".join(f"/{one.name}" for one in FUNCTIONS)
        raise RouteNotFound(f"No function of that name; there are {known}.")
    return GradioCall(function, _data(GradioCallRequest.read(parse_object(body)).data, function))


def check_session(session: str) -> str:
    """Return a session hash. Raises ``RequestError``."""
    if not 1 <= len(session) <= MAX_SESSION_CHARS:
        raise RequestError(
            f"Invalid 'session_hash': it has 1 to {MAX_SESSION_CHARS} characters.", "session_hash"
        )
    return session


def _data(given: list[Any], function: GradioFunction) -> tuple[Any, ...]:
    """Read the arguments; missing ones at the end take their defaults."""
    wanted = function.inputs
    if len(given) > len(wanted):
        raise RequestError(
            f"Invalid 'data': /{function.name} takes at most {len(wanted)} arguments, but got "
            f"{len(given)}.",
            "data",
        )
    found = []
    for place, parameter in enumerate(wanted):
        value = given[place] if place < len(given) else None
        if value is None and parameter.default is None:
            raise RequestError(
                f"Missing argument '{parameter.name}' of /{function.name}.", f"data[{place}]"
            )
        found.append(parameter.default if value is None else value)
    return tuple(found)


def immediate(call: GradioCall) -> list[Any] | None:
    """Return the outputs of a call that needs no board; None where an answer is generated."""
    if call.function != TAKE_INPUT:
        return None
    message, history = call.data
    return ["", [*_history(history, 1), {"role": _USER, "content": _text(message, "data[0]")}]]


def chat_body(call: GradioCall, default_model: str) -> JsonObject:
    """Return a call as the body of ``POST /v1/chat/completions``. Raises ``RequestError``."""
    if call.function == ANSWER_HISTORY:
        messages = _history(call.data[0], 0)
        return {"model": default_model, "stream": True, "messages": messages}
    message, history, system, model, most = call.data
    messages = [*_history(history, 1), {"role": _USER, "content": _text(message, "data[0]")}]
    if _text(system, "data[2]"):
        messages.insert(0, {"role": "system", "content": system})
    body = {"model": _text(model, "data[3]") or default_model, "stream": True, "messages": messages}
    # Gradio's number field posts 0.0 and 64.0.
    limit = Fields({"max_tokens": most}, "data[4]").number("max_tokens", Range(0, MAX_TOKENS))
    return {**body, "max_tokens": int(limit)} if limit else body


def _text(value: object, path: str) -> str:
    """Return a text, also that of a multimodal text box or of a part of a message."""
    if isinstance(value, dict):
        if value.get("files") or value.get("file"):
            raise RequestError(
                f"Unsupported '{path}': files are not taken here; send images to "
                "/v1/chat/completions.",
                path,
            )
        value = value.get("text")
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    return value


def _history(value: object, place: int) -> list[JsonObject]:
    """Return a chat history as messages; Gradio had pairs of texts before it had messages."""
    path = f"data[{place}]"
    if not isinstance(value, list):
        raise wrong_type(path, "an array of messages", value)
    found: list[JsonObject] = []
    for index, entry in enumerate(value):
        if isinstance(entry, list):
            found += _pair(entry, f"{path}[{index}]")
        else:
            found.append(_message(as_fields(entry, f"{path}[{index}]")))
    return found


def _pair(entry: list[Any], path: str) -> list[JsonObject]:
    if len(entry) != len((_USER, _ASSISTANT)):
        raise RequestError(f"Invalid '{path}': a pair has two texts.", path)
    both = zip((_USER, _ASSISTANT), entry, strict=True)
    return [{"role": role, "content": _text(text, path)} for role, text in both if text is not None]


def _message(fields: Fields) -> JsonObject:
    """Return a message without the keys of Gradio's chatbot, such as ``metadata``."""
    content, path = fields.get("content"), fields.path("content")
    if isinstance(content, list):
        parts = [_text(part, f"{path}[{index}]") for index, part in enumerate(content)]
        content = " ".join(parts)
    return {"role": fields.required_text("role"), "content": _text(content or "", path)}


# -- events ---------------------------------------------------------------------------------------


class CallFraming:
    """Named events of one call's stream; each has the whole output."""

    ping = output.event("heartbeat", None)

    def opening(self) -> bytes:
        """Return the first event; here that is the first output's."""
        return b""

    def generating(self, value: Any, edit: list[Any]) -> bytes:  # noqa: ARG002 - values are whole
        """Return the event of an output so far, or of the edit from the last one."""
        return output.event("generating", [value])

    def completed(self, data: list[Any]) -> bytes:
        """Return the event with all outputs."""
        return output.event("complete", data)

    def failed(self, exc: BaseException) -> bytes:
        """Return the event of an error."""
        return output.event("error", error_message(exc))


class QueueFraming(CallFraming):
    """Messages of a session's stream: outputs after the first are sent as edits."""

    ping = output.data({"msg": "heartbeat"})

    def __init__(self, event_id: str) -> None:
        self._id = event_id
        self._first = True

    def opening(self) -> bytes:
        return self._message("process_starts", eta=None)

    def generating(self, value: Any, edit: list[Any]) -> bytes:
        """Return the next output: whole the first time, as an edit from then on."""
        data, self._first = [value] if self._first else [[edit]], False
        output = {"data": data, "is_generating": True}
        return self._message("process_generating", output=output, success=True)

    def completed(self, data: list[Any]) -> bytes:
        """Return the message with all outputs."""
        output = {"data": data, "is_generating": False}
        return self._message("process_completed", output=output, success=True)

    def failed(self, exc: BaseException) -> bytes:
        output = {"error": error_message(exc)}
        return self._message("process_completed", output=output, success=False)

    def _message(self, name: str, **rest: Any) -> bytes:
        return output.data({"msg": name, "event_id": self._id, **rest})


def error_message(exc: BaseException) -> str:
    """Return the message of an error as Gradio's clients raise it."""
    return str(error_object(exc)[2]["error"]["message"])


class _Output(DialectAnswer):
    """An answer as the one output of a function: a text, or a history that ends with it."""

    def __init__(  # noqa: PLR0917 - the first four are those of all answers
        self,
        call: AnyCall,
        answer_id: str,
        created: int,
        stamp: AnswerOrigin,
        framing: CallFraming,
        history: list[JsonObject] | None,
    ) -> None:
        """``history`` is what the answer ends, if that is the output."""
        super().__init__(call, answer_id, created, stamp)
        self._framing, self._history = framing, history
        self._path = [] if history is None else [len(history), "content"]

    def opening(self, _index: int) -> bytes:
        return self._framing.opening()

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._events_of(self.add(index, delta))

    def paused(self, _index: int, _paused: Paused) -> bytes:
        """Return a heartbeat: the protocol has no event for a pause."""
        return self._framing.ping

    def finish(self, index: int, finished: Finished) -> bytes:
        return self._events_of(self.end(index, finished))

    def closing(self) -> bytes:
        """Return the event with the whole output."""
        return self._framing.completed([self._value()])

    def broken(self, exc: BaseException) -> bytes:
        return self._framing.failed(exc)

    def whole(self) -> JsonObject:
        return {"data": [self._value()]}

    def _value(self) -> Any:
        text = self.speech(0).words
        if self._history is None:
            return text
        return [*self._history, {"role": _ASSISTANT, "content": text}]

    def _events_of(self, parts: list[Part]) -> bytes:
        """Return one event for the text among the parts; reasoning is no output."""
        if any(isinstance(part, Retraction) for part in parts):
            edit = ["replace", self._path, self.speech(0).words]
            return self._framing.generating(self._value(), edit)
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        if not text:
            return b""
        return self._framing.generating(self._value(), ["append", self._path, text])


def dialect_of(call: GradioCall, body: JsonObject, framing: CallFraming) -> Dialect:
    """Return the dialect in which one call is answered."""
    history = body["messages"] if call.function == ANSWER_HISTORY else None

    answer = partial(_Output, framing=framing, history=history)
    return Dialect(parse_chat, answer, "gradio-", lambda _call: framing.ping, framing.failed)
