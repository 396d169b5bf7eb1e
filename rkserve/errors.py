"""The one error tree of rkserve; it knows HTTP statuses and nothing of HTTP, Ray or C.

::

    RkserveError                     500  server_error
    +-- RequestError                 400  invalid_request_error
    |   +-- UnsupportedParameter     400  unsupported_parameter
    |   +-- ModelNotFound            404  model_not_found
    |   +-- RouteNotFound            404
    |   +-- MethodNotAllowed         405
    |   +-- BodyTooLarge             413  body_too_large
    |   +-- BodyTooSlow              408  body_too_slow
    |   +-- ContextOverflow          400  context_length_exceeded
    |   +-- SamplingFixed            400  sampling_fixed
    |   +-- AdapterBroken            400  adapter_broken
    |   +-- CacheNotFound            404  cache_not_found
    |   +-- CacheUnsupported         400  cache_unsupported
    |   +-- GenerationNotFound       404  generation_not_found
    |   +-- BoardNotFound            404  board_not_found
    |   +-- StateConflict            409  state_conflict
    |   +-- Forbidden                403  forbidden
    +-- HookFailed                   500  hook_failed
    +-- QueueFull                    429  queue_full
    +-- PauseExpired                 504  pause_expired
    +-- TooManyPaused                429  too_many_paused
    +-- QueueTimeout                 503  queue_timeout
    +-- NoBoard                      503  no_board
    +-- BoardFailed                  503  board_failed
    |   +-- BoardOutOfOrder          503  board_failed
    |   +-- BoardSilent              503  board_failed
    |   +-- EngineDied               503  board_failed
    |   +-- EngineHung               503  board_failed
    |   +-- RunFailed                502  run_failed
    +-- ConfigError                       (start-up only)
    +-- BoardStartFailed                  (start-up only; `serve status` shows it)
    +-- FrameCorrupt                      (between a board and its engine process)
    +-- NativeError                       (inside the engine process and at load)
        +-- LibraryMissing
        +-- ReleaseRefused
        +-- LoadFailed
        +-- CallFailed
        +-- NothingComputed
        +-- Misuse

Errors cross processes by pickle, which keeps ``args`` only: every class hands all its arguments,
positionally, to ``super().__init__``.
"""

from __future__ import annotations

import re
from typing import ClassVar

from rkserve.discretion import without_folders


class RkserveError(Exception):
    """Anything rkserve raises on purpose. ``message`` is one sentence for the person who reads it.

    ``http_status``, ``kind`` and ``code`` become the status and the ``type`` and ``code`` of the
    OpenAI error object; ``param`` names the request's key at fault, where one is.
    """

    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    param: str | None = None
    retry_after_s: int | None = None

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return str(self.args[0]) if self.args else type(self).__name__

    def __str__(self) -> str:
        return self.message


class RequestError(RkserveError):
    """The request cannot be served as it was sent; sending it again changes nothing."""

    http_status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.param = param


class UnsupportedParameter(RequestError):
    """A parameter that would change the answer and that rkserve cannot honour."""

    code = "unsupported_parameter"


class ModelNotFound(RequestError):
    """No board serves, or is configured for, the model that the request names."""

    http_status = 404
    code = "model_not_found"

    def __init__(self, model: str) -> None:
        RkserveError.__init__(self, model)
        self.model = model
        self.param = "model"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"The model '{self.model}' does not exist. GET /v1/models lists those that do."


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
        size = f"at least {self.prompt_tokens}" if self.at_least else f"{self.prompt_tokens}"
        return (
            f"This model's maximum context length is {self.context_len} tokens, of which at least "
            f"one must be left for the answer; the prompt has {size} tokens."
        )


class SamplingFixed(RequestError):
    """``strict_sampling`` was asked for, and the board's runtime fixes sampling at load."""

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
    """The adapter's file is missing, changed or refused by the runtime; the board goes on."""

    code = "adapter_broken"

    def __init__(self, adapter: str, reason: str) -> None:
        RkserveError.__init__(self, adapter, reason)
        self.adapter, self.reason = adapter, reason
        self.param = "model"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Adapter '{self.adapter}' cannot be used: {without_folders(self.reason)}."


