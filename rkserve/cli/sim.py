"""``rkserve sim``: files for simulated boards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rkserve.native.sim import adapters

sim = typer.Typer(help="Make files for simulated boards.", no_args_is_help=True)


@sim.callback()
def files() -> None:
    """Make files for simulated boards."""


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
    size = max(mib << 20, adapters.HEADER_BYTES)
    try:
        adapters.write(path, title, seed=seed, base=base, size=size)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    except OSError as exc:
        raise typer.BadParameter(f"{path} cannot be written: {exc.strerror or exc}") from exc
    typer.echo(f"wrote {path}: {size} bytes; rkserve lora push {path} --name {title.lower()}")
