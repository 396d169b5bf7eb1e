"""An update from the head: its order, its progress with boards that follow, and the head itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.api.admin.heartbeat import HeartbeatAnswer, HeartbeatBody, ReplicaEntry
from rkserve.bench.processes import PROC, identity_of
from rkserve.bringup import board_update
from rkserve.bringup import update as module
from rkserve.bringup.board_update import MeasuredModel, UpdateFollower
from rkserve.bringup.processes import NodeRecord, StateFolder
from rkserve.bringup.update import FleetUpdater, UpdateOptions
from rkserve.bringup.versions import VersionFolder
from rkserve.bringup.wheels import BuiltVersion, WheelFolder
from rkserve.cli import app
from rkserve.cli.context import Exit
from rkserve.core.errors import ConfigError
from rkserve.router.fleet_update import MemberNews, read_update, write_news
from rkserve.router.membership import ClusterTerms, write_terms
from tests.support.http.terminal import Runner

OLD, NEW, RAY = "0.1.0", "0.2.0", "2.60.0"


class Fleet:
    """A head with boards that do at once what they are ordered, one step at each look."""

    def __init__(self, folder: Path, names: str) -> None:
        self.state = StateFolder(folder / "node", "head")
        own = identity_of(PROC, os.getpid())
        assert own is not None
        self.state.write(NodeRecord(own, ready=True))
        write_terms(self.state.folder, ClusterTerms("192.0.2.1:6379", RAY, "3.11", "", {}))
        self.versions = VersionFolder(folder / "opt")
        self.versions.prefix.mkdir()
        self.versions.use(self.versions.install(OLD, "old", Path.mkdir))
        self.boards = {name: MemberNews(name * 32, name, OLD) for name in names}
        self.went: list[str] = []
        self.bad: dict[str, str] = {}
        self.notes: list[str] = []
        self.now_s = 1000.0
        self.killed_after = 10_000
        self.report()

    def report(self) -> None:
        for one in self.boards.values():
            write_news(self.state.folder, replace(one, at_s=self.now_s))

    def pause(self, _seconds: float) -> None:
        self.killed_after -= 1
        if self.killed_after < 0:
            raise KeyboardInterrupt
        self.now_s += 15
        update = read_update(self.state.folder)
        for name, one in self.boards.items():
            order = None if update is None else update.order_for(one.key)
            if order is None or one.version == order["version"] or one.problem:
                continue
            stage = "installed"
            if one.stage == "installed" and order["go"]:
                self.went.append(name)
                stage = "serving"
            made = replace(one, update=order["update"], stage=stage)
            if stage == "serving":
                bad = self.bad.get(name)
                new = order["version"]
                made = replace(made, problem=bad) if bad else replace(made, version=new)
            self.boards[name] = made
        self.report()

    def run(self, **options: object) -> bool:
        made = UpdateOptions(**options)  # type: ignore[arg-type] # of tests
        clock = lambda: self.now_s  # noqa: E731 - it moves
        updater = FleetUpdater(self.state, self.versions, self.notes.append, clock, self.pause)
        return updater.run(made)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / f"rkserve-{NEW}-py3-none-any.whl").write_bytes(b"a wheel")
    return folder


@pytest.fixture
def redeployed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of versions that the head's replicas were started with."""
    found: list[str] = []

    def build(_wheels: WheelFolder, venv: Path, index: bool = False) -> None:
        venv.mkdir()

    def check(venv: Path) -> BuiltVersion:
        return BuiltVersion(venv.name, RAY)

    def redeploy(_self: FleetUpdater, _versions: VersionFolder, name: str, _terms: object) -> str:
        found.append(name)
        return ""

    monkeypatch.setattr(WheelFolder, "build", build)
    monkeypatch.setattr(module, "check", check)
    monkeypatch.setattr(module, "__version__", OLD)
    monkeypatch.setattr("importlib.metadata.version", lambda _name: RAY)
    monkeypatch.setattr(FleetUpdater, "_redeploy", redeploy)
    return found


