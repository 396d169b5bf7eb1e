"""A head and a board of one machine, brought up and ended by the commands that an operator types.

The board's group has the vendor's interface as its library, simulated; the head has a board of its
own beside it, whose requests go on while the other one comes and goes.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rkserve.bench.processes import PROC, ProcessIdentity, is_alive, snapshot
from rkserve.board.storage.ledger_copies import named
from rkserve.bringup.processes import ADMIN_KEY, NodeRecord, StateFolder, end_processes
from rkserve.bringup.settings import NodePorts
from rkserve.coordinator.boards.head_files import COPY_S
from rkserve.core.child_process import free_port, free_ports
from rkserve.deployments.haproxy import available
from rkserve.deployments.haproxy_config import CLIENT_HEADER
from rkserve.deployments.haproxy_listeners import MARK_HEADER
from rkserve.native.sim.build import ensure_built
from rkserve.native.sim.models import write_adapter
from rkserve.router.membership import new_token
from tests.bringup.test_head import all_free
from tests.support.cluster.local_cluster import wait_for
from tests.support.paths import PROJECT
from tests.support.values.tiny_gguf import write_tiny

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# An idle machine of two cores needs a tenth of it for the longest step.
STEP_S = 300.0
ENDS = ("MIN", "MAX")  # of a range of ports
CHAT, EMBED = "sim-chat", "sim-embed"
WAITS = re.compile(r"This board waits for approval\. On the head: rkserve approve (\S+)")


@dataclass
class Node:
    """A node of this machine: its own home, state folder and ports."""

    folder: Path
    kind: str
    first_port: int

    @classmethod
    def make(cls, parent: Path, kind: str) -> Node:
        """Return a node with free ports."""
        (parent / kind).mkdir()
        first = next(p for p in free_ports() if p % 10 == 0 and all_free(p))
        return cls(parent / kind, kind, first)

    @property
    def state(self) -> StateFolder:
        """The folder of its record."""
        return StateFolder(self.state_folder, self.kind)

    @property
    def state_folder(self) -> Path:
        """The folder that its commands take by themselves."""
        return self.folder / ".local" / "state" / "rkserve"

    @property
    def record(self) -> NodeRecord:
        """The processes that run."""
        found = self.state.read()
        assert found is not None
        return found

    def command(self, *words: str) -> list[str]:
        """Return a command of its operator."""
        name, *rest = words
        state = ["--state", str(self.state_folder)]
        return [sys.executable, "-m", "rkserve", name, *state, *rest]

    @property
    def environ(self) -> dict[str, str]:
        """The environment of an operator who has set nothing."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "RKSERVE_"))}
        return {**own, "HOME": str(self.folder), "RKSIM_TIME_SCALE": "0.1", "COLUMNS": "200"}

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command to its end, and return its output."""
        done = subprocess.run(
            self.command(*words),
            env=self.environ,
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_S,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.stdout}\n{self.logs()}"
        return done.stdout

    @contextmanager
    def started(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command, and end it with the block."""
        with subprocess.Popen(
            self.command(*words),
            env=self.environ,
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def log(self) -> str:
        """Return what a command in the background has printed so far."""
        file = self.state.log(self.kind)
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def logs(self) -> str:
        """Return the ends of its logs."""
        logs = sorted(self.state_folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def end(self) -> None:
        """End what a failed test left."""
        record = self.state.read()
        if record is not None:
            end_processes(record.all_alive())


@dataclass
class Home:
    """A head that runs, and the second board."""

    head: Node
    board: Node
    url: str
    output: str

    @property
    def admin(self) -> dict[str, str]:
        """The header with the key that the head has made, or was started with."""
        file = self.head.state_folder / ADMIN_KEY
        secret = file.read_text(encoding="utf-8").strip() if file.exists() else ADMIN
        return {"authorization": f"Bearer {secret}"}


def serve_config(folder: Path, port: int, model: str = EMBED, *, own: bool = True) -> Path:
    """Write a configuration of boards that join, and of a simulated one on the head if ``own``."""
    groups: list[dict[str, Any]] = [
        {"name": "sim", "model": f"models/{CHAT}", "simulated": {"boards": 1, "time_scale": 0.1}},
        {
            "name": "rk",
            "model": f"models/{model}",
            "library": str(ensure_built("1.3.0")),
        },
    ]
    args = {"boards": groups if own else groups[1:], "state_dir": str(folder / "s")}
    application = {"name": "rkserve", "import_path": "rkserve.app:build", "args": args}
    content = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "0.0.0.0", "port": port},
        "applications": [{**application, "route_prefix": "/"}],
    }
    file = folder / "serve_config.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


