"""``rkserve model``: the catalogue of models of this machine, and its upload to a head."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from rkserve.cli import show
from rkserve.cli.context import (
    PIPED,
    AllowOlder,
    ClusterCommand,
    CommandContext,
    Exit,
    ManifestFile,
    progress,
)
from rkserve.client.push_model import unsettled
from rkserve.core.errors import ConfigError

if TYPE_CHECKING:
    from rkserve.catalog.add import AddedModel
    from rkserve.catalog.catalog import GroupUse
    from rkserve.catalog.hub import OnBytes

MEGA = 1_000_000
EXIT_CODES = (
    "Exit codes: 0 done; 1 refused or failed, and nothing was changed; 2 wrong usage; 3 added, and "
    "something that the model needs is missing."
)
PUSH_CODES = (
    "Exit codes: 0 done; 1 refused or failed; 2 wrong usage; 3 pushed, and some boards have no "
    "copy; 4 rkserve cannot be reached."
)
NO_BOARDS = "  no board is there that could fetch it"
STAGED = "it replaces an earlier version when a board with this model starts next"
model = typer.Typer(
    help=f"Add, list, show, remove and push the models of this machine. {EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
)
commands = typer.Typer()
commands.add_typer(model, name="model", short_help="Add, list and remove models of this machine.")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ModelsFolder = Annotated[Path, typer.Option("--models", "--into", help="The folder of all models.")]
Configs = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        help="A serve_config.yaml whose groups count as users; may be repeated. Default: that of "
        "this folder, if there is one.",
    ),
]
ModelId = Annotated[str, typer.Argument(metavar="MODEL", help="The name of its folder.")]
CONFIG = Path("serve_config.yaml")


@model.callback()
def catalogue() -> None:
    """Add, list, show and remove the models of this machine."""


@model.command(epilog=EXIT_CODES)
def add(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder with one .rkllm file, such a file, or hf:owner/repository[:file].",
        ),
    ],
    *,
    into: ModelsFolder = Path("models"),
    name: Annotated[
        str | None, typer.Option(help="The model's id in requests; else made from its name.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder with tokenizer.json, that file, or hf:owner/repository."),
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="A file with the chat template, or the name of a built-in.")
    ] = None,
    sha256: Annotated[
        str | None, typer.Option(help="The sha256 that the .rkllm file must have.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a model of the same name.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add a converted model: recognise it, find its tokenizer and template, write rkserve.yaml."""
    # Late: every command would wait for templates and tokenizers to be imported.
    from rkserve.catalog.add import AddRequest
    from rkserve.catalog.add import add as add_model
    from rkserve.catalog.hub import open_hub

    request = AddRequest(source, into.expanduser(), name, tokenizer, template, sha256, replace)
    with _refusals(), _bytes_shown() as on_bytes:
        added = add_model(request, lambda: open_hub(os.environ, on_bytes))
    if as_json:
        typer.echo(json.dumps(_added_json(added), ensure_ascii=False, indent=2))
    else:
        typer.echo("\n".join(_added_lines(added)))
    raise typer.Exit(Exit.DONE if added.complete else Exit.PARTLY)


