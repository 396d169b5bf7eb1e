"""Incremental parsers of calls in JSON.

They find the end of a call, its name, and the text of its arguments.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from pydantic_core import from_json

_CLOSERS = {"{": "}", "[": "]"}
# A string, a sign, or a number or word; the latter ends only with what follows it.
_TOKEN = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_OPEN_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*\\?', re.DOTALL)
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
    """The text of one JSON object, and its members by name, each as far as received."""

    def __init__(self) -> None:
        self.done = self.bad = False
        self.complete: set[str] = set()
        self._text, self._at = "", 0  # all of it, and the end of the last token
        self._spans: dict[str, tuple[int, int | None]] = {}  # of the members' values
        self._wants = "{"  # the characters of which one has to come; empty before and in a value
        self._key = ""  # of the value that is being read
        self._open: list[str] = []  # what has to close it

    def __contains__(self, key: object) -> bool:
        return key in self._spans

    def member(self, key: str) -> str:
        """Return the text of a member's value as far as received."""
        begin, end = self._spans[key]
        return self._text[begin:end]

    def feed(self, text: str) -> int:
        """Take more text, and return how much of it belongs to the object."""
        before = len(self._text)
        self._text += text
        while not self.done and not self.bad and self._step():
            pass
        return max(0, self._at - before) if self.done or self.bad else len(text)

    def _step(self) -> bool:
        """Read the next token; return False if that needs more text."""
        at = self._at
        while at < len(self._text) and self._text[at].isspace():
            at += 1
        if at == len(self._text):
            return False
        first = self._text[at]
        begins = not self._wants and not self._open  # a value
        if first in ",:}]" if begins else self._wants and first not in self._wants:
            return self._fail(at)
        if begins:
            self._spans[self._key] = (at, None)
            self.complete.discard(self._key)
        found = _TOKEN.match(self._text, at)
        if found is None:
            string = _OPEN_STRING.match(self._text, at)
            assert string is not None  # all else is a token
            return self._fail(string.end()) if string.end() < len(self._text) else False
        token = found[0]
        if found.end() == len(self._text) and token not in "{}[],:" and first != '"':
            return False
        self._at = found.end()
        self._take(token)
        return True

    def _take(self, token: str) -> None:
        if not self._wants:
            self._take_value(token)
        elif token == ":":
            self._wants = ""
        elif token == "}":
            self.done = True
        elif token in ("{", ","):
            self._wants = '"}' if token == "{" else '"'
        else:
            self._wants, self._key = ":", str(self._parsed(token))

    def _take_value(self, token: str) -> None:
        if token in _CLOSERS:
            self._open.append(_CLOSERS[token])
        elif token in _CLOSERS.values() and self._open.pop() != token:
            self._fail(self._at)
        if not self._open and not self.bad:
            self._spans[self._key] = (self._spans[self._key][0], self._at)
            self._parsed(self.member(self._key))
            self.complete.add(self._key)
            self._wants = ",}"

    def _parsed(self, text: str) -> Any:
        try:
            return as_json(text)
        except ValueError:
            self.bad = True
            return None

    def _fail(self, at: int) -> bool:
        self.bad, self._at = True, at
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
        found = as_json(self._scan.member(name))
        certain = self._streams() or self._whole is not None
        return found if isinstance(found, str) and certain else None

    def feed(self, text: str) -> int:
        used = self._scan.feed(text)
        self.bad = self._scan.bad
        if self.done and not self._streams():
            self._whole = self._other_form()
            self.bad = self._whole is None
        if self.done and self.name is None:
            self.bad = True
        return used

    def take(self) -> str:
        if self._whole is not None:
            text, self._whole = self._whole, ""
            return text
        key = self._member(ARGUMENT_KEYS)
        if key is None or not self._streams():
            return ""
        text = self._scan.member(key)[self._taken :]
        self._taken += len(text)
        return text

    def _member(self, keys: tuple[str, ...]) -> str | None:
        return next((key for key in keys if key in self._scan), None)

    def _streams(self) -> bool:
        """Return whether the arguments are an object, which can be streamed."""
        key = self._member(ARGUMENT_KEYS)
        return key is not None and self._scan.member(key).startswith("{")

    def _other_form(self) -> str | None:
        """Return arguments in another form as the text of an object; None if that is impossible."""
        key = self._member(ARGUMENT_KEYS)
        found = None if key is None else as_json(self._scan.member(key))
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
        used = self._scan.feed(text)
        self._news.append(text[:used])
        return used

    def take(self) -> str:
        text = "".join(self._news)
        self._news.clear()
        return text
