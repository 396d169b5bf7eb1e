"""The command ``rkserve``: its groups, and the commands of the cluster as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rkserve import __version__
from rkserve.cli import show
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
from rkserve.client import NotFound
from rkserve.client.answers import PARTIAL, SUCCEEDED
from rkserve.core.errors import ConfigError
from rkserve.native.sim import models as sim_models

NOT_READY = "NOT READY"
# All commands in the order of the help, with the modules of those that are imported when they are
# named: the imports of all commands take longer than most calls of a cluster.
ORDER = {
    **dict.fromkeys(("status", "pause", "resume", "logs"), ""),
    "top": "top",
    "chat": "chat",
    "doctor": "doctor",
    **dict.fromkeys(("approve", "deny"), "members"),
    "probe": "probe",
    **dict.fromkeys(("up", "down", "token", "join", "leave"), "bringup"),
    **dict.fromkeys(("update", "backup", "restore"), "update"),
    "front": "bringup",
    **dict.fromkeys(("operations", "operation", "audit"), ""),
    "usage": "keys",
    "bench": "bench",
    **dict.fromkeys(("boards", "caches", "generations"), "generations"),
    "keys": "keys",
    "kv": "generations",
    "lora": "lora",
    "model": "model",
    "models": "models",
    "sign": "sign",
    "sim": "",
    **dict.fromkeys(("weights", "sleep", "wake"), "models"),
}


class NamedCommands(MutableMapping[str, Any]):
    """Commands by name, in their order; looking one up imports its module."""

    def __init__(self, known: MutableMapping[str, Any]) -> None:
        self._known = known

    def __getitem__(self, name: str) -> Any:
        if name not in self._known and (module := ORDER.get(name)):
            found = import_module(f"rkserve.cli.{module}").commands
            for key, one in typer.main.get_group(found).commands.items():
                self._known.setdefault(key, one)
        return self._known[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._known[name] = command

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(ORDER)

    def __len__(self) -> int:
        return len(ORDER)


class RkserveGroup(TyperGroup):
    """The commands of rkserve."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = NamedCommands(self.commands)


sim = typer.Typer(help="Make files for simulated boards.", no_args_is_help=True)
app = typer.Typer(
    name="rkserve",
    cls=RkserveGroup,
    help=f"Look at a cluster of rkserve, and change it. {EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(sim, name="sim", short_help="Make files for simulated boards.")


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
