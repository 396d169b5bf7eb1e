"""The binding on the simulated runtime: whole conversations, and crashes, in child processes.

In strict mode the simulator aborts the process on any misuse, so a child that ends well has made
none.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.sim.binding_child import child, told
from tests.support.sim.releases import BOTH


@pytest.mark.parametrize("release", BOTH)
def test_a_conversation_is_appended_to_and_counted_exactly(release: str, tmp_path: Path) -> None:
    script = """
load()
first = chat("Repeat after me: the sky is blue")
one = runtime.run(run_of(first, keep_history=True), keep)
answer, size = text(), runtime.kv_cache_sizes()[0]
generated = len(pieces) - 1  # the last one is EOS, which the KV does not hold
pieces.clear()
second = chat("Repeat after me: 你好 é")
two = runtime.run(run_of(second, keep_history=True), keep)
tell(answer=answer, fits=size == len(first.ids) + generated, again=text(),
     prefill=two.perf.prefill_tokens, sent=len(second.ids), end=two.end.value,
     grown=runtime.kv_cache_sizes()[0] > size)
runtime.clear_kv_cache()
assert runtime.kv_cache_sizes()[0] == 0
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts["answer"].startswith("the sky is blue")
    assert facts["again"].startswith("你好 é")
    assert facts["fits"]
    assert facts["grown"]
    assert facts["prefill"] == facts["sent"]
    assert facts["end"] == "finished"


@pytest.mark.parametrize("release", BOTH)
def test_a_paused_run_goes_on_where_it_was_and_says_the_same(release: str, tmp_path: Path) -> None:
    script = """
load()
prompt = chat("Count to 20")
runtime.run(run_of(prompt), keep)
whole = text()
pieces.clear()
def pause_at_9(step):
    pieces.extend(step)
    return SinkAction.PAUSE if len(pieces) == 9 else SinkAction.CONTINUE
paused = runtime.run(run_of(prompt), pause_at_9)
misuse(lambda: runtime.clear_kv_cache())
misuse(lambda: runtime.set_chat_template("", "", ""))
misuse(lambda: runtime.run(run_of(prompt), keep))
misuse(lambda: runtime.abort())
held = runtime.kv_cache_sizes()[0] - len(prompt.ids)
resumed = runtime.run(run_of(TokenInput((pieces[-1].token_id,)), resume=True), keep)
tell(whole=whole, pieced=text(), held=held, ends=[paused.end.value, resumed.end.value])
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts["pieced"] == facts["whole"]
    assert facts["held"] == 8  # the token that paused it is not in the KV cache yet
    assert facts["ends"] == ["paused", "finished"]


@pytest.mark.parametrize("release", BOTH)
def test_an_aborted_conversation_is_cleared_and_served_again(release: str, tmp_path: Path) -> None:
    script = """
load()
def abort_at_5(step):
    pieces.extend(step)
    if len(pieces) == 5:
        runtime.abort()
    elif len(pieces) > 5:
        threading.Event().wait(0.02)  # the abort is asynchronous and this board infinitely fast
    return SinkAction.CONTINUE
aborted = runtime.run(run_of(chat("Write 150 tokens"), keep_history=True), abort_at_5)
short = len(pieces)
misuse(lambda: runtime.run(run_of(chat("Count to 3"), keep_history=True), keep))
runtime.clear_kv_cache()
pieces.clear()
runtime.run(run_of(chat("Count to 3"), keep_history=True), keep)
tell(end=aborted.end.value, short=short, answer=text(), late=runtime.late_callbacks,
     running=runtime.is_running())
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts["end"] == "finished"
    assert 5 <= facts["short"] < 150
    assert facts["answer"].startswith("1, 2, 3")
    assert (facts["late"], facts["running"]) == (0, False)