class CacheNotFound(RequestError):
    """No board has a prompt cache of that name."""

    http_status = 404
    code = "cache_not_found"

    def __init__(self, name: str, param: str = "use_cache") -> None:
        RkserveError.__init__(self, name, param)
        self.name, self.param = name, param

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"There is no prompt cache '{self.name}'. GET /v1/cache/{{model}} lists those."


class CacheUnsupported(RequestError):
    """The model, the runtime or the board's settings allow no prompt cache."""

    code = "cache_unsupported"


class GenerationNotFound(RequestError):
    """No board holds a generation of that id: it never was, or it has ended."""

    http_status = 404
    code = "generation_not_found"

    def __init__(self, generation: str) -> None:
        RkserveError.__init__(self, generation)
        self.generation = generation

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return (
            f"There is no generation '{self.generation}': it does not exist, or it has ended. "
            "GET /v1/generations lists those that run."
        )


class BoardNotFound(RequestError):
    """No board has that name."""

    http_status = 404
    code = "board_not_found"

    def __init__(self, board: str, param: str = "board") -> None:
        RkserveError.__init__(self, board, param)
        self.board, self.param = board, param

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"There is no board '{self.board}'. GET /v1/boards lists those that there are."


class StateConflict(RequestError):
    """The generation's state does not allow what was asked; nothing was changed."""

    http_status = 409
    code = "state_conflict"

    def __init__(self, asked: str, state: str, hint: str = "") -> None:
        RkserveError.__init__(self, asked, state, hint)
        self.asked, self.state, self.hint = asked, state, hint

    @property
    def message(self) -> str:
        """The sentence for the user."""
        said = f"Cannot {self.asked} a generation that is {self.state}."
        return f"{said} {self.hint}" if self.hint else said


class Forbidden(RequestError):
    """The call needs the admin key, or has to come from this machine."""

    http_status = 403
    code = "forbidden"


class HookFailed(RkserveError):
    """An intervention hook raised; it ended its own generation and nothing else.

    ``reason`` is for the client; ``detail`` is the operator's own code speaking, for the log.
    """

    code = "hook_failed"

    def __init__(self, hook: str, reason: str, detail: str = "") -> None:
        super().__init__(hook, reason, detail)
        self.hook, self.reason, self.detail = hook, reason, detail

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"The intervention hook {self.hook} failed: {self.reason}."


class PauseExpired(RkserveError):
    """A paused generation was not resumed in time and was given up."""

    http_status = 504
    code = "pause_expired"

    def __init__(self, paused_s: float) -> None:
        super().__init__(paused_s)
        self.paused_s = paused_s

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"The generation was paused for {self.paused_s:.0f} s and nobody resumed it."


class TooManyPaused(RkserveError):
    """The board keeps as many paused generations as it may: resume or abort one of them."""

    http_status = 429
    kind = "rate_limit_error"
    code = "too_many_paused"

    def __init__(self, board_id: str, limit: int) -> None:
        super().__init__(board_id, limit)
        self.board_id, self.limit = board_id, limit

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return (
            f"Board {self.board_id} keeps at most {self.limit} paused generations, and has so many "
            "now. Resume or abort one of them first."
        )


class QueueFull(RkserveError):
    """Every board that could take the request has a full queue."""

    http_status = 429
    kind = "rate_limit_error"
    code = "queue_full"

    def __init__(self, queued: int, retry_after_s: int) -> None:
        super().__init__(queued, retry_after_s)
        self.queued, self.retry_after_s = queued, retry_after_s

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return (
            f"All boards are busy and {self.queued} requests are waiting, which is the limit. "
            f"Try again in {self.retry_after_s} s."
        )


class QueueTimeout(RkserveError):
    """The request waited for a board longer than the configured limit."""

    http_status = 503
    kind = "overloaded_error"
    code = "queue_timeout"

    def __init__(self, waited_s: float, retry_after_s: int) -> None:
        super().__init__(waited_s, retry_after_s)
        self.waited_s, self.retry_after_s = waited_s, retry_after_s

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"The request waited {self.waited_s:.0f} s for a board and was given up."


