"""``rkserve up`` and ``down`` on the head, ``join`` and ``leave`` on a board."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rkserve.bringup.discovery import suggest_heads
from rkserve.bringup.head import DOWN, join_command, run_head
from rkserve.bringup.head_plan import HeadOptions
from rkserve.bringup.processes import BOARD, HEAD, StateFolder, default_state, end_child
from rkserve.bringup.settings import DASHBOARD_PORT, GCS_PORT
from rkserve.cli.context import Exit
from rkserve.core.errors import ConfigError, RkserveError
from rkserve.core.tls import CA_FILE
from rkserve.deployments.haproxy import default_folder, prepare
from rkserve.deployments.haproxy_listeners import CONTROL
from rkserve.deployments.haproxy_tls import CERT, KEY

commands = typer.Typer()
POLL_S = 0.5


State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="Private folder of the record of processes and of the logs. Default: "
        "/var/lib/rkserve/node for root, ~/.local/state/rkserve for others.",
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="Leave it running in the background.")]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        envvar=CERT,
        help="Certificate with its chain (PEM): clients use https then. A renewed one is in force "
        "within seconds.",
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option("--tls-key", envvar=KEY, help="Its key, where that is another file."),
]
Control = Annotated[
    str | None,
    typer.Option(
        "--control",
        envvar=CONTROL,
        metavar="ADDRESS:PORT",
        help="A port for operators, such as 127.0.0.1:8001: that of clients answers no call that "
        "needs another scope than infer.",
    ),
]
TempDir = Annotated[
    Path | None,
    typer.Option(
        help="Ray's folder for sockets and logs; without it, ray in the state folder, or "
        "/tmp/rkserve-UID where that path is too long for a socket."
    ),
]


@commands.command()
def up(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="SERVE_CONFIG|MODEL.gguf",
            help="The application's configuration, or a model to serve on this machine's CPU at "
            "127.0.0.1. Its id is the file's name; MODEL.rkserve.yaml beside it sets "
            "context_length and the like, and a configuration's `cpu` threads.",
        ),
    ] = Path("serve_config.yaml"),
    *,
    detach: Detach = False,
    state: State = None,
    address: Annotated[
        str | None,
        typer.Option(help="The address at which boards reach this machine; found without it."),
    ] = None,
    ray_port: Annotated[
        int | None,
        typer.Option(
            min=1024,
            max=65000,
            help=f"Ray's first port; it takes seven in a row. Without it {GCS_PORT}, and where no "
            "board joins the next that is free.",
        ),
    ] = None,
    dashboard_port: Annotated[
        int | None,
        typer.Option(
            min=1024,
            max=65535,
            help=f"The port of Ray's dashboard; without it {DASHBOARD_PORT}, or likewise.",
        ),
    ] = None,
    temp_dir: TempDir = None,
    haproxy: Annotated[
        bool, typer.Option("--haproxy/--no-haproxy", help="Ray's HAProxy, where it is installed.")
    ] = True,
    approve: Annotated[
        bool,
        typer.Option(
            "--approve",
            envvar="RKSERVE_APPROVE",
            help="New boards wait for `rkserve approve`; without it a join token is enough.",
        ),
    ] = False,
    mdns: Annotated[
        bool,
        typer.Option(
            "--mdns/--no-mdns",
            envvar="RKSERVE_MDNS",
            help="Announce the head's address in its network, for `rkserve join` without a URL.",
        ),
    ] = True,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    control: Control = None,
) -> None:
    """Start the head: Ray, HAProxy and the application, until Ctrl-C.

    Exit codes: 0 stopped, or with --detach running; 1 something failed or ended.
    """
    folder = _folder(state)
    options = HeadOptions(
        *(config.absolute(), folder, address, ray_port, dashboard_port, temp_dir),
        *(haproxy, approve, mdns, tls_cert, tls_key, control),
    )
    if detach:
        _detached(folder, HEAD, DOWN)
    else:
        _run(lambda: run_head(options, note))


@commands.command()
def down(*, state: State = None) -> None:
    """End the head that `rkserve up` started: exactly its processes, and no other Ray."""
    _end(_folder(state), HEAD)


@commands.command()
def token(
    *,
    minutes: Annotated[
        float, typer.Option(min=1, max=1440, help="Minutes for which boards may join with it.")
    ] = 60,
    state: State = None,
) -> None:
    """Print the command by which boards join this head, with a new join token."""

    def show() -> int:
        note(join_command(StateFolder(_folder(state), HEAD), minutes * 60))
        return Exit.DONE

    _run(show)


@commands.command()
def join(
    head: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]",
            help="The head, http://head:8000. Default: as last time; before the first time, heads "
            "that answer by mDNS are listed.",
        ),
    ] = None,
    *,
    token: Annotated[
        str | None,
        typer.Option(envvar="RKSERVE_JOIN_TOKEN", help="What `rkserve token` printed there."),
    ] = None,
    detach: Detach = False,
    state: State = None,
    library: Annotated[
        Path | None, typer.Option(help="The vendor's librkllmrt.so, for the checks.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The model's folder, for the checks.")] = None,
    doctor: Annotated[
        bool, typer.Option("--doctor/--no-doctor", help="Stop at errors of `rkserve doctor`.")
    ] = True,
    replace_token: Annotated[
        bool, typer.Option("--replace-token", help="Replace another cluster's token.")
    ] = False,
    rknpu: Annotated[float, typer.Option(min=0.01, max=64, help="NPUs that it offers.")] = 1.0,
    ray_cpus: Annotated[
        str | None,
        typer.Option(
            help="CPUs of Ray after its start, such as 0-3. Engines run there as well, unless "
            "their group has `pin_cpus`."
        ),
    ] = None,
    ray_port: Annotated[
        int, typer.Option(min=1024, max=65000, help="As on the head; a board takes the next six.")
    ] = GCS_PORT,
    temp_dir: TempDir = None,
    start: Annotated[
        bool,
        typer.Option(
            "--start/--no-start",
            help="Start Ray. Without it the head's answer is kept, such as for the service.",
        ),
    ] = True,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--ca-file",
            envvar=CA_FILE,
            exists=True,
            dir_okay=False,
            help="Certificates to trust for the head's https, beside those of this machine; later "
            "joins use it, too.",
        ),
    ] = None,
) -> None:
    """Join a head as a board, until Ctrl-C.

    Exit codes: 0 left, or with --detach joined; 1 something failed or ended.
    """
    # `up` needs none of it, and its start would take longer by that import.
    from rkserve.bringup.board import JOINED, LEAVE, JoinOptions, run_board

    if detach and not start:
        raise typer.BadParameter("--detach and --no-start exclude each other")
    folder = _folder(state)
    options = JoinOptions(
        folder,
        head,
        token,
        library,
        model,
        doctor,
        replace_token,
        rknpu,
        cpu_list(ray_cpus),
        ray_port,
        temp_dir,
        start,
        ca_file,
    )
    if head is None and not (folder / JOINED).exists():
        _run(lambda: suggest_heads(typed_options()))
    if detach:
        _detached(folder, BOARD, LEAVE)
    else:
        _run(lambda: run_board(options, note))


@commands.command()
def leave(*, state: State = None) -> None:
    """Leave the cluster: end what `rkserve join` started here, and no other Ray."""
    _end(_folder(state), BOARD)


def cpu_list(text: str | None) -> tuple[int, ...]:
    """Return CPUs written as the kernel does, such as ``0-3,6``; those must be on this machine."""
    if text is None:
        return ()
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        if match is None:
            raise typer.BadParameter(f"--ray-cpus: '{part}' is no CPU; give a list such as 0-3,6")
        found |= {*range(int(match[1]), int(match[2] or match[1]) + 1)}
    missing = found - os.sched_getaffinity(0)
    if missing or not found:
        raise typer.BadParameter(f"--ray-cpus: {text} names CPUs that this process may not use")
    return tuple(sorted(found))


def typed_options() -> list[str]:
    """Return the words after the command as they were typed, without the token."""
    words = iter(sys.argv[sys.argv.index("join") + 1 :] if "join" in sys.argv else ())
    found = []
    for word in words:
        if word == "--token":
            next(words, None)
        elif not word.startswith("--token="):
            found.append(word)
    return found


def note(text: str) -> None:
    """Print a line of progress at once.

    In the background it goes to a file: a full disk must not end the node.
    """
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _folder(state: Path | None) -> Path:
    return (state or default_state()).expanduser().absolute()


def _run(node: Callable[[], int]) -> None:
    try:
        code = node()
    except RkserveError as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None
    raise typer.Exit(code)


def _end(folder: Path, kind: str) -> None:
    def end() -> int:
        ended = StateFolder(folder, kind).end(note)
        note("Stopped." if ended else f"Nothing runs here that {folder} has a record of.")
        return Exit.DONE

    _run(end)


def _detached(folder: Path, kind: str, end: str) -> None:
    """Run this command without ``--detach`` in the background, until it is ready or has ended."""

    def start() -> int:
        state = StateFolder(folder, kind)
        state.refuse_second(end)
        log = state.log(kind)
        words = [word for word in sys.argv[1:] if word != "--detach"]
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "rkserve", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with log.open(encoding="utf-8", errors="replace") as lines:
            try:
                while child.poll() is None:
                    sys.stdout.write(lines.read())
                    sys.stdout.flush()
                    record = state.read()
                    if record is not None and record.supervisor.pid == child.pid and record.ready:
                        sys.stdout.write(lines.read())
                        at = "" if folder == default_state() else f" --state {folder}"
                        note(f"It runs in the background; `{end}{at}` ends it. Its log is {log}.")
                        return Exit.DONE
                    time.sleep(POLL_S)
            except KeyboardInterrupt:
                end_child(child, signal.SIGTERM)
                state.end(note)
                return Exit.INTERRUPTED
            sys.stdout.write(lines.read())
        return Exit.FAILED

    _run(start)


@commands.command()
def front(
    folder: Annotated[
        Path | None,
        typer.Option(help="Private folder for HAProxy's sockets, configuration and state."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="NAME=value, for systemd's EnvironmentFile.")
    ] = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    control: Control = None,
) -> None:
    """Prepare Ray's HAProxy on this node, and print the environment to start Ray in."""
    for name, file in ((CERT, tls_cert), (KEY, tls_key)):
        if file is not None:
            os.environ[name] = str(file.absolute())
    if control is not None:
        os.environ[CONTROL] = control
    try:
        made = prepare(folder.expanduser().absolute() if folder else default_folder())
    except ConfigError as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None
    for name, value in made.items():
        typer.echo(f"{name}={value}" if plain else f"export {name}={shlex.quote(value)}")
