"""The context of commands that call a cluster: client, consoles, output, errors and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console

from rkserve.cli.options import GroupedCommand, OptionGroup
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
from rkserve.client.requests import DEFAULT_URL


class Exit(IntEnum):
    """The exit codes of all commands."""

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
    """Return a client; tests replace this function."""
    return Client(url, admin_key=admin_key)


class CommandContext(typer.Context):
    """The cluster and the terminal: results go to stdout, everything else to stderr."""

    client: Client
    as_json: bool
    out: Console
    err: Console

    def show(self, body: Any, table: Callable[[], Any]) -> None:
        """Print a result: the JSON of the answer, or ``table``."""
        if self.as_json:
            typer.echo(json.dumps(body, ensure_ascii=False, indent=2))
            return
        shown = table()
        if isinstance(shown, str):
            typer.echo(shown)  # one line, however narrow what it is piped into
        else:
            self.out.print(shown)

    def done(self, operation: Operation, said: str) -> None:
        """Print that an operation has succeeded."""
        again = "" if operation.applied else ", as it was already"
        # Where nothing was to be done, it may have asked no board and made no epoch.
        where = f"{operation.succeeded} of {operation.total} boards, " if operation.total else ""
        epoch = f"epoch {operation.epoch}, " if operation.epoch else ""
        self.show(
            dict(operation.body), lambda: f"{said}{again}: {where}{epoch}operation {operation.id}"
        )

    def note(self, lines: Callable[[], Sequence[str]]) -> None:
        """Print notes on stderr beside the result; without them if the cluster does not answer."""
        if self.as_json:
            return
        try:
            found = lines()
        except ClientError:  # the command itself has succeeded
            return
        for line in found:
            self.err.print(line, soft_wrap=True, highlight=False)

    def failed(self, exc: ClientError) -> Exit:
        """Print an error and return its exit code."""
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
    """Return the error as a sentence, with the URL where that may be the cause."""
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


@dataclass(frozen=True)
class ClusterOptions:
    """The options of all commands that call a cluster."""

    url: Annotated[str, typer.Option("--url", envvar="RKSERVE_URL", help="Where rkserve is.")] = (
        DEFAULT_URL
    )
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-key-file",
            envvar="RKSERVE_ADMIN_KEY_FILE",
            exists=True,
            dir_okay=False,
            help="File whose first line beside empty ones and comments (#) is the admin key; "
            "without it RKSERVE_ADMIN_KEY has it.",
        ),
    ] = None
    # Hidden, for the environment: every user of the machine can read command lines.
    admin_key: Annotated[
        str | None, typer.Option("--admin-key", envvar="RKSERVE_ADMIN_KEY", hidden=True)
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False

    def key(self) -> str | None:
        """Return the admin key. Raises ``ValueError`` if its file has none."""
        return self.admin_key if self.admin_key_file is None else first_line(self.admin_key_file)


CLUSTER_OPTIONS = OptionGroup(ClusterOptions)


class ClusterCommand(GroupedCommand):
    """A command that calls a cluster; its function takes a ``CommandContext``."""

    context_class = CommandContext
    groups = (CLUSTER_OPTIONS,)

    def invoke(self, ctx: Any) -> Any:
        """Open the client, run the command, and turn the client's errors into exit codes."""
        options = CLUSTER_OPTIONS.take(ctx.params)
        try:
            client = ctx.obj(options.url, options.key())
        except ValueError as exc:
            raise typer.BadParameter(str(exc)) from exc
        ctx.as_json, ctx.out, ctx.err = options.as_json, _page(), Console(stderr=True)
        with client:
            ctx.client = client
            try:
                return super().invoke(ctx)
            except ClientError as exc:
                raise typer.Exit(ctx.failed(exc)) from exc
            except KeyboardInterrupt as exc:
                ctx.err.print("Interrupted; operations continue: see rkserve operations")
                raise typer.Exit(Exit.INTERRUPTED) from exc


def _page() -> Console:
    """Return stdout's console: as wide as the terminal, or wide enough for a pipe."""
    page = Console(highlight=False)
    return page if page.is_terminal else Console(highlight=False, width=max(page.width, PIPED))


def first_line(path: Path) -> str:
    """Return the first line that holds a key. Raises ``ValueError``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"{path} cannot be read: {exc}") from exc
    # The same rules as for the key file of a Router.
    found = [line for one in lines if (line := one.strip()) and not line.startswith("#")]
    if not found:
        raise ValueError(f"there is no key in {path}")
    return found[0]
