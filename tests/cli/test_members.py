"""``rkserve approve``, ``deny`` and the boards that have asked to join in ``rkserve boards``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rkserve.bringup.head import local_members
from rkserve.cli import members
from rkserve.cli.context import Exit
from rkserve.core.files import private_folder
from rkserve.router.members import WAITING, MemberBoard, Members
from rkserve.router.membership import ClusterTerms, write_terms
from tests.support.cluster.fake_control import FakeControl, error, ok
from tests.support.http.terminal import Terminal

HARDWARE = {
    "soc": "RK3588",
    "temperature_c": 61.4,
    "npu_hz": 1e9,
    "npu_max_hz": 1e9,
    "ddr_hz": 528e6,
    "ddr_max_hz": 2112e6,
    "memory_available_bytes": 11.24e9,
    "memory_total_bytes": 16e9,
    "cpu_clocks": [{"cpus": "0-3"}],
    "notes": ["SoC: unknown"],
}
SERVED = [
    {"id": "rk@one", "model": "sim-chat", "state": "ready", "node": "one", "hardware": HARDWARE}
]
ROWS = [
    {"id": "11111111", "host": "one", "state": "joined", "since_s": 1.0, "notes": []},
    {"id": "22222222", "host": "two", "state": "waiting", "since_s": 1.0, "notes": ["A copy."]},
    {"id": "33333333", "host": "on", "state": "joined", "since_s": 1.0, "notes": []},
    {"id": "44444444", "host": "four", "state": "denied", "since_s": 1.0, "notes": []},
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No head of this machine."""
    monkeypatch.setattr(members, "default_state", lambda: tmp_path / "none")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A head's state folder, with a board that waits."""
    folder = tmp_path / "node"
    private_folder(folder)
    write_terms(folder, ClusterTerms("192.0.2.1:6379", "2.60.0", "3.11", "x", {}, approval=True))
    Members(folder).ask(MemberBoard("rock", "a" * 32, since_s=time.time()), approval=True)
    return folder


def test_boards_are_served_joined_waiting_or_denied(server: FakeControl, rkserve: Terminal) -> None:
    server.on("GET /v1/boards", ok({"data": SERVED})).on("GET /v1/members", ok({"data": ROWS}))
    code, out, _ = rkserve("boards")
    assert code == Exit.DONE
    lines = {line.split()[0]: " ".join(line.split()) for line in out.splitlines()[1:]}
    assert set(lines) == {"rk@one", "two", "on", "four"}
    machine = "RK3588, 61 °C, NPU 1000 MHz, DDR 528 of 2112 MHz, 11.2 of 16.0 GB memory free"
    assert lines["rk@one"] == f"rk@one sim-chat ready - - one {machine} -"
    assert lines["two"].startswith("two - waiting")
    assert lines["two"].endswith("rkserve approve 22222222. A copy.")
    assert "joined" in lines["on"]
    assert "serves nothing yet" in lines["on"]
    assert "rkserve approve 44444444 takes that back" in lines["four"]
    found = json.loads(rkserve("boards", "--json")[1])
    assert [(one["id"], one["state"]) for one in found] == [
        ("rk@one", "ready"),
        ("two", "waiting"),
        ("on", "joined"),
        ("four", "denied"),
    ]


@pytest.mark.parametrize(
    ("ago_s", "state", "said"),
    [
        pytest.param(10.0, "joined", "serves nothing yet", id="a moment ago"),
        pytest.param(600.0, "left", "it has sent nothing for 10 minutes", id="minutes ago"),
        pytest.param(90_000.0, "left", "it has sent nothing for 25 hours", id="yesterday"),
    ],
)
def test_a_joined_board_without_a_heartbeat_has_left(
    server: FakeControl, rkserve: Terminal, ago_s: float, state: str, said: str
) -> None:
    rows = [{**ROWS[2], "seen_s": time.time() - ago_s}]
    server.on("GET /v1/boards", ok({"data": SERVED})).on("GET /v1/members", ok({"data": rows}))
    _, found = json.loads(rkserve("boards", "--json")[1])
    assert found["state"] == state
    assert said in found["reason"]


@pytest.mark.parametrize("status", [403, 404, 409])
def test_without_the_list_the_served_boards_are_shown(
    server: FakeControl, rkserve: Terminal, status: int
) -> None:
    server.on("GET /v1/boards", ok({"data": SERVED}))
    server.on("GET /v1/members", error(status, "forbidden"))
    code, out, _ = rkserve("boards")
    assert (code, len(out.splitlines())) == (Exit.DONE, 2)


@pytest.mark.parametrize(
    ("words", "sent", "said"),
    [
        pytest.param(("approve", "two"), {"boards": ["two"]}, "approved two (22222222)", id="one"),
        pytest.param(("approve", "--all"), {"all": True}, "approved two (22222222)", id="all"),
        pytest.param(("deny", "two"), {"boards": ["two"]}, "denied two (22222222)", id="deny"),
    ],
)
def test_elsewhere_the_router_decides(
    server: FakeControl, rkserve: Terminal, words: tuple[str, ...], sent: Any, said: str
) -> None:
    server.on(f"POST /v1/members/{words[0]}", ok({"object": "list", "data": [ROWS[1]]}))
    code, out, _ = rkserve(*words)
    assert (code, out) == (Exit.DONE, f"{said}\n")
    assert server.json() == sent


def test_on_the_head_the_state_folder_is_written(
    server: FakeControl, rkserve: Terminal, node: Path
) -> None:
    (rock,) = local_members(node)
    state = ("--state", str(node))
    server.on("GET /v1/boards", ok({"data": []}))
    assert f"rkserve approve {rock['id']}" in rkserve("boards", *state)[1]
    assert rkserve("approve", "--all", *state)[1] == f"approved rock ({rock['id']})\n"
    assert rkserve("approve", "--all", *state)[1] == "no board waits\n"
    assert rkserve("deny", rock["id"], *state)[1] == f"denied rock ({rock['id']})\n"
    assert [one["state"] for one in local_members(node)] == ["denied"]
    assert server.routes == ["GET /v1/boards"]
    code, _, err = rkserve("approve", "pi", *state)
    assert code == Exit.FAILED
    assert err.startswith("rkserve: No board 'pi' has asked to join.")


def test_a_head_that_does_not_run_is_not_meant(
    server: FakeControl, rkserve: Terminal, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "default_state", lambda: node)
    server.on("POST /v1/members/approve", ok({"object": "list", "data": []}))
    assert rkserve("approve", "--all")[1] == "no board waits\n"
    assert [one["state"] for one in local_members(node)] == [WAITING.value]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        pytest.param(("approve",), Exit.USAGE, "give names of boards, or --all", id="neither"),
        pytest.param(("approve", "a", "--all"), Exit.USAGE, "give names", id="both"),
        pytest.param(("deny",), Exit.USAGE, "NAME", id="nothing to deny"),
        pytest.param(
            ("approve", "a", "--state", "/nowhere/node"),
            Exit.FAILED,
            "/nowhere/node is no state folder of a head",
            id="no head",
        ),
    ],
)
def test_wrong_usage_asks_nobody(
    server: FakeControl, rkserve: Terminal, words: tuple[str, ...], code: Exit, said: str
) -> None:
    found, _, err = rkserve(*words)
    assert (found, said in err) == (code, True), err
    assert server.asked == []
