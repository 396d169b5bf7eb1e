"""Answers as tables for people. It knows the names in the answers, and no connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from rkserve.client import Operation

SHORT_DIGEST = 12


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; whatever the cells have in them is text."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def status(cluster: Mapping[str, Any]) -> RenderableType:
    """Return how the cluster stands."""
    total, head = cluster["total"], cluster["coordinator"]
    lines = [
        f"epoch {cluster['epoch']}, {total['ready']} of {total['boards']} boards ready, "
        f"{total['paused_boards']} paused; {total['running']} requests run, {total['queued']} wait"
    ]
    if not head["reachable"]:
        lines.append("[bold]The Coordinator cannot be reached: nothing can be changed now.[/bold]")
    boards = table(
        ("board", "model", "state", "hold", "runs", "waits", "tokens/s", "epoch", "reason"),
        (
            (
                one["id"],
                one["model"],
                one["state"],
                one["hold"],
                one["running"],
                one["queued"],
                one["decode_tokens_per_s"],
                one["epoch"],
                one["reason"],
            )
            for one in cluster["boards"]
        ),
    )
    return Group(*lines, *_pauses(cluster["pauses"]), boards)


def _pauses(pauses: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for one in pauses:
        parts = [*one["models"], *one["boards"], *([one["adapter"]] if one["adapter"] else [])]
        until = "" if one["expires_s"] is None else f", until {_time(one['expires_s'])}"
        what = escape(", ".join(parts) or "everything")
        yield f"paused ({one['mode']}): {what}{until}, by operation {one['operation']}"


def adapters(rows: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Return the versions of all adapters."""
    return table(
        ("adapter", "model", "role", "sha256", "bytes", "staged", "loaded"),
        (
            (
                version["label"],
                line["model"],
                version["role"],
                str(version["sha256"])[:SHORT_DIGEST],
                version["bytes"],
                _share(version["boards"], "staged"),
                _share(version["boards"], "loaded"),
            )
            for line in rows
            for version in line["versions"]
        ),
    )


def _share(boards: Mapping[str, Mapping[str, Any]], what: str) -> str:
    return f"{sum(bool(one[what]) for one in boards.values())}/{len(boards)}"


def models(rows: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Return what can be asked for, with the boards of each model."""
    return table(
        ("model", "owned by", "boards"),
        (
            (
                one["id"],
                one.get("owned_by"),
                ", ".join(
                    f"{board.get('id')}: {board.get('state')}"
                    for board in (one.get("rkserve") or {}).get("boards", ())
                ),
            )
            for one in rows
        ),
    )


def operations(rows: Iterable[Operation]) -> RenderableType:
    """Return operations, one on each line."""
    return table(
        ("operation", "kind", "state", "phase", "boards", "epoch", "began", "error"),
        (
            (
                one.id,
                one.kind,
                one.state,
                one.phase,
                f"{one.succeeded}/{one.total}",
                one.epoch,
                _time(one.created_s),
                one.error_message,
            )
            for one in rows
        ),
    )


def operation(one: Operation) -> RenderableType:
    """Return one operation with what became of it on each board."""
    spent = ", ".join(f"{name} {ms:.0f} ms" for name, ms in one.phases.items())
    params = ", ".join(
        f"{name}={value}" for name, value in (one.body.get("params") or {}).items() if value
    )
    boards = [
        *((name, did.status, did.latency_ms, "") for name, did in one.results.items()),
        *((bad.board, bad.error, None, bad.message) for bad in one.failed),
    ]
    return Group(
        operations([one]),
        *(escape(line) for line in (params, spent) if line),
        table(("board", "status", "ms", "message"), boards),
    )


def audit(rows: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Return the audit log as it came: its columns are those of its lines."""
    found = list(rows)
    columns = list(dict.fromkeys(name for row in found for name in row))
    return table(
        columns,
        (
            [
                _time(value) if name.endswith("_s") and isinstance(value, float) else value
                for name, value in ((name, row.get(name)) for name in columns)
            ]
            for row in found
        ),
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone().isoformat(timespec="seconds")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
