"""An arm64 Debian under emulation: rkserve as on a board, the simulator, and their tests.

Builds a root file system with mmdebstrap, fetches the locked wheels for aarch64 on this machine,
installs them in the root without a network, as docs/how-to/boards.md does from an offline folder,
and runs each test file of the native, board and engine rooms under qemu-user with a time limit. It
needs root's rights, Linux on another architecture, and Debian's packages mmdebstrap,
qemu-user-static and binfmt-support.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).resolve().parents[1]
# The Python of each Debian release; all of the lock's wheels exist for them on aarch64.
PYTHON_OF = {"bookworm": "3.11.2", "trixie": "3.13.5"}
PACKAGES = "python3,python3-venv,python3-dev,gcc,libc6-dev,libgomp1,make,procps,ca-certificates"
# From the oldest glibc that the lock needs (llguidance) to the first one that wheels name.
GLIBC = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_31")
TESTS = ("tests/native", "tests/board", "tests/local")
VENV, SOURCE, WHEELS, RESULTS = "/opt/rkserve/venv", "/opt/src", "/opt/wheels", "/opt/results"
TOOLS = ("mmdebstrap", "qemu-aarch64-static", "unshare", "chroot")
ELF_MACHINE_AT, EM_AARCH64 = 18, 183  # of an ELF header
CPU = "cortex-a76"  # the big cores of RK3588; the wheels need no less than the lock says


@dataclass
class FileResult:
    """The tests of one file under emulation; ``seconds`` is wall-clock time."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    cut: bool = False  # the time limit ended it
    failures: list[str] = field(default_factory=list)


@dataclass
class Report:
    """Everything that one run found. Sizes are in MiB, times in seconds."""

    suite: str
    python: str = ""
    download_mib: float = 0.0
    installed_mib: float = 0.0
    install_s: float = 0.0
    files: list[FileResult] = field(default_factory=list)
    up: str = "not tried"


class EmulatedRoot:
    """A root file system whose programs qemu-user runs.

    Each command gets mount and process namespaces of its own, so that no process is left when
    it ends.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, inside: str) -> Path:
        """Return where a path of the root lies on this machine."""
        return self.folder / inside.lstrip("/")

    def build(self, suite: str, mirror: str | None) -> None:
        """Install Debian, unless it is there."""
        if self.path("/usr/bin/python3").exists():
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        made = self.folder.with_name("root.part")
        shutil.rmtree(made, ignore_errors=True)
        command = [
            "mmdebstrap",
            "--architectures=arm64",
            "--variant=minbase",
            f"--include={PACKAGES}",
        ]
        run([*command, suite, str(made), *([mirror] if mirror else [])])
        made.rename(self.folder)

    def command(self, words: Sequence[str], cwd: str = "/") -> list[str]:
        """Return the command that runs ``words`` in the root."""
        mounts = (
            'mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && '
            'mount -t sysfs sysfs "$1/sys" && mount -t tmpfs tmpfs "$1/tmp" && '
            'root=$1 cwd=$2 && shift 2 && exec chroot "$root" /usr/bin/env -i '
            f'-C "$cwd" HOME=/root LC_ALL=C.UTF-8 QEMU_CPU={CPU} '
            f'PATH={VENV}/bin:/usr/sbin:/usr/bin "$@"'
        )
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return [*spaces, "sh", "-c", mounts, "sh", str(self.folder), cwd, *words]

    def run(self, *words: str, cwd: str = "/") -> None:
        """Run a command in the root. Raises ``SystemExit`` where it fails."""
        run(self.command(words, cwd))


def run(words: Sequence[str]) -> None:
    """Run a command. Raises ``SystemExit`` where it fails."""
    code = subprocess.run(words, check=False).returncode
    if code:
        sys.exit(f"{' '.join(words[:6])} ...: exit code {code}")


def check_tools() -> None:
    """Raise ``SystemExit`` with the command that installs a missing tool."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        sys.exit(
            f"{', '.join(missing)} not found: apt-get install mmdebstrap qemu-user-static "
            "binfmt-support arch-test"
        )
    if os.geteuid():
        sys.exit("The root file system is made with root's rights: run this with sudo.")


