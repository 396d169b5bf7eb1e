"""Progress of uploads (bytes) and operations (boards) on a terminal.

The states of boards are read from the cluster, because an operation lists boards only when they are
done. If the cluster does not answer, its rows are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rkserve.cli.context import CommandContext
from rkserve.client import ClientError, Operation
from rkserve.client import Progress as Told
from rkserve.client.flows import OnProgress as Tell

# These change boards as a whole: the state that one comes to.
ENDS = {"sleep": "asleep", "wake": "ready", "rebase": "ready", "weight_update": "ready"}
LOADS = ("rebase", "weight_update")
MOST_ROWS = 16
Look = Callable[[], Mapping[str, Any]]


@contextmanager
def progress(context: CommandContext) -> Iterator[Tell]:
    """Return a progress callback that draws on stderr, on a terminal only."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    hidden = context.as_json or not context.err.is_terminal
    with Progress(*columns, console=context.err, disable=hidden) as shown:
        yield (
            (lambda _told: None)
            if hidden
            else OperationProgress(shown, context.client.cluster).tell
        )


class OperationProgress:
    """A bar for each step, and below it one for each board in scope."""

    def __init__(self, shown: Progress, look: Look) -> None:
        self._shown = shown
        self._look = look
        self._tasks: dict[str, TaskID] = {}

    def tell(self, told: Told) -> None:
        """Show the progress."""
        rows = {} if told.operation is None else self._rows(told.operation)
        done, total = told.done, told.total
        if told.operation is not None and not told.operation.over and done >= total:
            # The operation lists no board yet, or those of the previous phase.
            done, total = sum(row.done for row in rows.values()), len(rows)
        step = told.operation.id if told.operation else told.step
        self._show(step, describe(told), done, total, count(told.step, done, total))
        if len(rows) <= MOST_ROWS:
            for name, row in rows.items():
                end = int(row.done)
                self._show(f"{step} {name}", f"  {escape(name)}", end, end, row.said)

    def _show(self, name: str, said: str, done: int, total: int, count: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._shown.add_task(said, count="", total=None)
        # A bar without a total shows activity.
        of = total or None
        self._shown.update(
            self._tasks[name], description=said, completed=done, total=of, count=escape(count)
        )

    def _rows(self, one: Operation) -> dict[str, BoardRow]:
        params = one.body.get("params") or {}
        if one.kind not in ENDS or "name" in params:  # an adapter's name: no board loads a model
            return {}
        if one.over:
            bad = {failure.board: BoardRow(failure.error, done=False) for failure in one.failed}
            return bad | {
                name: BoardRow(did.status, done=True) for name, did in one.results.items()
            }
        try:
            boards = self._look()["boards"]
        except ClientError:  # progress is optional; the operation goes on
            return {}
        return {
            str(row["id"]): BoardRow(str(row["state"]), done=_is_there(row, one.kind, params))
            for row in boards
            if meant(row, params)
        }


@dataclass(frozen=True)
class BoardRow:
    """The state of a board in an operation."""

    said: str
    done: bool


def meant(row: Mapping[str, Any], params: Mapping[str, Any]) -> bool:
    """Return True if an operation with these parameters includes a board."""
    models, boards = params.get("models") or (), params.get("boards") or ()
    model = params.get("model") or row["model"]
    return (
        row["model"] == model
        and (not models or row["model"] in models)
        and (not boards or row["id"] in boards)
    )


def _is_there(row: Mapping[str, Any], kind: str, params: Mapping[str, Any]) -> bool:
    loaded = kind not in LOADS or bool(_base_of(row) == params.get("digest"))
    return loaded and row["state"] == ENDS[kind]


def _base_of(row: Mapping[str, Any]) -> Any:
    """Return the sha256 of other base weights than the model folder's, as operations name them."""
    return None if row.get("own_base") else row.get("base")


def describe(told: Told) -> str:
    """Return the description of a step."""
    return f"{told.step.replace('_', ' ')} {told.phase}".strip()


def count(step: str, done: int, total: int) -> str:
    """Return the count of a step as text."""
    if step == "upload":
        return f"{done / 2**20:.1f} of {total / 2**20:.1f} MiB"
    return f"{done} of {total} boards" if total else ""
