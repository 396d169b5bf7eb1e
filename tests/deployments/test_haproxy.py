"""HAProxy before the Routers, as far as no Ray is needed: hang-ups, limits, sockets, refusals.

HAProxy is a real one, with the configuration that the installed Ray writes for one Router.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import socketserver
import ssl
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPSConnection, IncompleteRead
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from rkserve.core.child_process import free_ports
from rkserve.core.errors import ConfigError, Forbidden
from rkserve.deployments import haproxy
from rkserve.deployments.haproxy import (
    BINARY,
    DEFAULT_PORTS,
    DEFAULT_ROUTER_PORT,
    FIRST_ROUTER_PORT,
    FLAG,
    LAST_ROUTER_PORT,
    LAUNCHER,
    RETRY_ON,
    available,
    check_environ,
    environ,
    is_loopback,
    orphans,
    ports_where_taken,
    prepare,
)
from rkserve.deployments.haproxy_config import (
    HEADER_TIMEOUT,
    PER_ADDRESS,
    PROXIES,
    REPEATED_BYTES,
    SPARE_CONNECTIONS,
)
from rkserve.deployments.haproxy_listeners import CONTROL, MARK_HEADER, proof_of
from rkserve.deployments.haproxy_tls import CERT, KEY, PEM
from rkserve.http.auth import Access, Gate
from rkserve.router.auth.key_ring import KeyRing, Keys
from tests.support.http.certificates import write_certificate

pytestmark = pytest.mark.slow

PATIENCE_S = 30.0
JSON = b"application/json"
NODE = "n" * 56  # as long as Ray's ids of nodes
with_haproxy = pytest.mark.skipif(not available(), reason="Ray has no HAProxy for this platform")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        pytest.param("127.0.0.1", True, id="this machine"),
        pytest.param("127.0.0.5", True, id="another of its addresses"),
        pytest.param("::1", True, id="in version 6"),
        pytest.param("localhost", True, id="by name"),
        pytest.param("0.0.0.0", False, id="every interface"),
        pytest.param("::", False, id="every interface, version 6"),
        pytest.param("192.0.2.1", False, id="an address of the network"),
        pytest.param("board.example.org", False, id="a name"),
        pytest.param(None, False, id="nothing"),
        pytest.param("", False, id="an empty word"),
    ],
)
def test_only_addresses_of_this_machine_hide_nobody(host: str | None, alone: bool) -> None:
    assert is_loopback(host) is alone


def request(client: tuple[str, int] | None) -> Request:
    """A call that comes from there."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/pause",
        "headers": [],
        "client": client,
    }
    return Request(scope)


def test_a_caller_that_is_hidden_is_not_taken_for_a_program_of_this_machine() -> None:
    gate = Gate(KeyRing(Keys()))
    gate.admit(request(("127.0.0.1", 1)), Access.OPERATE)
    with pytest.raises(Forbidden, match="needs a key"):
        gate.admit(request(None), Access.OPERATE)


# -- the folder and the environment -------------------------------------------------------------


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="rk-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@with_haproxy
def test_two_rays_of_a_machine_share_neither_files_nor_ports(short: Path) -> None:
    ports = itertools.count(1)
    one, two = (environ(short / name, ports) for name in ("one", "two"))
    assert one[FLAG] == two[FLAG] == "1"
    own = {name for name in one if one[name] != two[name]}
    assert own == {
        name for name in one if any(w in name for w in ("PATH", "LOC", "STATE", "_PORT"))
    }


def test_ports_on_which_another_ray_listens_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_ports()
    names = list(DEFAULT_PORTS)
    defaults = {name: next(free) for name in names}
    monkeypatch.setattr(haproxy, "DEFAULT_PORTS", defaults)
    monkeypatch.setattr(haproxy, "DEFAULT_ROUTER_PORT", next(free))
    assert ports_where_taken({}, itertools.count(1)) == {}
    with ExitStack() as stack:
        # Serve's own proxy listens at all addresses, HAProxy's statistics page at the loopback.
        for host, port in (("", defaults[names[0]]), ("127.0.0.1", defaults[names[3]])):
            stack.enter_context(socket.create_server((host, port)))
        given = {names[1]: "9999"}
        assert ports_where_taken(given, itertools.count(1)) == {names[0]: "1", names[3]: "2"}
        assert ports_where_taken(dict.fromkeys(names, "9999"), itertools.count(1)) == {}
        stack.enter_context(socket.create_server(("", haproxy.DEFAULT_ROUTER_PORT)))
        made = ports_where_taken(dict.fromkeys(names, "9999"), itertools.count(7))
        assert made == {FIRST_ROUTER_PORT: "7", LAST_ROUTER_PORT: "107"}
        given = dict.fromkeys([*names, LAST_ROUTER_PORT], "9999")
        assert ports_where_taken(given, itertools.count()) == {}


