"""``rkserve probe``: experiments that settle the quirks of a board's runtime."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rkserve.cli.context import Exit
from rkserve.config.serve_config import resolve_folder
from rkserve.core.errors import RkserveError
from rkserve.models.folder import open_model_folder
from rkserve.native.sim.build import ensure_built
from rkserve.probe.verdicts import ExperimentResult, ProbeReport

commands = typer.Typer()
EXIT_CODES = (
    "Exit codes: 0 all experiments settled; 1 the probe failed or was ended; 2 wrong usage; 3 some "
    "experiments are inconclusive."
)
ENDS = (signal.SIGINT, signal.SIGTERM)
# A simulated board at a fraction of a real one's times.
SIMULATED: Mapping[str, str] = {"RKSIM_TIME_SCALE": "0.05", "RKSIM_LOAD_MS": "0"}
VALUES = {True: "true", False: "false", None: "?"}


@commands.command(epilog=EXIT_CODES)
def probe(
    *,
    model: Annotated[
        Path, typer.Option(help="The model's folder, with its tokenizer.json.")
    ] = Path("models/sim-chat"),
    library: Annotated[
        Path | None,
        typer.Option(help="librkllmrt.so of this board; without it a simulated one."),
    ] = None,
    release: Annotated[str, typer.Option(help="The release of the simulated library.")] = "1.3.0",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for quirks.json, report.json and report.md."),
    ] = None,
    allow_unlisted: Annotated[
        bool,
        typer.Option("--allow-unlisted", help="Try a later release than the listed ones, too."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only this experiment, by its quirk; may be repeated."),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, max=100, help="Times that each experiment is made.")
    ] = 1,
    cache_file: Annotated[
        Path | None,
        typer.Option(
            help="For prompt_cache_portable: the file to write on one board, and, copied with its "
            ".json, to load on another."
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(min=1, help="Seconds for one experiment, its model load included.")
    ] = 120.0,
) -> None:
    """Settle the quirks of this board's runtime by experiments, each in a process of its own."""
    # Late: every command would wait for templates and tokenizers to be imported.
    from rkserve.probe.probe import ProbeOptions, run_probe, write_report

    err = Console(stderr=True, highlight=False)
    try:
        options = ProbeOptions(
            library=library.expanduser() if library else ensure_built(release),
            folder=open_model_folder(resolve_folder(model)),
            simulated=library is None,
            allow_unlisted=allow_unlisted,
            only=tuple(only or ()),
            limit_s=time_limit,
            repeat=repeat,
            cache_file=None if cache_file is None else cache_file.expanduser().absolute(),
            environ={} if library else SIMULATED,
        )
        with interruptible():
            report = run_probe(
                options, lambda result: err.print(line_of(result), markup=False, soft_wrap=True)
            )
        if out is not None:
            write_report(report, out)
    except RkserveError as exc:
        err.print(f"rkserve probe: {exc}", markup=False, soft_wrap=True)
        raise typer.Exit(Exit.FAILED) from None
    except OSError as exc:
        err.print(f"rkserve probe: {out} cannot be written: {exc}", markup=False, soft_wrap=True)
        raise typer.Exit(Exit.FAILED) from None
    text = (
        json.dumps(report.as_json(), indent=2, ensure_ascii=False) if as_json else summary(report)
    )
    typer.echo(text)
    raise typer.Exit(exit_of(report))


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` on SIGINT and SIGTERM.

    A shell without job control starts its background jobs with Ctrl-C ignored.
    """
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def line_of(result: ExperimentResult) -> str:
    """Return one experiment as a line of progress."""
    verdict = result.verdict
    why = f"{verdict.why}; " if verdict.why else ""
    name = f"{result.plan.name:31}"
    return f"{VALUES[verdict.value]:6}{name} {result.seconds:5.1f} s  {why}{verdict.evidence}"


def summary(report: ProbeReport) -> str:
    """Return the differences from the quirk table, as the configuration has them."""
    differing = {
        name: value for name, value in report.quirks.items() if report.known.get(name) is not value
    }
    open_ones = [one.plan.name for one in report.results if one.verdict.value is None]
    release = report.library["release"] or "an unknown release"
    lines = [f"RKLLM {release}: {len(report.results)} experiments in {report.seconds:.0f} s."]
    lines += list(report.notes)
    if open_ones:
        lines.append(f"Inconclusive: {', '.join(open_ones)}.")
    if differing:
        lines.append("Differs from the table of this release:")
        lines += [f"  {name}: {str(value).lower()}" for name, value in differing.items()]
    elif report.quirks:
        lines.append("No settled quirk differs from the table of this release.")
    return "\n".join(lines)


def exit_of(report: ProbeReport) -> Exit:
    """Return the exit code of a report."""
    if not report.results or report.notes:
        return Exit.FAILED
    settled = all(one.verdict.value is not None for one in report.results)
    return Exit.DONE if settled else Exit.PARTLY