def test_boards_come_first_and_the_head_last(
    tmp_path: Path, wheels: Path, redeployed: list[str]
) -> None:
    fleet = Fleet(tmp_path, "abcd")
    assert fleet.run(folder=wheels, canary="c", max_unavailable=2)
    assert fleet.went == ["c", "a", "b", "d"]
    assert redeployed == [NEW]
    assert fleet.versions.current() == NEW
    update = read_update(fleet.state.folder)
    assert update is not None
    assert update.ended
    assert fleet.notes[:4] == [
        f"first  c: {OLD} to {NEW}, on trial",
        "then   a, b",
        "then   d",
        f"last   the head, to {NEW}",
    ]
    assert fleet.notes[-1] == f"The head serves {NEW}."


def test_a_board_that_goes_back_stops_the_update_before_the_head(
    tmp_path: Path, wheels: Path, redeployed: list[str]
) -> None:
    fleet = Fleet(tmp_path, "abc")
    fleet.bad = {"b": "it decodes 8.0 tokens/s"}
    assert not fleet.run(folder=wheels)
    assert fleet.went == ["a", "b"]
    assert redeployed == []
    assert fleet.versions.current() == OLD
    assert "rkserve: the update stops: b: it decodes 8.0 tokens/s" in fleet.notes
    # Repeated, it is another update, and only those that lack the version follow.
    fleet.bad, fleet.went = {}, []
    fleet.boards["b"] = replace(fleet.boards["b"], problem="")
    assert fleet.run(folder=wheels)
    assert fleet.went == ["b", "c"]


@pytest.mark.parametrize("looks", range(1, 8))
def test_a_command_that_was_killed_goes_on_where_it_was(
    tmp_path: Path, wheels: Path, redeployed: list[str], looks: int
) -> None:
    fleet = Fleet(tmp_path, "abc")
    fleet.killed_after = looks
    try:
        fleet.run(folder=wheels)
    except KeyboardInterrupt:
        fleet.killed_after = 10_000
        assert fleet.run()
        assert f"The update to {NEW} goes on." in fleet.notes
    assert fleet.went == ["a", "b", "c"]
    assert redeployed == [NEW]


def test_a_dry_run_changes_nothing(tmp_path: Path, wheels: Path, redeployed: list[str]) -> None:
    fleet = Fleet(tmp_path, "ab")
    assert fleet.run(folder=wheels, dry_run=True)
    assert read_update(fleet.state.folder) is None
    assert fleet.versions.installed() == [OLD]


def test_going_back_needs_no_wheels(tmp_path: Path, wheels: Path, redeployed: list[str]) -> None:
    fleet = Fleet(tmp_path, "ab")
    assert fleet.run(folder=wheels)
    assert fleet.run(back=True)
    assert fleet.versions.current() == OLD
    assert {one.version for one in fleet.boards.values()} == {OLD}
    assert redeployed == [NEW, OLD]


def test_a_head_whose_replicas_do_not_start_goes_back(
    tmp_path: Path, wheels: Path, redeployed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, "a")
    answers = ["rkserve did not run within 600 s.", ""]
    monkeypatch.setattr(FleetUpdater, "_redeploy", lambda *_: answers.pop(0))
    with pytest.raises(ConfigError, match="could not be updated, and the boards are: rkserve did"):
        fleet.run(folder=wheels)
    assert fleet.versions.current() == OLD
    assert answers == []
    # The boards serve with it; the head is tried again.
    answers.append("")
    assert fleet.run()
    assert fleet.versions.current() == NEW


def test_only_the_head_starts_anew_where_another_tool_updates_the_boards(
    tmp_path: Path, wheels: Path, redeployed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, "ab")
    assert fleet.run(only_head=True)
    assert (fleet.went, redeployed) == ([], [OLD])
    assert fleet.notes[-1] == f"The head serves {OLD}."
    monkeypatch.setattr(FleetUpdater, "_redeploy", lambda *_: "rkserve did not run within 600 s.")
    with pytest.raises(ConfigError, match=f"do not start from {OLD}: rkserve did not run"):
        fleet.run(only_head=True)
    monkeypatch.setattr(module, "check", lambda venv: BuiltVersion(venv.name, "2.61.0"))
    with pytest.raises(ConfigError, match=r"2\.61\.0"):
        fleet.run(only_head=True)


