"""/tokenize and /detokenize over HTTP: vLLM's shapes, by the same tokenizer as prompts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest

from rkserve.config.router import RouterConfig
from rkserve.router.off_loop import off_loop
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import FakeBoards
from tests.support.boards.own_time import run_loop
from tests.support.http.reference_house import ReferenceHouse
from tests.support.http.router_house import CHAT, FOLDER, House, chat, house, model, send
from tests.support.http.wire_folders import make_folder

TEXT = "A cat sat on a mat. äöü 日本語 🙂"


def post(path: str, of: House | None = None, **body: Any) -> Any:
    return send(of or house(), "POST", path, json=body)


def folder_house(path: Path, **kinds: Any) -> House:
    served = ServedModel.open(make_folder(path / "m", **kinds))
    return House(FakeBoards.answering("a"), RouterConfig(), served)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_becomes_ids_and_the_ids_that_text(prefix: str) -> None:
    answer = post(f"{prefix}/tokenize", model="sim-chat", prompt=TEXT).json()
    assert answer["count"] == len(answer["tokens"]) > 0
    assert answer["max_model_len"] == 4096
    assert answer["token_strs"] is None
    back = post(f"{prefix}/detokenize", model="sim-chat", tokens=answer["tokens"])
    assert back.json() == {"prompt": TEXT}


def test_the_ids_of_a_conversation_are_those_that_its_board_gets() -> None:
    of, messages = house(), chat()["messages"]
    counted = post("/tokenize", of, model="sim-chat", messages=messages).json()
    usage = send(of, "POST", CHAT, json=chat()).json()["usage"]
    ((_, request),) = of.boards.opened
    assert tuple(counted["tokens"]) == request.prompt_ids
    assert counted["count"] == len(request.prompt_ids)
    assert usage is not None
    without = post(
        "/tokenize", of, model="sim-chat", messages=messages, add_generation_prompt=False
    )
    assert tuple(without.json()["tokens"]) == request.prompt_ids[: without.json()["count"]]
    assert without.json()["count"] < counted["count"]


def test_tools_are_part_of_the_ids_as_they_are_of_the_board_s() -> None:
    of, messages = house(), [{"role": "user", "content": "Hello"}]
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    counted = post("/tokenize", of, model="sim-chat", messages=messages, tools=tools).json()
    body = {"model": "sim-chat", "messages": messages, "tools": tools}
    send(of, "POST", "/v1/chat/completions", json=body)
    (_, request) = of.boards.opened[0]
    assert tuple(counted["tokens"]) == request.prompt_ids
    refused = post("/tokenize", of, messages=messages, tools=[{"type": "function"}])
    assert refused.json()["error"]["param"] == "tools[0].function"


def test_tokens_are_spelled_where_that_is_asked_for() -> None:
    answer = post("/tokenize", model="sim-chat", prompt="<|im_start|>cat", return_token_strs=True)
    strings = answer.json()["token_strs"]
    assert strings[0] == "<|im_start|>"
    assert "".join(strings[1:]) == "cat"
    assert len(strings) == answer.json()["count"]


def test_control_tokens_are_written_out_in_the_text_of_ids() -> None:
    ids = post("/tokenize", model="sim-chat", prompt="<|im_start|>cat").json()["tokens"]
    assert post("/detokenize", model="sim-chat", tokens=ids).json() == {"prompt": "<|im_start|>cat"}


def test_what_a_tokenizer_adds_to_a_text_can_be_left_out(tmp_path: Path) -> None:
    of = folder_house(tmp_path, bos=True)
    whole = post("/tokenize", of, prompt="cat").json()["tokens"]
    bare = post("/tokenize", of, prompt="cat", add_special_tokens=False).json()["tokens"]
    assert whole == [0, *bare]


def test_the_only_model_need_not_be_named_and_an_empty_text_has_no_tokens() -> None:
    assert post("/tokenize", prompt="").json()["count"] == 0
    assert post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_a_long_text_is_counted_beyond_the_context() -> None:
    answer = post("/tokenize", prompt="word " * 20000).json()
    assert answer["count"] >= 20000 > answer["max_model_len"]


def test_what_is_far_longer_than_the_context_is_refused() -> None:
    refused = post("/tokenize", prompt="word " * 30_000)
    assert refused.status_code == 400
    assert "131072" in refused.json()["error"]["message"]
    assert post("/detokenize", tokens=[5] * 131_073).status_code == 400


def test_a_key_s_limits_hold_for_counting_too(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret requests_per_minute=1\n", encoding="utf-8")
    of = House(FakeBoards.answering("a"), RouterConfig(api_keys_file=tmp_path / "keys"))
    asks = {"json": {"prompt": "x"}, "headers": {"authorization": "Bearer secret"}}
    statuses = [send(of, "POST", "/tokenize", **asks).status_code for _ in range(2)]
    assert statuses == [200, 429]


def many(item: Any) -> list[Any]:
    return [item] * 4097


USER = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        pytest.param(CHAT, {"messages": many(USER)}, "messages", id="chat"),
        pytest.param(
            CHAT,
            {"messages": [{"role": "user", "content": many(PART)}]},
            "messages[0].content",
            id="parts",
        ),
        pytest.param("/tokenize", {"messages": many(USER)}, "messages", id="counting"),
        pytest.param(
            "/v1/messages", {"messages": many(USER), "max_tokens": 1}, "messages", id="Anthropic"
        ),
        pytest.param("/api/chat", {"messages": many(USER)}, "messages", id="Ollama"),
        pytest.param("/v1/responses", {"input": many(USER)}, "input", id="responses"),
    ],
)
def test_the_number_of_messages_is_bounded(path: str, body: dict[str, Any], param: str) -> None:
    refused = send(house(), "POST", path, json={"model": "sim-chat", **body})
    assert refused.status_code == 400
    error = refused.json()
    assert param in str(error)
    assert "4096" in str(error)


def test_few_long_bodies_are_worked_on_at_once_and_the_loop_is_free() -> None:
    gate, running, most = threading.Event(), 0, 0
    lock, both = threading.Lock(), threading.Event()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                both.set()
        assert gate.wait(30)
        with lock:
            running -= 1

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(off_loop(10**6, work)) for _ in range(6)]
        assert await asyncio.to_thread(both.wait, 30)
        # Counting has a thread of its own, and is not behind them.
        assert await asyncio.wait_for(off_loop(10**6, lambda: 5, counts=True), 30) == 5
        left = tasks.pop()
        left.cancel()
        gate.set()
        await asyncio.gather(*tasks)
        assert most == 2

    asyncio.run(main())


MEMORY = """
import asyncio, sys
from pathlib import Path
from rkserve.router.off_loop import off_loop
from rkserve.api.prompting.tokenizer import Tokenizer