def enable_emulation() -> None:
    """Let the kernel run arm64 programs by qemu. Raises ``SystemExit`` where it cannot."""
    folder = Path("/proc/sys/fs/binfmt_misc")
    if not (folder / "register").exists():
        run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(folder)])
    if not (folder / "qemu-aarch64").exists():
        run(["update-binfmts", "--enable", "qemu-aarch64"])
    if not (folder / "qemu-aarch64").exists():
        sys.exit("The kernel has no handler for arm64 programs: update-binfmts --display says why.")


def download(wheels: Path, python: str) -> float:
    """Fetch the lock's wheels for aarch64, and build rkserve's own; return their size in MiB."""
    wheels.mkdir(parents=True, exist_ok=True)
    short = "".join(python.split(".")[:2])
    lock = wheels.with_name("aarch64.lock")
    lock.write_text(locked(ROOT / "requirements-dev.lock", python))
    platforms = [f"manylinux_{glibc}_aarch64" for glibc in GLIBC] + ["manylinux2014_aarch64"]
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    run(
        [
            *pip, "download", "--only-binary=:all:", "--no-deps", "--require-hashes",
            "--python-version", python, "--implementation", "cp",
            *(word for abi in (f"cp{short}", "abi3", "none") for word in ("--abi", abi)),
            *(word for one in platforms for word in ("--platform", one)),
            "-r", str(lock), "-d", str(wheels),
        ]
    )  # fmt: skip
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT)])
    return mib(wheels)


def locked(lock: Path, python: str) -> str:
    """Return the lock's packages for that Python on aarch64, without markers.

    pip evaluates markers for the Python that runs it, also where it downloads for another one.
    """
    target = {
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
        "platform_machine": "aarch64",
        "sys_platform": "linux",
    }
    found, keeps = [], True
    for line in lock.read_text().splitlines():
        pinned = re.match(r"(\S+==\S+)(?: ; (.*?))? \\$", line)
        if pinned is not None:
            keeps = pinned[2] is None or Marker(pinned[2]).evaluate(target)
        if keeps:
            found.append(line if pinned is None else f"{pinned[1]} \\")
    return "\n".join(found) + "\n"


def mib(folder: Path) -> float:
    """Return the size of a folder's files in MiB."""
    found = (path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())
    return round(sum(found) / 2**20, 1)


