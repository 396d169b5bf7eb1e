"""OpenAI's chat and completion bodies: their models, and the calls that are read from them.

Unsupported parameters are refused in ``unsupported``; decisions that depend on the model, its
tokenizer or its context are made in ``plan``. Unknown keys are ignored.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, SkipValidation

from rkserve.api.common.parameters import (
    AnyObject,
    CompletionLogprobs,
    ModelName,
    Nonempty,
    NonemptyIds,
    OpenAIParameters,
    OpenModel,
    ReasoningParameters,
    TokenId,
    ToolChoice,
    ToolName,
    TopLogprobs,
)
from rkserve.api.common.tensors import read_embeds, read_encoder
from rkserve.api.json.fields import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    MAX_TOOLS,
    Fields,
    JsonObject,
    missing,
    parse_object,
    wrong_type,
)
from rkserve.api.parsing import sampling
from rkserve.api.parsing.answer_parser import NO_WISH, ReasoningOptions
from rkserve.api.parsing.sampling import SamplingOptions
from rkserve.api.parsing.tool_choice import NO_TOOLS, TOOL_KEYS, ToolOptions, read_tools
from rkserve.api.prompting.conversation import Message, images_of, read_messages, read_prefill
from rkserve.api.prompting.images import ImagePart
from rkserve.core.errors import RequestError
from rkserve.core.run_params import Embeds, EncoderStates

TextOrIds = str | tuple[int, ...]

REQUEST_PREFIX = "gen-"  # of ids of answers in dialects whose clients name their requests


@dataclass(frozen=True)
class GenerationCall:
    """Parameters that chat and completion calls share.

    ``sampling`` holds the values that the client set, under the names of ``run_params.Sampling``;
    a ``top_k`` of ``TOP_K_OFF`` means the whole vocabulary. ``max_tokens`` of None is the rest of
    the context. ``pause_on`` holds texts and token IDs after which the generation pauses. Only
    calls with the same ``salt`` share KV cache. ``keep_version`` forbids a change of weights during
    the generation, and ``session`` groups the client's requests. A lower ``priority`` goes first,
    and the request expires after ``timeout_s``.

    One of ``stop_ids`` ends an answer, too; with ``include_stop`` the stop string or token is part
    of it. ``request_id`` is the client's own name of the request, by which it can be aborted. With
    ``token_ids`` the answer lists IDs, with ``tokens_as_ids`` its log-probabilities name tokens by
    ID, and with ``special_tokens`` its text contains them. ``encoder`` is an encoder's output, for
    models that need one.
    """

    model: str
    max_tokens: int | None
    sampling: dict[str, Any] = field(default_factory=dict)
    strict_sampling: bool = False
    stop: tuple[str, ...] = ()
    pause_on: tuple[str | int, ...] = ()
    native_pause: bool = False
    use_cache: str | None = None
    salt: str = ""
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    return_weight_versions: bool = False
    keep_version: bool = False
    session: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    steps: SamplingOptions = field(default_factory=SamplingOptions)
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    special_tokens: bool = False
    request_id: str | None = None
    encoder: EncoderStates | None = None

    # Facts that calls of one kind have, and their values for the other kind.

    @property
    def left_out(self) -> tuple[str, ...]:
        """The types of offered tools that were left out."""
        return ()

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """All images of the conversation."""
        return ()

    @property
    def embedded(self) -> bool:
        """Return whether its prompts are embeddings."""
        return False

    @property
    def ranked(self) -> bool:
        """Return whether more answers are generated than returned."""
        return False


@dataclass(frozen=True)
class ChatCall(GenerationCall):
    """A call of /v1/chat/completions. ``messages`` are ready for a template.

    With ``prefill`` the last one is the assistant's, and the answer continues it.
    """

    messages: tuple[Message, ...] = ()
    prefill: bool = False
    tools: ToolOptions = NO_TOOLS
    wish: ReasoningOptions = NO_WISH

    @property
    def left_out(self) -> tuple[str, ...]:
        return self.tools.left_out

    @property
    def images(self) -> tuple[ImagePart, ...]:
        return images_of(self.messages)

    @property
    def choices(self) -> int:
        """The number of answers requested."""
        return self.n

    @property
    def tries(self) -> int:
        """The number of answers to each prompt."""
        return self.n


@dataclass(frozen=True)
class CompletionCall(GenerationCall):
    """A call of /v1/completions. Choice ``p * tries + k`` is the k-th answer to prompt p.

    With ``echo`` an answer begins with its prompt. Of ``best_of`` answers the best ``n`` are given.
    ``prompt_top`` asks for the log-probabilities of the prompt, and of so many of the likeliest
    tokens, apart from those of the answer.
    """

    prompts: tuple[TextOrIds | Embeds, ...] = ()
    echo: bool = False
    prompt_top: int | None = None
    prompt_param: str = "prompt"
    best_of: int | None = None

    @property
    def choices(self) -> int:
        """The number of answers generated."""
        return self.tries * len(self.prompts)

    @property
    def tries(self) -> int:
        """The number of answers to each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def embedded(self) -> bool:
        return any(isinstance(one, Embeds) for one in self.prompts)

    @property
    def ranked(self) -> bool:
        return self.tries > self.n


