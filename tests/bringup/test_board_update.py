"""A board in an update: what it installs, when it switches, and when it goes back."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rkserve import __version__
from rkserve.api.admin.heartbeat import HeartbeatAnswer, MeasuredEntry, OrderEntry, ReplicaEntry
from rkserve.bringup import board_update
from rkserve.bringup.board_update import MeasuredModel, UpdateFollower, member_key
from rkserve.bringup.versions import Outcome, Trial, VersionFolder
from rkserve.bringup.wheels import WheelFolder
from rkserve.core.errors import ConfigError

NEW = "0.2.0"
OWN_PIDS = {11, 12}


class FakeHead:
    """A head in memory, with files by their sha256."""

    def __init__(self) -> None:
        self.order: OrderEntry | None = None
        self.replicas: list[ReplicaEntry] = []
        self.files: dict[str, bytes] = {}
        self.news: list[dict[str, Any]] = []
        self.fetched: list[str] = []
        self.away = False

    def beat(self, news: dict[str, Any]) -> HeartbeatAnswer | None:
        self.news.append(dict(news))
        if self.away:
            return None
        measures: list[MeasuredEntry] = [{"library": "/lib/librkllmrt.so", "model": "/models/one"}]
        return HeartbeatAnswer(
            version=__version__, replicas=self.replicas, order=self.order, measures=measures
        )

    def fetch(self, sha256: str, target: Path) -> None:
        self.fetched.append(sha256)
        target.write_bytes(self.files[sha256])

    def wants(self, go: bool = False, **changes: Any) -> None:
        listed = []
        for name, content in (("requirements.lock", b"ray==2.60.0\n"), (WHEEL, b"a wheel")):
            sha256 = hashlib.sha256(content).hexdigest()
            self.files[sha256] = content
            listed.append({"name": name, "sha256": sha256, "size": len(content)})
        made: dict[str, Any] = {
            "update": "u1",
            "version": NEW,
            "back": False,
            "go": go,
            "index": False,
            "files": listed,
            "ratio": 0.95,
            "seconds": 20.0,
            "limit_s": 600.0,
            **changes,
        }
        self.order = OrderEntry(**made)  # type: ignore[typeddict-item] # of tests


WHEEL = f"rkserve-{NEW}-py3-none-any.whl"


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VersionFolder:
    """The version of this process in a folder, and wheels that are installed at once."""
    found = VersionFolder(tmp_path / "opt")
    found.prefix.mkdir()

    def build(_wheels: WheelFolder, venv: Path, index: bool = False) -> None:
        venv.mkdir()

    monkeypatch.setattr(WheelFolder, "build", build)
    found.use(found.install(__version__, "this one", Path.mkdir))
    monkeypatch.setattr(sys, "prefix", str(found.prefix / __version__))
    return found


@pytest.fixture
def head() -> FakeHead:
    return FakeHead()


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The speeds that are measured one after the other; the last one again and again."""
    found = [10.0]

    def measure(_model: MeasuredModel, _seconds: float) -> float:
        if found[0] == 0:
            raise ConfigError("the library ended its process by SIGSEGV")
        return found.pop(0) if len(found) > 1 else found[0]

    monkeypatch.setattr(MeasuredModel, "tokens_per_s", measure)
    return found


def follower(head: FakeHead, versions: VersionFolder | None) -> UpdateFollower:
    return UpdateFollower(head, versions, "a" * 32, lambda _: None)


