"""``rkserve lora``: push, roll out and remove adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rkserve.cli import show
from rkserve.cli.context import (
    EXIT_CODES,
    AllowOlder,
    ClusterCommand,
    CommandContext,
    ManifestFile,
    Model,
    Running,
    Timeout,
    progress,
)
from rkserve.client import SourceFailed
from rkserve.client.requests import ADAPTER_FILE, Strategy, manifest_of
from rkserve.core.errors import ManifestInvalid
from rkserve.models.files import SIM_MAGIC, simulated_adapter_flaw
from rkserve.native.sim import models as sim_models

lora = typer.Typer(help=f"Bring LoRA adapters to the boards. {EXIT_CODES}", no_args_is_help=True)
commands = typer.Typer()
commands.add_typer(lora, name="lora", short_help="Bring LoRA adapters to the boards.")


Name = Annotated[str, typer.Argument(metavar="NAME", help="What the adapter is called.")]
How = Annotated[
    Strategy,
    typer.Option(help="All boards at once, some after others, or some of the sessions first."),
]
Unavailable = Annotated[int, typer.Option(min=1, help="rolling: boards that change at a time.")]
Weight = Annotated[float, typer.Option(help="canary: share of the sessions, above 0, below 1.")]
Observe = Annotated[float, typer.Option(min=0, help="canary: seconds before the verdict.")]
Auto = Annotated[bool, typer.Option(help="canary: promote or roll back by itself.")]


@lora.command("list", cls=ClusterCommand)
def list_(context: CommandContext, model: Model = None) -> None:
    """List adapters and versions, and on how many boards they are."""
    rows = context.client.adapters(model)
    context.show(rows, lambda: show.adapters(rows))


@lora.command(cls=ClusterCommand)
def push(
    context: CommandContext,
    *,
    path: Annotated[Path, typer.Argument(exists=True, help="The file, or a folder with it.")],
    name: Annotated[
        str | None, typer.Option(help="What the adapter is called; else as its manifest states.")
    ] = None,
    version: Annotated[str | None, typer.Option(help="Else the digits of its sha256.")] = None,
    model: Model = None,
    scale: Annotated[float | None, typer.Option(help="The strength of the adapter.")] = None,
    activate: Annotated[bool, typer.Option(help="Serve it once every board has it.")] = True,
    force: Annotated[bool, typer.Option(help="Try a file again that failed its trial.")] = False,
    manifest: ManifestFile = None,
    allow_older: AllowOlder = False,
    strategy: How = "atomic",
    max_unavailable: Unavailable = 1,
    weight: Weight = 0.1,
    in_flight: Running = "pin",
    observe: Observe = 60.0,
    auto: Auto = True,
    timeout: Timeout = None,
) -> None:
    """Upload an adapter, bring it to every board, and into use."""
    _look_at(path)
    name = _name_of(path, manifest) if name is None else name
    with progress(context) as update:
        pushed = context.client.push_adapter(
            path,
            name,
            version,
            model=model,
            scale=scale,
            activate=activate,
            force=force,
            manifest=manifest,
            allow_older=allow_older,
            **_how(strategy, max_unavailable, weight, observe, auto),
            in_flight=in_flight,
            timeout_s=timeout,
            on_progress=update,
        )
    outcome = "staged" if pushed.rollout is None else "serving"
    context.done(pushed.rollout or pushed.staging, f"{outcome} {pushed.label}")


@lora.command(cls=ClusterCommand)
def rollout(
    context: CommandContext,
    *,
    name: Name,
    version: Annotated[str, typer.Argument(help="One that is staged.")],
    model: Model = None,
    strategy: How = "atomic",
    max_unavailable: Unavailable = 1,
    weight: Weight = 0.1,
    in_flight: Running = "pin",
    observe: Observe = 60.0,
    auto: Auto = True,
    timeout: Timeout = None,
) -> None:
    """Bring a version that is staged into use."""
    with progress(context) as update:
        one = context.client.rollout(
            name,
            version,
            model=model,
            **_how(strategy, max_unavailable, weight, observe, auto),
            in_flight=in_flight,
            timeout_s=timeout,
            on_progress=update,
        )
    context.done(one, f"serving {name}@{version}")


@lora.command(cls=ClusterCommand)
def rollback(
    context: CommandContext, name: Name, model: Model = None, timeout: Timeout = None
) -> None:
    """Return to the version before, or end a canary."""
    with progress(context) as update:
        one = context.client.rollback(name, model=model, timeout_s=timeout, on_progress=update)
    context.done(one, f"rolled back {name}")


@lora.command(cls=ClusterCommand)
def promote(
    context: CommandContext, name: Name, model: Model = None, timeout: Timeout = None
) -> None:
    """Let everybody have what a canary tries."""
    with progress(context) as update:
        one = context.client.promote(name, model=model, timeout_s=timeout, on_progress=update)
    context.done(one, f"promoted {name}")


@lora.command(cls=ClusterCommand)
def rm(
    context: CommandContext,
    name: Annotated[str, typer.Argument(metavar="NAME[@VERSION]")],
    every: Annotated[bool, typer.Option("--all", help="All versions of the adapter.")] = False,
    model: Model = None,
    timeout: Timeout = None,
) -> None:
    """Retire a version: nothing is served from it any more, and boards get their memory back."""
    title, _, version = name.partition("@")
    if bool(version) == every:
        raise typer.BadParameter("give either NAME@VERSION, or NAME with --all")
    with progress(context) as update:
        one = context.client.remove_adapter(
            title, version or None, model=model, timeout_s=timeout, on_progress=update
        )
    context.done(one, f"retired {name}")


# Magic bytes of files that are mistaken for adapters.
_KNOWN = (
    (b"PK\x03\x04", "a zip archive or a PyTorch checkpoint"),
    (b"GGUF", "a GGUF file"),
    (SIM_MAGIC, "a simulated model, and no adapter"),
    (b"\x1f\x8b", "a compressed archive"),
    (b"version https://git-lfs", "a Git LFS pointer; `git lfs pull` gets the file"),
)
_CONVERT = "RKLLM loads adapters that rkllm-toolkit has converted (*.rkllm)"


def _look_at(path: Path) -> None:
    """Refuse files that no board can load before the upload. Raises ``BadParameter``."""
    file = path / ADAPTER_FILE if path.is_dir() else path
    if not file.is_file():
        inside = ", ".join(sorted(one.name for one in path.iterdir())[:5]) or "nothing"
        raise typer.BadParameter(f"{path} has no {ADAPTER_FILE} in it, but {inside}. {_CONVERT}.")
    try:
        with file.open("rb") as opened:
            begin = opened.read(sim_models.ADAPTER_BYTES)
    except OSError as exc:
        raise typer.BadParameter(f"{file} cannot be read: {exc.strerror or exc}") from exc
    if wrong := _wrong(file, begin):
        raise typer.BadParameter(f"{file} is {wrong}. {_CONVERT}.")


def _name_of(path: Path, manifest: Path | None) -> str:
    """Return the name in the manifest of a file. Raises ``BadParameter``."""
    from rkserve.models.signing import check_envelope  # late: other commands need no cryptography

    try:
        text = manifest_of(path, manifest)
        stated = None if text is None else check_envelope(text, ()).manifest
    except (SourceFailed, ManifestInvalid) as exc:
        raise typer.BadParameter(str(exc)) from exc
    if stated is None:
        raise typer.BadParameter("give --name, or a signed manifest that states one")
    return stated.name


def _wrong(file: Path, begin: bytes) -> str:
    """Return the actual kind of a file that is not an adapter, or an empty string."""
    if not begin:
        return "empty"
    known = next((what for magic, what in _KNOWN if begin.startswith(magic)), "")
    if known:
        return known
    if begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") < file.stat().st_size:
        return "a safetensors file"
    if begin.lstrip()[:1] in (b"{", b"["):
        return "JSON"
    if begin.startswith(sim_models.MAGIC):
        return simulated_adapter_flaw(file)
    return ""


def _how(
    strategy: Strategy, max_unavailable: int, weight: float, observe: float, auto: bool
) -> dict[str, Any]:
    """Return the parameters of a strategy; those of others are left out."""
    own: dict[str, dict[str, Any]] = {
        "atomic": {},
        "rolling": {"max_unavailable": max_unavailable},
        "canary": {"weight": weight, "observe_s": observe, "auto": auto},
    }
    return {"strategy": strategy, **own[strategy]}