def test_the_default_ports_are_rays() -> None:
    ray = find_spec("ray")  # not imported: that takes seconds
    assert ray is not None
    assert ray.origin is not None
    text = (Path(ray.origin).parent / "serve" / "_private" / "constants.py").read_text()
    for name, port in {**DEFAULT_PORTS, FIRST_ROUTER_PORT: DEFAULT_ROUTER_PORT}.items():
        assert re.search(rf'"{name}",\s+"?{port}\b', text), name


@with_haproxy
def test_the_folder_and_the_launcher_are_for_this_account_only(short: Path) -> None:
    folder = short / "front"
    launcher = Path(prepare(folder)[BINARY])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(launcher.stat().st_mode) == 0o700
    assert prepare(folder)[BINARY] == str(launcher), "a second time changes nothing"


@with_haproxy
def test_a_busy_machine_has_more_than_rays_five_seconds_to_start_it(short: Path) -> None:
    assert float(prepare(short / "front")["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"]) > 5.0


def linked(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def a_file(folder: Path) -> None:
    folder.write_text("")


def opened(mode: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        folder.chmod(mode)

    return make


def given_away(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)


PREPARED_BY_OTHERS = [
    pytest.param(linked, "is a symbolic link", id="a link"),
    pytest.param(a_file, "is no folder", id="a file"),
    pytest.param(opened(0o770), "other accounts may write", id="a folder of a group"),
    pytest.param(opened(0o777), "other accounts may write", id="a folder of everybody"),
    pytest.param(given_away, "belongs to user 12345", id="another's", marks=as_root),
]


@with_haproxy
@pytest.mark.parametrize(("make", "sentence"), PREPARED_BY_OTHERS)
def test_a_folder_that_others_prepared_is_refused(
    make: Callable[[Path], None], sentence: str, short: Path
) -> None:
    make(short / "front")
    with pytest.raises(ConfigError, match=sentence):
        prepare(short / "front")


@with_haproxy
def test_a_folder_with_a_long_path_is_refused(short: Path) -> None:
    with pytest.raises(ConfigError, match="shorter"):
        prepare(short / ("x" * 30))


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        pytest.param({}, False, id="Ray's own proxy"),
        pytest.param({FLAG: "0"}, False, id="switched off"),
        pytest.param({FLAG: "1", BINARY: f"/x/{LAUNCHER}"}, False, id="rkserve's launcher"),
        pytest.param({FLAG: "1"}, True, id="HAProxy as Ray configures it"),
        pytest.param({FLAG: "1", BINARY: "/usr/sbin/haproxy"}, True, id="another program"),
    ],
)
def test_haproxy_with_rays_own_configuration_is_refused(
    given: dict[str, str], refused: bool
) -> None:
    if not refused:
        check_environ(given)
        return
    with pytest.raises(ConfigError, match="rkserve front"):
        check_environ(given)


# -- a HAProxy ----------------------------------------------------------------------------------


