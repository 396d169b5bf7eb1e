"""The binding on the simulated runtime: whole conversations, and crashes, in child processes.

In strict mode the simulator aborts the process on any misuse, so a child that ends well has made
none.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rkserve.native.sim.build import ensure_built

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "models" / "sim-chat"
RELEASES = ("1.2.3", "1.3.0")

PRELUDE = """
import json, sys, threading
from pathlib import Path
from tokenizers import Tokenizer
from rkserve.errors import *
from rkserve.messages import Sampling
from rkserve.native.binding import open_runtime
from rkserve.native.runtime import *

library, model = Path(sys.argv[1]), Path(sys.argv[2])
tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
runtime = open_runtime(library)

def load(**changes):
    values = {"max_context_len": 512, "max_new_tokens": 200, "sampling": Sampling(temperature=0)}
    runtime.load(LoadParams(str(model / "model.rkllm"), **{**values, **changes}))

def ids(text):
    return TokenInput(tuple(tokenizer.encode(text, add_special_tokens=False).ids))

def chat(text):
    return ids(f"<|im_start|>user\\n{text}<|im_end|>\\n<|im_start|>assistant\\n")

pieces = []
def keep(piece):
    pieces.append(piece)
    return Verdict.CONTINUE

def text():
    return b"".join(piece.text for piece in pieces).decode()

def misuse(call):
    try:
        call()
    except Misuse:
        return
    raise AssertionError("that was let through")

def tell(**facts):
    print(json.dumps(facts))
"""


def child(
    release: str, script: str, *, tmp_path: Path, fault: str = "", strict: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` after the prelude in a process of its own."""
    control = tmp_path / "control"
    control.write_text(f"time_scale=0\n{fault}\n")
    environ = {
        **os.environ,
        "RKSIM_TIME_SCALE": "0",
        "RKSIM_LOAD_MS": "0",
        "RKSIM_STRICT": str(int(strict)),
        "RKSIM_CONTROL": str(control),
    }
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(ensure_built(release)), str(MODEL)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environ,
        timeout=60,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert "violation:" not in done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize("release", RELEASES)
def test_a_conversation_is_appended_to_and_counted_exactly(release: str, tmp_path: Path) -> None:
    script = """
load()
first = chat("Repeat after me: the sky is blue")
one = runtime.run(RunParams(first, keep_history=True), keep)
answer, size = text(), runtime.kv_cache_size()
generated = len(pieces) - 1  # the last one is EOS, which the KV does not hold
pieces.clear()
second = chat("Repeat after me: 你好 é")
two = runtime.run(RunParams(second, keep_history=True), keep)
tell(answer=answer, fits=size == len(first.ids) + generated, again=text(),
     prefill=two.perf.prefill_tokens, sent=len(second.ids), end=two.end.value,
     grown=runtime.kv_cache_size() > size)
runtime.clear_kv_cache()
assert runtime.kv_cache_size() == 0
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts["answer"].startswith("the sky is blue")
    assert facts["again"].startswith("你好 é")
    assert facts["fits"]
    assert facts["grown"]
    assert facts["prefill"] == facts["sent"]
    assert facts["end"] == "finished"


@pytest.mark.parametrize("release", RELEASES)
def test_a_paused_run_goes_on_where_it_was_and_says_the_same(release: str, tmp_path: Path) -> None:
    script = """
load()
prompt = chat("Count to 20")
runtime.run(RunParams(prompt), keep)
whole = text()
pieces.clear()
def pause_at_9(piece):
    pieces.append(piece)
    return Verdict.PAUSE if len(pieces) == 9 else Verdict.CONTINUE
paused = runtime.run(RunParams(prompt), pause_at_9)
misuse(lambda: runtime.clear_kv_cache())
misuse(lambda: runtime.set_chat_template("", "", ""))
misuse(lambda: runtime.run(RunParams(prompt), keep))
misuse(lambda: runtime.abort())
held = runtime.kv_cache_size() - len(prompt.ids)
resumed = runtime.run(RunParams(TokenInput((pieces[-1].token_id,)), resume=True), keep)
tell(whole=whole, pieced=text(), held=held, ends=[paused.end.value, resumed.end.value])
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts["pieced"] == facts["whole"]
    assert facts["held"] == 8  # the token that paused it is not in the KV cache yet
    assert facts["ends"] == ["paused", "finished"]


