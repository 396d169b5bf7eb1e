"""The pause that crashed: what an earlier server did to the runtime, and what we do instead.

That server took ``return 1`` for "stop". Each of its habits is repeated here past our binding, in a
process of its own, on the simulated runtime in strict mode, and has to die by name; the same wish
through the binding has to come true. See docs/adr/0010-the-pause-that-crashed.md.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.sim import sim_driver
from tests.support.sim.binding_child import child, told
from tests.support.sim.releases import BOTH

STRICT = {"RKSIM_STRICT": "1"}

# How that server drove the library: any callback may be told 1, and nothing is known of a pause.
OLD_SERVER = """
sim = Sim({release!r})
assert sim.code == 0

def stop_after(n):
    seen = []
    def answer(event, _result):
        seen.append(event)
        return int(len(seen) >= n)  # before it looks at the state
    return answer
"""

# The same with rkllm_run_async: structs of a local variable, is_running polled, then forgotten.
OLD_ASYNC = """
def run_and_forget(given, answer):
    sim.now, sim.answer = Run(), answer
    run_input, infer = sim.prepare(given, keep_history=0)
    assert sim.lib.rkllm_run_async(sim.handle, run_input, infer, sim.ffi.NULL) == 0
    while sim.lib.rkllm_is_running(sim.handle) == 1:
        time.sleep(0.001)
    # What the collector does to a struct that nobody holds: its memory belongs to others now.
    size = sim.ffi.sizeof(run_input[0])
    sim.ffi.memmove(run_input, b"\\xee" * size, size)
"""


def old_server(release: str, body: str, **env: str) -> tuple[int, str]:
    return sim_driver.child(OLD_SERVER.format(release=release) + body, {**STRICT, **env})


def died_of(done: tuple[int, str], name: str) -> None:
    code, printed = done
    assert code == -signal.SIGABRT, printed
    assert printed.rstrip().endswith(f"E rkllm-sim: violation: {name}")
    assert "survived" not in printed


# -- the leak, which came first -------------------------------------------------------------------

LEAK = """
secret = chat("Repeat after me: my password is hunter2 and nobody may know")
stopped = sim.run(secret, stop_after(4))
other = sim.run(chat("What did I say first?"))
print("held", stopped.events[-1].kv, "then", other.events[0].kv, "prompt", len(other.ids))
print(other.reply)
"""


@pytest.mark.parametrize("release", BOTH)
def test_a_stop_by_pause_lets_the_next_conversation_continue_the_last_one(release: str) -> None:
    """No rule of the library is broken, and one user's text stands in another one's context."""
    code, printed = old_server(release, LEAK)
    assert code == 0, printed
    assert "my password is hunter2" in printed.splitlines()[-1]


# -- a full clear of the paused handle ------------------------------------------------------------

CLEAR = """
sim.run(chat("Write 40 tokens"), stop_after(8))
assert sim.clear() == 0
sim.run(chat("Count to 5"))
print("survived")
"""


@pytest.mark.parametrize("release", BOTH)
def test_a_full_clear_of_a_paused_handle_kills_the_next_run(release: str) -> None:
    done = old_server(release, CLEAR)
    died_of(done, "run_after_clear_while_paused")
    assert "violation: clear_while_paused" in done[1]


STOP_BY_ABORT = """
load()
def stop_after_8(step):
    keep(step)
    if len(pieces) == 8:
        runtime.abort()
    elif len(pieces) > 8:
        time.sleep(0.02)  # the abort is asynchronous and this board infinitely fast
    return SinkAction.CONTINUE
stopped = runtime.run(run_of(chat("Write 150 tokens")), stop_after_8)
cut = len(pieces)
runtime.clear_kv_cache()
pieces.clear()
runtime.run(run_of(chat("Count to 5")), keep)
tell(end=stopped.end.value, cut=cut, answer=text(), kv=runtime.kv_cache_sizes())
runtime.destroy()
"""

STOP_BY_PAUSE = """
load()
stopped = runtime.run(run_of(chat("Write 150 tokens")), pausing_at(8))
cut = len(pieces)
misuse(runtime.clear_kv_cache)
misuse(lambda: runtime.run(run_of(chat("Count to 5")), keep))
runtime.drain()
drained = len(pieces) - cut
runtime.clear_kv_cache()
pieces.clear()
runtime.run(run_of(chat("Count to 5")), keep)
tell(end=stopped.end.value, cut=cut, drained=drained, answer=text(), kv=runtime.kv_cache_sizes())
runtime.destroy()
"""


@pytest.mark.parametrize("release", BOTH)
def test_a_stop_by_abort_ends_the_run_and_the_next_one_is_its_own(
    release: str, tmp_path: Path
) -> None:
    facts = told(child(release, STOP_BY_ABORT, tmp_path=tmp_path))
    assert facts["end"] == "finished"
    assert 8 <= facts["cut"] < 150
    assert (facts["answer"].split(",")[:2], facts["kv"]) == (["1", " 2"], [0])


@pytest.mark.parametrize("release", BOTH)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
def test_a_stop_by_pause_is_drained_before_anything_is_cleared(
    release: str, strict: bool, tmp_path: Path
) -> None:
    facts = told(child(release, STOP_BY_PAUSE, tmp_path=tmp_path, strict=strict))
    assert (facts["end"], facts["cut"], facts["drained"]) == ("paused", 8, 0)
    assert (facts["answer"].split(",")[:2], facts["kv"]) == (["1", " 2"], [0])


# -- 1 said to FINISH -----------------------------------------------------------------------------

FINISH = """
whole = len(sim.run(chat("Count to 5")).events)
print("events", whole)
sim.run(chat("Count to 5"), stop_after(whole))  # its last token was counted: FINISH hears of it
print("survived")
"""


@pytest.mark.parametrize("release", BOTH)
def test_a_stop_that_is_found_on_the_last_token_kills_the_finish(release: str) -> None:
    died_of(old_server(release, FINISH), "pause_on_finish")


WAITING = """
greeting = chat("Greet me in many languages")
states = [event.state for event in sim.run(greeting).events]
sim.run(greeting, stop_after(1 + states.index(WAITING)))
print("survived")
"""


@pytest.mark.parametrize("release", BOTH)
def test_a_stop_inside_a_character_kills_the_waiting(release: str) -> None:
    died_of(old_server(release, WAITING), "pause_on_waiting")


PAUSE_ALWAYS = """
load()
ends = []
for question in ("Count to 5", "Greet me in many languages"):
    runtime.run(run_of(chat(question)), keep)
    whole, count = text(), len(pieces)
    for asked_from in (1, count - 1, count):
        pieces.clear()
        asked = range(asked_from, count + 1)  # every callback from there on is told to pause
        outcome = runtime.run(run_of(chat(question)), pausing_at(*asked))
        resumed = 0
        while outcome.end is RunEnd.PAUSED and len(pieces) < count:
            outcome = runtime.run(run_of(last(), resume=True), pausing_at(*asked))
            resumed += 1
        ends.append((outcome.end.value, text() == whole, resumed > 0))
        if outcome.end is RunEnd.PAUSED:  # at EOS: there is nothing left to resume for
            runtime.drain()
    pieces.clear()