@pytest.mark.parametrize("release", BOTH)
def test_rendered_text_goes_through_an_emptied_template(release: str, tmp_path: Path) -> None:
    script = """
load()
rendered = PromptInput("<|im_start|>user\\nCount to 4<|im_end|>\\n<|im_start|>assistant\\n")
misuse(lambda: runtime.run(run_of(rendered), keep))
runtime.set_chat_template("", "", "")
runtime.run(run_of(rendered), keep)
tell(answer=text())
runtime.destroy()
"""
    assert told(child(release, script, tmp_path=tmp_path))["answer"].startswith("1, 2, 3, 4")


def test_a_token_limit_per_run_is_the_librarys_on_1_3_0(tmp_path: Path) -> None:
    script = """
load()
runtime.run(run_of(chat("Write 150 tokens"), max_new_tokens=7,
                      sampling=Sampling(temperature=0)), keep)
tell(tokens=len(pieces))
runtime.destroy()
"""
    assert told(child("1.3.0", script, tmp_path=tmp_path)) == {"tokens": 7}


@pytest.mark.parametrize("release", BOTH)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("fault=init_fail", "rkllm_init returned -1", id="m10-init fails"),
        pytest.param("fault=init_null_handle", "but no handle", id="m10-no handle"),
    ],
)
def test_a_failing_load_is_told(release: str, fault: str, words: str, tmp_path: Path) -> None:
    script = """
try:
    load()
except LoadFailed as exc:
    tell(said=str(exc))
"""
    done = child(release, script, tmp_path=tmp_path, fault=fault, strict=False)
    assert words in told(done)["said"]


@pytest.mark.parametrize("release", BOTH)
@pytest.mark.parametrize(
    ("fault", "text", "tokens"),
    [
        pytest.param("fault=error_at_token:2", "Count to 9", 2, id="ERROR at token 2"),
        pytest.param("fault=no_callback", "Count to 9", 0, id="m15-no callback ever"),
        pytest.param("", "word " * 600, 0, id="a prompt longer than the context"),
    ],
)
def test_a_failing_run_is_told_and_the_handle_lives_on(
    release: str, fault: str, text: str, tokens: int, tmp_path: Path
) -> None:
    script = f"""
load()
failed = runtime.run(run_of(chat({text!r})), keep)
seen = len(pieces)
pieces.clear()
runtime.run(run_of(chat("Count to 2")), keep)
tell(end=failed.end.value, seen=seen, answer=text())
runtime.destroy()
"""
    done = child(release, script, tmp_path=tmp_path, fault=fault, strict=False)
    facts = told(done)
    assert facts["end"] == "failed"
    assert facts["seen"] <= tokens
    assert facts["answer"].startswith("1, 2")


@pytest.mark.parametrize("release", BOTH)
@pytest.mark.parametrize(
    ("fault", "number"),
    [
        pytest.param("fault=init_segv", signal.SIGSEGV, id="init crashes"),
        pytest.param("fault=segv_at_token:2", signal.SIGSEGV, id="a token crashes"),
        pytest.param("fault=abort_at_token:2", signal.SIGABRT, id="GGML_ASSERT"),
    ],
)
def test_a_crash_of_the_library_takes_the_process_that_holds_it(
    release: str, fault: str, number: signal.Signals, tmp_path: Path
) -> None:
    script = """
load()
runtime.run(run_of(chat("Count to 9")), keep)
"""
    done = child(release, script, tmp_path=tmp_path, fault=fault)
    assert done.returncode == -number


def test_strict_mode_would_have_noticed_a_misuse(tmp_path: Path) -> None:
    """The other tests prove nothing if this one passes a misuse."""
    script = """
load()
runtime.run(run_of(chat("Count to 9")), lambda step: SinkAction.PAUSE)
handle = runtime._handle  # past the binding, as others do it
null, lib, release = handle.ffi.NULL, handle.lib, handle.release
lib.rkllm_clear_kv_cache(handle.pointer, 0, null, null)
lib.rkllm_run(handle.pointer, release.inputs(lib, [chat("x")], []),
    release.infer_params(lib, run_of(chat("x")), None, []), null)
"""
    done = child("1.2.3", script, tmp_path=tmp_path)
    assert done.returncode == -signal.SIGABRT
    assert "violation" in done.stderr
