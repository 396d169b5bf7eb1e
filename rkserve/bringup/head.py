"""The head: Ray, HAProxy and the application, started in order and ended together."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rkserve.api.admin.join import MemberEntry, MemberState
from rkserve.bench.processes import PROC, age_s, has_ended_below
from rkserve.bringup import ray_node, serving
from rkserve.bringup.discovery import Announcement
from rkserve.bringup.first_key import first_key, known_key
from rkserve.bringup.head_plan import (
    HeadOptions,
    HeadPlan,
    check_localhost,
    for_model,
    haproxy_environ,
    own_address,
    with_front,
    with_ports,
)
from rkserve.bringup.processes import (
    HEAD,
    NodeSupervisor,
    RayStore,
    StateFolder,
    default_state,
    forgotten_address,
    ray_folder,
)
from rkserve.bringup.serving import Note, ServeLog
from rkserve.bringup.settings import (
    environment_of,
    head_options,
    sent_to_boards,
)
from rkserve.core.errors import ConfigError
from rkserve.core.files import replace_private
from rkserve.deployments import haproxy, preflight
from rkserve.models.gguf import SUFFIX
from rkserve.router.members import Members
from rkserve.router.membership import FOLDER, TERMS, ClusterTerms, new_token, write_terms

# Unbuffered, so that the last line of its log is the newest one, not what was kept back.
RAY_START = (
    *(sys.executable, "-I", "-S", ray_node.__file__),
    *(sys.executable, "-u", "-m", "rkserve.bringup.ray_start", "start"),
)
RAYLET_ENDED = (
    "its raylet has ended, as it does where Ray's agents take more than 15 s to start; "
    "raylet.err in the logs of its session has the reason"
)
GCS_ENDED = "its gcs_server has ended; gcs_server.err in the logs of its session has the reason"
RAY_STARTED = "Ray runtime started."
RAY_ATTEMPTS = 3
FAILED_RAY_S = 5.0  # `ray start` takes no SIGTERM while it waits for a part that has ended
RECORD_S = 5.0
DOWN = "rkserve down"
FAILED = 1
HOUR_S = 3600.0
FIRST_KEY = (
    "The network reaches this endpoint and there was no key, so an admin key was made: {file}\n"
    "`rkserve` here finds it by itself; others send it as 'Authorization: Bearer'. For clients: "
    "rkserve keys create NAME"
)


ONLY_HERE = (
    "rkserve: the endpoint listens at {host}, so that boards on other machines cannot join: set "
    "http_options.host to 0.0.0.0, or to this machine's address."
)
HINT = """
Try it in another terminal:

  curl {call}

  chat       {url}/
  boards     {url}/cluster
  state      {rkserve} status
  metrics    {url}/metrics
  dashboard  {dashboard}  (its token is in {token})
  logs       {rkserve} logs, and serve.log and ray.log in {logs}

