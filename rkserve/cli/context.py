"""Commands that call a cluster: shared options, client, output, errors, exit codes and progress.

Progress is that of uploads and fetches (bytes) and operations (boards), on a terminal. The states
of boards are read from the cluster, because an operation lists boards only when they are done. If
the cluster does not answer, its rows are left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeAlias, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from typer.core import TyperCommand, TyperGroup

from rkserve.bringup import processes
from rkserve.bringup.processes import HEAD, own_control, own_secret
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
from rkserve.client import Progress as ClientProgress
from rkserve.client.flows import OnProgress
from rkserve.client.keys import own_key
from rkserve.client.requests import DEFAULT_URL, InFlight, Mode
from rkserve.core import tls

T = TypeVar("T")


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


ManifestFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="The signed manifest; without it FILE.manifest.json, if that is there.",
    ),
]
AllowOlder = Annotated[
    bool,
    typer.Option(
        "--allow-older", help="Take a lower version than the highest signed one; scope admin."
    ),
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

    def done(self, operation: Operation, outcome: str) -> None:
        """Print that an operation has succeeded."""
        again = "" if operation.applied else ", as it was already"
        # Where nothing was to be done, it may have asked no board and made no epoch.
        where = f"{operation.succeeded} of {operation.total} boards, " if operation.total else ""
        epoch = f"epoch {operation.epoch}, " if operation.epoch else ""
        self.show(
            dict(operation.body),
            lambda: f"{outcome}{again}: {where}{epoch}operation {operation.id}",
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
        advice = tls.hint(exc) or " --url or RKSERVE_URL names another one."
        return f"{url} cannot be reached: {exc}.{advice}"
    if isinstance(exc, UnexpectedAnswer):
        return f"{str(exc).rstrip('.')}. The URL was {url}; --url or RKSERVE_URL names another one."
    return str(exc)


def _error(exc: ClientError, url: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(exc).__name__, "message": str(exc), "url": url}
    if isinstance(exc, CallError):
        fields |= {"status": exc.status, "code": exc.code, "retry_after_s": exc.retry_after_s}
    if isinstance(exc, OperationError):
        failed = [{"board": f.board, "error": f.error, "message": f.message} for f in exc.failed]
        fields |= {"operation_id": exc.operation.id, "failed": failed}
    return {"error": fields}


@dataclass(frozen=True)
class ClusterOptions:
    """The options of all commands that call a cluster."""

    url: Annotated[
        str,
        typer.Option(
            "--url",
            envvar="RKSERVE_URL",
            help="Where rkserve is; without it the head that runs here with a control port.",
        ),
    ] = DEFAULT_URL
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-key-file",
            envvar="RKSERVE_ADMIN_KEY_FILE",
            exists=True,
            dir_okay=False,
            help="File whose first line beside empty ones and comments (#) is the key; without it "
            "RKSERVE_ADMIN_KEY or RKSERVE_API_KEY has it, or ~/.config/rkserve/keys in a line of "
            "URL and key, or on the head the file that `rkserve up` made.",
        ),
    ] = None
    # Hidden, for the environment: every user of the machine can read command lines.
    admin_key: Annotated[
        str | None, typer.Option("--admin-key", envvar="RKSERVE_ADMIN_KEY", hidden=True)
    ] = None
    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--ca-file",
            envvar=tls.CA_FILE,
            exists=True,
            dir_okay=False,
            help="Certificates to trust for https, beside those of this machine: a copy of the "
            "head's own, for example.",
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False

    def key(self) -> str | None:
        """Return the key for the URL, None without one. Raises ``ValueError`` for a wrong file."""
        if self.admin_key_file is not None:
            return first_line(self.admin_key_file)
        url = self.url.rstrip("/").removesuffix("/v1")
        return self.admin_key or own_key(url) or _key_of_head(url)


def _key_of_head(url: str) -> str | None:
    return next(filter(None, (own_secret(folder, url) for folder in _own_states())), None)


def _own_states() -> tuple[Path, ...]:
    """Return the folders of a node on this machine; root may have started either."""
    return processes.SERVICE_STATE, processes.user_state()


def _at_own_control_port(options: ClusterOptions) -> ClusterOptions:
    """Return the options for the control port of this machine's head, if it has one."""
    for folder in _own_states():
        if (found := own_control(folder, HEAD)) is not None:
            url, certificate = found
            named = options.ca_file or tls.named_authorities(os.environ)
            return replace(options, url=url, ca_file=named or certificate)
    return options


CLUSTER_OPTIONS = OptionGroup(ClusterOptions)


