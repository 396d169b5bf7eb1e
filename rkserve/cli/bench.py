"""``rkserve bench``: load on any OpenAI server, or on simulated boards that it starts itself.

Each command opens the system, plays its traces, and writes the results.
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
from typing import Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rkserve.bench import presets
from rkserve.bench.capture import exchange_lines, render_exchanges
from rkserve.bench.figures import Slo
from rkserve.bench.player import RunProgress
from rkserve.bench.presets import Bench, PresetOptions, PresetResult
from rkserve.bench.report import charts, render, summary, svg
from rkserve.bench.results import BenchResults, machine, outcome_lines
from rkserve.bench.systems import (
    DEFAULT_POLICY,
    RunningServers,
    SimulatedCluster,
    SimulatedDeployment,
    SystemUnderTest,
    parse_watched,
)
from rkserve.bench.target import ServerUnreachable
from rkserve.bench.trace import Trace, TraceShape, lines_of, make_trace, read_trace, write_trace
from rkserve.cli.bench_options import (
    LOAD_OPTIONS,
    SHAPE_OPTIONS,
    LoadOptions,
    Seed,
    known_profile,
    targets,
    usage,
)
from rkserve.cli.context import Exit, GroupedCommand, OptionGroup
from rkserve.core.errors import RkserveError

EXIT_CODES = (
    "Exit codes: 0 measured; 1 failed, or nothing was answered; 2 wrong usage; 3 measured, but a "
    "target was missed or there were more errors than --max-errors; 4 no server at the URL; "
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
    err, limits = Console(stderr=True), given.limits() or Slo()
    folder = Path(tempfile.mkdtemp(prefix="rkbench-"))  # short: sockets' paths have a limit
    shown = LoadProgress(err)
    try:
        with opened(given, folder, shown.note) as site:
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
    given: LoadOptions, folder: Path, note: Callable[[str], None]
) -> Iterator[SystemUnderTest]:
    """Open the system to load; stop everything started for it, also on Ctrl-C."""
    site = _site(given, folder, note)
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


def _site(given: LoadOptions, folder: Path, note: Callable[[str], None]) -> SystemUnderTest:
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
    wanted = SimulatedDeployment(given.profile, given.boards, given.time_scale)
    return SimulatedCluster(wanted, names, folder, note)


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

    def show(self, name: str, progress: RunProgress) -> None:
        """Show the progress of a run."""
        failed = f", {progress.failed} failed" if progress.failed else ""
        count = f"{progress.done} of {progress.total}, {progress.running} running{failed}"
        self._update(name, progress.total, progress.done, count)

    def note(self, text: str) -> None:
        """Show the state of the cluster."""
        self._update("cluster", None, 0, text)

    def _update(self, name: str, total: int | None, done: int, count: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total, count="")
        self._bar.update(self._tasks[name], completed=done, count=count)
        self._bar.refresh()


# -- the commands ----------------------------------------------------------------------------------

bench = typer.Typer(
    name="bench",
    help="Measure any OpenAI server, or simulated boards that are started for it. " + EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
)
commands = typer.Typer()
commands.add_typer(
    bench, name="bench", short_help="Measure any OpenAI server, or simulated boards."
)

TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", exists=True, dir_okay=False, help="Play this one, as it was saved."),
]
Clients = Annotated[
    int | None,
    typer.Option(min=1, help="Closed loop: so many clients, each with one session at a time."),
]
Sessions = Annotated[int | None, typer.Option(min=1, help="So many sessions.")]
Duration = Annotated[
    float | None, typer.Option(min=0.001, help="Seconds; then nothing new is asked.")
]


class TraceCommand(GroupedCommand):
    """A command that makes a trace and loads nothing."""

    context_class = LoadContext
    groups = (SHAPE_OPTIONS,)

    def invoke(self, ctx: Any) -> Any:
        """Read the shape and run the command."""
        ctx.shape = SHAPE_OPTIONS.take(ctx.params)
        return super().invoke(ctx)


@bench.command(cls=TraceLoadingCommand)
def run(
    context: LoadContext,
    *,
    trace: TraceFile = None,
    clients: Clients = None,
    duration: Duration = None,
    warmup: Annotated[float, typer.Option(min=0, help="Seconds that do not count.")] = 0.0,
    time_factor: Annotated[
        float, typer.Option(min=0, help="Stretches arrivals and pauses of the trace.")
    ] = 1.0,
    deadline: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds; sent to the server.")
    ] = None,
    runs: Annotated[
        int, typer.Option(min=1, max=1000, help="Play it so often on each; shows the spread.")
    ] = 1,
    capture: Annotated[
        bool,
        typer.Option(
            "--capture",
            help="Write each whole prompt and answer with figures, and the NPU load and memory of "
            "its board, to captured.jsonl and captured.md in --out.",
        ),
    ] = False,
) -> PresetResult:
    """Play a trace, one that is made or one from a file; open loop unless --clients."""
    plan = replace(
        context.load.given.plan(),
        time_factor=time_factor,
        duration_s=duration,
        warmup_s=warmup,
        deadline_s=deadline,
        capture=capture,
    )
    if capture and context.load.given.out is None:
        raise typer.BadParameter("--capture needs --out DIR, where it writes")
    asked = replace(context.load.asked(clients=clients, runs=runs), plan=plan)
    return presets.play_all(
        context.load.bench, _trace(trace, context.shape, context.load.given.seed), asked, "Load"
    )


@bench.command(cls=LoadingCommand)
def smoke(
    context: LoadContext, *, sessions: Sessions = None, clients: Clients = None
) -> PresetResult:
    """Ask a few questions: seconds, to see that a server can be measured."""
    return presets.smoke(context.load.bench, context.load.asked(sessions=sessions, clients=clients))


@bench.command("multi-turn", cls=LoadingCommand)
def multi_turn(
    context: LoadContext, *, sessions: Sessions = None, clients: Clients = None
) -> PresetResult:
    """Play 200 conversations with shared system prompts; policies are compared on the same ones."""
    return presets.multi_turn(
        context.load.bench, context.load.asked(sessions=sessions, clients=clients)
    )


@bench.command(cls=LoadingCommand)
def overload(
    context: LoadContext,
    *,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each of the two loads.")] = 60.0,
    load: Annotated[
        float, typer.Option(min=1.1, max=100, help="The second load, in multiples of the capacity.")
    ] = 3.0,
    sessions: Annotated[
        int | None,
        typer.Option(min=1, help="Requests for the capacity; else half of --seconds."),
    ] = None,
    clients: Clients = None,
    tell_deadline: Annotated[
        bool, typer.Option(help="Tell the server the end-to-end limit as its deadline.")
    ] = True,
) -> PresetResult:
    """Measure the capacity, then ask that much and a multiple of it; compare the goodput."""
    asked = context.load.asked(
        seconds=seconds,
        load=load,
        sessions=sessions,
        clients=clients,
        tell_deadline=tell_deadline,
    )
    return presets.overload(context.load.bench, asked)


@bench.command(cls=TraceLoadingCommand)
def compare(
    context: LoadContext,
    *,
    trace: TraceFile = None,
    clients: Clients = None,
    all_prompts: Annotated[
        bool,
        typer.Option(
            "--all-prompts", help="Show every prompt, also of equal answers, and nothing cut."
        ),
    ] = False,
) -> PresetResult:
    """Have several servers, models or adapters answer the same prompts; show where they differ."""
    played = _trace(trace, context.shape, context.load.given.seed)
    asked = context.load.asked(clients=clients, whole=all_prompts)
    return presets.side_by_side(context.load.bench, played, asked)


@bench.command("trace", cls=TraceCommand)
def make(
    context: LoadContext,
    *,
    seed: Seed = 1,
    output: Annotated[
        Path | None, typer.Option("--output", dir_okay=False, help="Else it is printed.")
    ] = None,
) -> None:
    """Make a trace and save it; the same seed and options make the same one."""
    made = make_trace(context.shape, seed)
    if output is None:
        for line in lines_of(made):
            typer.echo(line)
    else:
        write_trace(made, output)


def _trace(path: Path | None, shape: TraceShape, seed: int) -> Trace:
    return make_trace(shape, seed) if path is None else read_trace(path)
