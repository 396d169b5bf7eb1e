"""Ray's workers as forks of one process, with a stand-in for Ray that workers import."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rkserve.bringup import ray_worker

MODULES = {
    "ray/__init__.py": (
        "import os\n"
        "print('imports', flush=True)\n"
        "job = os.environ.get('RAY_JOB_ID')\n"
        "class UniqueID:\n"
        "    def __init__(self, value): self.value = value\n"
        "    size = staticmethod(lambda: 28)\n"
        "    binary = lambda self: self.value\n"
        # A generator that is seeded by its first use, as Ray's is.
        "    seeds = []\n"
        "    @classmethod\n"
        "    def from_random(cls):\n"
        "        cls.seeds.append(os.urandom(8)) if not cls.seeds else None\n"
        "        return cls(cls.seeds[0])\n"
    ),
    "ray/_raylet.py": (
        "from ray import UniqueID\nActorClassID = UniqueID\n"
        "titles = []\nsetproctitle = titles.append\n"
    ),
    "ray/actor.py": "from ray._raylet import ActorClassID\n",
    "ray/serve/__init__.py": ("import ray.actor\nray.actor.ActorClassID.from_random()\n"),
    "ray/serve/_private/__init__.py": "",
    "ray/serve/_private/controller.py": "",
    "ray/serve/_private/proxy.py": "",
    "ray/serve/_private/replica.py": "",
    "ray/_private/__init__.py": "",
    "rkserve/__init__.py": "",
    "rkserve/app.py": "print('rkserve', flush=True)\n",
    # The worker: a description of its process in a file, until it is killed.
    "ray/_private/workers/default_worker.py": (
        "import gc, json, os, random, sys, threading, time\n"
        "import ray, ray.actor, ray._raylet\n"
        "about = dict(argv=sys.argv, folder=os.getcwd(), job=os.environ.get('RAY_JOB_ID'),\n"
        "    pid=os.getpid(), parent=os.getppid(), group=os.getpgrp(), random=random.random(),\n"
        "    id=ray.UniqueID.from_random().binary().hex(), gc=gc.isenabled(), main=__name__,\n"
        "    path=sys.path[0], titles=ray._raylet.titles, environ=dict(os.environ),\n"
        "    imported_job=ray.job,\n"
        "    files=sorted(int(n) for n in os.listdir('/proc/self/fd')),\n"
        "    same=ray.actor.ActorClassID is ray._raylet.ActorClassID)\n"
        "file = sys.argv[1]\n"
        "open(file + '.new', 'w').write(json.dumps(about))\n"
        "os.rename(file + '.new', file)\n"
        "print('worker', sys.argv[2:], flush=True)\n"
        "time.sleep(1000)\n"
    ),
}
# A raylet with one worker, which ends by itself.
RAYLET = """
import os, subprocess, sys, time
os.environ["RAY_RAYLET_PID"] = str(os.getpid())
subprocess.Popen(sys.argv[1:])
time.sleep(1000)
"""
# Sends a request of an account.
ASK = """
import os, socket, sys
os.seteuid(int(sys.argv[1]))
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect("raylet.forks")
server.settimeout(20)
try:
    socket.send_fds(server, [sys.argv[2].encode()], (0, 1, 2))
    print(server.recv(100).decode() or "refused")
except (ConnectionResetError, BrokenPipeError):
    print("refused")
