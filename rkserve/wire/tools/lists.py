"""Calls in a list, as Mistral's and the pythonic models write them; and their beginnings.

The runtime hides control tokens, and the marks before these calls are such: so a list at the
beginning of an answer is one of calls if it calls tools that there are.
"""

from __future__ import annotations

import re
from abc import abstractmethod

from rkserve.wire.tools.calls import Calls, begins
from rkserve.wire.tools.python import PythonCall
from rkserve.wire.tools.scan import NamedCall, ObjectCall


class _List(Calls):
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
        """No list comes; this may be a call all the same."""
        return self._void()

    @abstractmethod
    def _item(self) -> bool:
        """Where a call in the list begins."""

    def _after_call(self) -> bool:
        """Behind a call in the list."""
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
        """Another list, or words."""
        self._state = self._talking
        return True

    def _take(self, count: int) -> None:
        self._raw.append(self._left[:count])
        self._left = self._left[count:]


class Mistral(_List):
    """``[TOOL_CALLS] [{"name": "f", "arguments": {...}}]``, or ``[TOOL_CALLS]f[ARGS]{...}``."""

    marker = "[TOOL_CALLS]"
    _ARGUMENTS = "[ARGS]"
    _NAME = re.compile(r"[\w.:/-]+")
    _alone = False  # the call stands in no list

    @classmethod
    def opening(cls, name: str | None) -> str:
        """See ``Calls``."""
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
        """A name, and its arguments behind it."""
        found = self._NAME.match(text)
        name = found[0] if found else ""
        rest = text[len(name) :]
        if not rest:
            return False if any(one.startswith(name) for one in self._names) else self._void()
        if not self._knows(name):
            return self._void()
        used = len(self._left) - len(rest)
        mark = begins(rest, self._ARGUMENTS)
        if mark is None:
            return False
        used += len(self._ARGUMENTS) if mark else 0
        if not mark and rest.lstrip()[:1] not in ("", "{"):
            return self._void()
        self._alone = True
        return self._open(NamedCall(name), used)

    def _after_call(self) -> bool:
        if not self._alone:
            return super()._after_call()
        self._state = self._after_list
        return True


class MistralArgs(Mistral):
    """``[TOOL_CALLS]f[ARGS]{...}``, as the newer templates of Mistral write it."""

    @classmethod
    def opening(cls, name: str | None) -> str:
        """See ``Calls``."""
        return "[TOOL_CALLS]" if name is None else f"[TOOL_CALLS]{name}[ARGS]"


class Pythonic(_List):
    """``[f(a=1, b='x'), g()]``, as Llama 4 and LFM2 write it."""

    marker = "<|tool_call_start|>"
    _END = "<|tool_call_end|>"
    _NAME = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(")
    _PART_OF_NAME = re.compile(r"\s*([A-Za-z_][\w.]*)?\s*\Z")

    @classmethod
    def opening(cls, name: str | None) -> str:
        """See ``Calls``."""
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
