"""Prompt caches in the simulated runtime: the file, what a loaded one saves, what is refused."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rkserve.native.sim import models
from tests.support.sim.sim_driver import FINISH, NORMAL, Aborted, Event, chat, ids_of
from tests.support.sim.sim_features import CACHE_HEADER, FeatureSim, Rows, held, opened, turn

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("files_only")

FIXED, QWEN25_15B = 615371, 28672


@pytest.fixture
def sim(release: str, files_only: None) -> Iterator[FeatureSim]:
    sim = opened(release)
    yield sim
    assert sim.destroy() == 0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache.bin"


# --- saving


def test_the_file_holds_prompt_and_answer_and_has_the_vendors_size(
    sim: FeatureSim, cache: Path
) -> None:
    prompt = chat("Count to 5")
    run = sim.run(prompt, save=cache)
    assert run.code == 0
    assert held(cache) == prompt + run.ids[:-1]  # EOS never joins the cache
    assert cache.stat().st_size == FIXED + len(held(cache)) * QWEN25_15B
    magic, form, crc, size, adapter, model, n, *_ = CACHE_HEADER.unpack_from(cache.read_bytes())
    assert (magic, form, adapter, model.rstrip(b"\0")) == (b"RKSIMKVC", 2, 0, b"sim-chat")
    assert size == cache.stat().st_size
    assert crc == zlib.crc32(cache.read_bytes()[16 : CACHE_HEADER.size + 20 * n])


@pytest.mark.parametrize(
    ("profile", "per_token"),
    [
        ("rk3588-qwen3-4b-w8a8-unpinned", 147472),
        ("rk3588-qwen3-0.6b-w8a8", 114688),
        ("rk3588-qwen3-1.7b-w8a8-fitted", 114688),
        ("rk3576-qwen2-0.5b-w4a16", 12288),
        ("rk3588-tinyllama-1.1b-w8a8", 22528),
        ("rk3576-phi3-3.8b-w4a16", 393216),
        ("rk3588-gemma2-2b-w8a8", 28672),
    ],
)
def test_the_size_follows_the_model_family(
    release: str, cache: Path, monkeypatch: pytest.MonkeyPatch, *, profile: str, per_token: int
) -> None:
    monkeypatch.setenv("RKSIM_PROFILE", profile)
    sim = opened(release)
    sim.run(chat("Count to 5"), save=cache)
    assert sim.destroy() == 0
    assert cache.stat().st_size == FIXED + len(held(cache)) * per_token


def test_a_dense_file_has_the_same_size_and_no_holes(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = opened(release)
    sim.run(chat("Count to 5"), save=tmp_path / "sparse")
    assert sim.destroy() == 0
    monkeypatch.setenv("RKSIM_CACHE_DENSE", "1")
    sim = opened(release)
    sim.run(chat("Count to 5"), save=tmp_path / "dense")
    sparse, dense = ((tmp_path / name).read_bytes() for name in ("sparse", "dense"))
    assert len(sparse) == len(dense)
    assert dense.count(0) < len(dense) / 20 < sparse.count(0)
    assert sim.load_cache(tmp_path / "dense") == 0
    assert sim.destroy() == 0


def test_without_a_path_it_is_prompt_cache_bin_here(
    sim: FeatureSim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prompt = chat("Count to 5")
    sim.run(prompt, save="")
    assert held(tmp_path / "prompt_cache.bin")[: len(prompt)] == prompt


def test_it_is_there_when_finish_is_heard_and_not_before(sim: FeatureSim, cache: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def look(event: Event, _result: object) -> int:
        seen.append((event.state, cache.exists()))
        return 0

    sim.run(chat("Count to 5"), look, save=cache)
    assert set(seen) == {(NORMAL, False), (FINISH, True)}


def test_an_aborted_run_saves_what_it_has(sim: FeatureSim, cache: Path) -> None:
    prompt = chat("Write 500 tokens")
    run = sim.run(prompt, Aborted(sim, 1), save=cache)
    assert held(cache) == prompt + run.ids[:-1]


def test_a_paused_run_saves_nothing_and_its_end_does(sim: FeatureSim, cache: Path) -> None:
    prompt = chat("Count to 9")
    run = sim.run(prompt, lambda *_: int(len(sim.now.tokens) == 4), save=cache)
    assert not cache.exists()
    again = sim.run([run.ids[-1]], save=cache)
    assert held(cache) == prompt + run.ids + again.ids[:-1]


def test_save_0_saves_nothing(sim: FeatureSim, cache: Path) -> None:
    path = sim.ffi.new("char[]", bytes(cache))
    params = sim.ffi.new("RKLLMPromptCacheParam *", [0, path])
    assert sim.run(chat("Count to 5"), prompt_cache_params=params).code == 0
    assert not cache.exists()


def test_a_file_that_cannot_be_written_is_a_line_and_the_run_ends_well(
    sim: FeatureSim, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / "cache.bin"
    run = sim.run(chat("Count to 5"), save=path)
    assert (run.code, run.reply) == (0, "1, 2, 3, 4, 5.")
    line = f"E rkllm: failed to save prompt cache to '{path}': No such file or directory"
    assert line in capfd.readouterr().err


def test_a_conversation_saves_all_that_it_holds(sim: FeatureSim, cache: Path) -> None:
    first = sim.run(chat("Count to 5"), keep_history=1)
    second = sim.run(turn("Count to 3"), keep_history=1, save=cache)
    history = chat("Count to 5") + first.ids[:-1]
    assert held(cache) == history + turn("Count to 3") + second.ids[:-1]


def test_a_runtime_may_refuse_to_save_a_conversation(
    release: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RKSIM_NO_SAVE_WITH_HISTORY", "1")
    sim = opened(release)
    assert sim.run(chat("Count to 5"), keep_history=1, save=cache).code == 0
    assert not cache.exists()
    assert "the prompt cache of a run with history is not saved" in capfd.readouterr().err
    assert sim.run(chat("Count to 5"), save=cache).code == 0
    assert cache.exists()
    assert sim.destroy() == 0


def test_after_a_shift_the_file_holds_what_the_context_holds(release: str, cache: Path) -> None:
    sim = opened(release, max_context_len=128, n_keep=16)
    prompt = chat("Write 200 tokens")
    run = sim.run(prompt, keep_history=1, save=cache)
    assert len(held(cache)) == sim.kv < 128 < len(prompt) + len(run.ids)
    assert held(cache)[:16] == prompt[:16]
    assert held(cache)[-20:] == run.ids[-21:-1]
    assert sim.destroy() == 0


def test_a_family_without_support_says_so_and_saves_nothing(
    release: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RKSIM_PROFILE", "rk3588-qwen3.5-0.8b-w8a8")
    sim = opened(release)
    assert sim.run(chat("Count to 5"), save=cache).reply == "1, 2, 3, 4, 5."
    assert not cache.exists()
    line = "W rkllm: The qwen35 model does not support saving prompt cache!"
    assert line in capfd.readouterr().err
    assert sim.destroy() == 0


def test_a_batch_neither_saves_nor_loads(
    release: str, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sim, single = opened(release, extend_n_batch=2), opened(release)
    assert sim.run_batch([chat("a"), chat("b")], save=cache).code == -1
    assert "Saving the prompt cache is not supported for multiple" in capfd.readouterr().err
    single.run(chat("a"), save=cache)
    assert sim.load_cache(cache) == -1
    assert "not supported for multiple batches" in capfd.readouterr().err
    assert sim.destroy() == single.destroy() == 0


# --- loading


def test_a_loaded_prefix_is_not_prefilled_again(sim: FeatureSim, cache: Path) -> None:
    prompt = chat("Count to 5")
    longer = [*prompt, *sim.run(prompt, save=cache).ids, *turn("Count to 3")[1:]]
    cold = sim.run(longer)
    assert cold.finish.perf[1] == len(longer)
    assert sim.load_cache(cache) == 0
    warm = sim.run(longer)
    assert (warm.ids, warm.reply) == (cold.ids, "1, 2, 3.")
    assert warm.finish.perf[1] == len(longer) - len(held(cache))
    assert warm.events[0].kv == cold.events[0].kv == len(longer)


def test_nothing_is_left_to_prefill_when_all_is_cached(sim: FeatureSim, cache: Path) -> None:
    prompt = chat("Write 500 tokens")
    whole = sim.run(prompt)
    sim.run(prompt, Aborted(sim, 1), save=cache)
    fresh = opened(sim.release)
    assert fresh.load_cache(cache) == 0
    run = fresh.run(prompt)
    assert run.ids == whole.ids
    assert run.finish.perf[1] == 0
    assert fresh.destroy() == 0


def test_only_the_common_beginning_counts(sim: FeatureSim, cache: Path) -> None:
    first, other = chat("Count to 5"), chat("Count to 7")
    common = next(at for at, (a, b) in enumerate(zip(first, other, strict=False)) if a != b)
    sim.run(first, save=cache)
    assert sim.load_cache(cache) == 0
    run = sim.run(other)
    assert run.reply == "1, 2, 3, 4, 5, 6, 7."
    assert run.finish.perf[1] == len(other) - common
    nothing = ids_of("Count to 2\n")
    assert sim.run(nothing).finish.perf[1] == len(nothing)


def test_embeddings_are_recognised_in_a_cache(sim: FeatureSim, cache: Path) -> None:
    prompt = chat("Count to 5")
    strange = models.rows([0.5] * models.EMBED_DIM)
    given = Rows(models.embeddings(prompt[:10]) + strange + models.embeddings(prompt[10:]))
    other = Rows(given.rows.replace(strange, models.rows([0.25] * models.EMBED_DIM)))
    sim.run(given, save=cache)
    assert sim.load_cache(cache) == 0
    assert sim.run(given).finish.perf[1] == 0
    assert sim.run(other).finish.perf[1] == len(prompt) + 1 - 10


def test_a_loaded_cache_does_nothing_for_a_conversation(sim: FeatureSim, cache: Path) -> None:
    prompt = chat("Count to 5")
    sim.run(prompt, save=cache)
    assert sim.load_cache(cache) == 0
    assert sim.run(prompt, keep_history=1).finish.perf[1] == len(prompt)


def test_a_runtime_may_use_it_for_a_conversation(
    release: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_CACHE_WITH_HISTORY", "1")
    sim = opened(release)
    prompt = chat("Count to 5")
    sim.run(prompt, save=cache)
    assert sim.load_cache(cache) == 0
    assert sim.run(prompt, keep_history=1).finish.perf[1] == 0
    run = sim.run(turn("Count to 3"), keep_history=1)
    assert (run.reply, run.finish.perf[1]) == ("1, 2, 3.", len(turn("Count to 3")))
    assert sim.destroy() == 0


def test_a_resumed_pause_does_not_look_at_the_cache(sim: FeatureSim, cache: Path) -> None:
    prompt = chat("Count to 9")
    whole = sim.run(prompt, save=cache)
    assert sim.load_cache(cache) == 0
    run = sim.run(prompt, lambda *_: int(len(sim.now.tokens) == 4))
    again = sim.run([run.ids[-1]])
    assert run.ids + again.ids == whole.ids
    assert again.finish.perf[1] == 1


def test_released_it_is_forgotten(sim: FeatureSim, cache: Path) -> None:
    prompt = chat("Count to 5")
    sim.run(prompt, save=cache)
    assert sim.load_cache(cache) == 0
    assert sim.release_cache() == 0
    assert sim.run(prompt).finish.perf[1] == len(prompt)
    assert sim.release_cache() == 0  # nothing there: harmless


def test_a_second_one_needs_a_release_first(
    sim: FeatureSim, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    sim.run(chat("Count to 5"), save=one)
    sim.run(chat("Count to 7"), save=two)
    assert sim.load_cache(one) == 0
    assert sim.load_cache(two) == -1
    assert f"'{two}': release the one that is loaded first" in capfd.readouterr().err
    assert sim.run(chat("Count to 5")).finish.perf[1] == 0
    assert sim.release_cache() == sim.load_cache(two) == 0
    assert sim.run(chat("Count to 7")).finish.perf[1] == 0


# --- time


def test_saving_and_loading_take_the_time_of_a_disk(
    release: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = opened(release)
    prompt = chat("Count to 5")
    sim.run(prompt, save=cache)
    assert sim.destroy() == 0
    monkeypatch.setenv("RKSIM_TIME_SCALE", "0.01")
    monkeypatch.setenv("RKSIM_DISK_MB_PER_S", "0.1")  # times 100: the file takes a moment
    due = cache.stat().st_size / 2**20 / 0.1 * 0.01
    sim = opened(release)
    started = time.monotonic()
    assert sim.load_cache(cache) == 0
    loaded = time.monotonic()
    assert due <= loaded - started < due + 60
    sim.run(prompt, save=cache)
    assert due <= time.monotonic() - loaded < due + 60
    assert sim.destroy() == 0


def test_a_long_prefix_costs_no_prefill_time(
    release: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_TIME_SCALE", "0.1")
    sim = opened(release, max_new_tokens=1)
    prompt = chat("Tell me more. " * 200)
    cold = sim.run(prompt, save=cache)
    assert sim.load_cache(cache) == 0
    warm = [sim.run(prompt) for _ in range(3)]
    assert {tuple(run.ids) for run in warm} == {tuple(cold.ids)}
    # At its best: the others may have met a machine that stood still.
    assert min(run.finish.perf[0] for run in warm) < cold.finish.perf[0] / 2
    assert sim.destroy() == 0