@model.command("list")
def list_(
    *, models: ModelsFolder = Path("models"), config: Configs = None, as_json: AsJson = False
) -> None:
    """List the models of this machine, and the board groups that use them."""
    from rkserve.catalog.catalog import entries, summary

    with _refusals():
        rows = [summary(one) for one in entries(models.expanduser(), _uses(config))]
    if as_json:
        typer.echo(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    columns = ("model", "SoC", "quantization", "context", "MB", "sha256", "groups", "problem")
    Console(width=None if sys.stdout.isatty() else PIPED).print(
        show.table(columns, map(_row, rows))
    )


def _row(found: Mapping[str, Any]) -> list[object]:
    return [
        *(found[key] for key in ("id", "soc", "quantization", "context_length")),
        f"{(found['bytes'] or found['partial_bytes']) / MEGA:.1f}",
        found["sha256"] and found["sha256"][: show.SHORT_DIGEST],
        ", ".join(found["used_by"]) or None,
        found["problem"] or None,
    ]


@model.command("show")
def show_(
    name: ModelId,
    *,
    models: ModelsFolder = Path("models"),
    config: Configs = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the file's sha256 with the manifest's.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show one model: its properties, sha256, source and settings."""
    from rkserve.catalog.catalog import details, entry

    with _refusals():
        found = details(entry(models.expanduser(), name, _uses(config)), verify=verify)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2))
        return
    settings = found.pop("settings")
    for key, value in found.items():
        if value not in (None, "", [], 0):
            typer.echo(f"{key}: {', '.join(value) if isinstance(value, list) else value}")
    typer.echo(f"rkserve.yaml:\n{settings}" if settings else "rkserve.yaml: none")


@model.command()
def rm(
    name: ModelId,
    *,
    models: ModelsFolder = Path("models"),
    config: Configs = None,
    force: Annotated[bool, typer.Option("--force", help="Also if a board group uses it.")] = False,
) -> None:
    """Remove a model, its adapters, and what is left of a download of it."""
    from rkserve.catalog.catalog import remove

    with _refusals():
        freed = remove(models.expanduser(), name, () if force else _uses(config))
    typer.echo(f"removed {name}: {freed / MEGA:.1f} MB")


@model.command(cls=ClusterCommand)
def copies(context: CommandContext) -> None:
    """List the models of the head's catalogue, and the boards that have or fetch a copy."""
    rows = context.client.catalog()
    context.show(rows, lambda: show.copies(rows))


@model.command(cls=ClusterCommand, epilog=PUSH_CODES)
def push(
    context: CommandContext,
    *,
    name: ModelId,
    models: ModelsFolder = Path("models"),
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace another model of that name on the head.")
    ] = False,
    to_boards: Annotated[
        bool,
        typer.Option(
            "--to-boards",
            help="Then have all boards whose SoC fits fetch it, before it is deployed.",
        ),
    ] = False,
    manifest: ManifestFile = None,
    allow_older: AllowOlder = False,
) -> None:
    """Upload a model of this machine into the head's catalogue; the same command resumes it."""
    from rkserve.models.shelf import model_path

    with _refusals():
        folder = model_path(models.expanduser(), name)
    with progress(context) as update:
        pushed = context.client.push_model(
            folder,
            replace=replace,
            manifest=manifest,
            allow_older=allow_older,
            on_progress=update,
        )
        rows = []
        if to_boards:
            rows = context.client.prefetch_model(pushed.name, on_progress=update)
    sentence = (
        f"pushed {pushed.name}: {pushed.size_bytes / MEGA:.1f} MB, of which "
        f"{pushed.sent_bytes / MEGA:.1f} MB were missing there; version {pushed.version[:12]}."
    )
    if not to_boards:
        later = f"Boards of groups with model: catalog:{pushed.name} fetch it at their next start"
        context.show(pushed.body, lambda: f"{sentence} {later}")
        return
    left = unsettled(rows)
    context.show(
        {**pushed.body, "boards": rows},
        lambda: "\n".join((sentence, *map(_copy_line, rows)) if rows else (sentence, NO_BOARDS)),
    )
    if left:
        raise typer.Exit(Exit.PARTLY)


def _copy_line(row: Mapping[str, Any]) -> str:
    """Return a node's result as a line."""
    size = f" {row['fetched_bytes'] / MEGA:.1f} of {row['total_bytes'] / MEGA:.1f} MB"
    done = size if row["state"] in ("fetching", "failed") and row["total_bytes"] else ""
    reason = STAGED if row["state"] == "staged" else row["reason"]
    return f"  {row['board']}: {row['state']}{done}{f' ({reason})' if reason else ''}"


@model.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="A model folder of Hugging Face (*.safetensors), or a .gguf.")
    ],
    *,
    soc: Annotated[str, typer.Option(help="The boards' SoC, such as rk3588.")],
    dtype: Annotated[str, typer.Option(help="The quantization, such as w8a8 or w4a16_g128.")],
    context: Annotated[int, typer.Option(help="The longest context, a multiple of 32.")] = 4096,
    out: Annotated[Path, typer.Option(help="The folder of the .rkllm file.")] = Path(),
    optimization: Annotated[
        int, typer.Option(min=0, max=1, help="The toolkit's optimization_level.")
    ] = 1,
    device: Annotated[str, typer.Option(help="The toolkit's device: cpu or cuda.")] = "cpu",
    dataset: Annotated[
        Path | None, typer.Option(help="Texts for the quantization, in the toolkit's JSON.")
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            help="The interpreter of the environment with rkllm-toolkit. Default: "
            "RKSERVE_TOOLKIT_PYTHON, or ~/.local/share/rkserve/toolkit/bin/python."
        ),
    ] = None,
) -> None:
    """Convert a model with rkllm-toolkit, which runs in an environment of its own on a PC."""
    from rkserve.catalog.convert import ConversionRequest
    from rkserve.catalog.convert import convert as convert_model

    request = ConversionRequest(
        *(source.expanduser(), soc, dtype, out.expanduser(), context, optimization, device),
        *(dataset, python),
    )
    with _refusals():
        made = convert_model(request)
    tokenizer = f" --tokenizer {shlex.quote(str(source))}" if source.is_dir() else ""
    typer.echo(f"made {made} ({made.stat().st_size / MEGA:.1f} MB)")
    typer.echo(f"next: rkserve model add {shlex.quote(str(made))}{tokenizer}")


