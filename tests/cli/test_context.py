"""Options of all commands that call a cluster: the address, the admin key, errors, progress."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from rkserve.bench.processes import PROC, identity_of
from rkserve.bringup import processes
from rkserve.bringup.processes import NodeRecord
from rkserve.cli.context import MOST_ROWS, Exit, OperationProgress, count, describe
from rkserve.client import Progress as Told
from rkserve.client import Unreachable
from rkserve.client.answers import operation
from rkserve.core import tls
from tests.support.cluster.fake_control import PARTLY, FakeControl, ok, stored
from tests.support.http.terminal import Terminal


def test_the_address_and_the_key_come_from_options_or_the_environment(
    server: FakeControl, rkserve: Terminal, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("from a file\nnot this\n")
    server.on("GET /v1/models", ok({"data": []}))
    rkserve("models")
    rkserve("models", RKSERVE_URL="http://head:1", RKSERVE_ADMIN_KEY="from the environment")
    rkserve("models", "--url", "http://head:2", "--admin-key-file", str(key), RKSERVE_ADMIN_KEY="x")
    assert rkserve.opened == [
        ("http://127.0.0.1:8000", None),
        ("http://head:1", "from the environment"),
        ("http://head:2", "from a file"),
    ]


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the record of a head of this machine whose supervisor is this process."""
    monkeypatch.setattr(processes, "SERVICE_STATE", tmp_path / "none")
    monkeypatch.setattr(processes, "user_state", lambda: tmp_path)
    own = identity_of(PROC, os.getpid())
    assert own is not None

    def write(control_url: str, certificate: str = "", started: int = own.started) -> None:
        monkeypatch.setenv(tls.CA_FILE, "")  # the command sets it
        supervisor = replace(own, started=started)
        urls = ("http://127.0.0.1:8000", "http://192.0.2.1:8000", control_url)
        record = NodeRecord(supervisor, (), True, *urls, certificate)
        (tmp_path / "head.json").write_text(json.dumps(asdict(record)))
        (tmp_path / "admin_key").write_text("of the head")

    return write


def test_a_command_on_the_head_finds_its_control_port_and_certificate(
    server: FakeControl, rkserve: Terminal, head: Callable[..., None]
) -> None:
    server.on("GET /v1/models", ok({"data": []}))
    head("http://127.0.0.1:8001", "/etc/rkserve/tls.crt")
    rkserve("models")
    assert os.environ[tls.CA_FILE] == "/etc/rkserve/tls.crt"
    head("http://127.0.0.1:8001")
    rkserve("models", RKSERVE_URL="http://127.0.0.1:8000")
    head("")
    rkserve("models")
    head("http://127.0.0.1:8001", started=1)  # of a head that was killed
    rkserve("models")
    assert rkserve.opened == [
        ("http://127.0.0.1:8001", "of the head"),
        *[("http://127.0.0.1:8000", "of the head")] * 3,
    ]


