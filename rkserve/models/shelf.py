"""Folders of model folders: names, locks, the place in which a model is built, and index files.

The head's catalogue is one, and so is the folder of a board's fetched models. A model that is
added, fetched or uploaded is built in ``.<name>.adding``, and appears under its name whole.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rkserve.core.errors import ConfigError
from rkserve.core.files import Stamp, stamp, sync
from rkserve.models.folder import MODEL_ID
from rkserve.models.index import ModelIndex, files_of, index_folder

log = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
PART = ".part"
PIECES_OF = "version"  # the version of a copy that comes in pieces, beside its files


class ModelBusy(ConfigError):
    """Another process is building the model just now."""


def model_path(models: Path, name: str) -> Path:
    """Return the folder of a model. Raises ``ConfigError`` for a name that leads elsewhere."""
    if not MODEL_ID.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a model")
    return models / name


def staging_of(path: Path) -> Path:
    """Return the folder in which a model is built."""
    return path.with_name(f".{path.name}.adding")


def partial_bytes(path: Path) -> int:
    """Return the size of the files that are being added to a model."""
    return _size(staging_of(path), PART)


def staged_bytes(path: Path) -> int:
    """Return the size of all files of an addition that has not ended."""
    return _size(staging_of(path), "")


def _size(folder: Path, suffix: str) -> int:
    """Return the size of the files with that suffix; another process may remove them meanwhile."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(suffix):
                with suppress(FileNotFoundError):
                    size += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118 - of walk
    return size


@contextmanager
def staging(path: Path, *, pieces: bool = False) -> Iterator[Path]:
    """Create the folder in which a model is built, locked against other processes.

    It is removed at the end, unless a partial file is in it. ``pieces`` says that the caller goes
    on with the pieces of a fetch or an upload; other callers find none of them.

    Raises:
        ModelBusy: another process has it.
        ConfigError: it cannot be created.
    """
    outer = staging_of(path)
    staged = outer / path.name  # a model's id is the name of its folder
    try:
        staged.mkdir(parents=True, exist_ok=True)
        lock = os.open(outer, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as exc:
        raise ConfigError(f"{staged} cannot be created: {exc.strerror or exc}") from exc
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ModelBusy(f"another command adds {path.name} just now") from exc
        try:
            if not pieces and (outer / PIECES_OF).exists():
                shutil.rmtree(staged)
                staged.mkdir()
                (outer / PIECES_OF).unlink()
            yield staged
        finally:
            if not any(outer.rglob(f"*{PART}")):
                shutil.rmtree(outer)
    finally:
        os.close(lock)


def publish(staged: Path, target: Path) -> None:
    """Put a complete model in the place of an earlier one of its name. Raises ``OSError``.

    A process that has the old one's files open keeps them.
    """
    gone = _removed(target)
    if gone.exists():
        shutil.rmtree(gone)
    if target.exists():
        target.rename(gone)
    staged.rename(target)
    sync(target.parent)
    if gone.exists():
        shutil.rmtree(gone)


def discard(target: Path) -> None:
    """Remove a model, so that a folder removed only in part is not listed. Raises ``OSError``."""
    _index_file(target).unlink(missing_ok=True)
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        gone = _removed(target)
        if gone.exists():
            shutil.rmtree(gone)
        target.rename(gone)
        shutil.rmtree(gone)


def _removed(target: Path) -> Path:
    return target.with_name(f".{target.name}.removed")


# -- index files ----------------------------------------------------------------------------------


def _index_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.index.json")


def known_index(path: Path) -> ModelIndex | None:
    """Return the index of a model folder as last computed; None if any file has changed since."""
    try:
        record = json.loads(_index_file(path).read_text(encoding="utf-8"))
        stamps = {name: tuple(one) for name, one in record["stamps"].items()}
        index = ModelIndex.model_validate(record["index"])
        return index if stamps == stamps_of(path) else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError) as exc:
        log.warning("the index of %s is ignored: %s", path, exc)
        return None


def keep_index(path: Path, index: ModelIndex) -> None:
    """Store the index of a model folder beside it; a folder that is read-only goes without."""
    record = {"stamps": stamps_of(path), "index": index.model_dump()}
    file = _index_file(path)
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(record, separators=(",", ":")), encoding="utf-8")
        fresh.replace(file)
    except OSError as exc:
        fresh.unlink(missing_ok=True)
        log.warning("the index of %s could not be stored: %s", path, exc)


def index_of(path: Path, piece_bytes: int) -> ModelIndex:
    """Return the index of a model folder; files are read if they have changed since the last time.

    Raises:
        OSError: a file cannot be read, or is changed meanwhile.
        ConfigError: the folder cannot be served to boards.
    """
    known = known_index(path)
    if known is not None and known.piece_bytes == piece_bytes:
        return known
    before = stamps_of(path)
    index = index_folder(path, piece_bytes)
    if stamps_of(path) != before:
        raise OSError(f"{path} was changed while it was read")
    _compare(path, index)
    keep_index(path, index)
    return index


def stamps_of(path: Path) -> dict[str, Stamp]:
    """Return values that change with the files of a model folder. Raises ``OSError``."""
    return {name: stamp(file) for name, file in files_of(path).items()}


def stated_of(path: Path) -> dict[str, Any]:
    """Return a model's manifest; empty if it was not added by ``rkserve model add``."""
    try:
        stated = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stated if isinstance(stated, dict) else {}


def _compare(path: Path, index: ModelIndex) -> None:
    """Compare the weights with the sha256 of the model's addition. Raises ``ConfigError``."""
    stated = stated_of(path)
    try:
        weights, sha256, size = stated["weights"], stated["sha256"], stated["bytes"]
    except KeyError:
        return
    file = index.by_path.get(weights) if isinstance(weights, str) else None
    if file is not None and file.bytes == size and file.sha256 != sha256:
        raise ConfigError(
            f"{path / weights}: checksum mismatch: the sha256 is {file.sha256}, and "
            f"{MANIFEST_FILE} has {sha256}; add the model again with rkserve model add --replace"
        )
