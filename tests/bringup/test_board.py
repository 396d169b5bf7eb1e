"""A board that joins: its identity, the head's answer, the token, the checks, and its Ray."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rkserve.api.admin.heartbeat import HeartbeatAnswer
from rkserve.bench.processes import PROC, is_alive
from rkserve.bringup import board, serving
from rkserve.bringup.board import (
    HeadNotReady,
    JoinOptions,
    RunningBoard,
    ask_head,
    await_head,
    check_board,
    identity,
    keep_token,
    run_board,
)
from rkserve.bringup.board_update import HttpHead
from rkserve.bringup.processes import StateFolder
from rkserve.core.child_process import free_ports
from rkserve.core.errors import ConfigError
from rkserve.router.fleet_update import member_secret
from tests.bringup.test_head import RAY, all_free
from tests.support.http.certificates import https_server, write_certificate
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

ANSWER: dict[str, Any] = {
    "ray_address": "192.0.2.1:6379",
    "ray_version": "2.60.0",
    "cluster_token": "the cluster's",
    "environ": {"RAY_worker_niceness": "0"},
    "notes": ["This is the board that joined as one; it is called <group>@two from now on."],
}
# The agent's modules are not needed here, and take seconds.
JOIN = """
import pathlib, sys
from rkserve.bringup import board, processes
folder = pathlib.Path(sys.argv[1])
processes.SHORT_FOLDER = folder / "short"
board.RAY_START = (sys.executable, str(folder / "ray.py"))
board.AGENTS = "pass"
options = board.JoinOptions(
    folder / "state", sys.argv[3] or None, "the join token", doctor=False,
    ray_cpus=tuple(map(int, sys.argv[4:])), ray_port=int(sys.argv[2]),
)
sys.exit(board.run_board(options, lambda text: print(text, flush=True)))
"""


class Head(http.server.BaseHTTPRequestHandler):
    """Answers every board in one way, and keeps what it was asked."""

    status: ClassVar[int] = 200
    answer: ClassVar[Any] = ANSWER
    before: ClassVar[list[tuple[int, Any, str | None]]] = []  # status, body and Retry-After
    asked: ClassVar[list[tuple[str, str | None, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers["authorization"], body))
        status, answer, retry = (
            self.before.pop(0) if self.before else (self.status, self.answer, None)
        )
        content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        if retry is not None:
            self.send_header("retry-after", retry)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Keep stderr clean."""


@pytest.fixture
def url() -> Iterator[str]:
    Head.status, Head.answer, Head.before, Head.asked = 200, ANSWER, [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Head) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def machine(root: Path, machine_id: str, serial: str = "", cpuinfo: str = "") -> dict[str, str]:
    for name, text in (
        ("etc/machine-id", machine_id),
        ("proc/device-tree/serial-number", serial),
        ("proc/cpuinfo", cpuinfo),
    ):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return identity(root)


def test_an_identity_is_that_of_card_and_soc(tmp_path: Path) -> None:
    one = machine(tmp_path, f"{'a1' * 16}\n", "c3d9b8674f4b94f6\0")
    assert all(len(digest) == 32 for digest in one.values())
    assert "a1a1" not in one["machine"]
    copied = machine(tmp_path, f"{'a1' * 16}\n", "0000000000000001")
    assert copied["machine"] == one["machine"]
    assert copied["serial"] != one["serial"]
    told = machine(tmp_path, f"{'a1' * 16}\n", "", "model name: x\nSerial\t\t: c3d9b8674f4b94f6\n")
    assert told == one


@pytest.mark.parametrize("machine_id", ["", "uninitialized\n", "a" * 31])
@pytest.mark.parametrize("serial", ["", "0000000000000000", "0"])
def test_ids_that_many_boards_share_are_unknown(
    tmp_path: Path, machine_id: str, serial: str
) -> None:
    assert machine(tmp_path, machine_id, serial) == {"machine": "", "serial": ""}


