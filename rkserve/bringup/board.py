"""A board that joins: its question to the head, the checks, its Ray, and its end.

A raylet ends itself where its Python agent needs more than 15 s to start, which no setting changes.
Therefore the agent's modules are read into the page cache first, and the start is tried again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO, cast

from rkserve import __version__
from rkserve.api.admin.join import JoinAnswer, JoinWaiting
from rkserve.bench.processes import PROC, snapshot
from rkserve.bringup import serving
from rkserve.bringup.board_update import HttpHead, MeasuredModel, UpdateFollower, member_key
from rkserve.bringup.head import FAILED, RAY_START, RECORD_S, start_ray
from rkserve.bringup.head_plan import check_localhost, check_ports, haproxy_environ
from rkserve.bringup.processes import BOARD, NodeSupervisor, StateFolder, ray_folder
from rkserve.bringup.serving import Note
from rkserve.bringup.settings import GCS_PORT, NodePorts, board_options, environment_of
from rkserve.bringup.versions import VersionFolder
from rkserve.core import tls
from rkserve.core.errors import ConfigError
from rkserve.core.files import replace_private, write_private
from rkserve.doctor.collect import Checkup, collect, free_bytes, this_machine
from rkserve.doctor.facts import Severity
from rkserve.doctor.node import limits
from rkserve.doctor.rules import findings_of
from rkserve.doctor.tree import Tree

LEAVE = "rkserve leave"
JOINED = "joined.json"  # the answer of the last join, in the state folder
ASK_S = 30.0
# The statuses of a head that is busy or starting, and those of a proxy in front of one.
TRY_LATER, NOT_FOUND, ACCEPTED = (429, 502, 503, 504), 404, 202
# The limit for a head that starts: as long as `rkserve up` waits for its Router.
HEAD_S = serving.START_TIMEOUT_S
RETRY_S, LONGEST_RETRY_S, PROGRESS_S = 2.0, 60.0, 30.0
# A board that waits for approval repeats the command that approves it.
REMINDER_S = 300.0
# From the answer of Ray's proxy while the application has no routes yet.
NO_ROUTES = "/-/routes"
# A raylet that ran for less counts as one that did not start.
SETTLED_S, SHORT_RUNS = 30.0, 3
AGAIN_S = 30.0  # until a board that had joined tries again
ADDED = frozenset({"version"})  # keys that heads of 0.1 do not send
SWITCH = -1  # no exit code: this process is replaced
AGENTS = (
    "import ray.dashboard.utils as utils; utils.get_all_modules(utils.DashboardAgentModule); "
    "import ray.dashboard.agent, ray._private.runtime_env.agent.main"
)
UNKNOWN_SERIAL = re.compile(r"[0\s]*")
MACHINE_IDS = ("etc/machine-id", "var/lib/dbus/machine-id")


@dataclass(frozen=True)
class JoinOptions:
    """The options of ``rkserve join``.

    Without ``head`` the answer of the last join counts. ``ray_cpus`` are the CPUs of Ray after its
    start; ``share`` is the NPU that this node offers. Without ``start`` the head's answer is kept
    for a later join, and Ray is not started. ``ca_file`` has the authorities of the head's
    certificate, beside those of this machine.
    """

    state: Path
    head: str | None = None
    token: str | None = None
    library: Path | None = None
    model: Path | None = None
    doctor: bool = True
    replace_token: bool = False
    share: float = 1.0
    ray_cpus: tuple[int, ...] = ()
    ray_port: int = GCS_PORT
    temp_dir: Path | None = None
    start: bool = True
    ca_file: Path | None = None


def identity(root: Path = Path("/")) -> dict[str, str]:
    """Return digests of the machine-id and of the SoC's serial number, empty where unknown.

    The ids themselves stay on the board: a machine-id is confidential.
    """
    tree = Tree(root)
    machine = next((text for name in MACHINE_IDS if (text := tree.text(name))), "")
    serial = tree.text("proc/device-tree/serial-number") or ""
    if not serial:
        found = re.search(r"^Serial\s*:\s*(\w+)", tree.text("proc/cpuinfo") or "", re.MULTILINE)
        serial = found[1] if found is not None else ""
    if re.fullmatch(r"[0-9a-f]{32}", machine) is None:
        machine = ""  # empty or "uninitialized" in an image before its first start
    if UNKNOWN_SERIAL.fullmatch(serial):
        serial = ""
    return {"machine": _digest(machine), "serial": _digest(serial)}


def _digest(text: str) -> str:
    return hashlib.sha256(f"rkserve board {text}".encode()).hexdigest()[:32] if text else ""


class HeadNotReady(Exception):
    """The head refuses connections, or is busy; it may answer after ``retry_s``."""

    def __init__(self, message: str, retry_s: float = RETRY_S) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class WaitsForApproval(Exception):
    """The head has this board wait for its operator, and be asked again after ``retry_s``."""

    def __init__(self, answer: JoinWaiting, retry_s: float) -> None:
        super().__init__(f"This board waits for approval. On the head: {answer['command']}")
        self.notes, self.retry_s = answer["notes"], retry_s


def await_head(
    head: str,
    token: str,
    body: dict[str, str],
    note: Note,
    *,
    limit_s: float = HEAD_S,
    ca_file: Path | None = None,
) -> JoinAnswer:
    """Ask the head for what this board needs, again while it is starting or busy.

    An operator may approve this board at any time: there is no limit for that.

    Raises:
        ConfigError: as ``ask_head``; a head that is not ready only after the limit.
    """
    began_s, shown, shown_s = time.monotonic(), "", 0.0
    while True:
        try:
            return ask_head(head, token, body, ca_file)
        except HeadNotReady as exc:
            now_s = time.monotonic()
            left_s = began_s + limit_s - now_s
            if exc.retry_s > left_s:
                raise ConfigError(
                    f"{exc} The head was not ready within {now_s - began_s:.0f} s: look at "
                    "`rkserve up` there, and join again."
                ) from exc
            if str(exc) != shown or now_s - shown_s >= PROGRESS_S:
                shown, shown_s = str(exc), now_s
                note(f"{shown} Asking again for up to {left_s:.0f} s ...")
            time.sleep(exc.retry_s)
        except WaitsForApproval as exc:
            began_s = now_s = time.monotonic()  # the head may start anew meanwhile
            if str(exc) != shown or now_s - shown_s >= REMINDER_S:
                shown, shown_s = str(exc), now_s
                for sentence in exc.notes:
                    note(f"rkserve: {sentence}")
                note(shown)
            time.sleep(exc.retry_s)


def ask_head(
    head: str, token: str, body: dict[str, str], ca_file: Path | None = None
) -> JoinAnswer:
    """Ask the head once for what this board needs.

    Raises:
        HeadNotReady: it is starting, or busy.
        WaitsForApproval: the operator has not approved this board yet.
        ConfigError: it cannot be reached, or refuses; the message is the head's sentence.
    """
    url = f"{head.rstrip('/')}/v1/join"
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{head} is no URL of a head, such as http://head:8000.")
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        context = tls.context_for(url, ca_file)
        with urllib.request.urlopen(request, timeout=ASK_S, context=context) as answer:
            found: JoinAnswer = json.load(answer)
            status, retry_s = answer.status, retry_after_s(answer.headers.get("retry-after"))
    except urllib.error.HTTPError as exc:
        text = exc.read().decode(errors="replace")
        starts = exc.code == NOT_FOUND and NO_ROUTES in text
        message = f"{head}: {_sentence(exc.code, text, starts=starts)}"
        if starts or exc.code in TRY_LATER:
            raise HeadNotReady(message, retry_after_s(exc.headers.get("retry-after"))) from exc
        raise ConfigError(message) from exc
    except (OSError, HTTPException, ValueError) as exc:
        reason = getattr(exc, "reason", exc)
        message = f"{head} cannot be asked: {reason}.{tls.hint(reason)}"
        # A head whose HAProxy or Router starts refuses, and cuts off or delays what it has taken.
        if isinstance(reason, ConnectionError | TimeoutError | HTTPException):
            raise HeadNotReady(message) from exc
        raise ConfigError(message) from exc
    if status == ACCEPTED and {"command", "notes"} <= found.keys():
        raise WaitsForApproval(cast("JoinWaiting", found), retry_s)
    if missing := JoinAnswer.__annotations__.keys() - found.keys() - ADDED:
        raise ConfigError(
            f"{head} did not answer as rkserve: {', '.join(sorted(missing))} missing."
        )
    return found


def retry_after_s(text: str | None) -> float:
    """Return the seconds of a Retry-After header, within bounds; a date is not read."""
    seconds = float(text) if text is not None and re.fullmatch(r"\d{1,6}", text) else RETRY_S
    return min(max(seconds, RETRY_S), LONGEST_RETRY_S)


def _sentence(status: int, text: str, *, starts: bool) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        if starts:
            return "Ray runs there, and rkserve does not yet."
        if status in TRY_LATER:
            return f"HTTP status {status}; no Router of the head answers."
        return f"HTTP status {status}; it is no head of this rkserve."


def keep_token(token: str, *, replace: bool) -> None:
    """Write Ray's token for its owner only, unless it is there.

    Raises:
        ConfigError: another one is there, or it cannot be written.
    """
    file = serving.token_file()
    found = serving.read_token()
    if found is not None and found != token and (os.environ.get("RAY_AUTH_TOKEN") or not replace):
        place = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else str(file)
        raise ConfigError(
            f"{place} has the token of another cluster. End that cluster's Ray on this board, then "
            "join with --replace-token."
        )
    if found == token and (os.environ.get("RAY_AUTH_TOKEN") or not file.stat().st_mode & 0o077):
        return
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(file, f"{token}\n")
    except OSError as exc:
        raise ConfigError(f"Ray's token {file} cannot be written: {exc}.") from exc


def check_board(options: JoinOptions) -> None:
    """Raise ``ConfigError`` with every finding of ``rkserve doctor`` that stops a board."""
    process, clock, seen = this_machine(None)
    facts = collect(
        Checkup(
            library=options.library,
            model=options.model,
            process=process,
            clock=clock,
            head=seen,
            free_bytes=free_bytes,
        )
    )
    # A raylet that runs here is of another cluster, or was left by a start before.
    errors = [one for one in findings_of(facts) if one.severity is Severity.ERROR]
    if errors:
        lines = [f"  {one.id}: {one.sentence}\n    mend: {one.command}" for one in errors]
        found = "\n".join(lines)
        raise ConfigError(f"this board cannot serve:\n{found}\n--no-doctor joins all the same.")


def run_board(options: JoinOptions, note: Note) -> int:
    """Join, and stay until Ctrl-C, SIGTERM or a failure. Returns the exit code.

    Raises:
        ConfigError: something that is known before the start prevents it.
    """
    state = StateFolder(options.state, BOARD)
    state.refuse_second(LEAVE)
    ports = NodePorts(options.ray_port)
    check_ports(range(ports.first + 1, ports.last + 1))
    check_localhost()
    if options.doctor:
        check_board(options)
    serving.interrupt_on_signals()
    try:
        # Recorded before the head is asked, which may take long: `rkserve leave` ends that, too.
        with ExitStack() as folders, NodeSupervisor(state) as node:
            terms = _terms(options, state, note)
            if not options.start:
                note(f"Its answer is in {state.folder}: `rkserve join` without a URL uses it.")
                return 0
            follower = _follower(options, state, terms, note)
            follower.greet()
            environ = environment_of(BOARD, {**terms["environ"], **os.environ})
            environ = {**haproxy_environ(environ, options.ray_port, folders, "0"), **environ}
            command = [*RAY_START, *board_options(ports, str(terms["ray_address"]), options.share)]
            # Without one, Ray takes the path of the head's folder.
            folder = ray_folder(state.folder, options.temp_dir, environ)
            command.append(f"--temp-dir={folder}")
            board = RunningBoard(node, state, options, note, follower)
            code = SWITCH if follower.begin() else board.start(command, environ)
    except KeyboardInterrupt:
        return 0
    if code == SWITCH:  # the record of processes is gone: another version replaces this process
        follower.restart(_words(options))
    return code


def _follower(
    options: JoinOptions, state: StateFolder, terms: dict[str, Any], note: Note
) -> UpdateFollower:
    """Return this board's part in updates."""
    own = None
    if options.library is not None and options.model is not None:
        own = MeasuredModel(options.library.absolute(), options.model.absolute())
    named = str(terms.get("ca_file") or "")
    ca_file = options.ca_file or (Path(named) if named else None)
    head = HttpHead.of(str(terms.get("head", "")), serving.read_token() or "", ca_file)
    key = member_key(state.folder, identity())
    return UpdateFollower(head, VersionFolder.of_this_process(), key, note, own)


