"""Environments of new versions: from wheels alone, beside the one that runs, and checked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rkserve.bringup.versions import MARKER, VersionFolder
from rkserve.bringup.wheels import LOCK_FILE, WheelFolder, check
from rkserve.core.errors import ConfigError
from tests.support.paths import PROJECT
from tests.support.sim.wheel_folder import make_wheel

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel("0.2.7", folder, tmp_path_factory.mktemp("work"))
    shutil.copy(PROJECT / LOCK_FILE, folder)
    return folder


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> VersionFolder:
    """A folder with one version, which is in use."""
    folder = WheelFolder(wheels)
    versions = VersionFolder(tmp_path_factory.mktemp("versions"))
    versions.use(versions.install(folder.version, folder.content(), folder.build))
    return versions


def site_of(versions: VersionFolder) -> Path:
    (site,) = versions.link.glob("lib/python*/site-packages")
    return site


@pytest.mark.long
def test_a_version_is_installed_from_a_folder_beside_the_one_that_runs(
    versions: VersionFolder,
) -> None:
    shown = subprocess.run(
        [versions.link / "bin" / "rkserve", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert shown == "rkserve 0.2.7\n"
    environment = versions.link.resolve()
    found = check(environment)
    assert (found.rkserve, found.ray[:5]) == ("0.2.7", "2.60.")
    # Nothing of it is in this project's folder, and its commands are its own.
    site = site_of(versions)
    assert not [*site.glob("__editable__*")]
    assert (site / "rkserve" / "app.py").is_file()
    assert (environment / LOCK_FILE).read_bytes() == (PROJECT / LOCK_FILE).read_bytes()
    ray = (environment / "bin" / "ray").read_text(encoding="utf-8")
    assert ray.startswith(f"#!{environment}/bin/python")


@pytest.mark.long
def test_packages_that_have_not_changed_take_no_space(versions: VersionFolder) -> None:
    site = site_of(versions)
    wrapper = site / "ray" / "serve" / "api.py"
    assert (
        wrapper.stat().st_nlink > 1 or wrapper.stat().st_dev != Path(pytest.__file__).stat().st_dev
    )
    # A package that pip replaces leaves the one of the version before as it is.
    assert (site / "rkserve" / "app.py").stat().st_nlink == 1


@pytest.mark.long
def test_a_version_that_cannot_be_imported_is_not_complete(
    tmp_path: Path, versions: VersionFolder
) -> None:
    def build(venv: Path) -> None:
        shutil.copytree(versions.link.resolve(), venv, symlinks=True, copy_function=os.link)
        (venv / MARKER).unlink()
        (app,) = venv.glob("lib/python*/site-packages/rkserve/app.py")
        app.unlink()  # a link to the whole version's
        app.write_text("import a_package_that_is_missing\n", encoding="utf-8")
        check(venv)

    broken = VersionFolder(tmp_path)
    with pytest.raises(ConfigError, match=r"the check of a new version failed(.|\n)*No module"):
        broken.install("0.2.7", "new", build)
    assert broken.installed() == []


def test_a_folder_is_read_by_its_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 0 wheels of rkserve and needs one"):
        WheelFolder(tmp_path)
    (tmp_path / "rkserve-0.2.0-py3-none-any.whl").write_bytes(b"one")
    one = WheelFolder(tmp_path)
    assert (one.version, one.ray) == ("0.2.0", None)
    (tmp_path / "requirements.lock").write_text("rapids==1\nray[serve]==2.61.0 \\\n  --hash=x\n")
    assert one.ray == "2.61.0"
    before = one.content()
    (tmp_path / "requirements.lock").write_text("ray==2.60.0\n")
    assert one.content() != before
    assert [path.name for path in one.files()] == ["requirements.lock", one.wheel.name]
    (tmp_path / "rkserve-0.3.0-py3-none-any.whl").write_bytes(b"two")
    with pytest.raises(ConfigError, match="has 2 wheels"):
        WheelFolder(tmp_path)


def test_pip_comes_from_the_folder_else_from_the_version_that_runs(tmp_path: Path) -> None:
    """It is kept for the next version, because Debian's Python alone has none."""
    offline, running, new = (tmp_path / name for name in ("offline", "running", "new"))
    for folder in (offline, running, new / "bin"):
        folder.mkdir(parents=True)
    (offline / "rkserve-0.2.0-py3-none-any.whl").write_bytes(b"one")
    (running / "pip-25.3-py3-none-any.whl").write_bytes(b"pip of the version that runs")
    python = new / "bin" / "python"
    kept = new / "pip-25.3-py3-none-any.whl"
    assert WheelFolder(offline).pip_command(python, running) == [str(python), f"{kept}/pip"]
    assert kept.read_bytes() == b"pip of the version that runs"
    (offline / "pip-26.0-py3-none-any.whl").write_bytes(b"the folder's")
    newer = new / "pip-26.0-py3-none-any.whl"
    assert WheelFolder(offline).pip_command(python, running) == [str(python), f"{newer}/pip"]
    assert newer.read_bytes() == b"the folder's"
