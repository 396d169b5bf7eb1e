"""A release: the wheel is reproducible, its checksums are signed, its licences are known."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import release
from tests.support.paths import PROJECT


def test_every_package_of_a_node_has_a_licence_that_was_reviewed() -> None:
    assert list(release.unreviewed(PROJECT / release.LOCK)) == []
    assert set(release.REVIEWED) <= set(release.locked(PROJECT / release.LOCK))


def test_a_licence_that_may_not_be_linked_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("one==1\ntwo==2 ; python_version > '3'\n")
    licences = {"one": "AGPL-3.0-only", "two": "MIT"}
    monkeypatch.setattr(release, "licence_of", licences.get)
    assert list(release.unreviewed(lock)) == ["one: AGPL-3.0-only"]


def test_every_file_of_a_lock_has_a_hash() -> None:
    for lock in PROJECT.glob("requirements*.lock"):
        found = _packages(lock.read_text())
        assert found, lock
        for block in found:
            assert "--hash=sha256:" in block, (lock.name, block.splitlines()[0])


def _packages(text: str) -> list[str]:
    starts = [found.start() for found in release.PINNED.finditer(text)]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


@pytest.mark.slow
def test_two_builds_are_the_same_and_their_checksums_are_signed(tmp_path: Path) -> None:
    folder = tmp_path / "dist"
    folder.mkdir()
    wheel = release.build_wheel(PROJECT, folder)
    assert wheel.name.startswith("rkserve-")
    sums = release.write_sums(folder)
    assert sums.read_text() == f"{release.digest(wheel)}  {wheel.name}\n"
    subprocess.run(["sha256sum", "--check", "--strict", sums.name], cwd=folder, check=True)
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    signature = release.sign(sums, key)
    signers = tmp_path / "signers"
    public = key.with_suffix(".pub").read_text().split()
    signers.write_text(f"release@rkserve {public[0]} {public[1]}\n")
    assert verifies(signers, signature, sums)
    sums.write_text(sums.read_text().replace("0", "1"))
    assert not verifies(signers, signature, sums)


def verifies(signers: Path, signature: Path, sums: Path) -> bool:
    """Do what SECURITY.md tells the reader to do."""
    command = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "release@rkserve"]
    command += ["-n", release.NAMESPACE, "-s", str(signature)]
    done = subprocess.run(command, input=sums.read_bytes(), capture_output=True, check=False)
    return done.returncode == 0


def test_a_folder_with_files_is_no_place_for_a_release(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    with pytest.raises(release.ReleaseError, match="not empty"):
        release.release(tmp_path, None, None)
