"""The frame of ``rkserve bench``: open the system, run the command, write the results.

Most modules of ``rkserve.bench`` are imported only when one of its commands runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rkserve.cli.bench_options import (
    LOAD_OPTIONS,
    SHAPE_OPTIONS,
    LoadOptions,
    known_profile,
    targets,
    usage,
)
from rkserve.cli.context import Exit, GroupedCommand, OptionGroup
from rkserve.core.errors import RkserveError

if TYPE_CHECKING:
    from rkserve.bench.figures import Slo
    from rkserve.bench.player import RunProgress
    from rkserve.bench.presets import Bench, PresetOptions, PresetResult
    from rkserve.bench.results import BenchResults
    from rkserve.bench.systems import SystemUnderTest
    from rkserve.bench.trace import TraceShape

EXIT_CODES = (
    "Exit codes: 0 measured; 1 failed, or nothing was answered; 2 wrong usage; 3 measured, but a "
    "target was missed or there were more errors than --max-errors; 4 nobody answers at the URL; "
    "130 Ctrl-C, after the figures of what there was."
)
ENDS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class LoadCommand:
    """A running command: its options, and the runner of its traces."""

    given: LoadOptions
    bench: Bench

    def asked(self, **own: Any) -> PresetOptions:
        """Return the options of a preset: the shared ones and those of the command."""
        from rkserve.bench.presets import PresetOptions

        given = self.given
        return PresetOptions(seed=given.seed, slo=given.limits(), plan=given.plan(), **own)


class LoadContext(typer.Context):
    """The context of a command that loads a system; ``shape`` is that of the trace to make."""

    load: LoadCommand
    shape: TraceShape


class LoadingCommand(GroupedCommand):
    """A command that loads a system; its function takes a ``LoadContext``."""

    context_class = LoadContext
    groups: ClassVar[tuple[OptionGroup[Any], ...]] = (LOAD_OPTIONS,)

    def invoke(self, ctx: Any) -> Any:
        """Open the system, run the command, deliver its results and exit."""
        if SHAPE_OPTIONS in self.groups:
            ctx.shape = SHAPE_OPTIONS.take(ctx.params)
        run = super().invoke

        def command(load: LoadCommand) -> PresetResult:
            ctx.load = load
            found: PresetResult = run(ctx)
            return found

        raise typer.Exit(carry_out(LOAD_OPTIONS.take(ctx.params), command))


class TraceLoadingCommand(LoadingCommand):
    """A command that loads a system with a trace of the options' shape."""

    groups: ClassVar[tuple[OptionGroup[Any], ...]] = (SHAPE_OPTIONS, LOAD_OPTIONS)


def carry_out(given: LoadOptions, command: Callable[[LoadCommand], PresetResult]) -> Exit:
    """Run a command, deliver its results, and return the exit code."""
    from rkserve.bench.presets import Bench

    err, limits = Console(stderr=True), given.limits() or _no_limits()
    folder = Path(tempfile.mkdtemp(prefix="rkbench-"))  # short: sockets' paths have a limit
    shown = LoadProgress(err)
    try:
        with opened(given, folder, shown.say) as site:
            bench = Bench(site, limits, shown.show)
            with shown:
                found, failure = _attempt(lambda: command(LoadCommand(given, bench)), bench)
            # Before what was started is ended, which takes a while.
            results = results_of(bench, found)
            if bench.runs:
                deliver(given, results)
    except RkserveError as exc:
        return _failed(err, exc)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if failure is not None:
        code = _failed(err, failure)
        return code if results.complete else Exit.INTERRUPTED
    return exit_of(given, results)


def _attempt(
    command: Callable[[], PresetResult], bench: Bench
) -> tuple[PresetResult | None, RkserveError | None]:
    """Return the result of a command, or its failure; finished runs are in the bench."""
    try:
        return command(), None
    except RkserveError as exc:
        return None, exc
    except KeyboardInterrupt:
        bench.interrupted = True
        return None, None


def _failed(err: Console, exc: RkserveError) -> Exit:
    from rkserve.bench.target import ServerUnreachable

    err.print(f"rkserve bench: {exc}", markup=False, highlight=False, soft_wrap=True)
    return Exit.UNREACHABLE if isinstance(exc, ServerUnreachable) else Exit.FAILED


def exit_of(given: LoadOptions, results: BenchResults) -> Exit:
    """Return the exit code for these results."""
    if not results.complete:
        return Exit.INTERRUPTED
    if not results.answered:
        return Exit.UNREACHABLE if results.unreachable else Exit.FAILED
    missed = results.missed or results.error_share > given.max_errors
    return Exit.PARTLY if missed else Exit.DONE