def _words(options: JoinOptions) -> list[str]:
    """Return the command line by which another version goes on as this board."""
    words = ["join", "--state", str(options.state), "--ray-port", str(options.ray_port)]
    words += ["--rknpu", str(options.share), "--doctor" if options.doctor else "--no-doctor"]
    if options.ray_cpus:
        words += ["--ray-cpus", ",".join(map(str, options.ray_cpus))]
    for name, path in (
        ("--library", options.library),
        ("--model", options.model),
        ("--temp-dir", options.temp_dir),
    ):
        words += [] if path is None else [name, str(path.absolute())]
    return words


def _terms(options: JoinOptions, state: StateFolder, note: Note) -> dict[str, Any]:
    """Return the head's answer, or that of the last join."""
    file = state.folder / JOINED
    if options.head is None:
        try:
            saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"This board has not joined yet ({exc}): name the head, and a token that `rkserve "
                "token` prints there."
            ) from exc
        return saved
    if not options.token:
        raise ConfigError("A join token is missing: `rkserve token` on the head prints one.")
    body = {
        "host": re.sub(r"[^\w.-]", "-", socket.gethostname()) or "board",
        "ray": limits().ray or "none",
        "python": ".".join(platform.python_version_tuple()[:2]),
        "version": __version__,
        **identity(),
    }
    answer = await_head(options.head, options.token, body, note, ca_file=options.ca_file)
    for sentence in answer["notes"]:
        note(f"rkserve: {sentence}")
    keep_token(answer["cluster_token"], replace=options.replace_token)
    saved = {
        "head": options.head,
        "ray_address": answer["ray_address"],
        "environ": answer["environ"],
    }
    if options.ca_file is not None:
        saved["ca_file"] = str(options.ca_file.absolute())
    try:
        replace_private(file, json.dumps(saved, indent=1) + "\n")
    except OSError as exc:
        raise ConfigError(f"{file} cannot be written: {exc}.") from exc
    return saved


