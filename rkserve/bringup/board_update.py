"""A board's part in an update of the fleet: heartbeats to the head, installation, switch and trial.

The board decides by itself whether a version stays: it measures before and after the switch, and
confirms the version when the head has its replica as ready. The head may be away, or its command
may have ended, at any time.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import platform
import re
import secrets
import shutil
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rkserve import __version__
from rkserve.api.admin.heartbeat import HeartbeatAnswer, MeasuredEntry, OrderEntry
from rkserve.bringup.versions import Trial, VersionFolder
from rkserve.bringup.wheels import LOCK_FILE, WheelFolder
from rkserve.core import tls
from rkserve.core.errors import ConfigError, RkserveError
from rkserve.core.files import replace_private
from rkserve.doctor.measure import MeasureLimits, measure
from rkserve.models.folder import open_model_folder
from rkserve.router.fleet_update import member_secret

ASK_S = 20.0
PIECE = 1 << 20
DOWNLOADS = ".downloads"
READY = "ready"
OTHER_MACHINE = re.compile(r"(x86_64|aarch64|armv7l|i686|ppc64le|s390x|amd64|arm64|riscv64)")
Note = Callable[[str], None]


class Head(Protocol):
    """The head, as a board reaches it."""

    def beat(self, news: dict[str, Any]) -> HeartbeatAnswer | None:
        """Send the board's news; None while the head cannot be reached.

        Raises:
            ConfigError: the head refuses this board; the message is its sentence.
        """

    def fetch(self, sha256: str, target: Path) -> None:
        """Download a file of the update. Raises ``OSError``."""


@dataclass(frozen=True)
class HttpHead:
    """The head over HTTP."""

    url: str
    secret: str = field(repr=False)
    ca_file: Path | None = None

    @classmethod
    def of(cls, url: str, cluster_token: str, ca_file: Path | None = None) -> HttpHead:
        """Return the head at a URL, for the boards of a cluster."""
        return cls(url.rstrip("/"), member_secret(cluster_token), ca_file)

    def beat(self, news: dict[str, Any]) -> HeartbeatAnswer | None:
        """Send the board's news; see ``Head``."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.secret}"}
        body = json.dumps(news).encode()
        request = urllib.request.Request(f"{self.url}/v1/heartbeat", body, headers)
        try:
            context = tls.context_for(self.url, self.ca_file)
            with urllib.request.urlopen(request, timeout=ASK_S, context=context) as answer:
                found: Any = json.load(answer)
        except urllib.error.HTTPError as exc:
            if exc.code in (http.client.CONFLICT, http.client.FORBIDDEN):
                raise ConfigError(_sentence(exc)) from exc
            return None  # of an earlier release, or busy
        except (OSError, ValueError, http.client.HTTPException):
            return None
        if not isinstance(found, dict) or HeartbeatAnswer.__required_keys__ - found.keys():
            return None  # of no rkserve
        made: HeartbeatAnswer = found  # type: ignore[assignment] # its keys were compared
        return made

    def fetch(self, sha256: str, target: Path) -> None:
        """Download a file of the update; see ``Head``."""
        headers = {"authorization": f"Bearer {self.secret}"}
        request = urllib.request.Request(f"{self.url}/v1/update/files/{sha256}", headers=headers)
        try:
            context = tls.context_for(self.url, self.ca_file)
        except ValueError as exc:
            raise OSError(str(exc)) from exc
        try:
            with (
                urllib.request.urlopen(request, timeout=ASK_S, context=context) as source,
                target.open("wb") as file,
            ):
                shutil.copyfileobj(source, file, PIECE)
        except http.client.HTTPException as exc:
            raise OSError(f"{self.url} broke off: {exc!r}") from exc


