"""Addition of a model to the catalogue: a folder with weights, tokenizer, settings and manifest.

The folder is built beside its place and renamed at the end, so that a reader of the catalogue sees
all of it or nothing. A download that was cut is kept for the next attempt. Local files are linked
where source and catalogue are on one file system, and copied elsewhere.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import yaml

from rkserve.api.prompting.templates import NAMED
from rkserve.catalog.catalog import ModelManifest
from rkserve.catalog.hub import (
    SCHEME,
    Hub,
    HubAddress,
    HubFile,
    HubRepository,
    base_of,
    parse_address,
)
from rkserve.catalog.recognise import (
    Found,
    ModelTraits,
    TokenizerFiles,
    misreads_end,
    plain_name,
    read_files,
    read_traits,
    settings_of,
    template_by_name,
    warnings,
)
from rkserve.core.errors import ConfigError
from rkserve.core.files import FULL, file_digest, free_bytes
from rkserve.models.adapters import FOLDER as ADAPTERS
from rkserve.models.folder import MODEL_ID, SETTINGS_FILE, ModelFolder, open_model_folder
from rkserve.models.index import PIECE_BYTES
from rkserve.models.shelf import MANIFEST_FILE, index_of, staging

MEGA = 1_000_000
SPARE_BYTES = 64 * MEGA  # left free on the disk
CARD = "README.md"
CARD_MAX_BYTES = 4 << 20
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
ASSUMED = " # assumed: "
_TEMPLATE_LINE = re.compile(r"^chat_template:.*\n?", re.MULTILINE)
_ASSUMED_TEMPLATE = re.compile(rf"^chat_template:.*{ASSUMED}", re.MULTILINE)
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
# Taken from wherever the tokenizer is found.
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", TEMPLATE, "chat_template.json", TOOL_TEMPLATE),
    *("generation_config.json", "config.json"),
)
Place: TypeAlias = "Path | tuple[HubRepository, HubFile]"


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The arguments of an addition; ``source`` is a folder, a file or an address of the Hub."""

    source: str
    into: Path
    name: str | None = None
    tokenizer: str | None = None
    template: str | None = None
    sha256: str | None = None
    replace: bool = False


@dataclass(frozen=True, slots=True)
class AddedModel:
    """An added model: its folder, its traits and settings with their sources, and warnings."""

    folder: Path
    manifest: ModelManifest
    traits: ModelTraits
    settings: Mapping[str, Found]
    tokenizer_source: str
    template_source: str
    warnings: tuple[str, ...]
    complete: bool


@dataclass(slots=True)
class _Source:
    """The files of a model where they are, before they are taken."""

    weights: Place
    file: str
    label: str
    folder_name: str
    files: dict[str, Place]
    base_model: str | None = None
    tokenizer_source: str = ""
    notes: list[str] = field(default_factory=list)


def add(request: AddRequest, hub: Callable[[], Hub]) -> AddedModel:
    """Add a model to the catalogue.

    Raises:
        ConfigError: the source is no single model, its name is taken or unfit, a file is damaged or
            cannot be fetched, or the disk has too little room. Nothing is added then.
    """
    opened: list[Hub] = []

    def one_hub() -> Hub:
        if not opened:
            opened.append(hub())
        return opened[0]

    source = _resolve(request.source, one_hub)
    name = request.name if request.name is not None else plain_name(source.folder_name)
    if not MODEL_ID.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of a model: up to 128 letters, digits, '.', '_' and '-'"
        )
    target = request.into.absolute() / name
    _refuse_taken(target, source, replace=request.replace)
    if isinstance(source.weights, Path):
        # A damaged file is refused before anything is fetched for it.
        read_traits(source.weights, ())
    _find_tokenizer(request, source, one_hub)
    with staging(target) as staged, _disk_errors(name):
        _check_room(source, request.into, staged)
        digest = _take(source, staged, one_hub)
        if request.sha256 not in (None, digest):
            raise ConfigError(
                f"{source.label}: checksum mismatch: the sha256 is {digest}, and --sha256 is "
                f"{request.sha256}"
            )
        _unpack_template(staged)
        added = _describe(request, source, staged, digest)
        _publish(staged, target, keep=_is_in_place(source, target))
        index_of(target, PIECE_BYTES)  # boards fetch by it
    return added