@dataclass
class Router:
    """A server in the place of a Router. ``/hang`` is answered by nothing, ``/text`` and ``/json``
    by a 404 of that type, and ``/stream`` by the beginning of a stream until ``killed``.
    """

    complete: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    killed: threading.Event = field(default_factory=threading.Event)
    dies: bool = False  # it closes each connection when it has read a request
    asked: list[str] = field(default_factory=list)
    headers: list[tuple[str, str]] = field(default_factory=list)  # of the last one of a client

    @contextmanager
    def listening(self) -> Iterator[int]:
        router = self

        class Connection(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(ConnectionError):  # health checks do not close in order
                    self.requests()

            def requests(self) -> None:
                while line := self.rfile.readline():
                    length, headers = 0, list[tuple[str, str]]()
                    while (header := self.rfile.readline()).strip():
                        name, _, value = header.decode().partition(":")
                        headers.append((name.lower(), value.strip()))
                        length = int(value) if name.lower() == "content-length" else length
                    self.rfile.read(length)
                    if not line.split()[1].startswith(b"/-/"):  # HAProxy's checks
                        router.headers = headers
                    router.asked.append(line.split()[1].decode())
                    if router.dies and not line.split()[1].startswith(b"/-/"):
                        return
                    if line.split()[1] == b"/hang":
                        router.complete.set()
                        with suppress(ConnectionError):
                            self.rfile.read(1)  # until HAProxy closes or resets it
                        router.left.set()
                        return
                    if line.split()[1] == b"/stream":
                        self.wfile.write(
                            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"
                            b"content-type: text/event-stream\r\n\r\n9\r\ndata: 1\n\n\r\n"
                        )
                        router.killed.wait(PATIENCE_S)
                        return
                    if line.split()[1] in (b"/text", b"/json"):
                        kind = {b"/text": b"text/plain; charset=utf-8", b"/json": JSON}
                        self.wfile.write(
                            b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\ncontent-type: "
                            + kind[line.split()[1]]
                            + b"\r\n\r\n{}"
                        )
                        continue
                    self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            block_on_close = False

        with Server(("127.0.0.1", 0), Connection) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield server.server_address[1]
            finally:
                server.shutdown()


@dataclass
class Front:
    """A HAProxy that Ray has configured for one Router, as Ray starts it."""

    folder: Path
    port: int
    ports: dict[str, int]
    launcher: str
    env: dict[str, str]
    tls: ssl.SSLContext | None = None  # of its clients

    @property
    def config(self) -> Path:
        return self.folder / NODE / "haproxy.cfg"

    def write(self, *routers: int) -> None:
        """Have Ray's own code write the configuration of an application, or of none."""
        from ray.serve._private.haproxy import (
            BackendConfig,
            HAProxyApi,
            HAProxyConfig,
            ServerConfig,
        )
        from ray.serve.config import HTTPOptions

        place = self.config.parent
        config = HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=self.port),
            socket_path=str(place / "admin.sock"),
            server_state_base=str(place),
            server_state_file=str(place / "state"),
            metrics_socket_path=str(place / "metrics.sock"),
            metrics_port=self.ports["metrics"],
            stats_port=self.ports["stats"],
            nbthread=1,
            has_received_routes=True,
            has_received_servers=True,
            is_head=True,
            retry_on=RETRY_ON,
        )
        servers = [
            ServerConfig(name=f"router{n}", host="127.0.0.1", port=port)
            for n, port in enumerate(routers)
        ]
        backend = BackendConfig(name="app", path_prefix="/", app_name="app", servers=servers)
        backends = {"app": backend} if servers else {}
        api = HAProxyApi(config, backends, config_file_path=str(self.config))
        api._generate_config_file_internal()

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.launcher, "-db", "-f", str(self.config), "-dR"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.env},
        )

    @contextmanager
    def running(self, status: int = HTTPStatus.OK, router: int = 0) -> Iterator[Front]:
        """Run until it answers with that status; ``router`` is another port to send calls to."""
        if router:
            self.write(router)
        process = self.start()
        try:
            self._wait(process, status)
            yield self
        finally:
            process.kill()
            process.communicate()

    def _wait(self, process: subprocess.Popen[str], status: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            assert process.poll() is None, "HAProxy ended"
            # The port is open before TLS is: the handshake may end without an answer.
            with suppress(ConnectionError, ssl.SSLEOFError), self.client() as client:
                if ask(client)[0] == status:
                    return
            time.sleep(0.05)
        raise AssertionError("HAProxy was not ready in time")

    def connect(self, port: int = 0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port or self.port), timeout=PATIENCE_S)

    def client(self, source: str = "127.0.0.1", port: int = 0) -> closing[HTTPConnection]:
        where, bound = ("127.0.0.1", port or self.port), (source, 0)
        if self.tls is not None:
            return closing(
                HTTPSConnection(*where, timeout=PATIENCE_S, source_address=bound, context=self.tls)
            )
        return closing(HTTPConnection(*where, timeout=PATIENCE_S, source_address=bound))


def ask(client: HTTPConnection, path: str = "/v1/models") -> tuple[int, bytes]:
    client.request("GET", path)
    answer = client.getresponse()
    return answer.status, answer.read()


