"""The calls of Llama 3: objects, with nothing around them that the runtime would show."""

from __future__ import annotations

from rkserve.api.parsing.tools.base import CallSyntax, ToolCallParser, begins
from rkserve.api.parsing.tools.json_stream import ObjectCall


class Llama(ToolCallParser):
    """``{"name": "f", "parameters": {...}}``, several of them with ``;`` between.

    The mark before them is a control token, which the runtime hides: so an object at the beginning
    of an answer is a call if it calls a tool that there is.
    """

    marker = "<|python_tag|>"
    shape = CallSyntax(' "{}", "parameters":', "}", between='; {"name":')

    @classmethod
    def opening(cls, name: str | None) -> str:
        """See ``ToolCallParser``."""
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
