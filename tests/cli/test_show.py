"""Tables of the command."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

from rich.console import Console

from rkserve.cli import show
from tests.support.cluster.fake_control import PARTLY, FakeControl, ok, stored
from tests.support.http.terminal import Terminal

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


def test_a_board_that_fetches_its_model_has_its_progress() -> None:
    board = {"id": "sim-0", "model": "sim-chat", "state": "fetching", "reason": ""}
    fetch = {"fetched_bytes": 400_000_000, "total_bytes": 2_000_000_000, "bytes_per_s": 4e7}
    console = Console(width=200, record=True, file=StringIO())
    console.print(show.hardware([{**board, "fetch": fetch}, {**board, "fetch": None}]))
    text = console.export_text()
    assert text.count("fetching") == 2
    assert "fetching 20 %, 40.0 MB/s" in text


def test_models_of_the_head_have_their_copies(server: FakeControl, rkserve: Terminal) -> None:
    whole = {"board": "a", "state": "ready", "version": "v" * 64, "total_bytes": 0}
    part = {"board": "b", "state": "fetching", "fetched_bytes": 5, "total_bytes": 10}
    copies = [whole, {**part, "bytes_per_s": 2e6}]
    entry = {"name": "chat", "version": "v" * 64, "bytes": 300_100_000, "copies": copies}
    server.on("GET /v1/catalog/models", ok({"models": [entry]}))
    code, out, err = rkserve("model", "copies")
    assert (code, err) == (0, "")
    assert all(word in out for word in ("chat", "300.1", "a ready, b fetching 50 %, 2.0 MB/s"))
