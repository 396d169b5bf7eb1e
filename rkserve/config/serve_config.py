"""Everything that ``serve_config.yaml`` may say under ``args``, as frozen pydantic models.

It knows no other room. Units are in the names. It is the only reader of settings from the
environment; besides it, the simulator's build reads CC and XDG_CACHE_HOME, and an engine process
inherits its replica's environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import (
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from rkserve.config.board_group import BoardGroupConfig, Settings
from rkserve.config.explain import explain
from rkserve.config.images import ImagesConfig
from rkserve.config.responses import ResponsesConfig
from rkserve.core.block_hashes import FILES
from rkserve.core.errors import ConfigError

ADMIN_KEY_VARIABLE = "RKSERVE_ADMIN_KEY"
PROJECT = Path(__file__).resolve().parents[2]
MAX_PORT = 65535
_HOST_PATTERN = re.compile(r"\*|(\*\.)?[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_ORIGIN = re.compile(r"\*|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@*]+")
ROUNDING = 1e-9  # three shares of a third, say


class RouterConfig(Settings):
    """The OpenAI ingress."""

    replicas: int = Field(1, ge=1, le=64, description="Router replicas.")
    nodes: str = Field(
        "head",
        min_length=1,
        description="The nodes that they run on: `head`, without which nothing runs anyhow; `any`, "
        "where it is Serve that chooses, boards' nodes too; or those with the Ray resource of that "
        "name, of which each takes a thousandth (`ray start --resources='{\"ingress\": 1}'`).",
    )
    max_concurrent: int = Field(
        1000, ge=1, description="Requests that one Router replica handles at once."
    )
    max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, description="Longest request body; a longer one is a 413."
    )
    body_timeout_s: float = Field(
        30.0, gt=0, description="Longest time for a body to arrive; then 408."
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Host names by which clients reach the service, such as `llm.example.org` or "
        "`*.example.org`, without port; `*` allows every name. Always allowed: IP addresses, "
        "`localhost`, the HTTP host of Serve's configuration, and the names of the cluster's "
        "machines, also with `.local`, `.lan` and the like. Any other `Host` is a 421 "
        "([operations.md](../how-to/operations.md#web-pages-and-host-names)).",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="Origins whose web pages may call the service, such as "
        "`https://chat.example.org`; `*` allows all. They get CORS headers. Requests by pages of "
        "other origins than the service's own are a 403.",
    )
    ping_s: float = Field(
        10.0, gt=0, description="A silent stream gets an SSE comment this often, to keep it open."
    )
    report_s: float = Field(
        1.0, gt=0, description="How often the boards' reports are collected, outside of requests."
    )
    policy: str = Field(
        "prefix",
        description="The routing policy: `prefix`, `least_load`, `round_robin` or `session`, as "
        "[routing.md](../explanation/routing.md) describes them.",
    )
    board_wait_s: float = Field(
        20.0,
        ge=0,
        description="How long a request may wait for the board that has its KV cache, or its "
        "session's board, while others are free. With `prefix` it does so only where it is "
        "thought to have its first token sooner by that.",
    )
    prefix_files_per_board: int = Field(
        FILES,
        ge=1,
        le=FILES,
        description="Parked conversations of each board that a Router remembers with `prefix`, "
        f"about 1 KB each; the longest unused go first. Boards tell of the last {FILES}.",
    )
    accept_timeout_s: float = Field(
        10.0,
        gt=0,
        description="How long a board may take to accept or queue a request; then "
        "another board is asked.",
    )
    max_continuations: int = Field(
        8,
        ge=0,
        description="How many boards may be lost to one generation that another one goes on with; "
        "then it ends with the error.",
    )
    restart_wait_s: float = Field(
        60.0,
        ge=0,
        description="How long a generation that has lost its board waits where no other one can "
        "take it, such as for the restart of the only one.",
    )
    report_timeout_s: float = Field(
        2.0, gt=0, description="How long a board may take to report before it counts as lost."
    )
    control_timeout_s: float = Field(
        60.0,
        gt=0,
        description="How long a board may take for a control call, such as a pause during a slow "
        "token or building a prompt cache.",
    )
    admin_key: SecretStr | None = Field(
        None,
        description="Key for calls that reach into everybody's generations and caches, as "
        f"`Authorization: Bearer`. Better kept out of the file: `{ADMIN_KEY_VARIABLE}` in the "
        "environment of `serve run` stands in for it. Without a key those calls are taken from "
        "this machine only.",
    )
    admin_key_file: Path | None = Field(
        None,
        description="File whose first line that is neither empty nor a comment (`#`) is the admin "
        "key, readable on the nodes that Routers run on; it stands in for `admin_key`. It is read "
        "when a Router starts, and not again.",
    )
    api_keys_file: Path | None = Field(
        None,
        description="File with the keys that inference calls need, one on each line, `#` before "
        "comments; behind a key there may be what its owner may use "
        "([admission.md](../explanation/admission.md#keys)). Without the file everybody may call. "
        "It is read when a Router starts, and not again.",
    )
    queue_limit: int | None = Field(
        None,
        ge=0,
        le=100_000,
        description="Requests that may wait at one Router for boards of one model; then 429. "
        "Empty: as many as its boards' own queues hold, shared by the Routers.",
    )
    queue_timeout_s: float = Field(
        300.0, gt=0, description="Longest wait in that queue; then the request is given up."
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="How long an answer is of use where the request does not say "
        "(`x-request-timeout`, `timeout`). Empty: for ever.",
    )
    priority_min: int = Field(
        -10, description="The most urgent `priority` that a request may have; lower goes first."
    )
    priority_max: int = Field(10, description="The least urgent one.")
    max_board_s: float | None = Field(
        3600.0,
        gt=0,
        description="How long one generation may have boards, at work, in single steps, or paused "
        "inside the runtime; then it ends with a 504. `null`: for ever.",
    )
    board_seconds_per_minute: int | None = Field(
        600,
        ge=1,
        description="Board time that a key may use in a minute at one Router, where its line in "
        "`api_keys_file` does not say: ten boards that do nothing else. Then 429. `null`: any.",
    )
    grammar_processes: int = Field(
        2,
        ge=1,
        le=16,
        description="Processes of each Router in which new grammars are checked. Where keys are "
        "configured, one key never has all of several.",
    )
    grammars_waiting_per_key: int = Field(
        16,
        ge=1,
        description="New grammars of one key, or of all clients without keys, that may wait to be "
        "checked at one Router; then 429.",
    )
    headers_after_s: float = Field(
        10.0,
        gt=0,
        description="When a streamed answer that still waits for a board gets its headers, and "
        "pings from then on.",
    )
    images: ImagesConfig = ImagesConfig()
    responses: ResponsesConfig = ResponsesConfig()
    page: bool = Field(True, description="Whether `/` is the [chat page](../how-to/page.md).")

    @field_validator("allowed_hosts")
    @classmethod
    def _are_host_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not _HOST_PATTERN.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no host name; give it without scheme and port, such as "
                    "llm.example.org, *.example.org or *"
                )
        return tuple(name.lower() for name in names)

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin; give scheme, host and port without a path, such as "
                    "https://chat.example.org or http://localhost:3000"
                )
        return tuple(origin.lower() for origin in origins)

    @model_validator(mode="after")
    def _priorities_make_sense(self) -> RouterConfig:
        if not self.priority_min <= 0 <= self.priority_max:
            raise ValueError(
                "priority_min is 0 at most and priority_max 0 at least: 0 is that of a request "
                "which does not say"
            )
        return self


class ChannelConfig(Settings):
    """The connections over which boards send tokens to Routers. `channel: off` does without."""

    enabled: bool = Field(
        True, description="Whether boards listen for Routers. Without, tokens come through Ray."
    )
    ports: tuple[int, int] | None = Field(
        None,
        description="First and last port that boards may listen on, at their node's address, such "
        "as `[10100, 10131]` for a firewall: one for each board of a node. Without it any port.",
    )
    heartbeat_s: float = Field(
        1.0, gt=0, le=60, description="How often both ends of a connection say that they live."
    )
    silence_s: float = Field(
        10.0,
        gt=0,
        le=600,
        description="How long the other end may be silent, or may take to be reached, before it "
        "counts as lost.",
    )
    retry_s: float = Field(
        15.0,
        gt=0,
        description="How often a Router tries again to reach a board to which it has no "
        "connection; its generations go through Ray until then.",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> ChannelConfig:
        first, last = self.ports or (1, 1)
        if not 0 < first <= last <= MAX_PORT:
            raise ValueError(f"ports: {first} to {last} is no range of ports")
        if self.silence_s < 2 * self.heartbeat_s:
            raise ValueError("silence_s must be twice heartbeat_s at least")
        return self

    def candidates(self) -> Iterable[int]:
        """Ports to try; 0 is any."""
        return (0,) if self.ports is None else range(self.ports[0], self.ports[1] + 1)


def default_data_dir() -> Path:
    """Where a user's programs keep what must outlive them."""
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
    """The keeper of what the cluster shall be."""

    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="Folder on the head node for the ledger (what the cluster shall be, the "
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
        "call does not say; then what it did is undone.",
    )
    load_timeout_s: float = Field(
        300.0,
        gt=0,
        description="How long a board may take to load other base weights, with the requests that "
        "it lets end first; then the update is undone.",
    )
    report_s: float = Field(
        0.5, gt=0, description="How often the Coordinator asks the boards what they are."
    )
    max_operations: int = Field(
        10_000, ge=100, description="Operations, and lines of the audit log, that are remembered."
    )