class FunctionDefinition(OpenModel):
    """A function that a model may call."""

    name: ToolName
    description: str | None = None
    parameters: AnyObject | None = None
    strict: bool = False


class FunctionTool(OpenModel):
    """A tool: a function of the client's."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatMessage(OpenModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[AnyObject] | None = Field(
        None, description="A text, or parts: `text`, `refusal`, and of a user `image_url`."
    )
    name: str | None = None
    tool_call_id: str | None = Field(None, description="Without it: of the first open call.")
    tool_calls: list[AnyObject] | None = None
    reasoning_content: str | None = None
    prefix: bool = Field(False, description="Of the final message: the answer continues it.")


Messages = SkipValidation[Annotated[list[ChatMessage], Field(min_length=1)]]
Tools = SkipValidation[Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None]
_Functions = SkipValidation[Annotated[list[FunctionDefinition], Field(max_length=MAX_TOOLS)] | None]


class TokenParameters(OpenModel):
    """vLLM's keys about single tokens of an answer."""

    return_token_ids: bool = Field(False, description="Token ids of prompt and answer.")
    return_tokens_as_token_ids: bool = Field(False, description="Also in log-probabilities.")
    skip_special_tokens: bool = Field(True, description="False shows special tokens in the text.")

    def token_options(self) -> dict[str, Any]:
        """Return the values by the names of ``GenerationCall``."""
        return {
            "token_ids": self.return_token_ids,
            "tokens_as_ids": self.return_tokens_as_token_ids,
            "special_tokens": not self.skip_special_tokens,
        }


def _switch(value: object) -> object:
    # Trainers (PipelineRL) send completions' number here, which vLLM takes for the switch.
    return bool(value) if type(value) is int and value in (0, 1) else value


class ChatRequest(OpenAIParameters, TokenParameters, ReasoningParameters):
    """The body of POST /v1/chat/completions."""

    model: ModelName = Field(description="A model or an adapter.")
    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1, description="The deprecated name.")
    logprobs: Annotated[bool, BeforeValidator(_switch)] = False
    top_logprobs: TopLogprobs | None = None
    tools: Tools = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: SkipValidation[bool | None] = None
    functions: _Functions = Field(None, description="Deprecated.")
    function_call: SkipValidation[Literal["none", "auto"] | AnyObject | None] = Field(
        None, description="Deprecated."
    )
    continue_final_message: SkipValidation[bool] = Field(
        False, description="The answer continues the final message, which is the assistant's."
    )
    add_generation_prompt: SkipValidation[bool | None] = Field(
        None, description="False with `continue_final_message` only."
    )

    def top(self) -> int | None:
        """Return the number of likeliest tokens to list. Raises ``RequestError``."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise RequestError(
                "Invalid 'top_logprobs': it needs 'logprobs' to be true.", "top_logprobs"
            )
        return None


class EncoderOutput(OpenModel):
    """An encoder's output."""

    model_config = ConfigDict(extra="forbid")

    k_cache: str = Field(description="`[layers, tokens, KV heads, head size]`.")
    v_cache: str = Field(description="`[layers, KV heads, head size, tokens]`.")
    mask: list[float] = Field(min_length=1, description="One number for each token.")
    positions: list[TokenId] = Field(min_length=1, description="One for each token.")


class CompletionRequest(OpenAIParameters, TokenParameters):
    """The body of POST /v1/completions."""

    model: ModelName = Field(description="A model or an adapter.")
    prompt: SkipValidation[
        str
        | list[int]
        | Annotated[list[Nonempty | NonemptyIds], Field(min_length=1, max_length=MAX_CHOICES)]
        | None
    ] = Field(None, description="Demanded, and not empty, unless there are `prompt_embeds`.")
    prompt_embeds: SkipValidation[str | list[str] | None] = Field(
        None, description="In place of `prompt`: base64 of safetensors, or of a NumPy array."
    )
    cross_attention: SkipValidation[EncoderOutput | None] = Field(
        None,
        description="An encoder's output, for encoder-decoder models; caches as `prompt_embeds`.",
    )
    max_tokens: int | None = Field(None, ge=0, description="0 only with `echo`.")
    logprobs: CompletionLogprobs = None
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)


def parse_chat(body: bytes) -> ChatCall:
    """Read the body of POST /v1/chat/completions. Raises ``RequestError``, as ``read_chat``."""
    return read_chat(parse_object(body))


