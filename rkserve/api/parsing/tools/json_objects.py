"""Calls that are JSON objects: between tags as Hermes and Qwen write them, or bare as Llama 3."""

from __future__ import annotations

from rkserve.api.parsing.tools.base import CallSyntax, Part, ToolCallParser, begins
from rkserve.api.parsing.tools.json_stream import ObjectCall

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
        """See ``ToolCallParser``."""
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
