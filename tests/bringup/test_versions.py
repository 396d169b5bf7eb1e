"""Versions side by side: a process that ends at any point leaves a whole one in use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rkserve.bringup import versions as module
from rkserve.bringup.versions import Outcome, Trial, VersionFolder
from rkserve.core.errors import ConfigError
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

OLD, NEW = "0.1.0", "0.2.0"
ENDED = 9  # the exit code of a process that was cut off
FAR_S = 4e9
Change = Callable[[VersionFolder], None]


def built(version: str, fault: Callable[[str], None] = lambda _: None) -> Callable[[Path], None]:
    """Make a stand-in for an environment in several steps; its command needs all of them."""

    def build(folder: Path) -> None:
        (folder / "bin").mkdir(parents=True)
        fault("in the build, without a command")
        command = folder / "bin" / "rkserve"
        command.write_text(f'#!/bin/sh\ncat "{folder}/one" "{folder}/two"\n')
        command.chmod(0o755)
        fault("in the build, with half of it")
        (folder / "one").write_text(version)
        fault("in the build, with most of it")
        (folder / "two").write_text("\n")

    return build


def house(tmp_path: Path, *names: str) -> VersionFolder:
    versions = VersionFolder(tmp_path / "opt")
    versions.prefix.mkdir()
    for name in names or (OLD,):
        versions.use(versions.install(name, f"content of {name}", built(name)))
    return versions


def served(versions: VersionFolder) -> str:
    """Return what the command behind the link prints: the version, if all of it is there."""
    return subprocess.run(
        [versions.link / "bin" / "rkserve"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def updates(versions: VersionFolder) -> None:
    """Install and use the new version, as a board does from any point at which it was cut off."""
    with versions.locked():
        versions.settle(now_s=0.0, counts=False)
        fault = versions._fault
        name = versions.install(NEW, "content of the new one", built(NEW, fault))
        if versions.current() != name:
            versions.use(name, Trial(name, versions.current() or "", "update-1", FAR_S))
        versions.confirm()
        versions.prune()


def fails(versions: VersionFolder) -> None:
    """Use the new version, and take it back."""
    with versions.locked():
        trial = versions.settle(now_s=0.0, counts=False)
        ended = versions.outcome()
        if ended is None or not ended.problem:
            name = versions.install(NEW, "content of the new one", built(NEW, versions._fault))
            if trial is None:
                versions.use(name, Trial(name, OLD, "update-1", FAR_S))
            versions.back("it is slower")


def cut_off(versions: VersionFolder, change: Change, at: int) -> str | None:
    """Make the change in a process that ends at a step; return its name, None if it came through.

    The process ends as in a power cut: no handler and no ``finally`` of it runs.
    """
    passed = versions.prefix.parent / "passed"
    passed.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        count = 0

        def fault(step: str) -> None:
            nonlocal count
            if count == at:
                passed.write_text(step)
                os._exit(ENDED)
            count += 1

        try:
            change(VersionFolder(versions.prefix, fault))
        except BaseException as exc:  # noqa: BLE001 - a forked test must never go on as pytest
            sys.stderr.write(f"{exc!r}\n")
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, ENDED)
    return passed.read_text() if code == ENDED else None


@pytest.mark.parametrize(
    ("change", "after"),
    [
        pytest.param(updates, NEW, id="kept"),
        pytest.param(fails, OLD, id="back", marks=pytest.mark.long),
    ],
)
def test_a_power_cut_at_any_step_leaves_a_whole_version(
    tmp_path: Path, change: Change, after: str
) -> None:
    steps: list[str] = []
    while True:
        folder = tmp_path / str(len(steps))
        folder.mkdir()
        versions = house(folder, "0.0.9", OLD)
        step = cut_off(versions, change, len(steps))
        assert served(versions) in (OLD, NEW), step
        # Once more at each second step of the next attempt, then to the end.
        cut_off(versions, change, len(steps) // 2)
        assert served(versions) in (OLD, NEW), step
        change(versions)
        assert served(versions) == after, step
        assert versions.trial() is None, step
        if step is None:
            break
        steps.append(step)
    assert len(steps) >= 20
    assert len({*steps}) >= 15


def test_an_installation_that_was_cut_off_is_no_version(tmp_path: Path) -> None:
    versions = house(tmp_path)

    def half(folder: Path) -> None:
        (folder / "bin").mkdir(parents=True)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        versions.install(NEW, "new", half)
    assert versions.installed() == [OLD]
    with pytest.raises(ConfigError, match=r"0\.2\.0 is not installed completely"):
        versions.use(NEW)
    assert served(versions) == OLD
    assert versions.install(NEW, "new", built(NEW)) == NEW


def test_the_same_version_with_other_packages_has_a_name_of_its_own(tmp_path: Path) -> None:
    versions = house(tmp_path)
    assert versions.install(OLD, f"content of {OLD}", built(OLD)) == OLD
    assert versions.install(OLD, "1234567890", built(OLD)) == f"{OLD}-12345678"
    assert versions.installed() == [OLD, f"{OLD}-12345678"]


def test_a_version_that_never_serves_is_taken_back(tmp_path: Path) -> None:
    versions = house(tmp_path)
    versions.use(versions.install(NEW, "new", built(NEW)), Trial(NEW, OLD, "update-1", FAR_S))
    for number in (1, 2, 3):
        trial = versions.settle(now_s=0.0)
        assert trial is not None
        assert trial.starts == number
    assert versions.settle(now_s=0.0) is None
    assert served(versions) == OLD
    problem = "it was started 3 times and never served"
    assert versions.outcome() == Outcome(NEW, "update-1", problem)
    # The next update may try the same version again.
    versions.use(NEW, Trial(NEW, OLD, "update-2", FAR_S))
    assert versions.settle(now_s=0.0) is not None
    assert served(versions) == NEW


def test_a_trial_whose_time_is_over_is_taken_back(tmp_path: Path) -> None:
    versions = house(tmp_path)
    versions.use(versions.install(NEW, "new", built(NEW)), Trial(NEW, OLD, "u", 100.0))
    assert versions.settle(now_s=99.0) is not None
    assert versions.settle(now_s=101.0) is None
    assert served(versions) == OLD


def test_the_version_before_settles_one_that_cannot_start(tmp_path: Path) -> None:
    """The units run this module of the version before; here it is the one under test."""
    versions = house(tmp_path)
    versions.use(versions.install(NEW, "new", built(NEW)), Trial(NEW, OLD, "u", FAR_S))
    command = [sys.executable, "-m", "rkserve.bringup.versions", str(versions.prefix)]
    for _ in range(4):
        subprocess.run(command, check=True, cwd=PROJECT, timeout=120)
    assert served(versions) == OLD


def test_only_the_version_in_use_and_the_one_before_are_kept(tmp_path: Path) -> None:
    versions = house(tmp_path, "0.0.8", "0.0.9", OLD)
    assert versions.prune() == ["0.0.8"]
    assert versions.installed() == ["0.0.9", OLD]
    assert versions.previous() == "0.0.9"
    versions.back("asked for")
    assert (served(versions), versions.previous()) == ("0.0.9", OLD)


def test_a_version_of_another_account_stays_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """rkserve-node installs as root, and the service's account makes the later ones."""
    versions = house(tmp_path, "0.0.7", "0.0.8", "0.0.9", OLD)
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path == versions.prefix / "0.0.7" / module.MARKER:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert versions.prune() == ["0.0.8"]
    assert versions.installed() == ["0.0.7", "0.0.9", OLD]
    assert "0.0.7 belongs to another account, and stays: sudo " in caplog.text


