"""Pauses that the vendor does not promise, switched on: of a conversation, of asynchronous runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.sim.sim_driver import (
    NORMAL,
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

PROMPT = chat("Write 40 tokens")


def pause_at(token: int) -> Callable[[Any, Any], int]:
    seen = iter(range(1, 1 << 30))
    return lambda event, _: int(event.state == NORMAL and next(seen) == token)


# --- a conversation


@pytest.fixture
def history_sim(release: str, monkeypatch: pytest.MonkeyPatch) -> Sim:
    monkeypatch.setenv("RKSIM_PAUSE_WITH_HISTORY", "1")
    return Sim(release)


def test_a_conversation_pauses_when_told_it_may(
    history_sim: Sim, capfd: pytest.CaptureFixture[str]
) -> None:
    sim = history_sim
    whole = sim.run(PROMPT, keep_history=1)
    first_turn = sim.kv
    assert sim.clear() == 0
    first = sim.run(PROMPT, pause_at(10), keep_history=1)
    assert [event.state for event in first.events] == [NORMAL] * 10
    assert sim.kv == len(PROMPT) + 9
    rest = sim.run([first.ids[-1]], keep_history=1)
    assert first.ids + rest.ids == whole.ids
    assert sim.kv == first_turn
    assert violations(capfd) == []
    follow = ids_of("<|im_end|>\n<|im_start|>user\nCount to 3<|im_end|>\n<|im_start|>assistant\n")
    assert sim.run(follow, keep_history=1).reply.startswith("1, 2, 3.")
    assert sim.destroy() == 0


def test_a_range_of_a_paused_conversation_stays(history_sim: Sim) -> None:
    sim = history_sim
    sim.run(PROMPT, pause_at(10), keep_history=1)
    assert sim.clear(span=(0, 4)) == 0
    assert sim.kv == len(PROMPT) + 9
    assert sim.destroy() == 0


def test_a_conversation_resumed_as_a_single_turn_is_forgotten_at_its_end(history_sim: Sim) -> None:
    sim = history_sim
    whole = sim.run(PROMPT)
    first = sim.run(PROMPT, pause_at(10), keep_history=1)
    assert first.ids + sim.run([first.ids[-1]]).ids == whole.ids
    assert sim.kv == 0
    assert sim.destroy() == 0


# --- asynchronous


@pytest.fixture
def async_sim(release: str, monkeypatch: pytest.MonkeyPatch) -> Sim:
    monkeypatch.setenv("RKSIM_ASYNC_PAUSE", "1")
    return Sim(release)


def run_async(sim: Sim, given: Any, params: Any, answer: Any = None) -> Run:
    sim.now, sim.answer = Run(), answer
    assert sim.lib.rkllm_run_async(sim.handle, given, params, sim.ffi.NULL) == 0
    wait_idle(sim)
    return sim.now


def test_an_asynchronous_run_pauses_when_told_it_may(
    async_sim: Sim, capfd: pytest.CaptureFixture[str]
) -> None:
    sim = async_sim
    whole = sim.run(PROMPT).ids
    kept = sim.prepare(PROMPT)
    first = run_async(sim, *kept, pause_at(10))
    assert [event.state for event in first.events] == [NORMAL] * 10
    assert sim.kv == len(PROMPT) + 9
    more = sim.ffi.new("RKLLMInput *", {"input_type": 1})
    (last,) = ids = sim.ffi.new("int32_t[1]", [first.ids[-1]])
    assert last == whole[9]
    more.token_input.input_ids, more.token_input.n_tokens = ids, 1
    rest = run_async(sim, more, kept[1])
    assert first.ids + rest.ids == whole
    assert violations(capfd) == []
    assert sim.destroy() == 0


def _forget_nothing(_sim: Sim, _run_input: Any, _params: Any) -> None:
    pass


def _overwrite_the_struct(_sim: Sim, run_input: Any, _params: Any) -> None:
    run_input.token_input.n_tokens = 1 << 40


def _overwrite_the_ids(_sim: Sim, run_input: Any, _params: Any) -> None:
    run_input.token_input.input_ids[0] = 0


def _overwrite_the_role(sim: Sim, run_input: Any, _params: Any) -> None:
    sim.ffi.buffer(run_input.role, 4)[:] = b"\xdd\xdd\xdd\xdd"


def _overwrite_the_params(_sim: Sim, _run_input: Any, params: Any) -> None:
    params.keep_history = -1


@pytest.mark.parametrize("way", ["run", "run_async"])
@pytest.mark.parametrize(
    ("forget", "expected"),
    [
        pytest.param(_forget_nothing, [], id="nothing"),
        pytest.param(_overwrite_the_struct, ["input_dropped_while_paused"], id="the input"),
        pytest.param(_overwrite_the_ids, ["input_dropped_while_paused"], id="its ids"),
        pytest.param(_overwrite_the_role, ["input_dropped_while_paused"], id="its role"),
        pytest.param(_overwrite_the_params, ["input_dropped_while_paused"], id="the params"),
    ],
)
def test_what_a_suspended_run_refers_to_must_stay(
    async_sim: Sim,
    forget: Callable[[Sim, Any, Any], None],
    expected: list[str],
    way: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    sim = async_sim
    kept = sim.prepare(PROMPT)
    before = (sim._role, sim._given, sim._inputs)  # the next prepare() lets go of them
    first = run_async(sim, *kept, pause_at(10))
    forget(sim, *kept)
    more = sim.prepare([first.ids[-1]])
    if way == "run":
        sim.now, sim.answer = Run(), None
        assert sim.lib.rkllm_run(sim.handle, *more, sim.ffi.NULL) == 0
    else:
        run_async(sim, *more)
    assert violations(capfd) == expected
    assert len(sim.now.ids) == 41 - 10
    del before
    # The next conversation has nothing to do with it any more.
    assert sim.run(chat("Count to 3")).reply.startswith("1, 2, 3.")
    assert violations(capfd) == []
    assert sim.destroy() == 0


def test_the_same_struct_may_bring_the_updated_content(
    async_sim: Sim, capfd: pytest.CaptureFixture[str]
) -> None:
    sim = async_sim
    whole = sim.run(PROMPT).ids
    run_input, params = sim.prepare(PROMPT)
    first = run_async(sim, run_input, params, pause_at(10))
    sim.fill(run_input, [first.ids[-1]])
    assert first.ids + run_async(sim, run_input, params).ids == whole
    assert violations(capfd) == []
    assert sim.destroy() == 0


def test_strict_dies_when_the_inputs_of_a_suspended_run_are_dropped(release: str) -> None:
    code, printed = child(
        f"sim = Sim('{release}')\n"
        "sim.answer = lambda e, _: 1\n"
        "kept = sim.prepare(chat('Write 40 tokens'))\n"
        "sim.lib.rkllm_run_async(sim.handle, *kept, sim.ffi.NULL)\n"
        "wait_idle(sim)\n"
        "print('paused at', sim.kv, flush=True)\n"
        "kept[0].token_input.input_ids[3] = 0\n"
        "sim.run([5])\n"
        "print('survived', flush=True)\n",
        {"RKSIM_STRICT": "1", "RKSIM_ASYNC_PAUSE": "1"},
    )
    assert code == -6, printed
    assert f"paused at {len(PROMPT)}" in printed
    assert "E rkllm-sim: violation: input_dropped_while_paused" in printed
    assert "survived" not in printed
