"""The rest of the interface through the binding, on the simulated runtime in strict mode.

Each script runs in a process of its own, which dies of any misuse; see binding_child.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rkserve.native.sim import models
from tests.support.sim.binding_child import child, told
from tests.support.sim.releases import BOTH, EVERY

BOTH_RELEASES = pytest.mark.parametrize("release", BOTH)
EVERY_RELEASE = pytest.mark.parametrize("release", EVERY)


@EVERY_RELEASE
@pytest.mark.parametrize("n_batch", [1, 2, 8])
def test_a_batch_says_what_each_of_its_entries_would_say_alone(
    release: str, n_batch: int, tmp_path: Path
) -> None:
    script = f"""
n = {n_batch}
questions = [f"Count to {{3 + 2 * place}}" for place in range(n)]
load(n_batch=n, max_context_len=256)
steps = []
def keep_steps(step):
    steps.append(step)
    return SinkAction.CONTINUE
outcome = runtime.run(RunParams(tuple(chat(q) for q in questions)), keep_steps)
texts = [b"".join(s[at].text for s in steps if s[at] is not None).decode() for at in range(n)]
gone = [[s[at] is None for s in steps] for at in range(n)]
tell(texts=texts, end=outcome.end.value, sizes=runtime.kv_cache_sizes(),
     sorted=all(entry == sorted(entry) for entry in gone), last=gone[-1][-1])
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    ends = [text.split(", ")[-1] for text in facts["texts"]]
    assert ends == [f"{3 + 2 * place}." for place in range(n_batch)]
    assert (facts["end"], facts["sizes"]) == ("finished", [0] * n_batch)
    assert facts["sorted"]  # once an entry has ended it never speaks again
    assert not facts["last"]


@BOTH_RELEASES
def test_a_batch_is_paused_resumed_and_drained_where_a_quirk_says_so(
    release: str, tmp_path: Path
) -> None:
    script = """
runtime = open_runtime(library, {"pause_with_batch": True})
load(n_batch=2, max_context_len=256)
steps = []
def until(count):
    def sink(step):
        steps.append(step)
        return SinkAction.PAUSE if len(steps) == count else SinkAction.CONTINUE
    return sink
prompts = (chat("Count to 20"), chat("Count to 30"))
runtime.run(RunParams(prompts), until(0))
whole = [[s[at].token_id for s in steps if s[at] is not None] for at in (0, 1)]
steps.clear()
first = runtime.run(RunParams(prompts), until(9))
again = tuple(TokenInput((piece.token_id,)) for piece in steps[-1])
second = runtime.run(RunParams(again, resume=True), until(0))
pieced = [[s[at].token_id for s in steps if s[at] is not None] for at in (0, 1)]
runtime.run(RunParams(prompts), until(len(steps) + 5))
runtime.drain()
tell(same=pieced == whole, ends=[first.end.value, second.end.value], state=runtime.state.value,
     sizes=runtime.kv_cache_sizes())
runtime.destroy()
"""
    env = {"RKSIM_PAUSE_WITH_BATCH": "1"}
    facts = told(child(release, script, tmp_path=tmp_path, env=env))
    assert facts["same"]
    assert facts["ends"] == ["paused", "finished"]
    assert (facts["state"], facts["sizes"]) == ("idle", [0, 0])


@EVERY_RELEASE
def test_the_rows_of_an_evaluation_agree_with_what_is_generated(
    release: str, tmp_path: Path
) -> None:
    script = """
import struct
load()
prompt = chat("Count to 7")
runtime.run(run_of(prompt, ), keep)
logits = runtime.evaluate(prompt, EvaluateMode.LOGITS)
hidden = runtime.evaluate(prompt, EvaluateMode.HIDDEN)
row = struct.unpack(f"{logits.columns}f", logits.data[-4 * logits.columns:])
tell(best=row.index(max(row)), first=pieces[0].token_id, rows=[logits.rows, hidden.rows],
     sent=len(prompt.ids), bytes=len(hidden.data) == 4 * hidden.rows * hidden.columns,
     state=runtime.state.value)
misuse(lambda: runtime.evaluate(prompt, EvaluateMode.LOGITS, keep_history=True))
pieces.clear()
runtime.run(run_of(prompt), pausing_at(3))
misuse(lambda: runtime.evaluate(prompt, EvaluateMode.HIDDEN))
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts["best"] == facts["first"]
    assert facts["rows"] == [facts["sent"]] * 2
    assert (facts["bytes"], facts["state"]) == (True, "idle")


@EVERY_RELEASE
def test_logits_of_a_library_that_generates_on_cost_no_answer(release: str, tmp_path: Path) -> None:
    script = """
