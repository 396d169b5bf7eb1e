"""Ollama's chat and generate bodies: their models, and the calls that are read from them.

Unsupported parameters that would change the answer are in ``_REFUSED`` and ``_OPTIONS_REFUSED``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, SkipValidation

from rkserve.api.common.answer import AnyCall
from rkserve.api.common.calls import ChatCall, CompletionCall, read_prompt
from rkserve.api.common.parameters import (
    AnyObject,
    DrawParameters,
    Effort,
    ModelName,
    OpenModel,
    OwnParameters,
    ReasoningParameters,
    SamplingParameters,
    StopSequences,
)
from rkserve.api.json.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Fields,
    parse_object,
    wrong_type,
)
from rkserve.api.parsing import sampling
from rkserve.api.parsing.answer_parser import EFFORTS, ReasoningOptions
from rkserve.api.parsing.sampling import JSON_OBJECT, Named, schema_guide
from rkserve.api.parsing.tool_choice import read_tools
from rkserve.api.prompting.conversation import Message, PendingToolCalls
from rkserve.api.prompting.images import ImagePart, image_file, shown
from rkserve.core.errors import RequestError, UnsupportedParameter

_TAG = ":latest"  # the tag that Ollama's clients append to names without one


class OllamaOptions(SamplingParameters, DrawParameters):
    """Sampling values in Ollama's form."""

    num_predict: int | None = None
    stop: StopSequences = ()


class OllamaRequest(OwnParameters, ReasoningParameters):
    """Keys of both /api/chat and /api/generate."""

    model: ModelName = Field(description="A model or an adapter.")
    stream: bool = Field(True, description="The default is true.")
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    format: SkipValidation[Literal["", "json"] | AnyObject | None] = None
    think: SkipValidation[bool | Effort | None] = None
    keep_alive: SkipValidation[str | float | None] = Field(None, description="0 is refused.")

    def call(self, fields: Fields) -> dict[str, Any]:
        """Return the values by the names of ``GenerationCall``; ``fields`` is the body."""
        options = self.options
        sampling.refuse_unsupported(fields.child("options") or Fields({}), _OPTIONS_REFUSED)
        limit, draws = options.num_predict, options.draws()
        # As in Ollama, a negative seed means none; clients send it as the default.
        seed = None if draws.seed is not None and draws.seed < 0 else draws.seed
        return {
            "model": without_tag(self.model),
            "steps": replace(draws, seed=seed, guide=_format(fields)),
            "max_tokens": limit if limit is not None and limit > 0 else None,
            "sampling": options.sampling(),
            "stop": options.stop,
            "stream": self.stream,
            **self.own(),
        }

    def thinking(self, fields: Fields) -> ReasoningOptions:
        """Return the reasoning options of ``think`` or rkserve's own keys."""
        own, think = self.reasoning_options(), self.think
        if think is None:
            return own
        if isinstance(think, bool):
            return replace(own, enabled=think)
        return replace(own, enabled=True, effort=fields.choice("think", *EFFORTS))


class OllamaChatRequest(OllamaRequest):
    """The body of POST /api/chat."""

    messages: SkipValidation[list[AnyObject] | None] = Field(None, description="None: load it.")
    tools: SkipValidation[Annotated[list[AnyObject], Field(max_length=MAX_TOOLS)] | None] = None


class OllamaGenerateRequest(OllamaRequest):
    """The body of POST /api/generate."""

    prompt: SkipValidation[str | None] = Field(None, description="None: the model is loaded.")
    system: str | None = None
    raw: bool = False


def parse_chat(body: bytes) -> ChatCall:
    """Read the body of POST /api/chat. Raises ``RequestError``."""
    values = parse_object(body)
    asked, fields = OllamaChatRequest.read(values), Fields(values)
    messages = tuple(_messages(fields))
    sampling.refuse_unsupported(fields, _REFUSED)
    last = messages[-1]
    return ChatCall(
        messages=messages,
        prefill=last["role"] == "assistant" and not last.get("tool_calls"),
        tools=read_tools(fields),
        wish=asked.thinking(fields),
        **asked.call(fields),
    )