@pytest.mark.parametrize(
    ("status", "answer", "sentence"),
    [
        pytest.param(409, {"error": {"message": "Ray is 2.59."}}, "Ray is 2.59.", id="refused"),
        pytest.param(404, {}, "HTTP status 404; it is no head", id="another server"),
        pytest.param(200, {"ray_address": ""}, "did not answer as rkserve: cluster_to", id="other"),
    ],
)
def test_a_head_that_does_not_admit_is_one_sentence(
    url: str, status: int, answer: Any, sentence: str
) -> None:
    Head.status, Head.answer = status, answer
    with pytest.raises(ConfigError, match=rf"{url}:? .*{sentence}"):
        ask_head(url, "t", {})


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        pytest.param("head:8000", "is no URL of a head", id="no URL"),
        pytest.param("http://no-head.invalid", "cannot be asked", id="no such name"),
    ],
)
def test_a_head_that_is_not_there_is_named(head: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"{head} {sentence}"):
        ask_head(head, "t", {})


def test_a_head_that_refuses_connections_may_start_yet() -> None:
    with pytest.raises(HeadNotReady, match=r"cannot be asked: .*Connection refused"):
        ask_head(f"http://127.0.0.1:{next(free_ports())}", "t", {})


def test_a_head_with_a_certificate_of_its_own_is_trusted_where_that_is_named(
    tmp_path: Path,
) -> None:
    Head.status, Head.answer, Head.before, Head.asked = 200, ANSWER, [], []
    certificate, key = write_certificate(tmp_path, "own")
    with https_server(Head, certificate, key) as url:
        with pytest.raises(ConfigError, match="name a copy of it by --ca-file"):
            ask_head(url, "t", {})
        assert ask_head(url, "t", {}, certificate) == ANSWER
        Head.answer = dict.fromkeys(HeartbeatAnswer.__required_keys__)
        assert HttpHead.of(url, "t").beat({}) is None
        assert HttpHead.of(url, "t", certificate).beat({}) == Head.answer


def test_the_file_of_authorities_is_kept_for_later_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    Head.status, Head.answer, Head.before, Head.asked = 200, ANSWER, [], []
    certificate, key = write_certificate(tmp_path, "own")
    state = StateFolder(tmp_path / "state", "board")
    notes: list[str] = []
    with https_server(Head, certificate, key) as url:
        options = JoinOptions(state.folder, url, "t", ca_file=certificate)
        terms = board._terms(options, state, notes.append)
    later = JoinOptions(state.folder)
    assert board._terms(later, state, notes.append) == terms
    follower = board._follower(later, state, terms, notes.append)
    assert follower._head == HttpHead.of(url, "the cluster's", certificate)


BUSY = {"error": {"message": "20 refused join tokens per minute."}}
ROUTES = "Path '/v1/join' not found. Please ping http://head:8000/-/routes for routes."


def test_a_head_that_is_busy_or_starting_is_asked_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    Head.before = [(429, BUSY, "7"), (503, "", "900"), (503, "", None), (404, ROUTES, "x")]
    lines: list[str] = []
    assert await_head(url, "t", {}, lines.append) == ANSWER
    assert slept == [7.0, 60.0, 2.0, 2.0]
    assert [
        line.removeprefix(f"{url}: ").partition(" Asking again for up to ")[0] for line in lines
    ] == [
        BUSY["error"]["message"],
        "HTTP status 503; no Router of the head answers.",
        "Ray runs there, and rkserve does not yet.",
    ]


