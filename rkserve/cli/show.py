"""Answers as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeAlias, TypeVar

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from rkserve.client import Operation

SHORT_DIGEST = 12
_COLOURS = {"READY": "green", "DEGRADED": "yellow"}
_PLACES = {"board": " (on the board)", "head": " (on the head)"}
Row: TypeAlias = Mapping[str, Any]
T = TypeVar("T")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; whatever the cells have in them is text."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        # The first one is what is copied into the next command.
        made.add_column(column, overflow="fold", no_wrap=number == 0)
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def _listed(rows: Iterable[T], columns: Mapping[str, Callable[[T], object]]) -> Table:
    """Return a table of rows, by the titles of its columns."""
    return table(list(columns), ([of(row) for of in columns.values()] for row in rows))


def _by_key(*keys: str) -> dict[str, Callable[[Row], object]]:
    """Return columns that are titled like the keys that they show."""
    return {key: partial(_value, key) for key in keys}


def _value(key: str, row: Row) -> object:
    return row.get(key)


def status(cluster: Row, verdict: Row | None = None) -> RenderableType:
    """Return how the cluster stands."""
    total, head = cluster["total"], cluster["coordinator"]
    lines = [
        *(() if verdict is None else _verdict(verdict)),
        f"epoch {cluster['epoch']}, {total['ready']} of {total['boards']} boards ready, "
        f"{total['paused_boards'] - total['asleep']} paused, {total['asleep']} asleep"
        f"{', {} drained'.format(total['drained']) if total.get('drained') else ''}; "
        f"{total['running']} requests run, {total['queued']} wait, {total['paused']} are held",
    ]
    if not head["reachable"]:
        lines.append("[bold]The Coordinator cannot be reached: nothing can be changed now.[/bold]")
    return Group(*lines, *_pauses(cluster["pauses"]), _boards(cluster["boards"]))


def _verdict(verdict: Row) -> Iterable[str]:
    """Return the verdict in one word, and its reasons as the doctor shows its findings."""
    word = verdict["verdict"]
    yield f"[bold {_COLOURS.get(word, 'red')}]{word}[/]"
    for one in verdict["reasons"]:
        colour = "red" if one["severity"] == "critical" else "yellow"
        sentence = escape(one["sentence"])
        yield f"[{colour}]{one['severity']}[/{colour}] {one['rule']}: {sentence}"
        yield from (f"    seen: {escape(line)}" for line in one["evidence"])
        place = _PLACES.get(one["run_on"], "")
        yield f"    mend{place}: {escape(one['command'])}"
    if verdict["more"]:
        yield f"and {verdict['more']} more"
    yield from _without(verdict["routers"]["silent"])


def _boards(rows: Sequence[Row]) -> Table:
    """Return the boards; that of their base weights is a column where it says something."""
    based = any(one.get("base") and not one.get("own_base") for one in rows)
    columns = {
        "board": lambda one: one["id"],
        **_by_key("model", "state"),
        "hold": _hold,
        "runs": lambda one: one["running"],
        "waits": lambda one: one["queued"],
        "held": lambda one: one["paused"],
        "tokens/s": lambda one: one["decode_tokens_per_s"],
        **_by_key("epoch"),
        **({"weights": lambda one: _digest(one.get("base"))} if based else {}),
        **_by_key("reason"),
    }
    return _listed(rows, columns)


def _hold(board: Mapping[str, Any]) -> str | None:
    level = board.get("level")
    held = board["hold"] if level is None else f"{board['hold']}, level {level}"
    return ", ".join(filter(None, ("drained" if board.get("drained") else "", held))) or None


def still_held(pauses: Iterable[Mapping[str, Any]], *, asleep: bool) -> list[str]:
    """Say what sleeps although all was resumed, or is paused although all was woken."""
    command = "rkserve wake" if asleep else "rkserve resume"
    left = (one for one in pauses if (one.get("level") is not None) is asleep)
    return [f"still {pause}: {command}" for pause in _pauses(left)]


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
        ("adapter", "model", "role", "sha256", "signed", "bytes", "staged", "loaded"),
        (
            (
                version["label"],
                line["model"],
                version["role"],
                str(version["sha256"])[:SHORT_DIGEST],
                _signed(version.get("manifest")),
                version["bytes"],
                _share(version["boards"], "staged"),
                _share(version["boards"], "loaded"),
            )
            for line in rows
            for version in line["versions"]
        ),
    )


def _signed(manifest: Mapping[str, Any] | None) -> str:
    """Return the signed version and the name of the key."""
    if manifest is None:
        return "no"
    return f"{manifest['version']}, {manifest['key'] or 'not verified'}"


def _share(boards: Mapping[str, Mapping[str, Any]], what: str) -> str:
    return f"{sum(bool(one[what]) for one in boards.values())}/{len(boards)}"


def models(rows: Iterable[Row]) -> RenderableType:
    """Return what can be asked for, with the boards of each model."""
    return _listed(
        rows,
        {
            "model": lambda one: one["id"],
            "state": lambda one: (one.get("rkserve") or {}).get("state"),
            "boards": lambda one: ", ".join(
                f"{board.get('id')}: {board.get('state')}"
                for board in (one.get("rkserve") or {}).get("boards", ())
            ),
        },
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
            (board, name, entry.get("weight_version"), _digest(entry.get("base")))
            for name, one in models.items()
            for board, entry in (one.get("boards") or {}).items()
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


def slept(one: Operation, outcome: str) -> str:
    """Say that boards sleep, and what of their KV caches is left."""
    kept, dropped = (
        sum(int(did.details.get(name) or 0) for did in one.results.values())
        for name in ("kept_tokens", "dropped_tokens")
    )
    kv = f", KV cache: {kept} tokens kept, {dropped} dropped" if kept + dropped else ""
    return f"{outcome}{kv}"


def operations(rows: Iterable[Operation]) -> RenderableType:
    """Return operations, one on each line."""
    return _listed(
        rows,
        {
            "operation": lambda one: one.id,
            "kind": lambda one: one.kind,
            "state": lambda one: one.state,
            "phase": lambda one: one.phase,
            "boards": lambda one: f"{one.succeeded}/{one.total}",
            "epoch": lambda one: one.epoch,
            "began": lambda one: _time(one.created_s),
            "error": lambda one: one.error_message,
        },
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


def keys(rows: Iterable[Row]) -> RenderableType:
    """Return the API keys."""
    columns: dict[str, Callable[[Row], object]] = {
        **_by_key("name", "id"),
        "secret": partial(_value, "redacted_value"),
        "scopes": lambda row: ", ".join(row["scopes"]),
        "models": lambda row: ", ".join(row["models"]) or None,
        "limits": lambda row: ", ".join(_limits(row["limits"])) or None,
        "expires": lambda row: _time(row["expires_at"]) or None,
        "last used": lambda row: _time(row["last_used_at"]) or None,
    }
    return _listed(rows, columns)


def _limits(limits: Row) -> Iterable[str]:
    for name, value in limits.items():
        if value is not None and (name, value) != ("weight", 1.0):
            yield f"{name} {value:g}"


def usage(found: Row) -> RenderableType:
    """Return the usage by day and key, and the Routers whose share is missing or incomplete."""
    names = ("day", "key", "requests", "prompt_tokens", "completion_tokens", "board_s")
    lines = list(_without(found["routers"]["silent"]))
    if unstored := found["unstored"]:
        lines.append(
            "only since their start: Routers that cannot store usage on their node: "
            f"{escape(', '.join(unstored))}"
        )
    return Group(_listed(found["data"], _by_key(*names)), *lines)


def _without(silent: Sequence[str]) -> Iterable[str]:
    if silent:
        yield f"without the figures of Routers that do not answer: {escape(', '.join(silent))}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone().isoformat(timespec="seconds")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))


def generations(rows: Iterable[Row]) -> RenderableType:
    """Return what runs, waits or is paused."""
    return _listed(
        rows,
        {
            "generation": lambda one: one["id"],
            **_by_key("choice", "state", "board", "model", "adapter", "tokens"),
            "kv": lambda one: one["kv_positions"],
            "age": lambda one: f"{one['age_s']:.1f} s",
        },
    )


def kv(found: Row) -> RenderableType:
    """Return what KV caches hold, by board and together."""
    rows = [*found["data"], {"board": "total", **found["total"]}]
    return _listed(rows, _by_key("board", "model", "positions", "capacity", "bytes", "status"))


def caches(rows: Iterable[Row]) -> RenderableType:
    """Return prompt caches by board."""
    return _listed(
        rows,
        {
            "cache": lambda one: one["cache_name"] or "(parked)",
            **_by_key("board", "model", "adapter", "tokens", "bytes"),
            "idle": lambda one: f"{one['idle_s']:.0f} s",
        },
    )


def hardware(rows: Iterable[Row]) -> RenderableType:
    """Return the boards with their states and what their kernels report."""
    return _listed(
        rows,
        {
            "board": lambda one: one["id"],
            **_by_key("model"),
            "state": _state,
            **_by_key("platform", "release", "node"),
            "hardware": lambda one: _machine(one.get("hardware") or {}),
            **_by_key("reason"),
        },
    )


def _machine(found: Mapping[str, Any]) -> str:
    """Return in a few words which machine a board is, and how it does; `--json` has all figures."""
    parts = [str(found.get("soc") or "")]
    if (celsius := found.get("temperature_c")) is not None:
        parts.append(f"{celsius:.0f} °C")
    for name, now, most in (("NPU", "npu_hz", "npu_max_hz"), ("DDR", "ddr_hz", "ddr_max_hz")):
        if (hertz := found.get(now)) is not None:
            limit = found.get(most)
            below = f" of {limit / 1e6:.0f}" if limit and limit > hertz else ""
            parts.append(f"{name} {hertz / 1e6:.0f}{below} MHz")
    for name, free, total in (
        ("memory", "memory_available_bytes", "memory_total_bytes"),
        ("disk", "disk_free_bytes", "disk_total_bytes"),
    ):
        if (left := found.get(free)) is not None and found.get(total):
            parts.append(f"{left / 1e9:.1f} of {found[total] / 1e9:.1f} GB {name} free")
    return ", ".join(part for part in parts if part)


def copies(rows: Iterable[Row]) -> RenderableType:
    """Return the models of the head's catalogue, with the boards that have or fetch a copy."""
    return _listed(
        rows,
        {
            "model": lambda one: one["name"],
            "version": lambda one: one["version"][:SHORT_DIGEST] or None,
            "MB": lambda one: f"{one['bytes'] / 1e6:.1f}",
            "boards": lambda one: ", ".join(
                f"{copy['board']} {_progress(copy['state'], copy)}" for copy in one["copies"]
            ),
        },
    )


