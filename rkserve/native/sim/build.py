"""Compile the simulated runtime: one source tree, one library per release.

It knows the compiler, the sources and where the result goes. It refuses to know what the library
does, and never loads it. `python -m rkserve.native.sim.build` builds every release and prints
where.

A library carries the hash of what it was made from, so "is it stale" is a look into the file, and
replacing it is one rename: builders that run at the same time cannot harm each other, and neither
can they harm a process that has the old file mapped.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rkserve.errors import LibraryMissing
from rkserve.native.sim import profiles

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
DECLARATIONS = HERE.parent / "decl"
RELEASES = {"1.2.3": 10203, "1.3.0": 10300}

FLAGS = (
    *("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra"),
)
LINK_FLAGS = ("-shared", "-lm")
SANITIZE_FLAGS = ("-fno-omit-frame-pointer", "-O1", "-fno-sanitize-recover=all")


def compiler() -> list[str]:
    """$CC, or the first of gcc, cc and clang that is installed."""
    if chosen := shlex.split(os.environ.get("CC", "")):
        if shutil.which(chosen[0]):
            return chosen
        raise LibraryMissing(f"The compiler in CC, {chosen[0]!r}, is not installed.")
    for name in ("gcc", "cc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise LibraryMissing(
        "The simulated runtime has to be compiled, and there is no C compiler: install gcc, "
        "or set CC."
    )


def source_files() -> list[Path]:
    """Everything that the library is made from."""
    return [
        *sorted(SOURCES.glob("*.[ch]")),
        *sorted(DECLARATIONS.glob("*.h")),
        profiles.PROFILES,
        Path(__file__).resolve(),
    ]


def source_hash() -> str:
    digest = hashlib.sha256()
    for path in source_files():
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def library_name(release: str, sanitize: str | None) -> str:
    suffix = "-" + re.sub(r"\W+", "-", sanitize) if sanitize else ""
    return f"librkllmrt-sim-{release}{suffix}.so"


def output_dir() -> Path:
    """Beside the sources in a checkout; in the user's cache when that cannot be written."""
    beside = HERE / "build"
    try:
        beside.mkdir(exist_ok=True)
        if os.access(beside, os.W_OK):
            return beside
    except OSError:
        pass  # a read-only installation is a normal case, and the cache is the answer to it
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rkserve" / "sim"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def is_current(library: Path, stamp: str) -> bool:
    return library.is_file() and f"rksim-source:{stamp};".encode() in library.read_bytes()


def profiles_header() -> str:
    rows = (
        f'    {{"{p.name}", "{p.platform}", {p.a!r}, {p.b!r}, {p.c!r}, {p.d0!r}, {p.k!r}, '
        f"{p.window}, {p.memory_mb!r}}},\n"
        for p in profiles.load()
    )
    return f"static const struct profile PROFILES[] = {{\n{''.join(rows)}}};\n"


def compile_command(release: str, sanitize: str | None, stamp: str, include: Path) -> list[str]:
    """Flags and sources, without what to do with them."""
    instrument = (f"-fsanitize={sanitize}", *SANITIZE_FLAGS) if sanitize else ()
    return [
        *compiler(),
        *FLAGS,
        *instrument,
        f"-DRKSIM_RELEASE={RELEASES[release]}",
        f'-DRKSIM_SOURCE_HASH="{stamp}"',
        *(f"-I{path}" for path in (SOURCES, DECLARATIONS, include)),
        *(str(path) for path in sorted(SOURCES.glob("*.c"))),
    ]


def ensure_built(release: str, *, sanitize: str | None = None, into: Path | None = None) -> Path:
    """The simulated runtime of `release`, compiled now if it is missing or stale.

    `sanitize` is a value of -fsanitize=, such as "address,undefined"; `into` is another folder than
    the usual one.

    Raises:
        LibraryMissing: no such release, no compiler, or it failed; the message says which.
    """
    if release not in RELEASES:
        known = ", ".join(RELEASES)
        raise LibraryMissing(f"There is no simulated runtime {release!r}; there are {known}.")
    stamp = source_hash()
    library = (into or output_dir()) / library_name(release, sanitize)
    if is_current(library, stamp):
        return library
    with tempfile.TemporaryDirectory(prefix=".building-", dir=library.parent) as scratch:
        work = Path(scratch)
        (work / "profiles_generated.h").write_text(profiles_header())
        command = compile_command(release, sanitize, stamp, work)
        fresh = work / library.name
        done = subprocess.run(
            [*command, *LINK_FLAGS, "-o", str(fresh)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise LibraryMissing(
                f"Compiling the simulated runtime {release} with {command[0]} failed:\n"
                f"{done.stderr.strip()}"
            )
        fresh.replace(library)
    return library


if __name__ == "__main__":
    for name in RELEASES:
        sys.stdout.write(f"{ensure_built(name)}\n")