"""
WITHIN_S = 60.0
STREAMS_AND_LISTED = [0, 1, 2, 3]  # the last is the folder of descriptors itself


def wait_for(look: Callable[[], Any], what: str) -> Any:
    """Return the result of ``look`` once it is true."""
    deadline_s = time.monotonic() + WITHIN_S
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"not within {WITHIN_S:.0f} s: {what}"
        time.sleep(0.01)
    return found


def runs(pid: int) -> bool:
    """Return whether a process runs: not as a zombie, which its parent has yet to collect."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Node:
    """A node whose raylet is the tests' process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.children: list[subprocess.Popen[bytes]] = []
        for name, text in MODULES.items():
            file = folder / "packages" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        self.program = folder / "bringup" / "ray_worker.py"
        self.program.parent.mkdir()
        self.program.write_text(Path(ray_worker.__file__).read_text(encoding="utf-8"))

    def set(self, name: str, value: float) -> None:
        """Give a constant of the program another value."""
        text, changed = re.subn(
            rf"^{name} = .*$", f"{name} = {value}", self.program.read_text(), flags=re.MULTILINE
        )
        assert changed == 1, name
        self.program.write_text(text)

    def command(self, *arguments: str, python: str = sys.executable) -> list[str]:
        """Return the command of the next worker."""
        self.number += 1
        report = str(self.folder / f"{self.number}.json")
        raylet = f"--raylet-name={self.raylet}"
        return [python, str(self.program), report, *arguments, raylet]

    @property
    def raylet(self) -> str:
        """The raylet's socket, beside which the server's is."""
        return f"{self.folder}/raylet"

    def environ(self, **changes: str) -> dict[str, str]:
        """Return the environment of workers."""
        own = {"PYTHONPATH": str(self.folder / "packages"), "RAY_RAYLET_PID": str(os.getpid())}
        return {**os.environ, "RAY_JOB_ID": "ffffffff", **own, **changes}

    def start(
        self,
        *arguments: str,
        folder: Path | None = None,
        python: str = sys.executable,
        without: str = "",
        **changes: str,
    ) -> subprocess.Popen[bytes]:
        """Start a worker as a raylet does."""
        command = self.command(*arguments, python=python)
        environ = self.environ(**changes)
        environ.pop(without, None)
        with (self.folder / f"{self.number}.log").open("ab") as log:
            child = subprocess.Popen(
                command,
                env=environ,
                cwd=folder or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        self.children.append(child)
        return child

    def start_server(self, raylet: int, **changes: str) -> subprocess.Popen[bytes]:
        """Start the fork server as the hook of ``ray start`` does beside the raylet, a pid."""
        descriptor = os.pidfd_open(raylet)
        with (self.folder / "server.log").open("ab") as log:
            child = subprocess.Popen(
                (sys.executable, self.program, ray_worker.SERVES, str(descriptor), self.raylet),
                env=self.environ(**changes),
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.close(descriptor)
        self.children.append(child)
        wait_for(Path(f"{self.raylet}.forks").exists, "the server's socket")
        return child

    def worker(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """Start a worker and return its description, with the raylet's own child in it."""
        child = self.start(*arguments, **options)
        return {**self.described(self.number), "child": child}

    def first(self) -> dict[str, Any]:
        """Start the first worker, whose parent is the fork server."""
        worker = self.worker()
        assert worker["parent"] == worker["child"].pid
        return worker

    def described(self, number: int) -> dict[str, Any]:
        """Return the description that a worker gives."""
        file = self.folder / f"{number}.json"
        wait_for(file.exists, f"worker {number}: {self.log(number)}")
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def log(self, number: int) -> str:
        """Return what a worker printed."""
        file = self.folder / f"{number}.log"
        return file.read_text() if file.exists() else ""

    def imports(self) -> int:
        """Return how many processes imported Ray."""
        return sum(self.log(number + 1).count("imports") for number in range(self.number))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path)
    yield one
    for child in one.children:
        if child.poll() is None:
            server = psutil.Process(child.pid)
            for process in (*server.children(recursive=True), server):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    for number in range(one.number):  # also where a test has killed their parent
        report = tmp_path / f"{number + 1}.json"
        if report.exists() and runs(pid := json.loads(report.read_text())["pid"]):
            with suppress(ProcessLookupError):  # one that was killed above, and ends
                os.kill(pid, signal.SIGKILL)
    for child in one.children:
        child.wait()


def test_later_workers_are_forks_of_the_process_that_imported(node: Node) -> None:
    first = node.first()
    later = [node.worker("--worker-id=b"), node.worker("--worker-id=c")]
    assert node.imports() == 1
    for worker in later:
        assert worker["parent"] == first["parent"]
        assert worker["child"].wait(WITHIN_S) == 0, "the process that the raylet started has ended"
    assert len({worker["random"] for worker in (first, *later)}) == 3
    assert len({worker["id"] for worker in (first, *later)}) == 3


def test_a_fork_is_the_worker_that_the_raylet_asked_for(node: Node, tmp_path: Path) -> None:
    node.first()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    worker = node.worker("--worker-id=b", folder=elsewhere, RAY_JOB_ID="01000000")
    raylet = f"--raylet-name={tmp_path}/raylet"
    program = f"{tmp_path}/packages/ray/_private/workers/default_worker.py"
    assert worker["argv"] == [program, f"{tmp_path}/2.json", "--worker-id=b", raylet]
    assert (worker["folder"], worker["job"]) == (str(elsewhere), "01000000")
    assert worker["environ"] == node.environ(RAY_JOB_ID="01000000")
    assert worker["path"] == str(Path(program).parent), "the folder of Ray's program, as without"
    assert (worker["main"], worker["gc"], worker["same"]) == ("__main__", True, True)
    assert worker["titles"] == [ray_worker.TITLE, ray_worker.TITLE, ray_worker.STARTING]
    assert worker["group"] == worker["pid"], "raylets end the group of a worker with it"
    assert worker["files"] == STREAMS_AND_LISTED, "no descriptor of the server"
    wait_for(lambda: "worker ['--worker-id=b'" in node.log(2), "the line in the worker's own log")


