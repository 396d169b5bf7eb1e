"""Options that several commands have, and what they say of themselves."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class Mode(str, Enum):
    """What becomes of requests under a pause or a sleep."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class InFlight(str, Enum):
    """What becomes of requests that run when weights change."""

    PIN = "pin"
    SWITCH = "switch"
    ABORT = "abort"


Modes = Annotated[
    Mode, typer.Option(help="keep: requests wait; wait: they end first; abort: they end now.")
]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="Only this model; may be repeated.")
]
Model = Annotated[str | None, typer.Option(help="The base model, where several are served.")]
Boards = Annotated[
    list[str] | None,
    typer.Option("--board", help="Only this board, or those of a pattern; may be repeated."),
]
Timeout = Annotated[float | None, typer.Option(help="Seconds; then what was done is undone.")]
# What is loaded is not unloaded again.
LoadTimeout = Annotated[
    float | None, typer.Option(help="Seconds; boards that need longer follow when they can.")
]
Running = Annotated[
    InFlight, typer.Option(help="Running requests keep their version, change it, or end.")
]