Ctrl-C, or `{rkserve} down{state}`, ends it.
"""


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def run_head(options: HeadOptions, note: Note) -> int:
    """Start the head, and keep it until Ctrl-C, SIGTERM or a failure. Returns the exit code.

    Raises:
        ConfigError: something that is known before the start prevents it.
    """
    state = StateFolder(options.state, HEAD)
    state.refuse_second(DOWN)
    options = _checked(options, note)
    environ, front = with_front(options)
    plan = HeadPlan.of(options.config, front)
    address = options.address or own_address()
    ports, dashboard = with_ports(options.ray_port, options.dashboard_port, fixed=plan.joins)
    if (made := first_key(options.config, state.folder)) is not None:
        note(FIRST_KEY.format(file=made))
    if warning := preflight.check_token(os.environ, starts=True):
        note(f"rkserve: {warning}")
    if serving.read_token() is None:
        raise ConfigError(f"Ray's token {serving.token_file()} is missing or empty.")
    serving.interrupt_on_signals()
    ray_address = f"{address}:{ports.first}"
    folder = ray_folder(state.folder, options.temp_dir, os.environ)
    command = [
        *(*RAY_START, *head_options(ports, address, dashboard, cpu=plan.cpu)),
        f"--temp-dir={folder}",
    ]
    store = RayStore(state.folder, importlib.metadata.version("ray"), os.environ)
    try:
        with ExitStack() as stack:
            environ = environment_of(HEAD, environ)
            if options.haproxy and haproxy.available():
                environ = {
                    **haproxy_environ(environ, ports.first, stack, alone=not plan.joins),
                    **environ,
                }
            _write_terms(state.folder, ray_address, environ, plan, options)
            environ[FOLDER] = str(state.folder)
            stack.enter_context(forgotten_address(ray_address, folder))
            node = stack.enter_context(NodeSupervisor(state, **plan.places(address)))
            announcement = Announcement.of(
                address, plan.host, plan.port, note, tls=plan.certificate is not None
            )
            if announcement is not None:
                stack.enter_context(announcement)
            stack.callback(note, "Stopping ...")
            logs = [stack.enter_context(state.log(name).open("wb")) for name in ("ray", "serve")]
            key = known_key(options.config, state.folder)
            announced = announcement if options.mdns else None
            head = RunningHead(
                *(node, state, plan, note, announced, store, key),
                dashboard=f"http://127.0.0.1:{dashboard}",
            )
            return head.run(command, environ, ray_address, str(options.config), logs)
    except KeyboardInterrupt:
        store.remove()  # all processes have ended in order, and boards' with them
        return 0


def _checked(options: HeadOptions, note: Note) -> HeadOptions:
    """Check what needs no port; return the options, for a model's file those of a configuration.

    Raises:
        ConfigError, LibraryMissing: something prevents the start.
    """
    if options.config.suffix == SUFFIX:
        options = for_model(options)
        note(f"The configuration of this model alone is {options.config}.")
    for warning in preflight.check_own_cpu(options.config):
        note(f"rkserve: {warning}.")
    preflight.check_file(options.config, starts=True, ray=False, key=False)  # `serve run` does
    check_localhost()
    return options


def _write_terms(
    folder: Path, ray_address: str, environ: dict[str, str], plan: HeadPlan, options: HeadOptions
) -> None:
    """Write the values that boards need to join."""
    token = folder / "cluster_token"
    python = ".".join(map(str, sys.version_info[:2]))
    ray = importlib.metadata.version("ray")
    terms = ClusterTerms(
        ray_address,
        ray,
        python,
        str(token),
        sent_to_boards(environ),
        approval=options.approval,
        measures=plan.measures,
    )
    try:
        replace_private(token, f"{serving.read_token()}\n")
        write_terms(folder, terms)
    except OSError as exc:
        raise ConfigError(f"{folder} cannot be written: {exc}.") from exc


def join_command(state: StateFolder, lifetime_s: float) -> str:
    """Return the command by which boards join, with a new token.

    Raises:
        ConfigError: no head runs that this folder has a record of.
    """
    record = state.read()
    if record is None or not record.running:
        raise ConfigError(f"No head runs that {state.folder} has a record of: `rkserve up` first.")
    try:
        token = new_token(state.folder, lifetime_s, time.time())
    except OSError as exc:
        raise ConfigError(f"{state.folder} cannot be written: {exc}.") from exc
    return f"rkserve join {record.join_url} --token {token}"


def local_members(folder: Path) -> list[MemberEntry]:
    """Return the boards that have asked this machine's head to join. Raises ``ConfigError``."""
    try:
        return Members(folder).entries(time.time())
    except OSError as exc:
        raise ConfigError(f"{folder} cannot be read: {exc}.") from exc


def decide_here(
    folder: Path, names: Sequence[str], *, approve: bool, everything: bool = False
) -> list[MemberEntry]:
    """Approve or deny boards at this machine's head, by host name or id, or all that wait.

    Raises:
        MemberNotFound, RequestError: no board has that name, or several have it.
        ConfigError: the state folder cannot be read or written.
    """
    state = MemberState.JOINED if approve else MemberState.DENIED
    try:
        return Members(folder).decide(names, state, time.time(), everything=everything)
    except OSError as exc:
        raise ConfigError(f"{folder} cannot be read or written: {exc}.") from exc


def has_terms(folder: Path) -> bool:
    """Return whether ``rkserve up`` has run with this state folder."""
    return (folder / TERMS).exists()


