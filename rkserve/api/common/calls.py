"""The reader of OpenAI's chat and completion bodies.

Unsupported parameters are refused in ``unsupported``; decisions that depend on the model, its
tokenizer or its context are made in ``plan``. Unknown keys are ignored.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from rkserve.api.common import unsupported
from rkserve.api.common.tensors import read_embeds, read_encoder
from rkserve.api.json.body import parse_object
from rkserve.api.json.fields import Fields, Range, missing, wrong_type
from rkserve.api.json.limits import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    MAX_MIROSTAT_TAU,
    MAX_MODEL_CHARS,
    MAX_PAUSE_ON,
    MAX_REPEAT_PENALTY,
    MAX_SALT_CHARS,
    MAX_STOP,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_TIMEOUT_S,
)
from rkserve.api.parsing.reasoning import NO_WISH, ReasoningOptions, read_wish
from rkserve.api.parsing.sampling import SamplingOptions, read_steps
from rkserve.api.parsing.tool_choice import NO_TOOLS, ToolOptions, read_tools
from rkserve.api.prompting.conversation import Message, read_messages, read_prefill
from rkserve.api.prompting.images import ImagePart, images_of
from rkserve.core.block_hashes import salted
from rkserve.core.errors import RequestError
from rkserve.core.run_params import Embeds, EncoderStates

TextOrIds = str | tuple[int, ...]

_AT_LEAST_ONE = Range(1)
_ADDITIVE = Range(-2, 2)
_NUMBERS = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "frequency_penalty": _ADDITIVE,
    "presence_penalty": _ADDITIVE,
    "mirostat_tau": Range(0, MAX_MIROSTAT_TAU, above=True),
    "mirostat_eta": Range(0, 1, above=True),
}
_MIROSTAT = Range(0, 2)
_REPEAT = Range(0, MAX_REPEAT_PENALTY, above=True)
TOP_K_OFF = 0
REQUEST_PREFIX = "gen-"  # of ids of answers in dialects whose clients name their requests
TIMEOUT = Range(0, MAX_TIMEOUT_S, above=True)


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
    ID, and with ``special_tokens`` its text contains them.
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

    @property
    def left_out(self) -> tuple[str, ...]:
        """The types of offered tools that were left out."""
        return ()


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
        """The types of offered tools that were left out."""
        return self.tools.left_out

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """All images of the conversation."""
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
    encoder: EncoderStates | None = None

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
        """Return whether its prompts are embeddings."""
        return any(isinstance(one, Embeds) for one in self.prompts)

    @property
    def ranked(self) -> bool:
        """Return whether more answers are generated than returned."""
        return self.tries > self.n


def parse_chat(body: bytes) -> ChatCall:
    """Read the body of POST /v1/chat/completions. Raises ``RequestError``, as ``read_chat``."""
    return read_chat(Fields(parse_object(body)))


def read_chat(fields: Fields) -> ChatCall:
    """Read a chat completion call.

    ``max_completion_tokens`` wins over the deprecated ``max_tokens`` where both are given.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    model = read_model(fields)
    messages = read_messages(fields)
    prefill = read_prefill(fields, messages)
    unsupported.refuse(fields, unsupported.CHAT)
    older = fields.integer("max_tokens", _AT_LEAST_ONE)
    newer = fields.integer("max_completion_tokens", _AT_LEAST_ONE)
    return ChatCall(
        model=model,
        max_tokens=older if newer is None else newer,
        messages=messages,
        prefill=prefill,
        tools=read_tools(fields),
        wish=read_wish(fields),
        n=read_choices(fields, prompts=1),
        steps=read_steps(fields, chat=True),
        **read_shared(fields),
        **read_token_wishes(fields),
    )


