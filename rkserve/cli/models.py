"""``rkserve sleep``, ``rkserve wake`` and ``rkserve models``: load and unload models."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal, cast

import typer

from rkserve.cli import show
from rkserve.cli.context import EXIT_CODES, ClusterCommand, CommandContext
from rkserve.cli.options import Boards, ListFirst, LoadTimeout, Models, ModeOption, Modes, Timeout
from rkserve.cli.progress import progress

models = typer.Typer(
    cls=ListFirst, help=f"Show the models, load and unload them. {EXIT_CODES}", add_completion=False
)


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


def sleep(
    context: CommandContext,
    *,
    level: Level = 1,
    mode: Modes = ModeOption.KEEP,
    model: Models = None,
    board: Boards = None,
    wake_on_request: Annotated[
        bool, typer.Option("--wake-on-request", help="The next request wakes its model.")
    ] = False,
    lease: Lease = None,
    timeout: Timeout = None,
) -> None:
    """Unload models until they are woken; done when every board that is meant sleeps."""
    with progress(context) as tell:
        one = context.client.sleep(
            _level(level),
            mode.value,
            models=model or None,
            boards=board or None,
            wake_on_request=wake_on_request,
            lease_s=lease,
            timeout_s=timeout,
            on_progress=tell,
        )
    context.done(one, show.slept(one, f"asleep at level {level}"))


def wake(
    context: CommandContext,
    *,
    tag: Tags = None,
    model: Models = None,
    board: Boards = None,
    timeout: LoadTimeout = None,
) -> None:
    """Load what sleeps, and go on; without a scope everything."""
    with progress(context) as tell:
        one = context.client.wake(
            [one.value for one in tag] if tag else None,
            models=model or None,
            boards=board or None,
            timeout_s=timeout,
            on_progress=tell,
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
    with progress(context) as tell:
        one = context.client.load_model(model, timeout_s=timeout, on_progress=tell)
    context.done(one, f"loaded {model}")


@models.command(cls=ClusterCommand)
def unload(
    context: CommandContext,
    *,
    model: ModelName,
    level: Depth = 1,
    mode: Modes = ModeOption.WAIT,
    wake_on_request: Annotated[
        bool | None, typer.Option(help="Whether the next request loads it; else as configured.")
    ] = None,
    timeout: Timeout = None,
) -> None:
    """Put a model to sleep on all its boards, once what runs has ended."""
    with progress(context) as tell:
        one = context.client.unload_model(
            model,
            _level(level),
            mode.value,
            wake_on_request=wake_on_request,
            timeout_s=timeout,
            on_progress=tell,
        )
    context.done(one, show.slept(one, f"unloaded {model}"))


def _level(level: int) -> Literal[0, 1, 2]:
    return cast("Literal[0, 1, 2]", level)  # typer has checked the range
