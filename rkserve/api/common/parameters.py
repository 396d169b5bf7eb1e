"""Parameters that the bodies of several APIs share: parts of which their models are made.

A body's model states names, types, bounds and meanings, and reads the values. Messages, tools and
grammars are read by functions of their own, which check more than a schema can: their keys are
declared with ``SkipValidation``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    SkipValidation,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from rkserve.api.json.fields import (
    MAX_CHOICES,
    MAX_GUIDE_CHOICES,
    MAX_MIROSTAT_TAU,
    MAX_MODEL_CHARS,
    MAX_PAUSE_ON,
    MAX_REPEAT_PENALTY,
    MAX_SALT_CHARS,
    MAX_STOP,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOP_SEQUENCES,
    MAX_TIMEOUT_S,
    MAX_TOOL_NAME_CHARS,
    MAX_TOP_LOGPROBS,
    Fields,
    JsonObject,
)
from rkserve.api.json.schemas import RequestModel, request_error
from rkserve.api.parsing.answer_parser import EFFORTS, MOST_TOKENS, ReasoningOptions, read_wish
from rkserve.api.parsing.sampling import Named, SamplingOptions, read_guide, read_logit_bias
from rkserve.core.block_hashes import salted
from rkserve.core.errors import RequestError
from rkserve.core.files import check_cache_name
from rkserve.core.run_params import NEVER_ENDS

TOP_K_OFF = 0

# -- types ----------------------------------------------------------------------------------------

AnyObject = dict[str, Any]
ModelName = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
RequestId = ModelName
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
TokenId = Annotated[int, Field(ge=0)]
Nonempty = Annotated[str, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopIds = Annotated[tuple[TokenId, ...], Field(strict=False, max_length=MAX_STOP_IDS)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NonemptyIds = Annotated[list[int], Field(min_length=1)]
ToolChoice = SkipValidation[Literal["none", "auto", "required"] | AnyObject]
ToolName = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
assert Effort.__args__ == EFFORTS  # type: ignore[attr-defined] # a Literal has its values


def _stops(value: object, read: Callable[[object], tuple[str, ...]]) -> tuple[str, ...]:
    if not isinstance(value, str):
        if not isinstance(value, list):
            expected = {"expected": "a string or an array of strings"}
            raise PydanticCustomError("wrong_type", "wrong type", expected)
        return read(value)
    if not 1 <= len(value) <= MAX_STOP_CHARS:
        message = f"it may have 1 to {MAX_STOP_CHARS} characters, but has {len(value)}"
        raise PydanticCustomError("length", message)
    return (value,)


_STOP_SCHEMA: JsonObject = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}


def _stops_schema(most: int) -> WithJsonSchema:
    return WithJsonSchema(
        {"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": most}]}
    )


Stops = Annotated[
    tuple[StopText, ...],
    Field(strict=False, max_length=MAX_STOP),
    WrapValidator(_stops),
    _stops_schema(MAX_STOP),
]
StopSequences = Annotated[
    tuple[StopText, ...],
    Field(strict=False, max_length=MAX_STOP_SEQUENCES),
    WrapValidator(_stops),
    _stops_schema(MAX_STOP_SEQUENCES),
]


def _pause_entry(value: object) -> str | int:
    # Whether an id is one of the vocabulary depends on the model, and so does a negative one.
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        expected = {"expected": "a string or a token id"}
        raise PydanticCustomError("wrong_type", "wrong type", expected)
    return _stops(value, lambda _: ())[0]


PauseEntry = Annotated[
    str | int,
    PlainValidator(_pause_entry),
    WithJsonSchema({"anyOf": [_STOP_SCHEMA, {"type": "integer"}]}),
]


def _number(value: object) -> object:
    # A client of chats may send its switch here, too: off is off.
    return None if value is False else value


_LOGPROBS = {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}
CompletionLogprobs = Annotated[
    TopLogprobs | None,
    BeforeValidator(_number),
    WithJsonSchema({"anyOf": [_LOGPROBS, {"const": False}]}),
]
CacheName = Annotated[str, AfterValidator(lambda name: check_cache_name(name, "use_cache"))]
_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
LogitBias = Annotated[
    tuple[Any, ...],  # of pairs of a token id and its bias
    PlainValidator(read_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": _BIAS}),
]


# -- parts of bodies ------------------------------------------------------------------------------


class OpenModel(RequestModel):
    """Base of request bodies that ignore unknown keys."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: object) -> object:
        if isinstance(given, dict) and None in given.values():
            return {key: value for key, value in given.items() if value is not None}
        return given

    @classmethod
    def read(cls, values: JsonObject) -> Self:
        """Read a body. Raises ``RequestError`` with the path of the parameter at fault."""
        try:
            return cls.model_validate(values)
        except ValidationError as exc:
            raise request_error(exc) from None


