"""``rkserve weights``: which weights are served, and other ones from the head's disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rkserve.cli import show
from rkserve.cli.context import EXIT_CODES, CommandContext, connected
from rkserve.cli.groups import InfoFirst
from rkserve.cli.options import InFlightOption, Model, Running, Timeout
from rkserve.cli.progress import progress

weights = typer.Typer(
    cls=InfoFirst, help=f"Show base weights, and change them. {EXIT_CODES}", add_completion=False
)


@weights.command()
@connected
def info(link: CommandContext, model: Model = None) -> None:
    """Show labels, steps and files of the weights, by model and board."""
    found = link.client.weight_info(model)
    link.show(found, lambda: show.weights(found))


@weights.command()
@connected
def push(
    link: CommandContext,
    *,
    path: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The .rkllm file.")],
    version: Annotated[str | None, typer.Option(help="Else the digits of its sha256.")] = None,
    model: Model = None,
) -> None:
    """Upload a base model file to the head; no board loads it yet."""
    with progress(link) as tell:
        pushed = link.client.push_weights(path, version, model=model, on_progress=tell)
    link.show(
        dict(pushed.body),
        lambda: f"{pushed.label} is on the head: rkserve weights update {pushed.label}",
    )


@weights.command()
@connected
def update(
    link: CommandContext,
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
    with progress(link) as tell:
        one = link.client.update_weights(
            path,
            version,
            model=model,
            in_flight=in_flight.value,
            max_unavailable=max_unavailable,
            timeout_s=timeout,
            on_progress=tell,
        )
    link.done(one, f"serving {path}")


@weights.command()
@connected
def label(
    link: CommandContext,
    version: Annotated[str, typer.Argument(help="What answers bear from now on.")],
    model: Model = None,
) -> None:
    """Name the weights anew; what is loaded stays."""
    one = link.client.set_weight_version(version, model=model)
    link.done(one, f"labelled {version}")