def test_a_board_waits_for_approval_without_a_limit(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    command = "rkserve approve rock"
    waits = {"state": "waiting", "id": "1a", "command": command, "notes": ["A copy."]}
    # Between them the head starts anew, for which the limit counts from then on.
    Head.before = [(202, waits, "5"), (202, waits, "5"), (503, "", None), (202, waits, "5")]
    lines: list[str] = []
    assert await_head(url, "t", {}, lines.append, limit_s=3.0) == ANSWER
    assert slept == [5.0, 5.0, 2.0, 5.0]
    asks = f"This board waits for approval. On the head: {command}"
    busy = lines.pop(2)
    assert "no Router of the head answers" in busy
    assert lines == ["rkserve: A copy.", asks] * 2


def test_a_head_that_starts_later_is_waited_for() -> None:
    Head.status, Head.answer, Head.before, Head.asked = 200, ANSWER, [], []
    port = next(free_ports())
    started: list[http.server.HTTPServer] = []

    def note(text: str) -> None:
        assert "Connection refused" in text
        if not started:
            started.append(http.server.ThreadingHTTPServer(("127.0.0.1", port), Head))
            threading.Thread(target=started[0].serve_forever).start()

    assert await_head(f"http://127.0.0.1:{port}", "t", {}, note) == ANSWER
    started[0].shutdown()
    started[0].server_close()


def test_a_head_that_stays_away_is_given_up() -> None:
    head = f"http://127.0.0.1:{next(free_ports())}"
    lines: list[str] = []
    with pytest.raises(
        ConfigError, match=r"refused\. The head was not ready within \d+ s: look at"
    ):
        await_head(head, "t", {}, lines.append, limit_s=3.0)
    assert len(lines) == 1


def test_a_token_is_written_for_its_owner_and_another_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ray" / "token"
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    keep_token("one", replace=False)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    keep_token("one", replace=False)
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="has the token of another cluster"):
        keep_token("two", replace=False)
    assert serving.read_token() == "one"
    keep_token("two", replace=True)
    assert serving.read_token() == "two"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "three")
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN has the token of another cluster"):
        keep_token("two", replace=True)


def test_errors_of_doctor_stop_a_board(tmp_path: Path) -> None:
    options = JoinOptions(tmp_path, library=tmp_path / "librkllmrt.so")
    with pytest.raises(ConfigError, match=r"library-missing: There is no librkllmrt\.so at") as hit:
        check_board(options)
    assert "mend: " in str(hit.value)
    assert "--no-doctor joins all the same." in str(hit.value)


def join(
    folder: Path, head: str = "", failures: int = 0, cpus: tuple[int, ...] = (), text: str = RAY
) -> subprocess.Popen[str]:
    (folder / "ray.py").write_text(text, encoding="utf-8")
    (folder / "left").write_text(str(failures), encoding="utf-8")
    first = next(p for p in free_ports() if p % 10 == 0 and all_free(p))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, str(folder), str(first), head, *map(str, cpus)],
        env={**environ, "FAILURES_LEFT": str(folder / "left"), "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=PROJECT,
    )


def wait_joined(process: subprocess.Popen[str], folder: Path) -> StateFolder:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        if (folder / "state" / "board.json").exists():
            state = StateFolder(folder / "state", "board")
            record = state.read()
            if record is not None and record.ready:
                return state
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("the board did not join")


def test_a_board_joins_after_a_failed_start_and_leaves(tmp_path: Path, url: str) -> None:
    cpu = min(os.sched_getaffinity(0))
    process = join(tmp_path, url, failures=1, cpus=(cpu,))
    state = wait_joined(process, tmp_path)
    record = state.read()
    assert record is not None
    below = [one for one in record.all_alive() if one.pid != process.pid]
    assert len(below) == 2  # Ray with its child
    for one in below:
        assert os.sched_getaffinity(one.pid) == {cpu}
    assert state.end(print)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "trying once more" in output
    assert f"rkserve: {ANSWER['notes'][0]}" in output
    assert output.endswith("This board has joined: it offers rknpu 1.\nLeaving ...\n")
    assert not [one for one in below if is_alive(PROC, one)]
    (path, authorization, body), (beat, secret, news), *_ = Head.asked
    assert (path, authorization) == ("/v1/join", "Bearer the join token")
    assert set(body) == {"host", "ray", "python", "machine", "serial", "version"}
    assert (beat, secret) == ("/v1/heartbeat", f"Bearer {member_secret(ANSWER['cluster_token'])}")
    assert news["version"] == body["version"]
    assert (tmp_path / ".ray" / "auth_token").read_text() == "the cluster's\n"
    log = (tmp_path / "state" / "board-ray.log").read_text()
    assert "--address=192.0.2.1:6379" in log
    assert '--resources={"rknpu": 1.0, "rkcpu": 1.0}' in log


