"""The simulated runtime with several entries in a batch: one run, N inputs, N results per step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rkserve.native.sim import profiles
from tests.support.sim.releases import EVERY
from tests.support.sim.sim_driver import (
    ERROR,
    FINISH,
    NORMAL,
    WAITING,
    Aborted,
    Said,
    Sim,
    chat,
    child,
    ids_of,
    probe,
    run_probe,
    violations,
    wait_idle,
)

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")

REQUESTS = ["Count to 3", "Write 40 tokens", "Who are you?", "Count to 12", "Hello there", "Hi"]
POISONED = int.from_bytes(b"\xdd" * 4, "little", signed=True)
BUSY_MS = 1000.0


def prompts(n: int) -> list[list[int]]:
    return [chat(f"{request}") for request in itertools.islice(itertools.cycle(REQUESTS), n)]


def alone(release: str, *given: str | list[int], **infer: Any) -> list[str]:
    """What each of them is answered on a board that serves nobody else."""
    sim = Sim(release)
    replies = [sim.run(each, **infer).reply for each in given]
    assert sim.destroy() == 0
    return replies


# --- what a run delivers


@pytest.mark.parametrize("n", [2, 3, 8, 100])
@pytest.mark.parametrize("release", EVERY)
def test_each_entry_is_answered_as_if_it_were_alone(release: str, n: int) -> None:
    given = prompts(n)
    sim = Sim(release, extend_n_batch=n, max_context_len=512)
    run = sim.run_batch(given)
    assert run.code == 0
    assert [run.reply_of(at) for at in range(n)] == alone(release, *given)
    assert sim.kvs == (0,) * n
    assert sim.destroy() == 0


def test_a_step_is_one_callback_and_the_longest_entry_sets_their_number(release: str) -> None:
    given = prompts(4)
    sim = Sim(release, extend_n_batch=4)
    run = sim.run_batch(given)
    lengths = [len(run.ids_of(at)) for at in range(4)]
    assert sorted(set(lengths)) == [7, 26, 41]
    assert [event.state for event in run.events] == [NORMAL] * max(lengths) + [FINISH]
    for step, event in enumerate(run.tokens):
        for entry, length in enumerate(lengths):
            if step >= length:
                assert event.said[entry] == Said(-1, None)
            else:
                assert event.said[entry].token_id >= 0
    prefill_ms, fresh, _, generated, memory = run.finish.perf
    assert (fresh, generated) == (sum(map(len, given)), sum(lengths) - len(lengths))
    assert (prefill_ms >= 0, memory > 0) == (True, True)
    assert sim.destroy() == 0


def test_each_entry_has_its_own_positions(release: str) -> None:
    given = prompts(3)
    sim = Sim(release, extend_n_batch=3)
    run = sim.run_batch(given)
    for step, event in enumerate(run.tokens):
        for entry, prompt in enumerate(given):
            # EOS never joins the context, and an entry that has ended stands still.
            held = min(step, len(run.ids_of(entry)) - 1)
            assert event.kvs[entry] == len(prompt) + held
    assert sim.destroy() == 0


def test_only_the_first_result_of_a_final_state_is_there(release: str) -> None:
    seen: list[tuple[int, list[int]]] = []

    def look(event: Any, result: Any) -> int:
        if event.state == FINISH:
            seen.append((result[0].token_id, [result[at].token_id for at in (1, 2)]))
        return 0

    sim = Sim(release, extend_n_batch=3)
    sim.run_batch(prompts(3), look)
    assert seen == [(0, [POISONED, POISONED])]
    assert [sim.last[at].token_id for at in range(3)] == [POISONED] * 3
    assert sim.destroy() == 0


def test_also_where_the_final_state_is_all_there_is(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "control"
    control.write_text("fault=error_at_token:1\n")
    monkeypatch.setenv("RKSIM_CONTROL", str(control))
    seen: list[tuple[int, int]] = []

    def look(_event: Any, result: Any) -> int:
        seen.append((result[0].token_id, result[1].token_id))
        return 0

    sim = Sim(release, extend_n_batch=2)
    assert sim.run_batch(prompts(2), look).code == -1
    assert seen == [(0, POISONED)]
    assert sim.destroy() == 0


def test_a_batch_never_waits_for_a_character(release: str) -> None:
    given = [chat("Greet me in many languages"), chat("Count to 30")]
    sim = Sim(release, extend_n_batch=2)
    run = sim.run_batch(given)
    assert [run.reply_of(0), run.reply_of(1)] == alone(release, *given)
    assert WAITING not in {event.state for event in run.events}
    inside = [event for event in run.tokens if event.said[0].text is None]
    assert any(event.said[0].token_id >= 0 and event.said[1].text for event in inside)
    assert sim.destroy() == 0


def test_a_budget_counts_for_each_entry(release: str) -> None:
    sim = Sim(release, extend_n_batch=3, max_new_tokens=6)
    run = sim.run_batch([chat("Write 40 tokens"), chat("Count to 1"), chat("Write 50 tokens")])
    assert [len(run.ids_of(at)) for at in (0, 2)] == [6, 6]
    assert run.reply_of(1) == "1.<|im_end|>"
    assert sim.destroy() == 0


def test_a_full_context_ends_its_entry_and_no_other(release: str) -> None:
    long, short = chat("Write 200 tokens"), chat("Count to 20")
    sim = Sim(release, extend_n_batch=2, max_context_len=len(short) + 80)
    padded = [ids_of("word")[0]] * 60 + long
    run = sim.run_batch([padded, short])
    assert len(run.ids_of(0)) == sim.param.max_context_len - len(padded) + 1
    assert run.reply_of(1) == alone(release, short)[0]
    assert sim.destroy() == 0


def test_thinking_may_end_one_entry_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSIM_THINK_FINISH", "1")
    sim = Sim("1.3.0", extend_n_batch=2)
    inputs, params = sim.prepare_batch(["Count to 20", "Count to 20"], role=b"user")
    inputs[0].enable_thinking = True
    assert sim.lib.rkllm_run(sim.handle, inputs, params, sim.ffi.NULL) == 0
    assert sim.now.reply_of(0).startswith("<think>")
    assert "</think>" not in sim.now.reply_of(0)
    assert sim.now.reply_of(1).startswith("1, 2, 3")
    assert sim.destroy() == 0


# --- conversations


def test_each_entry_keeps_its_own_history(release: str) -> None:
    sim = Sim(release, extend_n_batch=2, skip_special_token=True)
    first = sim.run_batch(["I like tea", "I like coffee and cake"], keep_history=1)
    grown = [len(first.ids_of(at)) - 1 for at in (0, 1)]
    assert [after - first.events[0].kvs[at] for at, after in enumerate(sim.kvs)] == grown
    again = sim.run_batch(["What did I say first?"] * 2, keep_history=1)
    assert "I like tea" in again.reply_of(0)
    assert "I like coffee and cake" in again.reply_of(1)
    assert sim.clear(keep_system=True) == 0
    assert len(set(sim.kvs)) == 1
    assert sim.kvs[0] > 0
    assert sim.destroy() == 0


@pytest.mark.parametrize("history", [0, 1])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_prompt_too_long_fails_the_batch_and_changes_nothing(
    release: str, bad: int, history: int
) -> None:
    sim = Sim(release, extend_n_batch=3, max_context_len=256)
    sim.run_batch(["Count to 2", "Count to 3", "Count to 4"], keep_history=1)
    before = sim.kvs
    given: list[str | list[int]] = ["Hi", "Hi", "Hi"]
    given[bad] = [ids_of("word")[0]] * 257
    run = sim.run_batch(given, keep_history=history)
    assert (run.code, run.events) == (-1, [])
    assert sim.kvs == before
    assert sim.run_batch(["Hi"] * 3).code == 0
    assert sim.destroy() == 0


# --- how it ends


def test_an_abort_ends_all_entries(release: str) -> None:
    sim = Sim(release, extend_n_batch=3)
    run = sim.run_batch([chat("Write 90 tokens")] * 3, Aborted(sim, 5))
    assert [event.state for event in run.events] == [NORMAL] * 5 + [FINISH]
    assert run.code == 0
    assert sim.destroy() == 0


def test_an_error_speaks_once_for_all(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "control"
    control.write_text("fault=error_at_token:3\n")
    monkeypatch.setenv("RKSIM_CONTROL", str(control))
    sim = Sim(release, extend_n_batch=2)
    run = sim.run_batch(prompts(2))
    assert (run.code, [event.state for event in run.events]) == (-1, [NORMAL, NORMAL, ERROR])
    assert sim.run_batch(prompts(2)).code == 0
    assert sim.destroy() == 0


def test_an_asynchronous_batch_says_the_same(release: str) -> None:
    given = prompts(3)
    sim = Sim(release, extend_n_batch=3)
    inputs, params = sim.prepare_batch(given)
    assert sim.lib.rkllm_run_async(sim.handle, inputs, params, sim.ffi.NULL) == 0
    wait_idle(sim)
    assert [sim.now.reply_of(at) for at in range(3)] == alone(release, *given)
    assert sim.destroy() == 0


# --- pause


def test_a_pause_of_a_batch_is_ignored_and_counted(
    release: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = prompts(2)
    sim = Sim(release, extend_n_batch=2)
    run = sim.run_batch(given, lambda event, _: int(event.state == NORMAL))
    assert [run.reply_of(at) for at in (0, 1)] == alone(release, *given)
    assert set(violations(capfd)) == {"pause_with_batch"}
    assert sim.destroy() == 0


def test_a_batch_may_be_told_to_pause_and_be_cut_by_entry(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_PAUSE_WITH_BATCH", "1")
    given = [chat("Write 40 tokens"), chat("Write 30 tokens")]
    sim = Sim(release, extend_n_batch=2)
    whole = sim.run_batch(given)
    seen = itertools.count(1)
    first = sim.run_batch(given, lambda *_: int(next(seen) == 10))
    assert [event.state for event in first.events] == [NORMAL] * 10
    held = [len(prompt) + 9 for prompt in given]
    assert list(sim.kvs) == held
    # Wrong in one entry is wrong in all; then four tokens of the second and none of the first.
    assert sim.clear_batch([(0, 0), (5, 4)]) == -1
    assert list(sim.kvs) == held
    assert sim.clear_batch([(3, 3), (held[1] - 4, 1 << 20)]) == 0
    assert list(sim.kvs) == [held[0], held[1] - 4]
    rest = sim.run_batch([first.ids_of(0)[-1:], whole.ids_of(1)[5:10]])
    assert first.ids_of(0) + rest.ids_of(0) == whole.ids_of(0)
    assert whole.ids_of(1)[:10] + rest.ids_of(1) == whole.ids_of(1)
    assert sim.destroy() == 0


# --- misuse


def test_logits_and_hidden_states_of_a_batch_are_refused(
    release: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sim = Sim(release, extend_n_batch=2)
    for mode, line in [
        (1, "E rkllm: Getting the last hidden layer is not supported for multiple batches."),
        (2, "E rkllm: Getting the logits is not supported for multiple batches."),
    ]:
        run = sim.run_batch(prompts(2), mode=mode)
        assert (run.code, run.events) == (-1, [])
        assert line in capfd.readouterr().err
    assert sim.destroy() == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("input_type", 7, id="no such type"),
        pytest.param("prompt_input", None, id="no content"),
    ],
)
def test_an_entry_that_is_no_input_is_noticed(
    release: str, field: str, value: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    sim = Sim(release, extend_n_batch=3)
    inputs, params = sim.prepare_batch(["Hi", "Hi", "Hi"])
    setattr(inputs[2], field, sim.ffi.NULL if value is None else value)
    assert sim.lib.rkllm_run(sim.handle, inputs, params, sim.ffi.NULL) == -1
    printed = capfd.readouterr().err
    assert "E rkllm: entry 2 of a batch of 3 is no input" in printed
    assert "violation: bad_batch_entry" in printed
    assert sim.destroy() == 0


@pytest.mark.parametrize(
    ("body", "name"),
    [
        pytest.param(
            "sim.run_batch([chat('Hi')] * 2, lambda e, _: 1)", "pause_with_batch", id="pause"
        ),
        pytest.param(
            "inputs, params = sim.prepare_batch(['Hi', 'Hi'])\n"
            "inputs[1].prompt_input = sim.ffi.NULL\n"
            "sim.lib.rkllm_run(sim.handle, inputs, params, sim.ffi.NULL)",
            "bad_batch_entry",
            id="an entry that is no input",
        ),
    ],
)
def test_strict_ends_the_process_of_a_misused_batch(release: str, body: str, name: str) -> None:
    code, printed = child(
        f"sim = Sim('{release}', extend_n_batch=2)\n{body}", {"RKSIM_STRICT": "1"}
    )
    assert code == -6, printed
    assert f"E rkllm-sim: violation: {name}" in printed


# --- sampling and the clock


def test_entries_of_a_batch_draw_apart_and_a_seed_repeats_them(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_SEED", "7")

    def replies() -> list[str]:
        sim = Sim(release, extend_n_batch=4, top_k=40, temperature=1.5, top_p=1.0)
        run = sim.run_batch([chat("Tell me about the sea")] * 4)
        assert sim.destroy() == 0
        return [run.reply_of(at) for at in range(4)]

    first = replies()
    assert len(set(first)) > 1
    assert replies() == first


@pytest.mark.parametrize(
    ("gain", "at_four", "at_two"),
    [
        pytest.param("none", 1.0, 1.0, id="none"),
        pytest.param("modest", 1.6, 1.6**0.5, id="modest"),
        pytest.param("bound", 3.0, 3.0**0.5, id="bound"),
    ],
)
def test_a_step_costs_what_the_live_entries_cost_divided_by_the_gain(
    gain: str, at_four: float, at_two: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, scale = "rk3588-qwen3-0.6b-w8a8", 0.25
    monkeypatch.setenv("RKSIM_PROFILE", name)
    monkeypatch.setenv("RKSIM_TIME_SCALE", str(scale))
    monkeypatch.setenv("RKSIM_BATCH_GAIN", gain)
    monkeypatch.setenv("RKSIM_PREFIX_REUSE", "0")  # each run prefills all of it
    (profile,) = (each for each in profiles.load() if each.name == name)
    given = [chat("Count to 1"), chat("Write 6 tokens"), chat("Count to 1"), chat("Write 6 tokens")]
    sim = Sim("1.3.0", extend_n_batch=4)
    late_ms = []
    for _ in range(3):
        run = sim.run_batch(given)
        prefill_ms, _, generate_ms, _, _ = run.finish.perf
        wanted = scale * sum(profile.prefill_ms(len(prompt)) for prompt in given)
        assert prefill_ms >= wanted
        # A decode follows every callback but the last, for those that have not ended then.
        steps = len(run.tokens)
        assert steps == 7
        for step in range(1, steps):
            live = [at for at in range(4) if len(run.ids_of(at)) > step]
            cost = sum(profile.decode_ms(len(given[at]) + step) for at in live)
            wanted += scale * cost / {4: at_four, 2: at_two}[len(live)]
        assert prefill_ms + generate_ms >= wanted * 0.9999  # figures are floats of 32 bits
        late_ms.append(prefill_ms + generate_ms - wanted)
    assert min(late_ms) < BUSY_MS
    assert sim.destroy() == 0


# --- from C


@pytest.mark.long
@pytest.mark.parametrize("scenario", [("fuzz", "1000"), ("suspend", "60"), ("look", "200")])
def test_sanitizers_find_nothing_in_batches_looks_and_pauses(
    release: str, scenario: tuple[str, str]
) -> None:
    program = probe("sim_batch_probe", release, "address,undefined")
    code, _, printed = run_probe(program, *scenario)
    assert code == 0, printed[-4000:]
    assert "Sanitizer" not in printed
    assert "input_dropped_while_paused" not in printed


@pytest.mark.parametrize("entries", [1, 8])
def test_a_token_of_a_batch_costs_less_than_20_us_of_cpu(
    release: str, entries: int, record_property: Callable[[str, object], None]
) -> None:
    program = probe("sim_batch_probe", release)
    code, printed, _ = run_probe(program, "bench", str(entries), "3000")
    assert code == 0
    record_property("cpu_us_per_token", printed.strip())
    assert float(printed) < 20