def test_a_server_that_starts_with_the_raylet_forks_the_first_worker_too(node: Node) -> None:
    server = node.start_server(os.getpid())
    for number in (1, 2):
        worker = node.worker(RAY_JOB_ID=f"{number:02}000000")
        assert worker["parent"] == server.pid
        assert worker["job"] == f"{number:02}000000"
        assert worker["files"] == STREAMS_AND_LISTED
        assert (worker["main"], worker["gc"]) == ("__main__", True)
        assert worker["child"].wait(WITHIN_S) == 0
    assert (node.imports(), (node.folder / "server.log").read_text().count("imports")) == (0, 1)


def test_workers_of_serve_s_own_are_forked_before_the_last_imports(node: Node) -> None:
    app = node.folder / "packages" / "rkserve" / "app.py"
    app.write_text(
        "import os, time\n"
        f"while not os.path.exists('{node.folder}/go'): time.sleep(0.01)\n"
        "print('rkserve', flush=True)\n"
    )
    node.set("ANSWER_S", 1000.0)
    server = node.start_server(os.getpid())
    server.send_signal(signal.SIGSTOP)
    first = node.start()
    waits = psutil.Process(first.pid)
    wait_for(lambda: len(waits.net_connections("unix")) == 1, "its connection")
    server.send_signal(signal.SIGCONT)
    worker = node.described(1)
    assert (worker["parent"], worker["gc"], worker["same"]) == (server.pid, True, True)
    second = node.start()
    (node.folder / "go").touch()
    assert node.described(2)["parent"] == server.pid
    assert second.wait(WITHIN_S) == 0
    assert (node.folder / "server.log").read_text().count("rkserve") == 1


def test_a_server_with_another_environment_than_the_first_worker_is_replaced(node: Node) -> None:
    server = node.start_server(os.getpid(), RAY_backend_log_level="debug")
    first = node.worker()
    assert first["pid"] == first["child"].pid, "started by itself"
    assert server.wait(WITHIN_S) == 1
    assert "has another environment" in (node.folder / "server.log").read_text()
    second, third = node.worker(), node.worker()
    assert second["parent"] == second["child"].pid == third["parent"]


def test_a_second_server_ends_at_once(node: Node) -> None:
    first = node.first()
    assert node.start_server(os.getpid()).wait(WITHIN_S) == 0
    assert node.worker()["parent"] == first["parent"]


def test_a_server_that_starts_with_the_raylet_ends_with_it(node: Node) -> None:
    raylet = subprocess.Popen((sys.executable, "-c", "import time; time.sleep(1000)"))
    node.children.append(raylet)
    server = node.start_server(raylet.pid, RAY_RAYLET_PID=str(raylet.pid))
    assert node.worker(RAY_RAYLET_PID=str(raylet.pid))["parent"] == server.pid
    raylet.kill()
    raylet.wait()
    assert server.wait(WITHIN_S) == 0


def test_imports_that_fail_before_the_first_worker_leave_it_to_itself(node: Node) -> None:
    proxy = node.folder / "packages" / "ray" / "serve" / "_private" / "proxy.py"
    proxy.write_text("1 / 0\n")
    server = node.start_server(os.getpid())
    worker = node.worker()
    assert worker["pid"] == worker["child"].pid
    assert server.wait(WITHIN_S) == 1
    assert "ZeroDivisionError" in (node.folder / "server.log").read_text()


def test_a_fork_has_the_priorities_of_the_process_that_it_replaces(node: Node) -> None:
    """Raylets give their workers both; the server beside a raylet has neither."""
    server = node.start_server(os.getpid())
    server.send_signal(signal.SIGSTOP)
    child = node.start()
    os.setpriority(os.PRIO_PROCESS, child.pid, 7)
    Path(f"/proc/{child.pid}/oom_score_adj").write_text("900")
    server.send_signal(signal.SIGCONT)
    worker = node.described(1)
    assert worker["parent"] == server.pid
    assert os.getpriority(os.PRIO_PROCESS, worker["pid"]) == 7
    assert Path(f"/proc/{worker['pid']}/oom_score_adj").read_text() == "900\n"
    assert os.getpriority(os.PRIO_PROCESS, server.pid) == os.getpriority(os.PRIO_PROCESS, 0)


