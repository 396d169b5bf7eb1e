"""The program of Ray's workers on a head: forks of one process that has imported their modules.

Ray executes a Python for each worker, and the imports of ten of them are most of a head's start.
Here a fork server imports Ray, Serve and rkserve once. It forks a process for each worker, which
passes on its arguments and streams and exits. A raylet knows its workers by their ids, and takes
the process that registers with one for the worker.

The hook of ``ray start`` starts the server with the raylet, so that it imports while Ray's agents
do. Where there is none, such as after it was killed, the next worker becomes the server, and forks
a worker for itself.

A worker with another environment, Python or release of rkserve than the server's starts as it would
without this program, and so does each where the server fails. The server ends with its raylet.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, NoReturn

# In two steps: Serve's controller and proxies start first, and need no more than the first one.
PRELOADED = (
    ("ray.serve", "ray.serve._private.controller", "ray.serve._private.proxy"),
    ("ray.serve._private.replica", "rkserve.app"),
)
RAYLET = "--raylet-name="
# The arguments of a server that is no worker: a pidfd of its raylet, and the raylet's socket.
SERVES = "--fork-server"
# The one variable in which workers of a node differ. Ray reads it when it is imported, so that all
# forks register without a job, as a raylet's first workers do, and may get a task of any.
JOB, NO_JOB = "RAY_JOB_ID", "ffffffff"
RAYLET_PID = "RAY_RAYLET_PID"
# Set by a raylet for its workers, with the value that it gives.
SET_BY_RAYLETS = {"SPT_NOENV": "1"}
LD_PRELOAD, KEEPS_LD_PRELOAD = "LD_PRELOAD", "RAY_LD_PRELOAD_ON_WORKERS"
TITLE, STARTING = "rkserve::fork_server", "rkserve::starting_worker"
STREAMS = (0, 1, 2)
MESSAGE_BYTES = 1 << 17
QUEUED = 64
FORKED, GO, OTHER = b"forked", b"go", b"other"
# On a busy machine the imports take long. The raylet waits 180 s for its worker.
ANSWER_S = 60.0
# The limit after the imports, and the content of the lock file by then.
FORK_S = 10.0
READY = b"ready"
# From a process that has just connected, or has its answer; the server does nothing else meanwhile.
REQUEST_S = 2.0
GO_S = 10.0
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(frozen=True)
class WorkerStart:
    """The arguments, folder and job of a worker, and a digest of all that its imports depend on."""

    arguments: list[str]
    folder: str
    job: str | None
    fingerprint: str

    @classmethod
    def of_this_process(cls) -> WorkerStart:
        """Describe this process, before it imports. Raises ``OSError`` without a folder."""
        environ = {name: value for name, value in os.environ.items() if name != JOB}
        about = (sys.executable, sys.version, sys.flags, sys.path, sorted(environ.items()), _code())
        digest = hashlib.sha256(repr(about).encode()).hexdigest()
        return cls(sys.argv[1:], str(Path.cwd()), os.environ.get(JOB), digest)

    def apply(self) -> None:
        """Give this process, a fork, the arguments, folder and job. Raises ``OSError``."""
        os.chdir(self.folder)
        sys.argv[1:] = self.arguments
        os.environ.pop(JOB, None)
        if self.job is not None:
            os.environ[JOB] = self.job


def _code() -> list[tuple[str, int, int]]:
    """Return the modules of rkserve that a worker would import, each with its size and time."""
    found = importlib.util.find_spec("rkserve")
    if found is None or found.origin is None:
        return []
    return sorted(
        (file.path, file.stat().st_size, file.stat().st_mtime_ns)
        for folder, _, _ in os.walk(Path(found.origin).parent)
        for file in os.scandir(folder)
        if file.name.endswith(".py")
    )


class ForkServer:
    """The server that forks workers, run by the process that holds its lock.

    The lock is on a file beside the raylet's socket, and ends with the process, so that the next
    worker replaces a server that was killed.
    """

    def __init__(self, address: Path, lock: IO[bytes], raylet: int) -> None:
        """Listen at ``address`` for workers of the raylet, a pidfd. Raises ``OSError``."""
        self._lock = lock
        self._raylet = raylet
        self._has_forked = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address.unlink(missing_ok=True)  # of a server that was killed
        self._listener.bind(str(address))
        address.chmod(0o600)
        self._listener.listen(QUEUED)

    def close(self) -> None:
        """Close the descriptors, and restore signals and garbage collection, in a worker."""
        os.close(self._raylet)
        self._listener.close()
        self._lock.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.enable()

    def serve(self, own: WorkerStart, *, is_worker: bool) -> None:
        """Fork a worker for each process that connects, until the raylet ends, and one for this
        process if it ``is_worker``.

        Returns in workers only.
        """
        self._lock.write(READY)
        self._lock.flush()
        if is_worker and self._forks_worker():
            own.apply()
            return
        with _ends_by_an_error():
            looked_at = select.poll()
            looked_at.register(self._raylet, select.POLLIN)
            looked_at.register(self._listener, select.POLLIN)
            while all(number != self._raylet for number, _ in looked_at.poll()):
                if self.forks_waiting(own):
                    return
            os._exit(0)

    def forks_waiting(self, own: WorkerStart) -> bool:
        """Fork a worker for each process that has connected by now; True in workers."""
        looked_at = select.poll()
        looked_at.register(self._listener, select.POLLIN)
        while looked_at.poll(0):
            connection, _ = self._listener.accept()
            with connection:
                if self._is_worker(connection, own):
                    return True
        return False

    def _forks_worker(self) -> bool:
        """Fork; True in the worker. Raises ``OSError``."""
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects ended workers
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the raylet, in its order
        self._has_forked = True
        if os.fork():
            return False
        with _ends_by_an_error():
            self.close()
            os.setpgid(0, 0)  # raylets end a worker's process group with it
            sys.modules["ray._raylet"].setproctitle(STARTING)  # Ray names it when it is connected
        return True

    def _is_worker(self, connection: socket.socket, own: WorkerStart) -> bool:
        """Fork a worker for the process that has connected; True in the worker."""
        streams: list[int] = []
        try:
            connection.settimeout(REQUEST_S)
            pid, account = _peer(connection)
            if account != os.geteuid():
                return False
            message, streams, *_ = socket.recv_fds(connection, MESSAGE_BYTES, len(STREAMS))
            start = WorkerStart(**json.loads(message))
            if start.fingerprint != own.fingerprint or len(streams) != len(STREAMS):
                connection.send(OTHER)
                self._end_if_useless()
            elif self._forks_worker():
                _take_over(connection, start, streams, pid)
                return True
        except (OSError, ValueError, TypeError):
            traceback.print_exc()
        finally:
            for stream in streams:
                os.close(stream)
        return False

    def _end_if_useless(self) -> None:
        """End a server that started beside the raylet, with another environment than its workers'.

        The next worker becomes one that has theirs.
        """
        if not self._has_forked:
            sys.stderr.write("rkserve: the first worker has another environment\n")
            os._exit(1)


def _take_over(
    connection: socket.socket, start: WorkerStart, streams: list[int], replaced: int
) -> None:
    """Make this fork the worker that the connected process, ``replaced``, was to be, or end it.

    That process ends once it has sent ``GO``. Without that it has started by itself.
    """
    with _ends_by_an_error():
        start.apply()
        _take_priorities(replaced)
        for number, stream in zip(STREAMS, streams, strict=True):
            os.dup2(stream, number)
        connection.settimeout(GO_S)
        connection.send(FORKED)
        if connection.recv(MESSAGE_BYTES) != GO:
            os._exit(0)


def _take_priorities(pid: int) -> None:
    """Give this process the niceness of another, and its place in the order in which the kernel
    kills processes when memory ends. Raylets set both for the workers that they start.
    """
    with suppress(OSError):  # it has ended, or this account may not raise its own
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(
            Path(f"/proc/{pid}/oom_score_adj").read_bytes()
        )


@contextmanager
def _ends_by_an_error() -> Iterator[None]:
    """End this process by any exception: a fork, or the server once it has forked."""
    try:
        yield
    except BaseException:  # noqa: BLE001 - to go on would be a second server, or a second worker
        traceback.print_exc()
        os._exit(1)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the account of the process at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, account, _ = CREDENTIALS.unpack(found)
    return pid, account


def preload() -> Iterator[None]:
    """Import the modules of workers in steps, with nothing that a fork must not share.

    Yields after each, when a fork may be made. Raises ``RuntimeError``: forks would make the same
    random ids.
    """
    gc.disable()
    os.environ[JOB] = NO_JOB
    for modules in PRELOADED:
        with _unshared_ids():
            for module in modules:
                importlib.import_module(module)
        if _id_of_a_fork() == _id_of_a_fork():
            raise RuntimeError("forked workers would make the same random ids")
        sys.modules["ray._raylet"].setproctitle(TITLE)
        gc.freeze()  # without a collection: imports leave little, and it takes 0.4 s
        yield


@contextmanager
def _unshared_ids() -> Iterator[None]:
    """Give actors ids of the kernel's.

    Serve decorates actors when it is imported. Each gets a random id of a generator in C++, the
    state of which is made by the first use, and is copied by forks: all would make the same ids.
    """
    import ray.actor

    real = ray.actor.ActorClassID
    ray.actor.ActorClassID = SimpleNamespace(from_random=lambda: real(os.urandom(real.size())))
    try:
        yield
    finally:
        ray.actor.ActorClassID = real


def _id_of_a_fork() -> bytes:
    """Return the first random id that a fork of this process makes."""
    from ray import UniqueID

    end, start = os.pipe()
    if not (pid := os.fork()):
        os.write(start, UniqueID.from_random().binary())
        os._exit(0)
    os.close(start)
    with suppress(ChildProcessError):  # the kernel has collected it
        os.waitpid(pid, 0)
    with os.fdopen(end, "rb") as file:
        return file.read()


def is_forked(address: Path, own: WorkerStart) -> bool:
    """Ask the server at ``address`` for a fork in this process's place; True if there is one.

    A server that does not answer is killed: the workers that it has forked run on, and a later
    worker replaces it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(str(address))
            pid, account = _peer(connection)
            if account != os.geteuid():
                return False
            is_ready = _lock_file(address).read_bytes() == READY
            connection.settimeout(limit_s := FORK_S if is_ready else ANSWER_S)
            socket.send_fds(connection, [json.dumps(asdict(own)).encode()], STREAMS)
            forked = connection.recv(MESSAGE_BYTES) == FORKED
            if forked:
                connection.send(GO)
        except TimeoutError:
            sys.stderr.write(f"rkserve: no worker was forked within {limit_s:.0f} s\n")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return False
        except OSError:
            return False  # it has ended, does not listen yet, or cannot have these streams
        return forked


