"""Facts about the vendor's library, a model folder and disks. The library is not loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rkserve.core.errors import ConfigError
from rkserve.doctor.facts import DiskSpace, LibraryFile, ModelFiles
from rkserve.doctor.known import dtype_in, expected_speed, platform_in, toolkit_in
from rkserve.doctor.tree import Tree
from rkserve.models.files import UnfitWeights, WeightsMetadata, weights_facts
from rkserve.models.folder import GGUF, ModelFolder, open_model_folder, weights_in
from rkserve.models.gguf import read_gguf
from rkserve.native.library_file import (
    knows_architecture,
    llama_cpp_library,
    llama_cpp_release,
    read_header,
    search,
    versions_in,
)
from rkserve.verdicts.hardware import MEGA

NAME = "librkllmrt.so"
FOLDERS = ("usr/lib", "usr/lib/aarch64-linux-gnu", "lib", "lib/aarch64-linux-gnu", "usr/local/lib")
SIMULATED = re.compile(rb"RKLLM SDK \(version:\s*[\w.]+ \(sim\)")
NEEDED = re.compile(rb"\0(lib(?:g|)omp\.so[.\d]*)\0")
MACHINE_FOLDERS = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib64")
MAX_JSON = 1 << 28


def library(tree: Tree, given: Path | None) -> LibraryFile | None:
    """Return the facts of a library: the given one, or the first in the usual folders.

    None where the tree has none of these folders.
    """
    path = given
    if path is None:
        if not any(map(tree.exists, FOLDERS)):
            return None
        there = [f"{folder}/{NAME}" for folder in FOLDERS if tree.exists(f"{folder}/{NAME}")]
        shown = f"/{(there or [f'{FOLDERS[0]}/{NAME}'])[0]}"
        path = tree.root / shown.lstrip("/")
    else:
        shown = str(path)
    try:
        return _library(tree, path, shown)
    except FileNotFoundError:
        return LibraryFile(path=shown, exists=False)
    except NotADirectoryError:
        return LibraryFile(path=shown, exists=False)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else None
        return LibraryFile(path=shown, problem=reason or str(exc))


def _library(tree: Tree, path: Path, shown: str) -> LibraryFile:
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    header = read_header(path)
    size = path.stat().st_size
    if header is None:
        return LibraryFile(path=shown, size_bytes=size)
    names = dict.fromkeys(one.decode() for one in search(path, NEEDED))
    return LibraryFile(
        path=shown,
        machine=header.machine,
        is_64_bit=header.is_64_bit,
        size_bytes=size,
        promised_bytes=header.promised_bytes,
        versions=versions_in(path),
        simulated=bool(search(path, SIMULATED)),
        missing=tuple(name for name in names if not _is_there(tree, name, path.parent)),
    )


def _is_there(tree: Tree, name: str, beside: Path) -> bool:
    """Return whether the loader will find a library: by its cache, or in the usual folders."""
    if (beside / name).exists() or name in (tree.private_text("etc/ld.so.cache") or ""):
        return True
    return any(tree.exists(f"{folder}/{name}") for folder in (*FOLDERS, *MACHINE_FOLDERS))


def model(path: Path) -> ModelFiles:
    """Return the facts of a model folder; ``problem`` is set for one that cannot be opened."""
    # The folder of a GGUF file is made there: a caller such as root must not make Ray's user's.
    with TemporaryDirectory(prefix="rkserve-doctor-") as made:
        return _model(path, Path(made))


def _model(path: Path, made: Path) -> ModelFiles:
    cpu = path.suffix == GGUF
    try:
        folder = open_model_folder(path.absolute(), made)
    except ConfigError as exc:
        return ModelFiles(path=str(path), problem=str(exc), cpu=cpu)
    except (OSError, ValueError, RecursionError) as exc:
        return ModelFiles(path=str(path), problem=f"{path} cannot be read: {exc}", cpu=cpu)
    settings = folder.settings
    problem, names = _tokenizer_problem(folder)
    generates = settings.embedding is None
    facts = ModelFiles(
        path=str(path),
        context_length=settings.context_length,
        kv_bytes_per_token=settings.kv_bytes_per_token,
        has_tokenizer=(folder.path / "tokenizer.json").exists(),
        tokenizer_problem=problem,
        has_template=not generates or bool(names.get("template")),
        generates=generates,
        measurable=settings.cross_attention is None,
        eos_token_ids=settings.eos_token_ids,
        eos_hint=tuple(names.get("eos", ())),
    )
    if folder.weights is None:
        return _with_gguf(facts, folder)
    return _with_weights(facts, folder, folder.weights)


def _with_gguf(facts: ModelFiles, folder: ModelFolder) -> ModelFiles:
    """Return the facts with those of a model for CPUs; unchanged if the folder holds none."""
    if folder.file is None and weights_in(folder.path, GGUF) is None:
        return facts
    unfit, size = "", 0
    try:
        parts = folder.parts(cpu=True)
        size = sum(part.stat().st_size for part in parts)
        header = read_gguf(parts[0])
        header.check()
        if llama_cpp_release() and not knows_architecture(llama_cpp_library(), header.architecture):
            unfit = f"its architecture '{header.architecture}' is not supported"
    except (ConfigError, OSError) as exc:
        unfit = str(exc)
    weights = folder.require_weights(cpu=True).name
    update = {"cpu": True, "weights": weights, "weights_bytes": size, "unfit": unfit}
    return facts.model_copy(update={**update, "measurable": False})


def _with_weights(facts: ModelFiles, folder: ModelFolder, file: Path) -> ModelFiles:
    found, unfit = WeightsMetadata(0), ""
    try:
        found = weights_facts(file)
    except UnfitWeights as exc:
        unfit = str(exc)
    except OSError as exc:
        unfit = f"it cannot be read ({exc.strerror})"
    named = (file.name, folder.id)
    return facts.model_copy(
        update={
            "weights": file.name,
            "weights_bytes": found.size_bytes,
            "unfit": unfit,
            "platform": found.platform or _first(platform_in, named),
            "dtype": _first(dtype_in, named),
            "toolkit": found.toolkit or _first(toolkit_in, named),
            "max_context": found.max_context,
        }
    )


def _first(read: Callable[[str], str | None], names: tuple[str, ...]) -> str | None:
    return next(filter(None, map(read, names)), None)


def _tokenizer_problem(folder: ModelFolder) -> tuple[str, dict[str, Any]]:
    """Return why the tokenizer's files cannot be read, or their template and end tokens."""
    try:
        tokenizer = _json(folder.path / "tokenizer.json")
        config = folder.tokenizer_config
        template = folder.settings.chat_template or folder.chat_template
        generation = _json(folder.path / "generation_config.json")
    except (ConfigError, OSError, ValueError, RecursionError) as exc:
        return str(exc).rstrip("."), {}
    return "", {"template": template, "eos": _ends(tokenizer, config, generation)}


