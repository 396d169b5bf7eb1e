"""How a run of the simulated runtime stops: pause, abort, misuse, asynchronous runs, faults."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rkserve.native.sim import profiles
from tests.support.sim.sim_driver import (
    ERROR,
    FINISH,
    NORMAL,
    Aborted,
    Event,
    Gate,
    Run,
    Sim,
    chat,
    child,
    ids_of,
    start_child,
    wait_for,
    wait_idle,
)

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")


# --- pause


def pause_at(token: int) -> Any:
    seen = iter(range(1, 1 << 30))
    return lambda event, _: int(event.state == NORMAL and next(seen) == token)


def test_a_pause_keeps_the_context_and_resumes_with_the_same_words(sim: Sim) -> None:
    prompt = chat("Write 40 tokens")
    whole = sim.run(prompt)
    first = sim.run(prompt, pause_at(10))
    assert first.code == 0
    assert [event.state for event in first.events] == [NORMAL] * 10
    assert first.events[-1].kv == sim.kv == len(prompt) + 9
    assert sim.lib.rkllm_is_running(sim.handle) == 0
    rest = sim.run([first.ids[-1]])
    assert first.ids + rest.ids == whole.ids
    assert rest.finish.perf[1] == 1
    assert sim.kv == 0


def test_a_paused_context_can_be_edited(sim: Sim) -> None:
    prompt = chat("Write 40 tokens")
    whole = sim.run(prompt)
    sim.run(prompt, pause_at(10))
    assert sim.clear(span=(len(prompt) + 5, len(prompt) + 9)) == 0
    assert sim.kv == len(prompt) + 5
    rest = sim.run(whole.ids[5:10])
    assert rest.ids == whole.ids[10:]


def test_resuming_a_prompt_adds_no_template_unless_told(release: str) -> None:
    sizes = []
    for template in ("0", "1"):
        code, printed = child(
            f"sim = Sim('{release}')\n"
            "sim.run(chat('Write 9 tokens'), lambda event, _: 1)\n"
            "before = sim.kv\n"
            "print('added', sim.run('more', lambda event, _: 1).tokens[0].kv - before)",
            {"RKSIM_RESUME_TEMPLATE": template},
        )
        assert code == 0, printed
        sizes.append(int(printed.partition("added ")[2].split()[0]))
    assert sizes[0] == len(ids_of("more"))
    assert sizes[1] > sizes[0] + 5


def test_a_range_clear_outside_a_pause_changes_nothing(sim: Sim) -> None:
    sim.run(chat("Count to 3"), keep_history=1)
    before = sim.kv
    assert sim.clear(span=(0, 4)) == 0
    assert sim.kv == before


STRICT_DEATHS = [
    pytest.param(
        "sim.run(chat('Hi'), lambda e, _: 1, keep_history=1)", "pause_with_history", id="history"
    ),
    pytest.param(
        "sim.run(chat('Greet me in many languages'), lambda e, _: int(e.state == WAITING))",
        "pause_on_waiting",
        id="pause on WAITING",
    ),
    pytest.param(
        "sim.run(chat('Hi'), lambda e, _: int(e.state == FINISH))", "pause_on_finish", id="FINISH"
    ),
    pytest.param(
        "sim.answer = lambda e, _: 1\n"
        "sim.lib.rkllm_run_async(sim.handle, *sim.prepare('Hi'), sim.ffi.NULL)\n"
        "threading.Event().wait(20)",
        "pause_async",
        id="asynchronous",
    ),
    pytest.param("sim.run(chat('Hi'), lambda e, _: 7)", "unknown_return_value", id="return 7"),
    pytest.param(
        "sim.run(chat('Hi'), lambda e, _: sim.lib.rkllm_run(sim.handle, *sim.prepare('x'), "
        "sim.ffi.NULL) and 0)",
        "run_while_running",
        id="a second run",
    ),
    pytest.param(
        "sim.run(chat('Hi'), lambda e, _: 0 * sim.clear())",
        "clear_while_running",
        id="clear in run",
    ),
    pytest.param(
        "sim.run(chat('Hi'), lambda e, _: 0 * sim.destroy())", "destroy_while_running", id="destroy"
    ),
    pytest.param("sim.run([1 << 20])", "token_out_of_range", id="a foreign token id"),
    pytest.param(
        "sim.run(chat('Hi'), lambda e, _: 1); sim.lib.rkllm_abort(sim.handle)",
        "abort_while_paused",
        id="abort of a paused run",
    ),
    pytest.param(
        "sim.run(chat('Hi'), lambda e, _: 1); sim.clear(); print('cleared'); sim.run(chat('Hi'))",
        "run_after_clear_while_paused",
        id="the historic crash: pause, clear, run",
    ),
    pytest.param(
        "sim.run(chat('Hi'), lambda e, _: 1)\n"
        "sim.lib.rkllm_set_chat_template(sim.handle, *[sim.ffi.NULL] * 3)",
        "template_while_paused",
        id="a template while paused",
    ),
]


@pytest.mark.parametrize(("body", "name"), STRICT_DEATHS)
def test_strict_mode_dies_of_misuse_and_names_it(body: str, name: str) -> None:
    code, printed = child(f"sim = Sim('1.3.0')\n{body}\nprint('alive')", {"RKSIM_STRICT": "1"})
    assert code == -signal.SIGABRT
    assert f"E rkllm-sim: violation: {name}\n" in printed
    assert "alive" not in printed


SWITCHES = [
    pytest.param(
        "RKSIM_PAUSED_IS_RUNNING", "sim.lib.rkllm_is_running(sim.handle)", "1", id="paused"
    ),
    pytest.param(
        "RKSIM_RANGE_CLEAR_FAILS", "(sim.run([1]), sim.clear(span=(0, 1)))[1]", "-1",
        id="a range clear outside a pause",
    ),
    pytest.param(
        "RKSIM_DESTROY_FAILS", "sim.run([1], lambda e, _: print(sim.destroy()) or 0)", "-1",
        id="destroy in a run",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("switch", "expression", "printed"), SWITCHES)
def test_what_hardware_does_not_tell_is_a_switch(
    switch: str, expression: str, printed: str
) -> None:
    body = f"sim = Sim('1.3.0'); sim.run(chat('Hi'), lambda e, _: 1); print({expression})"
    code, said = child(body, {switch: "1"})
    assert code == 0, said
    assert f"{printed}\n" in said


def test_misuse_is_counted_when_it_is_not_fatal() -> None:
    body = "sim = Sim('1.2.3'); sim.run([1 << 20]); sim.run([1 << 20]); sim.destroy()"
    code, printed = child(body)
    assert code == 0
    assert "I rkllm-sim: violations: 2\n" in printed


def test_clearing_a_paused_handle_makes_it_idle_when_lenient(sim: Sim) -> None:
    sim.run(chat("Write 40 tokens"), pause_at(3))
    assert sim.clear() == 0
    assert sim.kv == 0
    assert sim.run(chat("Count to 3")).reply.startswith("1, 2, 3.")


# --- abort


def test_an_abort_ends_with_finish_and_figures(sim: Sim) -> None:
    run = sim.run(chat("Write 500 tokens"), Aborted(sim, 20), keep_history=1)
    assert run.code == 0
    assert 20 <= len(run.tokens) <= 21
    assert run.events[-1].state == FINISH
    assert run.finish.perf[3] == len(run.tokens) - 1
    assert sim.kv == run.finish.perf[1] + len(run.tokens) - 1
    assert sim.lib.rkllm_is_running(sim.handle) == 0


def test_an_abort_while_a_token_is_decoded_lets_that_one_through(release: str, gate: Gate) -> None:
    sim = Sim(release)
    gate.shut("token:1")
    aborting = gate.thread(lambda: sim.lib.rkllm_abort(sim.handle))
    run = sim.run(ids_of("Write 500 tokens\n"))
    aborting.join()
    assert [event.state for event in run.events] == [NORMAL, NORMAL, FINISH]
    assert sim.destroy() == 0


def test_an_abort_does_not_shorten_the_prefill(release: str, gate: Gate) -> None:
    sim = Sim(release)
    prompt = chat("word " * 80)
    profile = {p.name: p for p in profiles.load()}["rk3588-qwen2.5-1.5b-w8a8"]
    gate.shut("prefill")
    aborting = gate.thread(lambda: sim.lib.rkllm_abort(sim.handle), time_scale=1)
    run = sim.run(prompt)
    took_ms = (time.monotonic() - gate.opened_s) * 1e3
    aborting.join()
    assert took_ms >= profile.prefill_ms(len(prompt))
    assert [event.state for event in run.events] == [FINISH]
    assert sim.destroy() == 0


def test_an_abort_of_an_idle_handle_has_no_effect(sim: Sim) -> None:
    assert sim.lib.rkllm_abort(sim.handle) == 0
    assert sim.run(chat("Count to 4")).reply.startswith("1, 2, 3, 4.")


def test_abort_and_questions_are_allowed_inside_the_callback(sim: Sim) -> None:
    running = []

    def ask(_event: Event, _result: Any) -> int:
        running.append(sim.lib.rkllm_is_running(sim.handle))
        assert sim.lib.rkllm_abort(sim.handle) == 0
        return 0

    run = sim.run(chat("Write 50 tokens"), ask)
    assert [event.state for event in run.events] == [NORMAL, FINISH]
    assert set(running) == {1}


# --- asynchronous runs


def test_an_asynchronous_run_calls_back_from_its_own_thread(sim: Sim) -> None:
    threads = set()

    def note(_event: Event, _result: Any) -> int:
        threads.add(threading.get_native_id())
        return 0

    sim.now, sim.answer = Run(), note
    assert sim.lib.rkllm_run_async(sim.handle, *sim.prepare(chat("Count to 6")), sim.ffi.NULL) == 0
    wait_idle(sim)
    assert sim.now.reply.startswith("1, 2, 3, 4, 5, 6.")
    assert sim.now.events[-1].state == FINISH
    assert len(threads) == 1
    assert threading.get_native_id() not in threads


def test_an_asynchronous_run_reads_its_input_late(
    release: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_ASYNC_READ_MS", "100")
    sim = Sim(release)
    gate.shut("input")
    run_input, params = sim.prepare("Count to 3")
    assert sim.lib.rkllm_run_async(sim.handle, run_input, params, sim.ffi.NULL) == 0
    other = sim.ffi.new("char[]", b"Count to 5")  # what a freed buffer may hold by then
    run_input.prompt_input = other
    opened_s = time.monotonic()
    gate.open()
    wait_idle(sim)
    assert time.monotonic() - opened_s >= 0.1
    assert sim.now.reply.startswith("1, 2, 3, 4, 5.")
    assert sim.destroy() == 0


def test_bad_multimodal_input_is_silent_when_asynchronous(
    sim: Sim, capfd: pytest.CaptureFixture[str]
) -> None:
    run_input, params = sim.prepare("x")
    run_input.input_type = 3
    run_input.multimodal_input.prompt = sim.ffi.NULL
    assert sim.lib.rkllm_run_async(sim.handle, run_input, params, sim.ffi.NULL) == 0
    wait_idle(sim)
    assert sim.now.events == []
    line = "E rkllm: The n_image/n_image_token of multimodal_input is not set"
    assert line in capfd.readouterr().err
    assert sim.lib.rkllm_run(sim.handle, run_input, params, sim.ffi.NULL) == -1


# --- destroy and faults


def test_destroy_waits_for_the_run(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSIM_TIME_SCALE", "0.2")
    sim = Sim(release)
    sim.now = Run()
    args = sim.prepare(chat("Count to 8"))
    assert sim.lib.rkllm_run_async(sim.handle, *args, sim.ffi.NULL) == 0
    assert sim.destroy() == 0
    assert sim.now.events[-1].state == FINISH
    assert sim.lib.rkllm_is_running(sim.handle) == -1


FAULTS = [
    pytest.param("segv_at_token:5", -signal.SIGSEGV, 4, id="segfault"),
    pytest.param("abort_at_token:3", -signal.SIGABRT, 2, id="abort"),
]


def counted(body: str) -> str:
    return f"sim = Sim('1.3.0')\nsay = lambda e, _: print('token', flush=True) or 0\n{body}"


@pytest.mark.parametrize(("fault", "death", "heard"), FAULTS)
def test_a_fatal_fault_kills_once_and_not_the_next_process(
    fault: str, death: int, heard: int, tmp_path: Path
) -> None:
    control = tmp_path / "board.control"
    control.write_text(f"fault={fault}\n")
    env = {"RKSIM_CONTROL": str(control)}
    code, printed = child(counted("sim.run(chat('Count to 9'), say)"), env)
    assert code == death
    assert printed.count("token\n") == heard
    assert ("GGML_ASSERT(" in printed) is (death == -signal.SIGABRT)
    code, printed = child(counted("sim.run(chat('Count to 9'), say)"), env)
    assert code == 0
    control.write_text(f"fault={fault}\nsticky=1\n")
    assert child(counted("sim.run(chat('Count to 9'), say)"), env)[0] == death
    assert child(counted("sim.run(chat('Count to 9'), say)"), env)[0] == death


INIT_FAULTS = [
    pytest.param("init_fail", "assert Sim('1.2.3').code == -1", 0, id="fail"),
    pytest.param("init_segv", "Sim('1.2.3')", -signal.SIGSEGV, id="segfault"),
    pytest.param(
        "init_null_handle", "s = Sim('1.2.3'); assert (s.code, s.handle) == (0, s.ffi.NULL)", 0,
        id="success without a handle",
    ),
    pytest.param(
        "oom_segv", "[Sim('1.3.0', extend_base_domain_id=1) for _ in range(2)]", -signal.SIGSEGV,
        id="1.3.0 out of memory",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "body", "code"), INIT_FAULTS)
def test_init_can_be_made_to_fail(fault: str, body: str, code: int, tmp_path: Path) -> None:
    control = tmp_path / "board.control"
    control.write_text(f"fault={fault}\n")
    env = {"RKSIM_CONTROL": str(control), "RKSIM_MEMORY_MB": "2100"}
    found, printed = child(body, env)
    assert found == code, printed


HANGS = [
    pytest.param("init_hang", "", 0, id="init"),
    pytest.param("hang_in_prefill", "sim.run(chat('Count to 9'), say)", 0, id="prefill"),
    pytest.param("hang_at_token:4", "sim.run(chat('Count to 9'), say)", 3, id="token"),
    pytest.param("hang_after_finish", "sim.run(chat('Count to 2'), say)", 6, id="finish"),
    pytest.param("destroy_hang", "sim.destroy()", 0, id="destroy"),
]


# Once the parent says so, which is when the library hangs, and nothing of that is heard.
ABORTS = """
def abort():
    sys.stdin.readline()
    if "sim" in globals():
        sim.lib.rkllm_abort(sim.handle)
    print("asked", flush=True)
