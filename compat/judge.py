"""The verdict on outcomes, and the page that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from compat.suite import Outcome, Result, Suite

HEAD = """\
# Compatibility

<!-- Written by `make compat` from its results and compat/exceptions.yaml. Do not edit. -->

Programs that others wrote, as they are released, with rkserve: an application of simulated boards
(`sim-chat`, `sim-embed` and `sim-vision`, see [simulator.md](simulator.md)), and one suite of tests
for each client. `make compat` runs them all, `make compat SUITES="openai-2 llm"` some; neither is
part of `make test`. A client that heeds the proxies of its environment reaches nothing but the
application: they lead nowhere. A test that does not pass is an exception and stands below with its
reason; an exception that passes, or that names no test, makes the run fail, as any other
test does that does not pass.
"""


@dataclass(frozen=True)
class Excepted:
    """Tests that need not pass, and why."""

    test: str  # a name; with a * at its end all that begin so
    reason: str

    def covers(self, name: str) -> bool:
        """Return whether the exception is for this test."""
        if self.test.endswith("*"):
            return name.startswith(self.test[:-1])
        return name == self.test


@dataclass(frozen=True)
class Kept:
    """A suite's row of the page."""

    version: str
    passed: int
    excepted: dict[str, int]  # how many tests by the exception's test


def faults(result: Result, exceptions: Iterable[Excepted]) -> list[str]:
    """Everything that makes a suite fail, in words."""
    found = [result.trouble] if result.trouble else []
    exceptions = list(exceptions)
    for name, outcome in result.outcomes.items():
        covered = any(one.covers(name) for one in exceptions)
        if covered and outcome is Outcome.PASSED:
            found.append(f"{name} passes, and is an exception")
        elif not covered and outcome is not Outcome.PASSED:
            found.append(f"{name} {outcome.value}")
    for one in exceptions:
        if not any(one.covers(name) for name in result.outcomes):
            found.append(f"the exception {one.test} names no test")
    return found


def kept(suite: Suite, result: Result, exceptions: Iterable[Excepted]) -> dict[str, Any]:
    """The part of a result that is written down."""
    counts = {one.test: sum(map(one.covers, result.outcomes)) for one in exceptions}
    return asdict(Kept(suite.version, len(result.named(Outcome.PASSED)), counts))


def page(
    suites: Iterable[Suite],
    results: Mapping[str, Mapping[str, Any]],
    exceptions: Mapping[str, list[Excepted]],
    left_out: Mapping[str, str],
) -> str:
    """docs/reference/compatibility.md."""
    lines = [
        HEAD,
        "| suite | client | version | passed | exceptions |",
        "| --- | --- | --- | --- | --- |",
    ]
    suites = list(suites)
    total = excepted = 0
    for suite in suites:
        if (result := results.get(suite.name)) is None:
            lines.append(f"| `{suite.name}` | {suite.client} | {suite.version} | not run yet | |")
            continue
        count = sum(result["excepted"].values())
        total, excepted = total + result["passed"], excepted + count
        lines.append(
            f"| `{suite.name}` | {suite.client} | {result['version']} | {result['passed']} "
            f"| {count or ''} |"
        )
    lines += [f"| all | | | {total} | {excepted} |", "", "## Exceptions", ""]
    for suite in suites:
        named = exceptions.get(suite.name, [])
        if named:
            lines += [f"### {suite.client}", "", "| test | reason |", "| --- | --- |"]
            lines += [f"| `{_cell(one.test)}` | {_cell(one.reason)} |" for one in named]
            lines.append("")
    if left_out:
        lines += ["## Left out", "", "| client | reason |", "| --- | --- |"]
        lines += [f"| {name} | {_cell(reason)} |" for name, reason in left_out.items()]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
