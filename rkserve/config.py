"""Everything that ``serve_config.yaml`` may say under ``args``, as frozen pydantic models.

It knows no other room. Units are in the names. It is the only reader of settings from the
environment; besides it, the simulator's build reads CC and XDG_CACHE_HOME, and an engine process
inherits its replica's environment.
"""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    field_validator,
    model_validator,
)

from rkserve.errors import ConfigError
from rkserve.modelfolder import explain

GROUP_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
PROJECT = Path(__file__).resolve().parents[1]
ROUNDING = 1e-9  # three shares of a third, say


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SimulatedConfig(_Settings):
    """Simulated boards instead of real ones: the embedded default, for a laptop and for tests."""

    boards: int = Field(3, ge=1, le=256, description="How many boards to simulate.")
    release: Literal["1.2.3", "1.3.0"] = Field("1.3.0", description="RKLLM release to imitate.")
    profile: str = Field(
        "rk3588-qwen2.5-1.5b-w8a8",
        description="Whose published speed to imitate; docs/simulator.md lists the profiles.",
    )
    time_scale: float = Field(
        1.0, ge=0, le=100, description="Factor on all times; 0 is as fast as possible."
    )
    load_s: float | None = Field(
        None, ge=0, le=600, description="Model load time in seconds; empty takes the model's own."
    )
    strict: bool = Field(
        False, description="End the engine on any misuse of the C API, with the misuse's name."
    )
    control_dir: Path | None = Field(
        None,
        description="Folder of control files, one per board (sim-0.control), to inject faults. `~` "
        "is the home of Ray's user; a relative path starts in the working directory of Ray's "
        "processes, which is seldom the shell's.",
    )


class PatienceConfig(_Settings):
    """How long the library may be silent before it counts as hung, in seconds."""

    first_token_s: float = Field(
        30.0, gt=0, description="For the first token, besides the prompt's own time."
    )
    prefill_per_token_s: float = Field(
        0.1, ge=0, description="More for each prompt token: long prompts legally take minutes."
    )
    token_s: float = Field(10.0, gt=0, description="Between two tokens.")
    abort_s: float = Field(
        2.0, gt=0, description="From an abort to the run's return; then the engine is killed."
    )


class BoardGroupConfig(_Settings):
    """Boards that serve one model: one Ray Serve deployment, one replica per board."""

    name: str = Field(..., description="Name of the group; its deployment is `Board-<name>`.")
    model: Path = Field(
        ...,
        description="Model folder, the same path on head and boards; its name is the model id. "
        "A relative path is looked up in the working directory and then, in a checkout, in the "
        "project's folder.",
    )
    library: Path | None = Field(
        None, description="Path of librkllmrt.so on the boards. Leave out for simulated boards."
    )
    simulated: SimulatedConfig | None = Field(
        None, description="Simulate the boards. Exactly one of library and simulated is set."
    )
    rknpu: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of a board's NPU (custom resource `rknpu`) that one replica takes. "
        "Every group with a library gets a replica on every board: their sum is 1 at most.",
    )
    max_boards: int = Field(64, ge=1, le=1024, description="Upper limit on boards of this group.")
    base_domain_id: int = Field(
        0,
        ge=0,
        le=15,
        description="IOMMU domain to start in; each group with a library has its own.",
    )
    library_cpus: tuple[NonNegativeInt, ...] = Field(
        (), description="Cores that the library may use; empty leaves its own choice (4 to 7)."
    )
    pin_cpus: tuple[NonNegativeInt, ...] = Field(
        (), description="Cores that the engine process is pinned to; empty leaves all."
    )
    queue_limit: int = Field(
        16, ge=0, le=10_000, description="Requests that may wait for one board; then 429."
    )
    queue_timeout_s: float = Field(
        300.0, gt=0, description="Longest wait for a board; then the request is given up."
    )
    patience: PatienceConfig = PatienceConfig()
    load_timeout_s: float = Field(
        180.0, gt=0, description="Longest time for loading the model into the NPU."
    )
    slot_timeout_s: float = Field(
        20.0, ge=0, description="Longest wait for a predecessor's replica to let go of the board."
    )
    drain_timeout_s: float = Field(
        30.0,
        ge=0,
        description="How long a board that is redeployed or removed may go on with the answers "
        "that it has begun; those that take longer end with an error.",
    )
    crash_limit: int = Field(
        3, ge=1, description="Engine crashes within crash_window_s that quarantine a board."
    )
    crash_window_s: float = Field(60.0, gt=0, description="Window of crash_limit.")
    quarantine_s: float = Field(
        60.0, ge=0, description="How long a quarantined board rests before its engine is retried."
    )
    health_check_period_s: float = Field(
        2.0, gt=0, description="How often Ray asks a board whether it is well."
    )
    health_check_timeout_s: float = Field(
        5.0, gt=0, description="How long Ray waits for that answer."
    )

    @field_validator("name")
    @classmethod
    def _name_is_plain(cls, name: str) -> str:
        if not GROUP_NAME.fullmatch(name):
            raise ValueError("use up to 32 letters, digits and '-', beginning with a letter")
        return name

    @model_validator(mode="after")
    def _one_kind_of_board(self) -> BoardGroupConfig:
        if (self.library is None) == (self.simulated is None):
            raise ValueError("set exactly one of 'library' (real boards) and 'simulated'")
        return self