def _json(file: Path) -> dict[str, Any]:
    """Return the object in a file, empty for a missing one. Raises ``ConfigError``, ``OSError``."""
    if not file.exists():
        return {}
    if not file.is_file():
        raise ConfigError(f"{file.name} is no regular file")
    if file.stat().st_size > MAX_JSON:
        raise ConfigError(f"{file.name} is longer than {MAX_JSON // MEGA} MB")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{file.name} is not valid JSON") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{file.name} holds no JSON object")
    return found


def _ends(
    tokenizer: dict[str, Any], config: dict[str, Any], generation: dict[str, Any]
) -> list[int]:
    """Return the ids of the end tokens that a model's own files name."""
    named = generation.get("eos_token_id")
    ids = [one for one in (named if isinstance(named, list) else [named]) if type(one) is int]
    end = config.get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    added = tokenizer.get("added_tokens")
    for one in added if isinstance(added, list) else ():
        if isinstance(one, dict) and one.get("content") == text and type(one.get("id")) is int:
            ids.append(one["id"])
    return list(dict.fromkeys(ids))


def memory_need(soc: str, found: ModelFiles) -> float | None:
    """Return the memory in MB that an engine needs: published, or else weights and KV cache."""
    if found.weights is None or found.unfit:
        return None
    kv = found.context_length * (found.kv_bytes_per_token or 0)
    own = (found.weights_bytes + kv) / MEGA
    names = (Path(found.path).name, found.weights)
    expected = expected_speed(soc, names, found.weights_bytes)
    return max(own, (expected.memory_mb or 0.0) if expected is not None else 0.0)


def disks(
    tree: Tree, state: Path, model_folder: Path | None, free: Callable[[Path], int | None] | None
) -> tuple[DiskSpace, ...]:
    """Return the file systems of the state folder and the model folder."""
    mounts = _mounts(tree)
    folders = [(state, "state")]
    if model_folder is not None and tree.is_this_machine:
        folders.append((model_folder.absolute(), "model"))
    found = []
    for folder, use in folders:
        device, kind, options = _mount_of(mounts, folder)
        found.append(
            DiskSpace(
                folder=str(folder),
                use=use,
                kind=kind,
                device=device,
                free_bytes=free(folder) if free is not None else None,
                read_only="ro" in options,
                sd_card=_is_card(tree, device),
                exists=not tree.is_this_machine or folder.exists(),
                uid=_owner_of(folder) if tree.is_this_machine else None,
            )
        )
    return tuple(found)


def _owner_of(folder: Path) -> int | None:
    """Return the owner of a folder, or of the nearest one above it that exists."""
    for one in (folder, *folder.parents):
        with suppress(OSError):
            return one.stat().st_uid
    return None


Mount = tuple[str, str, str, tuple[str, ...]]


def _mounts(tree: Tree) -> list[Mount]:
    rows = [line.split() for line in (tree.text("proc/mounts") or "").splitlines()]
    return [
        (row[0], _unescaped(row[1]), row[2], tuple(row[3].split(",")))
        for row in rows
        if len(row) >= 4  # noqa: PLR2004 -- device, folder, kind, options
    ]


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _mount_of(mounts: list[Mount], folder: Path) -> tuple[str, str, tuple[str, ...]]:
    """Return device, kind and options of the file system that a folder is on."""
    above = [mount for mount in mounts if folder.is_relative_to(mount[1])]
    if not above:
        return "", "", ()
    # Of those at one folder the last one covers the others.
    length = max(len(mount[1]) for mount in above)
    device, _, kind, options = [mount for mount in above if len(mount[1]) == length][-1]
    return device, kind, options


def _is_card(tree: Tree, device: str) -> bool:
    found = re.fullmatch(r"/dev/(mmcblk\d{1,3})(?:p\d{1,3})?", device, re.ASCII)
    return found is not None and tree.text(f"sys/block/{found[1]}/device/type") == "SD"
