"""``rkserve sign``: signed manifests of adapters, base weights and model folders; and keys.

``rkserve.models.signing`` is imported late: other commands need no cryptography.
"""

from __future__ import annotations

import getpass
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rkserve.cli.context import DefaultCommandGroup, Exit
from rkserve.cli.keys import span
from rkserve.client import SourceFailed
from rkserve.client.requests import ADAPTER_FILE, manifest_of
from rkserve.core.errors import ManifestMismatch, RkserveError, SignatureRequired
from rkserve.core.files import MAX_SIGNED_VERSION, SIGNED_SUFFIX, file_digest, replace_text

if TYPE_CHECKING:
    from rkserve.models.signing import ArtifactManifest, TrustedKey

EXIT_CODES = "Exit codes: 0 done; 1 refused or failed; 2 wrong usage."


class FileFirst(DefaultCommandGroup):
    """A group whose default command is ``file``, also before the name of a file."""

    default = "file"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command before anything but a command or a question for help."""
        if not args:
            return super(DefaultCommandGroup, self).parse_args(ctx, args)  # which shows the help
        known = args[0] in self.commands or args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if known else [self.default, *args])


sign = typer.Typer(
    cls=FileFirst,
    help=f"Sign files of weights, and check signatures: rkserve sign FILE. {EXIT_CODES}",
    no_args_is_help=True,
)
commands = typer.Typer()
commands.add_typer(sign, name="sign", short_help="Sign files of weights, and check signatures.")
What = Annotated[
    Path,
    typer.Argument(exists=True, help="An adapter, a base model file, or a model's whole folder."),
]


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (RkserveError, SourceFailed, OSError) as exc:
        typer.echo(f"rkserve: {exc}", err=True)
        raise typer.Exit(Exit.FAILED) from None


@sign.command(epilog=EXIT_CODES)
def keygen(
    file: Annotated[Path, typer.Argument(help="The private key; the public one is FILE.pub.")],
    name: Annotated[
        str | None, typer.Option(help="The key's name in lists and logs; else USER@HOST.")
    ] = None,
) -> None:
    """Make a key pair (Ed25519, in OpenSSH's form) and print the line to pin."""
    from rkserve.models.signing import make_key

    with _refusals():
        typer.echo(make_key(file, name or f"{getpass.getuser()}@{socket.gethostname()}"))


@sign.command("file", epilog=EXIT_CODES)
def file_(
    *,
    file: What,
    key: Annotated[Path, typer.Option(help="The private key, such as keygen makes one.")],
    version: Annotated[
        int,
        typer.Option(min=1, max=MAX_SIGNED_VERSION, help="Higher than any that was signed before."),
    ],
    name: Annotated[
        str | None, typer.Option(help="The adapter, or the model; else the folder's name.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base model of an adapter; without it this is a model.")
    ] = None,
    base_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Its file, for its sha256."),
    ] = None,
    soc: Annotated[
        list[str] | None, typer.Option(help="Only for this SoC, as rk3588; may be repeated.")
    ] = None,
    toolkit: Annotated[str | None, typer.Option(help="The release that converted it.")] = None,
    runtime_min: Annotated[str | None, typer.Option(help="The oldest runtime for it.")] = None,
    runtime_max: Annotated[str | None, typer.Option(help="The newest runtime for it.")] = None,
    expires: Annotated[
        Any, typer.Option(parser=span, metavar="TIME", help="Good for 12h, 30d; for ever without.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Else FILE.manifest.json.")] = None,
) -> None:
    """Sign a file and write its manifest beside it."""
    from rkserve.models.signing import make_manifest, read_key, signed_envelope

    if base_file is not None and base is None:
        raise typer.BadParameter("--base-file goes with --base")
    now_s = int(time.time())
    runtime = {"min": runtime_min, "max": runtime_max}
    with _refusals():
        secret = read_key(key)
        target = _target(file)
        facts = _facts(target)
        named = name or (target.resolve().name if target.is_dir() else None)
        if named is None:
            raise typer.BadParameter("a file needs --name")
        manifest = make_manifest(
            **facts,
            kind="adapter" if base is not None else "folder" if target.is_dir() else "model",
            name=named,
            version=version,
            base=None if base is None else _base(base, base_file),
            soc=tuple(one.lower() for one in soc or ()),
            toolkit=toolkit,
            runtime=runtime if any(runtime.values()) else None,
            created=now_s,
            expires=None if expires is None else now_s + int(expires),
        )
        place = out or target.with_name(target.name + SIGNED_SUFFIX)
        replace_text(place, f"{signed_envelope(manifest, secret)}\n")
    typer.echo(f"signed {manifest.kind} {manifest.name} version {version}: {place}")


@sign.command(epilog=EXIT_CODES)
def verify(
    *,
    file: What,
    keys: Annotated[
        Path, typer.Option(help="Public keys, a line each, such as FILE.pub of keygen.")
    ],
    manifest: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Else FILE.manifest.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Check the signature of a file's manifest, and that the file is the signed one."""
    from rkserve.models.signing import read_trusted_keys

    with _refusals():
        stated, signer = _verified(_target(file), manifest, read_trusted_keys(keys))
    if as_json:
        typer.echo(json.dumps(stated.model_dump(mode="json", exclude_none=True), indent=2))
        return
    typer.echo(
        f"{stated.kind} {stated.name} version {stated.version}, signed by {signer.name} "
        f"({signer.key_id})"
    )


def _verified(
    file: Path, given: Path | None, keys: tuple[TrustedKey, ...]
) -> tuple[ArtifactManifest, TrustedKey]:
    """Return the manifest of a file and its signer. Raises ``RkserveError``, ``SourceFailed``."""
    from rkserve.models.signing import check_envelope

    text = manifest_of(file, given)
    if text is None:
        raise SourceFailed(f"There is no {file.name}{SIGNED_SUFFIX} beside {file}")
    found = check_envelope(text, keys)
    if found.key is None:
        raise SignatureRequired("The manifest has no signature, or there is no key to check it by.")
    stated = found.manifest
    for what, value in _facts(file).items():
        if value != getattr(stated, what):
            raise ManifestMismatch(
                f"The manifest states {what} {getattr(stated, what)}, and {file.name} has {value}."
            )
    return stated, found.key


def _target(file: Path) -> Path:
    """Return the file that is signed: a folder with an adapter stands for that."""
    return file / ADAPTER_FILE if (file / ADAPTER_FILE).is_file() else file


def _facts(target: Path) -> dict[str, Any]:
    """Return sha256 and size of a file, or of a model's folder. Raises ``OSError``."""
    from rkserve.models.index import PIECE_BYTES
    from rkserve.models.shelf import index_of

    if target.is_dir():
        index = index_of(target.resolve(), PIECE_BYTES)
        return {"sha256": index.version, "size": index.total_bytes}
    return {"sha256": file_digest(target), "size": target.stat().st_size}


def _base(model: str, file: Path | None) -> dict[str, str | None]:
    return {"model": model, "sha256": None if file is None else file_digest(file)}