def test_a_board_that_is_not_seen_again_stops_the_update(
    tmp_path: Path, wheels: Path, redeployed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, "ab")
    pause = fleet.pause

    def lost(seconds: float) -> None:
        update = read_update(fleet.state.folder)
        if update is not None and update.go:
            fleet.now_s += 60  # it has been switched off
        else:
            pause(seconds)

    monkeypatch.setattr(fleet, "pause", lost)
    assert not fleet.run(folder=wheels)
    assert "rkserve: the update stops: a has not come back in time" in fleet.notes


@pytest.mark.parametrize(
    ("prepare", "options", "sentence"),
    [
        pytest.param(lambda f: f.state.file.unlink(), {}, "No head runs", id="no head"),
        pytest.param(lambda _: None, {}, "No update goes on", id="nothing to go on with"),
        pytest.param(lambda _: None, {"back": True}, "no version before", id="no way back"),
        pytest.param(lambda _: None, {"canary": "x"}, "No board has the host name x", id="no such"),
    ],
)
def test_an_update_that_cannot_begin_is_one_sentence(  # noqa: PLR0917 - fixtures
    tmp_path: Path,
    wheels: Path,
    redeployed: list[str],
    prepare: Callable[[Fleet], None],
    options: dict[str, object],
    sentence: str,
) -> None:
    fleet = Fleet(tmp_path, "ab")
    prepare(fleet)
    with pytest.raises(ConfigError, match=sentence):
        fleet.run(**({"folder": wheels} if "canary" in options else {}), **options)
    assert read_update(fleet.state.folder) is None


def test_another_ray_restarts_everything_at_once_and_only_with_the_flag(
    tmp_path: Path, wheels: Path, redeployed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, "abc")
    (wheels / "requirements.lock").write_text("ray[serve]==2.61.0\n")
    with pytest.raises(ConfigError, match=r"takes Ray from 2\.60\.0 to 2\.61\.0"):
        fleet.run(folder=wheels)
    assert fleet.versions.installed() == [OLD]
    monkeypatch.setattr(module, "check", lambda venv: BuiltVersion(venv.name, "2.61.0"))
    ended: list[int] = []
    monkeypatch.setattr(module, "signal_process", lambda one, _number: ended.append(one.pid))
    assert fleet.run(folder=wheels, restart_cluster=True)
    assert fleet.versions.current() == NEW
    assert ended == [os.getpid()]
    assert redeployed == []
    update = read_update(fleet.state.folder)
    assert update is not None
    assert {*update.go} == {one.key for one in fleet.boards.values()}


def test_versions_from_which_processes_run_are_kept(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "")
    program = fleet.versions.prefix / OLD / "program"
    program.write_text("import time; time.sleep(600)")
    process = subprocess.Popen([sys.executable, str(program)])
    try:
        one = identity_of(PROC, process.pid)
        assert one is not None
        fleet.state.write(NodeRecord(one))
        updater = FleetUpdater(fleet.state, fleet.versions, fleet.notes.append)
        assert updater._running(fleet.versions) == {OLD}
    finally:
        process.kill()
        process.wait()
    assert updater._running(fleet.versions) == set()


PID = 4711


