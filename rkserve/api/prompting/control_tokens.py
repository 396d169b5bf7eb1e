"""Keeps control markers that a client typed into a message from becoming control tokens.

Chat templates mix markup and content into one string, where ``<|im_start|>`` of a user's message
looks like the template's own. So the markers in messages are replaced by stand-ins, which no client
can write, before the template runs; the rendered prompt is then cut into markup and typed markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rkserve.api.json.body import JsonText

# Unicode noncharacters, which no interchanged text has. A client's own are treated as markers.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
VERBATIM = "\ufdd3"  # a template's own stand-in for JSON text that it prints as it came
LEFT_OFF = "\ufdd2"  # in place of the cut in an assistant's turn
IMAGE = "\ufdd4"  # around the number of an image
_STAND_IN = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class PromptSegment(NamedTuple):
    """A segment of a rendered prompt. ``typed``: a marker that a client wrote."""

    text: str
    typed: bool


class ControlTokenGuard:
    """Replaces the markers of one model in clients' text."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = frozenset(markers)
        # Longest first: a marker may begin with another.
        names = sorted(
            {*self.markers, _OPEN, _CLOSE, LEFT_OFF, VERBATIM, IMAGE},
            key=lambda name: (-len(name), name),
        )
        self._found = re.compile("|".join(map(re.escape, names)))

    def hide(self, value: Any, typed: list[str]) -> Any:
        """Return a JSON value with stand-ins for its markers, which are appended to ``typed``."""
        if isinstance(value, str):
            return self._found.sub(lambda found: _stand_in(found[0], typed), value)
        if isinstance(value, JsonText):
            items = {self.hide(key, typed): self.hide(item, typed) for key, item in value.items()}
            return JsonText(items, self.hide(value.text, typed))
        if isinstance(value, dict):
            return {self.hide(key, typed): self.hide(item, typed) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item, typed) for item in value]
        return value


def pieces(rendered: str, typed: list[str]) -> Iterator[PromptSegment]:
    """Cut a rendered prompt at its stand-ins, in order and without empty pieces."""
    for index, part in enumerate(_STAND_IN.split(rendered)):
        if index % 2:  # the groups of the pattern: numbers of stand-ins
            yield PromptSegment(typed[int(part)], typed=True)
        elif part:
            yield PromptSegment(part, typed=False)


def _stand_in(marker: str, typed: list[str]) -> str:
    typed.append(marker)
    return f"{_OPEN}{len(typed) - 1}{_CLOSE}"
