"""The base of tool call parsers, and the parts of an answer that parsers yield.

Text is held back only while it may be a call. Parts are text, reasoning and tool calls in their
order, and every dialect writes them in its own JSON.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rkserve.api.parsing.tools.json_stream import PartialCall


@dataclass(frozen=True, slots=True)
class TextPart:
    """More text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a tool call.

    ``index`` counts the calls of this answer, including retracted ones; ``call_id`` is unique.
    """

    name: str
    index: int = 0
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More JSON text of the arguments of the latest call."""

    arguments: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Retraction:
    """The number of trailing characters of text and reasoning, and of last calls, to retract."""

    words: int = 0
    thoughts: int = 0
    calls: int = 0


Part = TextPart | ReasoningPart | ToolCallStart | ToolCallDelta | Retraction


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``mark``."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The exact syntax of calls after the opening of one.

    A call is ``before`` with the tool's name in place of ``{}``, its arguments, and ``after``; if
    the opening has the name, the call begins with the arguments. ``between`` separates a call from
    the next name: None if only one call is possible. ``end`` follows the last. With ``keywords``
    arguments are written ``a=1, b=2`` instead of as an object.
    """

    before: str
    after: str
    between: str | None
    end: str = ""
    keywords: bool = False


class ToolCallParser(ABC):
    """Parses tool calls of one format in an answer, independent of how its text is split.

    ``marker`` begins a call at any position. A subclass defines the states after it: methods that
    consume text from ``_left``, and return whether they could.
    """

    marker: ClassVar[str]
    shape: ClassVar[CallSyntax]

    def __init__(self, names: frozenset[str]) -> None:
        """``names`` are those of the offered tools."""
        self._names = names
        self._left = ""  # text that is not consumed yet
        self._raw: list[str] = []  # text of the call that is being parsed
        self._call: PartialCall | None = None
        self._begun = False
        self._parts: list[Part] = []
        self._state: Callable[[], bool] = self._starting

    @classmethod
    @abstractmethod
    def opening(cls, name: str | None) -> str:
        """Return the beginning of an answer that calls a tool, or the named one.

        It ends where a token is likely to end: not with a blank.
        """

    @abstractmethod
    def _marked(self) -> bool:
        """Parse after a marker."""

    @abstractmethod
    def _after_call(self) -> bool:
        """Parse after a complete call."""

    def feed(self, text: str) -> list[Part]:
        """Add text of the answer."""
        self._left += text
        self._run()
        return self._taken()

    def end(self) -> list[Part]:
        """End the answer: text that was held back is text, or was between two calls."""
        if self._raw:
            self._void()
        elif self._state not in (self._starting, self._talking) and self._left.isspace():
            self._left = ""
        self._add_text(self._left)
        self._left = ""
        return self._taken()

    # -- states -------------------------------------------------------------------------------

    def _starting(self) -> bool:
        """Parse the beginning of the answer."""
        self._state = self._talking
        return True

    def _talking(self) -> bool:
        """Parse text. One line break before a marker belongs to it, as templates write it."""
        words, found, rest = self._left.partition(self.marker)
        if not found:
            held = max(overlap(words, self.marker), overlap(words, f"\n{self.marker}"))
            self._add_text(words[: len(words) - held])
            self._left = words[len(words) - held :]
            return False
        text = words.removesuffix("\n")
        self._add_text(text)
        self._raw = [words[len(text) :] + found]
        self._left, self._state = rest, self._marked
        return True

    def _calling(self) -> bool:
        """Parse inside a call."""
        assert self._call is not None
        used = self._call.feed(self._left)
        self._raw.append(self._left[:used])
        self._left = self._left[used:]
        if self._call.bad or not self._add_call(self._call):
            return self._void()
        if self._call.done:
            self._call, self._begun, self._raw = None, False, []
            self._state = self._after_call
        return True

    # -- for subclasses -----------------------------------------------------------------------

    def _open(self, call: PartialCall, used: int = 0) -> bool:
        """Begin a call after ``used`` characters."""
        self._raw.append(self._left[:used])
        self._left = self._left[used:]
        self._call, self._begun, self._state = call, False, self._calling
        return True

    def _void(self) -> bool:
        """Turn the text read since the last call back into text."""
        if self._begun:
            self._parts.append(Retraction(calls=1))
        self._call, self._begun = None, False
        raw, self._raw = "".join(self._raw), []
        self._add_text(raw)
        self._state = self._talking
        return True

    def _knows(self, name: str) -> bool:
        """Return whether a call of that name counts."""
        return name in self._names

    # -- inside -------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._left and self._state():
            pass

    def _add_call(self, call: PartialCall) -> bool:
        """Emit the certain part of a call; return False if its name shows that it is none."""
        if not self._begun:
            name = call.name
            if name is None:
                return True
            if not self._knows(name):
                return False
            self._begun = True
            self._parts.append(ToolCallStart(name))
        if text := call.take():
            self._parts.append(ToolCallDelta(text))
        return True

    def _add_text(self, text: str) -> None:
        if text:
            self._parts.append(TextPart(text))

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


def begins(text: str, mark: str) -> bool | None:
    """Return whether a text begins with a mark; None if more text is needed to decide."""
    if text.startswith(mark):
        return True
    return None if mark.startswith(text) else False
