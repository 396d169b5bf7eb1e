"""The limits that an engine process sets itself before it loads a foreign library.

Each holds for the process and all of its threads, and cannot be taken back. So it is called from
the main thread, before any other begins.

Landlock (files, TCP) and seccomp (system calls) need a handful of calls, which are made with
``ctypes``: the Python packages for them are young, need a compiler, or cover one of the two.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
FATTER = 500  # added to the score by which the kernel chooses a victim; 1000 is the most
MOST = 1000
_SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 4, 22, 38  # of prctl
_FILTER = 2  # SECCOMP_MODE_FILTER


def harden() -> None:
    """Leave no core file, be the first victim where memory runs out, and gain no rights by exec.

    A core file would hold prompts and weights. The board survives the loss of its engine, and the
    node does not survive that of its raylet.
    """
    limited = _limit_core()
    try:
        wanted = min(MOST, int(OOM_SCORE_ADJ.read_text()) + FATTER)
        OOM_SCORE_ADJ.write_text(str(wanted))
    except OSError as exc:
        sys.stderr.write(f"W rkserve: {OOM_SCORE_ADJ} cannot be set: {exc.strerror}\n")
    if not limited and _is_core_piped():
        _leave_no_core()  # after the score: this gives the process's files in /proc to root
    try:
        _prctl(_SET_NO_NEW_PRIVS, 1, 0)
    except OSError as exc:
        sys.stderr.write(f"W rkserve: no_new_privs cannot be set: {exc.strerror}\n")


def _limit_core() -> bool:
    """Limit core files to 1 byte; False where the hard limit is lower.

    Not to 0: the kernel pipes a core to a program (systemd-coredump, apport) whatever the limit is,
    except for this one.
    """
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    except (OSError, ValueError):  # a hard limit of 0, as of LimitCORE=0
        return False
    return True


def _is_core_piped() -> bool:
    try:
        return CORE_PATTERN.read_bytes().startswith(b"|")
    except OSError:
        return True  # unknown


def _leave_no_core() -> None:
    try:
        _prctl(_SET_DUMPABLE, 0, 0)
        done = "this process is not dumpable instead"
    except OSError as exc:
        done = f"it cannot be made undumpable ({exc.strerror}): a core may hold prompts"
    sys.stderr.write(f"W rkserve: the core limit cannot be 1 byte; {done}\n")


class Unconfined(Exception):
    """The reason why the kernel cannot confine a process."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """The files that an engine may use beside the system's, and whether it may start programs.

    Paths that do not exist are left out; each stands for all below it. Of ``folders`` it may list
    the names of the files.
    """

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    programs: bool = False
    folders: tuple[str, ...] = ()


def confine(allowed: Confinement) -> str:
    """Confine this process, as far as the kernel can; return the means, and what is missing."""
    means: list[str] = []
    lacking: list[str] = []
    for name, apply in (("Landlock", _landlock), ("seccomp", _seccomp)):
        try:
            means.append(apply(allowed))
        except Unconfined as exc:
            lacking.append(f"no {name}: {exc}")
    return "; ".join((" and ".join(means) or "off", *lacking))


def is_whole(confined: str) -> bool:
    """Return whether a text of ``confine`` names all means."""
    return ";" not in confined


# -- Landlock -------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on all machines
_VERSION = 1  # a flag of the first
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_REMOVE_FILE, _MAKE_REG, _MAKE_DIR, _REMOVE_DIR = 1 << 5, 1 << 8, 1 << 7, 1 << 4
_REFER = 1 << 13
# The number of rights to files that each version of Landlock knows.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_ALL_RIGHTS = 16  # from version 5 on
_NETWORK, _SCOPES = 4, 6  # the versions from which it restricts TCP, and signals to others
_TCP, _SIGNALS_AND_SOCKETS = 0b11, 0b11
_OF_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV | 1
READ = _READ_FILE | _READ_DIR
WRITE = READ | _WRITE_FILE | _TRUNCATE | _REMOVE_FILE | _MAKE_REG | _MAKE_DIR | _REMOVE_DIR | _REFER
USE = READ | _WRITE_FILE | _IOCTL_DEV
# Libraries, the loader's cache, the time zone, and figures of the kernel and of this process. The
# environment of other processes is in /proc, too: root may read it in spite of Landlock.
SYSTEM = (
    *("/usr", "/lib", "/lib64", "/sys", "/etc/ld.so.cache", "/etc/ld.so.preload"),
    *("/etc/localtime", "/etc/timezone", "/etc/os-release", "/etc/alternatives"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/version", "/proc/loadavg"),
    *("/proc/uptime", "/proc/filesystems", "/proc/modules", "/proc/interrupts", "/proc/sys"),
    *("/proc/device-tree", "/proc/rknpu"),
)
OWN_FIGURES = "/proc/self"
# The NPU's driver, the buffers that it shares, and what every program has.
DEVICES = (
    *("rknpu*", "dri", "dma_heap", "mali*", "mpp_service", "rga", "ion", "iommu"),
    *("null", "zero", "full", "random", "urandom", "shm"),
)


def landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0 where it has none, or it is off."""
    version = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))
    return max(0, int(version))


