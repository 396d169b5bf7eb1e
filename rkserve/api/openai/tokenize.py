"""Bodies and answers of /tokenize and /detokenize in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, SkipValidation
from typing_extensions import TypedDict

from rkserve.api.common.calls import ChatMessage, Tools
from rkserve.api.common.parameters import AnyObject, ModelName, OpenModel
from rkserve.api.json.fields import Fields, JsonObject, missing, parse_object
from rkserve.api.json.schemas import Count, RequestModel, read_model
from rkserve.api.parsing import sampling
from rkserve.api.parsing.tool_choice import NO_TOOLS, ToolOptions, read_tools
from rkserve.api.prompting.conversation import Message, read_messages, read_prefill
from rkserve.core.errors import RequestError, UnsupportedParameter

# Unsupported parameters that would change the IDs of a conversation.
_CONVERSATION: dict[str, sampling.Harmless] = {
    "chat_template": sampling.never,
    "chat_template_kwargs": sampling.only({}),
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


class TokensAnswer(TypedDict):
    """The token ids of a text or a conversation."""

    count: Count
    max_model_len: Count
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedAnswer(TypedDict):
    """The text of token ids."""

    prompt: str


class TokenizerInfoAnswer(TypedDict):
    """Keys of a model's tokenizer_config.json, as in force."""

    tokenizer_class: str
    model_max_length: Count
    add_bos_token: bool
    add_eos_token: bool
    chat_template: str | None
    vocab_size: Count
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None


class TokenizeRequest(OpenModel):
    """Either `prompt` or `messages`. `model` may be left out where only one generates."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: SkipValidation[Annotated[list[ChatMessage], Field(min_length=1)] | None] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: Tools = None
    chat_template_kwargs: SkipValidation[AnyObject | None] = None


class DetokenizeRequest(OpenModel):
    """Token ids to turn into text."""

    tokens: list[int]
    model: ModelName | None = None


def parse_tokenize(body: bytes) -> TokenizeCall:
    """Read the body of POST /tokenize. Raises ``RequestError``."""
    values = parse_object(body)
    asked, fields = TokenizeRequest.read(values), Fields(values)
    model, strings, text = asked.model, asked.return_token_strs, asked.prompt
    if asked.messages is None:
        if text is None:
            raise missing("prompt")
        special = asked.add_special_tokens is not False
        return TokenizeCall(model, text, special=special, strings=strings)
    if text is not None:
        raise RequestError("Send either 'prompt' or 'messages', not both.", "messages")
    if asked.add_special_tokens:
        raise UnsupportedParameter(
            "Unsupported parameter: a conversation gets the special tokens that its chat template "
            "writes, and no others.",
            "add_special_tokens",
        )
    sampling.refuse_unsupported(fields, _CONVERSATION)
    messages = read_messages(fields)
    return TokenizeCall(
        model,
        messages=messages,
        prefill=read_prefill(fields, messages),
        answer=asked.add_generation_prompt,
        tools=read_tools(fields),
        strings=strings,
    )


class TokenizerQuery(RequestModel):
    """The query of GET /tokenizer_info."""

    model: ModelName | None = Field(None, description="Needed where several models generate text.")


def parse_info(query: Sequence[tuple[str, str]]) -> str | None:
    """Read the query of GET /tokenizer_info: the name of a model, if it has one.

    Raises ``RequestError``.
    """
    return read_model(TokenizerQuery, dict(query)).model


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