def copy_sources(root: EmulatedRoot) -> None:
    """Copy the files of the checkout that git knows."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    target = root.path(SOURCE)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in filter(None, names.split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def install(root: EmulatedRoot, lock: str) -> None:
    """Install a lock's packages from the offline folder, and rkserve's wheel."""
    pip = (f"{VENV}/bin/python", "-m", "pip", "-q", "--disable-pip-version-check", "install")
    root.run(*pip, "--no-index", "--find-links", WHEELS, "--require-hashes", "-r", lock, cwd=SOURCE)
    root.run(*pip, "--no-index", "--find-links", WHEELS, "--no-deps", "rkserve")


def check_simulator(root: EmulatedRoot) -> None:
    """Compile the simulated library. Raises ``SystemExit`` where it is not for aarch64."""
    root.run(f"{VENV}/bin/python", "-m", "rkserve.native.sim.build", cwd=SOURCE)
    built = sorted(root.path(f"{SOURCE}/rkserve/native/sim/build").rglob("librkllmrt*.so"))
    for library in built:
        header = library.read_bytes()[:64]
        machine = int.from_bytes(header[ELF_MACHINE_AT : ELF_MACHINE_AT + 2], "little")
        if machine != EM_AARCH64:
            sys.exit(f"{library} is not for aarch64: e_machine is {machine}")
    if not built:
        sys.exit("The simulated library was not built.")


def files_of(chosen: Sequence[str]) -> Iterator[str]:
    """Yield the test files below folders, or those named."""
    for name in chosen:
        path = ROOT / name
        found = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        yield from (str(one.relative_to(ROOT)) for one in found)


def run_file(root: EmulatedRoot, name: str, limit_s: float) -> FileResult:
    """Run the tests of a file that need no Ray, and count them from pytest's own report."""
    result = FileResult(name)
    xml = f"{RESULTS}/{name.replace('/', '.')}.xml"
    root.path(xml).unlink(missing_ok=True)
    pytest = (f"{VENV}/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0")
    words = (*pytest, "-m", "not ray", f"--junitxml={xml}", name)
    began_s = time.monotonic()
    log = root.path(xml).with_suffix(".log")
    with log.open("w") as out:
        try:
            subprocess.run(
                root.command(words, SOURCE), stdout=out, stderr=out, check=False, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            result.cut = True
    result.seconds = round(time.monotonic() - began_s, 1)
    if not root.path(xml).exists():
        result.failures = [] if result.cut else [f"no report: {log.read_text()[-500:]}"]
        result.failed = 0 if result.cut else 1
        return result
    for case in ET.parse(root.path(xml)).iter("testcase"):  # noqa: S314 - pytest wrote it
        bad = case.find("failure") is not None or case.find("error") is not None
        if bad:
            result.failures.append(f"{case.get('classname')}::{case.get('name')}")
        result.failed += bad
        result.skipped += case.find("skipped") is not None
        result.passed += not bad and case.find("skipped") is None
    return result


def try_up(root: EmulatedRoot, limit_s: float) -> str:
    """Start one simulated board by ``rkserve up``, and return how far it came.

    A raylet ends itself where its agent needs more than 15 s to start, which emulation may take.
    """
    words = (f"{VENV}/bin/rkserve", "up", "--detach", f"{SOURCE}/serve_config.yaml")
    done = subprocess.Popen(
        root.command(words, SOURCE), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed, _ = done.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        done.kill()
        printed, _ = done.communicate()
        return f"no answer within {limit_s:.0f} s: {printed.strip()[-300:]}"
    return f"exit code {done.returncode}: {printed.strip()[-300:]}"


def render(report: Report) -> str:
    """Return the report as text for a terminal."""
    lines = [
        f"Debian {report.suite}, Python {report.python}, arm64 by qemu-user ({CPU})",
        f"wheels {report.download_mib} MiB, installed {report.installed_mib} MiB in "
        f"{report.install_s} s, without a network",
    ]
    for one in report.files:
        cut = " (cut by the time limit)" if one.cut else ""
        lines.append(
            f"{one.passed:5} passed {one.failed:3} failed {one.seconds:7.1f} s  {one.name}{cut}"
        )
        lines += [f"        {name}" for name in one.failures]
    whole = [one for one in report.files if not one.cut]
    lines.append(
        f"{sum(one.passed for one in report.files)} passed, "
        f"{sum(one.failed for one in report.files)} failed, "
        f"{sum(one.skipped for one in report.files)} skipped; {len(whole)} of {len(report.files)} "
        "files to their end"
    )
    lines.append(f"rkserve up: {report.up}")
    return "\n".join(lines)


def main() -> int:
    """Do all steps; returns 1 where a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tests", nargs="*", default=TESTS, help="test files or folders")
    parser.add_argument("--folder", type=Path, default=ROOT / ".aarch64", help="of the root")
    parser.add_argument("--suite", choices=sorted(PYTHON_OF), default="bookworm")
    parser.add_argument("--mirror", help="Debian's mirror, where the default is not reached")
    parser.add_argument("--file-limit", type=float, default=600.0, help="seconds for a test file")
    parser.add_argument(
        "--up", type=float, default=0.0, help="seconds to try rkserve up; 0 does not"
    )
    given = parser.parse_args()
    check_tools()
    enable_emulation()
    folder = given.folder / given.suite
    root, report = EmulatedRoot(folder / "root"), Report(given.suite, PYTHON_OF[given.suite])
    root.build(given.suite, given.mirror)
    report.download_mib = download(folder / "wheels", report.python)
    for inside in (WHEELS, RESULTS):
        root.path(inside).mkdir(parents=True, exist_ok=True)
    for wheel in (folder / "wheels").iterdir():
        shutil.copy2(wheel, root.path(WHEELS))
    copy_sources(root)
    began_s = time.monotonic()
    root.run("python3", "-m", "venv", VENV)
    install(root, "requirements.lock")
    report.install_s = round(time.monotonic() - began_s, 1)
    report.installed_mib = mib(root.path(VENV))
    root.run("rkserve", "--version")
    install(root, "requirements-dev.lock")
    check_simulator(root)
    for name in files_of(given.tests):
        report.files.append(run_file(root, name, given.file_limit))
        print(render(report).splitlines()[-3 - len(report.files[-1].failures)], flush=True)
    if given.up:
        report.up = try_up(root, given.up)
    print(render(report))
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=1))
    return int(any(one.failed for one in report.files))


if __name__ == "__main__":
    sys.exit(main())
