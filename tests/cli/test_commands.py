"""The command: what it prints, where, and the exit codes that scripts go by."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.main import get_command

from rkserve.cli import app
from rkserve.cli.context import Exit
from rkserve.deployments.haproxy import available
from tests.support.cluster.fake_control import PARTLY, FakeControl, envelope, error, ok, stored
from tests.support.http.terminal import Terminal, plain
from tests.support.paths import PROJECT

ROLLOUT = "POST /v1/lora_adapters/tone/rollout"
CLUSTER: dict[str, Any] = {
    "epoch": 12,
    "coordinator": {"reachable": False},
    "total": {"ready": 1, "boards": 2, "paused_boards": 1, "asleep": 0}
    | {"running": 3, "queued": 4, "paused": 2},
    "pauses": [
        {
            "operation": "op-1",
            "models": ["sim-chat"],
            "boards": [],
            "adapter": None,
            "mode": "keep",
            "expires_s": 1.0,
        }
    ],
    "boards": [
        {
            "id": "sim-0",
            "model": "sim-chat",
            "state": "ready",
            "hold": "keep",
            "running": 3,
            "queued": 4,
            "paused": 2,
            "decode_tokens_per_s": 12.34,
            "epoch": 12,
            "reason": "[bold]not markup[/bold]",
        }
    ],
}


@pytest.fixture
def server() -> FakeControl:
    return FakeControl()


@pytest.fixture
def rkserve(server: FakeControl) -> Terminal:
    return Terminal(server)


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


@pytest.mark.parametrize(("command", "option"), options())
def test_every_command_and_option_is_documented(command: str, option: str) -> None:
    name = "bench.md" if command.startswith("bench ") else "client.md"
    page = (PROJECT / "docs" / "how-to" / name).read_text(encoding="utf-8")
    assert f"`{command}`" in page or f"`{command} " in page
    assert option in page


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


def test_status_shows_boards_pauses_and_a_coordinator_that_is_away(
    server: FakeControl, rkserve: Terminal
) -> None:
    server.on("GET /v1/cluster", ok(CLUSTER))
    code, out, _ = rkserve("status")
    assert code == 0
    assert (
        "epoch 12, 1 of 2 boards ready, 1 paused, 0 asleep; 3 requests run, 4 wait, 2 are held"
        in out
    )
    assert "Coordinator cannot be reached" in out
    assert "paused (keep): sim-chat, until 1970-01-01T" in out
    assert "[bold]not markup[/bold]" in out
    assert "12.3" in out
    assert json.loads(rkserve("status", "--json")[1]) == CLUSTER


def test_lists_are_tables_or_json(server: FakeControl, rkserve: Terminal) -> None:
    version = {
        "label": "tone@v2",
        "role": "active",
        "sha256": "ab" * 32,
        "bytes": 7,
        "boards": {"a": {"staged": True, "loaded": False}, "b": {"staged": True, "loaded": True}},
    }
    server.on("GET /v1/lora_adapters", ok({"data": [{"model": "m", "versions": [version]}]}))
    server.on("GET /v1/operations", ok({"data": [stored("partial", **PARTLY)]}))
    server.on("GET /v1/audit", ok({"data": [{"who": "admin", "kind": "pause", "at_s": 0.0}]}))
    server.on("GET /v1/models", ok({"data": [{"id": "m", "owned_by": "rkserve"}]}))
    assert "tone@v2  m      active  abababababab  7      2/2     1/2" in rkserve("lora", "list")[1]
    assert "1/2" in rkserve("operations")[1]
    assert "admin  pause  1970-01-01" in rkserve("audit")[1]
    assert "m      -" in rkserve("models")[1]
    for words in (["lora", "list"], ["operations"], ["audit"], ["models"]):
        assert len(json.loads(rkserve(*words, "--json")[1])) == 1


def test_status_shows_what_sleeps_and_which_weights_are_loaded(
    server: FakeControl, rkserve: Terminal
) -> None:
    (board,), (pause,) = CLUSTER["boards"], CLUSTER["pauses"]
    rows = [
        {**board, "id": "sim-0", "state": "asleep", "level": 2, "base": "cd" * 32},
        {**board, "id": "sim-1", "hold": None, "level": None, "base": None},
    ]
    sleep = {**pause, "level": 2, "expires_s": None, "wake_on_request": True}
    total = {**CLUSTER["total"], "paused_boards": 1, "asleep": 1}
    server.on("GET /v1/cluster", ok({**CLUSTER, "total": total, "boards": rows, "pauses": [sleep]}))
    lines = [" ".join(line.split()) for line in rkserve("status")[1].splitlines()]
    assert "0 paused, 1 asleep" in lines[0]
    said = "asleep (level 2, keep): sim-chat, until a request comes, by operation op-1"
    assert said in lines
    assert any("asleep keep, level 2 3 4 2 12.3 12 cdcdcdcdcdcd" in line for line in lines)
    assert any("ready - 3 4 2 12.3 12 of the model folder" in line for line in lines)


def test_a_table_for_another_program_is_as_wide_as_its_lines(
    server: FakeControl, rkserve: Terminal
) -> None:
    server.on(
        "GET /v1/operations", ok({"data": [stored("succeeded"), stored("partial", **PARTLY)]})
    )
    assert len(rkserve("operations", COLUMNS="40")[1].splitlines()) == 3


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


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        ([], {"strategy": "atomic"}),
        (["--strategy", "rolling"], {"strategy": "rolling", "max_unavailable": 1}),
        (
            ["--strategy", "canary", "--weight", "0.5", "--no-auto"],
            {"strategy": "canary", "weight": 0.5, "observe_s": 60.0, "auto": False},
        ),
    ],
    ids=["atomic", "rolling", "canary"],
)
def test_push_uploads_and_rolls_out(
    server: FakeControl, rkserve: Terminal, tmp_path: Path, words: list[str], sent: dict[str, Any]
) -> None:
    (tmp_path / "adapter.rkllm").write_bytes(b"weights")
    names = {"name": "tone", "version": "v1", "model": "m"}
    server.on("POST /v1/lora_adapters", ok({**names, **envelope()}))
    server.on(ROLLOUT, ok({**names, **envelope("running", operation_id="op-2")}, 202))
    server.on("GET /v1/operations/op-2", ok(stored("succeeded", operation_id="op-2")))
    code, out, err = rkserve("lora", "push", str(tmp_path), "--name", "tone", *words)
    assert (code, err) == (0, "")
    assert out == "serving tone@v1: 2 of 2 boards, epoch 7, operation op-2\n"
    expected = {"version": "v1", "model": "m", "in_flight": "pin", "async": True, **sent}
    assert server.json(1) == expected


@pytest.mark.parametrize(
    ("words", "route"),
    [
        (["rollback", "tone"], "POST /v1/lora_adapters/tone/rollback"),
        (["promote", "tone"], "POST /v1/lora_adapters/tone/promote"),
        (["rollout", "tone", "v1"], ROLLOUT),
        (["rm", "tone@v1"], "DELETE /v1/lora_adapters/tone/v1"),
        (["rm", "tone", "--all"], "DELETE /v1/lora_adapters/tone"),
    ],
    ids=["rollback", "promote", "rollout", "rm a version", "rm all"],
)
def test_adapters_are_changed(
    server: FakeControl, rkserve: Terminal, words: list[str], route: str
) -> None:
    server.on(route, ok(envelope("running"), 202))
    server.on("GET /v1/operations/op-1", ok(stored("failed", **PARTLY)))
    code, _, err = rkserve("lora", *words)
    assert (code, server.routes[0]) == (Exit.FAILED, route)
    assert "is failed: sim-1: It does not answer." in err


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
