"""The commands: thin, each a call of the client and a line or a table for its answer."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rkserve import __version__
from rkserve.cli import show
from rkserve.cli.bench import bench
from rkserve.cli.chat import chat
from rkserve.cli.context import EXIT_CODES, CommandContext, Exit, connected
from rkserve.cli.generations import boards, caches, generations, kv
from rkserve.cli.lora import lora
from rkserve.cli.models import models, sleep, wake
from rkserve.cli.options import Boards, Models, ModeOption, Modes, Timeout
from rkserve.cli.progress import progress
from rkserve.cli.sim import sim
from rkserve.cli.weights import weights
from rkserve.client.answers import PARTIAL, SUCCEEDED
from rkserve.core.errors import ConfigError
from rkserve.deployments.haproxy import default_folder, prepare

app = typer.Typer(
    name="rkserve",
    help=f"Look at a cluster of rkserve, and change it. {EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench", short_help="Measure any OpenAI server, or simulated boards.")
app.add_typer(boards, name="boards", short_help="Show the boards and their hardware.")
app.add_typer(caches, name="caches", short_help="Show, build and delete prompt caches.")
app.add_typer(generations, name="generations", short_help="Control single answers.")
app.add_typer(kv, name="kv", short_help="Show and clear KV caches.")
app.add_typer(lora, name="lora", short_help="Bring LoRA adapters to the boards.")
app.add_typer(models, name="models", short_help="Show the models, load and unload them.")
app.add_typer(sim, name="sim", short_help="Make files for simulated boards.")
app.add_typer(weights, name="weights", short_help="Show base weights, and change them.")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"rkserve {__version__}")
        raise typer.Exit


@app.callback()
def rkserve(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Say the version.")
    ] = False,
) -> None:
    """Options of rkserve itself."""


Adapter = Annotated[str | None, typer.Option(help="Only generations with this adapter.")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="How many, the newest first.")]


@app.command()
@connected
def status(link: CommandContext) -> None:
    """Show the cluster: boards, pauses, epoch."""
    cluster = link.client.cluster()
    link.show(cluster, lambda: show.status(cluster))


@app.command()
@connected
def pause(
    link: CommandContext,
    *,
    mode: Modes = ModeOption.KEEP,
    model: Models = None,
    board: Boards = None,
    adapter: Adapter = None,
    lease: Annotated[float | None, typer.Option(help="Resume after so many seconds.")] = None,
    clear_cache: Annotated[bool, typer.Option(help="Drop the KV caches too.")] = False,
    timeout: Timeout = None,
) -> None:
    """Stop generating; done when no board that is meant emits tokens any more."""
    one = link.client.pause(
        mode.value,
        models=model or None,
        boards=board or None,
        adapter=adapter,
        lease_s=lease,
        clear_cache=clear_cache,
        timeout_s=timeout,
    )
    link.done(one, "paused")


@app.command()
@connected
def resume(
    link: CommandContext,
    *,
    model: Models = None,
    board: Boards = None,
    adapter: Adapter = None,
    timeout: Timeout = None,
) -> None:
    """Take back a pause; without a scope every pause."""
    one = link.client.resume(
        models=model or None, boards=board or None, adapter=adapter, timeout_s=timeout
    )
    link.done(one, "resumed")
    if not (model or board or adapter):
        link.note(lambda: show.still_held(link.client.cluster()["pauses"], asleep=True))


app.command()(chat)
app.command()(sleep)
app.command()(wake)


@app.command()
def front(
    folder: Annotated[
        Path | None,
        typer.Option(help="Private folder for HAProxy's sockets, configuration and state."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="NAME=value, for systemd's EnvironmentFile.")
    ] = False,
) -> None:
    """Prepare Ray's HAProxy on this node, and print the environment to start Ray in."""
    try:
        made = prepare(folder.expanduser().absolute() if folder else default_folder())
    except ConfigError as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None
    for name, value in made.items():
        typer.echo(f"{name}={value}" if plain else f"export {name}={shlex.quote(value)}")


@app.command()
@connected
def operations(link: CommandContext, limit: Limit = 20) -> None:
    """List what was changed, and what became of it."""
    rows = link.client.operations(limit)
    link.show([dict(one.body) for one in rows], lambda: show.operations(rows))


@app.command()
@connected
def operation(
    link: CommandContext,
    operation_id: Annotated[str, typer.Argument(metavar="ID")],
    wait: Annotated[
        bool, typer.Option(help="Wait until it is over, and exit as it ended.")
    ] = False,
) -> None:
    """Show one operation, board by board."""
    if wait:
        with progress(link) as tell:
            one = link.client.wait(operation_id, on_progress=tell)
    else:
        one = link.client.operation(operation_id)
    link.show(dict(one.body), lambda: show.operation(one))
    if wait and one.state != SUCCEEDED:
        raise typer.Exit(Exit.PARTLY if one.state == PARTIAL else Exit.FAILED)


@app.command()
@connected
def audit(link: CommandContext, limit: Limit = 50) -> None:
    """List who changed what."""
    rows = link.client.audit(limit)
    link.show(rows, lambda: show.audit(rows))