class ClusterCommand(GroupedCommand):
    """A command that calls a cluster; its function takes a ``CommandContext``."""

    context_class = CommandContext
    groups = (CLUSTER_OPTIONS,)

    def invoke(self, ctx: Any) -> Any:
        """Open the client, run the command, and turn the client's errors into exit codes."""
        options = CLUSTER_OPTIONS.take(ctx.params)
        source = ctx.get_parameter_source("url")
        if source is not None and source.name == "DEFAULT":
            options = _at_own_control_port(options)
        if options.ca_file is not None:
            os.environ[tls.CA_FILE] = str(options.ca_file)  # where the client looks for it
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


# -- progress -------------------------------------------------------------------------------------

# These change boards as a whole: the state that one comes to.
ENDS = {"sleep": "asleep", "wake": "ready", "rebase": "ready", "weight_update": "ready"}
LOADS = ("rebase", "weight_update")
MOST_ROWS = 16
Look = Callable[[], Mapping[str, Any]]


@contextmanager
def progress(context: CommandContext) -> Iterator[OnProgress]:
    """Return a progress callback that draws on stderr, on a terminal only."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    hidden = context.as_json or not context.err.is_terminal
    with Progress(*columns, console=context.err, disable=hidden) as shown:
        yield (
            (lambda _progress: None)
            if hidden
            else OperationProgress(shown, context.client.cluster).update
        )


class OperationProgress:
    """A bar for each step, and below it one for each board in scope."""

    def __init__(self, shown: Progress, look: Look) -> None:
        self._shown = shown
        self._look = look
        self._tasks: dict[str, TaskID] = {}

    def update(self, report: ClientProgress) -> None:
        """Show the progress."""
        rows = {} if report.operation is None else self._rows(report.operation)
        done, total = report.done, report.total
        if report.operation is not None and not report.operation.over and done >= total:
            # The operation lists no board yet, or those of the previous phase.
            done, total = sum(row.done for row in rows.values()), len(rows)
        step = report.operation.id if report.operation else f"{report.step} {report.phase}"
        self._show(step, describe(report), done, total, count(report.step, done, total))
        if len(rows) <= MOST_ROWS:
            for name, row in rows.items():
                end = int(row.done)
                self._show(f"{step} {name}", f"  {escape(name)}", end, end, row.text)

    def _show(self, name: str, text: str, done: int, total: int, count: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._shown.add_task(text, count="", total=None)
        # A bar without a total shows activity.
        of = total or None
        self._shown.update(
            self._tasks[name], description=text, completed=done, total=of, count=escape(count)
        )

    def _rows(self, one: Operation) -> dict[str, BoardRow]:
        params = one.body.get("params") or {}
        if one.kind not in ENDS or "name" in params:  # an adapter's name: no board loads a model
            return {}
        if one.over:
            bad = {failure.board: BoardRow(failure.error, done=False) for failure in one.failed}
            return bad | {
                name: BoardRow(did.status, done=True) for name, did in one.results.items()
            }
        try:
            boards = self._look()["boards"]
        except ClientError:  # progress is optional; the operation goes on
            return {}
        return {
            str(row["id"]): BoardRow(str(row["state"]), done=_is_there(row, one.kind, params))
            for row in boards
            if meant(row, params)
        }


@dataclass(frozen=True)
class BoardRow:
    """The state of a board in an operation."""

    text: str
    done: bool


def meant(row: Mapping[str, Any], params: Mapping[str, Any]) -> bool:
    """Return True if an operation with these parameters includes a board."""
    models, boards = params.get("models") or (), params.get("boards") or ()
    model = params.get("model") or row["model"]
    return (
        row["model"] == model
        and (not models or row["model"] in models)
        and (not boards or row["id"] in boards)
    )


def _is_there(row: Mapping[str, Any], kind: str, params: Mapping[str, Any]) -> bool:
    loaded = kind not in LOADS or bool(_base_of(row) == params.get("digest"))
    return loaded and row["state"] == ENDS[kind]


def _base_of(row: Mapping[str, Any]) -> Any:
    """Return the sha256 of other base weights than the model folder's, as operations name them."""
    return None if row.get("own_base") else row.get("base")


def describe(report: ClientProgress) -> str:
    """Return the description of a step."""
    return f"{report.step.replace('_', ' ')} {report.phase}".strip()


def count(step: str, done: int, total: int) -> str:
    """Return the count of a step as text."""
    if step in ("upload", "fetch"):
        return f"{done / 2**20:.1f} of {total / 2**20:.1f} MiB"
    return f"{done} of {total} boards" if total else ""