def code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


def rest(client: socket.socket) -> bytes:
    """Everything until the other side closes."""
    found = b""
    while part := client.recv(65536):
        found += part
    return found


@pytest.fixture
def opened_front(short: Path) -> Iterator[Callable[..., Front]]:
    """Start HAProxy with some limits in front of a Router."""
    with ExitStack() as stack:

        def make(router: Router | None, **env: str) -> Front:
            ports = free_ports()
            given = environ(short / "f", ports)
            port = next(ports)
            made = Front(
                short / "f",
                port,
                {
                    name: int(given[f"RAY_SERVE_HAPROXY_{name.upper()}_PORT"])
                    for name in ("metrics", "stats")
                },
                given[BINARY],
                env,
            )
            listening = stack.enter_context((router or Router()).listening())
            made.write(listening)
            return made

        yield make


@with_haproxy
def test_a_client_that_leaves_is_seen_although_its_request_came_in_two_segments(
    opened_front: Callable[..., Front],
) -> None:
    router = Router()
    with opened_front(router).running() as one:
        client = one.connect()
        client.sendall(b"POST /hang HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n")
        time.sleep(0.2)  # only for two segments: one would pass as well
        client.sendall(b"x" * 4000)
        assert router.complete.wait(PATIENCE_S)
        client.close()
        assert router.left.wait(PATIENCE_S)


@with_haproxy
@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param(
            [("x-rkserve-client", "203.0.113.7"), ("X-RKSERVE-CLIENT", "203.0.113.8")],
            [],
            id="a forged address",
        ),
        pytest.param(
            [("x-forwarded-for", "203.0.113.7"), ("X-Forwarded-For", "127.0.0.1")],
            [("x-rkserve-forwarded", "1")],
            id="another proxy before it, or one that pretends to be",
        ),
        pytest.param([("x-rkserve-forwarded", "0")], [], id="a forged mark"),
        pytest.param(
            [("x-rkserve-listener", "control"), ("X-Rkserve-Listener", "control")],
            [],
            id="a forged listener",
        ),
        pytest.param([("x-request-id", "a-b_9")], [("x-request-id", "a-b_9")], id="a request id"),
        pytest.param([("x-request-id", 'a" forged')], [], id="an odd request id"),
        pytest.param([("x-request-id", "x" * 65)], [], id="a long request id"),
        pytest.param([("x-request-id", "a"), ("x-request-id", "b")], [], id="two request ids"),
    ],
)
def test_routers_get_the_address_that_haproxy_sees_whatever_its_client_says(
    opened_front: Callable[..., Front],
    sent: list[tuple[str, str]],
    seen: list[tuple[str, str]],
) -> None:
    router = Router()
    with opened_front(router).running() as one, one.client("127.0.0.2") as client:
        client.putrequest("GET", "/v1/models", skip_accept_encoding=True)
        for name, value in sent:
            client.putheader(name, value)
        client.endheaders()
        assert client.getresponse().read() == b"ok"
    found = [(name, value) for name, value in router.headers if name.startswith("x-")]
    always = [("x-rkserve-client", "127.0.0.2"), ("x-rkserve-listener", "any")]
    assert sorted(found) == sorted([*always, *seen])


@with_haproxy
def test_half_a_request_is_closed_after_the_header_time_and_others_are_served_meanwhile(
    opened_front: Callable[..., Front],
) -> None:
    with opened_front(None, **{HEADER_TIMEOUT: "2"}).running() as one, ExitStack() as stack:
        silent = stack.enter_context(one.connect())
        half = [stack.enter_context(one.connect()) for _ in range(200)]
        for client in half:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        with one.client() as other:
            assert ask(other)[0] == HTTPStatus.OK
        for client in half:
            assert b" 408 " in rest(client).splitlines()[0]
        assert rest(silent) == b"", "a request of no byte is closed unanswered"


