"""``make compat``: the suites of compat/suites against one application of simulated boards.

    python -m compat.run [suite ...]      all, or some
    python -m compat.run --url URL ...    against an application that runs already
    python -m compat.run --serve          only such an application, until Ctrl-C
    python -m compat.run --lock           pin the requirements anew
    python -m compat.run --page           only write the page, of the results as they are

Exits with 1 if a suite fails. What a suite that does not fail has said is kept in
compat/results.json, of which docs/reference/compatibility.md is written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from compat import application, judge, suite
from compat.suite import HERE, WORK, Outcome, Suite

PAGE = HERE.parent / "docs" / "reference" / "compatibility.md"
RESULTS = HERE / "results.json"
LEFT_OUT = "left_out"
OVERRIDES = "overrides.txt"  # of what is installed beforehand nothing is to be pinned


def suites() -> dict[str, Suite]:
    """All suites, in their order."""
    listed = yaml.safe_load((HERE / "suites.yaml").read_text(encoding="utf-8"))
    return {
        name: Suite(
            name,
            **{
                **given,
                "tests": tuple(given.get("tests", ())),
                "beforehand": tuple(given.get("beforehand", ())),
            },
        )
        for name, given in listed.items()
    }


def exceptions() -> tuple[dict[str, list[judge.Excepted]], dict[str, str]]:
    """The tests that need not pass by suite, and the clients that have no suite, with reasons."""
    given: dict[str, Any] = yaml.safe_load((HERE / "exceptions.yaml").read_text(encoding="utf-8"))
    left_out: dict[str, str] = given.pop(LEFT_OUT, None) or {}
    if strange := {*given, *left_out} - {*suites()} - {*left_out}:
        raise SystemExit(f"compat: exceptions.yaml names no suite: {', '.join(sorted(strange))}")
    if both := {*left_out} & {*suites()}:
        raise SystemExit(f"compat: left out, and still a suite: {', '.join(sorted(both))}")
    return (
        {
            name: [judge.Excepted(test, why) for test, why in (tests or {}).items()]
            for name, tests in given.items()
        },
        left_out,
    )


def page() -> str:
    """docs/reference/compatibility.md, of what is kept."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return judge.page(suites().values(), results, *exceptions())


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", help="names; without any all")
    parser.add_argument("--url", help="of an application that runs already")
    parser.add_argument("--serve", action="store_true", help="only serve, until Ctrl-C")
    parser.add_argument("--lock", action="store_true", help="pin the requirements anew")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("-k", dest="chosen", help="only tests of such names; keeps no results")
    given = parser.parse_args(argv)
    known = suites()
    if unknown := [name for name in given.suites if name not in known]:
        parser.error(f"no such suite: {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in given.suites or known]
    WORK.mkdir(exist_ok=True)
    if given.lock:
        lock(chosen)
    elif given.serve:
        serve()
    elif given.page:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        return _run(chosen, given.url, given.chosen)
    return 0


def lock(chosen: Sequence[Suite]) -> None:
    """Make requirements.txt of requirements.in; Node's packages are locked by npm."""
    for one in chosen:
        if one.kind == "node":
            command = ["npm", "install", "--silent", "--package-lock-only", "--no-audit"]
        else:
            command = [
                *(str(Path(sys.executable).parent / "uv"), "pip", "compile", "-q"),
                *("requirements.in", "--python-version", "3.11", "--no-header", "--no-annotate"),
                *("--no-emit-index-url", "--no-emit-find-links", "-o", "requirements.txt"),
            ]
            if (one.folder / OVERRIDES).exists():
                command += ["--override", OVERRIDES]
        subprocess.run(command, cwd=one.folder, check=True)


def serve() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        contextlib.suppress(KeyboardInterrupt),
        application.running(WORK / "application.log") as url,
    ):
        print(url, flush=True)
        signal.pause()


@contextlib.contextmanager
def _at(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with application.running(WORK / "application.log") as started:
        yield started


def _run(chosen: Sequence[Suite], url: str | None, words: str | None) -> int:
    excepted, _ = exceptions()
    failed: dict[str, list[str]] = {}
    summary: list[str] = []
    for one in chosen:
        print(f"== {one.name}: {one.client} {one.version} is installed", flush=True)
        suite.install(one)
    with _at(url) as there:
        for one in chosen:
            print(f"== {one.name}: {one.client} {one.version}", flush=True)
            result = suite.run(one, there, words)
            named = excepted.get(one.name, [])
            wrong = [] if words else judge.faults(result, named)
            summary.append(
                f"{one.name:12} {len(result.named(Outcome.PASSED)):4} passed "
                f"{len(result.outcomes) - len(result.named(Outcome.PASSED)):4} did not "
                f"{result.seconds:6.1f} s{'  FAILED' if wrong else ''}"
            )
            if wrong:
                failed[one.name] = wrong
            elif not words:
                _keep(one.name, judge.kept(one, result, named))
    if not words:
        PAGE.write_text(page(), encoding="utf-8")
    print("\n".join(["", *summary]))
    for name, wrong in failed.items():
        print(f"\n{name} failed:")
        print("\n".join(f"  {line}" for line in wrong))
    return 1 if failed else 0


def _keep(name: str, result: dict[str, Any]) -> None:
    """Write a suite's result down beside the others', in the order of the suites."""
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    before[name] = result
    ordered = {one: before[one] for one in suites() if one in before}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
