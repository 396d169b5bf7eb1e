"""Fill an offline folder: all that the machines of a cluster need, so that none needs the internet.

It builds rkserve's wheel, downloads the wheels of requirements.lock for machines and Pythons that
may differ from this one, and adds the units, the steps, and on request the library and models.
The Ansible collection, the Debian package, cloud-init and Armbian's first boot take it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from rkserve.core.files import file_digest

PROJECT = Path(__file__).resolve().parents[1]
SUMS = "SHA256SUMS"
# The newest C library that a wheel of the lock needs is 2.31 (Debian 11, Ubuntu 20.04).
LIBC = range(31, 16, -1)
PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
# Debian's Python has no pip without another package.
BOARDS_PIP = "pip==25.3"
# The wheel of one commit is the same file wherever it is built: ZIP knows no time before 1980.
EARLIEST_S = 315532800


@dataclass(frozen=True)
class Target:
    """The Python and the machine that wheels are for, written as ``cp311-aarch64``."""

    minor: int
    machine: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read a tag. Raises ``ValueError``."""
        match = re.fullmatch(r"cp3(1[0-3])-(aarch64|x86_64)", text)
        if match is None:
            raise ValueError(f"{text} is no target such as cp311-aarch64 (cp310 to cp313; x86_64)")
        return cls(int(match[1]), match[2])

    @property
    def tag(self) -> str:
        """The text that ``parse`` reads."""
        return f"cp3{self.minor}-{self.machine}"

    def environment(self) -> dict[str, str]:
        """Return the values of the markers in a lock."""
        return {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"3.{self.minor}.0",
            "python_version": f"3.{self.minor}",
            "sys_platform": "linux",
            "extra": "",
        }

    def pip_options(self) -> list[str]:
        """Return the options by which pip downloads for this target."""
        versions = [f"manylinux_2_{minor}" for minor in LIBC]
        platforms = [f"{name}_{self.machine}" for name in (*versions, "manylinux2014", "linux")]
        return [
            *("--only-binary=:all:", "--implementation=cp", f"--python-version=3.{self.minor}"),
            *(f"--platform={name}" for name in platforms),
        ]


def pinned(lock: str, target: Target) -> Iterator[str]:
    """Yield the lines of a lock that a target needs, without markers.

    pip would compare the markers with the Python that it runs in.
    """
    for line in lock.replace("\\\n", " ").splitlines():
        pin, *hashes = line.partition("#")[0].split(" --hash=")
        if not pin.strip():
            continue
        requirement = Requirement(pin.strip())
        if requirement.marker is None or requirement.marker.evaluate(target.environment()):
            requirement.marker = None
            yield " ".join([str(requirement), *(f"--hash={one.strip()}" for one in hashes)])


def build_wheel(into: Path) -> None:
    """Build rkserve's wheel from a copy of its sources, without what earlier builds left."""
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%ct"],
        *(), cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    epoch = int(commit.stdout.strip() or EARLIEST_S)
    for old in into.glob("rkserve-*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        ignore = shutil.ignore_patterns("__pycache__", "build")
        shutil.copytree(PROJECT / "rkserve", Path(scratch, "rkserve"), ignore=ignore)
        for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
            shutil.copy(PROJECT / name, scratch)
        subprocess.run(
            [*PIP, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={into}", scratch],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
            check=True,
        )


def download_wheels(lock: str, target: Target, archive: Path) -> None:
    """Download the wheels of a target into one archive."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, pins = Path(scratch, "wheels"), Path(scratch, "pins.txt")
        pins.write_text("\n".join(pinned(lock, target)) + "\n", encoding="utf-8")
        subprocess.run(
            [*PIP, "download", "--no-deps", "--require-hashes", "--progress-bar=off",
             *target.pip_options(), f"--dest={folder}", "-r", str(pins)],
            check=True,
        )  # fmt: skip
        part = archive.with_suffix(".part")
        pack(sorted(folder.iterdir()), part)
        part.replace(archive)


def pack(files: Iterable[Path], archive: Path) -> None:
    """Write files into an archive that is the same for the same files."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = "root"
        info.mode = 0o644
        return info

    with tarfile.open(archive, "w") as tar:
        for file in files:
            tar.add(file, file.name, filter=plain)


def copy_folder(source: Path, into: Path) -> None:
    """Copy the files of a folder; those that are there with the same size and time stay."""
    for file in sorted(source.rglob("*")):
        place = into / file.relative_to(source)
        if file.is_file() and not _same(file, place):
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, place)


def _same(one: Path, two: Path) -> bool:
    if not two.is_file():
        return False
    left, right = one.stat(), two.stat()
    return (left.st_size, int(left.st_mtime)) == (right.st_size, int(right.st_mtime))


def write_sums(folder: Path) -> None:
    """Write the digests of all files, as ``sha256sum --check`` reads them."""
    lines = []
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file != folder / SUMS:
            lines.append(f"{file_digest(file)}  {file.relative_to(folder).as_posix()}\n")
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def fill(folder: Path, targets: list[Target], library: Path | None, models: list[Path]) -> None:
    """Fill a folder; what it has of other targets, libraries and models stays."""
    for name in ("wheels", "debs", "lib", "models"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    lock = PROJECT / "requirements.lock"
    build_wheel(folder)
    shutil.copy(lock, folder)
    shutil.copy(PROJECT / "cluster" / "node" / "rkserve-node", folder)
    copy_folder(PROJECT / "cluster" / "systemd", folder / "systemd")
    subprocess.run([*PIP, "download", "--no-deps", f"--dest={folder}", BOARDS_PIP], check=True)
    for target in targets:
        archive = folder / "wheels" / f"wheels-{target.tag}.tar"
        print(f"Downloading the wheels of {target.tag} ...", flush=True)
        download_wheels(lock.read_text(encoding="utf-8"), target, archive)
    if library is not None:
        shutil.copy2(library, folder / "lib" / "librkllmrt.so")
    for model in models:
        copy_folder(model, folder / "models" / model.name)
    if not any((folder / "wheels").iterdir()):
        # Without it the machines take their packages from the internet.
        (folder / "wheels").rmdir()
    write_sums(folder)


def main(words: list[str] | None = None) -> None:
    """Read the options and fill the folder."""
    parser = argparse.ArgumentParser(description="Fill an offline folder for a cluster.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", type=Target.parse, action="append", default=[])
    parser.add_argument("--library", type=Path, help="the vendor's librkllmrt.so")
    parser.add_argument("--model", type=Path, action="append", default=[])
    options = parser.parse_args(words)
    fill(options.folder, options.target, options.library, options.model)
    size = sum(file.stat().st_size for file in options.folder.rglob("*") if file.is_file())
    print(f"{options.folder} is filled: {size / 1e6:.0f} MB.")


if __name__ == "__main__":
    main()