@with_haproxy
def test_an_address_with_too_many_connections_leaves_room_for_others(
    opened_front: Callable[..., Front],
) -> None:
    limits = {PER_ADDRESS: "3", PROXIES: "127.0.0.1"}
    with opened_front(None, **limits).running() as one, ExitStack() as stack:
        greedy = [stack.enter_context(one.client("127.0.0.2")) for _ in range(4)]
        assert [ask(client)[0] for client in greedy[:3]] == [HTTPStatus.OK] * 3
        status, body = ask(greedy[3])
        assert status == HTTPStatus.TOO_MANY_REQUESTS
        assert code(body) == "too_many_connections"
        assert greedy[3].sock is None, "it is closed: the next one may be in time"
        for source in ("127.0.0.1", "127.0.0.3"):
            with one.client(source) as other:
                assert ask(other)[0] == HTTPStatus.OK
        for _ in range(SPARE_CONNECTIONS + 1):
            client = stack.enter_context(one.client("127.0.0.2"))
            with suppress(ConnectionError):
                client.connect()
        last = stack.enter_context(one.client("127.0.0.2"))
        with pytest.raises(ConnectionError):
            ask(last)
        assert ask(greedy[0])[0] == HTTPStatus.OK, "those that were in time are served still"


@with_haproxy
def test_sockets_and_configuration_are_for_this_account_only(
    opened_front: Callable[..., Front],
) -> None:
    made = opened_front(None)
    place = made.config.parent
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as metrics:
        metrics.bind(str(place / "metrics.sock"))
        (place / "metrics.sock").chmod(0o666)  # as Ray does
        with made.running():
            for name in ("admin.sock", "metrics.sock", "haproxy.cfg"):
                assert stat.S_IMODE((place / name).stat().st_mode) & 0o177 == 0, name
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


@with_haproxy
def test_where_no_router_is_the_answer_is_an_error_object(
    opened_front: Callable[..., Front],
) -> None:
    made = opened_front(None)
    with made.running(HTTPStatus.SERVICE_UNAVAILABLE, router=1), made.client() as client:
        assert code(ask(client)[1]) == "no_router"


@with_haproxy
def test_before_an_application_is_known_clients_are_told_to_repeat_the_request(
    opened_front: Callable[..., Front],
) -> None:
    made = opened_front(None)
    made.write()
    with made.running(HTTPStatus.SERVICE_UNAVAILABLE), made.client() as client:
        client.request("POST", "/v1/chat/completions", b"{}")
        answer = client.getresponse()
        assert answer.getheader("retry-after") == "1"
        assert code(answer.read()) == "no_router"


@with_haproxy
def test_serves_own_errors_become_error_objects_and_those_of_a_router_stay(
    opened_front: Callable[..., Front],
) -> None:
    with opened_front(None).running() as one, one.client() as client:
        status, body = ask(client, "/text")
        assert (status, code(body)) == (HTTPStatus.SERVICE_UNAVAILABLE, "no_router")
        assert ask(client, "/json") == (HTTPStatus.NOT_FOUND, b"{}")
        client.request("GET", "/json")
        answer = client.getresponse()
        assert answer.read() == b"{}"
        assert answer.getheader("server") is None  # the Router's library is not for strangers


@with_haproxy
@pytest.mark.parametrize("path", ["/-/routes", "/-/", "/%2d/routes", "/-%2Froutes"])
def test_serves_own_paths_are_closed_except_for_its_health_check(
    opened_front: Callable[..., Front], path: str
) -> None:
    router = Router()
    with opened_front(router).running() as one, one.client() as client:
        status, body = ask(client, path)
        assert (status, code(body)) == (HTTPStatus.NOT_FOUND, "not_found")
        assert path not in router.asked
        assert ask(client, "/-/healthz")[0] == HTTPStatus.OK


@with_haproxy
@pytest.mark.parametrize(
    "headers",
    [
        pytest.param("content-length: 2\r\ncontent-length: 3", id="two lengths"),
        pytest.param("transfer-encoding: xchunked", id="an unknown coding"),
        pytest.param("transfer-encoding: chunked, identity", id="chunks that are not last"),
        pytest.param("content-length: -1", id="a negative length"),
        pytest.param("content-length: +2", id="a length with a sign"),
        pytest.param("content-length : 2", id="a space in the name"),
        pytest.param("content-length: 2\r\nhost: other", id="two hosts"),
        pytest.param("authorization: Bearer a\0b", id="a NUL"),
        pytest.param(f"x: {'y' * 100_000}", id="a long header"),
        pytest.param("\r\n".join(f"x{n}: y" for n in range(1000)), id="many headers"),
    ],
)
def test_a_request_that_can_be_read_in_two_ways_or_is_too_large_reaches_no_router(
    opened_front: Callable[..., Front], headers: str
) -> None:
    router = Router()
    with opened_front(router).running() as one, closing(one.connect()) as client:
        client.sendall(f"POST /v1/x HTTP/1.1\r\nhost: h\r\n{headers}\r\n\r\n{{}}".encode())
        with suppress(ConnectionError):  # it has closed before the end of a long one
            client.sendall(b"POST /pause HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n")
        with suppress(ConnectionError):
            assert rest(client).startswith(b"HTTP/1.1 400 ")
        assert not {"/v1/x", "/pause"} & {*router.asked}


