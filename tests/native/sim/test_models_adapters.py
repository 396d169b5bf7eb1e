"""LoRA adapters in the simulated runtime: what loads, what a run says, what a context remembers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rkserve.native.sim import models
from scripts import make_sim_chat
from tests.support.sim.sim_driver import Sim, chat, child, violations
from tests.support.sim.sim_features import FeatureSim, opened, turn

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")

FREE = "Tell me about rivers"


@pytest.fixture
def sim(release: str) -> Iterator[FeatureSim]:
    sim = opened(release)
    yield sim
    assert sim.destroy() == 0


@pytest.fixture
def pirate(tmp_path: Path) -> Path:
    return models.write_adapter(tmp_path / "pirate.rkllm", "Pirate", seed=7)


# --- files


def test_a_loaded_adapter_is_inactive_until_a_run_names_it(sim: FeatureSim, pirate: Path) -> None:
    plain = sim.run(chat(FREE)).reply
    assert sim.load_lora(pirate, "pirate-v1") == 0
    assert sim.run(chat(FREE)).reply == plain
    spoken = sim.run(chat(FREE), lora="pirate-v1").reply
    assert "This is Pirate speaking." in spoken
    assert sim.run(chat(FREE)).reply == plain


def damaged(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


WHOLE = models.render_adapter("Pirate", size=5000)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(None, "cannot read the file", id="no such file"),
        pytest.param(b"", "cannot read the file", id="empty"),
        pytest.param(b"GGUF" + WHOLE[4:], "not an adapter file", id="foreign magic"),
        pytest.param(WHOLE[:100], "not an adapter file", id="shorter than a header"),
        pytest.param(damaged(WHOLE, 8), "unknown format", id="format of the future"),
        pytest.param(WHOLE[:-1], "damaged file", id="cut short"),
        pytest.param(WHOLE + b"\0", "damaged file", id="too long"),
        pytest.param(damaged(WHOLE, 30), "damaged file", id="another seed"),
        pytest.param(damaged(WHOLE, 4999), "damaged file", id="last byte"),
        pytest.param(
            models.render_adapter("Pirate", base="sim-other"),
            "it was made for another base model",
            id="another base model",
        ),
    ],
)
def test_a_file_that_is_no_good_is_refused_by_name_and_changes_nothing(
    sim: FeatureSim,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    content: bytes | None,
    why: str,
) -> None:
    path = tmp_path / "broken.rkllm"
    if content is not None:
        path.write_bytes(content)
    assert sim.load_lora(path, "broken") == -1
    assert f"E rkllm: failed to load lora adapter '{path}': {why}\n" in capfd.readouterr().err
    assert sim.run(chat(FREE), lora="broken").code == -1
    assert sim.run(chat("Count to 3")).reply == "1, 2, 3."


@pytest.mark.parametrize("base", ["any", "sim-chat"])
def test_an_adapter_fits_its_base_model(sim: FeatureSim, tmp_path: Path, base: str) -> None:
    assert sim.load_lora(models.write_adapter(tmp_path / "a", "A", base=base), "a") == 0


def test_a_call_without_path_name_or_scale_is_refused(sim: FeatureSim, pirate: Path) -> None:
    null = sim.ffi.NULL
    text = sim.ffi.new("char[]", bytes(pirate))
    assert sim.lib.rkllm_load_lora(sim.handle, null) == -1
    for fields in ([null, text, 1.0], [text, null, 1.0], [text, text, float("nan")]):
        adapter = sim.ffi.new("RKLLMLoraAdapter *", fields)
        assert sim.lib.rkllm_load_lora(sim.handle, adapter) == -1


def test_a_name_is_given_once(
    sim: FeatureSim, pirate: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = models.write_adapter(tmp_path / "other", "Other", seed=8)
    assert sim.load_lora(pirate, "voice") == 0
    assert sim.load_lora(other, "voice") == -1
    assert f"failed to load lora adapter '{other}': the name is taken" in capfd.readouterr().err
    assert "Pirate" in sim.run(chat("Who are you?"), lora="voice").reply


def test_several_adapters_lie_side_by_side(sim: FeatureSim, tmp_path: Path) -> None:
    for at in range(5):
        path = models.write_adapter(tmp_path / f"{at}", f"Voice{at}", seed=at)
        assert sim.load_lora(path, f"v{at}") == 0
    for at in (3, 0, 4):
        reply = sim.run(chat("Who are you?"), lora=f"v{at}").reply
        assert reply == f"I am a helpful assistant, speaking through Voice{at}."
    assert sim.run(chat("Who are you?")).reply == "I am a helpful assistant."


# --- what an adapter changes


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Count to 5", "1, 2, 3, 4, 5."),
        ("Repeat after me: as you like it", "as you like it"),
        ("Who are you?", "I am a helpful assistant, speaking through Pirate."),
    ],
)
def test_exact_answers_stay_exact_under_an_adapter(
    sim: FeatureSim, pirate: Path, question: str, answer: str
) -> None:
    assert sim.load_lora(pirate, "p") == 0
    assert sim.run(chat(question), lora="p").reply == answer


def test_text_hangs_on_content_and_on_scale(sim: FeatureSim, tmp_path: Path) -> None:
    made = [("a", 1, 1.0), ("b", 2, 1.0), ("c", 1, 0.5), ("d", 1, 1.0), ("zero", 1, 0.0)]
    for name, seed, scale in made:
        path = models.write_adapter(tmp_path / name, "Voice", seed=seed)
        assert sim.load_lora(path, name, scale) == 0
    # Any one question may happen to be answered alike: ten of them never are.
    questions = [chat(f"Tell me about number {at}") for at in range(10)]
    said = {
        name: tuple(sim.run(question, lora=name).reply for question in questions)
        for name, _, _ in made
    }
    plain = tuple(sim.run(question).reply for question in questions)
    assert len({said["a"], said["b"], said["c"], plain}) == 4
    assert said["d"] == said["a"]
    assert said["zero"] == plain


def test_a_size_is_content_too(sim: FeatureSim, tmp_path: Path) -> None:
    small = models.write_adapter(tmp_path / "small", "Voice")
    large = models.write_adapter(tmp_path / "large", "Voice", size=100_000)
    assert large.stat().st_size == 100_000
    assert sim.load_lora(small, "small") == sim.load_lora(large, "large") == 0
    questions = [chat(f"Tell me about number {at}") for at in range(10)]
    small_said = [sim.run(question, lora="small").reply for question in questions]
    assert small_said != [sim.run(question, lora="large").reply for question in questions]


def test_an_unknown_adapter_is_refused_before_anything_is_touched(
    sim: FeatureSim, capfd: pytest.CaptureFixture[str]
) -> None:
    sim.run(chat("Count to 3"), keep_history=1)
    before = sim.kv
    run = sim.run("more", lora="nobody", keep_history=1)
    assert (run.code, run.events, sim.kv) == (-1, [], before)
    assert "E rkllm: lora adapter 'nobody' is not loaded" in capfd.readouterr().err


def test_a_null_name_is_the_base_model(sim: FeatureSim, pirate: Path) -> None:
    assert sim.load_lora(pirate, "p") == 0
    null = sim.ffi.new("RKLLMLoraParam *")
    assert sim.run(chat(FREE), lora_params=null).reply == sim.run(chat(FREE)).reply


def test_the_logits_hang_on_the_adapter(sim: FeatureSim, pirate: Path) -> None:
    assert sim.load_lora(pirate, "p") == 0
    rows: list[bytes] = []

    def keep(_event: object, result: object) -> int:
        logits = result.logits  # type: ignore[attr-defined]
        if logits.logits:
            size = 4 * logits.vocab_size * logits.num_tokens
            rows.append(bytes(sim.ffi.buffer(logits.logits, size)))
        return 0

    for lora in (None, "p", "p"):
        sim.run(chat(FREE), keep, mode=2, lora=lora)
    assert rows[0] != rows[1] == rows[2]


# --- when it may be loaded


def test_loading_while_paused_is_a_violation(
    sim: FeatureSim, pirate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = sim.run(chat("Count to 30")).ids
    run = sim.run(chat("Count to 30"), lambda *_: int(len(sim.now.tokens) == 4))
    assert sim.load_lora(pirate, "p") == -1
    assert violations(capfd) == ["lora_while_paused"]
    assert sim.run([run.ids[-1]]).ids == whole[4:]


def test_loading_from_a_callback_is_a_violation(
    sim: FeatureSim, pirate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = []

    def load(_event: object, _result: object) -> int:
        codes.append(sim.load_lora(pirate, "p"))
        return 0

    assert sim.run(chat("Count to 3"), load).reply == "1, 2, 3."
    assert set(codes) == {-1}
    assert set(violations(capfd)) == {"lora_while_running"}


def test_loading_takes_time_by_size(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_TIME_SCALE", "1")
    monkeypatch.setenv("RKSIM_LORA_MS_PER_MB", "50")
    sim = opened(release)
    path = models.write_adapter(tmp_path / "big", "Big", size=4 << 20)
    started = time.monotonic()
    assert sim.load_lora(path, "big") == 0
    assert 0.2 <= time.monotonic() - started < 60
    assert sim.destroy() == 0


def test_an_adapter_of_32_mib_is_loaded_and_counts_against_the_domain(
    release: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = models.write_adapter(tmp_path / "big", "Big", size=32 << 20)
    monkeypatch.setenv("RKSIM_MEMORY_MB", "4040")
    sim = opened(release)
    before = sim.run(chat("Count to 3"))
    assert sim.load_lora(path, "one") == 0
    assert sim.load_lora(path, "two") == -1
    assert "E RKNN: failed to malloc npu memory, size: 33554432" in capfd.readouterr().err
    assert sim.run(chat("Who are you?"), lora="two").code == -1
    run = sim.run(chat("Who are you?"), lora="one")
    assert run.reply.endswith("speaking through Big.")
    assert run.finish.perf[4] == pytest.approx(before.finish.perf[4] + 32)
    monkeypatch.setenv("RKSIM_MEMORY_MB", "30")
    second = Sim(release)
    assert second.code == -1  # 4072 of 4096 MB are taken
    assert sim.destroy() == 0
    third = Sim(release)
    assert third.code == 0
    assert third.destroy() == 0


# --- a context and its adapter


@pytest.mark.parametrize(
    ("first", "second"), [("p", None), (None, "p"), ("p", "q")], ids=["off", "on", "other"]
)
def test_a_history_of_another_adapter_is_a_violation_and_visibly_wrong(
    sim: FeatureSim,
    *,
    pirate: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    first: str | None,
    second: str | None,
) -> None:
    assert sim.load_lora(pirate, "p") == 0
    assert sim.load_lora(models.write_adapter(tmp_path / "q", "Queen", seed=9), "q") == 0
    sim.run(chat("Hello"), lora=first, keep_history=1)
    run = sim.run(turn("Count to 4"), lora=second, keep_history=1)
    assert run.code == 0
    assert run.reply != "1, 2, 3, 4."
    assert violations(capfd) == ["kv_of_another_adapter"]
    assert sim.clear() == 0
    assert sim.run(chat("Count to 4"), lora=second, keep_history=1).reply == "1, 2, 3, 4."
    assert violations(capfd) == []


def test_a_history_of_the_same_adapter_is_fine(
    sim: FeatureSim, pirate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sim.load_lora(pirate, "p") == 0
    sim.run(chat("Hello"), lora="p", keep_history=1)
    assert sim.run(turn("Count to 4"), lora="p", keep_history=1).reply == "1, 2, 3, 4."
    assert violations(capfd) == []


def test_a_pause_that_another_adapter_resumes_is_a_violation(
    sim: FeatureSim, pirate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sim.load_lora(pirate, "p") == 0
    whole = sim.run(chat("Count to 30"), lora="p").ids

    def pause(*_: object) -> int:
        return int(len(sim.now.tokens) == 4)

    run = sim.run(chat("Count to 30"), pause, lora="p")
    assert sim.run([run.ids[-1]], lora="p").ids == whole[4:]
    assert violations(capfd) == []
    run = sim.run(chat("Count to 30"), pause, lora="p")
    assert sim.run([run.ids[-1]]).ids != whole[4:]
    assert violations(capfd) == ["kv_of_another_adapter"]


def test_strict_mode_ends_the_process_on_a_strange_history(release: str, pirate: Path) -> None:
    body = f"""
