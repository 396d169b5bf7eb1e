"""Bodies and answers of /tokenize and /detokenize in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rkserve.api.common import unsupported
from rkserve.api.common.calls import read_maybe_model
from rkserve.api.json.body import JsonObject, parse_object
from rkserve.api.json.fields import Fields, missing, wrong_type
from rkserve.api.parsing.tool_choice import NO_TOOLS, ToolOptions, read_tools
from rkserve.api.prompting.conversation import Message, read_messages, read_prefill
from rkserve.core.errors import RequestError, UnsupportedParameter

# Unsupported parameters that would change the IDs of a conversation.
_CONVERSATION: dict[str, unsupported.Harmless] = {
    "chat_template": lambda _value, _body: False,
    "chat_template_kwargs": lambda value, _body: value == {},
}


@dataclass(frozen=True)
class TokenizeCall:
    """A text or a conversation to tokenize. ``text`` of None: ``messages``.

    ``special`` adds the tokenizer's special tokens, a BOS for some models; ``answer`` adds the
    header of the answer to a conversation, and ``tools`` are its tools. With ``prefill`` it ends
    with the text of its last message. ``strings`` adds the vocabulary's spelling of each token.
    """

    model: str | None
    text: str | None = None
    messages: tuple[Message, ...] = ()
    prefill: bool = False
    special: bool = True
    answer: bool = True
    tools: ToolOptions = NO_TOOLS
    strings: bool = False


@dataclass(frozen=True)
class DetokenizeCall:
    """Token IDs to detokenize."""

    model: str | None
    ids: tuple[int, ...]


def parse_tokenize(body: bytes) -> TokenizeCall:
    """Read the body of POST /tokenize.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    fields = Fields(parse_object(body))
    model, strings = read_maybe_model(fields), fields.flag("return_token_strs")
    special = fields.maybe_flag("add_special_tokens")
    text = fields.text("prompt")
    if fields.get("messages") is None:
        if text is None:
            raise missing("prompt")
        return TokenizeCall(model, text, special=special is not False, strings=strings)
    if text is not None:
        raise RequestError("Send either 'prompt' or 'messages', not both.", "messages")
    if special:
        raise UnsupportedParameter(
            "Unsupported parameter: a conversation gets the special tokens that its chat template "
            "writes, and no others.",
            "add_special_tokens",
        )
    unsupported.refuse(fields, _CONVERSATION)
    answer = fields.maybe_flag("add_generation_prompt") is not False
    messages = read_messages(fields)
    return TokenizeCall(
        model,
        messages=messages,
        prefill=read_prefill(fields, messages),
        answer=answer,
        tools=read_tools(fields),
        strings=strings,
    )


def parse_detokenize(body: bytes) -> DetokenizeCall:
    """Read the body of POST /detokenize.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    fields = Fields(parse_object(body))
    model, ids = read_maybe_model(fields), fields.get("tokens")
    if ids is None:
        raise missing("tokens")
    if not isinstance(ids, list):
        raise wrong_type("tokens", "an array of integers", ids)
    return DetokenizeCall(model, fields.integers("tokens") or ())


def parse_info(query: Sequence[tuple[str, str]]) -> str | None:
    """Read the query of GET /tokenizer_info: the name of a model, if it has one.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    fields = Fields(dict(query))
    fields.only(("model",))
    return read_maybe_model(fields)


def tokenizer_info(given: JsonObject, in_force: JsonObject, context_length: int) -> JsonObject:
    """Return the answer of GET /tokenizer_info: keys of tokenizer_config.json.

    Beside the values ``in_force``, only keys that programs read are returned: the file may name
    folders of the machine on which it was made.
    """
    return {
        "tokenizer_class": given.get("tokenizer_class") or "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "add_bos_token": bool(given.get("add_bos_token", False)),
        "add_eos_token": bool(given.get("add_eos_token", False)),
        **in_force,
    }


def tokenized(
    ids: tuple[int, ...], max_model_len: int, strings: list[str] | None, count: int
) -> JsonObject:
    """Return the answer of POST /tokenize. ``count`` includes the tokens of images."""
    return {
        "count": count,
        "max_model_len": max_model_len,
        "tokens": list(ids),
        "token_strs": strings,
    }


def detokenized(text: str) -> JsonObject:
    """Return the answer of POST /detokenize."""
    return {"prompt": text}