@with_haproxy
def test_a_router_that_is_gone_costs_new_requests_nothing_where_another_one_runs(
    opened_front: Callable[..., Front],
) -> None:
    made = opened_front(None)
    with Router().listening() as lives:
        gone = next(free_ports())
        made.write(gone, lives)
        with made.running() as one:
            for _ in range(10):
                with one.client() as client:
                    assert ask(client)[0] == HTTPStatus.OK


@with_haproxy
@pytest.mark.parametrize(
    ("method", "path", "length", "repeated"),
    [
        pytest.param("POST", "/v1/chat/completions", REPEATED_BYTES, True, id="a generation"),
        pytest.param("POST", "/v1/chat/completions", 20_000, False, id="a long one"),
        pytest.param("GET", "/v1/models", 2, True, id="a question"),
        pytest.param("POST", "/pause", 2, False, id="a change"),
        pytest.param("DELETE", "/v1/responses/resp_1", 2, False, id="a removal"),
    ],
)
def test_what_a_router_took_before_its_end_is_repeated_at_another_if_it_changes_nothing(
    opened_front: Callable[..., Front], method: str, path: str, length: int, repeated: bool
) -> None:
    made = opened_front(None)
    ends, lives = Router(dies=True), Router()
    with ends.listening() as first, lives.listening() as second, made.client() as client:
        made.write(first, second)
        with made.running():
            ends.asked.clear()
            for _ in range(20):
                client.putrequest(method, path)
                client.putheader("content-length", str(length))
                client.endheaders()
                time.sleep(0.1)  # the body is not in HAProxy's buffer when the headers are
                client.send(b"." * length)
                answer = client.getresponse()
                assert answer.read()
                assert answer.status == HTTPStatus.OK if repeated else answer.status in (200, 502)
                if path in ends.asked:
                    break
            assert path in ends.asked, "the one that ends was never asked"
            assert answer.status == (HTTPStatus.OK if repeated else HTTPStatus.BAD_GATEWAY)


@with_haproxy
def test_a_haproxy_whose_manager_was_killed_gives_its_port_to_the_next_one(
    opened_front: Callable[..., Front],
) -> None:
    router = Router()
    with opened_front(router).running() as one, one.client() as client:
        client.request("GET", "/stream")
        answer = client.getresponse()
        # The manager's name is part of its command line; this test's is not its.
        left = orphans(one.folder)
        assert len(left) == 1
        second = one.start()
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while orphans(one.folder) == left:
                assert second.poll() is None, "it could not listen"
                assert time.monotonic() < deadline_s, "it did not take the port over"
                time.sleep(0.05)
            router.killed.set()
            with suppress(IncompleteRead):
                assert answer.read().startswith(b"data: 1"), "the first one ends its answers"
            while left[0] in orphans(one.folder):
                assert time.monotonic() < deadline_s, "the first one did not end"
                time.sleep(0.05)
            one._wait(second, HTTPStatus.OK)
        finally:
            second.kill()
            second.communicate()


def test_only_a_haproxy_of_the_folder_without_a_manager_is_an_orphan(tmp_path: Path) -> None:
    def process(pid: int, parent: int, program: str, *words: str) -> None:
        (place := tmp_path / str(pid)).mkdir()
        (place / "comm").write_text(f"{program}\n")
        (place / "cmdline").write_bytes(b"\0".join(word.encode() for word in (program, *words)))
        (place / "stat").write_text(f"{pid} ({program}) S {parent} 0 0")

    process(1, 0, "init")
    process(2, 1, "ray::HAProxyManager")
    process(3, 2, "haproxy", "-f", "/f/node/haproxy.cfg")
    process(4, 1, "haproxy", "-f", "/f/node/haproxy.cfg")
    process(5, 1, "haproxy", "-f", "/fo/node/haproxy.cfg")
    process(6, 1, "vim", "/f/node/haproxy.cfg")
    (tmp_path / "version").write_text("")
    assert orphans(Path("/f"), tmp_path) == [4]


