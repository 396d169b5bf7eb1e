"""Options that several commands have, and what they say of themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any

import typer


class ModeOption(str, Enum):
    """What becomes of requests under a pause or a sleep."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class InFlightOption(str, Enum):
    """What becomes of requests that run when weights change."""

    PIN = "pin"
    SWITCH = "switch"
    ABORT = "abort"


Modes = Annotated[
    ModeOption, typer.Option(help="keep: requests wait; wait: they end first; abort: they end now.")
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
    InFlightOption, typer.Option(help="Running requests keep their version, change it, or end.")
]


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return an option, as a parameter of the function that is its command."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


def signed(
    run: Callable[..., Any], command: Callable[..., Any], options: Sequence[inspect.Parameter]
) -> Callable[..., Any]:
    """Make ``run`` look to typer like ``command`` with these options."""
    # What typer reads; typeshed knows the attribute on no function.
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined] # see above
    run.__annotations__ = {one.name: one.annotation for one in options}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def own_options(command: Callable[..., Any], without: str) -> list[inspect.Parameter]:
    """Return the options that a command declares itself: its parameters but for one."""
    kind = inspect.Parameter.KEYWORD_ONLY
    declared = inspect.signature(command, eval_str=True).parameters.values()
    return [one.replace(kind=kind) for one in declared if one.name != without]