tell(ends=ends, late=runtime.late_callbacks)
runtime.destroy()
"""


@pytest.mark.parametrize("release", BOTH)
def test_whatever_asks_for_a_pause_the_library_hears_of_it_on_normal_only(
    release: str, tmp_path: Path
) -> None:
    facts = told(child(release, PAUSE_ALWAYS, tmp_path=tmp_path))
    assert [end for end, _, _ in facts["ends"]] == ["paused"] * 6
    assert all(same for _, same, _ in facts["ends"])
    assert [resumed for _, _, resumed in facts["ends"]] == [True, True, False] * 2
    assert facts["late"] == 0


# -- inputs dropped while an asynchronous run is suspended ----------------------------------------

SUSPENDED = (
    OLD_ASYNC
    + """
run_and_forget(chat("Write 40 tokens"), stop_after(8))
sim.run(chat("Count to 5"))
print("survived")
"""
)


@pytest.mark.parametrize("release", BOTH)
@pytest.mark.parametrize(
    ("env", "name"),
    [
        pytest.param({}, "pause_async", id="where no asynchronous run can be paused"),
        pytest.param(
            {"RKSIM_ASYNC_PAUSE": "1"}, "input_dropped_while_paused", id="where one can be"
        ),
    ],
)
def test_a_suspended_asynchronous_run_outlives_what_it_was_given(
    release: str, env: dict[str, str], name: str
) -> None:
    died_of(old_server(release, SUSPENDED, **env), name)


ASYNC = """
load()
told_end, ends = threading.Event(), []
def ended(outcome):
    ends.append(type(outcome).__name__ if isinstance(outcome, Exception) else outcome.end.value)
    told_end.set()
runtime.run_async(run_of(chat("Count to 5")), keep, ended)
gc.collect()
litter = [bytearray(b"\\xee" * 4000) for _ in range(500)]  # over whatever was let go
assert told_end.wait(30)
whole = text()
pieces.clear(), told_end.clear()
def pause(step):
    keep(step)
    if len(pieces) == 4:
        return SinkAction.PAUSE
    if len(pieces) > 4:
        time.sleep(0.02)
    return SinkAction.CONTINUE
runtime.run_async(run_of(chat("Write 150 tokens")), pause, ended)
assert told_end.wait(30)
pieces.clear()
runtime.run(run_of(chat("Count to 5")), keep)
tell(whole=whole, answer=text(), ends=ends, state=runtime.state.value)
runtime.destroy()
"""


@pytest.mark.parametrize("release", BOTH)
@pytest.mark.parametrize("async_pause", ["0", "1"])
def test_an_asynchronous_run_is_never_suspended_and_keeps_what_it_was_given(
    release: str, async_pause: str, tmp_path: Path
) -> None:
    env = {"RKSIM_ASYNC_PAUSE": async_pause, "RKSIM_ASYNC_READ_MS": "50"}
    facts = told(child(release, ASYNC, tmp_path=tmp_path, env=env))
    assert facts["whole"].startswith("1, 2, 3, 4, 5")
    assert facts["answer"] == facts["whole"]
    assert (facts["ends"], facts["state"]) == (["finished", "Misuse"], "idle")


# -- a pause for what it is -----------------------------------------------------------------------

ROUND_TRIP = """
load()
prompt = chat("Greet me in many languages")
runtime.run(run_of(prompt), keep)
whole = text()
count = sum(not piece.waiting for piece in pieces)
kept = 0
for place in range(1, len(pieces)):
    pieces.clear()
    outcome = runtime.run(run_of(prompt), pausing_at(place))
    if outcome.end is RunEnd.FINISHED:
        continue  # that token was a WAITING, which cannot be paused
    gc.collect()
    outcome = runtime.run(run_of(last(), resume=True), keep)
    assert (outcome.end, text()) == (RunEnd.FINISHED, whole), place
    kept += 1
tell(kept=kept, count=count)
runtime.destroy()
"""


@pytest.mark.parametrize("release", BOTH)
def test_a_run_that_is_paused_at_any_token_goes_on_as_if_it_had_not_been(
    release: str, tmp_path: Path
) -> None:
    facts = told(child(release, ROUND_TRIP, tmp_path=tmp_path))
    assert facts["kept"] == facts["count"] - 1 > 10