def read_chat(values: JsonObject) -> ChatCall:
    """Read a chat completion call.

    ``max_completion_tokens`` wins over the deprecated ``max_tokens`` where both are given. Raises
    ``RequestError``.
    """
    asked, fields = ChatRequest.read(values), Fields(values)
    messages = read_messages(fields)
    prefill = read_prefill(fields, messages)
    sampling.refuse_unsupported(fields, sampling.UNSUPPORTED_CHAT)
    newer = asked.max_completion_tokens
    return ChatCall(
        model=asked.model,
        max_tokens=asked.max_tokens if newer is None else newer,
        messages=messages,
        prefill=prefill,
        tools=NO_TOOLS if TOOL_KEYS.isdisjoint(values) else read_tools(fields),
        wish=asked.reasoning_options(),
        n=asked.n,
        steps=asked.steps(fields, asked.top()),
        **asked.shared(),
        **asked.token_options(),
    )


def parse_completion(body: bytes) -> CompletionCall:
    """Read the body of POST /v1/completions. Raises ``RequestError``."""
    values = parse_object(body)
    asked, fields = CompletionRequest.read(values), Fields(values)
    prompts = _prompts(fields, asked.n)
    sampling.refuse_unsupported(fields, sampling.UNSUPPORTED_COMPLETION)
    if asked.max_tokens == 0 and not asked.echo:
        raise RequestError(
            "Invalid 'max_tokens': below minimum value. Expected a value >= 1 without 'echo', but "
            "got 0.",
            "max_tokens",
        )
    check_choices(asked.n, len(prompts), "n")
    return CompletionCall(
        model=asked.model,
        max_tokens=DEFAULT_COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens,
        prompts=prompts,
        n=asked.n,
        echo=asked.echo,
        best_of=_best_of(asked, len(prompts)),
        encoder=read_encoder(fields),
        steps=asked.steps(fields, asked.logprobs),
        **asked.shared(),
        **asked.token_options(),
    )


def _best_of(asked: CompletionRequest, prompts: int) -> int | None:
    """Return the number of answers of which the best are returned; None: all."""
    best_of, n = asked.best_of, asked.n
    if best_of is None or best_of == n:
        return None
    if best_of < n:
        raise RequestError(f"Invalid 'best_of': {best_of} is less than 'n' ({n}).", "best_of")
    if asked.stream:
        raise RequestError(
            "Invalid 'best_of': which answers are the best is known at their end, so it cannot be "
            "more than 'n' in a stream.",
            "best_of",
        )
    check_choices(best_of, prompts, "best_of")
    return best_of


def named_answer(request_id: str) -> str:
    """Return the id of the answer to a request that its client has named.

    All Routers derive the same one, so that any of them can abort the request.
    """
    digest = hashlib.sha256(request_id.encode(errors="replace")).hexdigest()
    return f"{REQUEST_PREFIX}{digest[:32]}"


def check_choices(each: int, prompts: int, name: str) -> None:
    """Check the number of answers of a request. Raises ``RequestError``."""
    if each * prompts > MAX_CHOICES:
        raise RequestError(
            f"{prompts} prompts with {name}={each} make {each * prompts} answers, but one request "
            f"may ask for {MAX_CHOICES} at most.",
            "prompt" if each == 1 else name,
        )


def _prompts(fields: Fields, n: int) -> tuple[TextOrIds | Embeds, ...]:
    """Read one prompt or a list: strings, lists of token IDs, or vLLM's ``prompt_embeds``."""
    value, embeds = fields.get("prompt"), fields.get("prompt_embeds")
    if embeds is not None:
        return _embedded(embeds, value, fields.path("prompt_embeds"))
    if value is None:
        raise missing("prompt")
    if isinstance(value, str):
        return (read_prompt(value, "prompt"),)
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string or an array", value)
    first = fields.items("prompt")[0]
    if isinstance(first, str | list):
        # Counted before they are read, so that a list of a million prompts costs nothing.
        if len(value) > MAX_CHOICES:
            check_choices(n, len(value), "n")
        return tuple(read_prompt(one, f"prompt[{index}]") for index, one in enumerate(value))
    return (read_prompt(value, "prompt"),)


def _embedded(embeds: object, prompt: object, path: str) -> tuple[Embeds, ...]:
    """Read one tensor or a list. OpenAI's clients must send a prompt: an empty one is ignored."""
    if prompt not in (None, "", []):
        raise RequestError(
            f"Send either 'prompt' or '{path}', not both; an empty 'prompt' is none.", path
        )
    if not isinstance(embeds, list):
        return (read_embeds(embeds, path),)
    if not 1 <= len(embeds) <= MAX_CHOICES:
        raise RequestError(
            f"Invalid '{path}': expected 1 to {MAX_CHOICES} tensors, but got {len(embeds)}.", path
        )
    return tuple(read_embeds(one, f"{path}[{index}]") for index, one in enumerate(embeds))


def read_prompt(
    value: object, path: str, empty: str = ", and nothing can follow nothing"
) -> TextOrIds:
    """Read one prompt: a string or a list of token ids. ``empty`` says why it must not be."""
    if not isinstance(value, str | list):
        raise wrong_type(path, "a string or an array of token ids", value)
    if not value:
        raise RequestError(f"Invalid '{path}': it is empty{empty}.", path)
    if isinstance(value, str):
        return value
    for index, token_id in enumerate(value):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise wrong_type(f"{path}[{index}]", "an integer", token_id)
    return tuple(value)
