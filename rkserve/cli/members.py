"""``rkserve approve`` and ``deny``, and the boards that have asked to join in ``rkserve boards``.

On the head's own machine they read and write its state folder, as ``rkserve token`` does: behind
HAProxy the Router cannot recognise the head's operator without an admin key. Elsewhere they call
the Router.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rkserve.bringup.head import decide_here, has_terms, local_members
from rkserve.bringup.processes import HEAD, StateFolder, default_state
from rkserve.cli.bringup import State
from rkserve.cli.context import ClusterCommand, CommandContext, Exit
from rkserve.client import CallError
from rkserve.client.requests import DEFAULT_URL
from rkserve.core.errors import ConfigError, RkserveError

commands = typer.Typer()
# A Router that is not the operator's to ask, is older, or is of a head without `rkserve up`.
NO_LIST = (401, 403, 404, 409)
REASONS = {
    "waiting": "rkserve approve {id}",
    "denied": "rkserve approve {id} takes that back",
    "joined": "serves nothing yet: its replica starts, its Ray ended, or no group has a place",
    "left": "it has sent nothing for {silent}: it has left, is off, or has no network",
}
MINUTE_S = 60.0
LEFT_S = 60.0  # without the heartbeat that a board sends every few seconds
Named = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="Host names or ids of boards.")
]
Denied = Annotated[
    list[str], typer.Argument(metavar="NAME...", help="Host names or ids of boards.")
]


@commands.command(cls=ClusterCommand)
def approve(
    context: CommandContext,
    names: Named = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All that wait.")] = False,
    state: State = None,
) -> None:
    """Approve boards that wait to join, or that were denied."""
    if every == bool(names):
        raise typer.BadParameter("give names of boards, or --all")
    _decide(context, names or [], state, approve=True, every=every)


@commands.command(cls=ClusterCommand)
def deny(context: CommandContext, names: Denied, *, state: State = None) -> None:
    """Deny boards that ask to join; `rkserve approve` takes that back."""
    _decide(context, names, state, approve=False)


def _decide(
    context: CommandContext,
    names: Sequence[str],
    state: Path | None,
    *,
    approve: bool,
    every: bool = False,
) -> None:
    client = context.client
    try:
        folder = head_folder(state, client.url)
        if folder is not None:
            done: Sequence[Any] = decide_here(folder, names, approve=approve, everything=every)
        elif approve:
            done = client.approve_boards(names, waiting=every)["data"]
        else:
            done = client.deny_boards(names)["data"]
    except RkserveError as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None
    shown = ", ".join(f"{one['host']} ({one['id']})" for one in done)
    word = "approved" if approve else "denied"
    context.show(
        [dict(one) for one in done], lambda: f"{word} {shown}" if done else "no board waits"
    )


def head_folder(state: Path | None, url: str) -> Path | None:
    """Return the state folder of the head that is meant; None if the Router has to be asked.

    Raises:
        ConfigError: ``state`` is given, and is none of a head.
    """
    if state is not None:
        folder = state.expanduser().absolute()
        if not has_terms(folder):
            raise ConfigError(
                f"{folder} is no state folder of a head: no `rkserve up` ran with it."
            )
        StateFolder(
            folder, HEAD
        )  # refused if it is another account's: the Router could not read it
        return folder
    folder = default_state()
    if not has_terms(folder):
        return None
    record = StateFolder(folder, HEAD).read()
    if record is None or not record.running:
        return None
    own = (DEFAULT_URL, record.url, record.join_url, record.control_url)
    return folder if url.rstrip("/") in own else None


def members(context: CommandContext, state: Path | None) -> Sequence[Mapping[str, Any]]:
    """Return the boards that have asked to join; none if this operator may not see them."""
    try:
        folder = head_folder(state, context.client.url)
        return context.client.members() if folder is None else local_members(folder)
    except CallError as exc:
        if exc.status in NO_LIST:
            return []
        raise
    except ConfigError as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None


def not_served(
    asked: Sequence[Mapping[str, Any]], served: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield rows of the boards that have asked to join, and serve no model."""
    nodes = [str(one.get("node")) for one in served]
    for one in asked:
        # A board whose host name another one has is called by its address as well.
        name = re.compile(rf"{re.escape(one['host'])}(-[0-9a-f.:]+)?")
        if one["state"] != "joined" or not any(name.fullmatch(node) for node in nodes):
            # Boards of an earlier version send no heartbeat: of these nothing is known.
            silent_s = time.time() - one.get("seen_s", math.inf)
            left = one["state"] == "joined" and silent_s > LEFT_S
            state = "left" if left else one["state"]
            about = REASONS[state].format(id=one["id"], silent=_span(silent_s))
            row = {"id": one["host"], "state": state, "node": one["host"]}
            reason = ". ".join([about, *one["notes"]])
            yield {**row, "model": None, "reason": reason, "since_s": one["since_s"]}


def _span(seconds: float) -> str:
    minutes = max(0.0, seconds) / MINUTE_S
    if minutes < 2 * MINUTE_S:
        return f"{minutes:.0f} minutes"
    return f"{minutes / MINUTE_S:.0f} hours"
