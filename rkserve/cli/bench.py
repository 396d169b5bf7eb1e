"""``rkserve bench``: load on any OpenAI server, or on simulated boards that it starts itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rkserve.bench.presets import PresetResult
from rkserve.bench.trace import Trace, TraceShape, lines_of, make_trace, read_trace, write_trace
from rkserve.cli.bench_options import SHAPE_OPTIONS, Seed
from rkserve.cli.bench_run import EXIT_CODES, LoadContext, LoadingCommand, TraceLoadingCommand
from rkserve.cli.context import GroupedCommand

bench = typer.Typer(
    name="bench",
    help="Measure any OpenAI server, or simulated boards that are started for it. " + EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
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
        float | None, typer.Option(min=0.001, help="Seconds, told to the server.")
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
    from rkserve.bench.presets import play_all

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
    return play_all(
        context.load.bench, _trace(trace, context.shape, context.load.given.seed), asked, "Load"
    )


@bench.command(cls=LoadingCommand)
def smoke(
    context: LoadContext, *, sessions: Sessions = None, clients: Clients = None
) -> PresetResult:
    """Ask a few questions: seconds, to see that a server can be measured."""
    from rkserve.bench import presets

    return presets.smoke(context.load.bench, context.load.asked(sessions=sessions, clients=clients))


@bench.command("multi-turn", cls=LoadingCommand)
def multi_turn(
    context: LoadContext, *, sessions: Sessions = None, clients: Clients = None
) -> PresetResult:
    """Play 200 conversations with shared system prompts; policies are compared on the same ones."""
    from rkserve.bench import presets

    return presets.multi_turn(
        context.load.bench, context.load.asked(sessions=sessions, clients=clients)
    )


@bench.command(cls=LoadingCommand)
def overload(
    context: LoadContext,
    *,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each of the two loads.")] = 60.0,
    sessions: Annotated[
        int | None,
        typer.Option(min=1, help="Requests for the capacity; else half of --seconds."),
    ] = None,
    clients: Clients = None,
    tell_deadline: Annotated[
        bool, typer.Option(help="Tell the server the end-to-end limit as its deadline.")
    ] = True,
) -> PresetResult:
    """Measure the capacity, then ask that much and three times as much; compare the goodput."""
    from rkserve.bench import presets

    asked = context.load.asked(
        seconds=seconds, sessions=sessions, clients=clients, tell_deadline=tell_deadline
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
    from rkserve.bench import presets

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