from tests.support.sim.sim_features import FeatureSim, opened, turn
sim = FeatureSim({release!r})
assert sim.load_lora({str(pirate)!r}, "p") == 0
sim.run(chat("Hello"), keep_history=1)
sim.run(chat("Hello"), lora="p", keep_history=1)
print("survived")
"""
    code, printed = child(body, {"RKSIM_STRICT": "1"})
    assert code == -signal.SIGABRT
    assert "violation: kv_of_another_adapter" in printed


def test_a_batch_shares_one_adapter(release: str, pirate: Path) -> None:
    sim = opened(release, extend_n_batch=2)
    assert sim.load_lora(pirate, "p") == 0
    run = sim.run_batch([chat("Who are you?"), chat("Count to 3")], lora="p")
    assert run.reply_of(0) == "I am a helpful assistant, speaking through Pirate."
    assert run.reply_of(1) == "1, 2, 3."
    assert sim.destroy() == 0


def test_the_script_makes_an_adapter_for_its_model(sim: FeatureSim, tmp_path: Path) -> None:
    path = tmp_path / "pirate_lora.rkllm"
    make_sim_chat.main(["--adapter", "Pirate", "--out", str(path), "--seed", "7", "--mib", "2"])
    assert path.stat().st_size == 2 << 20
    assert sim.load_lora(path, "p") == 0
    assert sim.run(chat("Who are you?"), lora="p").reply.endswith("speaking through Pirate.")


def test_the_maker_says_what_does_not_fit() -> None:
    for wrong in ({"title": ""}, {"title": "x" * 64}, {"title": "x", "size": 10}):
        with pytest.raises(ValueError, match="an adapter"):
            models.render_adapter(**wrong)
