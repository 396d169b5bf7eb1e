"""Options that several commands share, and command classes that add them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

T = TypeVar("T")


class ModeOption(str, Enum):
    """The effect of a pause or a sleep on requests."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class InFlightOption(str, Enum):
    """The effect of a change of weights on running requests."""

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


class OptionGroup(Generic[T]):
    """Options of several commands, declared once: the parameters of ``read``, which gets them."""

    def __init__(self, read: Callable[..., T]) -> None:
        app = typer.Typer(add_completion=False)
        app.command()(read)
        self._command = typer.main.get_command(app)

    @property
    def params(self) -> list[Any]:
        """The options, as typer makes them for a command."""
        return self._command.params

    def take(self, given: dict[str, Any]) -> T:
        """Remove the group's values from a command's parameters and pass them to ``read``."""
        assert self._command.callback is not None
        values = {one.name: given.pop(one.name) for one in self.params}
        read: T = self._command.callback(**values)
        return read


class GroupedCommand(TyperCommand):
    """A command with the options of ``groups`` behind its own."""

    groups: ClassVar[tuple[OptionGroup[Any], ...]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params = [*self.params, *(one for group in self.groups for one in group.params)]


class DefaultCommandGroup(TyperGroup):
    """A group with a default command: ``rkserve models`` is ``rkserve models list``."""

    default: ClassVar[str]

    # The context's class is typer's own copy of click's, or click's, by its version.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command before options or the end."""
        named = bool(args) and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [self.default, *args])


class ListFirst(DefaultCommandGroup):
    """A group whose default command is ``list``."""

    default = "list"


class InfoFirst(DefaultCommandGroup):
    """A group whose default command is ``info``."""

    default = "info"