@dataclass
class RunningHead:
    """The steps of a head's start, and the watch over its processes."""

    node: NodeSupervisor
    state: StateFolder
    plan: HeadPlan
    note: Note
    announcement: Announcement | None = None
    store: RayStore | None = None
    key: str | None = field(default=None, repr=False)
    dashboard: str = ""
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    # Imports take a second before there is a head.
    began_s: float = field(default_factory=lambda: time.monotonic() - age_s(PROC, os.getpid()))
    shown: str = ""
    waiting: frozenset[str] = frozenset()
    failing: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        command: list[str],
        environ: dict[str, str],
        ray_address: str,
        config: str,
        logs: Sequence[BinaryIO],
    ) -> int:
        """Start Ray and the application, and watch them. Returns the exit code."""
        serve = [*serving.SERVE, "--address", ray_address, config]
        waiting = {**environ, preflight.AWAITS_RAY: "1"}
        started = self.node.start(serve, waiting, logs[1], signal.SIGINT, waits=True)
        environ = {**environ, ray_node.DASHBOARD_WAITS: "1"}
        ray = start_ray(
            self.node, command, environ, logs[0], self.note, store=self.store, beside=started
        )
        if ray is None:
            if started.poll() is not None:
                self.note(ServeLog(self.state.log("serve")).explain_end(started.returncode))
            return FAILED
        self.note(f"Ray runs at {ray_address} after {self._passed()}.")
        self.node.release(started, ends_first=True)
        self.children = {"Ray": ray, "serve": started}
        if self._until("The Router is", self._answers, serving.START_TIMEOUT_S):
            self.note(f"The Router answers at {self.plan.url} after {self._passed()}.")
            if self.plan.control_url:
                self.note(f"Control calls are answered at {self.plan.control_url} alone.")
            if self.announcement is not None:
                self.announcement.begin()
            if self.plan.joins:
                if haproxy.is_loopback(self.plan.host):
                    self.note(ONLY_HERE.format(host=self.plan.host))
                self.note(
                    f"Within the next hour, on each board: {join_command(self.state, HOUR_S)}"
                )
            if self.plan.waits:
                self.node.record(ready=True)
                self.node.release(ray)  # its dashboard waits for the end of the start
            limit_s = None if self.plan.waits else serving.START_TIMEOUT_S
            if models := self._until("Boards are", self._models, limit_s):
                self._ask(models)
                self.node.release(ray)
                self.node.record(ready=True)
                self._until("", lambda: None, None)
        return FAILED

    def _passed(self) -> str:
        return f"{time.monotonic() - self.began_s:.0f} s"

    def _answers(self) -> bool:
        own = self.plan.certificate
        return serving.get_json(f"{self.plan.url}/health", certificate=own) is not None

    def _models(self) -> list[str] | None:
        url, key, own = self.plan.url, self.key, self.plan.certificate
        models = serving.ready_models(url, key, own)
        if models is None:
            ready, known = serving.board_counts(url, key, own)
            self._progress(f"Boards: {ready} of {known} ready.")
        return models

    def _progress(self, text: str) -> None:
        if text != self.shown:
            self.note(text)
            self.shown = text

    def _show_waiting(self) -> None:
        """Note each board once that begins to wait for approval."""
        waiting = {}
        for one in local_members(self.state.folder):
            if one["state"] == MemberState.WAITING:
                waiting[one["id"]] = one
        for name in waiting.keys() - self.waiting:
            host, notes = waiting[name]["host"], waiting[name]["notes"]
            for sentence in notes:
                self.note(f"rkserve: {sentence}")
            self.note(
                f"{host} waits for approval: `rkserve approve {name}`, or `rkserve deny {name}`."
            )
        self.waiting = frozenset(waiting)

    def _state_option(self) -> str:
        folder = self.state.folder
        return "" if folder == default_state() else f" --state {shlex.quote(str(_shown(folder)))}"

    def _show_failing(self) -> None:
        """Note each error once with which a deployment does not start."""
        failing = serving.failing_deployments(self.dashboard, serving.read_token())
        for name, error in failing.items():
            if self.failing.get(name) != error:
                self.note(f"rkserve: {name} does not start: {error}")
        self.failing = {**self.failing, **failing}

    def _ask(self, models: list[str]) -> None:
        ready = f"Ready after {self._passed()}: {', '.join(models)} at {self.plan.url}"
        try:
            own = self.plan.certificate
            found = serving.first_answer(self.plan.url, models[0], self.key, own)
        except OSError as exc:
            self.note(f"rkserve: {exc}")
            return
        self.note(f"{ready}; a first answer took {found[0]:.1f} s." if found else f"{ready}.")
        path = found[1] if found else serving.CHAT
        body = serving.example(path, models[0] if found else "MODEL")
        # The key that is known here is the operator's.
        auth = " -H 'authorization: Bearer KEY'" if self.key or not found else ""
        trust = "" if own is None else f" --cacert {shlex.quote(str(own))}"
        call = f"{self.plan.url}{path}{trust}{auth} -H 'content-type: application/json' \\\n    -d"
        self.note(
            HINT.format(
                call=f"{call} {shlex.quote(body)}",
                url=self.plan.url,
                rkserve=_shown(Path(sys.executable).with_name("rkserve")),
                dashboard=self.dashboard,
                token=serving.token_file(),
                logs=_shown(self.state.folder),
                state=self._state_option(),
            )
        )

    def _until(self, step: str, look: Callable[[], Any], limit_s: float | None) -> Any:
        """Return what ``look`` returns once that is true; None after a child or the limit ended."""
        interval = serving.PollInterval()
        began_s = recorded_s = time.monotonic()
        while limit_s is None or time.monotonic() - began_s < limit_s:
            for name, child in self.children.items():
                if child.poll() is not None:
                    log = ServeLog(self.state.log(name.lower()))
                    ended = f"rkserve: {name} ended with exit code {child.returncode}"
                    is_serve = name == "serve"
                    self.note(
                        log.explain_end(child.returncode)
                        if is_serve
                        else f"{ended}; see {log.path}."
                    )
                    return None
            if found := look():
                return found
            if time.monotonic() - recorded_s >= RECORD_S:
                self.node.record()
                self._show_waiting()
                if step:  # Ray's dashboard asks Serve's controller each time
                    self._show_failing()
                recorded_s = time.monotonic()
            interval.sleep()
        self.note(
            f"rkserve: {step} not ready after {limit_s:.0f} s; see {self.state.log('serve')}."
        )
        return None


