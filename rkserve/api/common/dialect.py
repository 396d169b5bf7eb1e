"""The interface of a dialect, such as OpenAI's or Anthropic's: its reader and its answers.

All dialects share the calls and generations behind them. They differ in the reader of a body, in
the answer, whole or streamed, and in a stream's keep-alive and error events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rkserve.api.common import sse
from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.calls import ChatCall, CompletionCall
from rkserve.api.json.body import JsonObject
from rkserve.core.messages import Delta, Finished, Paused

AnyCall = ChatCall | CompletionCall


class DialectAnswer(Protocol):
    """The answer to a call: ``delta`` and ``finish`` stream it, ``add`` and ``end`` collect it."""

    id: str

    @property
    def versions(self) -> list[str]:
        """The version of the weights behind each choice, as far as it is known."""

    def opening(self, index: int) -> bytes:
        """Return the bytes before the first delta of a choice."""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the bytes of a delta."""

    def paused(self, index: int, paused: Paused) -> bytes:
        """Return the event of a pause."""

    def finish(self, index: int, finished: Finished) -> bytes:
        """Return the bytes that end a choice."""

    def closing(self) -> bytes:
        """Return the bytes after the last choice."""

    def broken(self, exc: BaseException) -> bytes:
        """Return the event that ends a broken stream."""

    def add(self, index: int, delta: Delta) -> object:
        """Add a delta to a whole answer."""

    def end(self, index: int, finished: Finished) -> object:
        """End a choice of a whole answer."""

    def whole(self) -> JsonObject:
        """Return the whole answer. Every choice must have ended."""


@dataclass(frozen=True)
class Dialect:
    """The reader and the answers of one API.

    ``parse`` reads a body, or raises ``RequestError``. ``answer`` takes a call, its ID (which
    begins with ``prefix``), the time in seconds since 1970 and the origin. ``ping`` keeps a silent
    stream open, also before a board has accepted it; ``broken`` ends one without an answer.
    """

    parse: Callable[[bytes], AnyCall]
    answer: Callable[[AnyCall, str, int, AnswerOrigin], DialectAnswer]
    prefix: str
    ping: Callable[[AnyCall], bytes]
    broken: Callable[[BaseException], bytes]
    headers: Mapping[str, str] = field(default_factory=lambda: sse.HEADERS)
