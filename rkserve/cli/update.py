"""``rkserve update``: another version on all nodes of a cluster, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rkserve.bringup.processes import StateFolder
from rkserve.bringup.settings import HEAD
from rkserve.bringup.update import FleetUpdater, UpdateOptions
from rkserve.bringup.versions import VersionFolder
from rkserve.cli.bringup import State, default_state, note
from rkserve.cli.context import Exit
from rkserve.core.errors import RkserveError


def update(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]",
            exists=True,
            file_okay=False,
            help="Wheels of the version: rkserve's, and those of changed packages. Without it an "
            "update that was cut off goes on.",
        ),
    ] = None,
    *,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Go back to the version before, on all nodes.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the order of the nodes, and change nothing.")
    ] = False,
    canary: Annotated[
        str | None, typer.Option(help="The host name of the board that is updated first.")
    ] = None,
    max_unavailable: Annotated[
        int, typer.Option(min=1, max=4096, help="Boards that may be away at once, after the first.")
    ] = 1,
    min_speed: Annotated[
        float,
        typer.Option(min=0, max=1, help="The least share of its speed before that a board keeps."),
    ] = 0.95,
    measure_s: Annotated[
        float, typer.Option(min=0, max=600, help="Seconds of each measurement; 0 for none.")
    ] = 20.0,
    limit: Annotated[
        float, typer.Option(min=60, max=86400, help="Seconds in which a board has to serve again.")
    ] = 900.0,
    index: Annotated[
        bool,
        typer.Option("--index", help="Let pip download packages that the folder lacks."),
    ] = False,
    restart_cluster: Annotated[
        bool,
        typer.Option(
            "--restart-cluster",
            help="Restart all nodes at once where Ray's version changes: requests fail meanwhile.",
        ),
    ] = False,
    only_head: Annotated[
        bool,
        typer.Option(
            "--only-head",
            help="Start Routers and Coordinator anew from the version in use, and leave boards to "
            "another tool, such as Ansible.",
        ),
    ] = False,
    state: State = None,
) -> None:
    """Update the cluster from its head: one board on trial, then the others, the head last.

    Exit codes: 0 every node has the version; 1 it could not begin, or stopped at a board.
    """
    options = UpdateOptions(
        folder=folder,
        back=rollback,
        canary=canary,
        max_unavailable=max_unavailable,
        ratio=min_speed,
        seconds=measure_s,
        limit_s=limit,
        index=index,
        restart_cluster=restart_cluster,
        dry_run=dry_run,
        only_head=only_head,
    )
    if only_head and (rollback or dry_run or folder is not None):
        raise typer.BadParameter("--only-head takes no folder, no --rollback and no --dry-run")
    if rollback and folder is not None:
        raise typer.BadParameter("--rollback takes no folder: the version before is installed")
    place = StateFolder((state or default_state()).expanduser().absolute(), HEAD)
    try:
        done = FleetUpdater(place, VersionFolder.of_this_process(), note).run(options)
    except (RkserveError, OSError) as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None
    except KeyboardInterrupt:
        note("Boards go on with what they were ordered; `rkserve update` goes on with the others.")
        raise typer.Exit(Exit.INTERRUPTED) from None
    raise typer.Exit(Exit.DONE if done else Exit.FAILED)