Path(os.environ["RKSIM_CONTROL"]).write_text("time_scale=1")
load(max_new_tokens=400)
matrix = runtime.evaluate(chat("Write 400 tokens"), EvaluateMode.LOGITS, last=True)
tell(rows=matrix.rows, state=runtime.state.value)
runtime.destroy()
"""
    env = {
        "RKSIM_LOGITS_GENERATE": "1",
        "RKSIM_HIDDEN_FINISH": "1",
        "RKSIM_PROFILE": "rk3588-minicpm4-0.5b-w8a8",  # 400 tokens take 9 s
        "RKLLM_LOG_LEVEL": "1",
    }
    done = child(release, script, tmp_path=tmp_path, env=env)
    assert told(done) == {"rows": 1, "state": "idle"}
    (generated,) = re.findall(r"Generate +[\d.]+ +(\d+)", done.stderr)
    assert int(generated) < 100  # as many as it takes to notice it, not the whole answer


@BOTH_RELEASES
@pytest.mark.parametrize("finish", ["0", "1"])
def test_rows_come_with_or_without_finish_and_an_empty_callback(
    release: str, finish: str, tmp_path: Path
) -> None:
    script = """
load()
matrix = runtime.evaluate(chat("hello"), EvaluateMode.HIDDEN)
runtime.run(run_of(chat("Count to 3")), keep)
tell(rows=matrix.rows, sent=len(chat("hello").ids), answer=text())
runtime.destroy()
"""
    env = {"RKSIM_HIDDEN_FINISH": finish, "RKSIM_HIDDEN_EMPTY_FIRST": finish}
    facts = told(child(release, script, tmp_path=tmp_path, env=env))
    assert facts["rows"] == facts["sent"]
    assert facts["answer"].startswith("1, 2, 3")


@BOTH_RELEASES
def test_an_adapter_speaks_where_it_is_named_and_nowhere_else(release: str, tmp_path: Path) -> None:
    models.write_adapter(tmp_path / "pirate.rkllm", "Pirate", seed=3)
    (tmp_path / "broken.rkllm").write_bytes(b"no adapter at all")
    script = f"""
load()
folder = Path({str(tmp_path)!r})
runtime.load_adapter(str(folder / "pirate.rkllm"), "pirate")
try:
    runtime.load_adapter(str(folder / "broken.rkllm"), "broken")
except CallFailed as exc:
    refused = str(exc)
answers = []
for adapter in (None, "pirate", None):
    pieces.clear()
    runtime.run(run_of(chat("Who are you?"), adapter=adapter), keep)
    answers.append(text())
history = run_of(chat("Count to 3"), keep_history=True)
runtime.run(history, keep)
misuse(lambda: runtime.run(run_of(chat("Hi"), keep_history=True, adapter="pirate"), keep))
runtime.clear_kv_cache()
runtime.run(run_of(chat("Hi"), keep_history=True, adapter="pirate"), keep)
pieces.clear()
runtime.run(run_of(chat("Write 40 tokens"), adapter="pirate"), keep)
whole = text()
pieces.clear()
runtime.run(run_of(chat("Write 40 tokens"), adapter="pirate"), pausing_at(9))
misuse(lambda: runtime.run(run_of(last(), resume=True), keep))
runtime.run(run_of(last(), resume=True, adapter="pirate"), pausing_at(19))
runtime.run(run_of(last(), resume=True, adapter="pirate"), keep)
same = text() == whole
runtime.run(run_of(chat("Hi"), adapter="pirate"), pausing_at(len(pieces) + 1))
runtime.drain()
tell(answers=answers, refused=refused, same=same)
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    base, pirate, again = facts["answers"]
    assert base == again != pirate
    assert "Pirate" in pirate
    assert facts["refused"] == "rkllm_load_lora returned -1"
    assert facts["same"]