class BaseSampling(OpenModel):
    """Values of the runtime's own sampling that other servers have, too."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 and -1 are the whole vocabulary.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(
        None, gt=0, le=MAX_REPEAT_PENALTY, description="vLLM's name of `repeat_penalty`."
    )

    def sampling(self) -> dict[str, Any]:
        """Return the values that a client set itself, by the names of ``run_params.Sampling``."""
        asked = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "top_k": TOP_K_OFF if self.top_k == -1 else self.top_k,
            "repeat_penalty": self.repetition_penalty,
        }
        return {name: value for name, value in asked.items() if value is not None}


class SamplingParameters(BaseSampling):
    """All values of the runtime's own sampling."""

    repeat_penalty: float | None = Field(None, gt=0, le=MAX_REPEAT_PENALTY)
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, gt=0, le=MAX_MIROSTAT_TAU)
    mirostat_eta: float | None = Field(None, gt=0, le=1)

    def sampling(self) -> dict[str, Any]:
        """Return the values that a client set itself, by the names of ``run_params.Sampling``.

        Raises ``RequestError``: the two names of the repeat penalty have different values.
        """
        own, alias = self.repeat_penalty, self.repetition_penalty
        if own is not None and alias is not None and own != alias:
            raise RequestError(
                "'repeat_penalty' and 'repetition_penalty' are two names of one value, but differ.",
                "repetition_penalty",
            )
        names = ("mirostat_tau", "mirostat_eta", "repeat_penalty", "mirostat")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return super().sampling() | given


class DrawParameters(OpenModel):
    """Values of sampling that need single steps."""

    seed: Seed | None = Field(None, description="The same answer again.")
    min_p: float = Field(0.0, ge=0, le=1)
    logit_bias: LogitBias = Field(default_factory=tuple, description="By token id.")

    def draws(self) -> SamplingOptions:
        """Return seed, ``min_p`` and bias."""
        return SamplingOptions(seed=self.seed, min_p=self.min_p, logit_bias=self.logit_bias)


class GrammarParameters(OpenModel):
    """Grammars that answers follow, by vLLM's and SGLang's names."""

    guided_json: SkipValidation[AnyObject | str | None] = None
    guided_regex: SkipValidation[str | None] = None
    guided_choice: SkipValidation[
        Annotated[list[Nonempty], Field(min_length=1, max_length=MAX_GUIDE_CHOICES)] | None
    ] = None
    guided_grammar: SkipValidation[str | None] = None
    guided_json_object: SkipValidation[bool | None] = None
    regex: SkipValidation[str | None] = Field(None, description="SGLang's name of `guided_regex`.")
    ebnf: SkipValidation[str | None] = Field(None, description="SGLang's name of `guided_grammar`.")
    structured_outputs: SkipValidation[AnyObject | None] = Field(
        None, description="Exactly one of the above, without its prefix."
    )


class LengthParameters(DrawParameters):
    """Values of sampling and of an answer's end that need single steps."""

    ignore_eos: bool = Field(False, description="Only `max_tokens` ends the answer.")
    min_tokens: int = Field(0, ge=0, le=NEVER_ENDS, description="No end of the answer before.")

    def steps(
        self, fields: Fields, top: int | None = None, guide: Named | None = None
    ) -> SamplingOptions:
        """Return the options, with ``top`` log-probabilities.

        ``fields`` is the body, and ``guide`` the grammar from the dialect's own keys. Raises
        ``RequestError``.
        """
        own = read_guide(fields)
        if own is not None and guide is not None:
            raise RequestError(
                f"Only one of '{guide[0]}' and '{own[0]}' can constrain the answer.", own[0]
            )
        return SamplingOptions(
            seed=self.seed,
            min_p=self.min_p,
            logit_bias=self.logit_bias,
            top_logprobs=top,
            guide=guide or own,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
        )


class StepParameters(LengthParameters, GrammarParameters):
    """Everything that needs single steps, except log-probabilities."""


