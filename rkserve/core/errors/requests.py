"""The root of the error tree, the removal of folder names from messages, and errors of requests."""

from __future__ import annotations

import re
from typing import ClassVar


class RkserveError(Exception):
    """Base class of all errors that rkserve raises on purpose. ``message`` is one sentence for
    users.

    ``http_status``, ``kind`` and ``code`` become the status and the ``type`` and ``code`` of the
    OpenAI error object; ``param`` names the request's invalid key, if any.
    """

    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    # The message, with the names of attributes in braces; None is the first argument. Names from
    # clients are cut to 80 characters.
    sentence: ClassVar[str | None] = None

    param: str | None = None
    retry_after_s: int | None = None

    @property
    def message(self) -> str:
        """The sentence for the user; of files in a ``reason`` only the names are left."""
        if self.sentence is None:
            return str(self.args[0]) if self.args else type(self).__name__
        facts = dict(vars(self))
        if "reason" in facts:
            facts["reason"] = without_folders(facts["reason"])
        return self.sentence.format_map(facts)

    def __str__(self) -> str:
        return self.message


# The folders of an absolute path, in quotes perhaps with blanks in them. What has no root is left:
# "tokens/s" and "on/off" are words.
_QUOTED = re.compile(r"""(?<=['"])(?:~|\.{1,2})?/(?:[^'"\n]*/)?(?=[^'"\n/]*['"])""")
_BARE = re.compile(r"""(?<![\w:/.~'"-])(?:~|\.{1,2})?/(?:[^\s'"/]+/)*""")


def without_folders(text: str) -> str:
    """Return ``text`` with every path shortened to the file's name, for readers outside this
    machine.
    """
    return _BARE.sub("", _QUOTED.sub("", text))


class RequestError(RkserveError):
    """The request is invalid; repeating it does not help."""

    http_status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.param = param


class UnsupportedParameter(RequestError):
    """A parameter that would change the answer and that rkserve does not support."""

    code = "unsupported_parameter"


class ModelNotFound(RequestError):
    """No board serves, or is configured for, the requested model."""

    http_status = 404
    code = "model_not_found"
    sentence = "The model '{model}' does not exist. GET /v1/models lists those that do."

    def __init__(self, model: str) -> None:
        RkserveError.__init__(self, model)
        self.model = model
        self.param = "model"


class AdapterNotFound(ModelNotFound):
    """No such adapter, or no such version of it; OpenAI has one code for this and for models."""

    sentence = (
        "The adapter '{model}' does not exist. GET /v1/models and GET /v1/lora_adapters "
        "list those that do."
    )


class RouteNotFound(RequestError):
    """No such path."""

    http_status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path exists, with other methods."""

    http_status = 405
    code = "method_not_allowed"


class BodyTooLarge(RequestError):
    """The body is longer than the configured limit."""

    http_status = 413
    code = "body_too_large"


class BodyTooSlow(RequestError):
    """The body did not arrive within the configured time."""

    http_status = 408
    code = "body_too_slow"


class IdempotencyKeyReused(RequestError):
    """Another request of the same caller had that key."""

    http_status = 422
    code = "idempotency_key_reused"
    sentence = (
        "The Idempotency-Key was used for a request with another body, path or policy: give every "
        "request a key of its own."
    )

    def __init__(self, param: str = "Idempotency-Key") -> None:
        RkserveError.__init__(self, param)
        self.param = param


class AnswerNotKept(RequestError):
    """The request was answered completely, and its answer was too long to be kept."""

    http_status = 422
    code = "answer_not_kept"
    sentence = (
        "The request with this Idempotency-Key was answered, and the answer was too long to be "
        "kept. Send it with another key to have it answered again."
    )

    def __init__(self, param: str = "Idempotency-Key") -> None:
        RkserveError.__init__(self, param)
        self.param = param


class UnsupportedMediaType(RequestError):
    """The call does not accept the body's type or encoding."""

    http_status = 415
    code = "unsupported_media_type"


class HostNotAllowed(RequestError):
    """The request is addressed to a host name that is not in the allow-list."""

    http_status = 421
    code = "host_not_allowed"
    sentence = (
        "The host name '{host:.80}' is not in the allow-list. Use an IP address, localhost or the "
        "machine's own name, or add the name to router.allowed_hosts in serve_config.yaml."
    )

    def __init__(self, host: str) -> None:
        RkserveError.__init__(self, host)
        self.host = host


class ContextOverflow(RequestError):
    """The prompt leaves no room for an answer in the model's context."""

    code = "context_length_exceeded"

    def __init__(
        self,
        prompt_tokens: int,
        context_len: int,
        param: str = "messages",
        at_least: bool = False,
    ) -> None:
        # `at_least`: the prompt was refused by its length in characters, before it was tokenized.
        RkserveError.__init__(self, prompt_tokens, context_len, param, at_least)
        self.prompt_tokens, self.context_len = prompt_tokens, context_len
        self.param, self.at_least = param, at_least

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return (
            f"This model's maximum context length is {self.context_len} tokens, of which at least "
            f"one must be left for the answer; the prompt has {self.size} tokens."
        )

    @property
    def size(self) -> str:
        """The length of the prompt in tokens, if known exactly, or a lower bound."""
        return f"at least {self.prompt_tokens}" if self.at_least else f"{self.prompt_tokens}"