@BOTH_RELEASES
def test_a_saved_context_spares_the_next_process_its_prefill(release: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.cache"
    prompt = """
load()
prompt = chat("Repeat after me: the cache remembers all of these words")
"""
    save = f"""{prompt}
outcome = runtime.run(run_of(prompt, save_cache={str(file)!r}), keep)
tell(prefill=outcome.perf.prefill_tokens, sent=len(prompt.ids), answer=text())
runtime.destroy()
"""
    use = f"""{prompt}
runtime.load_prompt_cache({str(file)!r})
outcome = runtime.run(run_of(prompt), keep)
answer = text()
runtime.release_prompt_cache()
runtime.clear_kv_cache()  # 1.3 would find the prompt in RAM, too
cold = runtime.run(run_of(prompt), keep)
runtime.abort()  # of an idle handle: spoils nothing
runtime.load_prompt_cache({str(file)!r})
tell(prefill=outcome.perf.prefill_tokens, cold=cold.perf.prefill_tokens, answer=answer)
runtime.destroy()
"""
    first = told(child(release, save, tmp_path=tmp_path))
    second = told(child(release, use, tmp_path=tmp_path))
    assert first["prefill"] == second["cold"] == first["sent"]
    assert second["prefill"] == 0
    assert second["answer"] == first["answer"]
    file.write_bytes(file.read_bytes()[:100])
    refused = child(
        release,
        f"load()\nruntime.load_prompt_cache({str(file)!r})",
        tmp_path=tmp_path,
    )
    assert "CallFailed: rkllm_load_prompt_cache returned -1" in refused.stderr


@BOTH_RELEASES
@pytest.mark.parametrize("limited", [True, False])
def test_a_drain_tells_the_prompt_cache_whether_it_was_an_abort(
    release: str, limited: bool, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.cache"
    script = f"""
runtime = open_runtime(library, {{"drain_by_limit": {limited}}})
load()
runtime.run(run_of(chat("Count to 5"), save_cache={str(file)!r}), keep)
pieces.clear()
runtime.run(run_of(chat("Write 40 tokens")), pausing_at(5))
runtime.drain()
try:
    runtime.load_prompt_cache({str(file)!r})
    loaded = True
except Misuse:
    loaded = False
tell(loaded=loaded, seen=len(pieces), state=runtime.state.value)
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts["loaded"] is (limited and release == "1.3.0")
    assert (facts["seen"], facts["state"]) == (5, "idle")


@BOTH_RELEASES
@pytest.mark.parametrize("limited", [True, False])
def test_a_paused_handle_with_a_full_kv_cache_is_drained(
    release: str, limited: bool, tmp_path: Path
) -> None:
    """There is no room for the token that ends the run, before one position is given up."""
    script = f"""
runtime = open_runtime(library, {{"drain_by_limit": {limited}}})
load(max_context_len=64)
def pausing_when_full(prompt):
    at = [0]
    def sink(step):
        keep(step)
        at[0] += 1
        return SinkAction.PAUSE if len(prompt.ids) + at[0] - 1 == 64 else SinkAction.CONTINUE
    return sink
prompt = chat("Write 200 tokens")
outcome = runtime.run(run_of(prompt), pausing_when_full(prompt))
full = runtime.kv_cache_sizes()
runtime.drain()
state, after = runtime.state.value, runtime.kv_cache_sizes()
pieces.clear()
runtime.run(run_of(chat("Count to 3")), keep)
tell(end=outcome.end.value, full=full, state=state, after=after, answer=text())
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert (facts["end"], facts["full"]) == ("paused", [64])
    assert (facts["state"], facts["after"]) == ("idle", [0])
    assert facts["answer"] == "1, 2, 3."


@BOTH_RELEASES
def test_a_resumption_that_is_refused_ends_the_pause(release: str, tmp_path: Path) -> None:
    script = """
load(max_context_len=128)
runtime.run(run_of(chat("Write 40 tokens")), pausing_at(5))
refused = runtime.run(run_of(ids("word " * 500), resume=True), keep)
state = runtime.state.value
runtime.clear_kv_cache()
pieces.clear()
runtime.run(run_of(chat("Count to 3")), keep)
tell(end=refused.end.value, code=refused.return_code, state=state, answer=text())
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert (facts["end"], facts["code"], facts["state"]) == ("failed", -1, "idle")
    assert facts["answer"].startswith("1, 2, 3")


@BOTH_RELEASES
def test_cutting_a_range_is_as_if_its_tokens_had_never_been(release: str, tmp_path: Path) -> None:
    script = """
load()
prompt = chat("Write 40 tokens")
runtime.run(run_of(prompt), keep)
whole = [piece.token_id for piece in pieces]
pieces.clear()
runtime.run(run_of(prompt), pausing_at(12))
size = runtime.kv_cache_sizes()[0]
misuse(lambda: runtime.clear_kv_range([(size - 5, size + 1)]))
misuse(lambda: runtime.clear_kv_range([(5, 4)]))
runtime.clear_kv_range([(size - 5, size)])
runtime.clear_kv_range([(3, 3)])
cut = size - runtime.kv_cache_sizes()[0]
del pieces[6:]
rest = runtime.run(run_of(TokenInput(tuple(whole[6:8])), resume=True), keep)
tell(cut=cut, same=[piece.token_id for piece in pieces] == whole[:6] + whole[8:])
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts == {"cut": 5, "same": True}


@BOTH_RELEASES
def test_text_given_as_embeddings_is_answered_as_text(release: str, tmp_path: Path) -> None:
    script = """
from rkserve.native.sim import models
load()
prompt = chat("Count to 6")
runtime.run(run_of(EmbedInput(models.embeddings(prompt.ids), len(prompt.ids))), keep)
tell(answer=text())
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts["answer"].startswith("1, 2, 3, 4, 5, 6")


@EVERY_RELEASE
def test_a_picture_is_seen(release: str, tmp_path: Path) -> None:
    tags = '("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")'
    picture = models.rows([0.25] * 64 * 4)
    at_load, with_it = ("", f", tags={tags}") if release != "1.2.3" else (f"image_tags={tags}", "")
    script = f"""
load({at_load})
image = Image({picture!r}, n_tokens=4, n_images=1, width=392, height=392{with_it})
runtime.run(run_of(MultimodalInput("<image>What is this?", image=image)), keep)
tell(answer=text())
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts["answer"].startswith(f"The picture shows pattern {models.pattern(picture)}.")


def test_a_video_is_seen_by_1_3_0(tmp_path: Path) -> None:
    video = models.rows([0.5] * 64 * 6)
    script = f"""
load()
video = Video({video!r}, n_tokens=2, n_frames=3, n_videos=1, width=64, height=64)
runtime.run(run_of(MultimodalInput("<video>What is this?", video=video)), keep)
tell(answer=text())
runtime.destroy()
"""
    facts = told(child("1.3.0", script, tmp_path=tmp_path))
    assert facts["answer"].startswith(f"The video shows pattern {models.pattern(video)}.")


def test_our_tokenizer_and_embedding_layer_serve_a_model_without(tmp_path: Path) -> None:
    script = """
from rkserve.native.sim import models
asked = []
def tokenize(text):
    asked.append(text)
    return tokenizer.encode(text, add_special_tokens=False).ids
load(tokenize=tokenize, embed=models.embeddings)
gc.collect()
runtime.run(run_of(PromptInput("Count to 6")), keep)
silent = text()
answer = tokenizer.decode([piece.token_id for piece in pieces])
try:
    runtime.run(run_of(PromptInput("boom")), lambda step: asked.append(1 / 0))
except ZeroDivisionError:
    asked.append("the sink failed")
tell(answer=answer, silent=silent, asked=[str(a) for a in asked])
runtime.destroy()
"""
    env = {"RKSIM_NO_TOKENIZER": "1", "RKSIM_NO_EMBEDDING": "1"}
    facts = told(child("1.3.0", script, tmp_path=tmp_path, env=env))
    assert facts["answer"].startswith("1, 2, 3, 4, 5, 6")
    assert facts["silent"] == ""
    assert any("Count to 6" in text for text in facts["asked"])
    assert facts["asked"][-1] == "the sink failed"


@BOTH_RELEASES
def test_an_encoders_output_changes_what_follows(release: str, tmp_path: Path) -> None:
    script = """
import struct
from rkserve.native.sim import models
load(use_cross_attn=True)
answers = []
for value in (None, 0.25, 0.5):
    if value is not None:
        cache = models.rows([value] * models.CROSS_DIM * 3)
        runtime.set_cross_attention(CrossAttention(
            cache, cache, struct.pack("3f", 1, 1, 1), struct.pack("3i", 0, 1, 2), 3))
        gc.collect()
    pieces.clear()
    runtime.run(run_of(chat("tell me a story")), keep)
    answers.append(text())
tell(answers=len(set(answers)))
runtime.destroy()
"""
    assert told(child(release, script, tmp_path=tmp_path)) == {"answers": 3}


@BOTH_RELEASES
def test_tools_are_called(release: str, tmp_path: Path) -> None:
    script = """
load()
runtime.set_function_tools("You are kind.", json.dumps([{"type": "function", "function": {
    "name": "get_weather", "description": "weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]), "tool_response")
runtime.run(run_of(PromptInput("What is the weather in Paris?")), keep)
tell(answer=text())
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert "<tool_call>" in facts["answer"]
    assert "get_weather" in facts["answer"]


@BOTH_RELEASES
def test_an_asynchronous_run_whose_input_is_refused_is_given_up(
    release: str, tmp_path: Path
) -> None:
    script = """
load()
ends = []
runtime.run_async(run_of(ids("word " * 900)), keep, ends.append)
for _ in range(3000):
    if not runtime.poll_async():
        break
    time.sleep(0.01)
runtime.run(run_of(chat("Count to 3")), keep)
tell(ends=[outcome.end.value for outcome in ends], answer=text())
runtime.destroy()
"""
    facts = told(child(release, script, tmp_path=tmp_path))
    assert facts["ends"] == ["failed"]
    assert facts["answer"].startswith("1, 2, 3")