def default_state_dir() -> Path:
    """A folder of each user's own: in the temporary one any account could prepare it."""
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
        default_factory=CoordinatorConfig, description="The keeper of what the cluster shall be."
    )
    channel: ChannelConfig = Field(
        ChannelConfig(),
        description="How tokens get from boards to Routers; `off` leaves that to Ray.",
    )
    state_dir: Path = Field(
        default_factory=default_state_dir,
        description="Folder for lock files, caches and staged files on every node, and for stored "
        "responses; it must be on a local disk. It must belong to Ray's user, and gets mode 0700; "
        "one that others may write to is refused. `~` is the home of Ray's user on that node.",
        json_schema_extra={"default": "`rkserve` in `$XDG_STATE_HOME`, else in `~/.local/state`"},
    )

    @property
    def deployed(self) -> tuple[BoardGroupConfig, ...]:
        """Every group as it is deployed, instances apart."""
        return tuple(one for group in self.boards for one in group.deployed())

    @field_validator("channel", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _names_differ(self) -> RkserveConfig:
        names = [group.name for group in self.deployed]
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
        return _with_admin_key(RkserveConfig.model_validate(args))
    except ValidationError as exc:
        raise ConfigError(
            f"serve_config.yaml, args: {explain(exc, RkserveConfig)} "
            "docs/reference/configuration.md lists all keys."
        ) from exc


def _with_admin_key(config: RkserveConfig) -> RkserveConfig:
    key = os.environ.get(ADMIN_KEY_VARIABLE, "").strip()  # a mounted secret ends with a newline
    if not key or config.router.admin_key is not None:
        return config
    router = config.router.model_copy(update={"admin_key": SecretStr(key)})
    return config.model_copy(update={"router": router})


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
        "RKSIM_BATCH_GAIN": simulated.batch_gain,
    }
    if simulated.load_s is not None:
        environ["RKSIM_LOAD_MS"] = repr(simulated.load_s * 1e3)
    if simulated.control_dir is not None:
        environ["RKSIM_CONTROL"] = str(simulated.control_dir.expanduser() / f"{board_id}.control")
    return environ
