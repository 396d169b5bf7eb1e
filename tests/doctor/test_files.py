"""Facts of libraries, model folders and disks, also where files are odd."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rkserve.doctor import files
from rkserve.doctor.collect import Checkup, collect
from rkserve.doctor.facts import BoardFacts
from rkserve.doctor.rules import report_on
from rkserve.doctor.tree import Tree
from rkserve.native.sim.build import ensure_built
from tests.support.boards.doctor_board import DoctorBoard, elf
from tests.support.paths import PROJECT
from tests.support.values.tiny_gguf import tiny_folder, write_tiny


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


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def findings(model: Path, **more: object) -> dict[str, tuple[str, str]]:
    """Return the sentences and commands of findings about a model of this machine, by their ids."""
    facts = collect(Checkup(model=model)).model_copy(update=more)
    about = {"model": facts.model, "llama_cpp": facts.llama_cpp, "hardware": facts.hardware}
    report = report_on(BoardFacts.model_validate({**about, "library": facts.library}))
    return {one.id: (one.sentence, one.command) for one in report.findings}


def test_a_file_for_cpus_needs_nothing_of_the_vendor(gguf: Path) -> None:
    facts = files.model(gguf)
    assert (facts.cpu, facts.weights, facts.unfit, facts.problem) == (True, "tiny.gguf", "", "")
    assert (facts.context_length, facts.has_tokenizer) == (4096, True)
    need_mb = files.memory_need("", facts)
    assert need_mb is not None
    assert need_mb > gguf.stat().st_size / 1e6
    found = findings(gguf)
    assert {*found} == {"model-template"}
    assert found["model-template"][1].endswith(f">> {gguf.with_suffix('')}.rkserve.yaml")


def test_a_folder_for_cpus_is_known_by_its_file(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    assert files.model(folder).cpu
    assert findings(folder) == {}
    shutil.copy(PROJECT / "models" / "sim-chat" / "model.rkllm", folder)
    assert not files.model(folder).cpu, "NPUs take it as well"


def test_llama_cpp_that_is_missing_or_another_is_found(gguf: Path) -> None:
    sentence, command = findings(gguf, llama_cpp="")["cpu-library"]
    assert sentence == "llama.cpp is not installed, which computes tiny.gguf."
    assert command == "pip install 'rkserve[cpu]'"
    assert "xllamacpp 1.0 is installed" in findings(gguf, llama_cpp="1.0")["cpu-release"][0]


def test_files_that_llama_cpp_cannot_load_are_found(tmp_path: Path, gguf: Path) -> None:
    write_tiny(gguf, more={"general.architecture": (8, "of-tomorrow")})
    assert "architecture 'of-tomorrow' is not supported" in findings(gguf)["model-unfit"][0]
    gguf.write_bytes(gguf.read_bytes()[:5000])
    assert "is cut short" in findings(gguf)["model-folder"][0]
    assert {*findings(gguf)} == {"model-folder"}, "no finding about NPUs"
    folder = tiny_folder(tmp_path / "tiny")
    (folder / "model.gguf").write_bytes(b"GGUF")
    assert "is cut short" in findings(folder)["model-unfit"][0]
