"""Facts about a node beside its hardware: users, limits, Ray, token, wall clock, and the head."""

from __future__ import annotations

import ctypes
import email.utils
import http.client
import importlib.metadata
import ipaddress
import json
import os
import platform
import pwd
import re
import resource
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path

from rkserve.core import tls
from rkserve.doctor.facts import (
    ClockState,
    HeadAnswer,
    ProcessLimits,
    RayletEnvironment,
    TokenFile,
    UnreadSource,
    UserIdentity,
)
from rkserve.doctor.tree import Tree

ROOT_ID = 0
RAY_PORT, DASHBOARD_PORT = 6379, 8265
CONNECT_S = 3.0
UNSYNCHRONIZED = 5  # TIME_ERROR, the answer of adjtimex
KEEPERS = (
    ("run/systemd/timesync/synchronized", "systemd-timesyncd"),
    ("run/chrony/chronyd.pid", "chrony"),
    ("run/ntpd.pid", "ntpd"),
)


def user(tree: Tree, name: str | None) -> UserIdentity | None:
    """Return the user that runs Ray: ``name``, or else the caller, or the one behind sudo.

    None for another machine's tree without a name, or without that user.

    Raises:
        ValueError: this machine has no such user.
    """
    if tree.is_this_machine:
        return _own_user(name)
    if name is None:
        return None
    for row in _rows(tree, "etc/passwd", 7):
        if row[0] == name:
            gids = {int(row[3])} if row[3].isdigit() else set()
            gids |= {
                int(group[2])
                for group in _rows(tree, "etc/group", 4)
                if name in group[3].split(",")
            }
            return UserIdentity(name=name, uid=int(row[2]), gids=tuple(sorted(gids)), home=row[5])
    tree.unread.append(UnreadSource(path="/etc/passwd", reason=f"it has no user {name!r}"))
    return None


def _own_user(name: str | None) -> UserIdentity:
    """Return a user of this machine, also one that is in no file of it. Raises ``ValueError``."""
    behind = os.environ.get("SUDO_USER") if os.geteuid() == ROOT_ID else None
    try:
        found = pwd.getpwnam(name or behind or "") if name or behind else pwd.getpwuid(os.geteuid())
    except KeyError:
        if name is not None:
            raise ValueError(f"there is no user {name!r}") from None
        gids = tuple(sorted(os.getgroups()))
        return UserIdentity(name=str(os.geteuid()), uid=os.geteuid(), gids=gids, home="")
    groups = {*os.getgrouplist(found.pw_name, found.pw_gid)}
    if found.pw_uid == os.geteuid():
        groups |= {*os.getgroups()}  # those of a login before a change do not count, nor more
    return UserIdentity(
        name=found.pw_name, uid=found.pw_uid, gids=tuple(sorted(groups)), home=found.pw_dir
    )


def group_name(tree: Tree, gid: int) -> str:
    """Return the name of a group, empty if it has none."""
    rows = _rows(tree, "etc/group", 4)
    return next((row[0] for row in rows if row[2] == str(gid)), "")


def _rows(tree: Tree, path: str, columns: int) -> list[list[str]]:
    rows = [line.split(":") for line in (tree.private_text(path) or "").splitlines()]
    return [row for row in rows if len(row) == columns and row[2].isdigit()]


def limits() -> ProcessLimits:
    """Return the limits and versions of this process. Ray is looked up, and not imported."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    name, version = platform.libc_ver()
    libc = re.match(r"(\d+)\.(\d+)", version) if name == "glibc" else None
    return ProcessLimits(
        machine=platform.machine(),
        python=sys.version_info[:2],
        python_wanted=_wanted_python(),
        libc=(int(libc[1]), int(libc[2])) if libc is not None else None,
        cpus=len(os.sched_getaffinity(0)),
        open_files=None if hard == resource.RLIM_INFINITY else hard,
        ray=_installed("ray"),
        ray_wanted=_wanted_ray(),
        localhost_problem=localhost_problem(),
    )


def localhost_problem() -> str:
    """Return the reason why ``localhost`` is no loopback address here, empty where it is one."""
    try:
        listed = socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)
    except OSError as exc:
        return exc.strerror or str(exc)
    found = {str(one[4][0]) for one in listed}
    if any(ipaddress.ip_address(one).is_loopback for one in found):
        return ""
    return f"its address is {', '.join(sorted(found))}"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wanted_python() -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the bounds of ``Requires-Python`` of the installed rkserve."""
    with suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.metadata("rkserve")
        text = " ".join(found.get_all("Requires-Python") or ())
        oldest, newer = (re.search(rf"{sign}\s*3\.(\d+)", text) for sign in (">=", "<"))
        if oldest is not None and newer is not None:
            return (3, int(oldest[1])), (3, int(newer[1]))
    return None