@with_haproxy
def test_the_stream_of_a_killed_router_does_not_look_complete(
    opened_front: Callable[..., Front],
) -> None:
    router = Router()
    with opened_front(router).running() as one, one.client() as client:
        client.request("GET", "/stream")
        answer = client.getresponse()
        assert answer.read(9) == b"data: 1\n\n"
        router.killed.set()
        with pytest.raises(IncompleteRead):
            answer.read()


@with_haproxy
@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        pytest.param(
            lambda made: made.folder.chmod(0o777), "other accounts may write", id="an open folder"
        ),
        pytest.param(
            lambda made: os.chown(made.folder, 12345, 12345),
            "belongs to user 12345",
            id="another's folder",
            marks=as_root,
        ),
        pytest.param(
            lambda made: made.config.write_text(
                made.config.read_text().replace("option splice-request", "option splice-auto")
            ),
            "Unsupported HAProxy configuration",
            id="an unknown template",
        ),
        pytest.param(
            lambda made: made.config.write_text(
                re.sub(r"stats socket \S+", "stats socket /tmp/a.sock", made.config.read_text())
            ),
            "set all RAY_SERVE_HAPROXY_ paths",
            id="a socket elsewhere",
        ),
    ],
)
def test_haproxy_does_not_start_where_it_would_be_open(
    spoil: Callable[[Front], object], sentence: str, opened_front: Callable[..., Front]
) -> None:
    made = opened_front(None)
    spoil(made)
    process = made.start()
    _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert told.startswith("rkserve: ")
    assert sentence in told
    assert told.count("\n") == 1


def trusting(*files: Path) -> ssl.SSLContext:
    """A client's context that trusts certificates of the operator's own."""
    context = ssl.create_default_context()
    for file in files:
        context.load_verify_locations(file)
    return context


@with_haproxy
def test_clients_use_tls_where_a_certificate_is_named_and_nothing_else_is_answered(
    opened_front: Callable[..., Front], tmp_path: Path
) -> None:
    certificate, key = write_certificate(tmp_path, "first")
    router, env = Router(), {CERT: str(certificate), KEY: str(key)}
    made = opened_front(router, **env)
    made.tls = trusting(certificate)
    with made.running(), made.client("127.0.0.2") as client:
        assert ask(client) == (200, b"ok")
        assert isinstance(client.sock, ssl.SSLSocket)
        assert client.sock.version() == "TLSv1.3"
        assert ("x-rkserve-client", "127.0.0.2") in router.headers
        assert stat.S_IMODE((made.config.parent / PEM).stat().st_mode) == 0o600
        with made.connect() as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert rest(plain) == b""
        made.tls.maximum_version = ssl.TLSVersion.TLSv1_2
        with made.client() as older:
            assert ask(older) == (200, b"ok")
        assert " ssl-min-ver TLSv1.2\n" in made.config.read_text()


@with_haproxy
def test_a_renewed_certificate_is_in_force_within_a_minute_and_costs_no_connection(
    opened_front: Callable[..., Front], tmp_path: Path
) -> None:
    certificate, key = write_certificate(tmp_path, "first")
    renewed, its_key = write_certificate(tmp_path, "second")
    router = Router()
    made = opened_front(router, **{CERT: str(certificate), KEY: str(key)})
    first, second = trusting(certificate), trusting(renewed)
    made.tls = first
    with made.running(), made.client() as client, made.client() as idle:
        client.request("GET", "/stream")
        answer = client.getresponse()
        assert ask(idle)[0] == HTTPStatus.OK
        its_key.replace(key)  # and a moment later the certificate: never both at once
        time.sleep(0.1)
        renewed.replace(certificate)
        made.tls = second
        deadline_s = time.monotonic() + 60.0
        while True:
            with suppress(ssl.SSLCertVerificationError), made.client() as other:
                assert ask(other)[0] == HTTPStatus.OK
                break
            assert time.monotonic() < deadline_s, "the certificate was not renewed"
            time.sleep(0.2)
        assert ask(idle)[0] == HTTPStatus.OK, "on the connection from before"
        router.killed.set()
        with suppress(IncompleteRead):
            assert answer.read().startswith(b"data: 1")


