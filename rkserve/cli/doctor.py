"""``rkserve doctor``: the checks of a board, or of the boards of a running cluster."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.markup import escape

from rkserve.cli.context import ClusterCommand, CommandContext, Exit
from rkserve.doctor.collect import (
    STATE,
    Checkup,
    collect,
    free_bytes,
    reported_facts,
    this_machine,
)
from rkserve.doctor.facts import BoardFacts, DoctorReport, FleetReport, ModelFiles, Severity
from rkserve.doctor.measure import SECONDS, MeasureLimits, compared, measure
from rkserve.doctor.node import RAY_PORT
from rkserve.doctor.rules import report_on
from rkserve.verdicts.hardware import MEGA

commands = typer.Typer()
HERE = Path("/")
COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.UNKNOWN: "cyan"}


@commands.command(cls=ClusterCommand)
def doctor(
    context: CommandContext,
    *,
    model: Annotated[
        Path | None, typer.Option(help="Folder of the model that the board is to serve.")
    ] = None,
    library: Annotated[
        Path | None,
        typer.Option(help="The vendor's librkllmrt.so; without it the usual folders are searched."),
    ] = None,
    measured: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Run the model for --seconds in a child process and compare its speed; on "
            "where both --model and --library are given.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="The time of a measurement.")
    ] = SECONDS,
    head: Annotated[
        str | None,
        typer.Option(metavar="URL", help="rkserve on the head: its ports, clock and Ray."),
    ] = None,
    ray_port: Annotated[int, typer.Option(help="Ray's port on the head.")] = RAY_PORT,
    user: Annotated[
        str | None,
        typer.Option(help="The user that runs Ray. Default: the caller, also behind sudo."),
    ] = None,
    state: Annotated[
        Path, typer.Option(help="The folder of `state_dir`, which rkserve writes to.")
    ] = Path(STATE),
    root: Annotated[
        Path,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Read /proc, /sys, /etc and /dev below this folder: a tree of another board.",
        ),
    ] = HERE,
    fleet: Annotated[
        bool,
        typer.Option(
            "--fleet",
            help="Check the boards of the cluster at --url instead, by their reports to it.",
        ),
    ] = False,
) -> None:
    """Check a board before it serves, without Ray and without loading the library.

    Exit codes: 0 nothing stops serving, although there may be warnings; 1 something does; 2 wrong
    usage; with --fleet 4 the cluster cannot be reached.
    """
    if fleet:
        if (model, library, measured, head, user, root) != (None, None, None, None, None, HERE):
            raise typer.BadParameter("--fleet takes only --url and --json beside it")
        rows = context.client.boards()
        reports = tuple(report_on(reported_facts(row)) for row in rows)
        healthy = all(report.healthy for report in reports)
        _show(context, FleetReport(healthy=healthy, boards=reports), reports)
        return
    request = Checkup(root=root, library=library, model=model, user=user, state=state)
    if root.resolve() == HERE:
        try:
            limits, clock, seen = this_machine(head, ray_port)
        except ValueError as exc:
            raise typer.BadParameter(f"--head: {exc}") from exc
        request = Checkup(
            HERE, library, model, state, user, limits, clock, seen, free_bytes=free_bytes
        )
    elif head is not None:
        raise typer.BadParameter("--head is about this machine, and --root about another one")
    try:
        facts = collect(request)
    except ValueError as exc:
        raise typer.BadParameter(f"--user: {exc}") from exc
    wanted = measured if measured is not None else model is not None and library is not None
    if wanted:
        facts = _with_measurement(
            context, request, facts, MeasureLimits(seconds), asked=measured is not None
        )
    report = report_on(facts)
    _show(context, report, [report])


def _with_measurement(
    context: CommandContext,
    request: Checkup,
    facts: BoardFacts,
    limits: MeasureLimits,
    *,
    asked: bool,
) -> BoardFacts:
    """Return the facts with a measurement, unless what is known already stops it."""
    folder, files, library = request.model, facts.model, facts.library
    if folder is None or files is None or library is None:
        raise typer.BadParameter("--measure needs --model")
    if (why := _unmeasurable(facts, files, asked=asked)) or files.weights is None:
        if not context.as_json:
            context.err.print(f"Not measured: {why}.")
        return facts
    if not context.as_json:
        context.err.print(f"Measuring for {limits.seconds:.0f} s after the model is loaded ...")
    path = request.library or request.root / library.path.lstrip("/")
    weights = folder.absolute() / files.weights
    found = measure(path, weights, files.context_length, request.root, limits)
    soc = facts.hardware.soc if facts.hardware is not None else ""
    return facts.model_copy(update={"measured": compared(found, soc, folder.absolute(), weights)})


def _unmeasurable(facts: BoardFacts, files: ModelFiles, *, asked: bool) -> str:
    """Return the reason why a model is not measured now, empty if it is."""
    about = ("library", "model", "memory_need_mb", "process")
    known = BoardFacts(**{name: getattr(facts, name) for name in about})
    if not report_on(known).healthy:
        return "the library or the model folder has errors"
    if not files.generates or not files.measurable:
        return "this model does not generate from text alone"
    if asked:
        return ""
    if facts.raylet is not None:
        return "Ray runs here, and the model may be loaded; --measure does it all the same"
    free = facts.hardware.memory_available_bytes if facts.hardware is not None else None
    if free is not None and free / MEGA < (facts.memory_need_mb or 0):
        return "too little memory is available; --measure does it all the same"
    return ""


def _show(context: CommandContext, body: BaseModel, reports: Sequence[DoctorReport]) -> None:
    """Print reports, and end with 1 if something stops a board."""
    if context.as_json:
        typer.echo(body.model_dump_json(indent=2))
    else:
        for report in reports:
            for line in _lines(report):
                context.out.print(line, soft_wrap=True, highlight=False)
    if not all(report.healthy for report in reports):
        raise typer.Exit(Exit.FAILED)


def _lines(report: DoctorReport) -> Iterator[str]:
    for one in report.findings:
        colour = COLOURS[one.severity]
        yield f"[{colour}]{one.severity.value}[/{colour}] {one.id}: {escape(one.sentence)}"
        for line in one.evidence:
            yield f"    seen: {escape(line)}"
        yield f"    mend: {escape(one.command)}"
    counts = [
        f"{sum(one.severity is severity for one in report.findings)} {severity.value}"
        for severity in Severity
    ]
    found = ", ".join(counts) if report.findings else "no findings"
    board = f"[bold]{escape(report.board)}[/bold]: " if report.board else ""
    yield f"{board}{found}: {escape(_summary(report.facts))}"


def _summary(facts: BoardFacts) -> str:
    """Return what was looked at, in one line."""
    hardware, library, measured = facts.hardware, facts.library, facts.measured
    soc = hardware.soc if hardware is not None else ""
    parts = [soc or ("SoC unknown" if facts.status is not None else platform.machine())]
    if hardware is not None and hardware.driver_version:
        parts.append(f"driver {hardware.driver_version}")
    if library is not None and library.versions:
        simulated = " (simulated)" if library.simulated else ""
        parts.append(f"RKLLM {', '.join(library.versions)}{simulated}")
    if facts.model is not None:
        parts.append(f"model {Path(facts.model.path).name}")
    if measured is not None and not measured.problem:
        rate = f"{measured.decode_tokens_per_s:.1f} tokens/s"
        expected = measured.expected_tokens_per_s
        parts.append(rate if expected is None else f"{rate} of {expected:.1f}")
    return ", ".join(parts)