def _state(board: Row) -> str:
    """Return a board's state, with the progress of one that fetches its model."""
    state = _progress(str(board.get("state", "")), board.get("fetch") or {})
    if not board.get("drained"):
        return state
    left = sum(board.get(name, 0) for name in ("running", "queued", "paused"))
    return f"{state}, drained" + (f" ({left} left)" if left else "")


def _progress(state: str, fetch: Mapping[str, Any]) -> str:
    if not fetch.get("total_bytes"):
        return state
    done = 100 * fetch["fetched_bytes"] / fetch["total_bytes"]
    return f"{state} {done:.0f} %, {fetch['bytes_per_s'] / 1e6:.1f} MB/s"


def _figures(found: Any, prefix: str = "") -> str:
    """Return figures in one line, those of blocks by their dotted names."""
    if not isinstance(found, Mapping):
        return ""
    parts = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            parts.append(_figures(value, f"{prefix}{name}."))
        elif value not in (None, "", []):
            shown = f"{value:g}" if isinstance(value, float) else value
            parts.append(f"{prefix}{name} {shown}")
    return ", ".join(part for part in parts if part)


def log_line(line: Row) -> str:
    """Return a log line in one line, except for tracebacks; escape sequences are shown as text."""
    at = datetime.fromtimestamp(line["time_s"], timezone.utc).astimezone()
    about = f" {line['request_id']}" if line.get("request_id") else ""
    text = f"{at.isoformat(timespec='milliseconds')} {line['source']} {line['level']}{about} -- "
    return "".join(
        one if one.isprintable() or one == "\n" else f"\\x{ord(one):02x}"
        for one in f"{text}{line['message']}"
    )


def facts(found: Mapping[str, Any]) -> RenderableType:
    """Return an object as a table of two columns."""
    rows = []
    for name, value in found.items():
        if name != "object" and value not in (None, "", [], {}):
            rows.append((name, _figures(value) if isinstance(value, Mapping) else value))
    return table(("what", "value"), rows)
