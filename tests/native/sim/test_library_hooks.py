"""What the caller can put in the simulated runtime's place: its tokenizer and its embedding layer
(1.3.0), and the encoder's output that a decoder attends to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rkserve.native.sim import models
from tests.support.sim.sim_driver import Event, chat, ids_of, violations
from tests.support.sim.sim_features import FeatureSim, Rows, opened

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")


@pytest.fixture
def sim(release: str) -> Iterator[FeatureSim]:
    sim = opened(release)
    yield sim
    assert sim.destroy() == 0


# --- the caller's tokenizer and embedding layer


def by_caller(text: bytes, ids: Any, room: int) -> int:
    found = ids_of(text.decode())
    ids[0 : len(found)] = found
    return len(found)


def test_the_callers_tokenizer_reads_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = opened("1.3.0")
    answer = plain.run("Count to 5").ids
    monkeypatch.setenv("RKSIM_NO_TOKENIZER", "1")
    sim = opened("1.3.0", tokenize=by_caller)
    run = sim.run("Count to 5")
    assert run.ids == answer
    assert {event.text for event in run.tokens} == {b""}
    ((kind, text),) = sim.hooked
    assert kind == "tokenize"
    assert text.endswith(b"<|im_start|>user\nCount to 5<|im_end|>\n<|im_start|>assistant\n")
    assert sim.run(chat("Count to 5")).ids == answer  # TOKEN input needs none
    assert len(sim.hooked) == 1
    assert sim.destroy() == plain.destroy() == 0


def test_without_any_tokenizer_a_prompt_is_refused_and_ids_are_not(
    release: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RKSIM_NO_TOKENIZER", "1")
    sim = opened(release)
    assert sim.run("Count to 5").code == -1
    line = (
        "E rkllm: Tokenizer is unavailable: model has no internal tokenizer and no external "
        "tokenizer_callback provided."
    )
    assert line in capfd.readouterr().err
    assert sim.run(chat("Count to 5")).code == 0
    assert sim.destroy() == 0


def filled(count: int, token: int) -> Any:
    def tokenize(_text: bytes, ids: Any, room: int) -> int:
        for at in range(min(max(count, 0), room)):
            ids[at] = token
        return count

    return tokenize


@pytest.mark.parametrize(
    ("count", "token", "line"),
    [
        pytest.param(-1, 1, "tokenizer_callback returned -1", id="failed"),
        pytest.param(-500, 1, "tokenizer_callback returned -500", id="wants more room"),
        pytest.param(
            4097, 1, "tokenizer_callback returned 4097, with room for 4096", id="overflow"
        ),
        pytest.param(2**31 - 1, 1, "with room for 4096", id="absurd"),
        pytest.param(3, -1, "gave the invalid token id -1", id="negative id"),
        pytest.param(3, 1 << 20, "gave the invalid token id 1048576", id="id too large"),
        pytest.param(0, 1, "the prompt is empty", id="nothing"),
    ],
)
def test_what_a_tokenizer_returns_is_checked(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    count: int,
    token: int,
    line: str,
) -> None:
    monkeypatch.setenv("RKSIM_NO_TOKENIZER", "1")
    sim = opened("1.3.0", tokenize=filled(count, token))
    assert sim.run("x").code == -1
    assert line in capfd.readouterr().err
    assert sim.destroy() == 0


def own_rows(ids: list[int], rows: Any, _room: int) -> int:
    rows[:] = models.embeddings(ids)
    return 0


def test_the_callers_embedding_layer_is_asked_for_every_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = opened("1.3.0")
    prompt = chat("Count to 5")
    answer = plain.run(prompt).ids
    monkeypatch.setenv("RKSIM_NO_EMBEDDING", "1")
    sim = opened("1.3.0", embed=own_rows)
    assert sim.run(prompt).ids == answer
    asked = [ids for kind, ids in sim.hooked if kind == "embed"]
    assert asked == [prompt, *([token] for token in answer[:-1])]
    sim.hooked.clear()
    rows = Rows(models.embeddings(prompt))
    assert sim.run(rows).ids == answer
    assert [ids for _, ids in sim.hooked] == [[token] for token in answer[:-1]]
    assert sim.destroy() == plain.destroy() == 0


def test_other_embeddings_make_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(ids: list[int], rows: Any, _room: int) -> int:
        rows[:] = models.embeddings(token + 1 for token in ids)
        return 0

    monkeypatch.setenv("RKSIM_NO_EMBEDDING", "1")
    own, other = opened("1.3.0", embed=own_rows), opened("1.3.0", embed=shifted)
    questions = [chat(f"Tell me about number {at}") for at in range(5)]
    assert [own.run(each).reply for each in questions] != [
        other.run(each).reply for each in questions
    ]
    assert own.destroy() == other.destroy() == 0


def test_without_any_embedding_layer_the_init_fails(
    release: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RKSIM_NO_EMBEDDING", "1")
    assert FeatureSim(release).code == -1
    line = "E rkllm: Model has no embedding layer and no embed callback provided."
    assert line in capfd.readouterr().err


def test_an_embedding_layer_that_fails_in_the_prompt_refuses_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RKSIM_NO_EMBEDDING", "1")
    sim = opened("1.3.0", embed=lambda *_: 7)
    run = sim.run(chat("Count to 5"))
    assert (run.code, run.events, sim.kv) == (-1, [], 0)
    assert "E rkllm: embed_callback returned 7 for" in capfd.readouterr().err
    assert sim.destroy() == 0


def test_an_embedding_layer_that_fails_later_is_an_error_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def embed(ids: list[int], rows: Any, room: int) -> int:
        calls.append(len(ids))
        return -1 if len(calls) == 4 else own_rows(ids, rows, room)

    monkeypatch.setenv("RKSIM_NO_EMBEDDING", "1")
    sim = opened("1.3.0", embed=embed)
    run = sim.run(chat("Count to 5"))
    assert run.code == -1
    assert [event.state for event in run.events] == [0, 0, 0, 3]
    assert sim.run(chat("Count to 3")).code == 0
    assert sim.destroy() == 0


# --- cross attention


def test_answers_hang_on_the_encoders_output(release: str) -> None:
    sim = opened(release, extend_use_cross_attn=1)
    questions = [chat(f"Tell me about number {at}") for at in range(5)]

    def answers() -> list[str]:
        return [sim.run(question).reply for question in questions]

    keys = [float(at) for at in range(3 * models.CROSS_DIM)]
    plain = answers()
    assert sim.set_cross_attention(keys, 3) == 0
    first = answers()
    assert answers() == first != plain
    assert sim.set_cross_attention([*keys[:-1], 0.0], 3) == 0
    assert answers() != first
    assert sim.set_cross_attention(keys, 3) == 0
    assert answers() == first
    assert sim.run(chat("Count to 3")).reply == "1, 2, 3."
    assert sim.destroy() == 0


def test_a_conversation_hears_a_new_encoder_output(release: str) -> None:
    keys = [1.0] * models.CROSS_DIM
    told = []
    for change in (False, True):
        sim = opened(release, extend_use_cross_attn=1)
        sim.run("Hello", keep_history=1)
        if change:
            assert sim.set_cross_attention(keys, 1) == 0
        told.append([sim.run(f"About {at}", keep_history=1).reply for at in range(4)])
        assert sim.destroy() == 0
    assert told[0] != told[1]


def test_without_use_cross_attn_it_is_refused(
    sim: FeatureSim, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sim.set_cross_attention([1.0] * models.CROSS_DIM, 1) == -1
    assert "E rkllm: use_cross_attn was not set at init" in capfd.readouterr().err


def test_arrays_that_are_missing_are_refused(release: str) -> None:
    sim = opened(release, extend_use_cross_attn=1)
    assert sim.lib.rkllm_set_cross_attn_params(sim.handle, sim.ffi.NULL) == -1
    floats = sim.ffi.new("float[]", models.CROSS_DIM)
    positions = sim.ffi.new("int32_t[]", 1)
    whole = [floats, floats, floats, positions, 1]
    for at, missing in enumerate((sim.ffi.NULL,) * 4 + (0, -1)):
        fields = [*whole[: min(at, 4)], missing, *whole[min(at, 4) + 1 :]]
        param = sim.ffi.new("RKLLMCrossAttnParam *", fields)
        assert sim.lib.rkllm_set_cross_attn_params(sim.handle, param) == -1
    assert sim.destroy() == 0


def test_while_running_or_paused_it_is_left_alone(
    release: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sim = opened(release, extend_use_cross_attn=1)
    keys = [1.0] * models.CROSS_DIM
    codes = []

    def meddle(_event: Event, _result: Any) -> int:
        codes.append(sim.set_cross_attention(keys, 1))
        return 1

    sim.run(chat("Count to 9"), meddle)
    codes.append(sim.set_cross_attention(keys, 1))
    assert codes == [-1, -1]
    assert violations(capfd) == ["cross_attn_while_running", "cross_attn_while_paused"]
    assert sim.destroy() == 0
