"""The command ``rkserve``: see ``rkserve --help`` and docs/how-to/client.md."""

from __future__ import annotations

from rkserve.cli.commands import app
from rkserve.cli.context import open_client

__all__ = ["app", "main"]


def main() -> None:
    """Run the command that the arguments name; never returns where it did not succeed."""
    app(obj=open_client)
