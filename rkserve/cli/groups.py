"""Groups of commands that do something useful when none of them is named."""

from __future__ import annotations

from typing import Any, ClassVar

from typer.core import TyperGroup


class DefaultCommandGroup(TyperGroup):
    """``rkserve models`` is ``rkserve models list``, with the options of that."""

    default: ClassVar[str]

    # The context's class is typer's own copy of click's, or click's, by its version.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in front of options, or of nothing."""
        named = bool(args) and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [self.default, *args])


class ListFirst(DefaultCommandGroup):
    """Lists where nothing else is asked."""

    default = "list"


class InfoFirst(DefaultCommandGroup):
    """Tells how things are where nothing else is asked."""

    default = "info"
