"""Tables of the command."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

from rich.console import Console

from rkserve.cli import show
from tests.support.cluster.fake_control import PARTLY, FakeControl, error, ok, stored
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


READY: dict[str, Any] = {
    "verdict": "READY",
    "reasons": [],
    "more": 0,
    "routers": {"up": ["0"], "silent": []},
}
SLOW = {
    "rule": "DdrBelowMax",
    "severity": "warning",
    "sentence": "rock-2: The DDR clock is 528 of 2112 MHz [slow].",
    "boards": ["rock-2"],
    "evidence": ["cur_freq: 528000000"],
    "command": "echo performance | sudo tee /sys/class/devfreq/dmc/governor",
    "run_on": "board",
    "runbook": "docs/how-to/runbook.md#ddrbelowmax",
}


def test_status_begins_with_the_verdict_and_the_commands_of_its_reasons(
    server: FakeControl, rkserve: Terminal
) -> None:
    silent = {"up": ["0"], "silent": ["1"]}
    verdict = {**READY, "verdict": "DEGRADED", "reasons": [SLOW], "more": 2, "routers": silent}
    server.on("GET /v1/cluster", ok(CLUSTER))
    server.on("GET /v1/cluster/verdict", ok(verdict))
    code, out, _ = rkserve("status")
    assert code == 0
    assert [line.rstrip() for line in out.splitlines()[:6]] == [
        "DEGRADED",
        "warning DdrBelowMax: rock-2: The DDR clock is 528 of 2112 MHz [slow].",
        "    seen: cur_freq: 528000000",
        "    mend (on the board): echo performance | sudo tee /sys/class/devfreq/dmc/governor",
        "and 2 more",
        "without the figures of Routers that do not answer: 1",
    ]


def test_status_ends_with_1_where_a_model_is_not_served(
    server: FakeControl, rkserve: Terminal
) -> None:
    server.on("GET /v1/cluster", ok(CLUSTER))
    server.on("GET /v1/cluster/verdict", ok({**READY, "verdict": "NOT READY"}))
    code, out, _ = rkserve("status")
    assert (code, out.splitlines()[0].rstrip()) == (1, "NOT READY")
    assert rkserve("status", "--json")[0] == 1


def test_status_of_a_head_without_verdicts_has_none(server: FakeControl, rkserve: Terminal) -> None:
    server.on("GET /v1/cluster", ok(CLUSTER))
    server.on("GET /v1/cluster/verdict", error(404, "not_found"))
    code, out, _ = rkserve("status", "--json")
    assert (code, json.loads(out)["verdict"]) == (0, None)


def test_status_shows_boards_pauses_and_a_coordinator_that_is_away(
    server: FakeControl, rkserve: Terminal
) -> None:
    server.on("GET /v1/cluster", ok(CLUSTER))
    server.on("GET /v1/cluster/verdict", ok(READY))
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
    assert json.loads(rkserve("status", "--json")[1]) == {**CLUSTER, "verdict": READY}


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
    listed = rkserve("lora", "list")[1]
    assert "tone@v2  m      active  abababababab  no      7      2/2     1/2" in listed
    assert "1/2" in rkserve("operations")[1]
    assert "admin  pause  1970-01-01" in rkserve("audit")[1]
    assert "m      -" in rkserve("models")[1]
    for words in (["lora", "list"], ["operations"], ["audit"], ["models"]):
        assert len(json.loads(rkserve(*words, "--json")[1])) == 1


def test_usage_has_a_line_for_each_day_and_key_and_names_what_is_missing(
    server: FakeControl, rkserve: Terminal
) -> None:
    row = {"day": "2026-01-01", "key": "alice", "requests": 120, "prompt_tokens": 48000}
    row |= {"completion_tokens": 15000, "board_s": 1310.5}
    answer: dict[str, Any] = {"data": [row], "routers": {"up": ["0"], "silent": []}, "unstored": []}
    server.on("GET /v1/usage", ok(answer))
    _, out, _ = rkserve("usage", "--days", "31")
    assert server.asked[0].url.query == b"days=31"
    head, line = (" ".join(one.split()) for one in out.splitlines())
    assert head == "day key requests prompt_tokens completion_tokens board_s"
    assert line == "2026-01-01 alice 120 48000 15000 1310.5"
    assert json.loads(rkserve("usage", "--json")[1]) == answer
    answer |= {"routers": {"up": ["0"], "silent": ["2"]}, "unstored": ["0"]}
    server.on("GET /v1/usage", ok(answer))
    out = rkserve("usage")[1]
    assert "without the figures of Routers that do not answer: 2" in out
    assert "only since their start: Routers that cannot store usage on their node: 0" in out
    assert rkserve("usage", "--days", "63")[0] == 2


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
    server.on("GET /v1/cluster/verdict", ok(READY))
    lines = [" ".join(line.split()) for line in rkserve("status")[1].splitlines()]
    assert "0 paused, 1 asleep" in lines[1]
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


def test_drained_boards_are_shown_in_words() -> None:
    total = {**CLUSTER["total"], "drained": 1}
    board = {**CLUSTER["boards"][0], "drained": True}
    text = rendered(show.status({**CLUSTER, "total": total, "boards": [board]}))
    assert "1 paused, 0 asleep, 1 drained; " in text
    assert "drained, keep" in text
    listed = rendered(show.hardware([{**board, "running": 1, "queued": 0, "paused": 0}]))
    assert "ready, drained (1 left)" in listed
    assert "ready, drained " in rendered(
        show.hardware([{"id": "a", "state": "ready", "drained": True}])
    )


def rendered(table: Any) -> str:
    console = Console(width=200, file=StringIO(), record=True)
    console.print(table)
    return console.export_text()