@pytest.mark.parametrize("release", RELEASES)
def test_an_aborted_conversation_is_cleared_and_served_again(release: str, tmp_path: Path) -> None:
    script = """
load()
def abort_at_5(piece):
    pieces.append(piece)
    if len(pieces) == 5:
        runtime.abort()
    elif len(pieces) > 5:
        threading.Event().wait(0.02)  # the abort is asynchronous and this board infinitely fast
    return Verdict.CONTINUE
aborted = runtime.run(RunParams(chat("Write 150 tokens"), keep_history=True), abort_at_5)
short = len(pieces)
misuse(lambda: runtime.run(RunParams(chat("Count to 3"), keep_history=True), keep))
runtime.clear_kv_cache()
pieces.clear()
runtime.run(RunParams(chat("Count to 3"), keep_history=True), keep)
tell(end=aborted.end.value, short=short, answer=text(), late=runtime.late_callbacks,
     running=runtime.is_running())
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts["end"] == "finished"
    assert 5 <= facts["short"] < 150
    assert facts["answer"].startswith("1, 2, 3")
    assert (facts["late"], facts["running"]) == (0, False)


@pytest.mark.parametrize("release", RELEASES)
def test_rendered_text_goes_through_an_emptied_template(release: str, tmp_path: Path) -> None:
    script = """
load()
rendered = PromptInput("<|im_start|>user\\nCount to 4<|im_end|>\\n<|im_start|>assistant\\n")
misuse(lambda: runtime.run(RunParams(rendered), keep))
runtime.set_chat_template("", "", "")
runtime.run(RunParams(rendered), keep)
tell(answer=text())
runtime.destroy()
"""
    assert told(child(release, script, tmp_path=tmp_path))["answer"].startswith("1, 2, 3, 4")


def test_a_token_limit_per_run_is_the_librarys_on_1_3_0(tmp_path: Path) -> None:
    script = """
load()
runtime.run(RunParams(chat("Write 150 tokens"), max_new_tokens=7,
                      sampling=Sampling(temperature=0)), keep)
tell(tokens=len(pieces))
runtime.destroy()
"""
    assert told(child("1.3.0", script, tmp_path=tmp_path)) == {"tokens": 7}


@pytest.mark.parametrize("release", RELEASES)
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


@pytest.mark.parametrize("release", RELEASES)
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
failed = runtime.run(RunParams(chat({text!r})), keep)
seen = len(pieces)
pieces.clear()
runtime.run(RunParams(chat("Count to 2")), keep)
tell(end=failed.end.value, seen=seen, answer=text())
runtime.destroy()
"""
    done = child(release, script, tmp_path=tmp_path, fault=fault, strict=False)
    facts = told(done)
    assert facts["end"] == "failed"
    assert facts["seen"] <= tokens
    assert facts["answer"].startswith("1, 2")


@pytest.mark.parametrize("release", RELEASES)
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
runtime.run(RunParams(chat("Count to 9")), keep)
"""
    done = child(release, script, tmp_path=tmp_path, fault=fault)
    assert done.returncode == -number


def test_strict_mode_would_have_noticed_a_misuse(tmp_path: Path) -> None:
    """The other tests prove nothing if this one passes a misuse."""
    script = """
load()
runtime.run(RunParams(chat("Count to 9")), lambda piece: Verdict.PAUSE)
binding_only = runtime._lib  # past the binding, as others do it
binding_only.rkllm_clear_kv_cache(runtime._handle, 0, runtime._ffi.NULL, runtime._ffi.NULL)
binding_only.rkllm_run(runtime._handle, runtime._dialect.inputs(runtime._lib, chat("x"), []),
    runtime._dialect.infer_params(runtime._lib, RunParams(chat("x")), []), runtime._ffi.NULL)
"""
    done = child("1.2.3", script, tmp_path=tmp_path)
    assert done.returncode == -signal.SIGABRT
    assert "violation" in done.stderr
