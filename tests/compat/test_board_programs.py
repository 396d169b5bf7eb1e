"""Other people's programs: what counts as passed, and misuse of the library that is noticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from compat import board_programs
from compat.board_programs import (
    CheckFailed,
    Sources,
    Work,
    compile_program,
    content_of,
    main,
    run_program,
    streamed,
)

PROGRAM = """
#include <stdio.h>
int main() {
    char line[80];
    while (fgets(line, sizeof line, stdin)) printf("read %s", line);
    return RESULT;
}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(board_programs, "WORK", tmp_path)
    return Work("own", "1.3.0")


def compiled(work: Work, result: str) -> str:
    source = work.folder / "own.cpp"
    source.write_text(PROGRAM.replace("RESULT", result))
    return str(compile_program(work, "own", [str(source)]))


def test_a_program_that_ends_well_has_its_text(work: Work) -> None:
    assert run_program(work, [compiled(work, "0")], ["one", "two"]) == "read one\nread two\n"


def test_an_exit_code_is_a_failure(work: Work) -> None:
    with pytest.raises(CheckFailed, match="exit code 3"):
        run_program(work, [compiled(work, "3")], [])


def test_misuse_of_the_library_is_a_failure(work: Work) -> None:
    work.log.write_text("E rkllm-sim: violation: no_run\nI rkllm-sim: violations: 1\n")
    with pytest.raises(CheckFailed, match="misuse of the library: no_run"):
        work.require_no_violation()
    work.log.write_text("E rkllm-sim: violation: unknown_handle\nI rkllm-sim: violations: 0\n")
    work.require_no_violation()  # the servers' own second destroy


def test_a_program_that_cannot_be_compiled_names_the_reason(work: Work) -> None:
    (work.folder / "bad.cpp").write_text("int main() { return missing; }")
    with pytest.raises(CheckFailed, match="missing"):
        compile_program(work, "bad", [str(work.folder / "bad.cpp")])


@pytest.mark.parametrize(
    ("header", "release"),
    [("typedef int RKLLMCallback;", "1.3.0"), ("typedef int LLMResultCallback;", "1.2.3")],
)
def test_the_release_is_that_of_the_header(tmp_path: Path, header: str, release: str) -> None:
    folder = tmp_path / "rkllm-runtime/Linux/librkllm_api/include"
    folder.mkdir(parents=True)
    (folder / "rkllm.h").write_text(header)
    assert Sources.at(tmp_path).release == release


def test_a_folder_without_the_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkout of the vendor's repository"):
        Sources.at(tmp_path)


def test_at_least_one_checkout_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--vendor PATH or --server PATH" in capsys.readouterr().err


def test_answers_without_text_are_failures() -> None:
    whole = {"choices": [{"message": {"content": "yes"}}]}
    assert content_of(json.dumps(whole)) == "yes"
    whole["choices"][0]["message"]["content"] = ""
    with pytest.raises(CheckFailed, match="an empty answer"):
        content_of(json.dumps(whole))
    chunk = json.dumps({"choices": [{"delta": {"content": "ye"}}]})
    assert streamed(f"data: {chunk}\n\ndata: {chunk}\n\ndata: [DONE]\n\n") == "yeye"
    with pytest.raises(CheckFailed, match="an empty stream"):
        streamed("data: [DONE]\n\n")
