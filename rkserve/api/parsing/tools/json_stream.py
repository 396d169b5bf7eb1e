"""Incremental parsers of calls in JSON.

They find the end of a call, its name, and the text of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pydantic_core import from_json

_CLOSERS = {"{": "}", "[": "]"}
NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")


class PartialCall(Protocol):
    """A call that is being parsed."""

    @property
    def done(self) -> bool:
        """Return whether the call is complete."""

    @property
    def bad(self) -> bool:
        """Return whether the text is no call."""

    @property
    def name(self) -> str | None:
        """The tool's name, as soon as it is known."""

    def feed(self, text: str) -> int:
        """Take more text, and return how much of it belongs to the call."""

    def take(self) -> str:
        """Return the arguments that became certain since the last time, as JSON text."""


def as_json(text: str) -> Any:
    """Return the value of JSON text. Raises ``ValueError``."""
    return from_json(text, allow_inf_nan=False)


class ObjectScan:
    """The text of one JSON object: its members by name, each as far as received."""

    def __init__(self) -> None:
        self.done = self.bad = False
        self.texts: dict[str, list[str]] = {}
        self.complete: set[str] = set()
        self._state: Callable[[str, int], int] = self._opens
        self._key: str | None = None
        self._parts: list[str] = []  # of the string or value that is being read
        self._open: list[str] = []  # what has to close it
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int:
        """Take more text, and return how much of it belongs to the object."""
        at = 0
        while at < len(text) and not self.done and not self.bad:
            at = self._state(text, at)
        return at

    def _opens(self, text: str, at: int) -> int:
        return self._expect(text, at, {"{": self._first})

    def _first(self, text: str, at: int) -> int:
        return self._expect(text, at, {'"': self._named, "}": self._ended})

    def _next(self, text: str, at: int) -> int:
        return self._expect(text, at, {'"': self._named})

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, at, {":": self._begun})

    def _behind(self, text: str, at: int) -> int:
        return self._expect(text, at, {",": self._next, "}": self._ended})

    def _expect(self, text: str, at: int, after: dict[str, Callable[[str, int], int]]) -> int:
        if text[at].isspace():
            return at + 1
        state = after.get(text[at])
        if state is None:
            self.bad = True
            return at
        if state == self._ended:
            self.done = True
            return at + 1
        self._state = state
        if state == self._named:
            self._key, self._in_string, self._parts = None, True, ['"']
        return at + 1

    def _ended(self, text: str, at: int) -> int:  # noqa: ARG002 - never asked: feed stops before
        return at

    def _named(self, text: str, at: int) -> int:
        end = self._value_end(text, at)
        self._parts.append(text[at:end])
        if not self._in_string and not self.bad:
            name = self._parsed("".join(self._parts))
            self._key, self._state = name if isinstance(name, str) else None, self._colon
        return end

    def _begun(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        self._state = self._valued
        assert self._key is not None  # a name that is no string is bad
        self._parts = self.texts[self._key] = []
        self.complete.discard(self._key)
        return at

    def _valued(self, text: str, at: int) -> int:
        begun = bool(self._parts)
        end = self._value_end(text, at)
        if end > at:
            self._parts.append(text[at:end])
        ended = not self._in_string and not self._open
        last = self._parts[-1][-1] if self._parts else ""
        # A number or a word ends before what follows it, all else with its last character.
        if ended and (last in '"}]' or (end < len(text) and (begun or end > at))):
            self._parsed("".join(self._parts))
            self._state = self._behind
            assert self._key is not None
            self.complete.add(self._key)
        elif end == at:
            self.bad = True  # no value at all
        return end

    def _parsed(self, text: str) -> Any:
        try:
            return as_json(text)
        except ValueError:
            self.bad = True
            return None

    def _value_end(self, text: str, at: int) -> int:
        """Return the position where the value ends, is invalid, or the text ends."""
        while at < len(text) and not self.bad:
            character = text[at]
            if self._in_string:
                at += 1
                if self._closes_string(character) and not self._open:
                    return at
            elif character == '"':
                self._in_string = True
                at += 1
            elif character in "{[":
                self._open.append(_CLOSERS[character])
                at += 1
            elif not self._open and (character in ",}]" or character.isspace()):
                return at
            elif character in "}]":
                self.bad = self._open.pop() != character
                at += 1
                if self.bad or not self._open:
                    return at
            else:
                at += 1
        return at

    def _closes_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return True
        elif character < " ":  # JSON has an escape for each of these
            self.bad = True
        return False


class ObjectCall:
    """A call as one object: ``{"name": "f", "arguments": {...}}``."""

    def __init__(self) -> None:
        self._scan = ObjectScan()
        self._taken = 0
        self._whole: str | None = None  # arguments that came in another form, once they are known
        self.bad = False

    @property
    def done(self) -> bool:
        """Return whether the object is complete."""
        return self._scan.done

    @property
    def name(self) -> str | None:
        """Known once its member is complete, and the arguments are certain to be an object."""
        name = self._member(NAME_KEYS)
        if name is None or name not in self._scan.complete:
            return None
        if self._member(ARGUMENT_KEYS) is None and not self.done:
            return None
        found = as_json("".join(self._scan.texts[name]))
        return found if isinstance(found, str) and self._is_certain() else None

    def feed(self, text: str) -> int:
        """See ``PartialCall``."""
        used = self._scan.feed(text)
        self.bad = self._scan.bad
        if self.done and not self._streams():
            self._whole = self._other_form()
            self.bad = self._whole is None
        if self.done and self.name is None:
            self.bad = True
        return used

    def take(self) -> str:
        """See ``PartialCall``."""
        if self._whole is not None:
            text, self._whole = self._whole, ""
            return text
        key = self._member(ARGUMENT_KEYS)
        if key is None or not self._streams():
            return ""
        parts = self._scan.texts[key]
        text, self._taken = "".join(parts[self._taken :]), len(parts)
        return text

    def _member(self, keys: tuple[str, ...]) -> str | None:
        return next((key for key in keys if key in self._scan.texts), None)

    def _streams(self) -> bool:
        """Return whether the arguments are an object, which can be streamed."""
        key = self._member(ARGUMENT_KEYS)
        parts = [] if key is None else self._scan.texts[key]
        return bool(parts) and parts[0][0] == "{"

    def _is_certain(self) -> bool:
        return self._streams() or self._whole is not None

    def _other_form(self) -> str | None:
        """Return arguments in another form as the text of an object; None if that is impossible."""
        key = self._member(ARGUMENT_KEYS)
        found = None if key is None else as_json("".join(self._scan.texts[key]))
        if found is None:
            return "{}"
        if not isinstance(found, str):
            return None
        try:  # some models write the object as text, as OpenAI's JSON has it
            return found if isinstance(as_json(found), dict) else None
        except ValueError:
            return None


class NamedCall:
    """A call whose name came before it: its text is the object of its arguments."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self._scan = ObjectScan()
        self._news: list[str] = []

    @property
    def done(self) -> bool:
        """Return whether the object is complete."""
        return self._scan.done

    @property
    def bad(self) -> bool:
        """Return whether the text is no object."""
        return self._scan.bad

    def feed(self, text: str) -> int:
        """See ``PartialCall``."""
        used = self._scan.feed(text)
        self._news.append(text[:used])
        return used

    def take(self) -> str:
        """See ``PartialCall``."""
        text = "".join(self._news)
        self._news.clear()
        return text
