"""An update of the fleet from the head: the order to the boards, the progress, and the head.

All of its state is in files, so that the command can be ended and started again at any point.
Boards go on by themselves with what they were ordered.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rkserve import __version__
from rkserve.bench.processes import PROC
from rkserve.bringup.processes import HEAD, StateFolder, signal_process
from rkserve.bringup.settings import environment_of
from rkserve.bringup.update_plan import (
    BoardPhase,
    canary_problem,
    described,
    next_step,
    phase_of,
    ray_problem,
    version_problem,
)
from rkserve.bringup.versions import VersionFolder
from rkserve.bringup.wheels import BuiltVersion, WheelFolder, check
from rkserve.core.errors import ConfigError
from rkserve.router.fleet_update import (
    FleetUpdate,
    MemberNews,
    WheelFile,
    fresh,
    read_news,
    read_update,
    write_update,
)
from rkserve.router.membership import ClusterTerms, read_terms

POLL_S = 2.0
REDEPLOY = "rkserve.deployments.redeploy"
REDEPLOY_S = 1800.0
# A switching board measures before its time begins, and sends no news meanwhile.
BEFORE_S = 600.0
Note = Callable[[str], None]


@dataclass(frozen=True)
class UpdateOptions:
    """The options of ``rkserve update``. Without ``folder`` the last update goes on."""

    folder: Path | None = None
    back: bool = False
    canary: str | None = None
    max_unavailable: int = 1
    ratio: float = 0.95
    seconds: float = 20.0
    limit_s: float = 900.0
    index: bool = False
    restart_cluster: bool = False
    dry_run: bool = False
    only_head: bool = False


class FleetUpdater:
    """An update of the fleet that the head of ``state`` belongs to."""

    def __init__(
        self,
        state: StateFolder,
        versions: VersionFolder | None,
        note: Note,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._state, self._note = state, note
        self._clock, self._pause = clock, pause
        self._given = versions
        self._shown: dict[str, str] = {}
        self._went: dict[str, float] = {}

    def run(self, options: UpdateOptions) -> bool:
        """Make the update, and return whether all nodes are at its version.

        Raises:
            ConfigError: it cannot begin; nothing was changed.
        """
        record = self._state.read()
        if record is None or not record.running:
            raise ConfigError(
                f"No head runs that {self._state.folder} has a record of: run this on the head, or "
                "name its folder by --state."
            )
        versions = self._versions()
        if options.only_head:
            self._only_head(versions)
            return True
        update = self._order(versions, options)
        self._check(update, options)
        for line in described(update, self._boards(), options.canary, options.max_unavailable):
            self._note(line)
        if options.dry_run:
            return True
        name, built = self._install(versions, update, options)
        write_update(self._state.folder, update)
        done = self._boards_through(update, options, built)
        if done:
            self._head_through(versions, name, built)
        update = self._current(update)
        write_update(self._state.folder, replace(update, ended=True))
        return done

    # -- the beginning -------------------------------------------------------------------------

    def _versions(self) -> VersionFolder:
        if self._given is None:
            raise ConfigError(
                "rkserve does not run from a folder of versions here, such as /opt/rkserve/venv: "
                "install it by `rkserve-node install` first."
            )
        self._given.check_writable()
        return self._given

    def _order(self, versions: VersionFolder, options: UpdateOptions) -> FleetUpdate:
        """Return a new order, or the last one where it has not ended."""
        last = read_update(self._state.folder)
        goes_on = last is not None and not last.ended
        if options.folder is None and not options.back:
            if last is None or not goes_on:
                raise ConfigError(
                    "No update goes on: name a folder with the wheels of a version, or --rollback."
                )
            self._note(f"The update to {last.version} goes on.")
            return last
        made = FleetUpdate(
            secrets.token_hex(6),
            "",
            index=options.index,
            ratio=options.ratio,
            seconds=options.seconds,
            limit_s=options.limit_s,
        )
        if options.back:
            before = versions.previous()
            if before is None:
                raise ConfigError(f"{versions.prefix} has no version before the one in use.")
            return replace(made, version=before.partition("-")[0], back=True)
        assert options.folder is not None
        wheels = WheelFolder(options.folder.absolute())
        files = tuple(
            WheelFile(str(one.relative_to(wheels.folder)), _sha256(one), one.stat().st_size)
            for one in wheels.files()
        )
        same = (
            last is not None and goes_on and (last.version, last.files) == (wheels.version, files)
        )
        if last is not None and same:
            self._note(f"The update to {last.version} goes on.")
            return replace(last, folder=str(wheels.folder))
        return replace(made, version=wheels.version, folder=str(wheels.folder), files=files)

    def _check(self, update: FleetUpdate, options: UpdateOptions) -> None:
        boards = self._boards()
        ray = WheelFolder(Path(update.folder)).ray if update.folder else None
        now = importlib.metadata.version("ray")
        problem = (
            canary_problem(boards, options.canary)
            or version_problem(update, boards, __version__)
            or ray_problem(now, ray, restart=options.restart_cluster)
        )
        if problem:
            raise ConfigError(problem)

    def _install(
        self, versions: VersionFolder, update: FleetUpdate, options: UpdateOptions
    ) -> tuple[str, BuiltVersion]:
        """Install the version on the head first: what fails there fails before any board."""
        with versions.locked():
            if update.back:
                name = versions.previous() or ""
            elif versions.current_version() == update.version:
                name = versions.current() or ""
            else:
                self._note(f"Installing {update.version} on the head ...")
                wheels = WheelFolder(Path(update.folder))

                def build(venv: Path) -> None:
                    wheels.build(venv, update.index)

                name = versions.install(wheels.version, wheels.content(), build)
        built = check(versions.prefix / name)
        now = importlib.metadata.version("ray")
        if problem := ray_problem(now, built.ray, restart=options.restart_cluster):
            raise ConfigError(problem)
        return name, built

    # -- the boards ----------------------------------------------------------------------------

    def _boards(self) -> list[MemberNews]:
        return fresh(read_news(self._state.folder), self._clock())

    def _current(self, update: FleetUpdate) -> FleetUpdate:
        found = read_update(self._state.folder)
        return found if found is not None and found.id == update.id else update

    def _boards_through(
        self, update: FleetUpdate, options: UpdateOptions, built: BuiltVersion
    ) -> bool:
        """Have the boards switch in their order; False if one failed."""
        keys = {one.key for one in self._boards()} | {*update.go}
        at_once = built.ray != importlib.metadata.version("ray")
        most = len(keys) if at_once else options.max_unavailable
        problem = ""
        while True:
            boards = [one for one in read_news(self._state.folder) if one.key in keys]
            self._show(update, boards)
            if at_once and {*update.go} == keys:
                return True  # they come back with the head
            step = next_step(update, boards, options.canary, most, self._overdue(update, boards))
            if step.problem and step.problem != problem:
                problem = step.problem
                self._note(f"rkserve: the update stops: {problem}")
            if step.over:
                return step.boards_done
            go = step.go if not at_once else self._all_installed(update, boards)
            if go:
                update = replace(update, go=(*update.go, *go))
                write_update(self._state.folder, update)
            self._pause(POLL_S)

    def _all_installed(self, update: FleetUpdate, boards: list[MemberNews]) -> tuple[str, ...]:
        """Return all boards once all of them can switch, for a restart of the whole cluster."""
        ready = all(phase_of(update, one) is BoardPhase.INSTALLED for one in boards)
        return tuple(one.key for one in boards) if ready else ()

    def _overdue(self, update: FleetUpdate, boards: list[MemberNews]) -> set[str]:
        now_s = self._clock()
        for key in update.go:
            self._went.setdefault(key, now_s)
        limit_s = update.limit_s + 2 * update.seconds + BEFORE_S
        return {one.key for one in boards if now_s - self._went.get(one.key, now_s) > limit_s}

    def _show(self, update: FleetUpdate, boards: list[MemberNews]) -> None:
        for one in boards:
            phase = phase_of(update, one)
            text = phase.value
            if phase is BoardPhase.SWITCHING and one.stage == "trial":
                text = "on trial"
            if phase is BoardPhase.DONE and one.tokens_per_s and one.before_tokens_per_s:
                text += f": {one.tokens_per_s:.1f} tokens/s, {one.before_tokens_per_s:.1f} before"
            if phase is BoardPhase.FAILED:
                text += f", and serves {one.version}: {one.problem}"
            if self._shown.get(one.key) != text:
                self._shown[one.key] = text
                self._note(f"{one.host}: {text}")

    # -- the head ------------------------------------------------------------------------------

    def _only_head(self, versions: VersionFolder) -> None:
        """Have Routers and Coordinator start anew from the version in use; the link stays."""
        name = versions.current()
        if name is None:
            raise ConfigError(f"No version is in use in {versions.prefix}.")
        built = check(versions.prefix / name)
        if problem := ray_problem(importlib.metadata.version("ray"), built.ray, restart=False):
            raise ConfigError(problem)
        self._note("The head: Routers and Coordinator start anew, one after the other ...")
        if problem := self._redeploy(versions, name, read_terms(self._state.folder)):
            raise ConfigError(f"Routers and Coordinator do not start from {name}: {problem}")
        self._note(f"The head serves {built.rkserve}.")

    def _head_through(self, versions: VersionFolder, name: str, built: BuiltVersion) -> None:
        """Take the version into use on the head: its Routers and Coordinator, or all of it."""
        terms = read_terms(self._state.folder)
        before = versions.current()
        with versions.locked():
            versions.use(name)
        if built.ray != importlib.metadata.version("ray"):
            self._restart_head()
            return
        self._note("The head: Routers and Coordinator start anew, one after the other ...")
        problem = self._redeploy(versions, name, terms)
        if problem:
            self._note("rkserve: the head goes back.")
            with versions.locked():
                versions.back(problem)
            if before is not None:
                self._redeploy(versions, before, terms)
            raise ConfigError(f"The head could not be updated, and the boards are: {problem}")
        with versions.locked():
            versions.prune(self._running(versions))
        self._note(f"The head serves {built.rkserve}.")

    def _redeploy(self, versions: VersionFolder, name: str, terms: ClusterTerms) -> str:
        """Have Serve replace the head's deployments; return the reason of a failure."""
        python = versions.prefix / name / "bin" / "python"
        done = subprocess.run(
            [sys.executable, "-m", REDEPLOY, terms.ray_address, str(python)],
            env=environment_of(HEAD, os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=REDEPLOY_S,
            check=False,
        )
        lines = (done.stdout + done.stderr).strip().splitlines()
        return "" if done.returncode == 0 else (lines[-1] if lines else "no reason was given")

    def _running(self, versions: VersionFolder) -> set[str]:
        """Return the versions from which Ray and ``rkserve up`` run until the head's next start."""
        record = self._state.read()
        found: set[str] = set()
        for one in record.all_alive() if record is not None else ():
            with suppress(OSError):  # it has ended since
                words = (PROC / str(one.pid) / "cmdline").read_bytes().decode(errors="replace")
                found |= {
                    name for name in versions.installed() if f"{versions.prefix}/{name}/" in words
                }
        return found

    def _restart_head(self) -> None:
        record = self._state.read()
        assert record is not None, "it was there at the beginning"
        self._note("The head ends, and its boards with it; systemd starts it with the new version.")
        self._note("Without systemd: rkserve up, with the options of the last time.")
        signal_process(record.supervisor, signal.SIGTERM)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
