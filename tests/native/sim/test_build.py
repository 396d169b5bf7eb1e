"""Where the simulated runtime is built, with which compiler, and what is said when it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from rkserve.core.errors import LibraryMissing
from rkserve.native.sim import build
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

BUILD = (sys.executable, "-m", "rkserve.native.sim.build")
CHECK = ("/bin/sh", str(PROJECT / "scripts" / "check_tools.sh"), sys.executable)


def run(command: tuple[str, ...], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, cwd=PROJECT
    )


def place_program(folder: Path, name: str) -> None:
    """Put a program there that does nothing."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)


@pytest.mark.parametrize("command", [(*BUILD, "--compiler"), CHECK], ids=["build", "check_tools"])
@pytest.mark.parametrize(
    ("programs", "env", "said"),
    [
        pytest.param(
            [],
            {},
            "rkserve: the simulated board has to be compiled, and none of gcc, cc, clang was "
            "found: install gcc (on Debian and Ubuntu: apt install gcc libc6-dev), or set CC.\n",
            id="no compiler",
        ),
        pytest.param(
            ["gcc"],
            {"CC": "tcc -O2"},
            "rkserve: the compiler in CC, 'tcc', is not installed; install it, or unset CC.\n",
            id="CC is wrong although there is a gcc",
        ),
        pytest.param(
            ["gcc"],
            {"CC": "'gcc"},
            "rkserve: CC is not a command line: 'gcc (No closing quotation). Unset it.\n",
            id="CC with half a quotation",
        ),
        pytest.param(["gcc"], {}, "", id="gcc"),
        pytest.param(["clang"], {}, "", id="clang alone"),
        pytest.param(["tcc"], {"CC": "tcc -O2"}, "", id="CC with options"),
        pytest.param(["cc"], {"CC": ""}, "", id="an empty CC is none"),
    ],
)
def test_set_up_and_build_agree_on_the_compiler(
    command: tuple[str, ...], programs: list[str], env: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    for name in programs:
        place_program(tmp_path / "bin", name)
    done = run(command, {"PATH": str(tmp_path / "bin"), **env})
    assert (done.returncode, done.stderr) == (1 if said else 0, said)


def test_the_compiler_is_the_first_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    for name in reversed(build.COMPILERS):
        place_program(tmp_path, name)
        assert build.compiler() == [str(tmp_path / name)]
    monkeypatch.setenv("CC", "clang -m64")
    assert build.compiler() == ["clang", "-m64"]


def test_a_compiler_that_went_missing_is_one_sentence(tmp_path: Path) -> None:
    done = run((*BUILD, "--into", str(tmp_path / "out")), {"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith("rkserve: the simulated board has to be compiled, and none of")
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    place_program(tmp_path, "broken")
    (tmp_path / "broken").write_text("#!/bin/sh\necho it broke >&2\nexit 3\n", encoding="utf-8")
    env = {**os.environ, "CC": str(tmp_path / "broken")}
    done = run((*BUILD, "--into", str(tmp_path / "out")), env)
    assert done.returncode == 1
    assert done.stderr.startswith("rkserve: ")
    assert done.stderr.endswith("broken failed:\nit broke\n")


def test_a_compiler_is_not_needed_where_the_library_is_current(tmp_path: Path) -> None:
    built = [build.ensure_built(release) for release in build.RELEASES]
    built.append(build.ensure_encoder_built())
    done = run(BUILD, {"PATH": str(tmp_path)})
    assert (done.returncode, done.stdout.split()) == (0, [str(path) for path in built])


# -- the folder -----------------------------------------------------------------------------------


def test_a_folder_that_can_be_written_is_taken(tmp_path: Path) -> None:
    beside = tmp_path / "package" / "build"
    assert build.output_dir(beside) == beside
    assert list(beside.iterdir()) == []


@pytest.fixture(params=["/proc/self", "/proc/self/build", "file"])
def unwritable(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder that not even root can write: in /proc, or where a file stands."""
    if request.param != "file":
        return Path(request.param)
    (tmp_path / "file").write_text("", encoding="utf-8")
    return tmp_path / "file"


def test_a_read_only_package_builds_into_the_user_s_cache(
    unwritable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.output_dir(unwritable) == tmp_path / "cache" / "rkserve" / "sim"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = build.output_dir(unwritable)
    assert found == tmp_path / "home" / ".cache" / "rkserve" / "sim"
    # A compiler that takes no time: what is built there, `make sim` has compiled.
    built = build.ensure_built("1.3.0")
    place_program(tmp_path, "copies")
    copy = f'#!/bin/sh\nfor output; do :; done\ncp {built} "$output"\n'
    (tmp_path / "copies").write_text(copy, encoding="utf-8")
    monkeypatch.setenv("CC", str(tmp_path / "copies"))
    made = build.ensure_built("1.3.0", into=found)
    assert made == found / built.name
    assert made.read_bytes() == built.read_bytes()


def test_no_place_at_all_is_one_sentence_with_both_folders(
    unwritable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")
    with pytest.raises(LibraryMissing, match="set XDG_CACHE_HOME") as caught:
        build.output_dir(unwritable)
    assert f"neither {unwritable} nor /proc/self/rkserve/sim can be written" in str(caught.value)
