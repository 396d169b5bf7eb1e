"""Compile the simulated runtime: one source tree, one library per release.

``python -m rkserve.native.sim.build`` builds every release and prints the paths. CC and
XDG_CACHE_HOME are read from the environment.

A library contains the hash of its sources, by which a stale one is recognized, and is replaced by a
rename: concurrent builds, and processes that have the old file mapped, are safe.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from rkserve.core.errors import LibraryMissing
from rkserve.core.run_params import SimulatedRelease
from rkserve.native.sim import profiles

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
DECLARATIONS = HERE.parent / "decl"
BESIDE = HERE / "build"


def _number(release: str) -> int:
    """Return a release as RKSIM_RELEASE has it: 10203 for 1.2.3."""
    major, minor, patch = map(int, release.split("."))
    return (major * 100 + minor) * 100 + patch


RELEASES = {release: _number(release) for release in get_args(SimulatedRelease)}
ENCODER_SOURCES = HERE / "rknn"
ENCODER_NAME = "librknnrt-sim-2.3.2.so"

FLAGS = (
    *("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra"),
)
LINK_FLAGS = ("-shared", "-lm")
COMPILERS = ("gcc", "cc", "clang")
SANITIZE_FLAGS = ("-fno-omit-frame-pointer", "-O1", "-fno-sanitize-recover=all")


def compiler() -> list[str]:
    """Return $CC with its options, or the first of gcc, cc and clang that is installed.

    Raises:
        LibraryMissing: no compiler, or the one in CC, is installed.
    """
    setting = os.environ.get("CC", "")
    try:
        chosen = shlex.split(setting)
    except ValueError as exc:
        raise LibraryMissing(f"CC is not a command line: {setting} ({exc}). Unset it.") from exc
    if chosen:
        if shutil.which(chosen[0]):
            return chosen
        raise LibraryMissing(
            f"the compiler in CC, {chosen[0]!r}, is not installed; install it, or unset CC."
        )
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise LibraryMissing(
        f"the simulated board has to be compiled, and none of {', '.join(COMPILERS)} was found: "
        "install gcc (on Debian and Ubuntu: apt install gcc libc6-dev), or set CC."
    )


def source_files() -> list[Path]:
    """Return all sources of the libraries."""
    return [
        *sorted(SOURCES.glob("*.[ch]")),
        *sorted(ENCODER_SOURCES.glob("*.c")),
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


def output_dir(beside: Path = BESIDE) -> Path:
    """Return the folder beside the sources, or the user's cache if that is read-only.

    Raises:
        LibraryMissing: neither is writable.
    """
    if _is_writable(beside):
        return beside
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as exc:  # no HOME, and a user id without an account
        raise LibraryMissing(f"{beside} cannot be written, and {exc} Set XDG_CACHE_HOME.") from exc
    cache = cache / "rkserve" / "sim"
    if _is_writable(cache):
        return cache
    raise LibraryMissing(
        f"neither {beside} nor {cache} can be written, so there is no place for the simulated "
        "board's library; set XDG_CACHE_HOME to a folder that can."
    )


def _is_writable(folder: Path) -> bool:
    """Try to write: permission bits do not apply to root or to a read-only file system."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
            return True
    except OSError:
        return False  # such as a read-only installation, which uses the cache


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
    """Return compiler, flags and sources, without the output."""
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
    """Return the simulated runtime of `release`, compiled now if it is missing or stale.

    `sanitize` is a value of -fsanitize=, such as "address,undefined"; `into` replaces the default
    folder.

    Raises:
        LibraryMissing: unknown release, no compiler, or a compiler error.
    """
    if release not in RELEASES:
        known = ", ".join(RELEASES)
        raise LibraryMissing(f"unknown simulated runtime {release!r}; known are {known}.")
    return _built(
        library_name(release, sanitize),
        into,
        lambda stamp, work: compile_command(release, sanitize, stamp, work),
    )


def ensure_encoder_built(*, into: Path | None = None) -> Path:
    """Return the simulated runtime of image encoders, compiled now if it is missing or stale.

    Raises:
        LibraryMissing: no compiler, or a compiler error.
    """
    return _built(
        ENCODER_NAME,
        into,
        lambda stamp, _: [
            *compiler(),
            *FLAGS,
            f'-DRKSIM_SOURCE_HASH="{stamp}"',
            f"-I{DECLARATIONS}",
            *(str(path) for path in sorted(ENCODER_SOURCES.glob("*.c"))),
        ],
    )


def _built(name: str, into: Path | None, command_of: Callable[[str, Path], list[str]]) -> Path:
    """Return a built library; ``command_of`` gets the source hash and a folder for headers."""
    stamp = source_hash()
    library = (into or BESIDE) / name
    if is_current(library, stamp):  # also in a read-only folder
        return library
    library = (into or output_dir()) / name
    if is_current(library, stamp):
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=library.parent) as scratch:
        work = Path(scratch)
        (work / "profiles_generated.h").write_text(profiles_header())
        command = command_of(stamp, work)
        fresh = work / library.name
        done = subprocess.run(
            [*command, *LINK_FLAGS, "-o", str(fresh)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise LibraryMissing(
                f"Compiling the simulated runtime {name} with {command[0]} failed:\n"
                f"{done.stderr.strip()}"
            )
        fresh.replace(library)
    return library


def main(argv: Sequence[str] | None = None) -> None:
    """Build stale libraries, or print the compiler; an error is one sentence and exit code 1."""
    parser = argparse.ArgumentParser(
        prog="python -m rkserve.native.sim.build",
        description="Compile the simulated runtime where it is stale, and print where it is.",
    )
    parser.add_argument("--into", type=Path, help="a folder other than the usual one")
    parser.add_argument("--compiler", action="store_true", help="only say which compiler it takes")
    given = parser.parse_args(argv)
    try:
        if given.compiler:
            sys.stdout.write(f"{shlex.join(compiler())}\n")
            return
        for release in RELEASES:
            sys.stdout.write(f"{ensure_built(release, into=given.into)}\n")
        sys.stdout.write(f"{ensure_encoder_built(into=given.into)}\n")
    except (LibraryMissing, OSError) as exc:
        sys.exit(f"rkserve: {exc}")


if __name__ == "__main__":
    main()