class InputTooLong(RequestError):
    """A text to embed is longer than the model's context."""

    code = "context_length_exceeded"

    def __init__(self, tokens: int, context_len: int, param: str, at_least: bool = False) -> None:
        RkserveError.__init__(self, tokens, context_len, param, at_least)
        self.tokens, self.context_len = tokens, context_len
        self.param, self.at_least = param, at_least

    @property
    def message(self) -> str:
        """The sentence for the user."""
        size = f"at least {self.tokens}" if self.at_least else f"{self.tokens}"
        return (
            f"This model's maximum context length is {self.context_len} tokens; "
            f"'{self.param}' has {size}."
        )


class SamplingFixed(RequestError):
    """``strict_sampling`` was requested, and the board's runtime fixes sampling at load."""

    code = "sampling_fixed"

    def __init__(self, release: str, names: tuple[str, ...]) -> None:
        RkserveError.__init__(self, release, names)
        self.release, self.names = release, names
        self.param = names[0] if names else None

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return (
            f"RKLLM {self.release} fixes sampling when the model is loaded, so "
            f"{', '.join(self.names)} cannot differ from the model's own values. Leave them out, "
            "send the model's values, or drop strict_sampling."
        )


class AdapterBroken(RequestError):
    """The adapter's file is missing, changed or refused by the runtime; the board continues."""

    code = "adapter_broken"
    sentence = "Adapter '{adapter}' cannot be used: {reason}."

    def __init__(self, adapter: str, reason: str) -> None:
        RkserveError.__init__(self, adapter, reason)
        self.adapter, self.reason = adapter, reason
        self.param = "model"


class CacheNotFound(RequestError):
    """No board has a prompt cache of that name."""

    http_status = 404
    code = "cache_not_found"
    sentence = "There is no prompt cache '{name}'. GET /v1/cache/{{model}} lists those."

    def __init__(self, name: str, param: str = "use_cache") -> None:
        RkserveError.__init__(self, name, param)
        self.name, self.param = name, param


class CacheUnsupported(RequestError):
    """The model, the runtime or the board's settings allow no prompt cache."""

    code = "cache_unsupported"


class EmbeddingUnsupported(RequestError):
    """The model makes no embeddings, or not with its boards' settings."""

    code = "embedding_unsupported"


class GenerationNotFound(RequestError):
    """No board holds a generation of that ID: it never existed, or has ended."""

    http_status = 404
    code = "generation_not_found"
    sentence = (
        "There is no generation '{generation}': it does not exist, or it has ended. "
        "GET /v1/generations lists those that run."
    )

    def __init__(self, generation: str) -> None:
        RkserveError.__init__(self, generation)
        self.generation = generation


class ResponseNotFound(RequestError):
    """No response of that ID is stored, or it belongs to another key."""

    http_status = 404
    code = "response_not_found"
    sentence = "Response with id '{response:.80}' not found."

    def __init__(self, response: str, param: str | None = None) -> None:
        RkserveError.__init__(self, response, param)
        self.response, self.param = response, param


class PreviousResponseNotFound(ResponseNotFound):
    """The response to continue from is not stored any more, or never was."""

    code = "previous_response_not_found"

    def __init__(self, response: str, asked: str | None = None) -> None:
        # `response` may be a predecessor of the requested one.
        RkserveError.__init__(self, response, asked)
        self.response, self.asked = response, asked
        self.param = "previous_response_id"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        gone = self.response[:80]
        if self.asked is None or self.asked == self.response:
            return f"Previous response with id '{gone}' not found."
        return (
            f"Previous response with id '{gone}' not found, which '{self.asked}' goes on from: it "
            "was deleted or is too old. Send the conversation as 'input'."
        )


class ItemNotFound(RequestError):
    """A referenced item is not stored, or belongs to another key."""

    http_status = 404
    code = "item_not_found"
    sentence = "Item with id '{item:.80}' not found. Items are kept with responses that are stored."

    def __init__(self, item: str) -> None:
        RkserveError.__init__(self, item)
        self.item = item
        self.param = "input"


class BoardNotFound(RequestError):
    """No board has that name."""

    http_status = 404
    code = "board_not_found"
    sentence = "There is no board '{board}'. GET /v1/boards lists those that there are."

    def __init__(self, board: str, param: str = "board") -> None:
        RkserveError.__init__(self, board, param)
        self.board, self.param = board, param


class MemberNotFound(BoardNotFound):
    """No board of that name has asked to join."""

    sentence = "No board '{board}' has asked to join. `rkserve boards` lists those that have."

    def __init__(self, board: str, param: str = "boards") -> None:
        super().__init__(board, param)


class StateConflict(RequestError):
    """The generation's state does not allow the call; nothing was changed."""

    http_status = 409
    code = "state_conflict"

    def __init__(self, asked: str, state: str, hint: str = "") -> None:
        RkserveError.__init__(self, asked, state, hint)
        self.asked, self.state, self.hint = asked, state, hint

    @property
    def message(self) -> str:
        """The sentence for the user."""
        sentence = f"Cannot {self.asked} a generation that is {self.state}."
        return f"{sentence} {self.hint}" if self.hint else sentence


class TooManyViewers(RkserveError):
    """As many clients as are allowed watch the cluster already."""

    http_status = 429
    kind = "rate_limit_error"
    code = "too_many_viewers"
    retry_after_s = 10
    sentence = (
        "This Router sends the cluster's events to {limit} viewers, which is its limit "
        "(router.max_viewers)."
    )

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class RateLimited(RkserveError):
    """The caller's key has exhausted a limit: requests or tokens per minute, or concurrent
    requests.

    ``what`` names the limit and its value.
    """

    http_status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"
    sentence = "Rate limit of this key: {what}. Try again in {retry_after_s} s."

    def __init__(self, what: str, retry_after_s: int) -> None:
        super().__init__(what, retry_after_s)
        self.what, self.retry_after_s = what, retry_after_s