def results_of(bench: Bench, found: PresetResult | None) -> BenchResults:
    """Collect the results of all runs."""
    from rkserve.bench.results import BenchResults, machine

    title, trace = ("Interrupted", "") if found is None else (found.title, found.trace)
    return BenchResults(
        title=title,
        machine=machine(),
        about={**({"trace": trace} if trace else {}), **bench.site.about},
        slo=bench.slo,
        runs=bench.runs,
        comparisons=() if found is None else found.comparisons,
        verdicts=() if found is None else found.verdicts,
        complete=not bench.interrupted,
        appendix="" if found is None else found.appendix,
        more={} if found is None else found.more,
    )


def deliver(given: LoadOptions, results: BenchResults) -> None:
    """Print the results, and write them to ``--out``."""
    from rkserve.bench.capture import exchange_lines, render_exchanges
    from rkserve.bench.charts import charts, svg
    from rkserve.bench.report import render, summary
    from rkserve.bench.results import outcome_lines

    if given.as_json:
        typer.echo(json.dumps(results.to_json(), ensure_ascii=False, indent=2))
    else:
        typer.echo(summary(results))
    if given.out is None:
        return
    given.out.mkdir(parents=True, exist_ok=True)
    drawn = charts([run.played for run in results.runs])
    for name, chart in drawn.items():
        (given.out / f"{name}.svg").write_text(svg(chart), encoding="utf-8")
    (given.out / "report.md").write_text(render(results, drawn), encoding="utf-8")
    text = json.dumps(results.to_json(), ensure_ascii=False, indent=1)
    (given.out / "results.json").write_text(text + "\n", encoding="utf-8")
    with (given.out / "outcomes.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in outcome_lines(results.runs))
    captured = [run for run in results.runs if run.played.plan.capture]
    if captured:
        with (given.out / "captured.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in exchange_lines(captured))
        text = render_exchanges(results.title, captured)
        (given.out / "captured.md").write_text(text, encoding="utf-8")


# -- the system -------------------------------------------------------------------------------


@contextmanager
def opened(
    given: LoadOptions, folder: Path, say: Callable[[str], None]
) -> Iterator[SystemUnderTest]:
    """Open the system to load; stop everything started for it, also on Ctrl-C."""
    site = _site(given, folder, say)
    # A shell without job control starts its background jobs with Ctrl-C ignored.
    before = {number: signal.signal(number, _as_interrupt) for number in ENDS}
    try:
        yield site
    finally:
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must leave no cluster behind
        try:
            site.close()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _site(given: LoadOptions, folder: Path, say: Callable[[str], None]) -> SystemUnderTest:
    from rkserve.bench.systems import (
        DEFAULT_POLICY,
        RunningServers,
        SimulatedCluster,
        SimulatedClusterConfig,
        parse_watched,
    )

    if given.boards is None and not given.url and (url := os.environ.get("RKSERVE_URL")):
        given = replace(given, url=[url])
    if (given.boards is None) == (not given.url):
        raise typer.BadParameter(
            "either --url (or RKSERVE_URL in the environment), or --boards to start some"
        )
    if given.boards is not None and given.all_models:
        raise typer.BadParameter("--all-models is for --url; --boards serve one model")
    if given.boards is None:
        if given.policy:
            raise typer.BadParameter("--policy is for --boards; a server has the one that it has")
        watched = [usage(parse_watched, one) for one in given.watch or ()]
        return RunningServers(targets(given), watched)
    names = list(dict.fromkeys(given.policy or [DEFAULT_POLICY]))
    known_profile(given.profile)
    return SimulatedCluster(
        SimulatedClusterConfig(given.boards, given.profile, given.time_scale, names), folder, say
    )


def _no_limits() -> Slo:
    from rkserve.bench.figures import Slo

    return Slo()


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# -- progress -------------------------------------------------------------------------------------


class LoadProgress:
    """The progress of runs and of the cluster, on a terminal only.

    It draws when called, from the measuring thread: a thread of its own would disturb the
    measurement at random moments.
    """

    def __init__(self, err: Console) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}", markup=False),
            TimeElapsedColumn(),
        )
        hidden = not err.is_terminal
        self._bar = Progress(*columns, console=err, auto_refresh=False, disable=hidden)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LoadProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, name: str, told: RunProgress) -> None:
        """Show the progress of a run."""
        failed = f", {told.failed} failed" if told.failed else ""
        count = f"{told.done} of {told.total}, {told.running} running{failed}"
        self._update(name, told.total, told.done, count)

    def say(self, text: str) -> None:
        """Show the state of the cluster."""
        self._update("cluster", None, 0, text)

    def _update(self, name: str, total: int | None, done: int, count: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total, count="")
        self._bar.update(self._tasks[name], completed=done, count=count)
        self._bar.refresh()