def _address(raylet: str) -> Path:
    """Return the address of the fork server of the raylet with that socket."""
    return Path(f"{raylet}.forks")


def start_worker(program: Path) -> None:
    """Run the worker ``program`` in this process or in one forked for it; return at once where the
    fork server has made a fork in this process's place.
    """
    raylets = [word.removeprefix(RAYLET) for word in sys.argv if word.startswith(RAYLET)]
    if raylets and RAYLET_PID in os.environ:
        address = _address(raylets[-1])
        try:
            own = WorkerStart.of_this_process()
            if (lock := _lock(address)) is not None:
                _serve(_server(address, lock), own)
            elif is_forked(address, own):
                return
        except (OSError, ValueError):
            traceback.print_exc()
    runpy.run_path(str(program), run_name="__main__")


def _lock(address: Path) -> IO[bytes] | None:
    """Lock ``address`` for a fork server; None if there is one. Raises ``OSError``."""
    lock = _lock_file(address).open("ab")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    lock.truncate(0)
    return lock


def _lock_file(address: Path) -> Path:
    return address.with_suffix(".lock")


def _server(address: Path, lock: IO[bytes]) -> ForkServer:
    """Make this worker the fork server.

    Raises:
        OSError: there is no room for its files, or the kernel is older than 5.3.
        ValueError: the pid of the raylet is none.
    """
    try:
        return ForkServer(address, lock, _parent(int(os.environ[RAYLET_PID])))
    except BaseException:
        lock.close()
        raise