threading.Thread(target=abort, daemon=True).start()
print("ready", flush=True)
"""


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each hanging child has printed a second after an abort. They hang side by side."""
    folder = tmp_path_factory.mktemp("hung")
    children = {}
    for fault, body, _ in (hang.values for hang in HANGS):
        control = folder / str(fault)
        control.write_text(f"fault={fault}\n")
        source = f"import sys\n{ABORTS}{counted(str(body))}\nprint('alive')"
        children[control] = start_child(source, {"RKSIM_CONTROL": str(control)})
    printed = dict.fromkeys(children, "")
    for control, running in children.items():
        wait_for(control.with_name(f"{control.name}.fired").exists)
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write("\n")
        running.stdin.flush()
        while "asked" not in printed[control]:
            line = running.stdout.readline()
            assert line, printed[control]
            printed[control] += line
    time.sleep(1)
    for control, running in children.items():
        exited = running.poll()
        running.kill()
        printed[control] += f"{running.communicate()[0]}exited: {exited}"
    return {control.name: text for control, text in printed.items()}


@pytest.mark.parametrize(("fault", "body", "heard"), HANGS)
def test_a_hang_is_silent_and_deaf(fault: str, body: str, heard: int, hung: dict[str, str]) -> None:
    assert "ready\n" in hung[fault]
    assert hung[fault].count("token\n") == heard
    assert hung[fault].endswith("exited: None"), body


