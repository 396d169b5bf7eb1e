"""Reasoning before an answer: its options in a call, and its end in the text.

Reasoning stands between markers such as ``<think>``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rkserve.api.json.body import JsonObject
from rkserve.api.json.fields import quoted
from rkserve.api.parsing.parts import Part, ReasoningPart, TextPart, overlap
from rkserve.core.errors import RequestError
from rkserve.core.messages import Thinking

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_OFF = ("none", "minimal")  # the least effort of a model that can also answer without reasoning
_SWITCHES = ("enable_thinking", "thinking")  # as templates call it
# Variables that rkserve itself sets.
RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "tokenize"),
)
MOST_TOKENS = 1_000_000


@dataclass(frozen=True)
class ReasoningOptions:
    """The reasoning options of a call. ``variables`` are for the template.

    With ``max_tokens`` of None the model folder decides, by ``effort``.
    """

    enabled: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None
    variables: JsonObject = field(default_factory=dict)

    def given(self, default: bool | None) -> JsonObject:
        """Return the template's variables; ``default`` is the model folder's setting."""
        enabled = default if self.enabled is None else self.enabled
        switches = {} if enabled is None else dict.fromkeys(_SWITCHES, enabled)
        return {**switches, **self.variables}


NO_WISH = ReasoningOptions()


def read_wish(
    variables: JsonObject, enabled: bool | None, effort: str | None, most: int | None
) -> ReasoningOptions:
    """Return the options of the keys ``chat_template_kwargs``, ``enable_thinking``,
    ``reasoning_effort`` and ``max_reasoning_tokens``. The first one yields to the others.

    Raises ``RequestError``.
    """
    for name in variables:
        if name in RESERVED:
            path = f"chat_template_kwargs.{name}"
            raise RequestError(f"Invalid '{path}': rkserve itself sets {quoted(name)}.", path)
    if enabled is None and effort is not None:
        enabled = effort not in _OFF
    if effort is not None:
        variables = {**variables, "reasoning_effort": effort}
    if enabled is not None:
        variables = {**variables, **dict.fromkeys(_SWITCHES, enabled)}
    said = variables.get("enable_thinking", variables.get("thinking"))
    return ReasoningOptions(
        enabled=said if isinstance(said, bool) else None,
        effort=effort,
        max_tokens=most,
        variables=variables,
    )


class ReasoningSplitter:
    """Tells the block of thoughts at the beginning of an answer from the answer itself.

    The marks, and the line breaks next to them, belong to neither.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._open, self._close = thinking.open, thinking.close
        self._left = ""
        self._parts: list[Part] = []
        self._state: Callable[[], bool] = self._opened if thinking.begun else self._before

    @property
    def over(self) -> bool:
        """Return whether the reasoning has ended."""
        return self._state == self._answer

    def feed(self, text: str) -> list[Part]:
        """Take more of what the model says."""
        self._left += text
        while self._left and self._state():
            pass
        return self._taken()

    def end(self) -> list[Part]:
        """End the answer."""
        left, self._left = self._left, ""
        if self._state == self._inside:
            self._think(left.rstrip("\n"))
        elif self._state in (self._before, self._answer):
            self._say(left)
        return self._taken()

    def _before(self) -> bool:
        text = self._left.lstrip()
        if text.startswith(self._open):
            self._left, self._state = text[len(self._open) :], self._opened
            return True
        if self._open.startswith(text):
            return False
        self._state = self._answer
        return True

    def _opened(self) -> bool:
        text = self._left.lstrip()
        if self._open.startswith(text):  # some models repeat the template's marker
            return False
        again = text.startswith(self._open)
        # A blank before the first word is part of a prefill's reasoning.
        self._left = (text.removeprefix(self._open) if again else self._left).lstrip("\n")
        self._state = self._inside
        return True

    def _inside(self) -> bool:
        thought, found, rest = self._left.partition(self._close)
        if found:
            self._think(thought.rstrip("\n"))
            self._left, self._state = rest, self._behind
            return True
        # Line breaks before the mark are not known to be that before it comes.
        certain = thought[: len(thought) - overlap(thought, self._close)].rstrip("\n")
        self._think(certain)
        self._left = thought[len(certain) :]
        return False

    def _behind(self) -> bool:
        self._left = self._left.lstrip("\n")
        if self._left:
            self._state = self._answer
        return bool(self._left)

    def _answer(self) -> bool:
        self._say(self._left)
        self._left = ""
        return False

    def _think(self, text: str) -> None:
        if text:
            self._parts.append(ReasoningPart(text))

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(TextPart(text))

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
