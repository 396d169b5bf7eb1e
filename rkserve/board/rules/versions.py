"""With which versions of the weights tokens were generated: per answer, and per board. Pure.

A version is known here by its label alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rkserve.core.board_report import VersionFigures
from rkserve.core.messages import VersionSpan

# Each update of a trainer makes a new version: what nobody asks about any more is forgotten.
VERSIONS_REMEMBERED = 32


@dataclass(slots=True)
class VersionSpans:
    """The versions of one answer's tokens, which edits may take back."""

    _marks: list[tuple[int, str]] = field(default_factory=list)  # from which token on, which one
    begun: int = 0  # how often ``begin`` was told something

    @property
    def marks(self) -> tuple[tuple[int, str], ...]:
        """From which token on it is which version."""
        return tuple(self._marks)

    @property
    def label(self) -> str | None:
        """The version of the last run; None before the first."""
        return self._marks[-1][1] if self._marks else None

    def begin(self, label: str, tokens: int) -> None:
        """From token ``tokens`` on it is this version; there are not more than so many now."""
        self.begun += 1
        while self._marks and self._marks[-1][0] >= tokens:
            self._marks.pop()
        if self.label != label:
            # What an edit has put in before the first run that followed is put down to that run.
            self._marks.append((tokens if self._marks else 0, label))

    def of(self, tokens: int) -> tuple[VersionSpan, ...]:
        """Return the spans of an answer of ``tokens`` tokens."""
        ends = [*[start for start, _ in self._marks], tokens][1:]
        spans = (
            VersionSpan(label, start, min(end, tokens))
            for (start, label), end in zip(self._marks, ends, strict=True)
        )
        return tuple(span for span in spans if span.start < span.end)


class VersionCounters:
    """What one board did with each version since its replica's start."""

    def __init__(self) -> None:
        self._figures: dict[str, VersionFigures] = {}  # the longest unused first

    @property
    def figures(self) -> tuple[VersionFigures, ...]:
        """What is known of each, the most recently used last."""
        return tuple(self._figures.values())

    def began(self, label: str) -> None:
        """A request has begun with it."""
        self._add(label, requests=1)

    def failed(self, label: str) -> None:
        """A request ended by a fault of the board, or of the version."""
        self._add(label, failed=1)

    def ran(self, label: str, tokens: int, decode_ms: float) -> None:
        """A run of a request has given so many tokens."""
        self._add(label, tokens=tokens, decode_ms=decode_ms)

    def _add(
        self,
        label: str,
        requests: int = 0,
        failed: int = 0,
        tokens: int = 0,
        decode_ms: float = 0.0,
    ) -> None:
        before = self._figures.pop(label, VersionFigures(label))
        self._figures[label] = VersionFigures(
            label,
            before.requests + requests,
            before.failed + failed,
            before.tokens + tokens,
            before.decode_ms + decode_ms,
        )
        while len(self._figures) > VERSIONS_REMEMBERED:
            del self._figures[next(iter(self._figures))]
