"""``rkserve keys``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from rkserve.cli.context import Exit
from rkserve.cli.keys import span
from rkserve.coordinator.state.api_keys import has_keys
from tests.support.cluster.fake_control import FakeControl, error, ok
from tests.support.http.terminal import Terminal

SECRET = "rks-0123456789"
LIMITS = {
    "requests_per_minute": None,
    "tokens_per_minute": 6000,
    "concurrent": 2,
    "weight": 1.0,
    "min_priority": None,
    "board_seconds_per_minute": None,
}
ROW: dict[str, Any] = {
    "id": "key_1",
    "object": "api_key",
    "name": "team",
    "redacted_value": "rks-0123...6789",
    "scopes": ["infer", "read"],
    "models": [],
    "limits": LIMITS,
    "created_at": 1,
    "expires_at": None,
    "last_used_at": 1_700_000_000,
}


def test_a_secret_is_alone_on_stdout(server: FakeControl, rkserve: Terminal) -> None:
    server.on("POST /v1/keys", ok({**ROW, "value": SECRET, "applied": True}))
    words = ("--scope", "infer", "--scope", "read", "--expires", "30d", "--concurrent", "2")
    code, out, err = rkserve("keys", "create", "team", *words)
    assert (code, out) == (Exit.DONE, f"{SECRET}\n")
    assert "key_1" in err
    assert SECRET not in err
    assert server.json() == {
        "name": "team",
        "scopes": ["infer", "read"],
        "expires_in_s": 30 * 86400.0,
        "concurrent": 2,
    }
    code, out, err = rkserve("keys", "create", "team", "--json")
    assert (code, json.loads(out)["value"], err) == (Exit.DONE, SECRET, "")


def test_a_secret_that_was_lost_on_the_way_is_told(server: FakeControl, rkserve: Terminal) -> None:
    server.on("POST /v1/keys", ok({**ROW, "value": None, "applied": False}))
    code, out, err = rkserve("keys", "create", "team")
    assert (code, out) == (Exit.FAILED, "")
    assert "rkserve keys rotate key_1" in err
    code, out, err = rkserve("keys", "create", "team", "--json")
    assert (code, json.loads(out)["value"]) == (Exit.FAILED, None)
    assert "rkserve keys rotate key_1" in err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_routers_that_did_not_confirm_the_end_of_a_secret_are_an_exit_code(
    server: FakeControl, rkserve: Terminal, form: tuple[str, ...]
) -> None:
    made = {**ROW, "value": SECRET, "applied": True, "routers_behind": 2}
    server.on("POST /v1/keys", ok(made))
    server.on("POST /v1/keys/key_1/rotate", ok(made))
    server.on("DELETE /v1/keys/key_1", ok({"id": "key_1", "deleted": True, "routers_behind": 2}))
    for command, exit_code in (("create", Exit.DONE), ("rotate", Exit.PARTLY)):
        code, out, err = rkserve("keys", command, "key_1", *form)
        assert code == exit_code
        assert SECRET in out
        assert "2 of the Routers did not confirm" in err
    code, _, err = rkserve("keys", "revoke", "key_1", *form)
    assert code == Exit.PARTLY
    assert "2 of the Routers did not confirm" in err


def test_keys_are_listed_without_secrets(server: FakeControl, rkserve: Terminal) -> None:
    server.on("GET /v1/keys", ok({"data": [ROW]}))
    code, out, _ = rkserve("keys", "list")
    assert code == Exit.DONE
    line = " ".join(out.splitlines()[1].split())
    assert line.startswith("team key_1 rks-0123...6789 infer, read - tokens_per_minute 6000, ")
    assert "concurrent 2 - 2023-11-14" in line


@pytest.mark.parametrize("named", ["team", "key_1"])
def test_a_key_is_rotated_and_revoked_by_its_name_or_id(
    server: FakeControl, rkserve: Terminal, named: str
) -> None:
    server.on("GET /v1/keys", ok({"data": [ROW]}))
    server.on("POST /v1/keys/key_1/rotate", ok({**ROW, "value": SECRET, "applied": True}))
    server.on("DELETE /v1/keys/key_1", ok({"id": "key_1", "deleted": True}))
    code, out, _ = rkserve("keys", "rotate", named, "--grace", "1h")
    assert (code, out) == (Exit.DONE, f"{SECRET}\n")
    assert server.json() == {"grace_s": 3600.0}
    assert rkserve("keys", "revoke", named)[:2] == (Exit.DONE, f"revoked {named}\n")


def test_an_unknown_key_is_an_error(server: FakeControl, rkserve: Terminal) -> None:
    server.on("GET /v1/keys", ok({"data": []}))
    server.on("DELETE /v1/keys/nobody", error(404, "key_not_found"))
    assert rkserve("keys", "revoke", "nobody")[0] == Exit.FAILED


def test_a_key_is_made_before_the_cluster_runs(
    tmp_path: Path, server: FakeControl, rkserve: Terminal
) -> None:
    file = tmp_path / "serve_config.yaml"
    boards = [{"name": "sim", "model": "models/sim-chat", "simulated": {}}]
    args = {"boards": boards, "coordinator": {"data_dir": str(tmp_path / "data")}}
    file.write_text(yaml.safe_dump({"import_path": "rkserve.app:build", "args": args}))
    code, out, _ = rkserve("keys", "create", "admin", "--scope", "admin", "--config", str(file))
    assert code == Exit.DONE
    assert out.startswith("rks-")
    assert server.asked == []
    assert has_keys(tmp_path / "data")
    code, _, err = rkserve("keys", "create", "admin", "--config", str(file))
    assert (code, "admin" in err) == (Exit.FAILED, True)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1.5h", 5400), ("30d", 2_592_000)]
)
def test_a_time_has_a_unit(text: str, seconds: float) -> None:
    assert span(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "0s", "-1h", "1w", "1 h", "inf"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        span(text)