@with_haproxy
def test_a_certificate_that_cannot_be_used_is_refused_before_the_start(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = write_certificate(tmp_path, "first")
    monkeypatch.setenv(CERT, str(certificate))
    monkeypatch.setenv(KEY, str(key))
    made = prepare(short / "front")
    assert (made[CERT], made[KEY]) == (str(certificate), str(key))
    key.unlink()
    with pytest.raises(ConfigError, match=r"first\.key cannot be read"):
        prepare(short / "front")


# -- the control port ---------------------------------------------------------------------------

TARGETS = [
    *("/pause", "//v1/pause", "/v1/%70ause", "/v1/x/../pause", "/v1/pause/", "/V1/PAUSE"),
    *("/llm/v1/pause", "/v1/pause;x", "/v1/pause?x#y", "http://head:8000/v1/pause", "*"),
]


@with_haproxy
@pytest.mark.parametrize("token", ["", "5" * 64], ids=["without a token", "with Ray's token"])
def test_each_request_is_marked_with_the_port_at_which_it_came_however_it_is_written(
    opened_front: Callable[..., Front], token: str
) -> None:
    router, control = Router(), next(free_ports())
    env = {CONTROL: f"127.0.0.1:{control}"}
    if token:
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    proof = proof_of(env)
    assert (len(proof), token in proof) == ((64, False) if token else (0, True))
    forged = "x-rkserve-listener: control\r\nX-RKSERVE-LISTENER: control\r\n"
    with opened_front(router, **env).running() as one:
        for port, word in ((one.port, "client"), (control, "control")):
            marks, refused = set(), set()
            for target in TARGETS:
                method = "OPTIONS" if target == "*" else "POST"
                with closing(one.connect(port)) as client:
                    client.sendall(
                        f"{method} {target} HTTP/1.1\r\nhost: head:8000\r\n{forged}"
                        f"connection: {MARK_HEADER}, close\r\ncontent-length: 0\r\n\r\n".encode()
                    )
                    status = rest(client).split(b" ", 2)[1]
                if status == b"200":
                    marks |= {value for name, value in router.headers if name == MARK_HEADER}
                else:
                    refused.add(target)
                router.headers = []
            assert marks == {f"{word} {proof}".strip()}
            assert refused == {"*", "/v1/pause?x#y"}, "HAProxy itself refuses them"
        # One connection to a Router serves both ports.
        with one.client() as clients, one.client(port=control) as operators:
            for word in ("client", "control") * 3:
                assert ask(clients if word == "client" else operators)[0] == HTTPStatus.OK
                assert (MARK_HEADER, f"{word} {proof}".strip()) in router.headers


@with_haproxy
def test_the_control_port_has_the_tls_and_the_limits_of_the_port_of_clients(
    opened_front: Callable[..., Front], tmp_path: Path
) -> None:
    certificate, key = write_certificate(tmp_path, "first")
    control = next(free_ports())
    env = {CERT: str(certificate), KEY: str(key), CONTROL: f"127.0.0.1:{control}"}
    made = opened_front(None, **env, **{PER_ADDRESS: "3", PROXIES: "127.0.0.1"})
    made.tls = trusting(certificate)
    with made.running(), ExitStack() as stack:
        greedy = [
            stack.enter_context(made.client("127.0.0.2", port))
            for port in (made.port, control, made.port, control)
        ]
        assert [ask(client)[0] for client in greedy] == [HTTPStatus.OK] * 3 + [429]
        with made.connect(control) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert rest(plain) == b""


@with_haproxy
def test_a_control_port_is_kept_in_the_environment_of_ray_and_refused_without_haproxy(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTROL, "127.0.0.1:08001")
    assert prepare(short / "front")[CONTROL] == "127.0.0.1:8001"
    for given in ({}, {FLAG: "0"}):
        with pytest.raises(ConfigError, match=r"HAProxy is off, so that .*Set .*=1, or leave"):
            check_environ({**given, CONTROL: "127.0.0.1:8001"})
    monkeypatch.setenv(CONTROL, "localhost:8001")
    with pytest.raises(ConfigError, match=r"'localhost:8001' is no IP address with a port"):
        prepare(short / "front")
