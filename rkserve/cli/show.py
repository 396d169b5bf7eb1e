"""Answers as tables for people."""

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
    for number, column in enumerate(columns):
        # The first one is what is copied into the next command.
        made.add_column(column, overflow="fold", no_wrap=number == 0)
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def status(cluster: Mapping[str, Any]) -> RenderableType:
    """Return how the cluster stands."""
    total, head = cluster["total"], cluster["coordinator"]
    lines = [
        f"epoch {cluster['epoch']}, {total['ready']} of {total['boards']} boards ready, "
        f"{total['paused_boards'] - total['asleep']} paused, {total['asleep']} asleep; "
        f"{total['running']} requests run, {total['queued']} wait, {total['paused']} are held"
    ]
    if not head["reachable"]:
        lines.append("[bold]The Coordinator cannot be reached: nothing can be changed now.[/bold]")
    return Group(*lines, *_pauses(cluster["pauses"]), _boards(cluster["boards"]))


def _boards(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the boards; that of their base weights is a column where it says something."""
    columns = ["board", "model", "state", "hold", "runs", "waits", "held", "tokens/s", "epoch"]
    based = any(one.get("base") and not one.get("own_base") for one in rows)
    return table(
        [*columns, *(["weights"] if based else []), "reason"],
        (
            (
                one["id"],
                one["model"],
                one["state"],
                _hold(one),
                one["running"],
                one["queued"],
                one["paused"],
                one["decode_tokens_per_s"],
                one["epoch"],
                *([_digest(one.get("base"))] if based else []),
                one["reason"],
            )
            for one in rows
        ),
    )


def _hold(board: Mapping[str, Any]) -> str | None:
    level = board.get("level")
    return board["hold"] if level is None else f"{board['hold']}, level {level}"


def still_held(pauses: Iterable[Mapping[str, Any]], *, asleep: bool) -> list[str]:
    """Say what sleeps although all was resumed, or is paused although all was woken."""
    command = "rkserve wake" if asleep else "rkserve resume"
    left = (one for one in pauses if (one.get("level") is not None) is asleep)
    return [f"still {said}: {command}" for said in _pauses(left)]


def _pauses(pauses: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for one in pauses:
        parts = [*one["models"], *one["boards"], *([one["adapter"]] if one["adapter"] else [])]
        what = escape(", ".join(parts) or "everything")
        until = "" if one["expires_s"] is None else f", until {_time(one['expires_s'])}"
        wakes = ", until a request comes" if one.get("wake_on_request") else ""
        level = one.get("level")
        held = "paused (" if level is None else f"asleep (level {level}, "
        yield f"{held}{one['mode']}): {what}{until}{wakes}, by operation {one['operation']}"


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
        ("model", "state", "boards"),
        (
            (
                one["id"],
                (one.get("rkserve") or {}).get("state"),
                ", ".join(
                    f"{board.get('id')}: {board.get('state')}"
                    for board in (one.get("rkserve") or {}).get("boards", ())
                ),
            )
            for one in rows
        ),
    )


def weights(info: Mapping[str, Any]) -> RenderableType:
    """Return which base weights the models have, and the boards where these differ."""
    models = info["models"]
    made = table(
        ("model", "weights", "step", "file", "bytes", "adapters"),
        (
            (
                name,
                one["weight_version"],
                one["step"],
                _file(one.get("base")),
                (one.get("base") or {}).get("bytes"),
                ", ".join(f"{adapter}@{version}" for adapter, version in one["adapters"].items()),
            )
            for name, one in models.items()
        ),
    )
    boards = table(
        ("board", "model", "weights", "file"),
        (
            (board, name, said.get("weight_version"), _digest(said.get("base")))
            for name, one in models.items()
            for board, said in (one.get("boards") or {}).items()
        ),
    )
    coming = [
        f"{escape(name)}: {escape(one['rebase']['version'])} is loaded by "
        f"{len(one['rebase']['switched'])} of {len(one['boards'])} boards"
        for name, one in models.items()
        if one.get("rebase")
    ]
    shown = [boards] if boards.row_count else []
    return Group(f"epoch {info['epoch']}", made, *coming, *shown)


def _file(base: Mapping[str, Any] | None) -> str:
    return _digest(None if base is None else str(base["digest"]))


def _digest(digest: str | None) -> str:
    """Name a file of base weights by its content; without one it is that of the model folder."""
    return "of the model folder" if digest is None else digest[:SHORT_DIGEST]


def slept(one: Operation, said: str) -> str:
    """Say that boards sleep, and what of their KV caches is left."""
    kept, dropped = (
        sum(int(did.details.get(name) or 0) for did in one.results.values())
        for name in ("kept_tokens", "dropped_tokens")
    )
    kv = f", KV cache: {kept} tokens kept, {dropped} dropped" if kept + dropped else ""
    return f"{said}{kv}"


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


def generations(rows: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Return what runs, waits or is paused."""
    return table(
        ("generation", "choice", "state", "board", "model", "adapter", "tokens", "kv", "age"),
        (
            (
                one["id"],
                one["choice"],
                one["state"],
                one["board"],
                one["model"],
                one["adapter"],
                one["tokens"],
                one["kv_positions"],
                f"{one['age_s']:.1f} s",
            )
            for one in rows
        ),
    )


def kv(found: Mapping[str, Any]) -> RenderableType:
    """Return what KV caches hold, by board and together."""
    rows = [
        (one["board"], one["model"], one["positions"], one["capacity"], one["bytes"], one["status"])
        for one in found["data"]
    ]
    total = found["total"]
    rows.append(("total", None, total["positions"], total["capacity"], total["bytes"], None))
    return table(("board", "model", "positions", "capacity", "bytes", "status"), rows)


def caches(rows: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Return prompt caches by board."""
    return table(
        ("cache", "board", "model", "adapter", "tokens", "bytes", "idle"),
        (
            (
                one["cache_name"] or "(parked)",
                one["board"],
                one["model"],
                one["adapter"],
                one["tokens"],
                one["bytes"],
                f"{one['idle_s']:.0f} s",
            )
            for one in rows
        ),
    )


def hardware(rows: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Return the boards with their states and what their kernels report."""
    return table(
        ("board", "model", "state", "platform", "release", "node", "hardware", "reason"),
        (
            (
                one["id"],
                one["model"],
                one["state"],
                one.get("platform"),
                one.get("release"),
                one.get("node"),
                _figures(one.get("hardware")),
                one.get("reason"),
            )
            for one in rows
        ),
    )


def _figures(found: Any, prefix: str = "") -> str:
    """Return figures in one line, those of blocks by their dotted names."""
    if not isinstance(found, Mapping):
        return ""
    parts = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            parts.append(_figures(value, f"{prefix}{name}."))
        elif value is not None and value != []:
            shown = f"{value:g}" if isinstance(value, float) else value
            parts.append(f"{prefix}{name} {shown}")
    return ", ".join(part for part in parts if part)


def facts(found: Mapping[str, Any]) -> RenderableType:
    """Return an object as a table of two columns."""
    rows = []
    for name, value in found.items():
        if name != "object" and value not in (None, "", [], {}):
            rows.append((name, _figures(value) if isinstance(value, Mapping) else value))
    return table(("what", "value"), rows)
