"""The offline folder: the packages of a target, its archives and its digests."""

from __future__ import annotations

import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from scripts import offline
from scripts.offline import Target, copy_folder, pack, pinned, write_sums
from tests.support.paths import PROJECT

LOCK = """\
# via nothing
one==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via two
two==2.0 ; python_full_version < '3.11' \\
    --hash=sha256:cc
three==3.0 ; platform_machine == 'aarch64' and sys_platform == 'linux' \\
    --hash=sha256:dd
four==4.0 ; sys_platform == 'win32' \\
    --hash=sha256:ee
"""


@pytest.mark.parametrize(
    ("tag", "names"),
    [
        ("cp310-aarch64", ["one", "two", "three"]),
        ("cp310-x86_64", ["one", "two"]),
        ("cp313-aarch64", ["one", "three"]),
    ],
)
def test_markers_are_those_of_the_target(tag: str, names: list[str]) -> None:
    lines = list(pinned(LOCK, Target.parse(tag)))
    assert [line.partition("==")[0] for line in lines] == names
    assert lines[0] == "one==1.0 --hash=sha256:aa --hash=sha256:bb"
    assert all(";" not in line for line in lines)


def test_the_lock_itself_is_understood() -> None:
    lock = (PROJECT / "requirements.lock").read_text(encoding="utf-8")
    lines = list(pinned(lock, Target.parse("cp311-aarch64")))
    assert any(line.startswith(("ray[", "ray==")) for line in lines)
    assert all(re.search(r" --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert len(lines) > 60


@pytest.mark.parametrize("text", ["cp39-aarch64", "cp314-aarch64", "cp311-riscv64", "3.11", ""])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no target such as cp311-aarch64"):
        Target.parse(text)


def test_pip_is_asked_for_the_targets_machine_and_python() -> None:
    target = Target.parse("cp312-aarch64")
    options = target.pip_options()
    assert target.tag == "cp312-aarch64"
    assert "--python-version=3.12" in options
    assert "--platform=manylinux_2_31_aarch64" in options
    assert "--platform=manylinux_2_17_aarch64" in options
    assert not [one for one in options if "x86_64" in one]


def test_an_archive_is_the_same_for_the_same_files(tmp_path: Path) -> None:
    files = []
    for name in ("b.whl", "a.whl"):
        files.append(tmp_path / name)
        files[-1].write_text(name)
    pack(sorted(files), tmp_path / "one.tar")
    for file in files:
        file.touch()
        file.chmod(0o600)
    pack(sorted(files), tmp_path / "two.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as archive:
        assert archive.getnames() == ["a.whl", "b.whl"]


def test_digests_are_checked_by_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "models" / "one").mkdir(parents=True)
    (tmp_path / "models" / "one" / "a b.json").write_text("{}")
    (tmp_path / "rkserve-node").write_text("#!/bin/sh\n")
    write_sums(tmp_path)
    write_sums(tmp_path)  # the file itself is not in it
    check = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 0
    (tmp_path / "rkserve-node").write_text("#!/bin/bash\n")
    assert subprocess.run(check, cwd=tmp_path, check=False, capture_output=True).returncode == 1


def test_files_that_are_there_are_not_copied_again(tmp_path: Path) -> None:
    source, into = tmp_path / "source", tmp_path / "into"
    (source / "adapters").mkdir(parents=True)
    (source / "adapters" / "one").write_text("1")
    copy_folder(source, into)
    before = (into / "adapters" / "one").stat().st_ino
    copy_folder(source, into)
    assert (into / "adapters" / "one").stat().st_ino == before
    (source / "adapters" / "one").write_text("22")
    copy_folder(source, into)
    assert (into / "adapters" / "one").read_text() == "22"


def test_the_options_are_those_of_make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(offline, "fill", lambda *given: calls.append(given))
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    options = set(re.findall(r"(--(?:target|library|model)) ", makefile))
    assert options == {"--target", "--library", "--model"}
    words = [str(tmp_path), "--target", "cp311-aarch64", "--library", "l.so", "--model", "m"]
    offline.main(words)
    assert calls == [(tmp_path, [Target(11, "aarch64")], Path("l.so"), [Path("m")])]