def test_a_board_joins_again_without_the_head_and_after_ray_ended(tmp_path: Path, url: str) -> None:
    process = join(tmp_path, url)
    wait_joined(process, tmp_path).end(print)
    process.communicate(timeout=60)
    # Each Ray of this board ends at once from now on.
    ending = RAY.replace("time.sleep(600)\n", "sys.exit('raylet: Check failed')\n")
    assert ending != RAY
    process = join(tmp_path, text=ending)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert output.count("This board has joined") + output.count("Ray did not start") >= 3
    assert "giving up" in output
    assert [path for path, *_ in Head.asked].count("/v1/join") == 1


class EndedRay:
    """A Ray of a board that has ended."""

    pid, returncode = 1, 1

    def wait(self, _timeout_s: float) -> int:
        return 1


@pytest.mark.parametrize(
    ("runs_s", "starts"),
    [
        pytest.param([40.0, None, None, 1.0, None, 1.0, 1.0], 8, id="its head is away for long"),
        pytest.param([1.0, 1.0, 1.0], 3, id="it never settled"),
        pytest.param([1.0, None], 2, id="it did not start again"),
    ],
)
def test_a_board_that_had_joined_for_a_while_never_gives_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs_s: list[float | None],
    starts: int,
) -> None:
    now_s, seen, notes = [0.0], list[float | None](), list[str]()

    def start(*_: object) -> EndedRay | None:
        if len(seen) == len(runs_s):
            seen.append(0.0)
            raise KeyboardInterrupt
        seen.append(ran_s := runs_s[len(seen)])
        return None if ran_s is None else EndedRay()

    def watch(_self: RunningBoard, _ray: object) -> bool:
        now_s[0] += seen[-1] or 0.0
        return False

    node: Any = SimpleNamespace(record=lambda **_: None, drop=lambda _: None)
    options = JoinOptions(tmp_path)
    one = RunningBoard(node, StateFolder(tmp_path / "s", "board"), options, notes.append, node)
    monkeypatch.setattr(board, "start_ray", start)
    monkeypatch.setattr(board.RunningBoard, "_watch", watch)
    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda _: None)
    monkeypatch.setattr(board, "time", clock)
    with (tmp_path / "log").open("wb") as log:
        if starts > len(runs_s):
            with pytest.raises(KeyboardInterrupt):
                one.run([], {}, log)
            assert sum("Trying again" in note for note in notes) == 6
        else:
            assert one.run([], {}, log) == 1
    assert len(seen) == starts


def test_a_board_may_only_ask_and_start_later(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    first = next(p for p in free_ports() if p % 10 == 0 and all_free(p))
    state = tmp_path / "state"
    notes: list[str] = []
    options = JoinOptions(state, url, "t", doctor=False, ray_port=first, start=False)
    assert run_board(options, notes.append) == 0
    saved = json.loads((state / "joined.json").read_text())
    given = {"ray_address": ANSWER["ray_address"], "environ": ANSWER["environ"]}
    assert saved == {"head": url, **given}
    assert (tmp_path / "token").read_text() == "the cluster's\n"
    assert not (state / "board.json").exists()
    assert "`rkserve join` without a URL uses it" in notes[-1]


def test_a_board_that_never_joined_needs_a_head(tmp_path: Path) -> None:
    process = join(tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "This board has not joined yet" in output
