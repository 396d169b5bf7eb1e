"""The command ``rkserve``: its groups, and the commands of the cluster as a whole."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from rkserve import __version__
from rkserve.cli import show
from rkserve.cli.bench import bench
from rkserve.cli.bringup import Control, TlsCert, TlsKey, down, join, leave, token, up
from rkserve.cli.chat import chat
from rkserve.cli.context import (
    EXIT_CODES,
    Boards,
    ClusterCommand,
    CommandContext,
    Exit,
    Models,
    Modes,
    Timeout,
    progress,
)
from rkserve.cli.doctor import doctor
from rkserve.cli.generations import boards, caches, generations, kv
from rkserve.cli.keys import keys
from rkserve.cli.lora import lora
from rkserve.cli.members import approve, deny
from rkserve.cli.model import model
from rkserve.cli.models import commands as model_commands
from rkserve.cli.models import models, weights
from rkserve.cli.probe import EXIT_CODES as PROBE_EXIT_CODES
from rkserve.cli.probe import probe
from rkserve.cli.sign import sign
from rkserve.cli.top import top
from rkserve.cli.update import backup, restore, update
from rkserve.client import NotFound
from rkserve.client.answers import PARTIAL, SUCCEEDED
from rkserve.core.answer_metrics import DAYS_KEPT
from rkserve.core.errors import ConfigError
from rkserve.deployments.haproxy import default_folder, prepare
from rkserve.deployments.haproxy_listeners import CONTROL
from rkserve.deployments.haproxy_tls import CERT, KEY
from rkserve.native.sim import models as sim_models

NOT_READY = "NOT READY"
sim = typer.Typer(help="Make files for simulated boards.", no_args_is_help=True)
app = typer.Typer(
    name="rkserve",
    help=f"Look at a cluster of rkserve, and change it. {EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench", short_help="Measure any OpenAI server, or simulated boards.")
app.add_typer(boards, name="boards", short_help="Show the boards; drain, restart, measure them.")
app.add_typer(caches, name="caches", short_help="Show, build and delete prompt caches.")
app.add_typer(generations, name="generations", short_help="Control single answers.")
app.add_typer(keys, name="keys", short_help="Create, list, rotate and revoke API keys.")
app.add_typer(kv, name="kv", short_help="Show and clear KV caches.")
app.add_typer(lora, name="lora", short_help="Bring LoRA adapters to the boards.")
app.add_typer(model, name="model", short_help="Add, list and remove models of this machine.")
app.add_typer(models, name="models", short_help="Show the models, load and unload them.")
app.add_typer(sign, name="sign", short_help="Sign files of weights, and check signatures.")
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


@app.command(cls=ClusterCommand)
def status(context: CommandContext) -> None:
    """Show the cluster: its verdict with reasons and commands, boards, pauses, epoch.

    Exit codes: 0 it is READY, or DEGRADED and answers; 1 it is NOT READY, since a model has no
    board, or the call was refused; 2 wrong usage; 4 rkserve cannot be reached.
    """
    cluster = context.client.cluster()
    try:
        verdict = context.client.verdict()
    except NotFound:  # the head is of a version that gives none
        verdict = None
    context.show({**cluster, "verdict": verdict}, lambda: show.status(cluster, verdict))
    if verdict is not None and verdict["verdict"] == NOT_READY:
        raise typer.Exit(Exit.FAILED)


@app.command(cls=ClusterCommand)
def pause(
    context: CommandContext,
    *,
    mode: Modes = "keep",
    model: Models = None,
    board: Boards = None,
    adapter: Adapter = None,
    lease: Annotated[float | None, typer.Option(help="Resume after so many seconds.")] = None,
    clear_cache: Annotated[bool, typer.Option(help="Drop the KV caches too.")] = False,
    timeout: Timeout = None,
) -> None:
    """Stop generating; done when no board that is meant emits tokens any more."""
    one = context.client.pause(
        mode,
        models=model or None,
        boards=board or None,
        adapter=adapter,
        lease_s=lease,
        clear_cache=clear_cache,
        timeout_s=timeout,
    )
    context.done(one, "paused")


@app.command(cls=ClusterCommand)
def resume(
    context: CommandContext,
    *,
    model: Models = None,
    board: Boards = None,
    adapter: Adapter = None,
    timeout: Timeout = None,
) -> None:
    """Take back a pause; without a scope every pause."""
    one = context.client.resume(
        models=model or None, boards=board or None, adapter=adapter, timeout_s=timeout
    )
    context.done(one, "resumed")
    if not (model or board or adapter):
        context.note(lambda: show.still_held(context.client.cluster()["pauses"], asleep=True))


@app.command(cls=ClusterCommand)
def logs(
    context: CommandContext,
    *,
    board: Annotated[
        str | None, typer.Argument(help="Only this board; else all of them, Routers and so on.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show new lines as they come, until Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, max=1000, help="How many lines of each come first.")
    ] = None,
    request: Annotated[
        str | None, typer.Option(help="Only lines of this request, by the beginning of its id.")
    ] = None,
) -> None:
    """Show the latest log lines of boards, Routers and the Coordinator."""
    lines = context.client.logs(board, tail=tail, follow=follow, request_id=request)
    for line in lines:
        typer.echo(json.dumps(line, ensure_ascii=False) if context.as_json else show.log_line(line))


app.command(cls=ClusterCommand)(top)
app.command(cls=ClusterCommand)(chat)
app.command(cls=ClusterCommand)(doctor)
app.command(cls=ClusterCommand)(approve)
app.command(cls=ClusterCommand)(deny)
app.command(epilog=PROBE_EXIT_CODES)(probe)
for bring_up in (up, down, token, join, leave, update, backup, restore):
    app.command()(bring_up)
app.add_typer(model_commands)


@app.command()
def front(
    folder: Annotated[
        Path | None,
        typer.Option(help="Private folder for HAProxy's sockets, configuration and state."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="NAME=value, for systemd's EnvironmentFile.")
    ] = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    control: Control = None,
) -> None:
    """Prepare Ray's HAProxy on this node, and print the environment to start Ray in."""
    for name, file in ((CERT, tls_cert), (KEY, tls_key)):
        if file is not None:
            os.environ[name] = str(file.absolute())
    if control is not None:
        os.environ[CONTROL] = control
    try:
        made = prepare(folder.expanduser().absolute() if folder else default_folder())
    except ConfigError as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None
    for name, value in made.items():
        typer.echo(f"{name}={value}" if plain else f"export {name}={shlex.quote(value)}")