def _resolve(text: str, hub: Callable[[], Hub]) -> _Source:
    """Return the files of a source. Raises ``ConfigError``."""
    if text.startswith(SCHEME):
        return _remote(hub(), parse_address(text))
    path = Path(text).expanduser()
    try:
        real = path.resolve()
        if real.is_dir():
            return _local(_only(real), real, real.name)
        if real.is_file():
            name = path.stem if path.stem.lower() != "model" else path.absolute().parent.name
            return _local(path.absolute(), path.absolute().parent, name)
    except (OSError, RuntimeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    what = "is no regular file" if path.exists() else "does not exist"
    raise ConfigError(f"{path} {what}; name a folder, a .rkllm file, or hf:owner/repository")


def _only(folder: Path) -> Path:
    """Return the one model in a folder."""
    found = sorted(one for one in folder.glob("*.rkllm") if one.is_file())
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"{folder} holds no *.rkllm file; `rkserve model convert` makes one")
    names = ", ".join(one.name for one in found)
    raise ConfigError(f"{folder} holds {len(found)} models ({names}); name one of these files")


def _local(weights: Path, beside: Path, name: str) -> _Source:
    if weights.suffix != ".rkllm":
        raise ConfigError(f"{weights} is no .rkllm file")
    files: dict[str, Place] = {one: beside / one for one in _files_in(beside)}
    encoders = sorted(beside.glob("*.rknn"))
    if len(encoders) == 1:
        files[encoders[0].name] = encoders[0]
    if (beside / SETTINGS_FILE).is_file():
        files[SETTINGS_FILE] = beside / SETTINGS_FILE
    source = _Source(weights, weights.name, str(weights), name, files, _card(beside / CARD))
    if TOKENIZER in files:
        source.tokenizer_source = str(beside)
    return source


def _files_in(folder: Path) -> list[str]:
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _card(file: Path) -> str | None:
    """Return the base model that a model card names in its head."""
    try:
        if not file.is_file() or file.stat().st_size > CARD_MAX_BYTES:
            return None
        begin, head, _ = file.read_text(encoding="utf-8").split("---", 2)
        card = yaml.safe_load(head) if not begin.strip() else None
    except (OSError, ValueError, yaml.YAMLError):  # a card is for people, and may have any form
        return None
    return base_of(card) if isinstance(card, dict) else None


def _remote(hub: Hub, address: HubAddress) -> _Source:
    repository = hub.repository(address)
    models = [one for one in repository.files if one.endswith(".rkllm")]
    chosen = address.file
    if chosen is None:
        if len(models) != 1:
            names = ", ".join(models) or "*.gguf and *.safetensors have to be converted"
            raise ConfigError(
                f"{repository.name} holds {len(models)} .rkllm files ({names}); name one as "
                f"{SCHEME}{repository.name}:FILE"
            )
        chosen = models[0]
    if chosen not in models:
        raise ConfigError(
            f"{repository.name} has no {chosen}; its models are {', '.join(models) or 'none'}"
        )
    file = repository.files[chosen]
    folder = PurePosixPath(chosen).parent
    files = _files_of(repository, folder)
    if TOKENIZER not in files:
        files = {**_files_of(repository, PurePosixPath()), **files}
    label = f"{SCHEME}{repository.name}@{repository.commit[:12]}:{chosen}"
    name = repository.name.partition("/")[2]
    source = _Source(
        (repository, file), PurePosixPath(chosen).name, label, name, files, repository.base_model
    )
    if TOKENIZER in files:
        source.tokenizer_source = f"{SCHEME}{repository.name}"
    return source


def _files_of(repository: HubRepository, folder: PurePosixPath) -> dict[str, Place]:
    named = {name: repository.files.get(str(folder / name)) for name in TOKENIZER_FILES}
    return {name: (repository, file) for name, file in named.items() if file is not None}


