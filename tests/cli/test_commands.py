"""The command: what it prints, where, and the exit codes that scripts go by."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.main import get_command, get_group

from rkserve import __version__
from rkserve.cli import app
from rkserve.cli.commands import ORDER, RkserveGroup
from rkserve.cli.context import Exit
from rkserve.deployments.haproxy import available
from tests.support.cluster.fake_control import PARTLY, FakeControl, envelope, error, ok, stored
from tests.support.http.terminal import Terminal, plain
from tests.support.paths import PROJECT


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        pytest.param(ok(envelope()), Exit.DONE, "", id="done"),
        pytest.param(error(409, "operation_conflict"), Exit.FAILED, "conflict", id="refused"),
        pytest.param(error(504, "operation_timeout"), Exit.FAILED, "timeout", id="undone"),
        pytest.param(ok(envelope("partial", **PARTLY), 207), Exit.PARTLY, "1 of 2", id="partly"),
        pytest.param(httpx.ConnectError("refused"), Exit.UNREACHABLE, "refused", id="nobody there"),
        pytest.param(
            httpx.Response(200, text="hi"), Exit.FAILED, "not in rkserve's form", id="another"
        ),
    ],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "json"])
def test_exit_codes(
    server: FakeControl, rkserve: Terminal, *, answer: Any, code: Exit, said: str, as_json: bool
) -> None:
    server.on("POST /resume", answer).on("GET /v1/cluster", ok({"pauses": []}))
    exit_code, out, err = rkserve("resume", *(["--json"] if as_json else []))
    assert exit_code == code
    assert said in err
    if as_json:
        assert bool(out) is (code in (Exit.DONE, Exit.PARTLY))
        assert not out or json.loads(out)["operation_id"] == "op-1"
        assert not err or json.loads(err)["error"]["message"]
    else:
        assert (out.strip() == "resumed: 2 of 2 boards, epoch 7, operation op-1") is (code == 0)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["pause", "--mode", "soon"], id="an unknown mode"),
        pytest.param(["frobnicate"], id="an unknown command"),
        pytest.param(["status", "--url", "head:8000"], id="no URL"),
        pytest.param(["lora", "rm", "tone"], id="neither a version nor --all"),
        pytest.param(["lora", "rm", "tone@v1", "--all"], id="a version and --all"),
        pytest.param(["lora", "push", "/nowhere", "--name", "tone"], id="no such file"),
        pytest.param(["status", "--admin-key-file", "/nowhere"], id="no such key file"),
    ],
)
def test_wrong_usage_is_2_and_asks_nobody(
    server: FakeControl, rkserve: Terminal, words: list[str]
) -> None:
    assert rkserve(*words)[0] == Exit.USAGE
    assert server.asked == []


def test_help_tells_the_exit_codes(rkserve: Terminal) -> None:
    code, out, _ = rkserve("--help")
    assert code == 0
    for exit_code in (Exit.DONE, Exit.FAILED, Exit.USAGE, Exit.PARTLY, Exit.UNREACHABLE):
        assert f"{exit_code.value} " in plain(out).partition("Exit codes:")[2]


def options() -> list[tuple[str, str]]:
    """Every command with every option of its own."""

    def of(command: Any, name: str) -> list[tuple[str, str]]:
        below = getattr(command, "commands", {})
        own = [o for p in command.params for o in p.opts if o.startswith("--") and not p.hidden]
        return [
            *((name, option) for option in own if option != "--help"),
            *(found for one, sub in below.items() for found in of(sub, f"{name} {one}".strip())),
        ]

    return of(get_command(app), "")


def test_every_command_and_option_is_documented() -> None:
    client = (PROJECT / "docs" / "reference" / "client.md").read_text(encoding="utf-8")
    bench = (PROJECT / "docs" / "how-to" / "bench.md").read_text(encoding="utf-8")
    there = [*options()]
    assert len(there) > 300
    for command, option in there:
        if not command.startswith("bench "):
            assert not command or f"\n### rkserve {command}\n" in client, command
            assert option in client, (command, option)
        else:
            assert f"`{command}`" in bench or f"`{command} " in bench, command
            assert option in bench, (command, option)


def test_pause_sends_what_was_said(server: FakeControl, rkserve: Terminal) -> None:
    server.on("POST /pause", ok(envelope(applied=False)))
    _, out, _ = rkserve("pause", "--mode", "wait", "--board", "a", "--board", "b", "--lease", "9")
    assert server.json() == {
        "mode": "wait",
        "selector": ["a", "b"],
        "lease_s": 9.0,
        "clear_cache": False,
    }
    assert "as it was already" in out


@pytest.mark.parametrize(
    ("state", "code"),
    [("succeeded", Exit.DONE), ("partial", Exit.PARTLY), ("undone", Exit.FAILED)],
)
def test_an_operation_can_be_shown_and_waited_for(
    server: FakeControl, rkserve: Terminal, state: str, code: Exit
) -> None:
    server.on("GET /v1/operations/op-1", ok(stored("running")), ok(stored(state, **PARTLY)))
    shown, out, _ = rkserve("operation", "op-1")
    assert (shown, "running" in out) == (0, True)
    ended, out, _ = rkserve("operation", "op-1", "--wait")
    assert ended == code
    assert "It does not answer." in out


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "rkserve", "status", "--url", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == Exit.USAGE
    assert "http://" in done.stderr


@pytest.mark.skipif(not available(), reason="Ray has no HAProxy for this platform")
def test_front_prints_the_environment_in_which_ray_starts(rkserve: Terminal) -> None:
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp") as folder:
        code, out, _ = rkserve("front", "--folder", f"{folder}/f")
        assert code == Exit.DONE
        assert f"export RAY_SERVE_HAPROXY_SOCKET_PATH={folder}/f/admin.sock" in out.splitlines()
        code, out, _ = rkserve("front", "--plain", "--folder", f"{folder}/f")
        assert "RAY_SERVE_ENABLE_HA_PROXY=1" in out.splitlines()
        Path(folder, "f").chmod(0o777)
        code, out, err = rkserve("front", "--folder", f"{folder}/f")
        assert (code, out) == (Exit.FAILED, "")
        assert "other accounts may write" in err


def test_the_version_is_said(rkserve: Terminal) -> None:
    assert rkserve("--version")[:2] == (0, f"rkserve {__version__}\n")


LOG_LINE = {
    "source": "sim-0",
    "time_s": 1.5,
    "level": "INFO",
    "logger": "rkserve.x",
    "request_id": "chatcmpl-1/0",
    "message": "loaded\x1b[31m",
}


def test_logs_are_lines_for_people_and_lines_of_json(
    server: FakeControl, rkserve: Terminal
) -> None:
    quiet = {**LOG_LINE, "request_id": "", "message": "ready"}
    text = f"\n{json.dumps(LOG_LINE)}\n\n{json.dumps(quiet)}\n"
    server.on("GET /v1/boards/sim-0/logs", httpx.Response(200, text=text))
    code, out, _ = rkserve("logs", "sim-0", "--tail", "2", "--request", "chat", "-f")
    first, second = out.splitlines()
    assert code == 0
    assert first.endswith(" sim-0 INFO chatcmpl-1/0 -- loaded\\x1b[31m"), (
        "nothing that a terminal obeys"
    )
    assert second.endswith(" sim-0 INFO -- ready")
    query = dict(server.asked[0].url.params)
    assert query == {"tail": "2", "follow": "true", "request_id": "chat"}
    code, out, _ = rkserve("logs", "sim-0", "--json")
    assert [json.loads(line) for line in out.splitlines()] == [LOG_LINE, quiet]


def test_logs_of_an_unknown_board_or_of_another_server_fail(
    server: FakeControl, rkserve: Terminal
) -> None:
    server.on("GET /v1/boards/nobody/logs", error(404, "board_not_found"))
    assert rkserve("logs", "nobody")[0] == Exit.FAILED
    server.on("GET /v1/logs", httpx.Response(200, text="<html>"))
    code, _, err = rkserve("logs")
    assert (code, "no JSON: <html>" in err) == (Exit.FAILED, True)


def test_the_order_names_every_command_and_the_module_that_has_it() -> None:
    group = get_command(app)
    there = {name for name, module in ORDER.items() if not module}
    for module in set(filter(None, ORDER.values())):
        found = get_group(import_module(f"rkserve.cli.{module}").commands).commands
        assert {name for name, one in ORDER.items() if one == module} == set(found), module
        there |= set(found)
    assert there == set(ORDER)
    assert isinstance(group, RkserveGroup)
    assert list(group.commands) == list(ORDER)
    assert all(group.commands[name].name == name for name in ORDER)


def test_a_call_of_a_cluster_imports_no_other_commands() -> None:
    """They take longer than the call: half a second of a PC, and more of a board."""
    program = "import rkserve.cli, sys; print(*sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()
    late = {f"rkserve.cli.{module}" for module in ORDER.values() if module}
    assert not {*said} & {*late, "rkserve.config", "rkserve.control", "prometheus_client", "ray"}
