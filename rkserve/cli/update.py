"""``rkserve update``, another version on all nodes of a cluster; ``backup`` and ``restore``, the
ledger of this machine's head as a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rkserve.board.storage.ledger_copies import FOLDER, copies_of_node, named
from rkserve.bringup.processes import HEAD, StateFolder, default_state
from rkserve.bringup.update import FleetUpdater, UpdateOptions
from rkserve.bringup.versions import VersionFolder
from rkserve.cli.bringup import State, note
from rkserve.cli.context import Exit
from rkserve.config.serve_config import default_data_dir, default_state_dir
from rkserve.coordinator.state.ledger import MIGRATIONS
from rkserve.coordinator.state.ledger_files import (
    FILE,
    back_up,
    backups_of,
    copy_ledger,
    defect_of,
    restore_ledger,
    schema_of_copy,
)
from rkserve.core.errors import ConfigError, LedgerFailed, RkserveError
from rkserve.deployments import preflight

commands = typer.Typer()


@commands.command()
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


CONFIG = Path("serve_config.yaml")
Config = Annotated[
    Path | None,
    typer.Option(
        help=f"The application's configuration, whose coordinator.data_dir is used. Default: "
        f"{CONFIG} if that is there."
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="The Coordinator's folder, in place of that of a configuration."),
]


StateDir = Annotated[
    Path | None,
    typer.Option(help="The boards' folder of this node, in place of state_dir of a configuration."),
]


@commands.command()
def backup(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Where to. Default: backups/ in the same folder."),
    ] = None,
    *,
    list_copies: Annotated[
        bool,
        typer.Option("--list", help="List the copies that the boards of this node have, instead."),
    ] = False,
    config: Config = None,
    data_dir: DataDir = None,
    state_dir: StateDir = None,
) -> None:
    """Copy the ledger of this head to a file, also while the application runs.

    The ledger has pauses, adapter versions, operations and the audit log; uploaded files are not in
    it. With --list the copies on this node are printed by cluster, the newest first: their time,
    schema and path, for `rkserve restore` on the head. Exit codes: 0 done; 1 it failed.
    """
    if list_copies:
        if file is not None or data_dir is not None:
            raise typer.BadParameter("--list takes no file and no --data-dir")
        _run(lambda: _list_copies(_state_dir(config, state_dir)))
        return
    if state_dir is not None:
        raise typer.BadParameter("--state-dir needs --list")

    def copy() -> None:
        folder = _folder(config, data_dir)
        if not (folder / FILE).is_file():
            raise LedgerFailed(f"There is no ledger at {folder / FILE}.")
        if file is None:
            made = back_up(folder, time.time()).path
        else:
            made = file.absolute()
            if made.exists() and (problem := defect_of(made)):
                raise ConfigError(f"{made} exists, and is no backup of a ledger: {problem}.")
            copy_ledger(folder / FILE, made)
        note(f"The ledger of {folder} was copied to {made}.")

    _run(copy)


@commands.command()
def restore(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="The backup, or a board's copy of one (.gz). Without it the backups are listed.",
        ),
    ] = None,
    *,
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Replace the ledger of this head by a backup, while the application is down.

    The earlier ledger is kept beside it. Exit codes: 0 done; 1 it failed, and nothing was changed.
    """

    def replace() -> None:
        folder = _folder(config, data_dir)
        if file is None:
            _list(folder)
            return
        aside = restore_ledger(file.absolute(), folder, len(MIGRATIONS), time.time())
        kept = "" if aside is None else f" The earlier one is {aside}."
        note(f"The ledger of {folder} is that of {file}.{kept}")

    _run(replace)


def _list(folder: Path) -> None:
    for one in backups_of(folder):
        problem = defect_of(one.path)
        note(f"{one.when}  {one.path}{f'  damaged: {problem}' if problem else ''}")


def _list_copies(state_dir: Path) -> None:
    found = copies_of_node(state_dir)
    if not found:
        note(f"The boards of this node have no copy of a ledger in {state_dir / FOLDER}.")
    for cluster, copies in found.items():
        note(f"Cluster {cluster}:")
        for path in copies:
            number, made_s = named(path)
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(made_s))
            try:
                about = f"schema {schema_of_copy(path)}"
            except LedgerFailed as exc:
                about = f"damaged: {exc}"
            note(f"  {number}  {when}  {about}  {path}")


def _state_dir(config: Path | None, state_dir: Path | None) -> Path:
    """Return the boards' folder on this node. Raises ``ConfigError``."""
    if state_dir is not None:
        return state_dir.expanduser().absolute()
    if config is None and not CONFIG.is_file():
        return default_state_dir().expanduser()
    file = config or CONFIG
    found = {one.state_dir for one in preflight.applications(preflight.read(file))}
    if len(found) != 1:
        raise ConfigError(f"{file} has {len(found)} folders of boards: name one by --state-dir.")
    return found.pop().expanduser().absolute()


def _folder(config: Path | None, data_dir: Path | None) -> Path:
    """Return the Coordinator's folder on this machine. Raises ``ConfigError``."""
    if data_dir is not None:
        return data_dir.expanduser().absolute()
    if config is None and not CONFIG.is_file():
        return default_data_dir().expanduser()
    file = config or CONFIG
    found = {one.coordinator.data_dir for one in preflight.applications(preflight.read(file))}
    if len(found) != 1:
        raise ConfigError(f"{file} has {len(found)} ledgers: name one by --data-dir.")
    return found.pop().expanduser().absolute()


def _run(work: Callable[[], None]) -> None:
    try:
        work()
    except (RkserveError, OSError) as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None
