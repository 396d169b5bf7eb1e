"""The commands for answers, caches and boards, the chat, and what the command says of itself."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from rkserve import __version__
from rkserve.cli.context import Exit
from rkserve.native.sim import models
from tests.support.cluster.fake_control import FakeControl, envelope, error, ok
from tests.support.http.fake_openai import serving
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


@pytest.fixture
def server() -> FakeControl:
    return FakeControl()


@pytest.fixture
def rkserve(server: FakeControl) -> Terminal:
    return Terminal(server)


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
            ("boards",),
            "GET /v1/boards",
            {"data": [BOARD]},
            None,
            ("sim-0", "ready", "npu.load 42.5"),
            id="boards",
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


def test_the_version_is_said(rkserve: Terminal) -> None:
    assert rkserve("--version")[:2] == (0, f"rkserve {__version__}\n")


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


# -- chat -----------------------------------------------------------------------------------------


def stream(*events: dict[str, Any]) -> httpx.Response:
    text = "".join(f": ping\n\ndata: {json.dumps(event)}\n\n" for event in events)
    return httpx.Response(200, text=text + "data: [DONE]\n\n")


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


def test_a_question_is_answered_as_it_streams(server: FakeControl, rkserve: Terminal) -> None:
    server.on("GET /v1/models", ok({"data": [{"id": "sim-chat"}]}))
    server.on("POST /v1/chat/completions", stream(piece("Hel"), piece("lo"), piece("", "stop")))
    code, out, _ = rkserve("chat", "Who", "are you?", "--system", "Be brief.", RKSERVE_API_KEY="k")
    assert (code, out) == (Exit.DONE, "Hello\n")
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    assert server.json() == {"model": "sim-chat", "messages": said, "stream": True}
    assert server.asked[-1].headers["authorization"] == "Bearer k"
    _, out, _ = rkserve("chat", "Hi", "--model", "m", "--json")
    assert json.loads(out) == {"model": "m", "content": "Hello", "finish_reason": "stop"}


def test_an_answer_that_ends_with_an_error_is_no_success(
    server: FakeControl, rkserve: Terminal
) -> None:
    failed = {"error": {"message": "It was lost.", "code": "board_failed"}}
    server.on("POST /v1/chat/completions", stream(piece("Hel"), failed))
    code, out, err = rkserve("chat", "Hi", "--model", "m")
    assert (code, out) == (Exit.FAILED, "Hel")
    assert "It was lost." in err
    server.on("POST /v1/chat/completions", error(401, "invalid_api_key"))
    assert rkserve("chat", "Hi", "--model", "m")[0] == Exit.FAILED


def test_a_conversation_goes_on_until_exit() -> None:
    leader, follower = pty.openpty()
    with serving() as fake:
        process = subprocess.Popen(
            [sys.executable, "-m", "rkserve", "chat", "--url", fake.url, "--model", "ok"],
            stdin=follower,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.write(leader, b"Hello\nAgain\n/new\nAfresh\n/exit\n")
        out, err = process.communicate(timeout=60)
    os.close(leader)
    os.close(follower)
    assert process.returncode == 0, err
    assert "/new begins anew" in err
    turns = [len(asked.messages) for asked in fake.asked]
    assert turns == [1, 3, 1], out


# -- adapters -------------------------------------------------------------------------------------


def test_a_simulated_adapter_is_made_and_pushed(
    server: FakeControl, rkserve: Terminal, tmp_path: Path
) -> None:
    file = tmp_path / "adapter.rkllm"
    code, out, _ = rkserve("sim", "adapter", str(file), "--title", "Tone", "--mib", "1")
    assert code == Exit.DONE
    assert f"rkserve lora push {file} --name tone" in out
    assert file.stat().st_size == 1 << 20
    assert models.damage_adapter(file) == ""
    said = {"id": "tone@v1", "model": "sim-chat", "sha256": "0" * 64, "size": 1}
    server.on("POST /v1/lora_adapters", ok({**envelope(), **said, "version": "v1"}))
    rkserve("lora", "push", str(file), "--name", "tone", "--no-activate")
    assert server.routes[0] == "POST /v1/lora_adapters"


ADAPTER = models.render_adapter("Tone", size=500)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "is empty", id="nothing"),
        pytest.param(b"PK\x03\x04rest", "a PyTorch checkpoint", id="zip"),
        pytest.param(b"GGUF\x03\x00", "a GGUF file", id="GGUF"),
        pytest.param(
            (20).to_bytes(8, "little") + b'{"a": {"dtype": "F16"}}', "a safetensors file", id="st"
        ),
        pytest.param(b'{"r": 16}', "is JSON", id="its configuration"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "Git LFS", id="a pointer"),
        pytest.param(b"RKSIMLLM" + bytes(400), "a simulated model", id="a base model"),
        pytest.param(ADAPTER[:300], "500 bytes of which 300 are there", id="cut"),
        pytest.param(ADAPTER[:100], "cut after 100 bytes", id="cut in its header"),
        pytest.param(ADAPTER[:-1] + b"x", "a wrong checksum", id="damaged"),
    ],
)
def test_a_file_that_no_board_could_load_is_not_sent(
    server: FakeControl, rkserve: Terminal, tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "adapter.rkllm"
    file.write_bytes(content)
    code, _, err = rkserve("lora", "push", str(file), "--name", "tone")
    assert code == Exit.USAGE
    assert said in err
    assert "rkllm-toolkit" in err
    assert server.asked == []


def test_a_folder_without_an_adapter_says_what_is_in_it(
    server: FakeControl, rkserve: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    code, _, err = rkserve("lora", "push", str(tmp_path), "--name", "tone")
    assert code == Exit.USAGE
    assert "has no adapter.rkllm in it, but adapter_model.safetensors" in err
    assert server.asked == []
