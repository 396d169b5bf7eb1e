"""The record of a node's processes, and their end: those, and no others."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rkserve.bench.processes import PROC, ProcessIdentity, identity_of, is_alive
from rkserve.bringup import processes
from rkserve.bringup.processes import (
    NodeRecord,
    NodeSupervisor,
    StateFolder,
    end_processes,
    forgotten_address,
    ray_folder,
    signal_process,
)
from rkserve.core.errors import ConfigError
from tests.support.sim.sim_driver import wait_for

pytestmark = pytest.mark.slow

# A parent with a child that ignores SIGTERM, as a hanging worker does.
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(600)")])
time.sleep(600)
"""

SPEAKER = """
import signal, sys, time
def end(*_):
    print(sys.argv[1], "ends", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print(sys.argv[1], "begins", flush=True)
time.sleep(600)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def identity(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    found = identity_of(PROC, process.pid)
    assert found is not None
    return found


def test_a_process_with_the_pid_of_a_recorded_one_is_left_alone(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    now = identity(sleeper)
    before = ProcessIdentity(now.pid, now.started - 1)  # the pid was reused
    signal_process(before, signal.SIGKILL)
    end_processes([before])
    state = StateFolder(tmp_path / "node", "head")
    state.write(NodeRecord(before, (before,)))
    state.refuse_second("rkserve down")
    assert not state.end(print)
    assert is_alive(PROC, now)
    assert state.read() is None


def test_a_recorded_process_is_ended(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "node", "head")
    state.write(NodeRecord(identity(sleeper)))
    with pytest.raises(ConfigError, match=rf"such as pid {sleeper.pid}\. `rkserve down` ends them"):
        state.refuse_second("rkserve down")
    said: list[str] = []
    assert state.end(said.append)
    assert said == [f"Stopping pid {sleeper.pid} ..."]
    assert sleeper.wait(30) == -signal.SIGTERM
    assert not state.file.exists()


def test_a_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    state = StateFolder(tmp_path / "node", "head")
    with NodeSupervisor(state, url="http://head:8000") as node:
        with state.log("ray").open("wb") as log:
            child = node.start([sys.executable, "-c", FAMILY], os.environ, log, signal.SIGTERM)
        deadline_s = time.monotonic() + 60
        while "up" not in state.log("ray").read_text() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        node.record(ready=True)
        record = state.read()
        assert record is not None
        assert record.ready
        assert record.running
        assert record.url == "http://head:8000"
        assert child.pid in [one.pid for one in record.processes]
        assert len(record.processes) == 2
    assert not [one for one in record.processes if is_alive(PROC, one)]
    assert state.read() is None
    # Later children would inherit a signal that is ignored.
    assert handlers == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]


def test_a_start_that_failed_is_dropped_alone(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "node", "board")
    with NodeSupervisor(state) as node, state.log("ray").open("wb") as log:
        first = node.start([sys.executable, "-c", FAMILY], os.environ, log, signal.SIGTERM)
        second = node.start(
            [sys.executable, "-c", "import time; time.sleep(600)"], os.environ, log, signal.SIGTERM
        )
        node.drop(second)
        assert second.returncode == -signal.SIGTERM
        assert first.poll() is None
    assert first.returncode == -signal.SIGTERM


def test_a_full_disk_ends_nothing_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = StateFolder(tmp_path / "node", "head")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with NodeSupervisor(state) as node, state.log("ray").open("wb") as log:
        with monkeypatch.context() as patch:
            patch.setattr(processes, "replace_private", full)
            command = [sys.executable, "-c", "import time; time.sleep(600)"]
            child = node.start(command, os.environ, log, signal.SIGTERM)
            node.record(ready=True)
        assert [one.message for one in caplog.records] == [
            f"rkserve: {state.file} cannot be written: [Errno 28] No space left on device"
        ]
        before = state.read()
        assert before is not None
        assert not before.ready
        assert child.pid in {one.pid for one in before.all_alive()}
        node.record()
        after = state.read()
        assert after is not None
        assert after.ready
        assert child.pid in node.pids()


def test_a_node_is_not_started_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateFolder(tmp_path / "node", "board")
    state.refuse_second("rkserve leave")
    assert not list(state.folder.iterdir())
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(processes, "write_private", lambda *_: full.write(b"x"))
        with pytest.raises(ConfigError, match="node cannot be written: No space left"):
            state.refuse_second("rkserve leave")


def test_a_child_that_waits_begins_when_it_is_released_and_ends_first(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "node", "head")
    log_file = state.log("serve")
    with NodeSupervisor(state) as node, log_file.open("ab") as log:
        waits = node.start(
            [sys.executable, "-c", f"input()\n{SPEAKER}", "waiting"],
            *(os.environ, log, signal.SIGTERM),
            waits=True,
        )
        node.start([sys.executable, "-c", SPEAKER, "other"], os.environ, log, signal.SIGTERM)
        wait_for(lambda: "other begins" in log_file.read_text())
        assert "waiting" not in log_file.read_text()
        node.release(waits, ends_first=True)
        wait_for(lambda: "waiting begins" in log_file.read_text())
        node.release(waits)  # again, which changes nothing
    ends = ["other begins", "waiting begins", "waiting ends", "other ends"]
    assert log_file.read_text().splitlines() == ends


@pytest.mark.parametrize("text", ["", "{}", '{"supervisor": 1}', "[]"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    state = StateFolder(tmp_path / "node", "head")
    state.file.write_text(text)
    with pytest.raises(ConfigError, match=r"head\.json is no record of a node"):
        state.read()


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="other accounts may write to"):
        StateFolder(folder, "head")


@pytest.mark.parametrize(("noted", "stays"), [("10.0.0.1:6379", False), ("10.0.0.2:6379", True)])
def test_ray_s_note_of_a_cluster_goes_with_it_and_that_of_another_one_stays(
    noted: str, stays: bool, *, tmp_path: Path
) -> None:
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    note.write_text(noted, encoding="utf-8")
    with forgotten_address("10.0.0.1:6379", note.parent):
        assert note.exists() is stays
        note.write_text(noted, encoding="utf-8")
    assert note.exists() is stays
    with forgotten_address("10.0.0.1:6379", tmp_path):
        pass  # there is none


def test_ray_s_folder_is_in_a_private_one_whose_sockets_have_short_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SHORT_FOLDER", tmp_path / "short")
    monkeypatch.setattr(processes, "RAY_FOLDER_BYTES", len(str(tmp_path / "node" / "ray")))
    own = ray_folder(tmp_path / "node", None, {})
    elsewhere, other = (ray_folder(tmp_path / name, None, {}) for name in ("node2", "node3"))
    assert own == tmp_path / "node" / "ray"
    assert elsewhere.parents[1] == other.parents[1] == tmp_path / f"short-{os.geteuid()}"
    assert elsewhere != other, "the sessions of one node are none of the other's to remove"
    for folder in (own, elsewhere, other):
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert ray_folder(tmp_path, Path("/named"), {"RAY_TMPDIR": "/other"}) == Path("/named")
    assert ray_folder(tmp_path, None, {"RAY_TMPDIR": "/other"}) == Path("/other/ray")
    elsewhere.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="other accounts may write to"):
        ray_folder(tmp_path / "node2", None, {})


def test_the_oldest_sessions_of_ray_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "RAY_FOLDER_BYTES", 1000)
    folder = ray_folder(tmp_path, None, {})
    names = [f"session_2026-11-2{day}_10-00-00_1_1" for day in range(5)]
    for name in reversed(names):
        (folder / name / "logs").mkdir(parents=True)
    (folder / "session_latest").symlink_to(folder / names[-1])
    assert ray_folder(tmp_path, None, {}) == folder
    kept = sorted(one.name for one in folder.iterdir())
    assert kept == [*names[-processes.KEPT_SESSIONS :], "session_latest"]