def test_faults_come_and_go_while_a_board_runs(
    release: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    control = tmp_path / "board.control"
    monkeypatch.setenv("RKSIM_CONTROL", str(control))
    sim = Sim(release)
    assert sim.run(chat("Count to 3")).reply.startswith("1, 2, 3.")
    control.write_text("fault=error_at_token:2\n")
    run = sim.run(chat("Count to 3"), keep_history=1)
    assert run.code == -1
    assert [event.state for event in run.events] == [NORMAL, ERROR]
    assert sim.run(chat("Count to 3")).code == 0
    control.write_text("fault=no_callback \n".replace(" ", ""))
    assert (sim.run(chat("Count to 3")).code, sim.now.events) == (0, [])
    assert sim.run(chat("Count to 3")).code == 0
    control.write_text("# nothing to see here\nfault=\nnonsense\nunknown=1\n")
    assert sim.run(chat("Count to 3")).code == 0
    assert sim.destroy() == 0


def test_an_abort_can_be_ignored_for_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    control = tmp_path / "board.control"
    control.write_text("time_scale=0.1\nfault=ignore_abort_ms:300\n")
    monkeypatch.setenv("RKSIM_CONTROL", str(control))
    sim = Sim("1.3.0")
    before = time.monotonic()
    run = sim.run(chat("Write 3000 tokens"), Aborted(sim, 1))
    assert time.monotonic() - before >= 0.3
    assert len(run.tokens) > 3
    assert run.events[-1].state == FINISH
    assert sim.destroy() == 0