def _landlock(allowed: Confinement) -> str:
    version = landlock_version()
    if version == 0:
        raise Unconfined("this kernel has it not, or not among its security modules (lsm=)")
    rights = (1 << _RIGHTS.get(version, _ALL_RIGHTS)) - 1
    restricted = struct.pack("<Q", rights)
    if version >= _NETWORK:
        restricted += struct.pack("<Q", _TCP)
    if version >= _SCOPES:
        restricted += struct.pack("<Q", _SIGNALS_AND_SOCKETS)
    ruleset = _syscall(_CREATE_RULESET, restricted, ctypes.c_size_t(len(restricted)), 0)
    try:
        for path, access in _rules(allowed):
            _allow(ruleset, path, access & rights)
        # Left open, because the kernel would forget the rule with its entry for this process.
        _allow_open(ruleset, os.open(OWN_FIGURES, os.O_PATH | os.O_CLOEXEC), READ & rights)
        _syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return f"Landlock {version}"


def _rules(allowed: Confinement) -> Iterable[tuple[str, int]]:
    for path in (*SYSTEM, *_python(), *allowed.read):
        yield path, READ | (1 if allowed.programs else 0)
    for path in allowed.write:
        yield path, WRITE
    for path in allowed.folders:
        yield path, _READ_DIR
    for pattern in DEVICES:
        for device in Path("/dev").glob(pattern):
            yield str(device), WRITE if pattern == "shm" else USE


def _python() -> tuple[str, ...]:
    """Return where this interpreter finds its modules, which the engine imports late.

    The working folder is one of these places, and may hold anything: of it rkserve alone is left.
    """
    here = ("", "/", str(Path.cwd()))
    own = str(Path(__file__).parents[2])
    return (sys.prefix, sys.base_prefix, own, *(path for path in sys.path if path not in here))


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no rule
    try:
        _allow_open(ruleset, descriptor, access)
    finally:
        os.close(descriptor)


def _allow_open(ruleset: int, descriptor: int, access: int) -> None:
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        access &= _OF_FILES
    rule = struct.pack("<Qi", access, descriptor)
    _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)


# -- seccomp --------------------------------------------------------------------------------------