class Scheduling(OpenModel):
    """Values for the queue."""

    priority: int | None = Field(None, description="Lower goes first.")
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S, description="The time limit, in s.")
    # Values that are not strings are ignored, as before these keys were used.
    prompt_cache_key: SkipValidation[str | None] = Field(None, description="Names a session.")
    user: SkipValidation[str | None] = Field(None, description="As `prompt_cache_key`.")

    def scheduling(self) -> dict[str, Any]:
        """Return session, priority and time limit, by the names of calls."""
        given = (self.prompt_cache_key, self.user)
        session = next((one for one in given if isinstance(one, str) and one), None)
        return {"session": session, "priority": self.priority, "timeout_s": self.timeout}


class RunParameters(Scheduling):
    """rkserve's own keys, which have the same names in all APIs."""

    strict_sampling: bool = Field(False, description="Refuse sampling that RKLLM cannot honour.")
    pause_on: Annotated[
        tuple[PauseEntry, ...], Field(strict=False, min_length=1, max_length=MAX_PAUSE_ON)
    ] = Field((), description="Texts and token ids after which the generation pauses.")
    native_pause: bool | None = Field(None, description="RKLLM pauses, with the KV cache kept.")
    use_cache: CacheName | None = Field(None, description="The name of a prompt cache.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = Field(
        None, description="KV cache is shared with requests of the same key and salt only."
    )
    return_weight_versions: bool = Field(False, description="Tell the weights of each token.")
    keep_version: bool = Field(False, description="No switch of adapters while it runs.")

    def own(self) -> dict[str, Any]:
        """Return the values by the names of ``GenerationCall``."""
        native = self.native_pause
        return {
            "strict_sampling": self.strict_sampling,
            "pause_on": self.pause_on,
            # A function call in mid-stream must not cost a prefill each time.
            "native_pause": bool(self.pause_on) if native is None else native,
            "use_cache": self.use_cache,
            # The salt itself is not passed on.
            "salt": "" if self.cache_salt is None else salted(self.cache_salt),
            "return_weight_versions": self.return_weight_versions,
            "keep_version": self.keep_version,
            **self.scheduling(),
        }


class OwnParameters(RunParameters):
    """rkserve's own keys, and vLLM's about the end of an answer."""

    stop_token_ids: StopIds = Field((), description="Token ids that end it, as an EOS does.")
    include_stop_str_in_output: bool = Field(False, description="The end is part of the answer.")

    def own(self) -> dict[str, Any]:
        """Return the values by the names of ``GenerationCall``."""
        return super().own() | {
            "stop_ids": tuple(dict.fromkeys(self.stop_token_ids)),
            "include_stop": self.include_stop_str_in_output,
        }


class ReasoningParameters(OpenModel):
    """Values of reasoning before the answer."""

    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    max_reasoning_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS)
    chat_template_kwargs: AnyObject = Field({})

    def reasoning_options(self, effort: str | None = None) -> ReasoningOptions:
        """Return the options; ``effort`` is from the dialect's own key.

        Raises ``RequestError``: a variable of the template that rkserve itself sets.
        """
        return read_wish(
            self.chat_template_kwargs,
            self.enable_thinking,
            effort or self.reasoning_effort,
            self.max_reasoning_tokens,
        )


class StreamOptions(OpenModel):
    """Options of a stream."""

    include_usage: bool = False


class StreamParameters(OpenModel):
    """Values of a stream."""

    stream: bool = False
    stream_options: StreamOptions | None = None

    def streaming(self) -> dict[str, Any]:
        """Return the values by the names of ``GenerationCall``.

        Raises ``RequestError``: there are options and no stream.
        """
        options = self.stream_options
        if options is not None and not self.stream:
            raise RequestError(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
                "stream_options",
            )
        usage = options is not None and options.include_usage
        return {"stream": self.stream, "include_usage": usage}


class OpenAIParameters(SamplingParameters, StepParameters, OwnParameters, StreamParameters):
    """Parameters of OpenAI's chats and completions, and of programs that send the same."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Stops = ()
    response_format: SkipValidation[AnyObject | None] = Field(
        None,
        description="`text`, `json_object`, or `json_schema` with a schema: what the answer "
        "follows.",
    )

    def shared(self) -> JsonObject:
        """Return the values by the names of ``GenerationCall``.

        Raises ``RequestError``: values that contradict each other.
        """
        return {
            "sampling": self.sampling(),
            "stop": self.stop,
            **self.streaming(),
            **self.own(),
        }