class NoBoard(RkserveError):
    """No board is ready to serve the model now."""

    http_status = 503
    kind = "overloaded_error"
    code = "no_board"

    def __init__(self, model: str, reason: str, retry_after_s: int = 5) -> None:
        super().__init__(model, reason, retry_after_s)
        self.model, self.reason, self.retry_after_s = model, reason, retry_after_s

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"No board can serve '{self.model}' now: {without_folders(self.reason)}."


class BoardFailed(RkserveError):
    """A board was lost while it answered.

    ``reason`` may hold what the library said, word for word; ``message`` leaves the folders out.
    """

    http_status = 503
    kind = "server_error"
    code = "board_failed"
    retry_after_s: int | None = 1

    def __init__(self, board_id: str, reason: str) -> None:
        super().__init__(board_id, reason)
        self.board_id, self.reason = board_id, reason

    @property
    def message(self) -> str:
        """The sentence for the user."""
        reason = without_folders(self.reason)
        return f"Board {self.board_id} failed while it answered: {reason}."


class BoardOutOfOrder(BoardFailed):
    """The board takes no requests, and has given up those that waited; another one may."""

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Board {self.board_id} is out of order: {without_folders(self.reason)}."


class BoardSilent(BoardFailed):
    """The board did not answer in time; what became of the call is ``reason``, or not known."""

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Board {self.board_id} did not answer: {without_folders(self.reason)}."


class EngineDied(BoardFailed):
    """The engine process ended: the library crashed, or something killed it."""


class EngineHung(BoardFailed):
    """The library stopped calling back, or a call into it did not return."""


class RunFailed(BoardFailed):
    """The runtime refused or ended this run with an error; the engine lives on."""

    http_status = 502
    code = "run_failed"
    retry_after_s = None


class ConfigError(RkserveError):
    """A setting is missing or wrong. The message names the key and the fix."""

    code = "config_error"


class BoardStartFailed(RkserveError):
    """A board's replica could not start. ``parse`` finds it again in Ray's status message."""

    code = "board_start_failed"

    _PATTERN = re.compile(r"board '([^'\n]+)' cannot start: (.+)")

    def __init__(self, board_id: str, reason: str) -> None:
        super().__init__(board_id, reason)
        self.board_id, self.reason = board_id, reason

    @property
    def message(self) -> str:
        """The sentence for the operator, on one line."""
        return f"board '{self.board_id}' cannot start: {' '.join(self.reason.split())}"

    @classmethod
    def parse(cls, text: str) -> BoardStartFailed | None:
        """Return the last such error that ``text`` quotes, or None."""
        found = cls._PATTERN.findall(text)
        return cls(*found[-1]) if found else None


class FrameCorrupt(RkserveError):
    """The pipe between a board and its engine process does not hold frames."""


class NativeError(RkserveError):
    """Something about the vendor's library; the message holds what the library said."""


class LibraryMissing(NativeError):
    """The library, or one that it needs, cannot be opened."""


class ReleaseRefused(NativeError):
    """The library is not of a release that rkserve knows to drive."""


class LoadFailed(NativeError):
    """``rkllm_init`` failed: model, memory, driver or parameters."""


class CallFailed(NativeError):
    """A call into the library returned an error; ``said`` are the lines that it logged."""

    def __init__(self, function: str, code: int, said: str = "") -> None:
        super().__init__(function, code, said)
        self.function, self.return_code, self.said = function, code, said

    @property
    def message(self) -> str:
        """The sentence for the user."""
        returned = f"{self.function} returned {self.return_code}"
        return f"{returned} (the library said: {self.said})" if self.said else returned


class NothingComputed(NativeError):
    """The library said that it had computed hidden states or logits, and delivered none."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what, self.why = what, why

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"the library delivered nothing of {self.what}: {self.why}"


class Misuse(NativeError):
    """A call that the handle's state does not allow; it was not passed on to the library."""
