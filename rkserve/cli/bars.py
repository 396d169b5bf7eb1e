"""Progress of long work on a terminal: bytes while a file leaves, boards while they are changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rkserve.cli.link import Link
from rkserve.client import Progress as Told
from rkserve.client.flows import Told as Tell


@contextmanager
def progress(link: Link) -> Iterator[Tell]:
    """Give something to tell progress to; it shows on a terminal only, and on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    hidden = link.as_json or not link.err.is_terminal
    with Progress(*columns, console=link.err, disable=hidden) as shown:
        tasks: dict[str, TaskID] = {}

        def tell(told: Told) -> None:
            step = told.operation.id if told.operation else told.step
            if step not in tasks:
                tasks[step] = shown.add_task(told.step, count="")
            shown.update(
                tasks[step],
                description=describe(told),
                completed=told.done,
                total=told.total or None,
                count=count(told),
            )

        yield tell


def describe(told: Told) -> str:
    """Say what is going on."""
    return f"{told.step.replace('_', ' ')} {told.phase}".strip()


def count(told: Told) -> str:
    """Say how far it is."""
    if told.step == "upload":
        return f"{told.done / 2**20:.1f} of {told.total / 2**20:.1f} MiB"
    return f"{told.done} of {told.total} boards"
