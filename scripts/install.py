"""Install the packages of a lock file with pip, and show the progress.

It runs before anything is installed, and imports nothing but the standard library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# Python compiles each module when it is first imported; most of those installed never are.
PIP = (
    "-m",
    "pip",
    "--disable-pip-version-check",
    "install",
    "--no-compile",
    "--require-hashes",
    "-r",
)
PINNED = re.compile(r"^[A-Za-z0-9][\w.-]*==", re.M)
EVERY = 10  # packages between two lines, where no terminal can be written over
KEPT = 15  # lines of pip's that are shown when it fails


def progress(lines: Iterable[str], total: int, *, over: bool) -> Iterator[str]:
    """Yield what to print for pip's lines; with ``over`` each piece overwrites the last one."""
    count = 0
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        name = re.split(r"[=\s;]", rest, maxsplit=1)[0]
        if word == "Collecting":
            count += 1
            said = f"  {count} of at most {total} packages: {name}"
        elif word == "Installing" and rest.startswith("collected"):
            said = f"  unpacking {count} packages ..."
        else:
            continue
        if over:
            yield f"\r{said:<70.70}"
        elif word == "Installing" or count % EVERY == 1:
            yield f"{said}\n"


def main(lock: str) -> int:
    """Run pip on ``lock``. Returns its exit code."""
    total = len(PINNED.findall(Path(lock).read_text(encoding="utf-8")))
    pip = subprocess.Popen(
        [sys.executable, *PIP, lock], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said: list[str] = []

    def kept() -> Iterator[str]:
        for line in pip.stdout or ():
            said.append(line)
            yield line

    terminal = sys.stdout.isatty()
    for piece in progress(kept(), total, over=terminal):
        print(piece, end="", flush=True)
    if terminal:
        print()
    if (code := pip.wait()) != 0:
        print("".join(said[-KEPT:]), file=sys.stderr)
        print(f"rkserve: pip could not install {lock}; its last lines are above.", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
