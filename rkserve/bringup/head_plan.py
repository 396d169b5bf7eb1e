"""The options of ``rkserve up``, and the checks before the head's start."""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rkserve.bringup.settings import DASHBOARD_PORT, GCS_PORT, WORKER_PORTS, NodePorts
from rkserve.config.serve_config import resolve_folder
from rkserve.core.child_process import bind_error, free_ports
from rkserve.core.errors import ConfigError
from rkserve.core.files import private_folder
from rkserve.deployments import haproxy, haproxy_tls, preflight
from rkserve.deployments.haproxy_listeners import CONTROL, ControlAddress, local_address
from rkserve.deployments.haproxy_tls import TlsFiles
from rkserve.doctor.facts import BoardFacts
from rkserve.doctor.node import limits
from rkserve.doctor.rules import localhost
from rkserve.models.gguf import model_id

PORT_TRIES = 20
LOOPBACK = "127.0.0.1"
# The configuration of `rkserve up MODEL.gguf`, in the state folder.
MODEL_CONFIG = "model.yaml"
SINGLE = """\
# {name} on the CPU of this machine. `rkserve up {file}` writes this file anew each time.
# Serve a changed copy with `rkserve up COPY`; docs/reference/configuration.md lists all keys.

proxy_location: HeadOnly
http_options:
  host: {host}
  port: {port}

applications:
  - name: rkserve
    route_prefix: /
    import_path: rkserve.app:build
    args:
      boards:
        - name: cpu
          model: {path}
          cpu: {{}} # threads: 4
"""


@dataclass(frozen=True)
class HeadOptions:
    """The options of ``rkserve up``.

    ``address`` is the one at which boards reach this machine; ``temp_dir`` is Ray's folder; for
    ports see ``with_ports``;
    with ``approval`` new boards wait for ``rkserve approve``; ``mdns`` announces the head;
    ``tls_cert`` and ``tls_key`` are HAProxy's files, and ``control`` its control port.
    """

    config: Path
    state: Path
    address: str | None = None
    ray_port: int | None = None
    dashboard_port: int | None = None
    temp_dir: Path | None = None
    haproxy: bool = True
    approval: bool = False
    mdns: bool = True
    tls_cert: Path | None = None
    tls_key: Path | None = None
    control: str | None = None


@dataclass(frozen=True)
class HeadPlan:
    """The part of a configuration file that concerns the head."""

    url: str
    port: int
    joins: bool  # boards of other machines may join, or have to
    waits: bool = False  # some group has no board before one joins
    measures: tuple[tuple[str, str], ...] = ()  # library and model folder of each with NPUs
    cpu: bool = False  # the head's own CPU is a board
    host: str = preflight.HOST
    certificate: Path | None = None  # the endpoint's, where clients use TLS
    control_url: str = ""  # the control port's, if there is one

    @classmethod
    def of(cls, config: Path, front: FrontSettings | None = None) -> HeadPlan:
        """Read a file that has been checked; ``front`` are HAProxy's settings.

        Raises:
            ConfigError: it has no application, or HAProxies of other nodes would lack the settings.
        """
        tls, control = (None, None) if front is None else (front.tls, front.control)
        content = preflight.read(config)
        options = content.get("http_options") or {}
        host, port = str(options.get("host", preflight.HOST)), options.get("port", preflight.PORT)
        host_here = local_address(host)
        found = preflight.applications(content)
        if not found:
            raise ConfigError(f"{config} has no application with {preflight.APPLICATION}.")
        groups = [
            group
            for one in found
            for group in one.boards
            if group.simulated is None and group.upstream is None
        ]
        own = [one for one in groups if one.cpu is not None and one.cpu.on_head]
        measures = [
            (str(one.library), str(resolve_folder(one.model)))
            for one in groups
            if one.library is not None
        ]
        named = f"[{host_here}]" if ":" in host_here else host_here
        if (tls or control) and groups and content.get("proxy_location") != "HeadOnly":
            lacks = "without TLS" if tls is not None else "without a control port"
            raise ConfigError(
                f"{config} has no proxy_location: HeadOnly, so that every board would serve "
                f"clients, too, and {lacks}."
            )
        file = options.get("ssl_certfile")
        certificate = tls.certificate if tls is not None else Path(str(file)) if file else None
        scheme = "http" if certificate is None else "https"
        return cls(
            f"{scheme}://{named}:{port}",
            int(port),
            joins=len(own) < len(groups) or (bool(own) and not haproxy.is_loopback(host)),
            waits=len(own) < len(groups),
            cpu=bool(own),
            measures=tuple(measures),
            host=host,
            certificate=certificate,
            control_url="" if control is None else control.url(scheme),
        )

    def places(self, address: str) -> dict[str, str]:
        """Return what the record of the node has; boards reach the head at ``address``."""
        certificate = "" if self.certificate is None else str(self.certificate.absolute())
        return {
            "url": self.url,
            "join_url": self.join_url(address),
            "control_url": self.control_url,
            "certificate": certificate,
        }

    def join_url(self, address: str) -> str:
        """Return the URL of the endpoint as boards see it."""
        if local_address(self.host) == self.host:  # not all addresses of this machine
            return self.url
        return f"{self.url.partition(':')[0]}://{address}:{self.port}"


