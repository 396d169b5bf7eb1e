"""``rkserve generations``, ``kv``, ``caches`` and ``boards``: what boards have and do."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from rkserve.cli import show
from rkserve.cli.bringup import State
from rkserve.cli.context import (
    EXIT_CODES,
    Boards,
    ClusterCommand,
    CommandContext,
    Exit,
    ListFirst,
    LoadTimeout,
    Model,
    Models,
    Timeout,
    progress,
)
from rkserve.cli.members import members, not_served

generations = typer.Typer(
    cls=ListFirst, help=f"Pause, edit, resume and abort what generates. {EXIT_CODES}"
)
kv = typer.Typer(help=f"Show and clear the boards' KV caches. {EXIT_CODES}", no_args_is_help=True)
caches = typer.Typer(help=f"Show, build and delete prompt caches. {EXIT_CODES}", cls=ListFirst)
boards = typer.Typer(
    help=f"Show the boards; drain, restart and measure them. {EXIT_CODES}", cls=ListFirst
)
commands = typer.Typer()
commands.add_typer(
    boards, name="boards", short_help="Show the boards; drain, restart, measure them."
)
commands.add_typer(caches, name="caches", short_help="Show, build and delete prompt caches.")
commands.add_typer(generations, name="generations", short_help="Control single answers.")
commands.add_typer(kv, name="kv", short_help="Show and clear KV caches.")

RANGE = re.compile(r"(\d+)-(\d+)")

Id = Annotated[str, typer.Argument(metavar="ID", help="Of the answer, as in its chunks.")]
Choice = Annotated[int | None, typer.Option(min=0, help="Only this choice of the answer.")]
Ranges = Annotated[
    list[str] | None,
    typer.Option("--clear", metavar="FROM-TO", help="Positions to clear; may be repeated."),
]
CacheModel = Annotated[str, typer.Argument(metavar="MODEL", help="A model or an adapter.")]
CacheName = Annotated[str, typer.Argument(metavar="NAME", help="What the cache is called.")]


def _report(context: CommandContext, body: dict[str, Any], sentence: str) -> None:
    """Print an answer, and exit with 3 if some boards have failed."""
    context.show(body, lambda: sentence)
    if failed := body.get("failed"):
        for one in failed:
            line = f"{one.get('board')}: {one.get('message') or one.get('error')}"
            context.err.print(line, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(Exit.PARTLY)


# -- generations ----------------------------------------------------------------------------------


@generations.command("list", cls=ClusterCommand)
def list_generations(context: CommandContext) -> None:
    """List what runs, waits or is paused."""
    rows = context.client.generations()
    context.show(rows, lambda: show.generations(rows))


@generations.command("show", cls=ClusterCommand)
def show_generation(context: CommandContext, generation: Id) -> None:
    """Show one, with what it has generated."""
    one = context.client.generation(generation)
    context.show(one, lambda: show.facts(one))


@generations.command("pause", cls=ClusterCommand)
def pause_generation(context: CommandContext, generation: Id, choice: Choice = None) -> None:
    """Pause one; done when nothing more of it comes."""
    one = context.client.pause_generation(generation, choice)
    text = f" after {one.get('partial_output')!r}" if "partial_output" in one else ""
    _report(context, one, f"paused {generation}{text}")


@generations.command("edit", cls=ClusterCommand)
def edit_generation(
    context: CommandContext,
    *,
    generation: Id,
    text: Annotated[str | None, typer.Option(help="Text to append.")] = None,
    replace_last: Annotated[
        int | None, typer.Option(min=0, help="Tokens to drop from the end before.")
    ] = None,
    role: Annotated[
        str | None, typer.Option(help="assistant, or tool: the text is a tool's result.")
    ] = None,
    clear: Ranges = None,
    choice: Choice = None,
) -> None:
    """Change one that is paused."""
    if text is None and replace_last is None and not clear:
        raise typer.BadParameter("give --text, --replace-last or --clear")
    one = context.client.edit_generation(
        generation,
        choice=choice,
        replace_last=replace_last,
        text=text,
        role=role,
        clear=_ranges(clear),
    )
    _report(context, one, f"edited {generation}: rkserve generations resume {generation}")


@generations.command("resume", cls=ClusterCommand)
def resume_generation(context: CommandContext, generation: Id, choice: Choice = None) -> None:
    """Let one that is paused go on."""
    _report(context, context.client.resume_generation(generation, choice), f"resumed {generation}")


@generations.command("abort", cls=ClusterCommand)
def abort_generation(context: CommandContext, generation: Id, choice: Choice = None) -> None:
    """End one, whatever it does."""
    _report(context, context.client.abort_generation(generation, choice), f"aborted {generation}")


def _ranges(given: list[str] | None) -> list[tuple[int, int]] | None:
    found = []
    for one in given or ():
        if (match := RANGE.fullmatch(one)) is None:
            raise typer.BadParameter(f"{one!r} is not FROM-TO, such as 12-40")
        found.append((int(match[1]), int(match[2])))
    return found or None


# -- KV caches ------------------------------------------------------------------------------------


@kv.command("size", cls=ClusterCommand)
def kv_size(context: CommandContext, model: Model = None, board: Boards = None) -> None:
    """Show how many positions the KV caches hold, by board."""
    found = context.client.kv_size(model=model, boards=board or None)
    context.show(found, lambda: show.kv(found))


@kv.command("clear", cls=ClusterCommand)
def kv_clear(
    context: CommandContext,
    *,
    model: Model = None,
    board: Boards = None,
    every: Annotated[bool, typer.Option("--all", help="All boards of all models.")] = False,
    generation: Annotated[
        str | None, typer.Option(metavar="ID", help="One that is paused, instead of boards.")
    ] = None,
    clear: Ranges = None,
    keep_system_prompt: Annotated[
        bool, typer.Option(help="Spare the system prompt of each cache.")
    ] = True,
) -> None:
    """Clear KV caches; the next requests prefill their whole prompts."""
    if not (model or board or generation or every):
        raise typer.BadParameter("give --model, --board, --generation or --all")
    if (generation is None) != (clear is None):
        raise typer.BadParameter("--generation and --clear FROM-TO belong together")
    found = context.client.clear_kv(
        model=model,
        boards=board or None,
        generation=generation,
        ranges=_ranges(clear),
        everything=every,
        keep_system_prompt=None if generation else keep_system_prompt,
    )
    names = ", ".join(str(one["board"]) for one in found.get("data", ()))
    _report(context, found, f"cleared {generation or names or 'nothing'}")


# -- prompt caches --------------------------------------------------------------------------------


@caches.command("list", cls=ClusterCommand)
def list_caches(
    context: CommandContext, model: Annotated[str | None, typer.Argument(metavar="[MODEL]")] = None
) -> None:
    """List the prompt caches of a model, or of all."""
    if model is None:
        models = [str(one["id"]) for one in context.client.models() if not one.get("parent")]
    else:
        models = [model]
    rows = [row for one in models for row in context.client.caches(one)]
    context.show(rows, lambda: show.caches(rows))


@caches.command("build", cls=ClusterCommand)
def build_cache(
    context: CommandContext,
    *,
    model: CacheModel,
    name: CacheName,
    prompt: Annotated[str | None, typer.Option(help="A raw prompt.")] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Its text is the system prompt."),
    ] = None,
) -> None:
    """Build a prompt cache on every board of a model."""
    if sum(one is not None for one in (prompt, system, file)) != 1:
        raise typer.BadParameter("give one of --prompt, --system and --file")
    if file is not None:
        try:
            system = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise typer.BadParameter(f"{file} cannot be read: {exc}") from exc
    messages = None if system is None else [{"role": "system", "content": system}]
    made = context.client.build_cache(model, name, prompt=prompt, messages=messages)
    wrong = [one for one in made["boards"] if "error" in one]
    done = len(made["boards"]) - len(wrong)
    total = len(made["boards"])
    sentence = f"built {name} of {made['tokens']} tokens on {done} of {total} boards"
    _report(context, {**made, **({"failed": wrong} if wrong else {})}, sentence)


@caches.command("rm", cls=ClusterCommand)
def delete_cache(context: CommandContext, model: CacheModel, name: CacheName) -> None:
    """Delete a prompt cache wherever it is."""
    _report(context, context.client.delete_cache(model, name), f"deleted {name}")


# -- boards ---------------------------------------------------------------------------------------


@boards.command("list", cls=ClusterCommand)
def list_boards(context: CommandContext, *, state: State = None) -> None:
    """List the boards: state and hardware; and those that have joined and serve nothing, that wait
    for `rkserve approve`, or that were denied.
    """
    served = context.client.boards()
    rows = [*served, *not_served(members(context, state), served)]
    context.show(rows, lambda: show.hardware(rows))


@boards.command("show", cls=ClusterCommand)
def show_board(
    context: CommandContext,
    board: Annotated[str, typer.Argument(metavar="ID", help="Such as sim-0.")],
) -> None:
    """Show everything that one board says of itself."""
    one = context.client.board(board)
    context.show(one, lambda: show.facts(one))


Named = Annotated[
    list[str] | None,
    typer.Argument(metavar="[BOARD]...", help="Names of boards, or patterns such as 'rk-*'."),
]
One = Annotated[str, typer.Argument(metavar="BOARD", help="As `rkserve boards` names it.")]


@boards.command("drain", cls=ClusterCommand)
def drain_boards(
    context: CommandContext,
    names: Named = None,
    *,
    model: Models = None,
    move: Annotated[
        bool, typer.Option("--move", help="Other boards continue what runs, at once.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for requests; the drain stays.")
    ] = None,
) -> None:
    """Send boards no new requests; done when they have none left. Nothing is lost.

    With --model alone: all boards of the model, whose requests are refused then.
    """
    if not (names or model):
        raise typer.BadParameter("give names of boards, or --model")
    with progress(context) as update:
        one = context.client.drain_boards(
            names or None,
            "move" if move else "wait",
            models=model or None,
            timeout_s=timeout,
            on_progress=update,
        )
    context.done(one, "drained, and without requests")
    words = shlex.join(names or [word for name in model or () for word in ("--model", name)])
    context.note(lambda: [f"to let them take requests again: rkserve boards undrain {words}"])


@boards.command("undrain", cls=ClusterCommand)
def undrain_boards(
    context: CommandContext,
    names: Named = None,
    *,
    model: Models = None,
    every: Annotated[bool, typer.Option("--all", help="All boards that are drained.")] = False,
    timeout: Timeout = None,
) -> None:
    """Let drained boards take requests again."""
    if every == bool(names or model):
        raise typer.BadParameter("give names of boards, --model, or --all")
    one = context.client.undrain_boards(names or None, models=model or None, timeout_s=timeout)
    context.done(one, "taking requests")


@boards.command("restart", cls=ClusterCommand)
def restart_board(context: CommandContext, board: One, timeout: LoadTimeout = None) -> None:
    """Replace the engine of one board; what runs there continues. Done when its model is loaded."""
    with progress(context) as update:
        one = context.client.restart_board(board, timeout_s=timeout, on_progress=update)
    context.done(one, f"the engine of {board} is restarted")


@boards.command("measure", cls=ClusterCommand)
def measure_board(
    context: CommandContext,
    board: One,
    *,
    seconds: Annotated[
        float | None, typer.Option(help="How long, 10 by default; requests wait meanwhile.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="First let a run end that goes on.")] = False,
) -> None:
    """Measure how fast a board generates, and compare that with what it should reach."""
    found = context.client.measure_board(board, seconds, wait=wait)
    context.show(found, lambda: str(found["sentence"]))