def test_comments_and_empty_lines_of_a_key_file_are_passed_over(
    server: FakeControl, rkserve: Terminal, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("# rotated in May\n\n  the key \nnot this\n")
    server.on("GET /v1/models", ok({"data": []}))
    assert rkserve("models", "--admin-key-file", str(key))[0] == Exit.DONE
    assert rkserve.opened[0][1] == "the key"


@pytest.mark.parametrize("content", ["", "\n\n", "# only a comment\n"])
def test_a_key_file_without_a_key_is_wrong_usage(
    rkserve: Terminal, tmp_path: Path, content: str
) -> None:
    (tmp_path / "key").write_text(content)
    code, _, err = rkserve("status", "--admin-key-file", str(tmp_path / "key"))
    assert (code, "there is no key in" in err) == (Exit.USAGE, True)


def test_a_key_that_cannot_be_sent_is_wrong_usage_and_is_not_shown(
    server: FakeControl, rkserve: Terminal
) -> None:
    code, out, err = rkserve("status", RKSERVE_ADMIN_KEY="se\ncret")
    assert code == Exit.USAGE
    assert "admin key" in err
    assert "cret" not in out + err
    assert server.asked == []


def test_a_table_for_another_program_is_as_wide_as_its_lines(
    server: FakeControl, rkserve: Terminal
) -> None:
    server.on(
        "GET /v1/operations", ok({"data": [stored("succeeded"), stored("partial", **PARTLY)]})
    )
    assert len(rkserve("operations", COLUMNS="40")[1].splitlines()) == 3


@pytest.mark.parametrize(
    "answer", [httpx.ConnectError("refused"), httpx.Response(200, text="hi")], ids=["none", "other"]
)
def test_an_error_names_the_url_that_was_tried(
    server: FakeControl, rkserve: Terminal, answer: Any
) -> None:
    server.on("GET /v1/cluster", answer)
    _, _, err = rkserve("status", "--url", "http://head:1")
    assert "http://head:1" in err
    assert "--url or RKSERVE_URL names another one." in err
    _, _, err = rkserve("status", "--url", "http://head:1", "--json")
    assert json.loads(err)["error"]["url"] == "http://head:1"


STATES = {"sim-0": "asleep", "sim-1": "ready"}


def told(state: str, changes: Mapping[str, Any]) -> Told:
    one = operation({**stored(state, kind="sleep", **changes), "phase": "sleeping"})
    return Told(one.kind, one.succeeded, one.total, one.phase, one)


def running(kind: str = "sleep", **params: Any) -> Told:
    none = {"total": 0, "succeeded": 0, "results": {}}
    one = operation({**stored("running", kind=kind, **none), "phase": "going", "params": params})
    return Told(one.kind, one.succeeded, one.total, one.phase, one)


def cluster(states: Mapping[str, str], **bases: str) -> dict[str, Any]:
    return {
        "boards": [
            {"id": i, "state": s, "model": f"m-{i}", "base": bases.get(s)}
            for i, s in states.items()
        ]
    }


def shown(
    *steps: Told, look: Callable[[], Mapping[str, Any]] = lambda: cluster(STATES)
) -> list[str]:
    """Return what stands on the terminal after these steps, a line for each bar."""
    columns = TextColumn("{task.description}|{task.completed}/{task.total}|{task.fields[count]}")
    page = StringIO()
    screen = Console(file=page, width=200, force_terminal=False)
    progress = Progress(columns, console=screen)
    bars = OperationProgress(progress, look)
    for step in steps:
        bars.update(step)
    screen.print(progress.get_renderable())
    return [line.rstrip() for line in page.getvalue().splitlines()]


def test_it_says_bytes_and_boards() -> None:
    upload = Told("upload", 1 << 20, 3 << 20)
    assert (describe(upload), count("upload", 1 << 20, 3 << 20)) == ("upload", "1.0 of 3.0 MiB")
    rollout = Told("adapter_rollout", 1, 8, "switching")
    assert (describe(rollout), count("x", 1, 8)) == ("adapter rollout switching", "1 of 8 boards")
    assert count("sleep", 0, 0) == ""


def test_boards_have_bars_by_their_states_while_they_fall_asleep() -> None:
    assert shown(running()) == [
        "sleep going|1/2|1 of 2 boards",
        "  sim-0|1/1|asleep",
        "  sim-1|0/None|ready",
    ]


def test_a_wake_up_goes_the_other_way_and_only_the_boards_that_are_meant_count() -> None:
    assert shown(running("wake", boards=["sim-1"])) == [
        "wake going|1/1|1 of 1 boards",
        "  sim-1|1/1|ready",
    ]
    assert shown(running("wake", models=["m-sim-0"]))[0] == "wake going|0/1|0 of 1 boards"


@pytest.mark.parametrize("kind", ["rebase", "weight_update"])
def test_a_board_has_arrived_when_it_serves_with_the_weights(kind: str) -> None:
    states = {"a": "ready", "b": "recovering"}
    title = kind.replace("_", " ")
    assert shown(running(kind, digest=None), look=lambda: cluster(states)) == [
        f"{title} going|1/2|1 of 2 boards",
        "  a|1/1|ready",
        "  b|0/None|recovering",
    ]
    loaded = running(kind, digest="cd", model="m-a")
    assert shown(loaded, look=lambda: cluster(states))[0] == f"{title} going|0/1|0 of 1 boards"
    there = cluster(states, ready="cd")
    assert shown(loaded, look=lambda: there)[1:] == ["  a|1/1|ready"]


def test_boards_that_are_through_with_one_phase_are_not_through_with_all() -> None:
    staged = operation({**stored("running", kind="adapter_rollout"), "phase": "switching"})
    assert (staged.succeeded, staged.total) == (2, 2)
    step = Told("adapter_rollout", 2, 2, "switching", staged)
    assert shown(step) == ["adapter rollout switching|0/None|"]


def test_the_end_is_what_the_operation_says_of_its_boards() -> None:
    assert shown(running(), told("partial", PARTLY)) == [
        "sleep sleeping|1/2|1 of 2 boards",
        "  sim-0|1/1|paused",
        "  sim-1|0/None|board_failed",
    ]


@pytest.mark.parametrize(
    ("step", "line"),
    [
        pytest.param(running("adapter_rollout"), "adapter rollout going|0/None|", id="another"),
        pytest.param(running("weight_update", name="tone"), "weight update", id="of an adapter"),
        pytest.param(Told("upload", 5 << 20, 5 << 20), "upload|5242880/5242880|5.0 of", id="bytes"),
    ],
)
def test_what_is_not_about_sleeping_looks_at_no_board(step: Told, line: str) -> None:
    lines = shown(step, look=lambda: pytest.fail("no question is expected"))
    assert len(lines) == 1
    assert lines[0].startswith(line)


def test_many_boards_have_one_bar_together() -> None:
    states = {f"sim-{n}": "asleep" for n in range(MOST_ROWS + 1)}
    assert shown(running(), look=lambda: cluster(states)) == ["sleep going|17/17|17 of 17 boards"]


def test_a_cluster_that_does_not_answer_costs_only_the_boards_bars() -> None:
    def away() -> Mapping[str, Any]:
        raise Unreachable("connection refused")

    assert shown(running(), look=away) == ["sleep going|0/None|"]


def test_names_are_text() -> None:
    lines = shown(running(), look=lambda: cluster({"[bold]a": "asleep"}))
    assert lines[1] == "  [bold]a|1/1|asleep"
