"""A model folder as a frozen value: weights, tokenizer files, and the folder's own settings.

It reads files and judges them; it neither tokenizes nor loads weights, and knows no other room.
Whatever is wrong in settings, here or in serve_config.yaml, is put into words by ``explain``.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rkserve.errors import ConfigError
from rkserve.messages import Sampling

SETTINGS_FILE = "rkserve.yaml"
CONTEXT_STEP = 32  # the vendor's converter demands a multiple of 32
CONTEXT_MAX = 16384
MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class SamplingDefaults(BaseModel):
    """What a request gets that does not say otherwise; on RKLLM 1.2.x, what every request gets."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(
        0.8, ge=0, le=2, description="How freely tokens are chosen; 0 always takes the likeliest."
    )
    top_p: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Choose among the likeliest tokens that reach this sum; 1: all.",
    )
    top_k: int = Field(40, ge=1, description="Choose among this many of the likeliest tokens.")
    repeat_penalty: float = Field(
        1.1, gt=0, le=10, description="Factor against tokens that were there before; 1 is off."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="Held against a token each time that it was there; 0 is off."
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="Held once against a token that was there; 0 is off."
    )

    def values(self) -> Sampling:
        """Return them as the value that requests carry."""
        return Sampling(**self.model_dump())


class FolderSettings(BaseModel):
    """What rkserve needs to know about a model beyond its files; every key is optional."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    context_length: int = Field(
        4096,
        ge=CONTEXT_STEP,
        le=CONTEXT_MAX,
        multiple_of=CONTEXT_STEP,
        description="Tokens of prompt and answer together; at most what the model was converted "
        "for.",
    )
    eos_token_ids: tuple[NonNegativeInt, ...] = Field(
        (),
        description="Ids of tokens that end an answer, also where the runtime reads a wrong one "
        "from the model's file.",
    )
    chat_template: str | None = Field(
        None,
        description="A built-in chat template in the place of the folder's own; docs/api.md lists "
        "their names.",
    )
    sampling: SamplingDefaults = SamplingDefaults()


class ModelFolder(BaseModel):
    """One servable model. ``id`` is the name that requests use: the folder's name.

    ``weights`` is None where the folder holds tokenizer files only, as on a head node.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    path: Path
    weights: Path | None
    settings: FolderSettings

    def require_weights(self) -> Path:
        """Return the model's file. Raises ``ConfigError`` where this machine does not have it."""
        if self.weights is None:
            raise ConfigError(f"{self.path} holds no *.rkllm file. Copy the converted model there.")
        return self.weights

    @property
    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, or None in text mode."""
        file = self.path / "tokenizer.json"
        return file if file.is_file() else None

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json as it stands, empty where there is none."""
        file = self.path / "tokenizer_config.json"
        if not file.is_file():
            return {}
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{file} is not valid JSON: {exc}") from exc
        if not isinstance(found, dict):
            raise ConfigError(f"{file} must hold a JSON object")
        return found

    @cached_property
    def chat_template(self) -> str | None:
        """The folder's own Jinja chat template, or None."""
        separate = self.path / "chat_template.jinja"
        if separate.is_file():
            return separate.read_text(encoding="utf-8")
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several named ones; "default" is the plain chat
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None


def open_model_folder(path: Path) -> ModelFolder:
    """Read a model folder.

    Raises:
        ConfigError: no such folder, several ``*.rkllm`` in it, or bad settings; the message names
            the file and the key.
    """
    if not path.is_dir():
        raise ConfigError(f"The model folder {path} does not exist. Check `model` in the config.")
    if not MODEL_ID.fullmatch(path.name):
        raise ConfigError(
            f"The model folder's name {path.name!r} is the model's id and may hold only letters, "
            "digits, '.', '_' and '-'."
        )
    return ModelFolder(
        id=path.name, path=path, weights=_weights(path), settings=_settings(path / SETTINGS_FILE)
    )


def _weights(path: Path) -> Path | None:
    preferred = path / "model.rkllm"
    if preferred.is_file():
        return preferred
    found = sorted(path.glob("*.rkllm"))
    if len(found) == 1:
        return found[0]
    if not found:
        return None
    names = ", ".join(f.name for f in found)
    raise ConfigError(f"{path} holds several models ({names}); name one of them model.rkllm.")


def _settings(file: Path) -> FolderSettings:
    if not file.is_file():
        return FolderSettings()
    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as exc:
        raise ConfigError(f"{file} cannot be read: {exc}") from exc
    try:
        return FolderSettings.model_validate(loaded or {})
    except ValidationError as exc:
        raise ConfigError(f"{file}: {explain(exc, FolderSettings)}") from exc


# -- settings in words ----------------------------------------------------------------------------