def parse_completion(body: bytes) -> CompletionCall:
    """Read the body of POST /v1/completions.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    fields = Fields(parse_object(body))
    model = read_model(fields)
    prompts = _prompts(fields)
    unsupported.refuse(fields, unsupported.COMPLETION)
    steps, echo = read_steps(fields, chat=False), fields.flag("echo")
    asked = fields.integer("max_tokens", Range(0) if echo else _AT_LEAST_ONE)
    n = read_choices(fields, prompts=len(prompts))
    return CompletionCall(
        model=model,
        max_tokens=DEFAULT_COMPLETION_TOKENS if asked is None else asked,
        prompts=prompts,
        n=n,
        echo=echo,
        best_of=_best_of(fields, n, len(prompts)),
        encoder=read_encoder(fields),
        steps=steps,
        **read_shared(fields),
        **read_token_wishes(fields),
    )


def _best_of(fields: Fields, n: int, prompts: int) -> int | None:
    """Read ``best_of``, the number of answers of which the best are returned; None: all."""
    best_of = fields.integer("best_of", _AT_LEAST_ONE)
    if best_of is None or best_of == n:
        return None
    if best_of < n:
        raise RequestError(f"Invalid 'best_of': {best_of} is less than 'n' ({n}).", "best_of")
    if fields.flag("stream"):
        raise RequestError(
            "Invalid 'best_of': which answers are the best is known at their end, so it cannot be "
            "more than 'n' in a stream.",
            "best_of",
        )
    _hold_to_choices(best_of, prompts, "best_of")
    return best_of


def read_model(fields: Fields) -> str:
    """Read the required name of a model. Raises ``RequestError``."""
    model = read_maybe_model(fields)
    if model is None:
        raise missing("model")
    return model


def read_maybe_model(fields: Fields) -> str | None:
    """Read the optional name of a model.

    Raises:
        RequestError: the name is empty or too long.
    """
    if fields.get("model") is None:
        return None
    model = fields.required_text("model")
    if len(model) > MAX_MODEL_CHARS:
        raise RequestError(
            f"Invalid 'model': a name has at most {MAX_MODEL_CHARS} characters.", "model"
        )
    return model


def read_shared(fields: Fields) -> dict[str, Any]:
    """Read the parameters that chat and completion calls share, except model and length.

    Other dialects use it for rkserve's own keys, which have the same names in all of them.
    """
    unsupported.refuse(fields, unsupported.SHARED)
    stream = fields.flag("stream")
    pause_on = _pause_on(fields)
    native_pause = fields.maybe_flag("native_pause")
    return {
        "sampling": read_sampling(fields),
        "strict_sampling": fields.flag("strict_sampling"),
        "stop": read_stop(fields, "stop", MAX_STOP),
        "stop_ids": read_stop_ids(fields),
        "include_stop": fields.flag("include_stop_str_in_output"),
        "pause_on": pause_on,
        # A function call in mid-stream must not cost a prefill each time.
        "native_pause": bool(pause_on) if native_pause is None else native_pause,
        "use_cache": fields.cache_name("use_cache"),
        "salt": _salt(fields),
        "stream": stream,
        "include_usage": _include_usage(fields, stream),
        "return_weight_versions": fields.flag("return_weight_versions"),
        "keep_version": fields.flag("keep_version"),
        **read_standing(fields),
    }


def read_token_wishes(fields: Fields) -> dict[str, Any]:
    """Read vLLM's keys about single tokens of an answer."""
    return {
        "token_ids": fields.flag("return_token_ids"),
        "tokens_as_ids": fields.flag("return_tokens_as_token_ids"),
        "special_tokens": fields.maybe_flag("skip_special_tokens") is False,
    }


def read_stop_ids(fields: Fields) -> tuple[int, ...]:
    """Read vLLM's ``stop_token_ids``: token ids that end an answer."""
    name = "stop_token_ids"
    found = fields.integers(name, Range(0)) or ()
    if len(found) > MAX_STOP_IDS:
        path = fields.path(name)
        raise RequestError(
            f"Invalid '{path}': array too long. Expected at most {MAX_STOP_IDS} token ids, but got "
            f"{len(found)}.",
            path,
        )
    return tuple(dict.fromkeys(found))


def read_standing(fields: Fields) -> dict[str, Any]:
    """Read the scheduling parameters: session, priority, time limit."""
    return {
        "session": _session_key(fields),
        "priority": fields.integer("priority"),
        "timeout_s": fields.number("timeout", TIMEOUT),
    }


def _salt(fields: Fields) -> str:
    """Read vLLM's ``cache_salt``, and return its digest: the salt itself is not passed on."""
    given = fields.text("cache_salt")
    if given is None:
        return ""
    if not given or len(given) > MAX_SALT_CHARS:
        raise RequestError(
            f"Invalid 'cache_salt': it has 1 to {MAX_SALT_CHARS} characters.", "cache_salt"
        )
    return salted(given)


def _session_key(fields: Fields) -> str | None:
    """Return OpenAI's ``prompt_cache_key``, else ``user``.

    Values that are not strings are ignored, as before these keys were used.
    """
    given = (fields.get(name) for name in ("prompt_cache_key", "user"))
    return next((value for value in given if isinstance(value, str) and value), None)