@pytest.fixture
def home() -> Iterator[Home]:
    """A head that `rkserve up` has started."""
    # Short, for the paths of sockets.
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        head, board = Node.make(folder, "head"), Node.make(folder, "board")
        port = free_port()
        config = serve_config(folder, port)
        ports = ("--ray-port", str(head.first_port), "--dashboard-port", str(head.first_port + 9))
        try:
            words = ("--approve", "--no-mdns", "--detach", "--temp-dir", str(folder / "r"))
            output = head.run("up", str(config), *ports, *words)
            yield Home(head, board, f"http://127.0.0.1:{port}", output)
        finally:
            board.end()
            head.end()


def boards_of(home: Home) -> dict[str, str]:
    """Return the boards with their states."""
    rows = httpx.get(f"{home.url}/v1/boards", headers=home.admin, timeout=60).json()["data"]
    return {row["id"]: row["state"] for row in rows}


def chat(home: Home) -> str:
    """Return the words of an answer of the head's own board."""
    body = {"model": CHAT, "messages": [{"role": "user", "content": "Repeat after me: here"}]}
    url = f"{home.url}/v1/chat/completions"
    response = httpx.post(url, json=body, headers=home.admin, timeout=STEP_S)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def check_parts(home: Home) -> None:
    """Check that a head has HAProxy where that is available, two Routers, and a backup.

    It has Ray's dashboard, too, which may be there later than its Routers.
    """
    if available():
        answer = httpx.get(f"{home.url}/-/healthz", timeout=60)
        assert answer.status_code == 200
        assert any("haproxy" in name_of(one.pid) for one in home.head.record.all_alive())
        check_ports_behind_haproxy(home)
    figures = eventually("both Routers and a backup of the ledger", lambda: figures_of(home))
    assert figures["rkserve_router_up"] == 2
    (backup, *_) = (home.head.folder / ".local/share/rkserve/backups").glob("ledger-*.sqlite3")
    assert backup.stat().st_mode & 0o077 == 0
    assert eventually("Ray's dashboard", lambda: dashboard_status(home.head)) < 500


def check_forks(home: Home) -> None:
    """Check that Ray's workers are forks of the server that has started with the raylet."""
    processes = {}
    for one in home.head.record.all_alive():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(one.pid)
            processes[one.pid] = (process.ppid(), " ".join(process.cmdline()).strip())
    titles = {title: pid for pid, (_, title) in processes.items()}
    server = titles["rkserve::fork_server"]
    parent, _ = processes[server]
    program, *_ = processes[parent][1].split()
    assert not program.endswith("/raylet"), "no worker became the server"
    of_serve = {title: parent for parent, title in processes.values() if "ray::Serve" in title}
    assert {title.partition(".")[0] for title in of_serve} >= {
        "ray::ServeController",
        "ray::ServeReplica:rkserve:Router",
        "ray::ServeReplica:rkserve:Coordinator",
    }
    assert set(of_serve.values()) == {server}, of_serve


def dashboard_status(head: Node) -> int | None:
    """Return the status with which Ray's dashboard answers; None while it does not."""
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{head.first_port + 9}/", timeout=60).status_code
    return None


