"""``rkserve sleep``, ``wake``, ``models`` and ``weights``: load models, change their weights."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from rkserve.cli import show
from rkserve.cli.context import (
    EXIT_CODES,
    AllowOlder,
    Boards,
    ClusterCommand,
    CommandContext,
    InfoFirst,
    ListFirst,
    LoadTimeout,
    ManifestFile,
    Model,
    Models,
    Modes,
    Running,
    Timeout,
    progress,
)

commands = typer.Typer()
models = typer.Typer(
    cls=ListFirst, help=f"Show the models, load and unload them. {EXIT_CODES}", add_completion=False
)


weights = typer.Typer(
    cls=InfoFirst, help=f"Show base weights, and change them. {EXIT_CODES}", add_completion=False
)
commands.add_typer(models, name="models", short_help="Show the models, load and unload them.")
commands.add_typer(weights, name="weights", short_help="Show base weights, and change them.")


class TagOption(str, Enum):
    """The parts that a wake restores."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


Level = Annotated[
    int,
    typer.Option(
        min=0,
        max=2,
        help="0: only pause; 1: unload, and keep what can be restored; 2: keep only the requests.",
    ),
]
Depth = Annotated[
    int,
    typer.Option(min=1, max=2, help="1: keep what can be restored; 2: keep only the requests."),
]
Lease = Annotated[float | None, typer.Option(help="Wake after so many seconds.")]
Tags = Annotated[
    list[TagOption] | None,
    typer.Option(
        "--tag", help="weights: load, and let requests wait on; kv_cache: the rest. Default: both."
    ),
]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="As `rkserve models` names it.")]


@commands.command(cls=ClusterCommand)
def sleep(
    context: CommandContext,
    *,
    level: Level = 1,
    mode: Modes = "keep",
    model: Models = None,
    board: Boards = None,
    wake_on_request: Annotated[
        bool, typer.Option("--wake-on-request", help="The next request wakes its model.")
    ] = False,
    lease: Lease = None,
    timeout: Timeout = None,
) -> None:
    """Unload models until they are woken; done when every board that is meant sleeps."""
    with progress(context) as update:
        one = context.client.sleep(
            _level(level),
            mode,
            models=model or None,
            boards=board or None,
            wake_on_request=wake_on_request,
            lease_s=lease,
            timeout_s=timeout,
            on_progress=update,
        )
    context.done(one, show.slept(one, f"asleep at level {level}"))


@commands.command(cls=ClusterCommand)
def wake(
    context: CommandContext,
    *,
    tag: Tags = None,
    model: Models = None,
    board: Boards = None,
    timeout: LoadTimeout = None,
) -> None:
    """Load what sleeps, and go on; without a scope everything."""
    with progress(context) as update:
        one = context.client.wake(
            [one.value for one in tag] if tag else None,
            models=model or None,
            boards=board or None,
            timeout_s=timeout,
            on_progress=update,
        )
    held = tag is not None and set(tag) == {TagOption.WEIGHTS}
    context.done(one, "loaded, and held until `rkserve wake`" if held else "awake")
    if not (tag or model or board):
        context.note(lambda: show.still_held(context.client.cluster()["pauses"], asleep=False))


@models.command("list", cls=ClusterCommand)
def list_(context: CommandContext) -> None:
    """List the models and adapters that can be asked for, and which are loaded."""
    rows = context.client.models()
    context.show(rows, lambda: show.models(rows))


@models.command(cls=ClusterCommand)
def load(context: CommandContext, model: ModelName, timeout: LoadTimeout = None) -> None:
    """Wake a model on all its boards."""
    with progress(context) as update:
        one = context.client.load_model(model, timeout_s=timeout, on_progress=update)
    context.done(one, f"loaded {model}")


@models.command(cls=ClusterCommand)
def unload(
    context: CommandContext,
    *,
    model: ModelName,
    level: Depth = 1,
    mode: Modes = "wait",
    wake_on_request: Annotated[
        bool | None, typer.Option(help="Whether the next request loads it; else as configured.")
    ] = None,
    timeout: Timeout = None,
) -> None:
    """Put a model to sleep on all its boards, once what runs has ended."""
    with progress(context) as update:
        one = context.client.unload_model(
            model,
            _level(level),
            mode,
            wake_on_request=wake_on_request,
            timeout_s=timeout,
            on_progress=update,
        )
    context.done(one, show.slept(one, f"unloaded {model}"))


def _level(level: int) -> Literal[0, 1, 2]:
    return cast("Literal[0, 1, 2]", level)  # typer has checked the range


@weights.command(cls=ClusterCommand)
def info(context: CommandContext, model: Model = None) -> None:
    """Show labels, steps and files of the weights, by model and board."""
    found = context.client.weight_info(model)
    context.show(found, lambda: show.weights(found))


@weights.command(cls=ClusterCommand)
def push(
    context: CommandContext,
    *,
    path: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The .rkllm file.")],
    version: Annotated[str | None, typer.Option(help="Else the digits of its sha256.")] = None,
    model: Model = None,
    manifest: ManifestFile = None,
    allow_older: AllowOlder = False,
) -> None:
    """Upload a base model file to the head; no board loads it yet."""
    with progress(context) as update:
        pushed = context.client.push_weights(
            path,
            version,
            model=model,
            manifest=manifest,
            allow_older=allow_older,
            on_progress=update,
        )
    context.show(
        dict(pushed.body),
        lambda: f"{pushed.label} is on the head: rkserve weights update {pushed.label}",
    )


@weights.command(cls=ClusterCommand)
def update(
    context: CommandContext,
    *,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="On the head node, where it may read files; or MODEL@VERSION that was pushed; or "
            "default: the file in the model's folder.",
        ),
    ],
    version: Annotated[
        str | None, typer.Option(help="The label that answers bear; else made from the file.")
    ] = None,
    model: Model = None,
    in_flight: Running = "pin",
    max_unavailable: Annotated[int, typer.Option(min=1, help="Boards that change at a time.")] = 1,
    timeout: Timeout = None,
) -> None:
    """Load another base model file on the boards, one after another."""
    with progress(context) as update:
        one = context.client.update_weights(
            path,
            version,
            model=model,
            in_flight=in_flight,
            max_unavailable=max_unavailable,
            timeout_s=timeout,
            on_progress=update,
        )
    context.done(one, f"serving {path}")


@weights.command(cls=ClusterCommand)
def label(
    context: CommandContext,
    version: Annotated[str, typer.Argument(help="What answers bear from now on.")],
    model: Model = None,
) -> None:
    """Name the weights anew; what is loaded stays."""
    one = context.client.set_weight_version(version, model=model)
    context.done(one, f"labelled {version}")
