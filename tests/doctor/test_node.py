"""Facts about a node: users and groups, limits, a running raylet, and the head as seen from it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rkserve.doctor import node
from rkserve.doctor.facts import RayletEnvironment
from rkserve.doctor.tree import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nbroken line\nray:x:1001:1001:Ray:/home/ray:/bin/sh\n"
    )
    (etc / "group").write_text("render:x:105:bob,ray\nvideo:x:44:rayner\nx:x:nan:ray\n")
    return Tree(tmp_path)


def test_a_user_has_the_groups_of_both_files(tree: Tree) -> None:
    found = node.user(tree, "ray")
    assert found is not None
    assert (found.uid, found.gids) == (1001, (105, 1001))
    assert found.home == "/home/ray"
    assert node.group_name(tree, 105) == "render"
    assert node.group_name(tree, 9) == ""


def test_another_machines_tree_has_no_caller(tree: Tree) -> None:
    assert node.user(tree, None) is None
    assert node.token(tree, None) is None


def test_an_unknown_user_is_an_error(tree: Tree) -> None:
    with pytest.raises(ValueError, match="no user 'absent-user'"):
        node.user(Tree(Path("/")), "absent-user")
    assert node.user(tree, "absent-user") is None
    assert [one.reason for one in tree.unread] == ["it has no user 'absent-user'"]


def test_this_machines_user_is_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_USER", raising=False)
    found = node.user(Tree(Path("/")), None)
    assert found is not None
    assert found.uid == os.geteuid()
    assert {*os.getgroups()} <= {*found.gids}


def test_this_process_has_limits() -> None:
    found = node.limits()
    assert found.python_wanted is not None
    assert found.python_wanted[0] <= found.python < found.python_wanted[1]
    assert found.cpus >= 1
    assert found.ray is not None
    assert found.ray_wanted == "2.60.*"


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [
        pytest.param(["127.0.0.1"], "", id="IPv4"),
        pytest.param(["::1"], "", id="IPv6"),
        pytest.param(["10.0.0.9", "127.0.0.1"], "", id="one of several"),
        pytest.param(["10.0.0.9", "10.0.0.8"], "its address is 10.0.0.8, 10.0.0.9", id="elsewhere"),
        pytest.param([], "Name or service not known", id="unknown"),
    ],
)
def test_localhost_is_a_loopback_address_or_a_problem(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], problem: str
) -> None:
    def resolve(name: str, *_: object, **__: object) -> list[object]:
        assert name == "localhost"
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert node.localhost_problem() == problem


def test_only_a_raylet_counts(tree: Tree) -> None:
    for pid, comm in {"12": "python", "34": "raylet"}.items():
        (tree.root / "proc" / pid).mkdir(parents=True)
        (tree.root / "proc" / pid / "comm").write_text(f"{comm}\n")
        (tree.root / "proc" / pid / "environ").write_bytes(
            b"RAY_AUTH_MODE=token\0odd\0RAY_worker_niceness=5\0\xff=\xfe\0"
        )
    (tree.root / "proc" / "56").write_text("no folder")
    found = node.raylet(tree)
    (tree.root / "proc" / "34" / "environ").unlink()
    assert node.raylet(tree) == RayletEnvironment(pid=34, readable=False)
    assert found is not None
    assert (found.pid, found.auth_mode, found.niceness) == (34, "token", "5")


class HeadHandler(BaseHTTPRequestHandler):
    """A head whose clock is two minutes behind, and whose Ray is another."""

    def do_GET(self) -> None:
        body = json.dumps({"ray_version": "2.60.1"}).encode()
        self.send_response_only(200 if "version" in self.path else 503)
        self.send_header("Date", formatdate(time.time() - 120, usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HeadHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    port = server.server_address[1]
    monkeypatch.setattr(node, "DASHBOARD_PORT", port)
    yield f"http://127.0.0.1:{port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_head_is_seen_with_its_clock_and_its_ray(head: str) -> None:
    found, skew_s = node.head(head, urlsplit(head).port or 0)
    assert (found.problem, found.url_problem, found.ray) == ("", "", "2.60.1")
    assert skew_s is not None
    assert 110 < skew_s < 300


@pytest.mark.parametrize("url", ["head:8000", "http://", "ftp://head", "http:///x"])
def test_something_else_is_no_url_of_a_head(url: str) -> None:
    with pytest.raises(ValueError, match="is no URL such as"):
        node.head(url)


def test_a_head_that_is_not_there_is_a_problem() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        found, skew_s = node.head(f"http://127.0.0.1:{port}", port)
    assert found.address == f"127.0.0.1:{port}"
    assert "refused" in found.problem
    assert "refused" in found.url_problem
    assert skew_s is None
