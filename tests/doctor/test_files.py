"""Facts of libraries, model folders and disks, also where files are odd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rkserve.doctor import files
from rkserve.doctor.tree import Tree
from rkserve.native.sim.build import ensure_built
from tests.support.boards.doctor_board import DoctorBoard, elf
from tests.support.paths import PROJECT


@pytest.fixture
def board(tmp_path: Path) -> DoctorBoard:
    return DoctorBoard(tmp_path / "board")


@pytest.mark.engine
@pytest.mark.parametrize("release", ["1.2.3", "1.3.0"])
def test_a_simulated_library_is_known_without_loading_it(release: str) -> None:
    found = files.library(Tree(Path("/")), ensure_built(release))
    assert found is not None
    assert (found.versions, found.simulated, found.missing) == ((release,), True, ())


def test_a_library_beside_the_tree_is_the_given_one(tmp_path: Path, board: DoctorBoard) -> None:
    file = tmp_path / "librkllmrt.so"
    file.write_bytes(elf("1.2.3"))
    found = files.library(Tree(board.root), file)
    assert found is not None
    assert (found.path, found.versions) == (str(file), ("1.2.3",))


def test_a_tree_without_library_folders_has_no_library(tmp_path: Path) -> None:
    assert files.library(Tree(tmp_path), None) is None


def test_libgomp_may_be_in_the_loaders_cache_or_beside_the_library(board: DoctorBoard) -> None:
    board.drop("usr/lib/aarch64-linux-gnu/libgomp.so.1")
    board.put("etc/ld.so.cache", "glibc-ld.so.cache1.1\0libgomp.so.1\0/opt/x/libgomp.so.1\0")
    assert board.report().findings == ()
    board.drop("etc/ld.so.cache").put("usr/lib/libgomp.so.1", "")
    assert board.report().findings == ()


def test_the_folder_of_a_simulated_model_is_whole() -> None:
    found = files.model(PROJECT / "models" / "sim-chat")
    assert (found.problem, found.unfit, found.tokenizer_problem) == ("", "", "")
    assert found.weights == "model.rkllm"
    assert found.has_tokenizer
    assert found.has_template
    assert found.eos_token_ids


def test_a_model_for_embeddings_needs_no_template() -> None:
    found = files.model(PROJECT / "models" / "sim-embed")
    assert (found.problem, found.generates, found.has_template) == ("", False, True)


@pytest.mark.parametrize(
    ("generation", "config", "hint"),
    [
        pytest.param({"eos_token_id": [7, 9]}, {}, (7, 9), id="a list"),
        pytest.param({"eos_token_id": 7}, {"eos_token": "<|im_end|>"}, (7, 151645), id="both"),
        pytest.param({}, {"eos_token": {"content": "<|im_end|>"}}, (151645,), id="an object"),
        pytest.param({"eos_token_id": "x"}, {"eos_token": 5}, (), id="neither"),
    ],
)
def test_end_tokens_are_named_by_the_models_own_files(
    board: DoctorBoard, generation: object, config: dict[str, object], hint: tuple[int, ...]
) -> None:
    (board.model / "generation_config.json").write_text(json.dumps(generation))
    (board.model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x", **config}))
    assert files.model(board.model).eos_hint == hint


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        pytest.param("tokenizer.json", b"[1]", "tokenizer.json holds no JSON object", id="list"),
        pytest.param(
            "tokenizer.json", b"[" * 100_000, "tokenizer.json is not valid JSON", id="deep"
        ),
        pytest.param(
            "generation_config.json", b"\xff", "generation_config.json is not valid", id="bytes"
        ),
        pytest.param("tokenizer_config.json", b"\xff", "is not valid JSON", id="no configuration"),
        pytest.param(
            "chat_template.jinja", b"\xff\xfe", "can't decode byte 0xff", id="no template"
        ),
    ],
)
def test_an_odd_file_of_the_tokenizer_is_a_problem(
    board: DoctorBoard, name: str, content: bytes, reason: str
) -> None:
    (board.model / name).write_bytes(content)
    assert reason in files.model(board.model).tokenizer_problem


def test_settings_that_are_too_deep_are_a_problem(board: DoctorBoard) -> None:
    board.settings.write_text("[" * 5000)
    assert "cannot be read" in files.model(board.model).problem


def test_a_folder_in_the_place_of_a_file_is_a_problem(board: DoctorBoard) -> None:
    (board.model / "tokenizer.json").unlink()
    (board.model / "tokenizer.json").mkdir()
    assert files.model(board.model).tokenizer_problem == "tokenizer.json is no regular file"


def test_the_last_mount_at_the_deepest_folder_counts(board: DoctorBoard) -> None:
    board.put(
        "proc/mounts",
        "/dev/a / ext4 rw 0 0\n/dev/b /var\\040x ext4 rw 0 0\n/dev/c /var/lib ext4 ro 0 0\n"
        "/dev/d /var/lib xfs rw 0 0\ngarbage\n",
    )
    (found,) = files.disks(Tree(board.root), Path("/var/lib/rkserve"), None, None)
    assert (found.device, found.kind, found.read_only) == ("/dev/d", "xfs", False)
    (found,) = files.disks(Tree(board.root), Path("/var x/y"), None, None)
    assert found.device == "/dev/b"


def test_a_full_context_counts_in_the_need_for_memory(board: DoctorBoard) -> None:
    board.settings.write_text("context_length: 4096\nkv_bytes_per_token: 114688\n")
    found = files.model(board.model)
    assert files.memory_need("RK3588", found) == pytest.approx(1690 + 469.8, abs=0.1)
    assert files.memory_need("RK3588", found.model_copy(update={"weights": None})) is None