def read_request_id(fields: Fields, name: str) -> str | None:
    """Read a client's own name of its request. Raises ``RequestError``."""
    if fields.get(name) is None:
        return None
    given = fields.required_text(name)
    if len(given) > MAX_MODEL_CHARS:
        path = fields.path(name)
        raise RequestError(
            f"Invalid '{path}': an id has at most {MAX_MODEL_CHARS} characters.", path
        )
    return given


def named_answer(request_id: str) -> str:
    """Return the id of the answer to a request that its client has named.

    All Routers derive the same one, so that any of them can abort the request.
    """
    digest = hashlib.sha256(request_id.encode(errors="replace")).hexdigest()
    return f"{REQUEST_PREFIX}{digest[:32]}"


def read_sampling(fields: Fields) -> dict[str, Any]:
    """Read the sampling values that a client set itself."""
    asked = {name: fields.number(name, within) for name, within in _NUMBERS.items()}
    top_k = fields.integer("top_k", Range(-1))
    asked["top_k"] = TOP_K_OFF if top_k == -1 else top_k
    asked["repeat_penalty"] = _repeat_penalty(fields)
    asked["mirostat"] = fields.integer("mirostat", _MIROSTAT)
    return {name: value for name, value in asked.items() if value is not None}


def _repeat_penalty(fields: Fields) -> float | None:
    """Read the penalty by RKLLM's or vLLM's name."""
    own = fields.number("repeat_penalty", _REPEAT)
    alias = fields.number("repetition_penalty", _REPEAT)
    if own is not None and alias is not None and own != alias:
        raise RequestError(
            "'repeat_penalty' and 'repetition_penalty' are two names of one value, but differ.",
            "repetition_penalty",
        )
    return alias if own is None else own


def read_stop(fields: Fields, name: str, most: int) -> tuple[str, ...]:
    """Read stop strings: one, or up to ``most``."""
    value, path = fields.get(name), fields.path(name)
    if value is None:
        return ()
    if not isinstance(value, str | list):
        raise wrong_type(path, "a string or an array of strings", value)
    one = isinstance(value, str)
    stops = [value] if one else value
    if len(stops) > most:
        raise RequestError(
            f"Invalid '{path}': array too long. Expected at most {most} strings, "
            f"but got {len(stops)}.",
            path,
        )
    return tuple(_watched(s, path if one else f"{path}[{i}]") for i, s in enumerate(stops))


def _watched(value: object, path: str) -> str:
    """Check a string with which every token of the answer is compared."""
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    if not 1 <= len(value) <= MAX_STOP_CHARS:
        raise RequestError(
            f"Invalid '{path}': it may have 1 to {MAX_STOP_CHARS} characters, but has "
            f"{len(value)}.",
            path,
        )
    return value


def _pause_on(fields: Fields) -> tuple[str | int, ...]:
    if fields.get("pause_on") is None:
        return ()
    found = fields.items("pause_on")
    if len(found) > MAX_PAUSE_ON:
        raise RequestError(
            f"Invalid 'pause_on': array too long. Expected at most {MAX_PAUSE_ON} strings and "
            f"token ids, but got {len(found)}.",
            "pause_on",
        )
    return tuple(_pause_entry(value, f"pause_on[{index}]") for index, value in enumerate(found))


def _pause_entry(value: object, path: str) -> str | int:
    # Whether an id is one of the vocabulary depends on the model, and so does a negative one.
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise wrong_type(path, "a string or a token id", value)
    return _watched(value, path)


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.child("stream_options")
    if options is None:
        return False
    if not stream:
        raise RequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            "stream_options",
        )
    return options.flag("include_usage")


def read_choices(fields: Fields, prompts: int) -> int:
    """Read ``n``, the number of answers to each prompt. Raises ``RequestError``."""
    n = fields.integer("n", Range(1, MAX_CHOICES))
    n = 1 if n is None else n
    _hold_to_choices(n, prompts, "n")
    return n


def _hold_to_choices(each: int, prompts: int, name: str) -> None:
    if each * prompts > MAX_CHOICES:
        raise RequestError(
            f"{prompts} prompts with {name}={each} make {each * prompts} answers, but one request "
            f"may ask for {MAX_CHOICES} at most.",
            "prompt" if each == 1 else name,
        )


def _prompts(fields: Fields) -> tuple[TextOrIds | Embeds, ...]:
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
            read_choices(fields, prompts=len(value))
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