def steps(one: UpdateFollower, until: Callable[[], bool], pids: set[int] = OWN_PIDS) -> bool:
    """Step until something is so; return what the last step returned."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        switch = one.step(pids)
        if switch or until():
            return switch
        time.sleep(0.01)
    raise AssertionError("it never came to that")


def stage(head: FakeHead) -> str:
    return str(head.news[-1].get("stage", "serving"))


def switched(head: FakeHead, versions: VersionFolder) -> None:
    """Bring a board to the new version on trial."""
    head.wants(go=True)
    one = follower(head, versions)
    assert steps(one, lambda: False)
    one.switch()
    assert versions.current() == NEW


def restarted(head: FakeHead, versions: VersionFolder, patch: pytest.MonkeyPatch) -> UpdateFollower:
    """Return the board as the process of the version in use."""
    patch.setattr(sys, "prefix", str(versions.prefix / (versions.current() or "")))
    patch.setattr(board_update, "__version__", versions.current_version())
    return follower(head, versions)


def test_a_board_installs_at_once_and_switches_when_it_may(
    head: FakeHead, versions: VersionFolder, speeds: list[float]
) -> None:
    head.wants()
    one = follower(head, versions)
    assert not steps(one, lambda: stage(head) == "installed")
    assert versions.installed() == [__version__, NEW]
    assert versions.current() == __version__
    assert not one.step(OWN_PIDS)
    head.wants(go=True)
    assert one.step(OWN_PIDS)
    one.switch()
    trial = versions.trial()
    assert trial is not None
    assert (trial.name, trial.before, trial.before_tokens_per_s) == (NEW, __version__, 10.0)
    assert not (versions.prefix / ".downloads").exists()


def test_the_new_version_stays_when_the_head_sees_this_boards_replica(
    head: FakeHead,
    versions: VersionFolder,
    speeds: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds[:] = [10.0, 9.6]
    switched(head, versions)
    one = restarted(head, versions, monkeypatch)
    assert not one.begin()
    assert not one.step(OWN_PIDS)
    assert stage(head) == "trial"
    # Another board has the host name; this one's replica loads.
    head.replicas = [{"pid": 99, "state": "ready"}, {"pid": 12, "state": "starting"}]
    assert not one.step(OWN_PIDS)
    assert versions.trial() is not None
    head.replicas = [{"pid": 12, "state": "ready"}]
    assert not one.step(OWN_PIDS)
    assert versions.trial() is None
    assert not one.step(OWN_PIDS)
    assert head.news[-1] | {"host": ""} == {
        "key": "a" * 32,
        "host": "",
        "version": NEW,
        "stage": "serving",
        "update": "u1",
        "problem": "",
        "before_tokens_per_s": 10.0,
        "tokens_per_s": 9.6,
    }


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        pytest.param(9.4, "it decodes 9.4 tokens/s, and 0.1.0 10.0", id="slower"),
        pytest.param(0.0, "its speed could not be measured: the library ended", id="crashes"),
    ],
)
def test_a_slower_version_is_taken_back_before_it_serves(  # noqa: PLR0917 - fixtures
    head: FakeHead,
    versions: VersionFolder,
    speeds: list[float],
    monkeypatch: pytest.MonkeyPatch,
    after: float,
    problem: str,
) -> None:
    speeds[:] = [10.0, after]
    switched(head, versions)
    assert restarted(head, versions, monkeypatch).begin()
    assert versions.current() == __version__
    monkeypatch.setattr(board_update, "__version__", __version__)
    again = restarted(head, versions, monkeypatch)
    assert not again.begin()
    # It reports why, and does not try that update again.
    assert not steps(again, lambda: len(head.news) > 5)
    assert head.news[-1]["problem"].startswith(problem)
    assert versions.current() == __version__
    head.wants(go=True, update="u2")
    assert steps(again, lambda: False)


def test_a_version_that_does_not_serve_in_time_is_taken_back(
    head: FakeHead,
    versions: VersionFolder,
    speeds: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched(head, versions)
    one = restarted(head, versions, monkeypatch)
    assert not one.begin()
    head.away = True
    assert not one.step(OWN_PIDS)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 601)
    assert one.step(OWN_PIDS)
    one.switch()  # nothing more: the version before is in use
    assert versions.current() == __version__
    assert versions.outcome() == Outcome(NEW, "u1", "it was not ready in time")


def test_a_version_is_tried_without_a_speed_where_none_can_be_measured(
    head: FakeHead, versions: VersionFolder, speeds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds[:] = [0.0]
    switched(head, versions)
    trial = versions.trial()
    assert trial is not None
    assert trial.before_tokens_per_s is None
    assert not restarted(head, versions, monkeypatch).begin()
    assert versions.current() == NEW


def test_a_file_that_is_not_the_listed_one_is_not_installed(
    head: FakeHead, versions: VersionFolder
) -> None:
    head.wants(go=True)
    for sha256 in head.files:
        head.files[sha256] = b"something else"
    one = follower(head, versions)
    assert not steps(one, lambda: bool(head.news[-1].get("problem")))
    assert "is not the file that the update lists" in head.news[-1]["problem"]
    assert versions.installed() == [__version__]


def test_only_what_this_machine_lacks_is_downloaded(
    head: FakeHead, versions: VersionFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (versions.prefix / __version__ / "requirements.lock").write_bytes(b"ray==2.60.0\n")
    head.wants()
    assert head.order is not None
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    others = ["wheels/ray-1-cp311-x86_64.whl", "wheels/other-1-py3-none-any.whl", "../evil.whl"]
    for name in others:
        sha256 = hashlib.sha256(name.encode()).hexdigest()
        head.order["files"].append({"name": name, "sha256": sha256, "size": 1})
    one = follower(head, versions)
    assert not steps(one, lambda: stage(head) == "installed")
    assert len(head.fetched) == 2  # the lock and rkserve
    assert not board_update._needed(others[0], same_lock=False)
    assert board_update._needed(others[1], same_lock=False)
    assert not board_update._is_inside(others[2])


def test_going_back_takes_the_version_before(
    head: FakeHead, versions: VersionFolder, speeds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions.use(versions.install(NEW, "new", Path.mkdir))
    one = restarted(head, versions, monkeypatch)
    head.wants(go=True, back=True, version=__version__)
    assert steps(one, lambda: False)
    one.switch()
    assert versions.current() == __version__
    assert head.fetched == []


def test_going_back_to_another_version_than_the_one_before_is_refused(
    head: FakeHead, versions: VersionFolder
) -> None:
    head.wants(go=True, back=True, version="0.0.9")
    one = follower(head, versions)
    assert not steps(one, lambda: bool(head.news[-1].get("problem")))
    assert head.news[-1]["problem"] == "The version before is None, not 0.0.9."


def test_a_board_without_versions_says_so_and_serves_on(head: FakeHead) -> None:
    head.wants(go=True)
    one = follower(head, None)
    assert not one.begin()
    assert not steps(one, lambda: bool(head.news[-1].get("problem")))
    assert "rkserve-node" in head.news[-1]["problem"]


def test_a_board_keeps_its_key(tmp_path: Path) -> None:
    one = member_key(tmp_path, {"machine": "m", "serial": "s"})
    assert one == member_key(tmp_path, {"machine": "m", "serial": "s"})
    assert one != member_key(tmp_path, {"machine": "m", "serial": "another"})
    (tmp_path / "two").mkdir()
    assert one != member_key(tmp_path / "two", {"machine": "m", "serial": "s"})


def test_a_trial_of_a_later_version_is_settled_at_the_start(
    head: FakeHead, versions: VersionFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions.use(versions.install(NEW, "new", Path.mkdir), Trial(NEW, __version__, "u1", 1.0))
    one = restarted(head, versions, monkeypatch)
    assert one.begin()  # its time is long over
    assert versions.current() == __version__
    assert json.loads((versions.prefix / "outcome.json").read_text())["problem"]
