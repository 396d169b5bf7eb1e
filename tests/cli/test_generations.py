"""``rkserve generations``, ``kv``, ``caches`` and ``boards show``; test_members has their list."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from rkserve.cli.context import Exit
from tests.support.cluster.fake_control import FakeControl, envelope, error, ok, stored
from tests.support.http.terminal import Terminal

KV = {"board": "sim-0", "model": "sim-chat", "positions": 43, "capacity": 4096, "bytes": 9}
KV_BODY = {
    "data": [{**KV, "status": "ok"}],
    "total": {"positions": 43, "capacity": 4096, "bytes": 9},
}
GENERATION = {
    "id": "chatcmpl-1",
    "choice": 0,
    "state": "paused",
    "board": "sim-0",
    "model": "sim-chat",
    "adapter": None,
    "tokens": 3,
    "kv_positions": 12,
    "age_s": 1.5,
    "partial_output": "One,",
}
CACHE = {
    "cache_name": "doc",
    "board": "sim-0",
    "model": "sim-chat",
    "adapter": None,
    "tokens": 500,
    "bytes": 3000,
    "idle_s": 2.0,
}
BOARD = {
    "id": "sim-0",
    "model": "sim-chat",
    "state": "ready",
    "platform": "rk3588",
    "release": "1.3.0",
    "node": "n",
    "reason": "",
    "hardware": {"npu": {"load": 42.5}},
}
BUILT = {"tokens": 5, "boards": [{"board": "sim-0"}, {"board": "sim-1", "error": "board_failed"}]}
EDIT = ("generations", "edit", "chatcmpl-1")
AT = "/v1/generations/chatcmpl-1"


@pytest.mark.parametrize(
    ("words", "route", "answer", "sent", "said"),
    [
        pytest.param(
            ("generations",),
            "GET /v1/generations",
            {"data": [GENERATION]},
            None,
            ("chatcmpl-1", "paused", "1.5 s"),
            id="generations",
        ),
        pytest.param(
            ("generations", "show", "chatcmpl-1"),
            f"GET {AT}",
            GENERATION,
            None,
            ("One,",),
            id="one",
        ),
        pytest.param(
            ("generations", "pause", "chatcmpl-1", "--choice", "1"),
            f"POST {AT}/pause",
            GENERATION,
            {"choice": 1},
            ("paused chatcmpl-1 after 'One,'",),
            id="pause",
        ),
        pytest.param(
            (*EDIT, "--text", " so", "--replace-last", "2", "--clear", "3-9"),
            f"POST {AT}/edit",
            GENERATION,
            {"text": " so", "replace_last": 2, "clear": [[3, 9]]},
            ("edited", "rkserve generations resume chatcmpl-1"),
            id="edit",
        ),
        pytest.param(
            ("generations", "resume", "chatcmpl-1"),
            f"POST {AT}/resume",
            GENERATION,
            {},
            ("resumed chatcmpl-1",),
            id="resume",
        ),
        pytest.param(
            ("generations", "abort", "chatcmpl-1"),
            f"POST {AT}/abort",
            GENERATION,
            {},
            ("aborted chatcmpl-1",),
            id="abort",
        ),
        pytest.param(
            ("kv", "size", "--model", "sim-chat"),
            "GET /v1/cache/kv/size",
            KV_BODY,
            None,
            ("sim-0", "43", "4096", "total"),
            id="kv size",
        ),
        pytest.param(
            ("kv", "clear", "--board", "sim-0"),
            "POST /v1/cache/kv/clear",
            KV_BODY,
            {"boards": ["sim-0"], "keep_system_prompt": True},
            ("cleared sim-0",),
            id="kv clear",
        ),
        pytest.param(
            ("kv", "clear", "--all", "--no-keep-system-prompt"),
            "POST /v1/cache/kv/clear",
            KV_BODY,
            {"all": True, "keep_system_prompt": False},
            ("cleared sim-0",),
            id="kv clear everything",
        ),
        pytest.param(
            ("kv", "clear", "--generation", "chatcmpl-1", "--clear", "3-9"),
            "POST /v1/cache/kv/clear",
            GENERATION,
            {"generation": "chatcmpl-1", "ranges": [[3, 9]]},
            ("cleared chatcmpl-1",),
            id="kv clear of one answer",
        ),
        pytest.param(
            ("caches", "list", "sim-chat"),
            "GET /v1/cache/sim-chat",
            {"data": [CACHE]},
            None,
            ("doc", "500"),
            id="caches",
        ),
        pytest.param(
            ("caches", "build", "sim-chat", "doc", "--system", "Be brief."),
            "POST /v1/cache/sim-chat",
            {**BUILT, "boards": BUILT["boards"][:1]},  # type: ignore[index] # it is a list
            {"cache_name": "doc", "messages": [{"role": "system", "content": "Be brief."}]},
            ("built doc of 5 tokens on 1 of 1 boards",),
            id="caches build",
        ),
        pytest.param(
            ("caches", "rm", "sim-chat", "doc"),
            "DELETE /v1/cache/sim-chat/doc",
            {"deleted": True},
            None,
            ("deleted doc",),
            id="caches rm",
        ),
        pytest.param(
            ("boards", "show", "sim-0"), "GET /v1/boards/sim-0", BOARD, None, ("1.3.0",), id="board"
        ),
    ],
)
def test_a_command_makes_its_call_and_shows_the_answer(
    server: FakeControl,
    rkserve: Terminal,
    *,
    words: tuple[str, ...],
    route: str,
    answer: dict[str, Any],
    sent: dict[str, Any] | None,
    said: tuple[str, ...],
) -> None:
    server.on(route, ok(answer))
    code, out, err = rkserve(*words)
    assert (code, err) == (Exit.DONE, "")
    assert server.routes == [route]
    assert sent is None or server.json() == sent
    assert all(word in out for word in said), out
    assert json.loads(rkserve(*words, "--json")[1])


def test_boards_that_did_not_do_it_are_named_with_exit_code_3(
    server: FakeControl, rkserve: Terminal
) -> None:
    server.on("POST /v1/cache/sim-chat", ok(BUILT, 207))
    code, out, err = rkserve("caches", "build", "sim-chat", "doc", "--prompt", "Hello")
    assert code == Exit.PARTLY
    assert "on 1 of 2 boards" in out
    assert err.strip() == "sim-1: board_failed"


@pytest.mark.parametrize("lost", [httpx.ReadError("gone"), error(503, "board_failed")])
def test_a_call_without_a_key_is_never_sent_twice(
    server: FakeControl, rkserve: Terminal, lost: Any
) -> None:
    server.on(f"POST {AT}/edit", lost)
    assert rkserve("generations", "edit", "chatcmpl-1", "--text", "x")[0] != Exit.DONE
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("kv", "clear"), id="nothing named"),
        pytest.param(("kv", "clear", "--generation", "x"), id="no range"),
        pytest.param(("generations", "edit", "x"), id="no edit"),
        pytest.param(("generations", "edit", "x", "--clear", "9"), id="no range at all"),
        pytest.param(("caches", "build", "m", "n"), id="no prompt"),
        pytest.param(("caches", "build", "m", "n", "--system", "a", "--prompt", "b"), id="two"),
    ],
)
def test_wrong_usage_asks_nobody(
    server: FakeControl, rkserve: Terminal, words: tuple[str, ...]
) -> None:
    assert rkserve(*words)[0] == Exit.USAGE
    assert server.asked == []


# -- single boards --------------------------------------------------------------------------------

DRAIN, ASKED = "POST /v1/boards/drain", "GET /v1/operations/op-1"


@pytest.mark.parametrize(
    ("words", "sent", "hint"),
    [
        pytest.param(
            ("drain", "rk a"),
            {"selector": ["rk a"], "mode": "wait"},
            "rkserve boards undrain 'rk a'",
            id="one",
        ),
        pytest.param(
            ("drain", "--move", "rk-*", "--timeout", "9"),
            {"selector": ["rk-*"], "mode": "move", "timeout_s": 9.0},
            "rkserve boards undrain 'rk-*'",
            id="a pattern, moved",
        ),
        pytest.param(
            ("drain", "--model", "m"),
            {"model": ["m"], "mode": "wait"},
            "rkserve boards undrain --model m",
            id="a model",
        ),
    ],
)
def test_boards_are_drained_and_the_way_back_is_named(
    server: FakeControl, rkserve: Terminal, words: tuple[str, ...], sent: Any, hint: str
) -> None:
    server.on(DRAIN, ok(envelope("running", kind="drain"), 202))
    server.on(ASKED, ok(stored("running")), ok(stored("succeeded")))
    code, out, err = rkserve("boards", *words)
    assert code == Exit.DONE
    assert out.startswith("drained, and without requests: 2 of 2 boards, epoch 7")
    assert err == f"to let them take requests again: {hint}\n"
    assert server.json(0) == {**sent, "async": True}


def test_a_drain_that_is_not_done_says_which_board_still_has_requests(
    server: FakeControl, rkserve: Terminal
) -> None:
    message = "It still has 1 request; it takes no new ones."
    left = {"board": "rk-a", "error": "board_busy", "message": message}
    server.on(DRAIN, ok(envelope("running", kind="drain"), 202))
    server.on(ASKED, ok(stored("partial", kind="drain", succeeded=1, failed=[left])))
    code, _, err = rkserve("boards", "drain", "rk-a")
    assert code == Exit.PARTLY
    assert f"rk-a: {message}" in err


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        pytest.param(("undrain", "rk-a", "rk-b"), {"selector": ["rk-a", "rk-b"]}, id="some"),
        pytest.param(("undrain", "--model", "m"), {"model": ["m"]}, id="a model"),
        pytest.param(("undrain", "--all"), {}, id="all"),
    ],
)
def test_drains_are_ended(
    server: FakeControl, rkserve: Terminal, words: tuple[str, ...], sent: Any
) -> None:
    server.on("POST /v1/boards/undrain", ok(envelope(kind="undrain")))
    code, out, _ = rkserve("boards", *words)
    assert (code, out.partition(":")[0]) == (Exit.DONE, "taking requests")
    assert server.json() == sent


@pytest.mark.parametrize(
    "words", [("drain",), ("undrain",), ("undrain", "rk-a", "--all")], ids=" ".join
)
def test_boards_have_to_be_named(
    server: FakeControl, rkserve: Terminal, words: tuple[str, ...]
) -> None:
    code, _, err = rkserve("boards", *words)
    assert (code, server.routes) == (Exit.USAGE, [])
    assert "give names of boards" in err


def test_an_engine_is_restarted_and_a_refusal_is_told(
    server: FakeControl, rkserve: Terminal
) -> None:
    route = "POST /v1/boards/rk@one/restart"
    server.on(route, ok(envelope("running", kind="restart"), 202), error(404, "board_not_found"))
    server.on(ASKED, ok(stored("succeeded", kind="restart")))
    code, out, _ = rkserve("boards", "restart", "rk@one")
    assert (code, out.partition(":")[0]) == (Exit.DONE, "the engine of rk@one is restarted")
    code, _, err = rkserve("boards", "restart", "rk@one")
    assert (code, err) == (Exit.FAILED, "rkserve: It is board_not_found. (404, board_not_found)\n")


def test_a_measurement_is_a_sentence(server: FakeControl, rkserve: Terminal) -> None:
    found = {"sentence": "sim-0 decodes 12.0 tokens/s.", "ratio": None}
    server.on("POST /v1/boards/sim-0/measure", ok(found), error(409, "operation_conflict"))
    code, out, _ = rkserve("boards", "measure", "sim-0", "--seconds", "5", "--wait")
    assert (code, out) == (Exit.DONE, "sim-0 decodes 12.0 tokens/s.\n")
    assert server.json() == {"seconds": 5.0, "wait": True}
    code, _, err = rkserve("boards", "measure", "sim-0")
    assert code == Exit.FAILED
    assert err == "rkserve: It is operation_conflict. (409, operation_conflict)\n"
