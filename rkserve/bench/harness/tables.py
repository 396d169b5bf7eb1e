"""Tables in Markdown that are also readable as text: padded, figures to the right. Pure."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table. The first column holds names, the others figures."""
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join(_line(row, widths) for row in (head, rule, *rows)) + "\n"


def figure(value: float | None, digits: int = 1) -> str:
    """Return a figure with so many digits behind the point; a dash for one that is not there."""
    return MISSING if value is None else f"{value:,.{digits}f}".replace(",", " ")


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage."""
    return f"{figure(100 * share, digits)} %"


def megabytes(size: float) -> str:
    """Return bytes as millions of them."""
    return figure(size / 1e6, 0)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, *figures = (
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join((name, *figures))} |"
