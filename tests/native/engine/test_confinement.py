"""The confinement of an engine process: a hostile library in a child, and the filter by itself."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rkserve.native.engine.confinement import (
    _MACHINES,
    PROGRAMS,
    TO_ITSELF,
    Confinement,
    is_whole,
    landlock_version,
    program,
)

pytestmark = pytest.mark.slow

ALLOW, REFUSE = 0x7FFF0000, 0x00050001
# A library that does what none for an NPU has to do; each call answers 0 or the kernel's error.
HOSTILE = """
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
static int ends(int result) { return result < 0 ? errno : 0; }
int reads(const char *path) { return ends(open(path, O_RDONLY)); }
int writes(const char *path) { return ends(open(path, O_WRONLY | O_CREAT, 0600)); }
int deletes(const char *path) { return ends(unlink(path)); }
int connects(void) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(9)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return fd < 0 ? errno : ends(connect(fd, (struct sockaddr *)&to, sizeof to));
}
int talks(void) { return ends(socket(AF_UNIX, SOCK_STREAM, 0)); }
int runs(void) { return ends(execl("/bin/true", "true", (char *)0)); }
int signals(int pid) { return ends(kill(pid, 0)); }
int signals_thread(int pid) { return ends((int)syscall(SYS_tkill, pid, SIGKILL)); }
int signals_group(int pid) { return ends((int)syscall(SYS_tgkill, pid, pid, SIGKILL)); }
int queues(int pid) {
    siginfo_t info = {.si_signo = SIGKILL, .si_code = SI_QUEUE};
    return ends((int)syscall(SYS_rt_sigqueueinfo, pid, SIGKILL, &info));
}
int queues_group(int pid) {
    siginfo_t info = {.si_signo = SIGKILL, .si_code = SI_QUEUE};
    return ends((int)syscall(SYS_rt_tgsigqueueinfo, pid, pid, SIGKILL, &info));
}
int aborts(void) { abort(); return 0; }
int traces(int pid) { return ends((int)ptrace(PTRACE_ATTACH, pid, 0, 0)); }
"""
CHILD = """
import ctypes, errno, json, os, sys, threading
from rkserve.native.engine.confinement import Confinement, confine, harden
order = json.load(sys.stdin)
library = ctypes.CDLL(order["library"])
harden()
means = confine(Confinement(tuple(order["read"]), tuple(order["write"])))
found = {}
def all_of_them():
    for name, path in order["tries"]:
        function = getattr(library, name)
        args = [path.encode()] if isinstance(path, str) else [] if path is None else [path]
        found[f"{name} {path}"] = errno.errorcode.get(function(*args), "done")
thread = threading.Thread(target=all_of_them)  # as the library is called in an engine
thread.start()
thread.join()
import decimal, numpy  # of modules that engines import late
status = open("/proc/self/status").read()
print(json.dumps({"means": means, "found": found, "status": status}))
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile.c").write_text(HOSTILE)
    library = folder / "libhostile.so"
    compiler = os.environ.get("CC") or "cc"
    flags = ("-shared", "-fPIC", "-o", str(library), str(folder / "hostile.c"))
    command = [*compiler.split(), *flags]
    subprocess.run(command, check=True)
    return library


def tried(hostile: Path, folder: Path, *tries: tuple[str, Any]) -> dict[str, Any]:
    """Return what a confined process achieved, which may read ``model`` and write ``cache``."""
    order = {
        "library": str(hostile),
        "cpu": False,
        "read": [str(folder / "model")],
        "write": [str(folder / "cache")],
        "tries": tries,
    }
    done = subprocess.run(
        (sys.executable, "-c", CHILD),
        input=json.dumps(order),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder / "cwd",
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_hostile_library_ends_no_other_process_and_its_own_by_abort(
    hostile: Path, tmp_path: Path
) -> None:
    (tmp_path / "cwd").mkdir()
    with subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE) as other:
        ways = ("signals_thread", "signals_group", "queues", "queues_group")
        found = tried(hostile, tmp_path, *((name, other.pid) for name in ways))["found"]
        assert [found[f"{name} {other.pid}"] for name in ways] == ["EPERM"] * len(ways)
        other.communicate(b"\n")
        assert other.returncode == 0
    with pytest.raises(subprocess.CalledProcessError) as failed:
        tried(hostile, tmp_path, ("aborts", None))
    assert failed.value.returncode == -signal.SIGABRT


