"""All settings of ``serve_config.yaml`` under ``args``, as frozen pydantic models; and validation
errors of settings in words.

Units are in the names. This is the only reader of settings from the environment, except that the
simulator's build reads CC and XDG_CACHE_HOME, and an engine process inherits its replica's
environment. ``explain`` is for the settings of model folders and adapters too.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rkserve.config.board_group import BoardGroupConfig, Settings
from rkserve.config.router import ADMIN_KEY_VARIABLE, ChannelConfig, RouterConfig
from rkserve.core.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[2]
ROUNDING = 1e-9  # such as that of three shares of a third


def default_data_dir() -> Path:
    """Return the default folder for data that must survive restarts."""
    root = os.environ.get("XDG_DATA_HOME", "")
    # The specification wants a relative value ignored.
    return (Path(root) if Path(root).is_absolute() else Path("~/.local/share")) / "rkserve"


class CanaryConfig(Settings):
    """Limits that a canary is held to before it is promoted."""

    requests: int = Field(
        20, ge=0, description="Requests that must have ended with the canary before it can be good."
    )
    tokens: int = Field(
        200, ge=0, description="Tokens that it must have generated before it can be good."
    )
    failures: float = Field(
        0.05,
        ge=0,
        le=1,
        description="By how much its part of failed requests (0 to 1) may be above that of the "
        "active version.",
    )
    speed: float = Field(
        0.8,
        ge=0,
        le=1,
        description="Which part of the active version's decode tokens per second, on the same "
        "boards, it must reach; 0 does not compare speeds.",
    )


class CoordinatorConfig(Settings):
    """Settings of the Coordinator, which keeps the desired state of the cluster."""

    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="Folder on the head node for the ledger (the desired state, the "
        "operations, the audit log) and for uploaded adapters; it must be on a local disk, and one "
        "application alone may use it. `~` is the home of Ray's user there.",
        json_schema_extra={"default": "`rkserve` in `$XDG_DATA_HOME`, else in `~/.local/share`"},
    )
    max_adapter_bytes: int = Field(
        2 * 1024**3, ge=1, description="Largest adapter that is taken, uploaded or registered."
    )
    max_model_bytes: int = Field(
        16 * 1024**3, ge=1, description="Largest file of base weights that is taken."
    )
    allowed_paths: tuple[Path, ...] = Field(
        (),
        description="Folders of the head node from which adapters and base weights may be "
        "registered by their path.",
    )
    allowed_urls: tuple[str, ...] = Field(
        (),
        description="Beginnings of URLs from which adapters and base weights may be registered, "
        "such as "
        "`https://models.example.org/lora/`.",
    )
    keep_versions: int = Field(
        2,
        ge=0,
        le=64,
        description="Versions of each adapter that stay addressable as `name@version` after a "
        "newer one has replaced them, besides the one that a rollback returns to.",
    )
    try_adapters: bool = Field(
        True,
        description="Whether one board tries each new adapter before any other gets to load it: it "
        "ends its engine, loads the model and the adapter in a fresh one, and serves with that one "
        "only if it generates. Each new adapter costs one board a load of the model; a trainer "
        "that sends versions in quick succession may do without.",
    )
    canary: CanaryConfig = Field(
        CanaryConfig(), description="The limits by which canaries are judged."
    )
    stage_timeout_s: float = Field(
        600.0, gt=0, description="Longest time for an adapter to reach the disks of all boards."
    )
    operation_timeout_s: float = Field(
        60.0,
        gt=0,
        description="How long a control call may take, such as a pause of the cluster, where the "
        "call has none; its effects are undone then.",
    )
    load_timeout_s: float = Field(
        300.0,
        gt=0,
        description="How long a board may take to load other base weights, with the requests that "
        "it lets end first; then the update is undone.",
    )
    ledger_copies: int = Field(
        2,
        ge=0,
        le=16,
        description="Boards, on as many nodes other than the head's, that get a copy of the "
        "ledger's newest backup, at most every 10 minutes each "
        "([backup.md](../how-to/backup.md#copies-on-boards)); 0 sends none.",
    )
    report_s: float = Field(
        0.5, gt=0, description="How often the Coordinator asks the boards what they are."
    )
    max_operations: int = Field(
        10_000, ge=100, description="Operations, and lines of the audit log, that are remembered."
    )


class CatalogConfig(Settings):
    """The models on the head that boards fetch: those of groups with `model: catalog:NAME`."""

    folder: Path = Field(
        Path("models"),
        description="Folder of the models on the head node, to which `rkserve model add` and "
        "`rkserve model push` add. A relative path is looked up as `model` of a group is.",
    )
    piece_bytes: int = Field(
        4 * 1024**2,
        ge=1024,
        le=16 * 1024**2,
        description="Size of the pieces in which models are fetched, each with a sha256 of its "
        "own. A board has a few of them in memory at a time.",
    )
    max_bytes_per_s: float | None = Field(
        None,
        gt=0,
        description="Limit of each board's fetch, so that it leaves room for answers on a slow "
        "network; empty sets none.",
    )


# The line of an Ed25519 key in a file such as id_ed25519.pub, with its name as the comment.
PUBLIC_KEY = (
    r"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI[A-Za-z0-9+/]{43} [A-Za-z0-9][A-Za-z0-9._@+-]{0,63}"
)


class SignatureRule(str, Enum):
    """The files that need a manifest signed with a pinned key."""

    NONE = "none"
    ADAPTERS = "adapters"
    ALL = "all"

    def covers(self, *, adapters: bool) -> bool:
        """Return whether a file needs one that is an adapter, or holds some."""
        return self is SignatureRule.ALL or (self is SignatureRule.ADAPTERS and adapters)


class SecurityConfig(Settings):
    """Access to the service, and trust in files ([security.md](../how-to/security.md))."""

    open: bool = Field(
        False,
        description="Whether clients without a key may generate and read, from every address that "
        "reaches the endpoint. Without it they may only where `http_options.host` is this machine "
        "and no key was ever made; where it is another, every call needs a key (`rkserve up` makes "
        "the first one, `serve run` refuses to start without). It does not open the control of the "
        "cluster.",
    )
    trusted_keys: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="Public keys whose signatures of adapters and models count: lines of `.pub` "
        "files, `ssh-ed25519 AAAA... NAME`.",
    )
    trusted_keys_file: Path | None = Field(
        None,
        description="File on the head node with such lines. It is read when the Coordinator "
        "starts.",
    )
    require_signatures: SignatureRule = Field(
        SignatureRule.NONE,
        description="The files that are taken only with a manifest that one of these keys has "
        "signed: `adapters` (also pushed model folders that have some), or `all`, which adds base "
        "weights and all pushed model folders. A manifest that comes with a file is checked in any "
        "case.",
    )

    @field_validator("trusted_keys")
    @classmethod
    def _are_keys(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for line in given:
            if not re.fullmatch(PUBLIC_KEY, line):
                raise ValueError(
                    "each entry is the line of an Ed25519 key, 'ssh-ed25519 AAAA... NAME'"
                )
        return given

    @model_validator(mode="after")
    def _required_keys_are_there(self) -> SecurityConfig:
        has_keys = bool(self.trusted_keys) or self.trusted_keys_file is not None
        if self.require_signatures is not SignatureRule.NONE and not has_keys:
            raise ValueError(
                f"require_signatures is '{self.require_signatures.value}', and there is no key; "
                "set trusted_keys or trusted_keys_file"
            )
        return self


def default_state_dir() -> Path:
    """Return a folder of the user's own: one in the temporary folder could be prepared by any
    account.
    """
    root = os.environ.get("XDG_STATE_HOME", "")
    # The specification wants a relative value ignored.
    return (Path(root) if Path(root).is_absolute() else Path("~/.local/state")) / "rkserve"


class RkserveConfig(Settings):
    """The ``args`` of the application."""

    boards: tuple[BoardGroupConfig, ...] = Field(
        ..., min_length=1, description="Groups of boards; several groups may serve several models."
    )
    router: RouterConfig = RouterConfig()
    coordinator: CoordinatorConfig = Field(
        default_factory=CoordinatorConfig,
        description="The Coordinator, which keeps the desired state of the cluster.",
    )
    catalog: CatalogConfig = Field(
        CatalogConfig(), description="The models on the head that boards fetch."
    )
    security: SecurityConfig = Field(SecurityConfig(), description="The callers that need no key.")
    channel: ChannelConfig = Field(
        ChannelConfig(),
        description="How tokens get from boards to Routers; `off` leaves that to Ray.",
    )
    state_dir: Path = Field(
        default_factory=default_state_dir,
        description="Folder for lock files, caches, fetched models and staged files on every node, "
        "for stored responses, and for the usage of API keys; it must be on a local disk. It must "
        "belong to Ray's user, and gets mode 0700; one that others may write to is refused. `~` is "
        "the home of Ray's user on that node.",
        json_schema_extra={"default": "`rkserve` in `$XDG_STATE_HOME`, else in `~/.local/state`"},
    )

    @property
    def deployed(self) -> tuple[BoardGroupConfig, ...]:
        """The deployed groups, one per instance; upstreams are none."""
        return tuple(
            one for group in self.boards if group.upstream is None for one in group.deployed()
        )

    @property
    def upstreams(self) -> tuple[BoardGroupConfig, ...]:
        """The groups that are upstreams."""
        return tuple(group for group in self.boards if group.upstream is not None)

    def folder_of(self, group: BoardGroupConfig) -> Path:
        """Return a group's model folder on the head. Raises ``ConfigError`` if there is none."""
        name = group.catalog_model
        if name is None:
            return resolve_folder(group.model)
        folder = resolve_folder(self.catalog.folder / name)
        if not folder.is_dir():
            raise ConfigError(
                f"The catalogue {folder.parent} has no model {name}, which group {group.name} "
                f"serves; run: rkserve model add SOURCE --name {name} --into {folder.parent}"
            )
        return folder

    @model_validator(mode="after")
    def _catalog_is_on_the_head(self) -> RkserveConfig:
        named = [group.name for group in self.boards if group.catalog_model is not None]
        if named and self.router.nodes != "head":
            raise ValueError(
                f"group {named[0]} serves a model of the catalogue, whose tokenizer is on the head "
                "only; set router.nodes to head"
            )
        return self

    @model_validator(mode="after")
    def _open_has_no_client_keys(self) -> RkserveConfig:
        if self.security.open and self.router.api_keys_file is not None:
            raise ValueError(
                "security.open and router.api_keys_file exclude each other: with the file every "
                "client needs a key; leave one of them out"
            )
        return self

    @field_validator("channel", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _names_differ(self) -> RkserveConfig:
        names = [group.name for group in (*self.deployed, *self.upstreams)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"group names must differ; used twice: {', '.join(twice)}")
        return self

    @model_validator(mode="after")
    def _groups_fit_on_one_board(self) -> RkserveConfig:
        real = [group for group in self.deployed if group.library is not None]
        total = sum(group.rknpu for group in real)
        if total > 1 + ROUNDING:
            shares = ", ".join(f"{group.name}: {group.rknpu:g}" for group in real)
            raise ValueError(
                f"the shares 'rknpu' of the groups with a library add up to {total:g} ({shares}), "
                "but every one of these groups gets a replica on every board; give them 1 at most "
                f"together, {100 // len(real) / 100:g} each for example"
            )
        total = sum(group.cpu.share for group in self.deployed if group.cpu is not None)
        if total > 1 + ROUNDING:
            raise ValueError(
                f"the shares 'cpu.share' of the groups with 'cpu' add up to {total:g}, but every "
                "one of these groups gets a replica on every node; give them 1 at most together"
            )
        for number in sorted({group.base_domain_id for group in real}):
            names = [group.name for group in real if group.base_domain_id == number]
            if len(names) > 1:
                raise ValueError(
                    f"the groups {' and '.join(names)} have the same base_domain_id {number}, but "
                    "they meet on every board, and each model needs a domain of its own; give each "
                    "group another number from 0 to 15"
                )
        return self


def parse_config(args: Any) -> RkserveConfig:
    """Return the settings. Raises ``ConfigError`` that names every wrong key and its allowed
    values.
    """
    if isinstance(args, RkserveConfig):
        return args
    try:
        return _with_admin_key(RkserveConfig.model_validate(args))
    except ValidationError as exc:
        raise ConfigError(
            f"serve_config.yaml, args: {explain(exc, RkserveConfig)} "
            "docs/reference/configuration.md lists all keys."
        ) from exc


def config_digest(config: RkserveConfig) -> str:
    """Return a digest by which two configurations can be compared. Keys are not part of it."""
    content = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _with_admin_key(config: RkserveConfig) -> RkserveConfig:
    key = os.environ.get(ADMIN_KEY_VARIABLE, "").strip()  # a mounted secret ends with a newline
    if not key or config.router.admin_key is not None:
        return config
    router = config.router.model_copy(update={"admin_key": SecretStr(key)})
    return config.model_copy(update={"router": router})


def resolve_folder(path: Path, project: Path = PROJECT) -> Path:
    """Return the path of a configured folder on this machine.

    A checkout contains its own models, so that it runs from any working directory; an installed
    package has nothing beside it.

    Raises:
        ConfigError: a relative path leads to nothing; the message names the places of the search.
    """
    path = path.expanduser()
    if path.is_absolute():
        return path
    places = [Path.cwd()]
    if (project / "pyproject.toml").is_file():
        places.append(project)
    for place in places:
        if (place / path).exists():
            return place / path
    looked = " and in ".join(str(place) for place in dict.fromkeys(places))
    raise ConfigError(
        f"The model folder {path} does not exist; it was looked up in {looked}. Check `model` in "
        "the config, and best give the whole path."
    )


def engine_environ(group: BoardGroupConfig, board_id: str) -> dict[str, str]:
    """Return the variables added to the clean environment of a board's engine process."""
    # The library's own log level 1 prints the perf table; operators may raise it to 2.
    environ = {"RKLLM_LOG_LEVEL": os.environ.get("RKLLM_LOG_LEVEL", "0")}
    if group.simulated is None:
        return environ
    simulated = group.simulated
    environ |= {
        "RKSIM_PROFILE": simulated.profile,
        "RKSIM_TIME_SCALE": repr(simulated.time_scale),
        "RKSIM_STRICT": "1" if simulated.strict else "0",
        "RKSIM_BATCH_GAIN": simulated.batch_gain,
        "RKSIM_DISK_MB_PER_S": repr(simulated.disk_mb_per_s),
    }
    if simulated.load_s is not None:
        environ["RKSIM_LOAD_MS"] = repr(simulated.load_s * 1e3)
    if simulated.control_dir is not None:
        environ["RKSIM_CONTROL"] = str(simulated.control_dir.expanduser() / f"{board_id}.control")
    return environ


SCALARS = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}
LONGEST_QUOTE = 40


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return what is wrong and what is allowed: one sentence for each wrong key of ``model``."""
    problems = error.errors(include_url=False)
    places = [problem["loc"] for problem in problems]
    return " ".join(
        _sentence(problem, model)
        for problem in problems
        # Pydantic omits wrong entries from a list, and then reports the list as too short as well.
        if not (problem["type"] == "too_short" and _is_around(problem["loc"], places))
    )


def allowed(field: FieldInfo) -> str:
    """Return the allowed values of a setting in words: ``a whole number from 1 to 256``."""
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
        problem_text = _unknown_key(place, model)
    elif problem["type"] == "value_error":
        problem_text = _own_words(problem)
    else:
        problem_text = _expectation(problem, model)
    return f"{key}: {problem_text}" if (key := _key(place)) else problem_text


def _key(place: Sequence[Any]) -> str:
    """Return a location as ``boards[0].simulated.release``."""
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
    """Return the message of a validator of ours; for a single value, with that value quoted."""
    words = str(problem["ctx"]["error"])
    if isinstance(problem["input"], Mapping):
        return f"{words}."
    return f"{words}; not {_quote(problem['input'])}."


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
        bare = _without_none(annotation)
        if isinstance(part, int):
            annotation, limits = get_args(bare)[0], ()
            continue
        if get_origin(bare) is dict:
            annotation, limits = get_args(bare)[1], ()
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
    choices = get_args(bare) if get_origin(bare) is Literal else ()
    if isinstance(bare, type) and issubclass(bare, Enum):
        choices = tuple(choice.value for choice in bare)
    if choices:
        return " or ".join(map(str, choices))
    if get_origin(bare) is tuple:
        return f"a list{_length(limits)}, each entry {_allowed(get_args(bare)[0], ())}"
    if get_origin(bare) is dict:
        return f"a block of names, each with {_allowed(get_args(bare)[1], ())}"
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
    """Return a value as in the file, shortened."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "a block of keys"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list" if value else "an empty list"
    if not isinstance(value, str):
        return str(value)
    return repr(value if len(value) <= LONGEST_QUOTE else f"{value[:LONGEST_QUOTE]}...")
