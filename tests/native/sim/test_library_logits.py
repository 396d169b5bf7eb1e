"""The simulated runtime looked into: logits and hidden states, and the ways not to ask for them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rkserve.native.binding.releases import RELEASES
from tests.support.sim.releases import EVERY
from tests.support.sim.sim_driver import (
    FINISH,
    NORMAL,
    Event,
    Run,
    Sim,
    chat,
    child,
    ids_of,
    violations,
    wait_idle,
)

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")

HIDDEN, LOGITS = 1, 2
Rows = list[list[float]]


class Look:
    """Copies the rows while the callback has them, as a binding must."""

    def __init__(self, sim: Sim, mode: int, code: int = 0) -> None:
        self.sim, self.mode, self.code = sim, mode, code
        self.rows: list[Rows] = []
        self.at: list[Any] = []

    def __call__(self, event: Event, result: Any) -> int:
        if event.state != NORMAL:
            return 0
        layer = result.logits if self.mode == LOGITS else result.last_hidden_layer
        data = layer.logits if self.mode == LOGITS else layer.hidden_states
        width = layer.vocab_size if self.mode == LOGITS else layer.embd_size
        self.at.append(data)
        flat = self.sim.ffi.unpack(data, width * layer.num_tokens) if data else []
        self.rows.append([flat[at : at + width] for at in range(0, len(flat), width or 1)])
        return self.code


def look(sim: Sim, given: str | list[int], mode: int, **infer: Any) -> tuple[Run, Rows]:
    seen = Look(sim, mode)
    run = sim.run(given, seen, mode=mode, **infer)
    (rows,) = seen.rows or [[]]
    return run, rows


def vocabulary(sim: Sim) -> int:
    _, rows = look(sim, ids_of("x"), LOGITS)
    return len(rows[0])


def argmax(row: list[float]) -> int:
    return max(range(len(row)), key=row.__getitem__)


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


# --- both


@pytest.mark.parametrize("mode", [HIDDEN, LOGITS])
def test_one_callback_brings_a_row_for_every_token_and_nothing_follows(sim: Sim, mode: int) -> None:
    prompt = chat("Count to 3")
    run, rows = look(sim, prompt, mode)
    assert run.code == 0
    (event,) = run.events
    assert (event.state, event.text) == (NORMAL, None)
    assert event.kv == len(prompt) == len(rows)
    assert sim.kv == 0
    assert {len(row) for row in rows} == {64 if mode == HIDDEN else vocabulary(sim)}
    assert look(sim, prompt, mode)[1] == rows


@pytest.mark.parametrize("mode", [HIDDEN, LOGITS])
@pytest.mark.parametrize(
    ("env", "states"),
    [
        pytest.param({"RKSIM_HIDDEN_EMPTY_FIRST": "1"}, [NORMAL, NORMAL], id="one without data"),
        pytest.param({"RKSIM_HIDDEN_FINISH": "1"}, [NORMAL, FINISH], id="FINISH too"),
    ],
)
def test_other_orders_of_callbacks_can_be_switched_on(
    release: str,
    mode: int,
    env: dict[str, str],
    states: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    sim = Sim(release)
    seen = Look(sim, mode)
    run = sim.run(chat("Hi"), seen, mode=mode)
    assert [event.state for event in run.events] == states
    assert [bool(rows) for rows in seen.rows] == ([True] if FINISH in states else [False, True])
    if FINISH in states:
        assert run.finish.perf[1] == len(chat("Hi"))
    assert sim.destroy() == 0


@pytest.mark.parametrize("mode", [HIDDEN, LOGITS])
def test_rows_are_gone_when_the_callback_has_returned(sim: Sim, mode: int) -> None:
    seen = Look(sim, mode)
    sim.run(chat("Hi"), seen, mode=mode)
    (data,) = seen.at
    assert all(math.isfinite(value) for row in seen.rows[0] for value in row)
    assert bytes(sim.ffi.buffer(data, 256)) == b"\xdd" * 256


@pytest.mark.parametrize("mode", [HIDDEN, LOGITS])
def test_return_2_gives_the_rows_back_on_1_3_and_is_misuse_before(
    sim: Sim, mode: int, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = Look(sim, mode, code=2)
    assert sim.run(chat("Hi"), seen, mode=mode).code == 0
    assert seen.rows[0]
    expected = [] if sim.release == "1.3.0" else ["return_2_before_1_3"]
    assert violations(capfd) == expected


@pytest.mark.parametrize("mode", [HIDDEN, LOGITS])
def test_a_look_cannot_be_paused(sim: Sim, mode: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert sim.run(chat("Hi"), lambda *_: 1, mode=mode).code == 0
    assert violations(capfd) == ["pause_of_hidden"]
    assert sim.run(chat("Count to 3")).reply.startswith("1, 2, 3.")


@pytest.mark.parametrize("mode", [HIDDEN, LOGITS])
def test_a_paused_handle_refuses_to_be_looked_into_and_goes_on(
    sim: Sim, mode: int, capfd: pytest.CaptureFixture[str]
) -> None:
    prompt = chat("Count to 9")
    whole = sim.run(prompt)
    first = sim.run(prompt, lambda *_: 1)
    held = sim.kv
    run = sim.run(chat("Hi"), mode=mode)
    assert (run.code, run.events) == (-1, [])
    assert violations(capfd) == ["hidden_while_paused"]
    assert sim.kv == held
    assert sim.run([first.ids[0]]).ids == whole.ids[1:]


def test_an_unknown_mode_is_refused(sim: Sim, capfd: pytest.CaptureFixture[str]) -> None:
    run_input, params = sim.prepare("Hi")
    sim.ffi.cast("int *", params)[0] = 9
    assert sim.lib.rkllm_run(sim.handle, run_input, params, sim.ffi.NULL) == -1
    assert "E rkllm: unknown infer mode 9" in capfd.readouterr().err


@pytest.mark.parametrize("mode", [HIDDEN, LOGITS])
def test_an_asynchronous_look_brings_the_same(sim: Sim, mode: int) -> None:
    _, rows = look(sim, chat("Hi"), mode)
    seen = Look(sim, mode)
    run_input, params = sim.prepare(chat("Hi"), mode=mode)
    sim.answer = seen
    assert sim.lib.rkllm_run_async(sim.handle, run_input, params, sim.ffi.NULL) == 0
    wait_idle(sim)
    assert seen.rows == [rows]


def test_a_prompt_too_long_brings_nothing(release: str) -> None:
    sim = Sim(release, max_context_len=64)
    run = sim.run([ids_of("word")[0]] * 65, mode=LOGITS)
    assert (run.code, run.events) == (-1, [])
    assert sim.destroy() == 0


# --- logits


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(chat("Tell me about rain"), id="a chat"),
        pytest.param(chat("Count to 4", "1, 2, 3, 4.", "Write 12 tokens"), id="a conversation"),
        pytest.param(ids_of("Count to 5\n1, 2"), id="a line that asks"),
        pytest.param(ids_of("It was a dark night"), id="raw text"),
    ],
)
def test_every_row_is_what_greedy_would_say_there(sim: Sim, given: list[int]) -> None:
    _, rows = look(sim, given, LOGITS)
    assert len(rows) == len(given)
    for at in range(0, len(given), 1 + len(given) // 12):
        assert argmax(rows[at]) == sim.run(given[: at + 1]).ids[0]
    assert argmax(rows[-1]) == sim.run(given).ids[0]


def test_a_whole_answer_can_be_made_of_last_rows(sim: Sim) -> None:
    prompt = chat("Tell me about the sea")
    whole = sim.run(prompt).ids
    said: list[int] = []
    while len(said) < len(whole):
        _, rows = look(sim, prompt + said, LOGITS)
        said.append(argmax(rows[-1]))
    assert said == whole


def test_where_sampling_may_choose_the_logits_show_the_choices(release: str) -> None:
    sim = Sim(release, top_k=40, top_p=1.0, temperature=2.0)
    prompt = chat("Tell me about the sea")
    _, rows = look(sim, prompt, LOGITS)
    meant = {at for at, logit in enumerate(rows[-1]) if logit > 0}
    heard = {sim.run(prompt).ids[0] for _ in range(60)}
    assert 1 < len(meant) <= 4
    assert heard == meant
    floor = [logit for at, logit in enumerate(rows[-1]) if at not in meant]
    assert -20.001 < min(floor) < max(floor) <= -16
    assert len(set(floor)) > len(floor) / 2
    assert sim.destroy() == 0


def test_without_eos_the_logits_have_no_end() -> None:
    prompt = chat("Count to 2", "1, 2.")[:-5]
    while prompt[-1] != ids_of(".")[0]:
        prompt.pop()
    ends = {}
    for ignore in (False, True):
        sim = Sim("1.3.0", ignore_eos_token=ignore)
        _, rows = look(sim, prompt, LOGITS)
        ends[ignore] = argmax(rows[-1])
        assert ends[ignore] == sim.run(prompt, max_new_tokens=1).ids[0]
        assert sim.destroy() == 0
    assert ends[False] == ids_of("<|im_end|>")[0]
    assert ends[True] != ends[False]


@pytest.mark.parametrize("release", EVERY)
def test_logits_can_be_switched_to_generate_an_answer_after_their_rows(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_LOGITS_GENERATE", "1")
    sim = Sim(release)
    prompt = chat("Count to 3")
    answer = sim.run(prompt).ids
    seen = Look(sim, LOGITS)
    sim.run(prompt, seen, mode=LOGITS)
    assert [len(rows) for rows in seen.rows] == [len(prompt)] + [1] * (len(answer) - 1)
    assert [argmax(rows[-1]) for rows in seen.rows] == answer
    hidden = Look(sim, HIDDEN)
    sim.run(prompt, hidden, mode=HIDDEN)
    assert len(hidden.rows) == 1
    aborted = Look(sim, LOGITS)

    def abort(event: Event, result: Any) -> int:
        sim.lib.rkllm_abort(sim.handle)
        return aborted(event, result)

    assert sim.run(prompt, abort, mode=LOGITS).code == 0
    assert len(aborted.rows) == 1
    if RELEASES[release].per_run_sampling:
        limited = Look(sim, LOGITS)
        sim.run(prompt, limited, mode=LOGITS, max_new_tokens=1, keep_history=1)
        assert len(limited.rows) == 1
        assert sim.kv == len(prompt)
        assert sim.destroy() == 0
        monkeypatch.setenv("RKSIM_LAST_TOKEN_IN_KV", "1")
        sim = Sim(release)
        sim.run(prompt, mode=LOGITS, max_new_tokens=1, keep_history=1)
        assert sim.kv == len(prompt) + 1  # the token of the limit is in the context
    assert sim.destroy() == 0


def test_a_conversation_can_be_looked_into_on_1_3() -> None:
    sim = Sim("1.3.0")
    first, second = chat("Count to 3"), ids_of("1, 2")
    _, whole = look(sim, first + second, LOGITS)
    look(sim, first, LOGITS, keep_history=1)
    assert sim.kv == len(first)
    run, rows = look(sim, second, LOGITS, keep_history=1)
    assert run.code == 0
    assert rows == whole[-len(second) :]
    assert sim.destroy() == 0


def test_logits_of_a_token_conversation_are_refused_before_1_3(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sim = Sim("1.2.3")
    run = sim.run(chat("Hi"), mode=LOGITS, keep_history=1)
    assert (run.code, run.events) == (-1, [])
    assert violations(capfd) == ["logits_with_history"]
    assert sim.run("Hi", mode=LOGITS, keep_history=1).code == 0  # a PROMPT is not hit
    assert sim.destroy() == 0


# --- hidden states


def test_hidden_states_have_length_one_and_follow_the_whole_context(sim: Sim) -> None:
    _, rows = look(sim, chat("Tell me about rain"), HIDDEN)
    assert [cosine(row, row) for row in rows] == pytest.approx([1.0] * len(rows), abs=1e-5)
    _, other = look(sim, chat("Tell me about rain", system="You are Ada."), HIDDEN)
    assert rows[-1] != other[-1]
    assert len({tuple(row) for row in rows}) == len(rows)


def test_texts_with_words_in_common_are_nearer_than_others(sim: Sim) -> None:
    def vector(text: str) -> list[float]:
        return look(sim, ids_of(text), HIDDEN)[1][-1]

    cats = vector("The cat sat on the warm mat")
    more_cats = vector("A warm cat on the mat")
    trains = vector("Trains leave every hour for Berlin")
    assert cosine(cats, more_cats) > 0.5
    assert cosine(cats, trains) < 0.3
    assert vector("cat") != vector("Cat")
    assert cosine(vector("cat"), vector("Cat")) > 0.8


def test_hidden_states_of_a_second_turn_hear_the_first(sim: Sim) -> None:
    first, second = ids_of("The cat sat"), ids_of(" on the mat")
    _, whole = look(sim, first + second, HIDDEN)
    look(sim, first, HIDDEN, keep_history=1)
    _, rows = look(sim, second, HIDDEN, keep_history=1)
    assert sim.kv == len(first) + len(second)
    assert rows == whole[-len(second) :]


# --- strict


@pytest.mark.parametrize(
    ("release", "body", "lines"),
    [
        pytest.param(
            "1.2.3",
            "sim.run(chat('Hi'), mode=2, keep_history=1)",
            ["violation: logits_with_history", "GGML_ASSERT(mask->ne[0]==a->ne[0]) failed"],
            id="logits of a conversation",
        ),
        pytest.param(
            "1.3.0",
            "sim.run(chat('Hi'), lambda *_: 1)\nsim.run(chat('Hi'), mode=1)",
            ["violation: hidden_while_paused"],
            id="a look into a paused handle",
        ),
        pytest.param(
            "1.3.0",
            "sim.run(chat('Hi'), lambda *_: 1, mode=1)",
            ["violation: pause_of_hidden"],
            id="a pause of a look",
        ),
        pytest.param(
            "1.2.3",
            "sim.run(chat('Hi'), lambda *_: 2, mode=2)",
            ["violation: return_2_before_1_3"],
            id="return 2 before 1.3.0",
        ),
    ],
)
def test_strict_ends_the_process_of_who_looks_wrongly(
    release: str, body: str, lines: list[str]
) -> None:
    code, printed = child(f"sim = Sim('{release}')\n{body}", {"RKSIM_STRICT": "1"})
    assert code == -6, printed
    assert [line for line in lines if line not in printed] == []