def test_the_environment_of_workers_is_their_raylet_s_with_what_it_sets() -> None:
    raylet = {"HOME": "/root", "LD_PRELOAD": "libjemalloc.so", "RAY_LD_PRELOAD_ON_WORKERS": "0"}
    found = ray_worker.workers_environ(raylet, 17)
    own = {"RAY_RAYLET_PID": "17", "SPT_NOENV": "1"}
    assert found == {"HOME": "/root", "RAY_LD_PRELOAD_ON_WORKERS": "0", **own}
    kept = {**raylet, "RAY_LD_PRELOAD_ON_WORKERS": "1"}
    assert ray_worker.workers_environ(kept, 17) == {**kept, **own}


def test_a_server_that_was_a_job_s_worker_forks_workers_for_any_job(node: Node) -> None:
    """Ray reads the job when it is imported."""
    first, second = (node.worker(RAY_JOB_ID=f"{number:02}000000") for number in (1, 2))
    assert (first["job"], second["job"]) == ("01000000", "02000000")
    assert first["imported_job"] == second["imported_job"] == "ffffffff"


def test_a_worker_without_a_job_has_none(node: Node) -> None:
    node.first()
    child = node.start(without="RAY_JOB_ID")  # as one that spills objects
    assert node.described(2)["job"] is None
    assert child.wait(WITHIN_S) == 0


@pytest.mark.parametrize("name", ["RAY_backend_log_level", "PYTHONPATH"])
def test_a_worker_with_another_environment_starts_by_itself(node: Node, name: str) -> None:
    node.first()
    environ = {name: f"{node.folder}/packages{os.pathsep}x"}
    worker = node.worker(**environ)
    assert worker["pid"] == worker["child"].pid
    assert worker["environ"] == node.environ(**environ)
    assert node.imports() == 2


def test_a_worker_of_another_python_starts_by_itself(node: Node, tmp_path: Path) -> None:
    node.first()
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    worker = node.worker(python=str(python))
    assert worker["pid"] == worker["child"].pid


def test_a_worker_of_a_later_release_imports_it(node: Node) -> None:
    """Of one that was installed over that of the server."""
    node.first()
    node.worker()
    assert "rkserve" not in node.log(2)
    (node.folder / "packages" / "rkserve" / "later.py").write_text("")
    worker = node.worker()
    assert worker["pid"] == worker["child"].pid


def test_a_killed_server_is_replaced_by_the_next_worker(node: Node) -> None:
    first, second = node.first(), node.worker()
    first["child"].kill()
    first["child"].wait()
    third, fourth = node.worker(), node.worker()
    assert third["parent"] == third["child"].pid == fourth["parent"]
    assert runs(first["pid"])
    assert runs(second["pid"])
    assert node.imports() == 2


def test_a_server_that_fails_is_no_second_worker(node: Node) -> None:
    first = node.first()
    (node.folder / "1.json").unlink()
    used = {int(one.name) for one in Path(f"/proc/{first['parent']}/fd").iterdir()}
    free = next(number for number in range(len(used) + 1) if number not in used)
    # Only accept() fails: a worker that it became would have the server's own descriptors to use.
    psutil.Process(first["parent"]).rlimit(psutil.RLIMIT_NOFILE, (free, free))
    second = node.worker()
    assert second["pid"] == second["child"].pid, "started by itself"
    assert first["child"].wait(WITHIN_S) == 1
    assert not (node.folder / "1.json").exists()
    third = node.worker()
    assert third["parent"] == third["child"].pid, "the next server"
    os.kill(first["pid"], signal.SIGKILL)  # whose description is gone


def test_a_server_that_does_not_answer_is_killed(node: Node) -> None:
    node.set("FORK_S", 0.5)
    first = node.first()
    first["child"].send_signal(signal.SIGSTOP)
    second = node.worker()
    assert second["pid"] == second["child"].pid, "started by itself"
    assert first["child"].wait(WITHIN_S) == -signal.SIGKILL
    assert runs(first["pid"])
    assert "no worker was forked within" in node.log(2)
    third = node.worker()
    assert third["parent"] == third["child"].pid, "the next server"


def test_a_server_that_does_not_end_its_imports_is_killed(node: Node) -> None:
    node.set("ANSWER_S", 0.5)
    node.set("FORK_S", 1000.0)
    proxy = node.folder / "packages" / "ray" / "serve" / "_private" / "proxy.py"
    proxy.write_text("import time\ntime.sleep(1000)\n")
    server = node.start_server(os.getpid())
    worker = node.worker()
    assert worker["pid"] == worker["child"].pid
    assert server.wait(WITHIN_S) == -signal.SIGKILL


