"""A parser of calls in Python syntax: keyword arguments with literals, converted to JSON.

Nothing of the text is executed.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from rkserve.api.parsing.tools.json_stream import as_json

_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_NAMES = {"true": True, "false": False, "null": None}  # what models write into Python


class PythonCall:
    """A call whose name and bracket came before it: its text is ``a=1, b='x')``."""

    _ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=(.*)\Z", re.DOTALL)

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.done = self.bad = False
        self._text: list[str] = []  # of the argument that is being read
        self._open: list[str] = []
        self._quote: str | None = None
        self._escaped = False
        self._count = 0
        self._news = "{"

    def feed(self, text: str) -> int:
        """See ``PartialCall``."""
        for at, character in enumerate(text):
            if self._quote is None and not self._open and character in ",)":
                self._argument(last=character == ")")
                if self.done or self.bad:
                    return at + 1
                continue
            self._text.append(character)
            self._look_at(character)
            if self.bad:
                return at + 1
        return len(text)

    def take(self) -> str:
        """See ``PartialCall``."""
        text, self._news = self._news, ""
        return text

    def _look_at(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quote is not None:
            self._escaped = character == "\\"
            if character == self._quote:
                self._quote = None
        elif character in "'\"":
            self._quote = character
        elif character in _CLOSERS:
            self._open.append(_CLOSERS[character])
        elif character in "}])":
            self.bad = not self._open or self._open.pop() != character

    def _argument(self, *, last: bool) -> None:
        text = "".join(self._text)
        self._text.clear()
        if text.strip():
            found = self._ARGUMENT.fullmatch(text)
            if found is None:
                self.bad = True
                return
            try:
                value = json.dumps(_argument_value(found[2].strip()), ensure_ascii=False)
            except ValueError:
                self.bad = True
                return
            self._news += f"{', ' if self._count else ''}{json.dumps(found[1])}: {value}"
            self._count += 1
        elif not last:
            self.bad = True  # nothing between two commas
            return
        if last:
            self._news += "}"
            self.done = True


def _argument_value(text: str) -> Any:
    """Return a JSON or Python literal. JSON goes first, because its escapes differ."""
    try:
        return as_json(text)
    except ValueError:
        return python_value(text)


def python_value(text: str) -> Any:
    """Return a Python literal, in which JSON's constants are allowed too.

    Raises:
        ValueError: it is no literal, or JSON has no such value.
    """
    try:
        # Of an escape that Python does not know it would warn on the server's own output.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as exc:
        raise ValueError(f"not a literal: {exc}") from exc


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            _held_to_json(value)
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _value(node)
    if not isinstance(key, str):
        raise ValueError("a name that is no string")  # noqa: TRY004 - of what was parsed
    return key


def _held_to_json(value: object) -> None:
    if isinstance(value, float) and not float("-inf") < value < float("inf"):
        raise ValueError("JSON has no such number")
    if isinstance(value, str):
        value.encode()  # half of a surrogate pair raises a ValueError