def for_model(options: HeadOptions) -> HeadOptions:
    """Return options for the model of a GGUF file alone, in the place of a configuration.

    Its configuration is written to the state folder, with the first free port from 8000 on. The
    endpoint and Ray listen on the loopback.

    Raises:
        ConfigError: there is no such file, or the state folder cannot be written.
    """
    model = options.config
    if not model.is_file():
        raise ConfigError(f"{model} cannot be read: there is no such file.")
    ports = range(preflight.PORT, preflight.PORT + PORT_TRIES)
    content = SINGLE.format(
        name=model_id(model),
        file=shlex.quote(model.name),
        host=LOOPBACK,
        port=next((one for one in ports if bind_error(one, LOOPBACK) is None), preflight.PORT),
        path=json.dumps(str(model)),
    )
    made = options.state / MODEL_CONFIG
    try:
        private_folder(options.state)
        made.write_text(content, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{made} cannot be written: {exc.strerror or exc}.") from exc
    return replace(options, config=made, address=options.address or LOOPBACK)


def own_address() -> str:
    """Return the address of this machine in its network, as Ray looks for it.

    Raises:
        ConfigError: it has none but the loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))  # sends nothing; it asks for the route
            found = str(probe.getsockname()[0])
        except OSError:
            try:
                found = socket.gethostbyname(socket.gethostname())
            except OSError:
                found = "127.0.0.1"
    if found.startswith("127."):
        raise ConfigError(
            f"The address of this machine is {found}, which boards cannot reach: give the one in "
            "their network by --address."
        )
    return found


def check_ports(ports: Iterable[int], dashboard: int | None = None) -> None:
    """Raise ``ConfigError`` if a port of Ray is in use, its workers', or named twice.

    ``dashboard`` is that of Ray's dashboard on a head; a board has none.
    """
    seen: set[int] = set()
    options = "--ray-port" if dashboard is None else "--ray-port and --dashboard-port"
    for port in (*ports, *(() if dashboard is None else (dashboard,))):
        if port in WORKER_PORTS:
            first, last = WORKER_PORTS[0], WORKER_PORTS[-1]
            raise ConfigError(
                f"Ray's workers have the ports from {first} to {last}, and Ray needs {port} too. "
                f"Give others by {options}."
            )
        if port in seen:
            raise ConfigError(
                f"Ray needs port {port} twice: --ray-port stands for eight ports in a row, and "
                "--dashboard-port is one of them."
            )
        seen.add(port)
        if (exc := bind_error(port)) is not None:
            raise ConfigError(
                f"Ray needs port {port}, which cannot be listened on: {exc.strerror}. End the Ray "
                f"that runs here, or give other ports by {options}."
            ) from exc


def with_ports(
    ray_port: int | None, dashboard_port: int | None, *, fixed: bool
) -> tuple[NodePorts, int]:
    """Return Ray's ports and that of its dashboard: those that are named, or the usual ones.

    ``fixed`` are those that boards and firewalls name. Where no board joins, the next free ones are
    taken if the usual ones are in use.

    Raises:
        ConfigError: a port cannot be listened on.
    """
    tries = 1 if fixed else PORT_TRIES
    dashboards = [dashboard_port] if dashboard_port else [DASHBOARD_PORT + n for n in range(tries)]
    firsts = [ray_port] if ray_port else [GCS_PORT + 10 * n for n in range(tries)]
    dashboard = next((one for one in dashboards if bind_error(one) is None), dashboards[0])
    refused: ConfigError | None = None
    for first in firsts:
        ports = NodePorts(first)
        try:
            check_ports(range(first, ports.last + 1), dashboard)
        except ConfigError as exc:
            refused = refused or exc
        else:
            return ports, dashboard
    assert refused is not None, "each candidate was refused"
    raise refused


def check_localhost() -> None:
    """Raise ``ConfigError`` where ``localhost`` is no loopback address, without which Ray hangs."""
    for one in localhost(BoardFacts(process=limits())):
        raise ConfigError(f"{one.sentence} Run: {one.command}")


@dataclass(frozen=True)
class FrontSettings:
    """HAProxy's settings of an operator: the files of TLS, and the control port."""

    tls: TlsFiles | None = None
    control: ControlAddress | None = None


def with_front(options: HeadOptions) -> tuple[dict[str, str], FrontSettings]:
    """Return the environment with HAProxy's settings, and these, after a look at them.

    Raises:
        ConfigError: they cannot be used, or HAProxy is off.
    """
    given = {haproxy_tls.CERT: options.tls_cert, haproxy_tls.KEY: options.tls_key}
    named = {name: str(file.absolute()) for name, file in given.items() if file is not None}
    if options.control is not None:
        named[CONTROL] = options.control
    environ = {**os.environ, **named}
    runs = options.haproxy and haproxy.available() and environ.get(haproxy.FLAG, "1") == "1"
    preflight.check_tls(options.config, haproxy=runs)
    if not runs:
        haproxy.own_environ({**environ, haproxy.FLAG: "0"})
        return environ, FrontSettings()
    front = FrontSettings(TlsFiles.of(environ), preflight.check_control(options.config, environ))
    # HAProxy's environment is made of this process's.
    if front.tls is not None:
        front.tls.pem()
        os.environ.update(front.tls.environ())
    if front.control is not None:
        os.environ.update(front.control.environ())
    return environ, front


def haproxy_environ(
    environ: dict[str, str],
    ray_port: int,
    stack: ExitStack,
    default: str = "1",
    *,
    alone: bool = False,
) -> dict[str, str]:
    """Return HAProxy's variables; the folder of another than the usual Ray goes with ``stack``.

    ``default`` is the flag where the environment has none. ``alone`` is a cluster of one machine.
    """
    if environ.get(haproxy.FLAG, default) != "1":
        return {}
    if ray_port == GCS_PORT or "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC" in environ:
        on = {haproxy.FLAG: "1"}
        made = haproxy.own_environ({**on, **environ})
        brief = haproxy.BRIEF_DRAIN if alone else {}
        return {**on, **made, **brief, **haproxy.ports_where_taken(environ, free_ports())}
    # Short, for the paths of its sockets.
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="rkserve-", dir="/tmp")))
    return haproxy.environ(folder, free_ports())
