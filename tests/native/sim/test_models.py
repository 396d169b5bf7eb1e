"""Other base weights for the simulated board: other answers, the same words, their own caches."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import LoadFailed
from rkserve.core.messages import Delta
from rkserve.models.files import UnfitWeights, WeightsMetadata, weights_facts
from rkserve.native.sim import models
from rkserve.native.sim.models import reseed
from tests.support.boards.fakes import run_loop
from tests.support.boards.rebased import BROKEN, CONTENT
from tests.support.sim.releases import EVERY
from tests.support.sim.sim_board import FOLDER, GREEDY, Sim, ask, both_releases, words
from tests.support.sim.sim_driver import (
    FAST,
    MODEL,
    chat,
    ids_of,
    probe,
    run_probe,
    wait_idle,
)
from tests.support.sim.sim_features import FeatureSim, Rows, Seen, opened

PROMPT = words("The tide of the river and the old lamp")


def said(place: Path, content: bytes, release: str) -> list[int]:
    place.mkdir()
    file = place / "model.rkllm"
    file.write_bytes(content)
    found: list[int] = []

    async def body() -> None:
        async with Sim(place, release, sampling=GREEDY, model=file).board() as board:
            events = await ask(board, PROMPT, max_tokens=60, sampling=GREEDY)
            found.extend(one for e in events if isinstance(e, Delta) for one in e.token_ids)

    run_loop(body(), 60.0)
    return found


@both_releases
def test_every_seed_says_something_else_and_the_same_one_the_same(
    tmp_path: Path, release: str
) -> None:
    contents = [CONTENT, reseed(CONTENT, 1), reseed(CONTENT, 2), reseed(reseed(CONTENT, 2), 1)]
    plain, one, two, again = (
        said(tmp_path / str(n), content, release) for n, content in enumerate(contents)
    )
    assert plain != one != two != plain
    assert one == again


@both_releases
@pytest.mark.parametrize("flaw", sorted(BROKEN))
def test_a_broken_file_fails_the_load_and_the_library_says_why(
    tmp_path: Path, release: str, flaw: str
) -> None:
    content, why = BROKEN[flaw]
    with pytest.raises(LoadFailed, match=why):
        said(tmp_path / "x", content, release)


def test_only_a_simulated_model_can_be_reseeded() -> None:
    for content in (b"", b"NOMODEL!" * 100, CONTENT[:100]):
        with pytest.raises(ValueError, match="not a model of the simulated"):
            reseed(content, 1)
    with pytest.raises(ValueError, match="takes 1 to 15 bytes"):
        reseed(CONTENT, 1, platform="x" * 16)


# -- what a file tells without being loaded -------------------------------------------------------


def test_a_simulated_model_tells_what_it_is_and_a_real_one_nothing(tmp_path: Path) -> None:
    file = tmp_path / "m.rkllm"
    file.write_bytes(reseed(CONTENT, 3, model_id="other", platform="RK3576"))
    facts = weights_facts(file)
    assert facts == WeightsMetadata(
        file.stat().st_size,
        True,
        "other",
        "RK3576",
        "1.2.3",
        FOLDER.settings.context_length,
        "W8A8",
    )
    file.write_bytes(b"\x01\x02RKLLM-of-the-vendor" * 100)
    assert weights_facts(file) == WeightsMetadata(2100)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"", "it is empty", id="empty"),
        pytest.param(bytes(5000), "nothing but zeros", id="zeros"),
        pytest.param(b"GGUF\x03\0\0\0" + bytes(500), "a GGUF model", id="gguf"),
        pytest.param(b"RKNN\0\0\0\0" + bytes(500), "librknnrt", id="rknn"),
        pytest.param(b"RKSIMLRA" + bytes(500), "an adapter", id="adapter"),
        pytest.param(b"PK\x03\x04" + bytes(500), "a ZIP archive", id="zip"),
        pytest.param(b"\x1f\x8b\x08" + bytes(500), "gzip", id="gzip"),
        pytest.param((500).to_bytes(8, "little") + b'{"w": 1}', "safetensors", id="safetensors"),
        pytest.param(b"\n <!DOCTYPE html><html>", "HTML", id="html"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "Git LFS", id="lfs"),
        pytest.param(b"\x7fELF" + bytes(500), "a library", id="library"),
        pytest.param(CONTENT[:100], "cut off", id="a piece of a simulated one"),
        pytest.param(CONTENT[:-1], "of which", id="a simulated one cut off"),
        pytest.param(CONTENT[:8] + b"\x07" + CONTENT[9:], "format 7", id="a later one"),
    ],
)
def test_what_is_certainly_no_model_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "m.rkllm"
    file.write_bytes(content)
    with pytest.raises(UnfitWeights, match=why):
        weights_facts(file)


def test_a_folder_is_no_model_and_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError, match=r"directory|No such file"):
            weights_facts(path)


pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")

FREE = "Tell me about rivers"
DIM = models.EMBED_DIM


@pytest.fixture
def sim(release: str) -> Iterator[FeatureSim]:
    sim = opened(release)
    yield sim
    assert sim.destroy() == 0


def picture(seed: int, rows: int = 9) -> bytes:
    dice = random.Random(seed)
    return models.rows([dice.uniform(-1, 1) for _ in range(rows * DIM)])


# --- EMBED


@pytest.mark.parametrize("question", ["Count to 5", FREE, "Greet me in many languages"])
def test_text_as_embeddings_is_answered_as_text(sim: FeatureSim, question: str) -> None:
    prompt = chat(question)
    as_ids = sim.run(prompt)
    assert sim.clear() == 0
    as_rows = sim.run(Rows(models.embeddings(prompt)))
    assert as_rows.ids == as_ids.ids
    assert as_rows.finish.perf[1] == len(prompt)


def test_rows_that_are_no_token_count_and_change_the_answer(sim: FeatureSim) -> None:
    prompt = models.embeddings(chat(FREE))
    shown = [Rows(picture(seed, rows=3) + prompt) for seed in range(6)]
    runs = [sim.run(each) for each in shown]
    assert {run.events[0].kv for run in runs} == {len(chat(FREE)) + 3}
    assert len({run.reply for run in runs}) == 6
    assert sim.run(shown[0]).reply == runs[0].reply


def test_no_row_that_is_nearly_a_tokens_is_the_token(sim: FeatureSim) -> None:
    prompt = chat("Count to 5")
    rows = bytearray(models.embeddings(prompt))
    rows[-2] ^= 1
    run = sim.run(Rows(bytes(rows)))
    assert run.code == 0
    assert run.reply != "1, 2, 3, 4, 5."


@pytest.mark.parametrize(
    "value", ["nan", "inf", "-inf", "-1", "1e30", "0"], ids=lambda value: f"all {value}"
)
def test_any_float_is_just_a_row(sim: FeatureSim, value: str) -> None:
    strange = models.rows([float(value)] * DIM)
    assert sim.run(Rows(strange + models.embeddings(chat("Count to 5")))).reply == "1, 2, 3, 4, 5."


def test_embeddings_continue_a_conversation_and_a_pause(sim: FeatureSim) -> None:
    prompt = chat("Count to 9")
    whole = sim.run(prompt)
    run = sim.run(Rows(models.embeddings(prompt)), lambda *_: int(len(sim.now.tokens) == 3))
    again = sim.run(Rows(models.embedding(run.ids[-1])))
    assert run.ids + again.ids == whole.ids


@pytest.mark.parametrize(
    ("n", "line"),
    [
        pytest.param(0, "E rkllm: the embed input is empty", id="none"),
        pytest.param(129, "E rkllm: prompt of 129 tokens exceeds max_context_len 128", id="129"),
    ],
)
def test_too_few_or_too_many_embeddings_are_refused(
    release: str, capfd: pytest.CaptureFixture[str], *, n: int, line: str
) -> None:
    sim = opened(release, max_context_len=128)
    assert sim.run(Rows(bytes(n * DIM * 4))).code == -1
    assert line in capfd.readouterr().err
    assert sim.kv == 0
    assert sim.destroy() == 0


def test_the_python_side_makes_whole_rows_only() -> None:
    with pytest.raises(ValueError, match="65 floats"):
        models.rows([0.0] * 65)
    assert len(models.embeddings([1, 2, 3])) == 3 * DIM * 4


# --- MULTIMODAL


def test_what_a_picture_shows_hangs_on_its_floats(sim: FeatureSim) -> None:
    one, two = picture(1), picture(2)
    said = [sim.run(Seen("<image>What is this?", [shown])).reply for shown in (one, two, one)]
    assert said[0].startswith(f"The picture shows pattern {models.pattern(one)}.")
    assert said[1].startswith(f"The picture shows pattern {models.pattern(two)}.")
    assert said[0] != said[1]
    assert said[0] == said[2]


def test_several_pictures_are_told_apart(sim: FeatureSim) -> None:
    shown = [picture(seed) for seed in (1, 2, 3)]
    run = sim.run(Seen("First <image>, then <image>, last <image>: describe", shown))
    names = [models.pattern(each) for each in shown]
    assert run.reply.startswith("The pictures show patterns {} and {} and {}.".format(*names))


@pytest.mark.parametrize("release", EVERY)
def test_pictures_that_touch_are_told_apart(release: str) -> None:
    sim = opened(release)
    shown = [picture(1), picture(2)]
    run = sim.run(Seen("<image><image>describe", shown, tags=("", "", "")))
    assert " and ".join(map(models.pattern, shown)) in run.reply
    assert sim.destroy() == 0


@pytest.mark.parametrize("release", EVERY)
def test_the_start_and_end_tags_stand_around_each_picture(release: str) -> None:
    tags = (b"<think>", b"</think>", b"<|pad|>")
    sim = opened(release, tags=tags)
    seen = Seen("<image> x <image>", [picture(1, rows=4)] * 2, tags=tuple(map(bytes.decode, tags)))  # type: ignore[arg-type]
    text = "<think>" + "<|pad|>" * 4 + "</think> x <think>" + "<|pad|>" * 4 + "</think>"
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    prompt = f"{system}{text}<|im_end|>\n<|im_start|>assistant\n"
    assert sim.run(seen).finish.perf[1] == len(ids_of(prompt))
    assert sim.destroy() == 0


def test_a_follow_up_can_ask_about_the_picture(sim: FeatureSim) -> None:
    shown = picture(5)
    sim.run(Seen("<image>describe", [shown]), keep_history=1)
    about = sim.run("Is the picture nice?", keep_history=1)
    assert f"pattern {models.pattern(shown)}." in about.reply
    assert "pattern" not in sim.run("Count to 3", keep_history=1).reply
    assert sim.clear() == 0
    assert "shows pattern" not in sim.run("Is the picture nice?", keep_history=1).reply


def test_an_exact_answer_needs_no_picture(sim: FeatureSim) -> None:
    assert sim.run(Seen("<image>Count to 3", [picture(1)])).reply == "1, 2, 3."


@pytest.mark.parametrize(
    ("how", "line"),
    [
        pytest.param(
            {"n": 0, "rows": 0},
            "The n_image/n_image_token of multimodal_input is not set",
            id="no counts",
        ),
        pytest.param(
            {"n": 0, "rows": 4},
            "The n_image/n_image_token of multimodal_input is not set",
            id="no n_image",
        ),
        pytest.param(
            {"n": 1, "rows": 0},
            "The n_image/n_image_token of multimodal_input is not set",
            id="no n_image_tokens",
        ),
        pytest.param(
            {"prompt": "no tag"}, "the prompt holds 0 <image>, but 1 are given", id="no tag"
        ),
        pytest.param(
            {"prompt": "<image><image>"},
            "the prompt holds 2 <image>, but 1 are given",
            id="one tag too many",
        ),
        pytest.param({"embed": False}, "the embedding for <image> is NULL", id="no embedding"),
        pytest.param({"prompt": None}, "the prompt of multimodal_input is NULL", id="no prompt"),
        pytest.param({"rows": 5000}, "prompt of 5000 tokens exceeds", id="more than the context"),
        pytest.param({"rows": 2**63}, "exceeds max_context_len", id="more than memory"),
    ],
)
def test_a_picture_that_is_not_whole_is_refused(
    sim: FeatureSim, capfd: pytest.CaptureFixture[str], *, how: dict[str, Any], line: str
) -> None:
    ffi = sim.ffi
    whole: dict[str, Any] = {"prompt": "<image>", "n": 1, "rows": 4, "embed": True}
    how = whole | how
    run_input, params = sim.prepare("x")
    run_input.input_type = 3
    seen = run_input.multimodal_input
    prompt = ffi.new("char[]", how["prompt"].encode()) if how["prompt"] else ffi.NULL
    floats = ffi.new("float[]", 4 * DIM)
    seen.prompt = prompt
    image = seen.image if sim.release == "1.3.0" else seen
    image.image_embed = floats if how["embed"] else ffi.NULL
    image.n_image, image.n_image_tokens = how["n"], how["rows"]
    assert sim.lib.rkllm_run(sim.handle, run_input, params, ffi.NULL) == -1
    assert line in capfd.readouterr().err
    assert sim.kv == 0


def test_bad_counts_are_silent_when_asynchronous(
    sim: FeatureSim, capfd: pytest.CaptureFixture[str]
) -> None:
    run_input, params = sim.prepare(Seen("<image>"))
    assert sim.lib.rkllm_run_async(sim.handle, run_input, params, sim.ffi.NULL) == 0
    wait_idle(sim)
    assert sim.now.events == []
    assert "n_image/n_image_token of multimodal_input is not set" in capfd.readouterr().err


@pytest.mark.parametrize("release", EVERY[1:])
def test_a_video_shows_a_pattern_too(release: str) -> None:
    sim = opened(release)
    still, moving = picture(1, rows=4), picture(2, rows=12)
    run = sim.run(Seen("<video> and <image>: describe", [still], [moving], frames=3))
    still_says = f"The picture shows pattern {models.pattern(still)}."
    assert run.reply.startswith(f"{still_says} The video shows pattern {models.pattern(moving)}.")
    alone = sim.run(Seen("<video>describe", videos=[moving], frames=3))
    assert alone.reply.startswith(f"The video shows pattern {models.pattern(moving)}.")
    assert sim.destroy() == 0


def test_a_video_tag_without_a_video_is_refused(
    sim: FeatureSim, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sim.run(Seen("<image> <video>", [picture(1)])).code == -1
    assert "the prompt holds 1 <video>, but none is given" in capfd.readouterr().err


@pytest.mark.parametrize("release", EVERY)
def test_pictures_in_a_batch_stay_with_their_entry(release: str) -> None:
    sim = opened(release, extend_n_batch=2)
    shown = [picture(1), picture(2)]
    run = sim.run_batch([Seen("<image>describe", [each]) for each in shown])
    for entry, each in enumerate(shown):
        assert f"pattern {models.pattern(each)}." in run.reply_of(entry)
    assert sim.destroy() == 0


# --- tools, with PROMPT input

TOOLS = """[{"type": "function", "function": {"name": "get_weather", "parameters": {"type":
"object", "properties": {"city": {"type": "string"}}}}}]"""


def test_function_tools_are_called_and_their_answer_is_told(sim: FeatureSim) -> None:
    texts = [sim.ffi.new("char[]", text.encode()) for text in ("Be brief.", TOOLS, "tool_response")]
    assert sim.lib.rkllm_set_function_tools(sim.handle, *texts) == 0
    call = sim.run("What is the weather in Oslo?", keep_history=1).reply
    assert call.startswith('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}')
    told = sim.run('[{"temperature": 12}]', role=b"tool", keep_history=1).reply
    assert told == 'The tool answered: [{"temperature": 12}]'


# --- under sanitizers and valgrind


def furnished(folder: Path) -> str:
    """A folder with the adapters that sim_addons.c asks for."""
    whole = models.write_adapter(folder / "adapter.rkllm", "Pirate", size=10_000)
    (folder / "broken.rkllm").write_bytes(whole.read_bytes()[:-1])
    return str(folder)


@pytest.mark.long
def test_address_and_undefined_sanitizers_find_nothing(release: str, tmp_path: Path) -> None:
    program = probe("sim_addons", release, "address,undefined")
    code, _, printed = run_probe(program, furnished(tmp_path))
    assert code == 0, printed[-4000:]
    assert "Sanitizer" not in printed


@pytest.mark.long
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_finds_nothing(release: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *("valgrind", "-q", "--error-exitcode=9", "--leak-check=full"),
            *(probe("sim_addons", release), MODEL / "model.rkllm", furnished(tmp_path)),
        ],
        env={**os.environ, **FAST},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.long
def test_a_short_picture_is_seen_by_the_sanitizer(release: str, tmp_path: Path) -> None:
    """The runtime reads what the counts say: this proves that a caller's mistake shows."""
    program = probe("sim_addons", release, "address,undefined")
    code, _, printed = run_probe(program, furnished(tmp_path), "short")
    assert code != 0
    assert "heap-buffer-overflow" in printed
