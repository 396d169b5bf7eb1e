"""Options of all commands that call a cluster: the address, the admin key, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from rkserve.cli.context import Exit
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
