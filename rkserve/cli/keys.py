"""``rkserve keys``: API keys of a cluster, and the first ones before it runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rkserve.bringup.first_key import create_in_ledger
from rkserve.cli import show
from rkserve.cli.context import EXIT_CODES, ClusterCommand, CommandContext, Exit
from rkserve.core.answer_metrics import DAYS_KEPT
from rkserve.core.api_keys import KeyScope
from rkserve.core.errors import RkserveError

keys = typer.Typer(
    help=f"Create, list, rotate and revoke API keys. {EXIT_CODES}", no_args_is_help=True
)
commands = typer.Typer()
commands.add_typer(keys, name="keys", short_help="Create, list, rotate and revoke API keys.")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
BEHIND = (
    "The change is stored, but {count} of the Routers did not confirm it within a second: as long "
    "as they cannot be reached they go by the keys before it. End those that hang."
)
LOST = "Its secret was in an answer that was lost: rkserve keys rotate {id} makes another one."

KeyId = Annotated[str, typer.Argument(metavar="ID", help="The id, or the name of the key.")]
Count = typer.Option(min=1)


def span(text: str) -> float:
    """Return the seconds of a time such as 90s, 15m, 12h or 30d."""
    match = re.fullmatch(r"(\d{1,7}(?:\.\d+)?)([smhd])", text)
    if match is None or not 0 < (found := float(match[1]) * UNITS_S[match[2]]) < math.inf:
        raise typer.BadParameter(f"'{text}' is no time such as 90s, 15m, 12h or 30d")
    return found


@keys.command(cls=ClusterCommand)
def create(
    context: CommandContext,
    name: Annotated[str, typer.Argument(help="The owner's name, which logs and usage show.")],
    *,
    scope: Annotated[
        list[KeyScope] | None,
        typer.Option(help="infer (the default), read, operate or admin; may be repeated."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Only this model; may be repeated.")
    ] = None,
    expires: Annotated[
        Any, typer.Option(parser=span, metavar="TIME", help="After 15m, 12h, 30d; never without.")
    ] = None,
    requests_per_minute: Annotated[int | None, Count] = None,
    tokens_per_minute: Annotated[int | None, Count] = None,
    concurrent: Annotated[int | None, Count] = None,
    board_seconds_per_minute: Annotated[int | None, Count] = None,
    weight: Annotated[float | None, typer.Option(help="Its share of scarce boards.")] = None,
    min_priority: Annotated[int | None, typer.Option(help="Its most urgent priority.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Make it before the cluster runs: in the ledger of this configuration, on the "
            "head, as the account that starts it."
        ),
    ] = None,
) -> None:
    """Create a key and print its secret, which is shown this once."""
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
        "board_seconds_per_minute": board_seconds_per_minute,
        "weight": weight,
        "min_priority": min_priority,
    }
    given = {which: value for which, value in limits.items() if value is not None}
    scopes = [one.value for one in scope or ()] or None
    if config is None:
        made = context.client.create_key(
            name, scopes, models=model or None, expires_in_s=expires, limits=given
        )
    else:
        body = {"name": name, "scopes": scopes, "models": model or None}
        made = _in_ledger(config, {**body, "expires_in_s": expires, **given})
    _show_secret(context, made)


def _in_ledger(config: Path, body: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(create_in_ledger(config, {k: v for k, v in body.items() if v is not None}))
    except RkserveError as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None


@keys.command("list", cls=ClusterCommand)
def list_(context: CommandContext) -> None:
    """List the keys of the cluster, without their secrets."""
    rows = context.client.api_keys()
    context.show(rows, lambda: show.keys(rows))


@keys.command(cls=ClusterCommand)
def rotate(
    context: CommandContext,
    key: KeyId,
    *,
    grace: Annotated[
        Any,
        typer.Option(
            parser=span,
            metavar="TIME",
            help="How long the secret before it stays good, such as 1h.",
        ),
    ] = None,
) -> None:
    """Give a key another secret and print it; the one before it is good for nothing."""
    made = context.client.rotate_key(_id_of(context, key), grace)
    _show_secret(context, made)
    _require_all(made)


@keys.command(cls=ClusterCommand)
def revoke(context: CommandContext, key: KeyId) -> None:
    """Revoke a key; with exit code 0 no Router that is known takes it any more."""
    done = context.client.revoke_key(_id_of(context, key))
    context.show(done, lambda: f"revoked {key}")
    _warn_of_routers(context, done)
    _require_all(done)


def _id_of(context: CommandContext, key: str) -> str:
    """Return the id of a key that may be named."""
    if key.startswith("key_"):
        return key
    return next((str(row["id"]) for row in context.client.api_keys() if row["name"] == key), key)


def _show_secret(context: CommandContext, made: Mapping[str, Any]) -> None:
    lost = LOST.format(id=made["id"]) if made["value"] is None else None
    if lost or not context.as_json:
        scopes = ", ".join(made["scopes"])
        shown = f"{made['id']}: '{made['name']}' with {scopes}. This secret is shown once:"
        _note(context, lost or shown)
    if made["value"] is not None or context.as_json:
        context.show(made, lambda: str(made["value"]))
    _warn_of_routers(context, made)
    if lost:
        raise typer.Exit(Exit.FAILED)


def _warn_of_routers(context: CommandContext, done: Mapping[str, Any]) -> None:
    if count := _behind(done):
        _note(context, BEHIND.format(count=count))


def _require_all(done: Mapping[str, Any]) -> None:
    if _behind(done):
        raise typer.Exit(Exit.PARTLY)


def _behind(done: Mapping[str, Any]) -> int:
    return int(done.get("routers_behind", 0))  # an earlier release does not say


def _note(context: CommandContext, sentence: str) -> None:
    context.err.print(sentence, markup=False, highlight=False, soft_wrap=True)


@commands.command(cls=ClusterCommand)
def usage(
    context: CommandContext,
    days: Annotated[
        int | None,
        typer.Option(
            min=1, max=DAYS_KEPT, help="How many days (UTC) with the current one, 8 by default."
        ),
    ] = None,
) -> None:
    """Show requests, tokens and board time of each API key on each of the last days (UTC)."""
    found = context.client.usage(days)
    context.show(found, lambda: show.usage(found))
