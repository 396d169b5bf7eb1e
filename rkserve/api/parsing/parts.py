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
    """A call of a tool begins. ``index`` counts the calls of this answer, also those that turned
    out to be void, and ``call_id`` is this call's alone.
    """

    name: str
    index: int = 0
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the JSON text of the arguments of the call that began last."""

    arguments: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Retraction:
    """So many characters at the end of the words and of the thoughts, and so many of the last
    calls, are not part of the answer after all.
    """

    words: int = 0
    thoughts: int = 0
    calls: int = 0


Part = TextPart | ReasoningPart | ToolCallStart | ToolCallDelta | Retraction


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``mark``."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