def _find_tokenizer(request: AddRequest, source: _Source, hub: Callable[[], Hub]) -> None:
    """Complete a source by the tokenizer that the request names, or by that of its base model."""
    template = request.template
    if request.tokenizer is not None:
        files, where = _given_tokenizer(request.tokenizer, hub)
        others = {n: one for n, one in source.files.items() if n not in TOKENIZER_FILES}
        source.files, source.tokenizer_source = {**others, **files}, where
    elif TOKENIZER not in source.files and source.base_model is not None:
        try:
            files, where = _given_tokenizer(f"{SCHEME}{source.base_model}", hub)
            source.files = {**files, **source.files}
            source.tokenizer_source = f"{where}, the base model"
        except ConfigError as exc:
            source.notes.append(f"the tokenizer of the base model could not be fetched: {exc}")
    if template is not None and template not in NAMED:
        file = Path(template).expanduser()
        if not file.is_file():
            raise ConfigError(
                f"--template: {template!r} is neither a file nor a built-in template "
                f"({', '.join(sorted(NAMED))})"
            )
        source.files.pop(TOOL_TEMPLATE, None)
        source.files.pop("chat_template.json", None)
        source.files[TEMPLATE] = file


def _given_tokenizer(given: str, hub: Callable[[], Hub]) -> tuple[dict[str, Place], str]:
    """Return the files of ``--tokenizer``: a folder, a tokenizer.json, or an address of the Hub."""
    files: dict[str, Place]
    if given.startswith(SCHEME):
        repository = hub().repository(parse_address(given))
        files = _files_of(repository, PurePosixPath())
        where = f"{SCHEME}{repository.name}"
    else:
        path = Path(given).expanduser()
        folder = path if path.is_dir() else path.parent
        files = {name: folder / name for name in _files_in(folder)}
        if path.is_file():
            files[TOKENIZER] = path
        where = str(folder)
    if TOKENIZER not in files:
        raise ConfigError(f"there is no {TOKENIZER} at {given}")
    return files, where


def _refuse_taken(target: Path, source: _Source, *, replace: bool) -> None:
    """Refuse a name that is taken, unless it may be replaced or is the source without settings."""
    if not os.path.lexists(target):
        return
    new = _is_in_place(source, target) and not (target / MANIFEST_FILE).exists()
    if not replace and not new:
        raise ConfigError(
            f"{target} exists already; choose another --name, or replace it with --replace"
        )
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{target} is no folder, and is not replaced; remove it yourself")


def _is_in_place(source: _Source, target: Path) -> bool:
    """Return True for a folder that is in the catalogue already, for example by hand."""
    return isinstance(source.weights, Path) and source.weights.parent == target


@contextmanager
def _disk_errors(name: str) -> Iterator[None]:
    """Raise ``ConfigError`` for an error of a file."""
    try:
        yield
    except OSError as exc:
        full = "; the disk is full" if exc.errno in FULL else ""
        raise ConfigError(f"{name} was not added: {exc}{full}") from exc


def _check_room(source: _Source, into: Path, staged: Path) -> None:
    """Refuse a model that the disk has no room for. Raises ``ConfigError``."""
    device = into.stat().st_dev
    need = sum(_new_bytes(place, device) for place in (source.weights, *source.files.values()))
    need -= sum(part.stat().st_size for part in staged.rglob("*.part"))
    _require(need, into, source.label)


def _require(need: int, folder: Path, label: str) -> None:
    free = free_bytes(folder)
    if need > 0 and need + SPARE_BYTES > free:
        raise ConfigError(
            f"{label} needs {need / MEGA:.1f} MB and {SPARE_BYTES / MEGA:.0f} MB to spare; the "
            f"disk of {folder} has {free / MEGA:.1f} MB free"
        )


def _new_bytes(place: Place, device: int) -> int:
    if isinstance(place, Path):
        found = place.stat()
        return 0 if found.st_dev == device else found.st_size
    return place[1].size_bytes