def check_ports_behind_haproxy(home: Home) -> None:
    """Check that Routers and Serve's own proxy take no request that has no proof of HAProxy's."""
    given = environ_of(home.head, "raylet")
    first, last = (int(given[f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT"]) for end in ENDS)

    def ports_of_routers() -> set[int] | None:
        # Any free port may be another program's of this head, HAProxy's figures for example.
        replicas = [one for one in listeners_of(home.head) if "ray::ServeReplica" in one.process]
        ports = {one.port for one in replicas if first <= one.port <= last}
        return ports if len(ports) == 2 else None

    # A head is ready with its first Router.
    ports = eventually("two Routers listen", ports_of_routers)
    for port in (*ports, int(given["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"])):
        forged = {**home.admin, MARK_HEADER: "control", CLIENT_HEADER: "127.0.0.1"}
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=forged, timeout=60)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "haproxy_bypassed"


@dataclass(frozen=True)
class Listener:
    """A socket at which a process of a node listens for other machines."""

    address: str
    port: int
    process: str


def listeners_of(node: Node) -> list[Listener]:
    """Return the listening sockets of a node's processes, without those of the loopback."""
    found = set()
    kernels = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    ephemeral = int(kernels.split()[0])
    for one in node.record.all_alive():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(one.pid)
            for each in process.net_connections("inet"):
                # Datagram sockets listen as well, such as one of mDNS; those with a port of the
                # kernel's choice send only, such as HAProxy's to its log.
                listens = each.status == psutil.CONN_LISTEN or (
                    each.type == socket.SOCK_DGRAM and each.laddr.port < ephemeral
                )
                address = ipaddress.ip_address(each.laddr.ip)
                address = getattr(address, "ipv4_mapped", None) or address
                if listens and not address.is_loopback:
                    name = " ".join(process.cmdline())
                    found.add(Listener(str(address), each.laddr.port, name))
    return sorted(found, key=lambda one: (one.process, one.port))


def check_listeners(home: Home, node: Node) -> None:
    """Check that every listener of a node has its row in the documents' table."""
    table = (PROJECT / "docs/how-to/security.md").read_text(encoding="utf-8")
    table = table.partition("## Listeners")[2].partition("##")[0]
    # HAProxy's and Serve's ports are others than by default here, and in its environment.
    given = environ_of(node, "raylet")
    endpoint = int(home.url.rpartition(":")[2])
    routers = [int(given.get(f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT", 0)) for end in ENDS]

    def row(one: Listener) -> str:
        replica = "ray::ServeReplica" in one.process
        rows = {
            "the endpoint": one.port == endpoint,
            "Routers behind HAProxy": replica and routers[0] <= one.port <= routers[1] > 0,
            "Serve's own proxy": str(one.port) == given.get("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"),
            "HAProxy's figures": str(one.port) == given.get("RAY_SERVE_HAPROXY_METRICS_PORT"),
            "Ray, 6379": node.first_port <= one.port <= NodePorts(node.first_port).last,
            "Ray's workers": 10002 <= one.port <= 19999,  # and programs such as `serve run`
            "Serve's calls": replica and one.address == "::",
            "boards' channels": "Board-" in one.process and one.address not in ("::", "0.0.0.0"),
            "figures of Ray's dashboard": one.port in (44217, 44227),
        }
        return next((name for name, holds in rows.items() if holds), "")

    rows = {one: row(one) for one in listeners_of(node)}
    unknown = [f"{one.address} {one.port} {one.process}" for one, name in rows.items() if not name]
    assert "\n".join(unknown) == "", "listeners without a row"
    assert [name for name in rows.values() if f"| {name}" not in table] == [], "rows to document"
    assert {"Ray, 6379", "Ray's workers"} <= {*rows.values()}, "it looked at the wrong processes"


def environ_of(node: Node, name: str) -> dict[str, str]:
    """Return the environment of a node's process with that name."""
    for one in node.record.all_alive():
        if name in name_of(one.pid):
            text = Path(f"/proc/{one.pid}/environ").read_text(encoding="utf-8", errors="replace")
            return dict(pair.partition("=")[::2] for pair in text.split("\0") if "=" in pair)
    raise AssertionError(f"no {name} runs")


def figures_of(home: Home) -> dict[str, float]:
    """Return the sums of the metrics, once both Routers and a backup are among them."""
    sums: dict[str, float] = {}
    text = httpx.get(f"{home.url}/metrics", headers=home.admin, timeout=60).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    wanted = sums.get("rkserve_router_up", 0.0) == 2
    return sums if wanted and sums.get("rkserve_ledger_backup_timestamp_seconds") else {}


def embedding(home: Home) -> bool:
    """Return whether the board that has joined answers."""
    body = {"model": EMBED, "input": "a word"}
    url = f"{home.url}/v1/embeddings"
    response = httpx.post(url, json=body, headers=home.admin, timeout=STEP_S)
    assert response.status_code in (200, 503), response.text
    return response.status_code == 200


def eventually(sentence: str, look: Callable[[], Any]) -> Any:
    """Wait as long as a busy machine may take."""
    return wait_for(sentence, look, STEP_S)


def alive(processes: list[ProcessIdentity]) -> list[int]:
    """Return the ids of those that run."""
    return [one.pid for one in processes if is_alive(PROC, one)]


def test_a_board_is_approved_serves_and_leaves_and_the_head_ends(home: Home) -> None:
    head, board = home.head, home.board
    assert re.search(r"The Router answers at \S+ after \d+ s\.", home.output)
    expect_closed(home)
    assert eventually("the head's own board answers", lambda: chat(home)) == "here"
    check_parts(home)
    check_forks(home)
    assert not embedding(home)

    refused = board.run(*join(home, home.url, "wrong"), code=1)
    assert "The join token is unknown or has expired. `rkserve token` on the head prints" in refused
    assert board.state.read() is None

    printed = re.fullmatch(r"rkserve join (http://\S+) --token (\S+)\n", head.run("token"))
    assert printed is not None
    with board.started(*join(home, printed[1], printed[2]), "--detach") as joining:
        asks = eventually("the board waits", lambda: WAITS.search(board.log()))
        shown = head.run("boards", "--url", home.url)
        assert re.search(rf"^{re.escape(asks[1])} .* waiting ", shown, re.MULTILINE), shown
        assert not embedding(home)
        assert head.run("approve", asks[1]).startswith(f"approved {asks[1]} (")
        assert joining.wait(STEP_S) == 0, board.logs()
    assert "This board has joined: it offers rknpu 1." in board.log()
    name = eventually(
        "a second board", lambda: next((b for b in boards_of(home) if b[:3] == "rk@"), "")
    )
    eventually("it is ready", lambda: boards_of(home).get(name) == "ready")
    assert " waiting " not in head.run("boards", "--url", home.url)
    assert embedding(home)
    for node in (head, board):
        check_listeners(home, node)

    of_board = board.record.all_alive()
    assert len(of_board) > 2
    assert board.run("leave").endswith("Stopped.\n")
    assert alive(of_board) == []
    assert chat(home) == "here"

    of_head = head.record.all_alive()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as bystander:
        assert head.run("down").endswith("Stopped.\n")
        assert bystander.poll() is None
        bystander.send_signal(signal.SIGKILL)
    assert alive(of_head) == []
    assert head.state.read() is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(home.url, timeout=10)


# -- the end of a head --------------------------------------------------------------------------

# A head that sees its own processes alone, as on a machine of its own: Ray takes the board's for a
# Ray that runs here already. Its end is that of all of them.
ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
ADMIN = "the operator's"


def may_be_alone() -> bool:
    """Return whether this account may make namespaces."""
    done = subprocess.run([*ALONE, "true"], capture_output=True, check=False)
    return done.returncode == 0


@dataclass
class LoneHead:
    """A head in a namespace of processes, which a test kills."""

    node: Node
    port: int
    words: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        """The folder of its ledger."""
        return self.node.folder / ".local/share/rkserve"

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> float:
        """Start it, and return the seconds until its Router answers."""
        began_s = time.monotonic()
        self.process = subprocess.Popen(
            [*ALONE, *self.node.command("up", *self.words)],
            env={**self.node.environ, "RKSERVE_ADMIN_KEY": ADMIN},
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually("its Router answers", lambda: self.ask("GET", "/health") is not None)
        return time.monotonic() - began_s

    def kill(self) -> None:
        """Kill all of its processes, and wait for their ends: the kernel ends them one by one."""
        if self.process is None:
            return
        parts = []
        if self.process.poll() is None:
            parts = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(parts, timeout=STEP_S)
        assert not alive

    def operate(self, *words: str) -> str:
        """Run a command of the operator, and return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "rkserve", *words],
            env={**self.node.environ, "RKSERVE_API_KEY": ADMIN, "RKSERVE_URL": self.url},
            cwd=self.node.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_S,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout

    def answers(self, model: str, key: str = ADMIN) -> bool:
        """Return whether a request of that key is answered by a model."""
        body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
        headers = {"authorization": f"Bearer {key}"}
        return self.ask("POST", "/v1/chat/completions", json=body, headers=headers) is not None

    def ask(self, method: str, path: str, **more: Any) -> Any:
        """Return the JSON of a call as the operator, None where that failed."""
        headers = {"authorization": f"Bearer {ADMIN}", **more.pop("headers", {})}
        try:
            found = httpx.request(method, self.url + path, headers=headers, timeout=60, **more)
        except httpx.TransportError:
            return None
        return found.json() if found.status_code == 200 else None


@contextmanager
def lone_head(config: Callable[[Path, int], Path]) -> Iterator[tuple[Path, Node, LoneHead]]:
    """Yield a folder, a node for a board, and a head that is not started; end both."""
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        board, port = Node.make(folder, "board"), free_port()
        node = Node.make(folder, "head")
        ports = ("--ray-port", str(node.first_port), "--dashboard-port", str(node.first_port + 9))
        words = (str(config(folder, port)), *ports, "--no-mdns", "--temp-dir", str(folder / "r"))
        head = LoneHead(node, port, words)
        try:
            yield folder, board, head
        finally:
            head.kill()
            board.end()


def test_one_command_serves_the_model_of_a_file_on_this_machine() -> None:
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        model = folder / "tiny.gguf"
        write_tiny(model, more={"tokenizer.chat_template": (8, "{{ messages[0].content }}")})
        head = Node.make(folder, "head")
        ports = ("--ray-port", str(head.first_port), "--dashboard-port", str(head.first_port + 9))
        try:
            words = ("--detach", "--temp-dir", str(folder / "r"))
            output = head.run("up", str(model), *ports, *words)
            assert "rkserve join" not in output, "no board reaches the loopback"
            assert "Ready after" in output
            (url,) = re.findall(r"Ready after \d+ s: tiny at (\S+);", output)
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
            call = f"{url}/v1/chat/completions"
            answer = httpx.post(call, json={**body, "max_tokens": 5}, timeout=STEP_S)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 5
            assert answer.headers["x-rkserve-board"].startswith("cpu@")
            assert "<title>rkserve chat" in httpx.get(url, timeout=60).text
        finally:
            head.end()


@pytest.mark.long
@pytest.mark.skipif(not may_be_alone(), reason="this account may not make namespaces")
def test_a_killed_head_comes_back_to_the_state_that_it_had_and_its_board_keeps_its_model(
    figures: Callable[[str], None],
) -> None:
    with lone_head(serve_config) as (_, board, head):
        home = Home(head.node, board, head.url, "")
        head.start()
        token = new_token(head.node.state_folder, 3600.0, time.time())
        board.run(*join(home, head.url, token), "--detach")
        eventually("the board answers", lambda: embedding(home))
        response = {"model": CHAT, "input": "Repeat after me: here"}
        once = {"headers": {"Idempotency-Key": "one"}, "json": response}
        stored = eventually("an answer", lambda: head.ask("POST", "/v1/responses", **once))
        hold = {"model": CHAT, "mode": "keep", "lease_s": 3000}
        assert head.ask("POST", "/pause", json=hold) is not None
        before = head.ask("GET", "/v1/cluster")
        engines = parts_of(board, "engine")
        time.sleep(12)  # usage is stored every ten seconds
        used = head.ask("GET", "/v1/usage")["data"]

        head.kill()
        took_s = head.start()
        eventually("the board answers again", lambda: embedding(home))

        figures(f"a killed head: its Router answered {took_s:.1f} s after its start")
        after = eventually("the Coordinator", lambda: head.ask("GET", "/v1/cluster"))
        assert after["pauses"] == before["pauses"]
        assert head.ask("GET", f"/v1/responses/{stored['id']}") == stored
        assert head.ask("POST", "/v1/responses", **once) == stored
        assert head.ask("GET", "/v1/operations")["data"][0]["kind"] == "pause"
        # The start asks for an answer of one token, too.
        assert tokens_of(head.ask("GET", "/v1/usage")["data"]) >= tokens_of(used) > 0
        assert set(engines) <= set(parts_of(board, "engine")), "it loaded its model anew"


@pytest.mark.long
@pytest.mark.skipif(not may_be_alone(), reason="this account may not make namespaces")
def test_a_head_whose_disk_died_is_restored_from_the_copy_of_a_board(
    figures: Callable[[str], None],
) -> None:
    with lone_head(partial(serve_config, model=CHAT, own=False)) as (folder, board, head):
        head.start()
        token = new_token(head.node.state_folder, 3600.0, time.time())
        board.run(*join(Home(head.node, board, head.url, ""), head.url, token), "--detach")
        eventually("the board serves", lambda: head.answers(CHAT))
        key, pauses, changed_s = changed(head, folder)
        look = partial(copy_since, head, folder / "s", int(changed_s))
        copy = wait_for("a copy with all of it", look, COPY_S + STEP_S)
        figures(f"a copy of the ledger: there {time.time() - changed_s:.0f} s after a change")

        head.kill()
        (file,) = [one for one in head.data.glob("artifacts/*") if one.is_file()]
        content = file.read_bytes()
        put_on_a_new_disk(head, board, folder)
        head.operate("restore", str(copy), "--data-dir", str(head.data))
        figures(f"a head on a new disk: its Router answered {head.start():.1f} s after its start")

        after = eventually("the Coordinator", lambda: head.ask("GET", "/v1/cluster"))
        assert after["pauses"] == pauses
        eventually("the head has the file again", file.exists)
        assert file.read_bytes() == content
        eventually("it goes on", lambda: head.ask("POST", "/resume", json={"model": CHAT}))
        eventually("the adapter and the key", lambda: head.answers("calm", key))


def changed(head: LoneHead, folder: Path) -> tuple[str, Any, float]:
    """Push an adapter, make a key, and pause; return the secret, the pauses and the time."""
    adapter = write_adapter(folder / "calm.rkllm", "calm")
    head.operate("lora", "push", str(adapter), "--name", "calm", "--version", "v1")
    assert head.answers("calm")
    made = head.ask("POST", "/v1/keys", json={"name": "ann", "scopes": ["infer"]})
    hold = {"model": CHAT, "mode": "keep", "lease_s": 3600}
    assert head.ask("POST", "/pause", json=hold) is not None
    return made["value"], head.ask("GET", "/v1/cluster")["pauses"], time.time()


def copy_since(head: LoneHead, state: Path, since_s: int) -> Path | None:
    """Return the newest copy on a board once it was made after that time."""
    shown = head.operate("backup", "--list", "--state-dir", str(state))
    listed = re.findall(r"schema \d+  (\S+\.gz)", shown)
    return Path(listed[0]) if listed and named(Path(listed[0]))[1] >= since_s else None


def put_on_a_new_disk(head: LoneHead, board: Node, folder: Path) -> None:
    """Remove all that a killed head had, and copy the cluster's token from the board."""
    home = head.node.folder
    shutil.rmtree(home)
    shutil.rmtree(folder / "r")
    (home / ".ray").mkdir(parents=True, mode=0o700)
    shutil.copy(board.folder / ".ray/auth_token", home / ".ray/auth_token")


def tokens_of(usage: list[dict[str, Any]]) -> int:
    """The tokens of all answers that were counted."""
    return sum(int(row["completion_tokens"]) for row in usage)


def parts_of(node: Node, part: str) -> list[int]:
    """The processes of a part of a node."""
    found = snapshot(PROC, [node.record.supervisor.pid])
    return [one.pid for one, (name, _) in found.items() if name == part]


def expect_closed(home: Home) -> None:
    """The network reaches the head, and nothing was configured: it is closed, with a key."""
    folder = home.head.state_folder
    assert f"--state {folder}` ends it" in home.output or "`rkserve down` ends it" in home.output
    key = folder / ADMIN_KEY
    assert f"an admin key was made: {key}" in home.output
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    secret = key.read_text(encoding="utf-8").strip()
    logs = [one.read_text(errors="replace") for one in folder.glob("*.log")]
    assert not any(secret in text for text in (home.output, *logs))
    for path in ("/v1/models", "/v1/boards", "/metrics"):
        assert httpx.get(f"{home.url}{path}", timeout=60).status_code == 401


def join(home: Home, url: str, token: str) -> tuple[str, ...]:
    """Return the words of ``rkserve join``; no simulated board passes the doctor."""
    port = str(home.board.first_port)
    return ("join", url, "--token", token, "--ray-port", port, "--no-doctor")


def name_of(pid: int) -> str:
    """Return the program of a process; empty if it has ended."""
    try:
        return (PROC / str(pid) / "comm").read_text()
    except OSError:
        return ""
