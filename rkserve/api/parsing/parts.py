"""Parts of an answer's text in order: text, reasoning and tool calls.

The answer parser yields them, and every dialect writes them in its own JSON.
"""

from __future__ import annotations

from dataclasses import dataclass


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
