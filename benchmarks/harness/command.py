"""The frame of a benchmark's command: its options for output, its progress, and how it ends."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rkserve.config.serve_config import PROJECT
from rkserve.core.errors import RkserveError

REPORTS = PROJECT / "docs" / "benchmarks"
FAILED, INTERRUPTED = 1, 130  # exit codes


class ProgressLine:
    """Progress on stderr: a line per case, rewritten in place on a terminal.

    ``title`` is that of the latest case.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self.title = ""

    def begin(self, title: str) -> None:
        """Begin the line of a case."""
        self.title = title
        if not self._terminal:
            sys.stderr.write(f"{title}\n")
            sys.stderr.flush()

    def note(self, text: str) -> None:
        """Show the state of the case."""
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{self.title}: {text}")
            sys.stderr.flush()

    def end(self, text: str) -> None:
        """End the line with the result."""
        sys.stderr.write(f"\r\x1b[K{self.title}: {text}\n" if self._terminal else f"  {text}\n")
        sys.stderr.flush()


def add_outputs(parser: argparse.ArgumentParser, report: Path) -> None:
    """Add ``--output`` and ``--json``."""
    parser.add_argument(
        "--output",
        type=Path,
        help=f"where the report goes; a full run writes docs/benchmarks/{report.name}, "
        "others only print it",
    )
    parser.add_argument("--json", type=Path, help="where all measurements go, as JSON")


def run(work: Callable[[Path], None]) -> int:
    """Do the work in a temporary folder; return the exit code. A missed target is no failure.

    Ctrl-C and an ordinary kill end the work in the same way, with everything that it started.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        with _folder() as folder:
            work(folder)
    except RkserveError as exc:
        sys.stderr.write(f"\nThe benchmark failed: {exc}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return INTERRUPTED
    return 0


def deliver(text: str, figures: object, output: Path | None, as_json: Path | None) -> None:
    """Print a report, and write it and its figures to the files that were asked for."""
    sys.stdout.write(text)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if as_json is not None:
        as_json.write_text(json.dumps(_plain(figures), indent=1), encoding="utf-8")


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rkbench-"))  # short: sockets' paths have a limit
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # impatience must not leave the cluster behind
    raise KeyboardInterrupt


def _plain(value: object) -> object:
    """Return a value with names of one string, as JSON has them."""
    if isinstance(value, dict):
        return {_name(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _name(key: object) -> str:
    return " ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)
