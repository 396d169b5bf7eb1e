"""The options of the command rkserve, for files that call it."""

from __future__ import annotations

import typer
from typer.main import get_command


def options_of(app: typer.Typer, name: str) -> set[str]:
    """Return all options of one command, also those that switch something off."""
    command = get_command(app).commands[name]  # type: ignore[attr-defined] # a group, not typed so
    return {
        option
        for one in command.params
        for option in (*one.opts, *getattr(one, "secondary_opts", ()))
    }
