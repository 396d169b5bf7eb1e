"""New environments from a folder of wheels, beside the one that runs, and checks of them.

The folder is what ``make offline`` fills: rkserve's wheel, the lock of the packages that it needs,
and their wheels, loose or in one archive for each Python and machine. Packages that have not
changed are taken from the environment that runs, by hard links where the disk has them: on a board
a new version then takes seconds and a few megabytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rkserve.core.errors import ConfigError

WHEEL = re.compile(r"rkserve-([^-]+)-.*\.whl")
PINNED_RAY = re.compile(r"^ray(?:\[[^\]]*\])?==([\w.+]+)", re.MULTILINE)
LOCK_FILE, SUBFOLDER, PIP = "requirements.lock", "wheels", "pip-*.whl"
LIMIT_S = 3600.0  # of pip on a board with a slow card
CHECK_S = 900.0  # of imports that take 4 s of a desktop CPU, beside a board's requests
# Imports everything that a node runs; a package that is missing or broken fails here.
IMPORTS = (
    "import rkserve.app, rkserve.deployments.board, rkserve.deployments.router, "
    "rkserve.deployments.coordinator, rkserve.bringup.board, rkserve.bringup.head; "
    "import importlib.metadata as m; print(m.version('rkserve'), m.version('ray'))"
)
OWN = re.compile(r"(__editable__.*|rkserve|rkserve-.*\.dist-info|__pycache__)")
PYTHON = re.compile(r"(python[\d.]*|[Aa]ctivate.*|rkserve|serve)")


@dataclass(frozen=True)
class BuiltVersion:
    """The versions of rkserve and Ray in an environment."""

    rkserve: str
    ray: str


class WheelFolder:
    """A folder with one wheel of rkserve, and wheels of the packages that it needs."""

    def __init__(self, folder: Path) -> None:
        """Raises ``ConfigError`` unless there is exactly one wheel of rkserve."""
        self.folder = folder
        places = (folder, folder / SUBFOLDER)
        found = [one for place in places for one in sorted(place.glob("rkserve-*.whl"))]
        if len(found) != 1:
            raise ConfigError(
                f"{folder} has {len(found)} wheels of rkserve and needs one: "
                "pip wheel --no-deps -w FOLDER rkserve"
            )
        self.wheel = found[0]
        match = WHEEL.fullmatch(self.wheel.name)
        if match is None:
            raise ConfigError(f"{self.wheel} is no wheel of rkserve.")
        self.version = match[1]

    @property
    def lock(self) -> Path | None:
        """The lock of the packages, None without one."""
        path = self.folder / LOCK_FILE
        return path if path.is_file() else None

    @property
    def ray(self) -> str | None:
        """The version of Ray in the lock, None without a lock."""
        if self.lock is None:
            return None
        found = PINNED_RAY.search(self.lock.read_text(encoding="utf-8"))
        return found[1] if found is not None else None

    @property
    def archive(self) -> Path | None:
        """The archive of wheels for this Python and machine, None without one."""
        tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}"
        path = self.folder / SUBFOLDER / f"wheels-{tag}.tar"
        return path if path.is_file() else None

    def content(self) -> str:
        """Return the digest of what an environment is made of, as ``rkserve-node`` computes it."""
        digest = hashlib.sha256(self.wheel.read_bytes())
        if self.lock is not None:
            digest.update(self.lock.read_bytes())
        tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}"
        digest.update(f"{tag}\n".encode())
        return digest.hexdigest()

    def files(self) -> list[Path]:
        """Return the files that a board of any kind may need."""
        loose = [*self.folder.glob("*.whl"), *(self.folder / SUBFOLDER).glob("*")]
        lock = [self.lock] if self.lock is not None else []
        return sorted({*(one for one in loose if one.is_file()), *lock})

    def build(self, venv: Path, index: bool = False) -> None:
        """Make an environment at a path, and check it; with ``index`` pip may download.

        Raises:
            ConfigError: pip or a check failed; the message has the end of the output.
        """
        _run([sys.executable, "-m", "venv", "--without-pip", str(venv)], "venv")
        python = venv / "bin" / "python"
        seed(Path(sys.prefix).resolve(), venv)
        with TemporaryDirectory(dir=venv.parent, prefix=".wheels.") as unpacked:
            places = [self.wheel.parent, self.folder / SUBFOLDER]
            if self.archive is not None:
                _run(["tar", "-xf", str(self.archive), "-C", unpacked], "tar")
                places.append(Path(unpacked))
            options = [f"--find-links={one}" for one in places if one.is_dir()]
            options += [] if index else ["--isolated", "--no-index"]
            pip = [
                *self.pip_command(python, Path(sys.prefix).resolve()),
                "install",
                "--no-cache-dir",
                "--quiet",
                *options,
            ]
            if self.lock is not None:
                # The lock is complete: pip, which is slow on a board, runs once, resolving nothing.
                own = Path(unpacked, "rkserve.txt")
                digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
                uri = self.wheel.resolve().as_uri()
                own.write_text(f"rkserve @ {uri} --hash=sha256:{digest}\n", encoding="utf-8")
                locked = ["--no-deps", "--require-hashes", "-r", str(self.lock), "-r", str(own)]
                _run([*pip, *locked], "pip")
            else:
                _run([*pip, str(self.wheel)], "pip")
        if self.lock is not None:
            shutil.copy(self.lock, venv / LOCK_FILE)  # the next update compares it with its own
        found = check(venv)
        if found.rkserve != self.version:
            raise ConfigError(f"{self.wheel} contains rkserve {found.rkserve}.")

    def pip_command(self, python: Path, running: Path) -> list[str]:
        """Return pip's command for an environment: the folder's, this one's, or Python's own.

        A wheel of pip is kept in the environment for the next version: Debian's Python has no pip
        without another package, and boards do not download pip where their packages stay.
        """
        wheels = sorted(self.folder.glob(PIP)) or sorted(running.glob(PIP))
        if wheels:
            kept = shutil.copy(wheels[-1], python.parent.parent)
            return [str(python), f"{kept}/pip"]
        if importlib.util.find_spec("pip") is not None:
            return [sys.executable, "-m", "pip", "--python", str(python)]
        _run([str(python), "-m", "ensurepip"], "ensurepip")
        return [str(python), "-m", "pip"]


def check(venv: Path) -> BuiltVersion:
    """Import everything in an environment, start its command, and return its versions.

    Raises:
        ConfigError: one of them failed.
    """
    imported = _run([str(venv / "bin" / "python"), "-I", "-c", IMPORTS], "the check")
    version, ray = imported.split()[-2:]
    shown = _run([str(venv / "bin" / "rkserve"), "--version"], "the check").strip()
    if shown != f"rkserve {version}":
        raise ConfigError(f"{venv}/bin/rkserve --version printed '{shown}'.")
    return BuiltVersion(version, ray)


def seed(old: Path, new: Path) -> None:
    """Take the packages of an environment into a new one, except for rkserve itself.

    pip replaces files and never writes into them, so that links to them are safe.
    """
    sources = sorted(old.glob("lib/python*/site-packages"))
    targets = sorted(new.glob("lib/python*/site-packages"))
    if not sources or not targets or sources[0].parent.name != targets[0].parent.name:
        return  # another Python: pip installs everything

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:  # another disk, or another account's file
            shutil.copy2(source, target, follow_symlinks=False)

    def skipped(folder: str, names: list[str]) -> set[str]:
        top = Path(folder) == sources[0]
        return {name for name in names if name == "__pycache__" or (top and OWN.fullmatch(name))}

    shutil.copytree(
        sources[0],
        targets[0],
        symlinks=True,
        ignore=skipped,
        copy_function=link,
        dirs_exist_ok=True,
    )
    first = f"#!{old}/bin/".encode()
    for script in (old / "bin").iterdir():
        if PYTHON.fullmatch(script.name) or not script.is_file() or script.is_symlink():
            continue
        content = script.read_bytes()
        if not content.startswith(b"#!"):
            link(str(script), str(new / "bin" / script.name))
        elif content.startswith(first):
            target = new / "bin" / script.name
            target.write_bytes(content.replace(first, f"#!{new}/bin/".encode(), 1))
            target.chmod(0o755)


def _run(command: Sequence[str], name: str) -> str:
    # The environment's own settings of Python would have it import this one's modules.
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    limit_s = CHECK_S if name == "the check" else LIMIT_S
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigError(f"{name} of a new version could not be run: {exc}.") from exc
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise ConfigError(f"{name} of a new version failed: {' '.join(command)}\n{tail}")
    return done.stdout
