"""Runs the binding's tests with libraries that notice wrong memory: ASan and UBSan under CPython.

Python's own objects come from malloc here, so that what the binding lets go of too early is seen
too, and not only what C does. Arguments go to pytest; without any, all tests of the binding run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/native/binding/test_runtime.py",
    "tests/native/binding/test_runtime_api.py",
    "tests/native/binding/test_runtime_sim.py",
    "tests/native/binding/test_runtime_sim_more.py",
    "tests/native/binding/test_pause_history.py",
)
# CPython frees little at its end; and some tests want a process to die as it would without ASan.
OPTIONS = "detect_leaks=0:handle_segv=0:handle_abort=0"


def runtime_library() -> str:
    """The sanitizer's own library, which has to be in the process before all others."""
    asked = ["gcc", "-print-file-name=libasan.so"]
    found = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    if not found.is_file():
        sys.exit("libasan.so is not installed (on Debian and Ubuntu: apt install libasan8)")
    return str(found.resolve())


def main() -> int:
    """Run pytest; returns its exit code."""
    environ = {
        **os.environ,
        "LD_PRELOAD": runtime_library(),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": OPTIONS,
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "RKSERVE_SANITIZE": "address,undefined",
    }
    # No capture of file descriptors: what a sanitizer says as it ends the process must be seen.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys"]
    return subprocess.run(
        [*command, *(sys.argv[1:] or TESTS)], cwd=ROOT, env=environ, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
