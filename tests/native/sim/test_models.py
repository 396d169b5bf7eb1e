"""Other base weights for the simulated board: other answers, the same words, their own caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from rkserve.core.errors import LoadFailed
from rkserve.core.messages import Delta
from rkserve.models.weights import UnfitWeights, WeightsMetadata, weights_facts
from rkserve.native.sim.models import reseed
from tests.support.boards.fakes import run_loop
from tests.support.boards.rebased import BROKEN, CONTENT
from tests.support.sim.sim_board import FOLDER, GREEDY, Sim, ask, both_releases, words

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
        file.stat().st_size, True, "other", "RK3576", "1.2.3", FOLDER.settings.context_length
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