def start_ray(
    node: NodeSupervisor,
    command: list[str],
    environ: dict[str, str],
    log: BinaryIO,
    note: Note,
    *,
    store: RayStore | None = None,
    beside: subprocess.Popen[bytes] | None = None,
) -> subprocess.Popen[bytes] | None:
    """Start Ray on this node, again where it ends before it runs; None after the last attempt, or
    once the process ``beside`` it has ended.

    A raylet ends itself where its Python agent needs more than 15 s to start, which no setting
    changes; the next attempt finds the agent's modules in the page cache. Where it was something
    else, the tables of ``store`` are set aside, and turned off after a second time.
    """
    note("Starting Ray ...")
    path, attempts = Path(log.name), RAY_ATTEMPTS
    for attempt in range(1, attempts + 1):
        log.seek(0)
        log.truncate()
        stored = {} if store is None else store.environ()
        waits = ray_node.DASHBOARD_WAITS in environ
        ray = node.start(command, {**environ, **stored}, log, signal.SIGTERM, waits=waits)
        last, interval = "", serving.PollInterval()
        while ray.poll() is None and not last:
            text = path.read_text(errors="replace")
            if RAY_STARTED in text or ray_node.RAYLET_RUNS in text:
                return ray
            interval.sleep()
            # `ray start` would wait three minutes for it.
            ends = {ray_node.RAYLET: RAYLET_ENDED, ray_node.GCS: GCS_ENDED}
            last = next((s for p, s in ends.items() if has_ended_below(PROC, ray.pid, p)), "")
            if beside is not None and beside.poll() is not None:
                node.drop(ray, FAILED_RAY_S)
                return None
        last = last or ServeLog(path).last_line()
        node.drop(ray, FAILED_RAY_S)
        again = "trying once more" if attempt < attempts else f"giving up; see {path}"
        note(f"rkserve: Ray did not start ({last}); {again}.")
        if store is not None and last != RAYLET_ENDED and store.set_aside():
            note("rkserve: Ray's tables of an earlier run were set aside; boards load anew.")
    return None