def test_a_worker_that_gave_up_is_not_forked_later(node: Node) -> None:
    first = node.first()
    first["child"].send_signal(signal.SIGSTOP)
    asking = node.start()
    waits = psutil.Process(asking.pid)
    wait_for(lambda: len(waits.net_connections("unix")) == 1, "its connection")
    wait_for(lambda: waits.status() == psutil.STATUS_SLEEPING, "its wait for the answer")
    asking.kill()  # as a raylet that no longer needs the worker
    asking.wait()
    first["child"].send_signal(signal.SIGCONT)
    third = node.worker()
    assert third["parent"] == first["parent"]
    server = psutil.Process(first["parent"])
    wait_for(
        lambda: (
            {child.pid for child in server.children() if runs(child.pid)}
            == {first["pid"], third["pid"]}
        ),
        "the end of the fork that has no worker's place",
    )
    assert not (node.folder / "2.json").exists()


def test_what_is_no_request_changes_nothing(node: Node) -> None:
    node.set("REQUEST_S", 0.2)
    first = node.first()
    for message in (b"", b"[]", b'{"arguments": 1}', b"\xff"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"{node.raylet}.forks")
            if message:
                connection.send(message)
                assert connection.recv(100) == b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"{node.raylet}.forks")
        assert connection.recv(100) == b"", "it waits for no process for long"
    assert node.worker()["parent"] == first["parent"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another account")
def test_another_account_gets_no_fork(node: Node) -> None:
    request = request_of_a_worker(node)
    node.first()
    node.folder.joinpath("raylet.forks").chmod(0o777)
    node.folder.chmod(0o755)

    def asked_by(account: int) -> str:
        command = (sys.executable, "-c", ASK, str(account), request.decode())
        # The folders above this one are root's alone.
        done = subprocess.run(
            command, cwd=node.folder, capture_output=True, text=True, check=False, timeout=WITHIN_S
        )
        return done.stdout + done.stderr

    assert asked_by(0) == "forked\n"
    assert asked_by(65534) == "refused\n"


def request_of_a_worker(node: Node) -> bytes:
    """Return a request of a worker, which finds the tests' process in the server's place."""
    lock, address = node.folder / "raylet.lock", node.folder / "raylet.forks"
    with (
        lock.open("ab") as file,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        fcntl.lockf(file, fcntl.LOCK_EX)
        listener.bind(str(address))
        listener.listen()
        node.start()
        connection, _ = listener.accept()
        with connection:
            request = connection.recv(ray_worker.MESSAGE_BYTES)
    return request


def test_the_server_ends_with_its_raylet(node: Node) -> None:
    command = node.command()
    raylet = subprocess.Popen((sys.executable, "-c", RAYLET, *command), env=node.environ())
    node.children.append(raylet)
    server = node.described(1)["parent"]
    assert runs(server)
    raylet.kill()
    raylet.wait()
    wait_for(lambda: not runs(server), "the server's end")


def test_a_worker_whose_raylet_has_ended_starts_by_itself(node: Node) -> None:
    ended = subprocess.Popen((sys.executable, "-c", ""))
    ended.wait()
    worker = node.worker(RAY_RAYLET_PID=str(ended.pid))
    assert worker["pid"] == worker["child"].pid


def test_imports_that_fail_leave_an_ordinary_worker(node: Node) -> None:
    (node.folder / "packages" / "ray" / "serve" / "_private" / "proxy.py").write_text("1 / 0\n")
    for _ in range(2):
        worker = node.worker(RAY_JOB_ID="01000000")
        assert worker["pid"] == worker["child"].pid
        assert (worker["gc"], worker["same"], worker["job"]) == (True, True, "01000000")
        assert worker["files"] == STREAMS_AND_LISTED
    assert "ZeroDivisionError" in node.log(1)


def test_forks_that_would_make_the_same_ids_are_not_made(node: Node) -> None:
    with (node.folder / "packages" / "ray" / "serve" / "__init__.py").open("a") as file:
        file.write("import ray\nray.UniqueID.from_random()\n")
    worker = node.worker()
    assert worker["pid"] == worker["child"].pid
    assert "the same random ids" in node.log(1)


def test_the_preloaded_modules_leave_forks_their_own_ids() -> None:
    """Ray's own modules, in a process of their own."""
    text = (
        "from rkserve.bringup import ray_worker as w; import ray; [*w.preload()]; "
        "print(len({w._id_of_a_fork() for _ in range(5)}), ray.actor.ActorClassID.__name__)"
    )
    done = subprocess.run((sys.executable, "-c", text), capture_output=True, text=True, check=False)
    assert done.stdout == "5 ActorClassID\n", done.stderr