class RouterConfig(_Settings):
    """The OpenAI ingress."""

    replicas: int = Field(1, ge=1, le=64, description="Router replicas.")
    max_concurrent: int = Field(
        1000, ge=1, description="Requests that one Router replica handles at once."
    )
    max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, description="Longest request body; a longer one is a 413."
    )
    body_timeout_s: float = Field(
        30.0, gt=0, description="Longest time for a body to arrive; then 408."
    )
    ping_s: float = Field(
        10.0, gt=0, description="A silent stream gets an SSE comment this often, to keep it open."
    )
    report_s: float = Field(
        1.0, gt=0, description="How often the boards' reports are collected, outside of requests."
    )
    accept_timeout_s: float = Field(
        10.0,
        gt=0,
        description="How long a board may take to accept or queue a request; then "
        "another board is asked.",
    )
    report_timeout_s: float = Field(
        2.0, gt=0, description="How long a board may take to report before it counts as lost."
    )


def default_state_dir() -> Path:
    """Per user, so that two users of one machine do not trip over each other's lock files."""
    return Path(tempfile.gettempdir()) / f"rkserve-{getpass.getuser()}"


class RkserveConfig(_Settings):
    """The ``args`` of the application."""

    boards: tuple[BoardGroupConfig, ...] = Field(
        ..., min_length=1, description="Groups of boards; several groups may serve several models."
    )
    router: RouterConfig = RouterConfig()
    state_dir: Path = Field(
        default_factory=default_state_dir,
        description="Folder for lock files on every node; it must be on a local disk. `~` is the "
        "home of Ray's user on that node.",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> RkserveConfig:
        names = [group.name for group in self.boards]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"group names must differ; used twice: {', '.join(twice)}")
        return self

    @model_validator(mode="after")
    def _groups_fit_on_one_board(self) -> RkserveConfig:
        real = [group for group in self.boards if group.library is not None]
        total = sum(group.rknpu for group in real)
        if total > 1 + ROUNDING:
            shares = ", ".join(f"{group.name}: {group.rknpu:g}" for group in real)
            raise ValueError(
                f"the shares 'rknpu' of the groups with a library add up to {total:g} ({shares}), "
                "but every one of these groups gets a replica on every board; give them 1 at most "
                f"together, {100 // len(real) / 100:g} each for example"
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
    """Return the settings. Raises ``ConfigError`` that names every wrong key and what it may be."""
    if isinstance(args, RkserveConfig):
        return args
    try:
        return RkserveConfig.model_validate(args)
    except ValidationError as exc:
        raise ConfigError(
            f"serve_config.yaml, args: {explain(exc, RkserveConfig)} docs/configuration.md lists "
            "all keys."
        ) from exc


def resolve_folder(path: Path, project: Path = PROJECT) -> Path:
    """Return where a configured folder is on this machine.

    A checkout brings its own models, so that it runs from any working directory; an installed
    package has nothing beside it.

    Raises:
        ConfigError: a relative path leads to nothing; the message says where it was looked up.
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
    """Return what a board's engine process gets on top of the replica's environment."""
    # The library's own log level 1 prints the perf table; operators may raise it to 2.
    environ = {"RKLLM_LOG_LEVEL": os.environ.get("RKLLM_LOG_LEVEL", "0")}
    if group.simulated is None:
        return environ
    simulated = group.simulated
    environ |= {
        "RKSIM_PROFILE": simulated.profile,
        "RKSIM_TIME_SCALE": repr(simulated.time_scale),
        "RKSIM_STRICT": "1" if simulated.strict else "0",
    }
    if simulated.load_s is not None:
        environ["RKSIM_LOAD_MS"] = repr(simulated.load_s * 1e3)
    if simulated.control_dir is not None:
        environ["RKSIM_CONTROL"] = str(simulated.control_dir.expanduser() / f"{board_id}.control")
    return environ
