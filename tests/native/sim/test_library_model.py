"""The simulated language model: what it says, how it is sampled, and the folder it comes from."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scripts import make_sim_chat
from tests.support.paths import PROJECT
from tests.support.sim.sim_driver import FINISH, MODEL, Sim, chat, ids_of, tokenizer

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")

# --- the language model


@pytest.mark.parametrize(
    ("question", "reply"),
    [
        pytest.param("Repeat after me:  to be, or not ", "to be, or not", id="repeat"),
        pytest.param("Repeat after me: a\n  b 你好 🙂", "a\n  b 你好 🙂", id="repeat lines"),
        pytest.param("Please count to 4!", "1, 2, 3, 4.", id="count"),
        pytest.param("Who are you?", "I am a helpful assistant.", id="who"),
    ],
)
def test_exact_questions_get_exact_answers(release: str, question: str, reply: str) -> None:
    sim = Sim(release, skip_special_token=True)
    assert sim.run(chat(question)).reply == reply
    assert sim.run(question).reply == reply
    assert sim.destroy() == 0


@pytest.mark.parametrize("wanted", [1, 17, 64, 600])
def test_write_n_tokens_writes_exactly_n(sim: Sim, wanted: int) -> None:
    run = sim.run(chat(f"Write {wanted} tokens"))
    assert len(run.tokens) == wanted + 1
    assert run.tokens[-1].token_id == ids_of("<|im_end|>")[0]


def test_a_name_in_the_system_turn_is_honoured(sim: Sim) -> None:
    assert sim.run(chat("who are you", system="You are Ada, a poet.")).reply.startswith("I am Ada.")


def test_an_answer_in_json_is_json(release: str) -> None:
    sim = Sim(release, skip_special_token=True)
    for question in ('Say "hi" \\ now, answer in JSON', "in JSON", "é" * 100 + " in json"):
        assert json.loads(sim.run(chat(question)).reply)["simulated"] is True
    assert sim.destroy() == 0


def test_everything_in_the_context_can_change_the_answer(sim: Sim) -> None:
    replies = {
        sim.run(chat(*turns, system=system)).reply
        for system in ("You are A.", "You are B.")
        for turns in (["Why?"], ["Why"], ["Hi", "Yes.", "Why?"], ["Hi", "No.", "Why?"])
    }
    assert len(replies) == 8


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(chat("Tell me about soup"), id="chat"),
        pytest.param(chat("Greet me in many languages"), id="exact"),
        pytest.param(ids_of("Once upon a time"), id="raw"),
        pytest.param(ids_of("First line.\nWrite 30 tokens"), id="raw request"),
    ],
)
def test_a_generation_continues_from_any_token_as_if_never_stopped(
    sim: Sim, prompt: list[int]
) -> None:
    whole = sim.run(prompt).ids
    assert len(whole) > 10
    for cut in range(len(whole)):
        assert sim.run(prompt + whole[:cut]).ids == whole[cut:]


def test_a_forced_token_changes_what_follows(sim: Sim) -> None:
    prompt = chat("Write 40 tokens")
    whole = sim.run(prompt).ids
    foreign = ids_of(" xyz")
    edited = sim.run(prompt + whole[:5] + foreign).ids
    assert edited != whole[5:]
    assert edited == sim.run(prompt + whole[:5] + foreign).ids
    assert sim.run(prompt + whole[:6] + foreign).ids != edited


def test_raw_text_is_continued_and_ends(sim: Sim) -> None:
    run = sim.run(ids_of("The board"))
    assert run.reply.endswith(".<|im_end|>")
    assert sim.run(ids_of("Repeat after me: one two")).reply == "\none two<|im_end|>"
    assert sim.run(ids_of("Say it.\nCount to 3\n")).reply == "1, 2, 3.<|im_end|>"


# --- limits and sampling


def test_a_budget_ends_the_run_with_finish(release: str) -> None:
    sim = Sim(release, max_new_tokens=7)
    run = sim.run(chat("Write 50 tokens"))
    assert len(run.tokens) == 7
    assert run.events[-1].state == FINISH
    assert sim.destroy() == 0


def test_1_3_takes_budget_and_sampling_for_each_run() -> None:
    sim = Sim("1.3.0", max_new_tokens=9)
    assert len(sim.run(chat("Write 50 tokens"), max_new_tokens=4).tokens) == 4
    assert len(sim.run(chat("Write 50 tokens"), max_new_tokens=0).tokens) == 9
    hot = {"top_k": 40, "top_p": 1.0, "temperature": 1.5}
    greedy = sim.run(chat("Tell me"), max_new_tokens=200).ids
    replies = {
        tuple(sim.run(chat("Tell me"), max_new_tokens=200, sampling_params=hot).ids)
        for _ in range(20)
    }
    assert len(replies) > 1
    assert sim.run(chat("Tell me"), max_new_tokens=200).ids == greedy
    assert sim.destroy() == 0


@pytest.mark.parametrize(
    ("param", "varies"),
    [
        pytest.param({"top_k": 40, "temperature": 0.8}, True, id="the default sampling"),
        pytest.param({"top_k": 1, "temperature": 0.8}, False, id="top_k 1"),
        pytest.param({"top_k": 40, "temperature": 0.0}, False, id="temperature 0"),
        pytest.param({"top_k": 40, "temperature": 0.8, "top_p": 0.1}, False, id="top_p 0.1"),
    ],
)
def test_sampling_varies_only_where_it_should(
    release: str, param: dict[str, Any], varies: bool
) -> None:
    sim = Sim(release, **param)
    assert (len({sim.run(chat("Tell me more")).reply for _ in range(25)}) > 1) is varies
    exact = {sim.run(chat("Repeat after me: never vary")).reply for _ in range(10)}
    assert exact == {"never vary<|im_end|>"}
    assert sim.destroy() == 0


def test_sampled_replies_are_still_whole_sentences(release: str) -> None:
    sim = Sim(release, top_k=40, temperature=1.5, top_p=1.0, skip_special_token=True)
    bank = (PROJECT / "rkserve" / "native" / "sim" / "bank.txt").read_text().splitlines()
    for _ in range(20):
        rest = sim.run(chat("Tell me more")).reply.partition('more"')[2].lstrip(" .")
        rest = rest.removeprefix(", here is what I know.").removeprefix("for a moment.").strip()
        for sentence in sorted(bank, key=len, reverse=True):
            rest = rest.replace(sentence, "")
        assert rest.strip() == ""
    assert sim.destroy() == 0


def test_a_seed_makes_sampling_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSIM_SEED", "42")
    replies = []
    for _ in range(2):
        sim = Sim("1.3.0", top_k=40, temperature=1.5)
        replies.append([sim.run(chat("Tell me more")).reply for _ in range(6)])
        assert sim.destroy() == 0
    assert replies[0] == replies[1]


def test_eos_can_be_ignored_on_1_3() -> None:
    sim = Sim("1.3.0", ignore_eos_token=True, max_new_tokens=120)
    run = sim.run(chat("Count to 3"))
    assert len(run.tokens) == 120
    assert run.reply.startswith("1, 2, 3. ")
    assert "<|im_end|>" not in run.reply
    assert sim.destroy() == 0


# --- template, tools, thinking


def test_a_prompt_is_wrapped_by_the_models_template(sim: Sim) -> None:
    assert sim.run("Tell me about soup").ids == sim.run(chat("Tell me about soup")).ids


def test_a_conversation_of_prompts_closes_each_turn(sim: Sim) -> None:
    first = sim.run("Count to 3", keep_history=1)
    held = sim.kv
    second = sim.run("What did I say first?", keep_history=1)
    assert second.reply == 'You said first: "Count to 3"<|im_end|>'
    wanted = (
        "<|im_end|>\n<|im_start|>user\nWhat did I say first?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.finish.perf[1] == len(ids_of(wanted))
    assert held == first.finish.perf[1] + len(first.tokens) - 1


def test_another_template_replaces_the_models(sim: Sim) -> None:
    texts = [sim.ffi.new("char[]", text) for text in (b"SYS ", b"<|im_start|>user\n", b"!\n")]
    assert sim.lib.rkllm_set_chat_template(sim.handle, *texts) == 0
    prompt = ids_of("SYS <|im_start|>user\nHi!\n")
    assert sim.run("Hi", keep_history=1).finish.perf[1] == len(prompt)
    assert sim.run("Hi", keep_history=1).finish.perf[1] == len(prompt) - len(ids_of("SYS "))


def test_tools_are_called_and_their_answers_are_read(release: str) -> None:
    sim = Sim(release, skip_special_token=True)
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": {}}},
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Weather of a city",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                },
            },
        },
    ]
    texts = [
        sim.ffi.new("char[]", text)
        for text in (b"Be brief.", json.dumps(tools).encode(), b"tool_response")
    ]
    assert sim.lib.rkllm_set_function_tools(sim.handle, *texts) == 0
    reply = sim.run("What is the weather in Oslo?", keep_history=1).reply
    assert reply.startswith("<tool_call>\n")
    assert reply.endswith("\n</tool_call>")
    call = json.loads(reply.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call == {"name": "get_weather", "arguments": {"city": "Oslo", "days": 1}}
    reply = sim.run('{"celsius": 3}', role=b"tool", keep_history=1).reply
    assert reply == 'The tool answered: {"celsius": 3}'
    assert "<tool_call>" not in sim.run("Count to 3").reply
    assert sim.destroy() == 0


def test_thinking_is_a_block_before_the_answer(sim: Sim) -> None:
    reply = sim.run("Count to 3", thinking=True).reply
    thought, _, answer = reply.partition("\n</think>\n\n")
    assert thought.startswith("<think>\n")
    assert answer == "1, 2, 3.<|im_end|>"
    assert "<think>" not in sim.run("Count to 3").reply


def test_1_3_can_finish_at_the_end_of_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSIM_THINK_FINISH", "1")
    sim = Sim("1.3.0")
    reply = sim.run("Count to 3", thinking=True).reply
    assert reply.startswith("<think>\n")
    assert "</think>" not in reply
    assert sim.destroy() == 0


# --- the model folder


def test_the_model_file_holds_the_tokenizers_vocabulary() -> None:
    content = (MODEL / "model.rkllm").read_bytes()
    fields = struct.unpack_from(make_sim_chat.HEADER, content)
    count, at = fields[12], fields[13]
    assert fields[0] == b"RKSIMLLM"
    assert count == tokenizer().get_vocab_size()
    wanted = make_sim_chat.piece_bytes(tokenizer())
    for token_id in range(count):
        offset, length, _flags = struct.unpack_from("<IHH", content, at + 8 * token_id)
        assert content[offset : offset + length] == wanted[token_id]


WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
CALL = {"function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}


@pytest.mark.parametrize(
    ("messages", "extra", "wanted"),
    [
        pytest.param(
            [("user", "Hi")], {},
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            id="one turn",
        ),
        pytest.param(
            [("system", "Be."), ("user", "A"), ("assistant", "B"), ("user", "C")], {},
            "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nA<|im_end|>\n"
            "<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n"
            "<|im_start|>assistant\n",
            id="a conversation",
        ),
        pytest.param(
            [("system", "Be."), ("user", "A")], {"enable_thinking": True},
            "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nA /think<|im_end|>\n"
            "<|im_start|>assistant\n",
            id="thinking",
        ),
        pytest.param(
            [("system", "Be."), ("assistant", None), ("tool", "3"), ("tool", "4")], {},
            "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
            '{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n",
            id="a tool's answers",
        ),
    ],
)  # fmt: skip
def test_the_chat_template_is_chatml(
    messages: list[tuple[str, str | None]], extra: dict[str, Any], wanted: str
) -> None:
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    template = ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    turns = [
        {"role": role, "content": content, **({} if content else {"tool_calls": [CALL]})}
        for role, content in messages
    ]
    rendered = template.render(messages=turns, add_generation_prompt=True, **extra)
    assert rendered == wanted


def test_a_tool_in_the_chat_template_is_called(sim: Sim) -> None:
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    template = ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    turns = [{"role": "user", "content": "How is the weather?"}]
    text = template.render(messages=turns, tools=[WEATHER], add_generation_prompt=True)
    reply = sim.run(ids_of(text)).reply
    assert reply.startswith('<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>')


def test_making_the_model_folder_again_changes_nothing(tmp_path: Path) -> None:
    make_sim_chat.write(tmp_path / "sim-chat")
    found = [path for path in MODEL.rglob("*") if path.is_file() and path.suffix != ".lock"]
    files = sorted(str(path.relative_to(MODEL)) for path in found)
    assert files == [
        "adapters/pirate/v2/adapter.rkllm",
        *("model.rkllm", "rkserve.yaml", "tokenizer.json", "tokenizer_config.json"),
    ]
    for name in files:
        assert (tmp_path / "sim-chat" / name).read_bytes() == (MODEL / name).read_bytes()
    assert sum((MODEL / name).stat().st_size for name in files) < 1_500_000


def test_the_model_for_embeddings_is_made_by_the_same_script(tmp_path: Path) -> None:
    made, kept = tmp_path / "sim-embed", MODEL.parent / "sim-embed"
    make_sim_chat.main(["--embedding", "--out", str(made)])
    names = sorted(path.name for path in made.iterdir())
    assert names == sorted(path.name for path in kept.iterdir() if path.suffix != ".lock")
    for name in names:
        assert (made / name).read_bytes() == (kept / name).read_bytes()


def test_the_model_that_sees_is_made_by_the_same_script(tmp_path: Path) -> None:
    made, kept = tmp_path / "sim-vision", MODEL.parent / "sim-vision"
    make_sim_chat.main(["--vision", "--out", str(made)])
    names = sorted(path.name for path in made.iterdir())
    assert names == sorted(path.name for path in kept.iterdir() if path.suffix != ".lock")
    for name in names:
        assert (made / name).read_bytes() == (kept / name).read_bytes()


def test_the_library_tokenizes_as_the_tokenizer_does(sim: Sim) -> None:
    corpus = (PROJECT / "rkserve" / "native" / "sim" / "corpus.txt").read_text()
    lines = [line for line in corpus.splitlines() if line][:40]
    texts = [sim.ffi.new("char[]", b"")] * 3
    assert sim.lib.rkllm_set_chat_template(sim.handle, *texts) == 0
    for line in lines:
        assert sim.run(line).finish.perf[1] == len(ids_of(line))
        assert sim.clear() == 0