def rss_mb():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6

async def main():
    tokenizer = Tokenizer(Path(sys.argv[1]))
    text = "The quick brown fox jumps over it. " * 15_000
    tokenizer.encode(text[:1000], add_special_tokens=False)
    before = rss_mb()
    work = lambda: len(tokenizer.encode(text, add_special_tokens=False))
    await asyncio.gather(*(off_loop(len(text), work) for _ in range(4)))
    print(rss_mb() - before)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and asks glibc")
def test_the_memory_of_long_texts_is_given_back() -> None:
    # Without that the process keeps more than 100 MB.
    command = [sys.executable, "-c", MEMORY, str(FOLDER / "tokenizer.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 50


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        pytest.param("/tokenize", {"model": "m?", "prompt": "x"}, 404, "model", id="unknown model"),
        pytest.param("/tokenize", {"model": 3, "prompt": "x"}, 400, "model", id="no name"),
        pytest.param("/tokenize", {}, 400, "prompt", id="nothing to tokenize"),
        pytest.param("/tokenize", {"prompt": ["x"]}, 400, "prompt", id="a list"),
        pytest.param("/tokenize", {"prompt": "x", "messages": []}, 400, "messages", id="both"),
        pytest.param("/tokenize", {"messages": []}, 400, "messages", id="no message"),
        pytest.param(
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            400,
            "add_special_tokens",
            id="special tokens around a template's own",
        ),
        pytest.param(
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"},
            400,
            "chat_template",
            id="a template",
        ),
        pytest.param(
            "/tokenize", {"prompt": "x", "return_token_strs": 1}, 400, "return_token_strs"
        ),
        pytest.param("/detokenize", {}, 400, "tokens", id="no ids"),
        pytest.param("/detokenize", {"tokens": "x"}, 400, "tokens", id="a text"),
        pytest.param("/detokenize", {"tokens": [1, True]}, 400, "tokens[1]", id="a boolean"),
        pytest.param("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]", id="negative"),
        pytest.param("/detokenize", {"tokens": [10**30]}, 400, "tokens[0]", id="a huge id"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = post(path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/tokenize", {"prompt": "x"}, id="a text"),
        pytest.param("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, id="a chat"),
        pytest.param("/detokenize", {"tokens": [1]}, id="ids"),
    ],
)
def test_a_model_without_a_tokenizer_has_none_to_offer(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    answer = post(path, folder_house(tmp_path, tokenizer=False), **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_parameter"


def test_only_clients_with_a_key_may_ask_where_there_are_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-key-of-a-client\n", encoding="utf-8")
    of = house()
    of = replace(of, config=RouterConfig(api_keys_file=keys))
    assert post("/tokenize", of, prompt="x").status_code == 401
    assert post("/detokenize", of, tokens=[1]).status_code == 401


# --- the tokenizer itself ---


@pytest.mark.parametrize("path", ["/tokenizer_info", "/v1/tokenizer_info"])
def test_the_tokenizer_is_described_as_remote_tokenizers_read_it(path: str) -> None:
    """As lm-evaluation-harness does: it names no model, and makes prompts by the template."""
    of = house()
    info = send(of, "GET", path).json()
    assert info == send(of, "GET", f"{path}?model=sim-chat").json()
    assert (info["eos_token"], info["pad_token"], info["bos_token"]) == (
        "<|im_end|>",
        "<|pad|>",
        None,
    )
    assert (info["model_max_length"], info["tokenizer_class"]) == (4096, "PreTrainedTokenizerFast")
    (eos,) = post("/tokenize", of, prompt=info["eos_token"], add_special_tokens=False).json()[
        "tokens"
    ]
    assert eos in model().folder.settings.eos_token_ids
    template = jinja2.Environment(autoescape=False).from_string(info["chat_template"])
    messages = chat()["messages"]
    prompt = template.render(messages=messages, add_generation_prompt=True)
    ours = post("/tokenize", of, messages=messages).json()["tokens"]
    assert post("/tokenize", of, prompt=prompt, add_special_tokens=False).json()["tokens"] == ours


def test_a_template_of_rkserve_s_own_is_described_too(tmp_path: Path) -> None:
    of = folder_house(tmp_path, settings="context_length: 64\nchat_template: plain\n")
    assert send(of, "GET", "/tokenizer_info").json()["chat_template"]


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        pytest.param("model=nobody", 404, "model", id="an unknown model"),
        pytest.param("modell=sim-chat", 400, "modell", id="a mistyped key"),
    ],
)
def test_a_tokenizer_that_there_is_not_is_told(query: str, status: int, param: str) -> None:
    response = send(house(), "GET", f"/tokenizer_info?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_text_mode_has_no_tokenizer_to_describe(tmp_path: Path) -> None:
    response = send(folder_house(tmp_path, tokenizer=False), "GET", "/tokenizer_info")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_parameter"


def test_a_model_for_vectors_beside_it_needs_no_naming(tmp_path: Path) -> None:
    """A call that names no model means the one that generates text."""
    of = ReferenceHouse(tmp_path)
    info = run_loop(of("GET", "/tokenizer_info")).json()
    assert info["chat_template"]
    told = run_loop(of("POST", "/tokenize", json={"prompt": "Hello"}))
    assert (told.status_code, told.json()["max_model_len"]) == (200, info["model_max_length"])