@app.command(cls=ClusterCommand)
def operations(context: CommandContext, limit: Limit = 20) -> None:
    """List what was changed, and what became of it."""
    rows = context.client.operations(limit)
    context.show([dict(one.body) for one in rows], lambda: show.operations(rows))


@app.command(cls=ClusterCommand)
def operation(
    context: CommandContext,
    operation_id: Annotated[str, typer.Argument(metavar="ID")],
    wait: Annotated[
        bool, typer.Option(help="Wait until it is over, and exit as it ended.")
    ] = False,
) -> None:
    """Show one operation, board by board."""
    if wait:
        with progress(context) as update:
            one = context.client.wait(operation_id, on_progress=update)
    else:
        one = context.client.operation(operation_id)
    context.show(dict(one.body), lambda: show.operation(one))
    if wait and one.state != SUCCEEDED:
        raise typer.Exit(Exit.PARTLY if one.state == PARTIAL else Exit.FAILED)


@app.command(cls=ClusterCommand)
def audit(context: CommandContext, limit: Limit = 50) -> None:
    """List who changed what."""
    rows = context.client.audit(limit)
    context.show(rows, lambda: show.audit(rows))


@app.command(cls=ClusterCommand)
def usage(
    context: CommandContext,
    days: Annotated[
        int | None,
        typer.Option(
            min=1, max=DAYS_KEPT, help="How many days (UTC) with the current one, 8 by default."
        ),
    ] = None,
) -> None:
    """Show requests, tokens and board time of each API key on each of the last days (UTC)."""
    found = context.client.usage(days)
    context.show(found, lambda: show.usage(found))


@sim.callback()
def files() -> None:
    """Make files for simulated boards."""


@sim.command("model")
def model_(
    folder: Annotated[Path, typer.Argument(help="The folder of a model with tokenizer.json.")],
    *,
    into: Annotated[Path, typer.Option(help="The folder of the new model folder.")] = Path("sim"),
) -> None:
    """Make a simulated stand-in for a model, with its tokenizer, chat template and settings."""
    # Late: every command would wait for tokenizers to be imported.
    from rkserve.catalog.simulate import simulate
    from rkserve.models.folder import open_model_folder

    try:
        made = simulate(open_model_folder(folder.expanduser().absolute()), into.expanduser())
    except ConfigError as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None
    typer.echo(f"made {made}: the model of a group with simulated boards")


@sim.command()
def adapter(
    path: Annotated[Path, typer.Argument(dir_okay=False, help="The file to write.")],
    *,
    title: Annotated[
        str, typer.Option(help="The name that the model gives itself with it, 1 to 63 bytes.")
    ] = "Tone",
    seed: Annotated[int, typer.Option(min=0, help="Another one, other answers.")] = 1,
    base: Annotated[str, typer.Option(help="Id of the model that it is for.")] = "any",
    mib: Annotated[int, typer.Option(min=0, max=4096, help="Size; zeros stand for weights.")] = 0,
) -> None:
    """Make a LoRA adapter that simulated boards load as real ones load the vendor's."""
    size = max(mib << 20, sim_models.ADAPTER_BYTES)
    try:
        sim_models.write_adapter(path, title, seed=seed, base=base, size=size)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    except OSError as exc:
        raise typer.BadParameter(f"{path} cannot be written: {exc.strerror or exc}") from exc
    typer.echo(f"wrote {path}: {size} bytes; rkserve lora push {path} --name {title.lower()}")
