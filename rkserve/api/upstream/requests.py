"""Calls of all dialects as bodies for an upstream, and the parameters that none can honour.

The conversation is passed on as messages, so that the upstream's own template, tokenizer and
parsers apply. Each answer of a call is a request of its own.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from typing import Any

from rkserve.api.common.answer import AnyCall
from rkserve.api.common.calls import ChatCall, CompletionCall
from rkserve.api.common.parameters import TOP_K_OFF
from rkserve.api.json.fields import JsonObject, JsonText
from rkserve.api.parsing.sampling import JSON_OBJECT
from rkserve.api.parsing.tool_choice import ToolOptions
from rkserve.api.prompting.conversation import Message
from rkserve.api.prompting.images import ImagePart
from rkserve.config.board_group import UpstreamConfig
from rkserve.core.errors import UnsupportedParameter
from rkserve.core.messages import GenerateRequest
from rkserve.core.run_params import GuideKind, Sampling

CHAT_PATH, COMPLETION_PATH = "/chat/completions", "/completions"
CHARS_OF_A_TOKEN = 4  # an estimate: the upstream alone has the tokenizer
_SEEDS = 2**31  # servers take seeds below it
_OPENAI = ("temperature", "top_p", "frequency_penalty", "presence_penalty")


class Need(Enum):
    """The condition on which an upstream honours a parameter."""

    BOARD = "it is for boards only"
    EXTENSIONS = (
        "it is none of OpenAI's own parameters, and 'upstream.extensions' of its configuration "
        "does not say that it knows more"
    )
    IMAGES = "'upstream.images' of its configuration does not say that its model takes images"
    IDS = "token ids mean what they mean to the model's boards, and the upstream may have others"


def refusal(
    call: AnyCall, config: UpstreamConfig, upstream: str, *, alone: bool
) -> UnsupportedParameter | None:
    """Return the error for the first parameter that an upstream does not honour, None without one.

    ``alone``: the model has no boards, so that token IDs are the upstream's own.
    """
    met = {Need.EXTENSIONS: config.extensions, Need.IMAGES: config.images, Need.IDS: alone}
    for name, need in _needs(call):
        if not met.get(need, False):
            return UnsupportedParameter(
                f"Unsupported parameter: '{name}' cannot be honoured by the upstream {upstream}: "
                f"{need.value}.",
                name,
            )
    return None


def _needs(call: AnyCall) -> Iterator[tuple[str, Need]]:
    """Yield the parameters of a call that not every upstream honours."""
    steps, sampling = call.steps, call.sampling
    asked = {
        "pause_on": (bool(call.pause_on), Need.BOARD),
        "native_pause": (call.native_pause, Need.BOARD),
        "use_cache": (call.use_cache is not None, Need.BOARD),
        "return_token_ids": (call.token_ids, Need.BOARD),
        "return_tokens_as_token_ids": (call.tokens_as_ids, Need.BOARD),
        "skip_special_tokens": (call.special_tokens, Need.BOARD),
        "include_stop_str_in_output": (call.include_stop, Need.BOARD),
        "stop_token_ids": (bool(call.stop_ids), Need.BOARD),
        "cross_attention": (call.encoder is not None, Need.BOARD),
        "logprobs": (steps.top_logprobs is not None, Need.BOARD),
        "mirostat": (bool(sampling.get("mirostat")), Need.BOARD),
        "cache_salt": (bool(call.salt), Need.EXTENSIONS),
        "logit_bias": (bool(steps.logit_bias), Need.IDS),
        "top_k": ("top_k" in sampling, Need.EXTENSIONS),
        "repeat_penalty": ("repeat_penalty" in sampling, Need.EXTENSIONS),
        "min_p": (steps.min_p > 0, Need.EXTENSIONS),
        "ignore_eos": (steps.ignore_eos, Need.EXTENSIONS),
        "min_tokens": (steps.min_tokens > 0, Need.EXTENSIONS),
    }
    yield from ((name, need) for name, (given, need) in asked.items() if given)
    if steps.guide is not None and steps.guide[1].kind is not GuideKind.JSON_SCHEMA:
        yield steps.guide[0], Need.BOARD
    yield from _chat_needs(call) if isinstance(call, ChatCall) else _completion_needs(call)


def _chat_needs(call: ChatCall) -> Iterator[tuple[str, Need]]:
    if call.images:
        yield call.images[0].path, Need.IMAGES
    if call.wish.max_tokens is not None:
        yield "max_reasoning_tokens", Need.BOARD
    if call.wish.variables and call.wish.effort is None:
        yield "chat_template_kwargs", Need.EXTENSIONS
    if call.prefill:
        yield "continue_final_message", Need.EXTENSIONS


def _completion_needs(call: CompletionCall) -> Iterator[tuple[str, Need]]:
    asked = {
        "prompt_embeds": call.embedded,
        "echo": call.echo,
        "best_of": call.ranked,
        "prompt_logprobs": call.prompt_top is not None,
    }
    yield from ((name, Need.BOARD) for name, given in asked.items() if given)
    if any(isinstance(prompt, tuple) for prompt in call.prompts):
        yield call.prompt_param, Need.IDS


def request(
    call: AnyCall, index: int, config: UpstreamConfig, model: str
) -> tuple[str, JsonObject]:
    """Return the path behind the upstream's URL and the body for one of a call's answers.

    ``index`` is that of the choice, and ``model`` the model's name at the upstream.
    """
    body: JsonObject = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **_shared(call, index % call.tries, config),
    }
    if isinstance(call, ChatCall):
        return CHAT_PATH, {**body, **_chat(call, config)}
    prompt = call.prompts[index // call.tries]
    return COMPLETION_PATH, {
        **body,
        "prompt": list(prompt) if isinstance(prompt, tuple) else prompt,
    }


def generations(
    call: AnyCall, model: str, completion: str, *, context_len: int, session: str
) -> list[GenerateRequest]:
    """Return the generations of a call for a model that only upstreams have, without prompts.

    The number of the prompt's tokens is an estimate from its characters.
    """
    names = {field.name for field in fields(Sampling)}
    sampling = Sampling(**{key: value for key, value in call.sampling.items() if key in names})
    return [
        GenerateRequest(
            request_id=f"{completion}/{index}",
            model=model,
            prompt_ids=(),
            prompt_text="",
            max_tokens=context_len if call.max_tokens is None else call.max_tokens,
            sampling=sampling,
            sampling_asked=tuple(call.sampling),
            stop=call.stop,
            salt=call.salt,
            session=session,
            counted=max(1, _size(call, index)),
        )
        for index in range(call.choices)
    ]


def _size(call: AnyCall, index: int) -> int:
    """Return the expected number of tokens of a choice's prompt."""
    if isinstance(call, CompletionCall):
        prompt = call.prompts[index // call.tries]
        if isinstance(prompt, tuple):
            return len(prompt)
        return len(prompt) // CHARS_OF_A_TOKEN if isinstance(prompt, str) else prompt.rows
    texts = (message.get("content") or "" for message in call.messages)
    parts = (part for text in texts for part in ([text] if isinstance(text, str) else text))
    return sum(len(part) for part in parts if isinstance(part, str)) // CHARS_OF_A_TOKEN


def _shared(call: AnyCall, choice: int, config: UpstreamConfig) -> JsonObject:
    """Return the parameters that chats and completions have in common, those that are set."""
    steps = call.steps
    given: JsonObject = {name: call.sampling.get(name) for name in _OPENAI}
    given |= {
        "max_tokens": call.max_tokens,
        "stop": list(call.stop) or None,
        # Choices are requests of their own, which one seed would make alike.
        "seed": None if steps.seed is None else (steps.seed + choice) % _SEEDS,
        "logit_bias": {str(token_id): bias for token_id, bias in steps.logit_bias} or None,
        "response_format": _response_format(call),
    }
    if config.extensions:
        given |= _extensions(call)
    return {name: value for name, value in given.items() if value is not None}


def _extensions(call: AnyCall) -> JsonObject:
    steps, penalty = call.steps, call.sampling.get("repeat_penalty")
    top_k = call.sampling.get("top_k")
    return {
        "top_k": -1 if top_k == TOP_K_OFF else top_k,
        "repetition_penalty": penalty,
        "repeat_penalty": penalty,  # as llama.cpp calls it
        "min_p": steps.min_p or None,
        "ignore_eos": steps.ignore_eos or None,
        "min_tokens": steps.min_tokens or None,
        "cache_salt": call.salt or None,
    }


def _response_format(call: AnyCall) -> JsonObject | None:
    """Return a JSON schema, by whichever key it came, in OpenAI's form."""
    if call.steps.guide is None:
        return None
    _, guide = call.steps.guide
    if guide == JSON_OBJECT:
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": json.loads(guide.text), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _chat(call: ChatCall, config: UpstreamConfig) -> JsonObject:
    thoughts = config.extensions  # OpenAI's own messages have no reasoning
    body: JsonObject = {
        "messages": [_message(message, thoughts=thoughts) for message in call.messages]
    }
    if call.tools.given:
        body |= _tools(call.tools)
    if call.wish.effort is not None:
        body["reasoning_effort"] = call.wish.effort
    if config.extensions and call.wish.variables:
        body["chat_template_kwargs"] = call.wish.variables
    if call.prefill:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def _tools(tools: ToolOptions) -> JsonObject:
    choice: Any = "required" if tools.forced else "auto"
    if tools.forced and tools.named is not None:
        choice = {"type": "function", "function": {"name": tools.named}}
    body: JsonObject = {
        "tools": [_tool(tool, tools) for tool in tools.given],
        "tool_choice": choice,
    }
    if tools.most_calls == 1:
        body["parallel_tool_calls"] = False
    return body


def _tool(tool: JsonObject, tools: ToolOptions) -> JsonObject:
    function = tool["function"]
    if function["name"] not in tools.strict:
        return tool
    return {**tool, "function": {**function, "strict": True}}


def _message(message: Message, *, thoughts: bool) -> JsonObject:
    found = {key: value for key, value in message.items() if thoughts or key != "reasoning_content"}
    if isinstance(found.get("content"), list):
        found["content"] = [_part(part) for part in found["content"]]
    if "tool_calls" in found:
        found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
        found["content"] = found["content"] or None
    return found


def _part(part: str | ImagePart) -> JsonObject:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = part.url or f"data:{_kind(part.data)};base64,{base64.b64encode(part.data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


_KINDS = {b"\x89PNG": "image/png", b"GIF8": "image/gif", b"RIFF": "image/webp"}


def _kind(data: bytes) -> str:
    return _KINDS.get(data[:4], "image/jpeg")


def _call(call: JsonObject) -> JsonObject:
    function = call["function"]
    given = function["arguments"]
    # Unchanged where it came as text: the upstream may have it in its KV cache.
    text = given.text if isinstance(given, JsonText) else json.dumps(given, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
