"""Bytes to text for one generation, and stop strings held back until certain. Pure."""

from __future__ import annotations

import codecs


class Utf8Decoder:
    """Turns the bytes of tokens into whole characters.

    A character is held back until its last byte is there. What is never completed is no text.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """Return the characters that ``data`` completes."""
        return self._decoder.decode(data)

    @property
    def whole(self) -> bool:
        """Whether no character waits for its last byte."""
        return not self._decoder.getstate()[0]

    def drop(self) -> None:
        """Forget the bytes of a character that was cut in two."""
        self._decoder.reset()


class StopSearch:
    """Passes on text that is certain not to belong to a stop string.

    Text that may be the beginning of a stop string is held back until it is clear that it is not.
    The stop string itself is never given out, nor is anything after it.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = stops
        self._held = ""
        self.found: str | None = None  # the stop string that came

    @property
    def stopped(self) -> bool:
        """Whether one came."""
        return self.found is not None

    def feed(self, text: str) -> str:
        """Return the text that became certain with ``text``."""
        if self.stopped:
            return ""
        held = self._held + text
        found = [(i + len(s), i, s) for s in self._stops if (i := held.find(s)) >= 0]
        if found:
            # The one that is complete first, so that it does not matter how tokens cut the text.
            _, at, self.found = min(found)
            self._held = ""
            return held[:at]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """Return what was held back for a stop string that did not come."""
        certain, self._held = self._held, ""
        return certain


class TextFinder:
    """Says when a text is complete that may come in pieces. It holds nothing back."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        if any(not text for text in texts):
            raise ValueError("a text to look for must not be empty")
        self._texts = texts
        self._reach = max((len(text) for text in texts), default=1) - 1
        self._tail = ""

    def feed(self, text: str) -> str | None:
        """Return the text that is complete first within what ``text`` adds, or None."""
        seen, before = self._tail + text, len(self._tail)
        self._tail = seen[-self._reach :] if self._reach else ""
        # What was complete before this piece is not found again.
        starts = ((seen.find(t, max(0, before - len(t) + 1)), t) for t in self._texts)
        found = [(at + len(t), -len(t), t) for at, t in starts if at >= 0]
        return min(found)[2] if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
