"""A release: the wheel is reproducible, its checksums are signed, its licences are known."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import release
from tests.support.paths import PROJECT


def test_every_package_of_a_node_has_a_licence_that_was_reviewed() -> None:
    assert list(release.unreviewed(PROJECT / release.LOCK)) == []
    packages = release.locked(PROJECT / release.LOCK)
    assert set(release.REVIEWED) <= set(packages)
    assert sum(release.licence_of(one) is not None for one in packages) > 50


def test_a_licence_that_may_not_be_linked_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "requirements.lock"
    licences = {
        "agpl": "AGPL-3.0-only",
        "both": "GPL-3.0-only AND BSD-3-Clause",
        "free": "MIT",
        "named": "Limited permit, Miscellaneous",
    }
    lock.write_text("".join(f"{name}==1 ; python_version > '3'\n" for name in licences))
    monkeypatch.setattr(release, "licence_of", licences.get)
    found = [one.partition(":")[0] for one in release.unreviewed(lock)]
    assert found == ["agpl", "both", "named"]


def test_every_file_of_a_lock_has_a_hash() -> None:
    for lock in PROJECT.glob("requirements*.lock"):
        found = _packages(lock.read_text())
        assert found, lock
        for block in found:
            assert "--hash=sha256:" in block, (lock.name, block.splitlines()[0])


def _packages(text: str) -> list[str]:
    starts = [found.start() for found in release.PINNED.finditer(text)]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


@pytest.mark.long
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


def test_a_release_is_made_of_a_commit_into_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").touch()
    monkeypatch.setattr(release, "_run", lambda *_, **__: " M requirements.lock")
    with pytest.raises(release.ReleaseError, match=r"commit first.* requirements\.lock"):
        release.release(tmp_path, None, None)
    monkeypatch.setattr(release, "_run", lambda *_, **__: "")
    with pytest.raises(release.ReleaseError, match="not empty"):
        release.release(tmp_path, None, None)
