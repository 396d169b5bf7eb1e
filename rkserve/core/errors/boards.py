"""Errors of boards, their engines and the vendor's library, at start and while serving."""

from __future__ import annotations

import re

from rkserve.core.errors.requests import RkserveError, without_folders


class HookFailed(RkserveError):
    """An intervention hook raised; only its own generation ended.

    ``reason`` is for the client; ``detail`` is the error of the operator's code, for the log.
    """

    code = "hook_failed"
    sentence = "The intervention hook {hook} failed: {reason}."

    def __init__(self, hook: str, reason: str, detail: str = "") -> None:
        super().__init__(hook, reason, detail)
        self.hook, self.reason, self.detail = hook, reason, detail


class PauseExpired(RkserveError):
    """A paused generation was not resumed in time and was ended."""

    http_status = 504
    code = "pause_expired"
    sentence = "The generation was paused for {paused_s:.0f} s and nobody resumed it."

    def __init__(self, paused_s: float) -> None:
        super().__init__(paused_s)
        self.paused_s = paused_s


class TooManyPaused(RkserveError):
    """The board has reached its limit of paused generations: resume or abort one of them."""

    http_status = 429
    kind = "rate_limit_error"
    code = "too_many_paused"
    sentence = (
        "Board {board_id} keeps at most {limit} paused generations, and has so many "
        "now. Resume or abort one of them first."
    )

    def __init__(self, board_id: str, limit: int) -> None:
        super().__init__(board_id, limit)
        self.board_id, self.limit = board_id, limit


class QueueFull(RkserveError):
    """Every board that could take the request has a full queue."""

    http_status = 429
    kind = "rate_limit_error"
    code = "queue_full"
    sentence = (
        "All boards are busy and {queued} requests are waiting, which is the limit. "
        "Try again in {retry_after_s} s."
    )

    def __init__(self, queued: int, retry_after_s: int) -> None:
        super().__init__(queued, retry_after_s)
        self.queued, self.retry_after_s = queued, retry_after_s


class QueueTimeout(RkserveError):
    """The request waited for a board longer than the configured limit."""

    http_status = 503
    kind = "overloaded_error"
    code = "queue_timeout"
    sentence = "The request waited {waited_s:.0f} s for a board and was given up."

    def __init__(self, waited_s: float, retry_after_s: int) -> None:
        super().__init__(waited_s, retry_after_s)
        self.waited_s, self.retry_after_s = waited_s, retry_after_s


class DeadlineUnreachable(RkserveError):
    """The answer could not be ready within the request's timeout; it was not begun.

    ``needs_s`` is the expected time, with the wait for a board. Without ``retry_after_s`` it would
    be late on an idle cluster too.
    """

    http_status = 503
    kind = "overloaded_error"
    code = "deadline_unreachable"

    def __init__(self, timeout_s: float, needs_s: float, retry_after_s: int | None = None) -> None:
        super().__init__(timeout_s, needs_s, retry_after_s)
        self.timeout_s, self.needs_s, self.retry_after_s = timeout_s, needs_s, retry_after_s

    @property
    def message(self) -> str:
        """The sentence for the user."""
        busy = " as busy as the boards are" if self.retry_after_s is not None else ""
        return (
            f"The answer would not be ready within {self.timeout_s:g} s: it is expected to take "
            f"about {self.needs_s:.1f} s{busy}. It was not begun."
        )


class DeadlineExceeded(RkserveError):
    """The request's timeout passed during generation, which was stopped."""

    http_status = 504
    code = "deadline_exceeded"
    sentence = "The answer was not ready within {timeout_s:g} s, and was stopped."

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s


class BoardTimeExceeded(RkserveError):
    """A request has occupied a board beyond the time limit; it was stopped."""

    http_status = 504
    code = "board_time_exceeded"
    sentence = (
        "The request had a board for {limit_s:g} s, pauses on it included, which is the "
        "limit (router.max_board_s), and was stopped."
    )

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.limit_s = limit_s


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

    ``reason`` may hold the library's own message; ``message`` leaves the folders out.
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
    """The board takes no requests and has rejected the waiting ones; another board may serve."""

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Board {self.board_id} is out of order: {without_folders(self.reason)}."


class BoardSilent(BoardFailed):
    """The board did not answer in time; ``reason`` is the call's fate, if known."""

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Board {self.board_id} did not answer: {without_folders(self.reason)}."


class BoardGone(BoardFailed):
    """The board's replica has ended: nothing continues there, and its successor starts empty."""


class EngineDied(BoardFailed):
    """The engine process ended: the library crashed, or something killed it."""


class EngineHung(BoardFailed):
    """The library stopped calling back, or a call into it did not return."""


class RunFailed(BoardFailed):
    """The runtime refused or ended this run with an error; the engine lives on."""

    http_status = 502
    code = "run_failed"
    retry_after_s = None


class PoisonRequest(RkserveError):
    """The request crashed boards one after the other; it is not tried on another one.

    Clients do not retry after its status.
    """

    http_status = 422
    kind = "invalid_request_error"
    code = "poison_request"

    def __init__(self, boards: int, reason: str) -> None:
        super().__init__(boards, reason)
        self.boards, self.reason = boards, reason

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return (
            f"{self.boards} boards failed while they worked on this request, at the same place of "
            f"it, and no other one is asked. Last: {without_folders(self.reason)}."
        )


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
    """An error of the vendor's library; the message holds the library's own."""


class LibraryMissing(NativeError):
    """The library, or one that it needs, cannot be opened."""


class ReleaseRefused(NativeError):
    """The library's release is not supported."""


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
    """The library reported success for hidden states or logits, and delivered none."""

    sentence = "the library delivered nothing of {what}: {why}"

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what, self.why = what, why


class StepsRefused(NativeError):
    """A run of single steps cannot do with this model, or its tokenizer, what it was asked for."""


class Misuse(NativeError):
    """A call that the handle's state does not allow; it was not passed on to the library."""
