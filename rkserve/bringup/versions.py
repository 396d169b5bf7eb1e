"""The versions of rkserve on one machine: side by side, with a link to the one in use.

The folder is laid out as ``rkserve-node`` and the Debian package lay it out, /opt/rkserve:

- ``<name>/`` is a virtual environment; ``<name>/.complete`` is written last, when all of it is on
  the disk. A folder without it is left over from an installation that was cut off.
- ``venv`` is the link to the version in use, ``previous`` the one to the version before.
- ``trial.json`` is there while a new version is on trial. A version whose trial is not confirmed in
  time, or that was started too often, is taken back by the next start.

Every change is one rename of a file or link that is on the disk before, so that a power cut at any
point leaves a whole version in use. Each step can be repeated.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rkserve.core.errors import ConfigError
from rkserve.core.files import sync

log = logging.getLogger(__name__)

MARKER, LINK, PREVIOUS = ".complete", "venv", "previous"
TRIAL, OUTCOME, LOCK = "trial.json", "outcome.json", ".lock"
STARTS = 3  # of a version on trial

Build = Callable[[Path], None]


def _no_fault(_step: str) -> None:
    """Do nothing between two steps; tests end the process there."""


@dataclass(frozen=True)
class Trial:
    """A version in use that has not been confirmed, and the one before.

    ``update`` is the fleet's update that it belongs to, ``until_s`` the end of its time in seconds
    since 1970, ``starts`` the number of its starts. ``before_tokens_per_s`` is the speed of the
    version before, measured for ``seconds``, None where it could not be measured; the version has
    to reach ``ratio`` of it. ``tokens_per_s`` is its own.
    """

    name: str
    before: str
    update: str = ""
    until_s: float = 0.0
    starts: int = 0
    before_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    ratio: float = 0.95
    seconds: float = 20.0


@dataclass(frozen=True)
class Outcome:
    """The end of a trial: ``problem`` is empty if the version stayed in use."""

    name: str
    update: str = ""
    problem: str = ""


class VersionFolder:
    """The versions below one folder. One process at a time changes it, which ``locked`` ensures."""

    def __init__(self, prefix: Path, fault: Callable[[str], None] = _no_fault) -> None:
        self.prefix, self._fault = prefix, fault

    @classmethod
    def of_this_process(cls) -> VersionFolder | None:
        """Return the folder from which this process runs, None if it runs from elsewhere."""
        own = Path(sys.prefix).resolve()
        found = cls(own.parent)
        return found if found.link.is_symlink() and found.is_complete(own.name) else None

    # -- questions -----------------------------------------------------------------------------

    @property
    def link(self) -> Path:
        """The link to the version in use."""
        return self.prefix / LINK

    def current(self) -> str | None:
        """Return the name of the version in use, None without one."""
        return self._target(LINK)

    def current_version(self) -> str | None:
        """Return the version of rkserve in use, None without one."""
        name = self.current()
        return None if name is None else name.partition("-")[0]

    def previous(self) -> str | None:
        """Return the name of the version before, None if none is installed."""
        name = self._target(PREVIOUS)
        return name if name is not None and self.is_complete(name) else None

    def is_complete(self, name: str) -> bool:
        """Return whether a version is installed completely."""
        return (self.prefix / name / MARKER).is_file()

    def installed(self) -> list[str]:
        """Return the names of all complete versions."""
        found = self.prefix.glob(f"*/{MARKER}")
        return sorted(one.parent.name for one in found if not one.parent.is_symlink())

    def content(self, name: str) -> str | None:
        """Return the digest of a version's packages, None if it is not complete."""
        try:
            return (self.prefix / name / MARKER).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None

    def trial(self) -> Trial | None:
        """Return the trial that goes on, None without one."""
        found: Trial | None = self._record(TRIAL, Trial)
        return found

    def outcome(self) -> Outcome | None:
        """Return the end of the last trial, None before one."""
        found: Outcome | None = self._record(OUTCOME, Outcome)
        return found

    def check_writable(self) -> None:
        """Raise ``ConfigError`` unless this account may change the versions."""
        if not self.prefix.is_dir():
            raise ConfigError(
                f"{self.prefix} does not exist: rkserve update needs a node that was installed "
                "with one folder for each version; --prefix names another one."
            )
        if not os.access(self.prefix, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{self.prefix} belongs to another account: sudo chown {os.getuid()} {self.prefix}"
            )
        if self.current() is None:
            raise ConfigError(
                f"{self.link} names no version: `rkserve-node use` takes an installed one into use."
            )

    # -- changes -------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock. Raises ``ConfigError`` if another process has it."""
        descriptor = os.open(self.prefix / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                raise ConfigError(
                    f"Another process changes the versions in {self.prefix}."
                ) from exc
            yield
        finally:
            os.close(descriptor)

    def install(self, version: str, content: str, build: Build) -> str:
        """Install a version unless it is there, and return its name.

        ``build`` makes and checks the environment at a path. The same version with other packages
        gets a name of its own, since the one of that name may be in use.
        """
        for name in self.installed():
            if self.content(name) == content:
                return name
        name = version if not self.is_complete(version) else f"{version}-{content[:8]}"
        folder = self.prefix / name
        self._fault("before the leftover")
        if folder.exists():
            shutil.rmtree(folder)  # it has no marker: an installation was cut off
        self._fault("before the build")
        build(folder)
        self._fault("after the build")
        os.sync()  # one call for tens of thousands of files
        self._fault("before the marker")
        self._write(folder / MARKER, f"{content}\n")
        return name

    def use(self, name: str, trial: Trial | None = None) -> None:
        """Have the link name an installed version, on trial where one is given.

        Raises:
            ConfigError: it is not installed completely.
        """
        if not self.is_complete(name):
            raise ConfigError(f"{name} is not installed completely in {self.prefix}.")
        before = self.current()
        if trial is not None:
            self._remove(OUTCOME)  # of an earlier trial of this version
            self._write_record(TRIAL, trial)
        if before == name:
            return
        if before is not None and self.is_complete(before):
            self._point(PREVIOUS, before)
        self._point(LINK, name)

    def settle(self, now_s: float | None = None, *, counts: bool = True) -> Trial | None:
        """Bring what a power cut has left to its end; call it at each start.

        Returns the trial of the version in use. One that was started too often, or whose time is
        over, is taken back; then, and without a trial, the result is None. ``counts``: this is the
        start of the version on trial.
        """
        trial = self.trial()
        if trial is None:
            return None
        if self.current() != trial.name:
            # It was cut off before the link was moved, or after it was moved back.
            self._remove(TRIAL)
            return None
        ended = self.outcome()
        if ended is not None and ended.problem and ended.name == trial.name:
            self.back(ended.problem)  # it was cut off
            return None
        if trial.starts >= STARTS:
            self.back(f"it was started {trial.starts} times and never served")
            return None
        if (time.time() if now_s is None else now_s) > trial.until_s:
            self.back("it did not serve in time")
            return None
        if counts:
            trial = replace(trial, starts=trial.starts + 1)
            self._write_record(TRIAL, trial)
        return trial

    def note_speed(self, tokens_per_s: float) -> Trial:
        """Keep the measured speed of the version on trial, and return the trial."""
        trial = self.trial()
        assert trial is not None, "only a version on trial is measured"
        trial = replace(trial, tokens_per_s=tokens_per_s)
        self._write_record(TRIAL, trial)
        return trial

    def confirm(self) -> None:
        """End the trial: the version in use stays."""
        trial = self.trial()
        if trial is not None:
            self._write_record(OUTCOME, Outcome(trial.name, trial.update))
            self._remove(TRIAL)

    def back(self, problem: str, update: str = "") -> str:
        """Have the link name the version before, and return its name.

        Raises:
            ConfigError: there is none.
        """
        trial = self.trial()
        before = trial.before if trial is not None else self.previous()
        failed = self.current()
        if before is None or not self.is_complete(before):
            raise ConfigError(f"No complete version was in use before {failed} in {self.prefix}.")
        update = trial.update if trial is not None else update
        self._write_record(OUTCOME, Outcome(failed or "", update, problem))
        self._point(LINK, before)
        if failed is not None and failed != before:
            self._point(PREVIOUS, failed)
        self._remove(TRIAL)
        return before

    def prune(self, running: Iterable[str] = ()) -> list[str]:
        """Remove all but the versions in use, before, on trial and ``running``; return those.

        A version of another account stays: root's, of a package or of ``rkserve-node install``.
        """
        trial = self.trial()
        kept = {self.current(), self._target(PREVIOUS), trial and trial.before, *running}
        removed = []
        for name in self.installed():
            if name in kept:
                continue
            # Without its marker first, so that a removal that is cut off leaves no version.
            try:
                (self.prefix / name / MARKER).unlink()
            except PermissionError:
                command = f"sudo {self.prefix}/rkserve-node prune"
                log.warning("%s belongs to another account, and stays: %s", name, command)
                continue
            self._fault("after a marker was removed")
            shutil.rmtree(self.prefix / name)
            removed.append(name)
        return removed

    # -- the disk ------------------------------------------------------------------------------

    def _target(self, name: str) -> str | None:
        try:
            return (self.prefix / name).readlink().name
        except (FileNotFoundError, OSError):
            return None

    def _record(self, name: str, kind: type[Any]) -> Any:
        path = self.prefix / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            known = kind.__dataclass_fields__.keys()
            # Another version may have written it.
            return kind(**{key: value for key, value in found.items() if key in known})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError) as exc:
            raise ConfigError(f"{path} is damaged ({exc}): remove it.") from exc

    def _write_record(self, name: str, value: Any) -> None:
        self._write(self.prefix / name, json.dumps(asdict(value), indent=1) + "\n")

    def _write(self, path: Path, text: str) -> None:
        """Replace a file: completely, and on the disk, or not at all."""
        fresh = path.with_name(f"{path.name}.new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._fault(f"before {path.name}")
        fresh.replace(path)
        sync(path.parent)
        self._fault(f"after {path.name}")

    def _point(self, name: str, target: str) -> None:
        """Replace a link by one rename."""
        fresh = self.prefix / f".{name}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        self._fault(f"before the link {name}")
        fresh.replace(self.prefix / name)
        self._fault(f"before the link {name} is on the disk")
        sync(self.prefix)
        self._fault(f"after the link {name}")

    def _remove(self, name: str) -> None:
        self._fault(f"before {name} is removed")
        with contextlib.suppress(FileNotFoundError):
            (self.prefix / name).unlink()
        sync(self.prefix)
        self._fault(f"after {name} is removed")


def main(prefix: Path) -> None:
    """Settle the versions before a start.

    The units call it with the version before: one on trial may not even start.
    """
    versions = VersionFolder(prefix)
    if versions.trial() is not None:
        with versions.locked():
            versions.settle()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