def parse_generate(body: bytes) -> AnyCall:
    """Read the body of POST /api/generate: a prompt for the model's template, or a raw one.

    Raises ``RequestError``.
    """
    values = parse_object(body)
    asked, fields = OllamaGenerateRequest.read(values), Fields(values)
    prompt = fields.required_text("prompt")
    sampling.refuse_unsupported(fields, _REFUSED)
    images = _images(fields)
    if asked.raw:
        if asked.system:
            raise RequestError("A 'raw' prompt is taken as it is, without 'system'.", "system")
        if images:
            raise UnsupportedParameter(
                "Unsupported parameter: 'images' have a place in prompts of the model's template, "
                "and none in a 'raw' one.",
                "images",
            )
        return CompletionCall(prompts=(read_prompt(prompt, "prompt"),), **asked.call(fields))
    messages: list[Message] = [{"role": "user", "content": shown([*images, prompt])}]
    if asked.system:
        messages.insert(0, {"role": "system", "content": asked.system})
    return ChatCall(messages=tuple(messages), wish=asked.thinking(fields), **asked.call(fields))


def parse_load(body: bytes, what: str) -> str | None:
    """Return the model that a call without ``what`` only loads; None if it is present.

    Raises ``RequestError``: also for an unload, which only the operator may request.
    """
    values = parse_object(body)
    if values.get(what) not in (None, "", []):
        return None
    model, keep_alive = ModelRequest.read(values).model, values.get("keep_alive")
    if keep_alive in (0, "0", "0s") and keep_alive is not False:
        raise UnsupportedParameter(
            "Unsupported parameter: a model is not unloaded by 'keep_alive', but by the operator: "
            "POST /v1/models/unload.",
            "keep_alive",
        )
    return without_tag(model)


class ModelRequest(OpenModel):
    """A body that names a model."""

    model: ModelName = Field(description="A model or an adapter.")


def without_tag(name: str) -> str:
    """Return the name of a model in Ollama's form."""
    return name.removesuffix(_TAG) or name


def _format(fields: Fields) -> Named | None:
    """Read ``format``: a word, or a schema."""
    value = fields.get("format")
    if isinstance(value, dict):
        return "format", schema_guide(fields, "format")
    word = fields.choice("format", "", "json")
    return ("format", JSON_OBJECT) if word else None


# As in ``unsupported``: parameters that would change the answer, with values without effect.
_REFUSED: dict[str, sampling.Harmless] = {
    **sampling.UNSUPPORTED,
    **sampling.UNSUPPORTED_TOKENS,
    "suffix": sampling.empty,
    "template": sampling.empty,
    "context": sampling.empty,
    "logprobs": sampling.only(False),
    "top_logprobs": sampling.only(0),
}
_OPTIONS_REFUSED: dict[str, sampling.Harmless] = {
    "typical_p": sampling.only(1),
    "tfs_z": sampling.only(1),
}


def _messages(fields: Fields) -> Iterator[Message]:
    pairing = PendingToolCalls(orphans=True)
    for fields_of in fields.objects("messages", MAX_MESSAGES):
        role = fields_of.required_choice("role", "system", "user", "assistant", "tool")
        images = _images(fields_of)
        if images and role != "user":
            raise UnsupportedParameter(
                "Unsupported message: only the user shows images here.", fields_of.path("images")
            )
        content = fields_of.text("content") or ""
        message: Message = {"role": role, "content": shown([*images, content])}
        if role == "tool":
            message |= _result(fields_of)
        if role == "assistant" and fields_of.get("tool_calls") not in (None, []):
            message["tool_calls"] = list(_tool_calls(fields_of))
        if role == "assistant" and (thoughts := fields_of.text("thinking")):
            message["reasoning_content"] = thoughts
        yield pairing.add(message, fields_of)


def _images(fields: Fields) -> list[ImagePart]:
    """Read a message's images, base64 files that precede its text as in Ollama."""
    if fields.get("images") in (None, []):
        return []
    path, found = fields.path("images"), list[ImagePart]()
    for index, value in enumerate(fields.items("images")):
        if not isinstance(value, str):
            raise wrong_type(f"{path}[{index}]", "a string", value)
        found.append(image_file(value, f"{path}[{index}]"))
    return found


def _result(message: Fields) -> Message:
    """Return the keys by which a tool result names its call, if the client sent them."""
    name = message.text("tool_name") or message.text("name")
    result = {"tool_call_id": message.text("tool_call_id"), "name": name}
    return {key: value for key, value in result.items() if value}


def _tool_calls(message: Fields) -> Iterator[Message]:
    for call in message.objects("tool_calls"):
        function = call.required_child("function")
        given = function.child("arguments")
        yield {
            **({"id": given_id} if (given_id := call.text("id")) else {}),
            "type": "function",
            "function": {
                "name": function.required_text("name"),
                "arguments": {} if given is None else function.get("arguments"),
            },
        }
