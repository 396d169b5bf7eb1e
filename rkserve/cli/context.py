"""What every command has: where rkserve is, the key, how to answer, and exit codes.

It knows errors of the client and exit codes; what is asked is in the commands.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console

from rkserve.cli.options import keyword, own_options, signed
from rkserve.client import (
    CallError,
    Client,
    ClientError,
    Operation,
    OperationError,
    PartlyDone,
    UnexpectedAnswer,
    Unreachable,
)
from rkserve.client.connection import DEFAULT_URL


class Exit(IntEnum):
    """What scripts can go by."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    PARTLY = 3
    UNREACHABLE = 4
    INTERRUPTED = 130


EXIT_CODES = (
    "Exit codes: 0 done; 1 refused or failed, and nothing is left half done; 2 wrong usage; "
    "3 partly done: in force, and some boards have not followed yet; 4 rkserve cannot be reached."
)

PIPED = 240  # columns of a table for another program

OpenClient: TypeAlias = Callable[[str, "str | None"], Client]


def open_client(url: str, admin_key: str | None) -> Client:
    """Return a client. Tests put another function in this one's place."""
    return Client(url, admin_key=admin_key)


@dataclass(frozen=True)
class CommandContext:
    """The cluster, and the terminal: results go to stdout, everything else to stderr."""

    client: Client
    as_json: bool
    out: Console
    err: Console

    def show(self, body: Any, table: Callable[[], Any]) -> None:
        """Print a result: the JSON that was answered, or what ``table`` makes of it."""
        if self.as_json:
            typer.echo(json.dumps(body, ensure_ascii=False, indent=2))
            return
        shown = table()
        if isinstance(shown, str):
            typer.echo(shown)  # one line, however narrow what it is piped into
        else:
            self.out.print(shown)

    def done(self, operation: Operation, said: str) -> None:
        """Say that an operation has succeeded."""
        again = "" if operation.applied else ", as it was already"
        # Where nothing was to be done, it may have asked no board and made no epoch.
        where = f"{operation.succeeded} of {operation.total} boards, " if operation.total else ""
        epoch = f"epoch {operation.epoch}, " if operation.epoch else ""
        self.show(
            dict(operation.body), lambda: f"{said}{again}: {where}{epoch}operation {operation.id}"
        )

    def note(self, lines: Callable[[], Sequence[str]]) -> None:
        """Say beside the result what else is worth knowing, if that can be learnt."""
        if self.as_json:
            return
        try:
            found = lines()
        except ClientError:  # what was asked for is done all the same
            return
        for line in found:
            self.err.print(line, soft_wrap=True, highlight=False)

    def failed(self, exc: ClientError) -> Exit:
        """Say what went wrong, and return the exit code for it."""
        url = self.client.url
        if self.as_json:
            self.err.print_json(json.dumps(_error(exc, url)))
        else:
            self.err.print(
                f"rkserve: {_sentence(exc, url)}", markup=False, highlight=False, soft_wrap=True
            )
        if isinstance(exc, PartlyDone):
            if self.as_json:
                typer.echo(json.dumps(dict(exc.operation.body), ensure_ascii=False, indent=2))
            return Exit.PARTLY
        return Exit.UNREACHABLE if isinstance(exc, Unreachable) else Exit.FAILED


def _sentence(exc: ClientError, url: str) -> str:
    """Return the error for people, with the URL where that may be the mistake."""
    if isinstance(exc, Unreachable):
        return f"{url} cannot be reached: {exc}. --url or RKSERVE_URL names another one."
    if isinstance(exc, UnexpectedAnswer):
        return f"{str(exc).rstrip('.')}. The URL was {url}; --url or RKSERVE_URL names another one."
    return str(exc)


def _error(exc: ClientError, url: str) -> dict[str, Any]:
    said: dict[str, Any] = {"type": type(exc).__name__, "message": str(exc), "url": url}
    if isinstance(exc, CallError):
        said |= {"status": exc.status, "code": exc.code, "retry_after_s": exc.retry_after_s}
    if isinstance(exc, OperationError):
        failed = [{"board": f.board, "error": f.error, "message": f.message} for f in exc.failed]
        said |= {"operation_id": exc.operation.id, "failed": failed}
    return {"error": said}


Url = Annotated[str, typer.Option("--url", envvar="RKSERVE_URL", help="Where rkserve is.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file",
        envvar="RKSERVE_ADMIN_KEY_FILE",
        exists=True,
        dir_okay=False,
        help="File whose first line beside empty ones and comments (#) is the admin key; without "
        "it RKSERVE_ADMIN_KEY has it.",
    ),
]
# Hidden, for the environment: every user of the machine can read what is on a command line.
Key = Annotated[str | None, typer.Option("--admin-key", envvar="RKSERVE_ADMIN_KEY", hidden=True)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Pass a ``CommandContext`` to a command, and declare the options that all commands share."""

    def run(context: typer.Context, **given: Any) -> None:
        url, key_file = given.pop("url"), given.pop("admin_key_file")
        key, as_json = given.pop("admin_key"), given.pop("as_json")
        try:
            client = context.obj(url, key if key_file is None else first_line(key_file))
        except ValueError as exc:
            raise typer.BadParameter(str(exc)) from exc
        with client:
            link = CommandContext(client, as_json, _page(), Console(stderr=True))
            try:
                command(link, **given)
            except ClientError as exc:
                raise typer.Exit(link.failed(exc)) from exc
            except KeyboardInterrupt as exc:
                link.err.print("Interrupted; what was begun goes on: see rkserve operations")
                raise typer.Exit(Exit.INTERRUPTED) from exc

    own = own_options(command, without="link")
    added = [
        keyword("context", typer.Context, inspect.Parameter.empty),
        *own,
        keyword("url", Url, DEFAULT_URL),
        keyword("admin_key_file", KeyFile, None),
        keyword("admin_key", Key, None),
        keyword("as_json", AsJson, False),
    ]
    return signed(run, command, added)


def _page() -> Console:
    """Return stdout: as wide as the terminal is, and where there is none as lines need to be."""
    page = Console(highlight=False)
    return page if page.is_terminal else Console(highlight=False, width=max(page.width, PIPED))


def first_line(path: Path) -> str:
    """Return the first line with a key in it. Raises ``ValueError``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"{path} cannot be read: {exc}") from exc
    # As a Router reads the file that it is given.
    found = [line for one in lines if (line := one.strip()) and not line.startswith("#")]
    if not found:
        raise ValueError(f"there is no key in {path}")
    return found[0]
