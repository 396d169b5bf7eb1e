"""``rkserve weights``: show, push, update and label base weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rkserve.cli import show
from rkserve.cli.context import EXIT_CODES, ClusterCommand, CommandContext
from rkserve.cli.options import InFlightOption, InfoFirst, Model, Running, Timeout
from rkserve.cli.progress import progress

weights = typer.Typer(
    cls=InfoFirst, help=f"Show base weights, and change them. {EXIT_CODES}", add_completion=False
)


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
) -> None:
    """Upload a base model file to the head; no board loads it yet."""
    with progress(context) as tell:
        pushed = context.client.push_weights(path, version, model=model, on_progress=tell)
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
    in_flight: Running = InFlightOption.PIN,
    max_unavailable: Annotated[int, typer.Option(min=1, help="Boards that change at a time.")] = 1,
    timeout: Timeout = None,
) -> None:
    """Load another base model file on the boards, one after another."""
    with progress(context) as tell:
        one = context.client.update_weights(
            path,
            version,
            model=model,
            in_flight=in_flight.value,
            max_unavailable=max_unavailable,
            timeout_s=timeout,
            on_progress=tell,
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