def test_a_record_of_a_later_version_is_read(tmp_path: Path) -> None:
    versions = house(tmp_path)
    (versions.prefix / "trial.json").write_text(
        json.dumps({"name": OLD, "before": "0.0.9", "until_s": FAR_S, "colour": "blue"})
    )
    assert versions.trial() == Trial(OLD, "0.0.9", until_s=FAR_S)
    (versions.prefix / "trial.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is damaged .* remove it"):
        versions.trial()


def test_two_processes_do_not_change_the_versions_at_once(tmp_path: Path) -> None:
    versions = house(tmp_path)
    with versions.locked(), pytest.raises(ConfigError, match="Another process"), versions.locked():
        pass


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        pytest.param(lambda _: None, "does not exist", id="no folder"),
        pytest.param(lambda path: path.mkdir(), "names no version", id="no version"),
    ],
)
def test_a_folder_without_versions_is_one_sentence(
    tmp_path: Path, prepare: Callable[[Path], None], sentence: str
) -> None:
    prepare(tmp_path / "opt")
    with pytest.raises(ConfigError, match=sentence):
        VersionFolder(tmp_path / "opt").check_writable()


def test_links_and_markers_are_on_the_disk_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename may reach the disk before the content it names, unless that was flushed first."""
    versions = house(tmp_path)
    done: list[str] = []
    whole, one, rename = os.sync, os.fsync, Path.replace

    def replace(self: Path, target: Path) -> Path:
        done.append(f"rename {Path(target).name}")
        return rename(self, target)

    def flush(descriptor: int) -> None:
        done.append(f"flush {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        one(descriptor)

    def flush_all() -> None:
        done.append("flush everything")
        whole()

    monkeypatch.setattr(os, "sync", flush_all)
    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", replace)
    name = versions.install(NEW, "new", built(NEW))
    versions.use(name, Trial(name, OLD))
    assert done == [
        *("flush everything", "flush .complete.new", "rename .complete", f"flush {NEW}"),
        "flush opt",  # an earlier outcome was removed
        *("flush trial.json.new", "rename trial.json", "flush opt"),
        *("rename previous", "flush opt", "rename venv", "flush opt"),
    ]