class Follower:
    """A board with what follows updates on it; its Ray and the start of a version are left out."""

    def __init__(self, fleet: Fleet, name: str, patch: pytest.MonkeyPatch) -> None:
        self.fleet, self.name, self._patch = fleet, name, patch
        self.versions = VersionFolder(fleet.versions.prefix.with_name(f"opt of {name}"))
        self.versions.prefix.mkdir()
        self.versions.use(self.versions.install(OLD, "old", Path.mkdir))
        self.started: list[str] = []
        self._follower = self._start()

    def _start(self) -> UpdateFollower:
        """Start the version in use, and the one before where that is taken back at once."""
        while True:
            self.started.append(self._be_this_process())
            own = MeasuredModel(Path("librkllmrt.so"), Path("chat"))
            made = UpdateFollower(self, self.versions, self.name * 32, lambda _: None, own)
            if not made.begin():
                return made

    def _be_this_process(self) -> str:
        name = self.versions.current() or ""
        self._patch.setattr(sys, "prefix", str(self.versions.prefix / name))
        self._patch.setattr(board_update, "__version__", name)
        return name

    def look(self) -> None:
        """Take one step."""
        self._be_this_process()
        ray_ends = self._follower.step({PID})
        if self._follower._installation is not None:
            self._follower._installation.join()
        if ray_ends:
            self._follower.switch()
            self._follower = self._start()

    def beat(self, news: dict[str, Any]) -> HeartbeatAnswer | None:
        """Answer as the head's Router, which sees this board's replica as ready."""
        body = HeartbeatBody(**{**news, "host": self.name})
        write_news(self.fleet.state.folder, MemberNews.of(body, self.fleet.now_s))
        update = read_update(self.fleet.state.folder)
        order = None if update is None else update.order_for(body.key)
        replicas: list[ReplicaEntry] = [{"pid": PID, "state": "ready"}]
        return HeartbeatAnswer(version=OLD, replicas=replicas, order=order, measures=[])

    def fetch(self, sha256: str, target: Path) -> None:
        """Send a file of the update."""
        update = read_update(self.fleet.state.folder)
        assert update is not None
        (name,) = [one.name for one in update.files if one.sha256 == sha256]
        target.write_bytes((Path(update.folder) / name).read_bytes())


@pytest.mark.parametrize(
    ("speed", "code"),
    [
        pytest.param(9.6, Exit.DONE, id="fast enough"),
        pytest.param(9.4, Exit.FAILED, id="too slow"),
    ],
)
def test_the_canary_takes_a_slower_version_back_and_the_command_fails(  # noqa: PLR0917 - fixtures
    tmp_path: Path,
    wheels: Path,
    redeployed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    speed: float,
    code: Exit,
) -> None:
    fleet = Fleet(tmp_path, "")
    speeds = {OLD: 10.0, NEW: speed}

    def measured(_model: MeasuredModel, _seconds: float) -> float:
        return speeds[Path(sys.prefix).name]

    def pause(_seconds: float) -> None:
        fleet.now_s += 2
        for board in boards:
            board.look()

    def updater(state: StateFolder, _own: object, note: Callable[[str], None]) -> FleetUpdater:
        return FleetUpdater(state, fleet.versions, note, lambda: fleet.now_s, pause)

    monkeypatch.setattr(MeasuredModel, "tokens_per_s", measured)
    monkeypatch.setattr("rkserve.cli.update.FleetUpdater", updater)
    boards = [Follower(fleet, name, monkeypatch) for name in "abc"]
    for board in boards:
        board.look()
    words = ["update", str(wheels), "--state", str(fleet.state.folder), "--canary", "b"]
    done = Runner().invoke(app, words)
    assert done.exit_code == code, done.output
    a, b, c = (board.started for board in boards)
    if code is Exit.DONE:
        assert a == b == c == [OLD, NEW]
        assert fleet.versions.current() == redeployed[0] == NEW
        return
    assert (a, b, c) == ([OLD], [OLD, NEW, OLD], [OLD])
    assert [board.versions.current() for board in boards] == [OLD] * 3
    assert (fleet.versions.current(), redeployed) == (OLD, [])
    slow = "it decodes 9.4 tokens/s, and 0.1.0 10.0, of which 0.95 is the least"
    assert f"b: failed, and serves 0.1.0: {slow}\n" in done.output
    assert f"rkserve: the update stops: b: {slow}" in done.output
    update = read_update(fleet.state.folder)
    assert update is not None
    assert (update.ended, update.go) == (True, ("b" * 32,))