def _take(source: _Source, staged: Path, hub: Callable[[], Hub]) -> str:
    """Link, copy or fetch all files, the large one last; return the sha256 of the weights."""
    for name, place in (*source.files.items(), (source.file, source.weights)):
        target = staged / name
        target.parent.mkdir(exist_ok=True)
        target.unlink(missing_ok=True)
        if isinstance(place, Path):
            _link(place.resolve(), target)
        else:
            hub().fetch(*place, target)
    for left in staged.rglob("*.part"):  # of an earlier commit
        left.unlink()
    return file_digest(staged / source.file)


def _link(file: Path, target: Path) -> None:
    """Link a large file, or copy it where that is impossible."""
    try:
        # Settings and templates are edited later, and must not change the source.
        if target.suffix in (".rkllm", ".rknn"):
            target.hardlink_to(file)
            return
    except OSError as exc:
        if exc.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP):
            raise
    _require(file.stat().st_size, target.parent, str(file))
    shutil.copyfile(file, target)


def _unpack_template(staged: Path) -> None:
    """Write the template of an older chat_template.json as the file that is read."""
    older = staged / "chat_template.json"
    if not older.exists():
        return
    try:
        found = json.loads(older.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ConfigError(f"chat_template.json is not valid JSON: {exc}") from exc
    text = found.get("chat_template") if isinstance(found, dict) else None
    if isinstance(text, str) and not (staged / TEMPLATE).exists():
        (staged / TEMPLATE).write_text(text, encoding="utf-8")
    older.unlink()


def _describe(request: AddRequest, source: _Source, staged: Path, digest: str) -> AddedModel:
    """Write settings and manifest into a staged folder, and return what was found."""
    names = ((source.file, "the file's name"), (source.folder_name, "the name of its folder"))
    traits = read_traits(staged / source.file, names)
    file = staged / SETTINGS_FILE
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    if request.template is not None or _ASSUMED_TEMPLATE.search(text):
        text = _TEMPLATE_LINE.sub("", text)
    own = _own_settings(text)
    _write_settings(file, text, {}, source.label)
    template, template_source = _template(request, source, open_model_folder(staged))
    first = {} if template is None else {"chat_template": template}
    _write_settings(file, text, first, source.label)
    files = read_files(open_model_folder(staged))
    name = f"{staged.name} {source.folder_name} {source.file}"
    encoder = next((one for one in source.files if one.endswith(".rknn")), None)
    settings = {**first, **settings_of(traits, files, name, encoder)}
    missing_keys = {key: found for key, found in settings.items() if key not in own}
    _write_settings(file, text, missing_keys, source.label)
    kept = {key: Found(value, f"{SETTINGS_FILE} of the source") for key, value in own.items()}
    manifest = ModelManifest(
        source=source.label,
        weights=source.file,
        bytes=traits.size_bytes,
        sha256=digest,
        platform=_value(traits.platform),
        dtype=_value(traits.dtype),
        toolkit=_value(traits.toolkit),
        max_context=_value(traits.max_context),
        tokenizer=source.tokenizer_source or None,
        base_model=source.base_model,
    )
    (staged / MANIFEST_FILE).write_text(manifest.as_json(), encoding="utf-8")
    folder = open_model_folder(staged)
    missing = [*_missing(folder, files)]
    return AddedModel(
        request.into.absolute() / staged.name,
        manifest,
        traits,
        {**settings, **kept},
        source.tokenizer_source,
        template_source if files.template else "",
        (*source.notes, *warnings(traits), *_ends(folder, traits, encoder), *missing),
        not missing,
    )


def _template(
    request: AddRequest, source: _Source, folder: ModelFolder
) -> tuple[Found | None, str]:
    """Return the setting of a built-in chat template, if one is needed, and the template's source.

    Raises:
        ConfigError: the tokenizer_config.json is damaged.
    """
    if request.template in NAMED:
        return Found(request.template, "--template"), f"built-in {request.template}"
    if request.template is not None:
        return None, request.template
    if folder.settings.chat_template is not None:
        return None, f"built-in {folder.settings.chat_template}"
    if folder.chat_template is not None:
        return None, source.tokenizer_source or str(source.files.get(TEMPLATE, ""))
    assumed = template_by_name(f"{source.folder_name} {source.file} {source.base_model or ''}")
    if assumed is None:
        return None, ""
    return Found(assumed, "the family's name", assumed=True), f"built-in {assumed}, assumed"


def _missing(folder: ModelFolder, files: TokenizerFiles) -> Iterator[str]:
    """Yield what a model needs to be served well, and does not have."""
    if folder.tokenizer_file is None:
        yield (
            "there is no tokenizer.json: the KV cache is not reused, and tools, grammars and token "
            "counts are missing. Name that of the base model: --tokenizer FOLDER or --tokenizer "
            "hf:owner/repository, with --replace"
        )
    generates = folder.settings.embedding is None and folder.settings.rerank is None
    if generates and not files.template:
        yield (
            "there is no chat template, so that chats are refused; name a file or one of "
            f"{', '.join(sorted(NAMED))}: --template, with --replace"
        )
    elif generates and files.template_problem:
        yield f"the chat template cannot be used: {files.template_problem}"


def _ends(folder: ModelFolder, traits: ModelTraits, encoder: str | None) -> Iterator[str]:
    settings = folder.settings
    if not settings.eos_token_ids and misreads_end(traits) and settings.embedding is None:
        yield (
            "no end token is known, and RKLLM 1.3.0 and later misread that of models from toolkit "
            f"1.2.3 and older: set eos_token_ids in {SETTINGS_FILE} if answers do not end"
        )
    if encoder is not None and settings.vision is None:
        yield f"{encoder} is not used: set vision in {SETTINGS_FILE} (docs/how-to/vision.md)"


def _value(found: Found | None) -> Any:
    return None if found is None else found.value


def _own_settings(text: str) -> dict[str, Any]:
    """Return the settings that a source had already."""
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError as exc:
        raise ConfigError(f"{SETTINGS_FILE} of the source is not valid YAML: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{SETTINGS_FILE} of the source must be a mapping")
    return found


def _write_settings(file: Path, own: str, settings: Mapping[str, Found], label: str) -> None:
    """Write rkserve.yaml: the text that the source had, and what was found with its source."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in label)
    lines = [
        f"# By `rkserve model add` from {shown}; docs/reference/configuration.md has all keys."
    ]
    for key, found in settings.items():
        origin = f"{ASSUMED}{found.source}" if found.assumed else f" # {found.source}"
        lines.append(f"{key}: {json.dumps(found.value)}{origin}")
    text = "\n".join([*([own.rstrip()] if own.strip() else []), *(lines if settings else [])])
    kept = _own_settings(own)
    try:
        whole = yaml.safe_load(text) or {}
    except yaml.YAMLError:  # nothing can be appended to a mapping in braces
        whole = {}
    if whole != {**kept, **{key: found.value for key, found in settings.items()}}:
        text = "\n".join([yaml.safe_dump(kept, sort_keys=False).rstrip(), *lines])
    file.write_text(f"{text}\n", encoding="utf-8")


def _publish(staged: Path, target: Path, *, keep: bool) -> None:
    """Put a staged folder at its place; with ``keep`` other files there stay."""
    if keep:
        for file in staged.rglob("*"):
            if file.is_file() and not file.name.endswith((".rkllm", ".rknn")):
                there = target / file.relative_to(staged)
                there.parent.mkdir(exist_ok=True)
                file.replace(there)
        return
    old = target.with_name(f".{target.name}.replaced")
    if old.exists():
        shutil.rmtree(old)
    if target.exists():
        if (target / ADAPTERS).is_dir():
            shutil.copytree(target / ADAPTERS, staged / ADAPTERS, copy_function=os.link)
        target.rename(old)
    staged.rename(target)
    if old.exists():
        shutil.rmtree(old)