SCALARS = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}
LONGEST_QUOTE = 40


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Say what is wrong and what would be right: one sentence for each wrong key of ``model``."""
    problems = error.errors(include_url=False)
    places = [problem["loc"] for problem in problems]
    return " ".join(
        _sentence(problem, model)
        for problem in problems
        # Pydantic leaves wrong entries out of a list, and then finds the list too short as well.
        if not (problem["type"] == "too_short" and _is_around(problem["loc"], places))
    )


def allowed(field: FieldInfo) -> str:
    """Return in words what a setting may be: ``a whole number from 1 to 256``."""
    return _allowed(field.annotation, field.metadata)


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """Return the settings inside a setting: those of a block, or of each entry of a list."""
    bare = _without_none(annotation)
    if get_origin(bare) is tuple:
        bare = get_args(bare)[0]
    return bare if isinstance(bare, type) and issubclass(bare, BaseModel) else None


def _is_around(outer: Sequence[Any], places: Iterable[Sequence[Any]]) -> bool:
    return any(len(inner) > len(outer) and inner[: len(outer)] == outer for inner in places)


def _sentence(problem: ErrorDetails, model: type[BaseModel]) -> str:
    place = problem["loc"]
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        place = (*place[:-1], str(place[-1]))  # a key that YAML read as a number is no index
        said = _unknown_key(place, model)
    elif problem["type"] == "value_error":
        said = _own_words(problem)
    else:
        said = _expectation(problem, model)
    return f"{key}: {said}" if (key := _key(place)) else said


def _key(place: Sequence[Any]) -> str:
    """Write a place as ``boards[0].simulated.release``."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).removeprefix(".")


def _unknown_key(place: Sequence[Any], model: type[BaseModel]) -> str:
    *above, key = place
    annotation, _ = _look_up(above, model)
    inside = inner_model(annotation)
    known = list(inside.model_fields) if inside is not None else []
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return f"unknown key '{key}'; did you mean '{near[0]}'?"
    return f"unknown key '{key}'; the keys here are {', '.join(known)}."


def _own_words(problem: ErrorDetails) -> str:
    """The words of a validator of ours; where it looked at a single value, that is quoted."""
    said = str(problem["ctx"]["error"])
    if isinstance(problem["input"], Mapping):
        return f"{said}."
    return f"{said}; not {_quote(problem['input'])}."


def _expectation(problem: ErrorDetails, model: type[BaseModel]) -> str:
    words = _allowed(*_look_up(problem["loc"], model))
    if problem["type"] == "missing":
        return f"this key is missing; it must be {words}."
    return f"must be {words}, not {_quote(problem['input'])}."


def _look_up(place: Sequence[Any], model: type[BaseModel]) -> tuple[Any, Sequence[Any]]:
    """Return the type of a setting, and its limits."""
    annotation: Any = model
    limits: Sequence[Any] = ()
    for part in place:
        if isinstance(part, int):
            annotation, limits = get_args(_without_none(annotation))[0], ()
            continue
        inside = inner_model(annotation)
        assert inside is not None, f"{part} of {place} is below no block of settings"
        field = inside.model_fields[part]
        annotation, limits = field.annotation, field.metadata
    return annotation, limits


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (kind for kind in get_args(annotation) if kind is not type(None))
    return annotation


def _allowed(annotation: Any, limits: Sequence[Any]) -> str:
    bare = _without_none(annotation)
    if get_origin(bare) is Annotated:
        return _allowed(get_args(bare)[0], bare.__metadata__)
    if get_origin(bare) is Literal:
        return " or ".join(str(choice) for choice in get_args(bare))
    if get_origin(bare) is tuple:
        return f"a list{_length(limits)}, each entry {_allowed(get_args(bare)[0], ())}"
    if inner_model(bare) is not None:
        return "a block of keys"
    bounds = dict(_bounds(limits))
    step = bounds.get("multiple_of")
    kind = f"a multiple of {step}" if step else SCALARS.get(bare, "text")
    return f"{kind}{_range(bounds)}"


def _bounds(limits: Sequence[Any]) -> Iterator[tuple[str, float]]:
    for limit in limits:
        for name in ("ge", "gt", "le", "multiple_of"):
            if hasattr(limit, name):
                yield name, getattr(limit, name)


def _range(bounds: Mapping[str, float]) -> str:
    match bounds:
        case {"ge": lowest, "le": highest}:
            return f" from {lowest} to {highest}"
        case {"gt": below, "le": highest}:
            return f" above {below}, up to {highest}"
        case {"ge": lowest}:
            return f" of at least {lowest}"
        case {"gt": below}:
            return f" above {below}"
    return ""


def _length(limits: Sequence[Any]) -> str:
    return " with at least one entry" if any(hasattr(x, "min_length") for x in limits) else ""


def _quote(value: Any) -> str:
    """Show a value as the file has it, as far as that is short."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "a block of keys"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list" if value else "an empty list"
    if not isinstance(value, str):
        return str(value)
    return repr(value if len(value) <= LONGEST_QUOTE else f"{value[:LONGEST_QUOTE]}...")