# The architecture in the kernel's audit numbers, and the numbers of refused system calls: sockets
# of every kind, other processes, the kernel itself.
_MACHINES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41,
            "connect": 42,
            "accept": 43,
            "bind": 49,
            "listen": 50,
            "accept4": 288,
            "ptrace": 101,
            "kill": 62,
            "tkill": 200,
            "rt_sigqueueinfo": 129,
            "rt_tgsigqueueinfo": 297,
            "pidfd_getfd": 438,
            "kexec_file_load": 320,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "pidfd_send_signal": 424,
            "pidfd_open": 434,
            "io_uring_setup": 425,
            "bpf": 321,
            "perf_event_open": 298,
            "userfaultfd": 323,
            "keyctl": 250,
            "add_key": 248,
            "request_key": 249,
            "open_by_handle_at": 304,
            "mount": 165,
            "umount2": 166,
            "pivot_root": 155,
            "chroot": 161,
            "unshare": 272,
            "setns": 308,
            "kexec_load": 246,
            "init_module": 175,
            "finit_module": 313,
            "delete_module": 176,
            "reboot": 169,
            "swapon": 167,
            "execve": 59,
            "execveat": 322,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198,
            "connect": 203,
            "accept": 202,
            "bind": 200,
            "listen": 201,
            "accept4": 242,
            "ptrace": 117,
            "kill": 129,
            "tkill": 130,
            "rt_sigqueueinfo": 138,
            "rt_tgsigqueueinfo": 240,
            "pidfd_getfd": 438,
            "kexec_file_load": 294,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "pidfd_send_signal": 424,
            "pidfd_open": 434,
            "io_uring_setup": 425,
            "bpf": 280,
            "perf_event_open": 241,
            "userfaultfd": 282,
            "keyctl": 219,
            "add_key": 217,
            "request_key": 218,
            "open_by_handle_at": 265,
            "mount": 40,
            "umount2": 39,
            "pivot_root": 41,
            "chroot": 51,
            "unshare": 97,
            "setns": 268,
            "kexec_load": 104,
            "init_module": 105,
            "finit_module": 273,
            "delete_module": 106,
            "reboot": 142,
            "swapon": 224,
            "execve": 221,
            "execveat": 281,
        },
    ),
}
# Allowed to the own process alone, which abort() and raise() signal by it.
TO_ITSELF = {"x86_64": 234, "aarch64": 131}  # tgkill
PROGRAMS = frozenset({"execve", "execveat"})
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of BPF
# In the data of a call. Process IDs have 32 bits, in the low word on both machines.
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # the latter with EPERM
_FOREIGN = 0x40000000  # calls of the x32 interface, which have other numbers


def _seccomp(allowed: Confinement) -> str:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise Unconfined(f"the numbers of system calls on {machine} are not known")
    code = program(machine, programs=allowed.programs, own=os.getpid())
    count = len(code) // 8
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("@HxxxxxxP", count, ctypes.addressof(buffer))
    given = ctypes.create_string_buffer(head, len(head))
    try:
        _prctl(_SET_SECCOMP, _FILTER, ctypes.addressof(given))
    except OSError as exc:
        raise Unconfined(exc.strerror or "it was refused") from exc
    return "seccomp"


def program(machine: str, *, programs: bool, own: int) -> bytes:
    """Return the filter of a machine's system calls for the process ``own``; with ``programs``
    others may be started.
    """
    audit, refused = _MACHINES[machine]
    numbers = [n for name, n in refused.items() if not (programs and name in PROGRAMS)]
    last = len(numbers) + 8  # the instruction that refuses
    steps = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_EQUAL, 0, last - 2, audit),  # jumps count the instructions in between
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, last - 4, 0, _FOREIGN),
        *((_EQUAL, last - at - 1, 0, number) for at, number in enumerate(numbers, 4)),
        (_EQUAL, 0, 2, TO_ITSELF[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_EQUAL, 0, 1, own),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


# -- calls ----------------------------------------------------------------------------------------


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *args: object) -> int:
    plain = [ctypes.c_long(one) if isinstance(one, int) else one for one in args]
    result = int(_libc().syscall(ctypes.c_long(number), *plain))
    if result < 0:
        raise Unconfined(os.strerror(ctypes.get_errno()))
    return result


def _prctl(option: int, value: int, pointer: int) -> None:
    words = [ctypes.c_ulong(one) for one in (value, pointer, 0, 0)]
    if _libc().prctl(ctypes.c_int(option), *words) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