def _wanted_ray() -> str | None:
    """Return the version of Ray that the installed rkserve requires, such as ``2.60.*``."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for one in importlib.metadata.requires("rkserve") or ():
            found = re.match(r"ray(?:\[[\w,]*\])?\s*==\s*([\w.*]+)", one)
            if found is not None:
                return found[1]
    return None


def raylet(tree: Tree) -> RayletEnvironment | None:
    """Return the environment of a running raylet, None without one."""
    for pid in tree.names("proc"):
        if not pid.isdigit() or tree.private_text(f"proc/{pid}/comm") not in ("raylet\n", "raylet"):
            continue
        environ = tree.private_text(f"proc/{pid}/environ")
        if not environ:
            return RayletEnvironment(pid=int(pid), readable=False)
        found = dict(one.partition("=")[::2] for one in environ.split("\0") if "=" in one)
        return RayletEnvironment(
            pid=int(pid),
            auth_mode=found.get("RAY_AUTH_MODE", "")[:16],
            niceness=found.get("RAY_worker_niceness", "")[:16],
            log_level=found.get("RKLLM_LOG_LEVEL", "")[:16],
        )
    return None


def token(tree: Tree, found: UserIdentity | None) -> TokenFile | None:
    """Return Ray's token file; None where no user is known, or the environment has the token."""
    here = os.environ if tree.is_this_machine else {}
    if here.get("RAY_AUTH_TOKEN") or found is None or not found.home:
        return None
    path = here.get("RAY_AUTH_TOKEN_PATH", f"{found.home}/.ray/auth_token").lstrip("/")
    try:
        mode = (tree.root / path).stat().st_mode & 0o7777
    except OSError as exc:
        tree.note(path, exc)
        return TokenFile(path=f"/{path}") if isinstance(exc, FileNotFoundError) else None
    return TokenFile(path=f"/{path}", mode=mode)


def wall_clock(skew_s: float | None) -> ClockState:
    """Return the state of this machine's clock."""
    tree = Tree(Path("/"))
    kept_by = next((name for path, name in KEEPERS if tree.exists(path)), "")
    if not kept_by and _synchronized():
        kept_by = "the kernel"
    return ClockState(year=time.gmtime().tm_year, kept_by=kept_by, skew_s=skew_s)


def _synchronized() -> bool:
    """Return whether the kernel counts the clock as synchronized, whichever service did it."""
    timex = ctypes.create_string_buffer(512)  # larger than struct timex; zeros change nothing
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    return adjtimex is not None and 0 <= adjtimex(timex) < UNSYNCHRONIZED


def head(url: str, ray_port: int = RAY_PORT) -> tuple[HeadAnswer, float | None]:
    """Return the head as seen from here, and by how much this clock is ahead of its.

    Ray's port is tried, and rkserve at ``url`` for its time. Ray's version is known where the
    dashboard listens for other hosts.

    Raises:
        ValueError: ``url`` is no URL of a host.
    """
    host = urllib.parse.urlsplit(url).hostname
    if not url.startswith(("http://", "https://")) or not host:
        raise ValueError(f"{url!r} is no URL such as http://head:8000")
    try:
        with socket.create_connection((host, ray_port), CONNECT_S):
            problem = ""
    except OSError as exc:
        problem = exc.strerror or str(exc)
    skew_s, url_problem = _skew(url)
    seen = HeadAnswer(
        address=f"{host}:{ray_port}",
        problem=problem,
        url=url,
        url_problem=url_problem,
        ray=_dashboard_version(host) if not problem else None,
    )
    return seen, skew_s


def _skew(url: str) -> tuple[float | None, str]:
    """Return by how much this clock is ahead, or why the URL does not answer."""
    try:
        health, context = f"{url.rstrip('/')}/health", tls.context_for(url)
        with urllib.request.urlopen(health, timeout=CONNECT_S, context=context) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as exc:
        date = exc.headers.get("Date")
        exc.close()
    except (OSError, ValueError, http.client.HTTPException) as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        return None, getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    try:
        return time.time() - email.utils.parsedate_to_datetime(date or "").timestamp(), ""
    except ValueError:
        return None, ""


def _dashboard_version(host: str) -> str | None:
    try:
        url = f"http://{host}:{DASHBOARD_PORT}/api/version"
        with urllib.request.urlopen(url, timeout=CONNECT_S) as answer:
            found = json.loads(answer.read(4096))
    except (OSError, ValueError, http.client.HTTPException):
        return None
    version = found.get("ray_version") if isinstance(found, dict) else None
    return version if isinstance(version, str) else None