HARDENED = """
import ctypes, sys
from pathlib import Path
from rkserve.native.engine import confinement
def refuse(*_):
    raise ValueError("not allowed to raise maximum limit")
confinement.resource.setrlimit = refuse  # as for a process that is not root's, whose limit is 0
confinement.CORE_PATTERN = Path(sys.argv[1])
confinement.harden()
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), "NoNewPrivs:\t1" in open("/proc/self/status").read())
"""


@pytest.mark.parametrize(
    ("pattern", "dumpable"), [("|/lib/systemd/systemd-coredump %P", "0"), ("core", "1")]
)
def test_a_process_whose_core_limit_is_fixed_starts_and_leaves_no_core(
    tmp_path: Path, pattern: str, dumpable: str
) -> None:
    (file := tmp_path / "core_pattern").write_text(pattern)
    done = subprocess.run(
        (sys.executable, "-c", HARDENED, str(file)), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [dumpable, "True"]
    assert done.stderr.count("core limit cannot be 1 byte") == (dumpable == "0")


def test_a_hostile_library_reaches_no_file_no_network_and_no_process(
    hostile: Path, tmp_path: Path
) -> None:
    for name in ("model", "cache", "cwd", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    refused: list[tuple[str, Any]] = [
        ("connects", None),
        ("talks", None),
        ("runs", None),
        ("signals", os.getpid()),
        ("traces", os.getpid()),
    ]
    files: list[tuple[str, Any]] = [
        ("reads", "/etc/shadow"),
        ("reads", str(tmp_path / "other" / "file")),
        ("reads", str(tmp_path / "cwd" / "file")),
        ("reads", f"/proc/{os.getpid()}/environ"),
        ("writes", str(tmp_path / "model" / "file")),
        ("writes", str(tmp_path / "new")),
        ("writes", "/tmp/rkserve-of-an-engine"),
        ("deletes", str(tmp_path / "model" / "file")),
    ]
    allowed: list[tuple[str, Any]] = [
        ("reads", str(tmp_path / "model" / "file")),
        ("reads", "/proc/self/maps"),
        ("reads", "/proc/meminfo"),
        ("reads", "/dev/urandom"),
        ("writes", str(tmp_path / "cache" / "new")),
        ("deletes", str(tmp_path / "cache" / "file")),
    ]
    result = tried(hostile, tmp_path, *refused, *files, *allowed)
    found = result["found"]
    assert [found[f"{name} {path}"] for name, path in refused] == ["EPERM"] * len(refused)
    assert [found[f"{name} {path}"] for name, path in allowed] == ["done"] * len(allowed)
    if landlock_version():
        assert is_whole(result["means"])
        assert [found[f"{name} {path}"] for name, path in files] == ["EACCES"] * len(files)
    else:
        assert result["means"].startswith("seccomp; no Landlock: ")
    assert "NoNewPrivs:\t1" in result["status"]
    assert "Seccomp:\t2" in result["status"]


def filtered(code: bytes, machine: int, number: int, argument: int = 0) -> int:
    """Run the filter as the kernel does."""
    steps = [struct.unpack_from("<HBBI", code, at) for at in range(0, len(code), 8)]
    value = at = 0
    while True:
        kind, yes, no, operand = steps[at]
        at += 1
        if kind == 0x20:
            value = {0: number, 4: machine, 16: argument}[operand]
        elif kind == 0x06:
            return int(operand)
        else:
            at += yes if (value == operand if kind == 0x15 else value >= operand) else no


@pytest.mark.parametrize("programs", [False, True])
@pytest.mark.parametrize("machine", sorted(_MACHINES))
def test_the_filter_refuses_its_calls_and_no_other(machine: str, programs: bool) -> None:
    audit, numbers = _MACHINES[machine]
    code = program(machine, programs=programs, own=4321)
    refused = {n for name, n in numbers.items() if not (programs and name in PROGRAMS)}
    refused.add(TO_ITSELF[machine])
    assert filtered(code, audit, TO_ITSELF[machine], 4321) == ALLOW
    assert filtered(code, audit, TO_ITSELF[machine], 4322) == REFUSE
    for number in range(600):
        expected = REFUSE if number in refused else ALLOW
        assert filtered(code, audit, number) == expected, number
    assert filtered(code, audit, 0x40000000 + 1) == REFUSE, "the numbers of another interface"
    assert filtered(code, audit ^ 1, 0) == REFUSE, "another machine's numbers"


def test_both_machines_refuse_the_same_calls() -> None:
    one, other = (frozenset(numbers) for _, numbers in _MACHINES.values())
    assert one == other


def test_means_that_lack_something_are_not_whole() -> None:
    assert is_whole("Landlock 4 and seccomp")
    assert not is_whole("seccomp; no Landlock: this kernel has it not")
    assert Confinement() == Confinement((), (), programs=False)
