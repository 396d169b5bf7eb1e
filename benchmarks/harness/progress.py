"""Progress on stderr: a line per case, rewritten in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys


class ProgressLine:
    """The line of the case that goes on."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._title = ""

    def begin(self, title: str) -> None:
        """Begin the line of a case."""
        self._title = title
        if not self._terminal:
            sys.stderr.write(f"{title}\n")
            sys.stderr.flush()

    def say(self, text: str) -> None:
        """Say what goes on in the case."""
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{self._title}: {text}")
            sys.stderr.flush()

    def end(self, text: str) -> None:
        """End the line with what came out."""
        sys.stderr.write(f"\r\x1b[K{self._title}: {text}\n" if self._terminal else f"  {text}\n")
        sys.stderr.flush()