def _parent(pid: int) -> int:
    """Return a pidfd of this process's parent. Raises ``OSError`` if that is not ``pid``."""
    descriptor = os.pidfd_open(pid)
    if os.getppid() != pid:
        os.close(descriptor)
        raise ProcessLookupError(pid)  # it has ended, and another process may have its pid
    return descriptor


def _serve(server: ForkServer, own: WorkerStart) -> None:
    """Return in workers only: forks, or this process if it cannot be the server."""
    try:
        for _ in preload():
            pass
        server.serve(own, is_worker=True)
    except Exception:  # noqa: BLE001 - whatever failed, without this worker there is no cluster
        traceback.print_exc()
        server.close()
        own.apply()


def serve_from_start(raylet: int, address: Path) -> None:
    """Be the fork server at ``address`` of a raylet, a pidfd, that has no workers yet.

    Returns in workers only; ends where a worker has become the server first. Raises ``OSError``.
    """
    own = WorkerStart.of_this_process()
    if (lock := _lock(address)) is None:
        sys.exit()
    server = ForkServer(address, lock, raylet)
    for _ in preload():
        if server.forks_waiting(own):
            return
    server.serve(own, is_worker=False)


def workers_environ(environ: Mapping[str, str], raylet: int) -> dict[str, str]:
    """Return the environment of workers of a raylet with this environment and pid."""
    changed = {**environ, **SET_BY_RAYLETS, RAYLET_PID: str(raylet)}
    if changed.get(KEEPS_LD_PRELOAD) == "0":
        changed.pop(LD_PRELOAD, None)
    return changed


def main() -> NoReturn:
    """Start a worker with Ray's own program."""
    found = importlib.util.find_spec("ray")
    if found is None or found.origin is None:
        sys.exit("rkserve: Ray is not installed for the Python of this worker")
    program = Path(found.origin).parent / "_private" / "workers" / "default_worker.py"
    here = str(Path(__file__).parent)
    if sys.path[:1] == [here]:
        sys.path[0] = str(program.parent)  # as if that were the program
    if sys.argv[1:2] == [SERVES]:
        raylet, name = sys.argv[2:]
        serve_from_start(int(raylet), _address(name))
        runpy.run_path(str(program), run_name="__main__")
    else:
        start_worker(program)
    sys.exit()


if __name__ == "__main__":
    main()
