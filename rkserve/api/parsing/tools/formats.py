"""Formats of tool calls: JSON objects between tags or bare, lists of them, and Python calls.

Hermes and Qwen write objects between tags, Llama 3 bare ones. Mistral writes a list of objects or a
name with its arguments. The runtime hides control tokens such as the markers before these calls, so
a list at the beginning of an answer is a list of calls if it names offered tools.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import abstractmethod
from typing import Any

from rkserve.api.parsing.tools.base import CallSyntax, Part, ToolCallParser, begins
from rkserve.api.parsing.tools.json_stream import NamedCall, ObjectCall, as_json

_END = "</tool_call>"


class Hermes(ToolCallParser):
    """``<tool_call>`` ``{"name": "f", "arguments": {...}}`` ``</tool_call>``, any number of them.

    The tag marks a call, so a call of an unknown tool is passed on: the client can tell the model
    that there is no such tool.
    """

    marker = "<tool_call>"
    shape = CallSyntax(' "{}", "arguments":', "}\n</tool_call>", between='\n<tool_call>\n{"name":')

    @classmethod
    def opening(cls, name: str | None) -> str:
        begun = '<tool_call>\n{"name":'
        return begun if name is None else f'{begun} "{name}", "arguments":'

    def _knows(self, name: str) -> bool:
        return bool(name)

    def _marked(self) -> bool:
        return self._open(ObjectCall())

    def end(self) -> list[Part]:
        """See ``ToolCallParser``. The call is whole, even if its end tag is not."""
        if self._state == self._after_call:
            self._left = ""
        return super().end()

    def _after_call(self) -> bool:
        """Parse the end tag, which a model may leave out at the end of its answer."""
        text = self._left.lstrip()
        found = begins(text, _END)
        if found is None:
            return False
        if found:
            self._left = text[len(_END) :]
        self._state = self._between
        return True

    def _between(self) -> bool:
        text = self._left.lstrip()
        found = begins(text, self.marker)
        if found is None:
            return False
        self._left = text if found else self._left.removeprefix("\n")
        self._state = self._talking
        return True


class Llama(ToolCallParser):
    """``{"name": "f", "parameters": {...}}``, several of them with ``;`` between.

    The marker before them is a control token, which the runtime hides: so an object at the
    beginning of an answer is a call if it names an offered tool.
    """

    marker = "<|python_tag|>"
    shape = CallSyntax(' "{}", "parameters":', "}", between='; {"name":')

    @classmethod
    def opening(cls, name: str | None) -> str:
        return '{"name":' if name is None else f'{{"name": "{name}", "parameters":'

    def _starting(self) -> bool:
        text = self._left.lstrip()
        if begins(text, self.marker) is None:
            return False
        self._state = self._marked if text[0] == "{" else self._talking
        return True

    def _marked(self) -> bool:
        text = self._left.lstrip()
        if not text:
            return False
        if text[0] != "{":
            return self._void()
        return self._open(ObjectCall(), len(self._left) - len(text))

    def _after_call(self) -> bool:
        text = self._left.lstrip()
        if not text or text == ";" or begins(text, self.marker) is None:
            return False
        inner = text[1:].lstrip() if text[0] == ";" else text
        if not inner:
            return False
        if inner[0] == "{":
            self._raw = [self._left[: len(self._left) - len(inner)]]
            self._left, self._state = inner, self._marked
        else:
            self._state = self._talking
        return True


class _List(ToolCallParser):
    """Calls between brackets, with commas between them."""

    def _starting(self) -> bool:
        text = self._left.lstrip()
        if not text:
            return False
        found = begins(text, self.marker)
        if found is None:
            return False
        self._state = self._talking if found else self._marked
        return True

    def _marked(self) -> bool:
        text = self._left.lstrip()
        if not text:
            return False
        if text[0] != "[":
            return self._unlisted(text)
        self._take(len(self._left) - len(text) + 1)
        self._state = self._item
        return True

    def _unlisted(self, text: str) -> bool:  # noqa: ARG002 - for those that have another form too
        """Parse text that is no list; it may still be a call."""
        return self._void()

    @abstractmethod
    def _item(self) -> bool:
        """Read the beginning of a call in the list."""

    def _after_call(self) -> bool:
        """Parse after a call in the list."""
        text = self._left.lstrip()
        if not text:
            return False
        if text[0] not in ",]":
            return self._void()
        last = text[0] == "]"
        self._take(len(self._left) - len(text) + 1)
        if last:
            self._raw = []
        self._state = self._after_list if last else self._item
        return True

    def _after_list(self) -> bool:
        """Parse another list, or text."""
        self._state = self._talking
        return True

    def _take(self, count: int) -> None:
        self._raw.append(self._left[:count])
        self._left = self._left[count:]


class Mistral(_List):
    """``[TOOL_CALLS] [{"name": "f", "arguments": {...}}]``, or ``[TOOL_CALLS]f[ARGS]{...}``, some
    with ``[CALL_ID]`` and nine letters and digits behind the name.

    The model's ID is not used: models repeat them, and an ID must be unique.
    """

    marker = "[TOOL_CALLS]"
    shape = CallSyntax(' "{}", "arguments":', "}", between=', {"name":', end="]")
    _ARGUMENTS = "[ARGS]"
    _NAME = re.compile(r"[\w.:/-]+")
    _ID = re.compile(r"[A-Za-z0-9]{9}")
    _ID_BEGUN = re.compile(r"[A-Za-z0-9]{0,9}")
    _MARKS = re.compile(r"(?:\[CALL_ID\][A-Za-z0-9_-]{1,64})?(?:\[ARGS\])?")
    _MARKS_BEGUN = re.compile(r"\[?|\[A(R(GS?)?)?|\[C(A(L(L(_(ID?)?)?)?)?)?|\[CALL_ID\]")
    _alone = False  # the call stands in no list

    @classmethod
    def opening(cls, name: str | None) -> str:
        begun = '[TOOL_CALLS] [{"name":'
        return begun if name is None else f'{begun} "{name}", "arguments":'

    def _starting(self) -> bool:
        text = self._left.lstrip()
        if text and text[0] != "[":
            self._state = self._marked
            return True
        return super()._starting()

    def _item(self) -> bool:
        text = self._left.lstrip()
        if not text:
            return False
        if text[0] != "{":
            return self._void()
        self._alone = False
        return self._open(ObjectCall(), len(self._left) - len(text))

    def _unlisted(self, text: str) -> bool:
        """Parse a name, an optional ID, and the arguments."""
        found = self._NAME.match(text)
        name_part = found[0] if found else ""
        rest = text[len(name_part) :]
        if not rest:
            return False if self._may_become_name(name_part) else self._void()
        name = self._named(name_part)
        if name is None:
            return self._void()
        marks = self._MARKS.match(rest)
        assert marks is not None  # all of it may be missing
        behind = rest[marks.end() :]
        if not behind and (not marks[0] or not marks[0].endswith(self._ARGUMENTS)):
            return False
        if behind and not marks[0].endswith(self._ARGUMENTS):
            if self._MARKS_BEGUN.fullmatch(behind):
                return False
            if behind.lstrip()[:1] not in ("", "{"):
                return self._void()
        self._alone = True
        return self._open(NamedCall(name), len(self._left) - len(behind))

    def _named(self, name_part: str) -> str | None:
        """Return the tool that is called; where the runtime hides the mark between them, the id
        stands right behind its name.
        """
        if self._knows(name_part):
            return name_part
        return next((name for name in self._names if self._is_with_id(name_part, name)), None)

    def _is_with_id(self, name_part: str, name: str) -> bool:
        return name_part.startswith(name) and self._ID.fullmatch(name_part[len(name) :]) is not None

    def _may_become_name(self, name_part: str) -> bool:
        return any(
            name.startswith(name_part)
            or (name_part.startswith(name) and self._ID_BEGUN.fullmatch(name_part[len(name) :]))
            for name in self._names
        )

    def _after_call(self) -> bool:
        if not self._alone:
            return super()._after_call()
        self._state = self._after_list
        return True


class MistralArgs(Mistral):
    """``[TOOL_CALLS]f[ARGS]{...}``, as the newer templates of Mistral write it."""

    # The next one would begin with a control token, which no grammar of text can demand.
    shape = CallSyntax("{}[ARGS]", "", between=None)

    @classmethod
    def opening(cls, name: str | None) -> str:
        return "[TOOL_CALLS]" if name is None else f"[TOOL_CALLS]{name}[ARGS]"


class Pythonic(_List):
    """``[f(a=1, b='x'), g()]``, as Llama 4 and LFM2 write it."""

    marker = "<|tool_call_start|>"
    shape = CallSyntax("{}(", ")", between=", ", end="]", keywords=True)
    _END = "<|tool_call_end|>"
    _NAME = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(")
    _PART_OF_NAME = re.compile(r"\s*([A-Za-z_][\w.]*)?\s*\Z")

    @classmethod
    def opening(cls, name: str | None) -> str:
        return "[" if name is None else f"[{name}("

    def _item(self) -> bool:
        found = self._NAME.match(self._left)
        if found is None:
            return False if self._PART_OF_NAME.match(self._left) else self._void()
        if not self._knows(found[1]):
            return self._void()
        return self._open(PythonCall(found[1]), found.end())

    def _after_list(self) -> bool:
        text = self._left.lstrip()
        found = begins(text, self._END)
        if found is None:
            return False
        self._left = text[len(self._END) :] if found else self._left
        self._state = self._talking
        return True


# By the names that a model folder uses.
FORMATS: dict[str, type[ToolCallParser]] = {
    "hermes": Hermes,
    "llama": Llama,
    "mistral": Mistral,
    "mistral-args": MistralArgs,
    "pythonic": Pythonic,
}
# Texts that occur in the templates of one format only, the most certain first.
_SIGNS = (
    ("<tool_call>", "hermes"),
    ("[ARGS]", "mistral-args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama"),
    ('"parameters": dictionary of argument name', "llama"),
    ("ipython", "llama"),
)


def guess(template: str) -> str | None:
    """Return the tool call format that a chat template describes, or None."""
    return next((name for sign, name in _SIGNS if sign in template), None)


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

    Raises ``ValueError``: it is no literal, or JSON has no such value.
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