def _uses(configs: list[Path] | None) -> tuple[GroupUse, ...]:
    from rkserve.catalog.catalog import group_uses

    return group_uses(configs or ([CONFIG] if CONFIG.is_file() else []))


def _added_lines(added: AddedModel) -> Iterator[str]:
    """Yield what was found, what was assumed, what is missing, and the next command."""
    from rkserve.catalog.recognise import releases_of

    manifest, traits = added.manifest, added.traits
    size = manifest.bytes / MEGA
    yield f"added {added.folder.name}: {added.folder} ({size:.1f} MB)"
    yield f"  sha256 {manifest.sha256}"
    toolkit = None if traits.toolkit is None else traits.toolkit.value
    for title, found in (
        *(("SoC", traits.platform), ("quantization", traits.dtype)),
        *(("toolkit", traits.toolkit), ("longest context", traits.max_context)),
    ):
        shown = "unknown" if found is None else f"{found.value} ({found.source})"
        yield f"  {title}: {shown}"
    runs = ", ".join(releases_of(toolkit)) or "no accepted release"
    yield f"  runs on RKLLM: {'unknown' if toolkit is None else runs}"
    yield f"  tokenizer: {added.tokenizer_source or 'none'}"
    yield f"  chat template: {added.template_source or 'none'}"
    for key, found in added.settings.items():
        origin = f"assumed: {found.source}" if found.assumed else found.source
        yield f"  {key}: {json.dumps(found.value)} ({origin})"
    for warning in added.warnings:
        yield f"warning: {warning}"
    yield f"next: rkserve doctor --model {added.folder}"


def _added_json(added: AddedModel) -> dict[str, Any]:
    return {
        "id": added.folder.name,
        "folder": str(added.folder),
        **added.manifest.model_dump(mode="json"),
        "tokenizer": added.tokenizer_source or None,
        "template": added.template_source or None,
        "settings": {
            key: {"value": found.value, "source": found.source, "assumed": found.assumed}
            for key, found in added.settings.items()
        },
        "warnings": list(added.warnings),
        "complete": added.complete,
    }


@contextmanager
def _refusals() -> Iterator[None]:
    """Print an error as one sentence, and end with 1."""
    try:
        yield
    except ConfigError as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None


@contextmanager
def _bytes_shown() -> Iterator[OnBytes]:
    """Show the progress of downloads on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        tasks: dict[str, Any] = {}

        def on_bytes(name: str, done: int, size: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=size)
            bar.update(tasks[name], completed=done)

        yield on_bytes