def _sentence(exc: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(exc)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP status {exc.code}"


@dataclass(frozen=True)
class MeasuredModel:
    """The library and the model folder that show a board's speed."""

    library: Path
    folder: Path

    def tokens_per_s(self, seconds: float) -> float:
        """Return the speed of decoding. Raises ``ConfigError`` with the reason if there is none."""
        opened = open_model_folder(self.folder)
        if opened.weights is None:
            raise ConfigError(f"{self.folder} has no weights.")
        context = opened.settings.context_length
        limits = MeasureLimits(seconds)
        found = measure(self.library, opened.weights, context, Path("/"), limits)
        if found.problem or not found.decode_tokens_per_s:
            raise ConfigError(found.problem or "nothing was generated")
        return found.decode_tokens_per_s


def member_key(state: Path, identity: dict[str, str]) -> str:
    """Return the key of this board, which stays while its state folder and its identity do."""
    file = state / "member"
    try:
        own = file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        own = secrets.token_hex(16)
        replace_private(file, f"{own}\n")
    text = " ".join((own, identity.get("machine", ""), identity.get("serial", "")))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class UpdateFollower:
    """The updates of one board; ``step`` is called every few seconds."""

    def __init__(
        self,
        head: Head,
        versions: VersionFolder | None,
        key: str,
        note: Note,
        own: MeasuredModel | None = None,
    ) -> None:
        """``versions`` is None where this process runs from no folder of versions."""
        self._head, self._versions, self._note = head, versions, note
        self._own = own
        self._news: dict[str, Any] = {
            "key": key,
            "host": re.sub(r"[^\w.-]", "-", socket.gethostname()) or "board",
            "version": __version__,
        }
        self._order: OrderEntry | None = None
        self._measures: Sequence[MeasuredEntry] = ()
        self._installation: threading.Thread | None = None
        self._installed = ""
        trial = versions.trial() if versions is not None else None
        if trial is not None:  # from the first heartbeat on: the head must not take it for settled
            self._news |= {"stage": "trial", "update": trial.update}
        ended = versions.outcome() if versions is not None else None
        if trial is None and ended is not None and ended.update:
            self._news |= {"update": ended.update, "problem": ended.problem}

    # -- the start -----------------------------------------------------------------------------

    def begin(self) -> bool:
        """Settle the versions, and measure one on trial; True if another one is in use now."""
        versions = self._versions
        if versions is None or versions.trial() is None:
            return False
        with versions.locked():
            trial = versions.settle(counts=False)
            if trial is not None and trial.before_tokens_per_s and trial.tokens_per_s is None:
                trial = self._compare(versions, trial)
            ended = versions.outcome()
        if trial is None:
            problem = ended.problem if ended is not None else ""
            self._note(f"rkserve: going back to {versions.current()}: {problem}.")
            return versions.current() != Path(sys.prefix).resolve().name
        self._news |= {"stage": "trial", "update": trial.update, "problem": ""}
        self._news |= {
            "before_tokens_per_s": trial.before_tokens_per_s,
            "tokens_per_s": trial.tokens_per_s,
        }
        return False

    def _compare(self, versions: VersionFolder, trial: Trial) -> Trial | None:
        """Measure the version on trial; None if it is taken back."""
        before = trial.before_tokens_per_s or 0.0
        self._measures = _saved_measures(versions)
        try:
            speed = self._speed(trial.seconds)
        except RkserveError as exc:
            versions.back(f"its speed could not be measured: {exc}")
            return None
        if speed < trial.ratio * before:
            versions.back(
                f"it decodes {speed:.1f} tokens/s, and {trial.before} {before:.1f}, of which "
                f"{trial.ratio:.2f} is the least"
            )
            return None
        self._note(f"{trial.name} decodes {speed:.1f} tokens/s, and {trial.before} {before:.1f}.")
        return versions.note_speed(speed)

    # -- every few seconds ---------------------------------------------------------------------

    def greet(self) -> None:
        """Send the first news, before anything starts. Raises ``ConfigError`` as ``step``."""
        self._head.beat(self._news)

    def step(self, pids: Collection[int]) -> bool:
        """Send the news and do what the head wants; True if Ray has to end for a switch.

        ``pids`` are the processes of this board.

        Raises:
            ConfigError: the head refuses this board.
        """
        answer = self._head.beat(self._news)
        versions = self._versions
        trial = versions.trial() if versions is not None else None
        if versions is not None and trial is not None:
            return self._on_trial(versions, trial, answer, pids)
        self._order = order = answer["order"] if answer is not None else None
        if answer is None or order is None:
            return False
        self._measures = answer["measures"]
        return self._follow(order)

    def _follow(self, order: OrderEntry) -> bool:
        if order["update"] != self._news.get("update"):
            self._installed = ""
            self._news |= {"update": order["update"], "problem": "", "stage": "serving"}
        if self._news["problem"] or order["version"] == __version__:
            return False
        if self._versions is None:
            self._news["problem"] = (
                "rkserve does not run from a folder of versions there: install it by rkserve-node"
            )
        elif self._installed:
            return order["go"]
        else:
            self._install(self._versions, order)
        return False

    def _on_trial(
        self,
        versions: VersionFolder,
        trial: Trial,
        answer: HeartbeatAnswer | None,
        pids: Collection[int],
    ) -> bool:
        replicas = answer["replicas"] if answer is not None else []
        if any(one["pid"] in pids and one["state"] == READY for one in replicas):
            with versions.locked():
                versions.confirm()
                versions.prune()
            self._news["stage"] = "serving"
            self._note(f"{trial.name} serves and stays.")
        elif time.time() > trial.until_s:
            with versions.locked():
                versions.back("it was not ready in time")
            return True
        return False

    # -- installation --------------------------------------------------------------------------

    def _install(self, versions: VersionFolder, order: OrderEntry) -> None:
        """Install the version in the background: heartbeats go on meanwhile."""
        if self._installation is not None:
            if not self._installation.is_alive():
                self._installation = None
            return
        self._news["stage"] = "installing"

        def install() -> None:
            try:
                versions.check_writable()
                with versions.locked():
                    name = self._install_back(versions, order) or self._install_new(versions, order)
            except (RkserveError, OSError) as exc:
                self._news |= {"stage": "serving", "problem": str(exc)[:2000]}
                self._note(f"rkserve: {order['version']} cannot be installed: {exc}")
            else:
                self._installed = name
                self._news["stage"] = "installed"
                self._note(f"{name} is installed.")

        self._note(f"Installing {order['version']} ...")
        self._installation = threading.Thread(target=install, name="install", daemon=True)
        self._installation.start()

    def _install_back(self, versions: VersionFolder, order: OrderEntry) -> str | None:
        if not order["back"]:
            return None
        before = versions.previous()
        if before is None or before.partition("-")[0] != order["version"]:
            raise ConfigError(f"The version before is {before}, not {order['version']}.")
        return before

    def _install_new(self, versions: VersionFolder, order: OrderEntry) -> str:
        folder = versions.prefix / DOWNLOADS
        self._download(versions, order, folder)
        wheels = WheelFolder(folder)
        if wheels.version != order["version"]:
            raise ConfigError(f"The head sent rkserve {wheels.version}.")

        def build(venv: Path) -> None:
            wheels.build(venv, order["index"])

        name = versions.install(wheels.version, wheels.content(), build)
        shutil.rmtree(folder)
        return name

    def _download(self, versions: VersionFolder, order: OrderEntry, folder: Path) -> None:
        """Download the files that this machine lacks, and verify them."""
        folder.mkdir(mode=0o700, exist_ok=True)
        listed = {one["name"]: (one["sha256"], one["size"]) for one in order["files"]}
        for name in [one for one in _files_below(folder) if one not in listed]:
            (folder / name).unlink()  # of another update
        current = versions.prefix / (versions.current() or "")
        locks = [sha256 for name, (sha256, _) in listed.items() if name == LOCK_FILE]
        same = bool(locks) and _sha256(current / LOCK_FILE) == locks[0]
        for name, (sha256, size) in listed.items():
            path = folder / name
            if not _is_inside(name) or not _needed(name, same_lock=same):
                continue
            if _sha256(path) == sha256:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(folder).free < 2 * size:
                raise ConfigError(f"{folder} has too little free space for {name}.")
            part = path.with_name(f"{path.name}.part")
            self._head.fetch(sha256, part)
            if _sha256(part) != sha256:
                raise ConfigError(f"{name} of the head is not the file that the update lists.")
            part.replace(path)

    # -- the switch ----------------------------------------------------------------------------

    def switch(self) -> None:
        """Measure this version, and take the installed one into use on trial. Ray has ended."""
        versions, order = self._versions, self._order
        assert versions is not None
        if versions.current() != Path(sys.prefix).resolve().name:
            return  # a trial was taken back
        assert order is not None
        before: float | None = None
        try:
            before = self._speed(order["seconds"]) if order["seconds"] else None
        except RkserveError as exc:
            self._note(f"The speed of this version cannot be measured: {exc}")
        trial = Trial(
            self._installed,
            versions.current() or "",
            order["update"],
            time.time() + order["limit_s"],
            before_tokens_per_s=before,
            ratio=order["ratio"],
            seconds=order["seconds"],
        )
        with versions.locked():
            _save_measures(versions, self._measures)
            versions.use(self._installed, trial)
        self._note(f"{self._installed} is in use, on trial.")

    def restart(self, words: Sequence[str]) -> None:
        """Replace this process by the version in use."""
        versions = self._versions
        assert versions is not None
        python = versions.prefix / (versions.current() or "") / "bin" / "python"
        os.execv(python, [str(python), "-m", "rkserve", *words])

    def _speed(self, seconds: float) -> float:
        found = [MeasuredModel(Path(one["library"]), Path(one["model"])) for one in self._measures]
        known = [self._own] if self._own is not None else found
        if not known:
            raise ConfigError("no group of real boards is known, and join had no --model")
        self._note(f"Measuring for {seconds:.0f} s ...")
        return known[0].tokens_per_s(seconds)


def _saved_measures(versions: VersionFolder) -> Sequence[MeasuredEntry]:
    try:
        found: list[MeasuredEntry] = json.loads(
            (versions.prefix / "measures.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return ()
    return found


def _save_measures(versions: VersionFolder, measures: Sequence[MeasuredEntry]) -> None:
    (versions.prefix / "measures.json").write_text(json.dumps(measures), encoding="utf-8")


def _files_below(folder: Path) -> list[str]:
    return [str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()]


def _is_inside(name: str) -> bool:
    return ".." not in Path(name).parts and not Path(name).is_absolute()


def _needed(name: str, *, same_lock: bool) -> bool:
    """Return whether this machine may need a file: rkserve and its lock, or changed packages."""
    file = Path(name).name
    if file == LOCK_FILE or file.startswith("rkserve-"):
        return True
    machines = OTHER_MACHINE.findall(file)
    return not same_lock and (not machines or platform.machine() in machines)


def _sha256(path: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
    except FileNotFoundError:
        return None
    return digest.hexdigest()