@dataclass
class RunningBoard:
    """A board's Ray: its start, its restarts, and the watch over it."""

    node: NodeSupervisor
    state: StateFolder
    options: JoinOptions
    note: Note
    follower: UpdateFollower

    def start(self, command: list[str], environ: dict[str, str]) -> int:
        """Read Ray's agents into the page cache, then ``run``."""
        with ExitStack() as stack:
            stack.callback(self.note, "Leaving ...")
            log = stack.enter_context(self.state.log("board-ray").open("wb"))
            self.note("Reading Ray's agents into the page cache ...")
            warm = self.node.start([sys.executable, "-c", AGENTS], environ, log, signal.SIGTERM)
            warm.wait()
            self.node.drop(warm)
            return self.run(command, environ, log)

    def run(self, command: list[str], environ: dict[str, str], log: BinaryIO) -> int:
        """Start Ray, and again when it ends. Returns the exit code after it ended too often, or
        ``SWITCH`` when another version is in use.

        A board that had joined for a while never gives up: its head may be away for hours.
        """
        short_runs, settled = 0, False
        while short_runs < SHORT_RUNS or settled:
            if short_runs and settled:
                self.note(f"Trying again in {AGAIN_S:.0f} s: the head may be away.")
                time.sleep(AGAIN_S)
            ray = start_ray(self.node, command, environ, log, self.note)
            if ray is None:
                if not settled:
                    return FAILED
                short_runs += 1
                continue
            started_s = time.monotonic()
            if self.options.ray_cpus:
                self.note(f"Ray runs on CPUs {', '.join(map(str, self.options.ray_cpus))}.")
                move_to_cpus(ray.pid, self.options.ray_cpus)
            self.note(f"This board has joined: it offers rknpu {self.options.share:g}.")
            self.node.record(ready=True)
            if self._watch(ray):
                self.note("Leaving the cluster for another version ...")
                self.node.drop(ray)
                self.follower.switch()
                return SWITCH
            ran_s = time.monotonic() - started_s
            short_runs = short_runs + 1 if ran_s < SETTLED_S else 0
            settled = settled or not short_runs
            self.note(f"rkserve: Ray ended with exit code {ray.returncode}; see {log.name}.")
            self.node.drop(ray)
        self.note(f"rkserve: Ray ended {SHORT_RUNS} times within {SETTLED_S:.0f} s; giving up.")
        return FAILED

    def _watch(self, ray: subprocess.Popen[bytes]) -> bool:
        """Wait until Ray ends; True if it has to end for another version."""
        refused = ""
        while True:
            try:
                ray.wait(RECORD_S)
            except subprocess.TimeoutExpired:
                self.node.record()
            else:
                return False
            try:
                if self.follower.step(self.node.pids()):
                    return True
            except ConfigError as exc:
                if str(exc) != refused:
                    refused = str(exc)
                    self.note(f"rkserve: the head: {refused}")


def move_to_cpus(pid: int, cpus: tuple[int, ...]) -> None:
    """Move a process and all below it to these CPUs; processes that they start follow.

    Ray's start itself has all CPUs: on little cores its agent takes longer than the raylet waits.
    """
    for process in snapshot(PROC, [pid]):
        for thread in (PROC / str(process.pid) / "task").glob("*"):
            try:
                os.sched_setaffinity(int(thread.name), cpus)
            except ProcessLookupError:
                continue  # it has ended since
