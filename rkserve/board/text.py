"""Bytes to text for one generation: UTF-8 across token borders, stop strings held back.

Pure: it is fed bytes and returns text that can no longer change.
"""

from __future__ import annotations

import codecs


class TextStream:
    """Turns the bytes of tokens into text that is certain.

    A character is held back until its last byte is there, and text that may be the beginning of a
    stop string until it is clear that it is not. The stop string itself is never given out.
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = stops
        self._held = ""
        self.stopped = False

    def feed(self, data: bytes) -> str:
        """Return the text that became certain with ``data``; nothing after a stop string."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(data)
        if not self._stops:
            certain, self._held = self._held, ""
            return certain
        found = [(i + len(s), i) for s in self._stops if (i := self._held.find(s)) >= 0]
        if found:
            # The one that is complete first, so that it does not matter how tokens cut the text.
            _, at = min(found)
            certain, self._held = self._held[:at], ""
            self.stopped = True
            return certain
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def flush(self) -> str:
        """Return what was held back for a stop string that did not come.

        The bytes of a character that the answer's end cut in two are dropped: they are not text.
        """
        certain, self._held = self._held, ""
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
