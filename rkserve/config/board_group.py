"""The settings of one group of boards, as frozen pydantic models.

Units are in the names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

from rkserve.core.run_params import Confine, Guided, SimulatedRelease

GROUP_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
HOOK_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
CATALOG = "catalog:"  # before the name of a model of the head's catalogue
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NPU, CPU = "rknpu", "rkcpu"  # custom resources of Ray
# What a group of an upstream may set.
OF_UPSTREAM = frozenset(("name", "model", "upstream", "queue_limit"))
_UPSTREAM_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?", re.IGNORECASE)
# Settings that llama.cpp has no use for.
OF_RKLLM = frozenset(
    (
        *("encoder_library", "encoder_cores", "image_cache_bytes", "rknpu", "base_domain_id"),
        *("library_cpus", "embed_flash", "instances", "instance_cpus", "quirks", "quirks_file"),
        *("allow_unlisted", "guided"),
    )
)
MAX_DOMAINS = 16  # RKNPU_MAX_IOMMU_DOMAIN_NUM of the kernel driver


class Settings(BaseModel):
    """A block of settings: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Take a pickled value; that of an earlier release lacks settings, which get defaults.

        Settings of a later release are left out: the head may be updated after its boards.
        """
        given = state.get("__dict__", {})
        values = {
            name: given[name] if name in given else one.get_default(call_default_factory=True)
            for name, one in type(self).model_fields.items()
        }
        super().__setstate__({**state, "__dict__": values})


class SimulatedConfig(Settings):
    """Simulated boards instead of real ones: the embedded default, for a laptop and for tests."""

    boards: int = Field(3, ge=1, le=256, description="How many boards to simulate.")
    release: SimulatedRelease = Field("1.3.0", description="RKLLM release to imitate.")
    profile: str = Field(
        "rk3588-qwen2.5-1.5b-w8a8",
        description="Whose published speed to imitate; docs/reference/simulator.md lists the "
        "profiles.",
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
    batch_gain: Literal["none", "modest", "bound"] = Field(
        "none",
        description="What a batch gains over one run after the other; no gain is published for "
        "hardware, so none is assumed.",
    )
    disk_mb_per_s: float = Field(
        200.0,
        gt=0,
        description="Speed of writing and reading prompt caches; an SD card has 20 to 80.",
    )
    control_dir: Path | None = Field(
        None,
        description="Folder of control files, one per board (sim-0.control), to inject faults. `~` "
        "is the home of Ray's user; a relative path starts in the working directory of Ray's "
        "processes, which is seldom the shell's.",
    )


class CpuConfig(Settings):
    """Boards that compute with llama.cpp on their CPU instead of the NPU: models of GGUF files."""

    threads: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Threads that compute, at most one for each core; empty takes all cores. They "
        "are those of `pin_cpus`, or else the fastest that the node has (4 of an RK3588's 8).",
    )
    share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of a node's CPU (custom resource `rkcpu`) that one replica takes. Every "
        "group with `cpu` gets a replica on every node that offers it: their sum is 1 at most.",
    )
    on_head: bool = Field(
        True, description="Whether the head started by `rkserve up` offers its CPU, too."
    )


class UpstreamConfig(Settings):
    """A server with OpenAI's API in the place of boards: a GPU machine with vLLM, SGLang or
    llama.cpp's server, another rkserve, or a hosted service.
    """

    url: str = Field(
        ...,
        description="Its base URL with http or https, up to the part before "
        "`/chat/completions`: `http://gpu.local:8000/v1`.",
    )
    model: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="The model's name there; empty: the same as here. Answers have the name that "
        "the client sent.",
    )
    key_env: str | None = Field(
        None,
        description="Name of the environment variable that has the key for this server, where "
        "Routers run (`rkserve up` passes its own environment on). Keys of clients are never sent "
        "there.",
    )
    key_file: Path | None = Field(
        None,
        description="File whose first line that is neither empty nor a comment (`#`) is that key, "
        "instead of `key_env`, on the nodes of the Routers. It is read when a Router starts.",
    )
    concurrency: int = Field(
        8,
        ge=1,
        le=10_000,
        description="Requests at once, of all Routers together: each has an equal share, but one "
        "at least. Others wait in the Router's queue.",
    )
    overflow_wait_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="Where the model has boards, too, these go first: a request goes to the "
        "upstream if all places at boards are taken and it would wait there longer than this, or "
        "if no board serves.",
    )
    context_length: int = Field(
        32_768,
        ge=32,
        le=16_777_216,
        description="Tokens of prompt and answer together, as `GET /v1/models` tells them where "
        "the model has no boards. The upstream itself refuses longer ones.",
    )
    extensions: bool = Field(
        False,
        description="Whether it understands the keys of vLLM, SGLang and llama.cpp beyond OpenAI's "
        "(`top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`, "
        "`chat_template_kwargs`, `continue_final_message`, `cache_salt`). Without, requests with "
        "them are for boards, and refused where the model has none.",
    )
    images: bool = Field(
        False,
        description="Whether its model takes images, which are passed on as they came, URLs too.",
    )
    retries: int = Field(
        1,
        ge=0,
        le=10,
        description="How often a request is sent again, before its first token, if the upstream "
        "cannot be reached or answers 500, 502, 503 or 504. Then another board or upstream of the "
        "model gets it, if there is one.",
    )
    connect_timeout_s: float = Field(
        5.0, gt=0, le=120, description="Longest time for a connection to be made."
    )
    first_token_timeout_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="Longest silence before the first token; comments in the stream end it, too.",
    )
    token_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="Longest silence between two tokens."
    )
    health_path: str = Field(
        "/models",
        pattern=r"^/[^\s?#]*$",
        description="Path behind `url` that is asked for the upstream's health, where anything "
        "from 200 to 299 is well.",
    )
    health_period_s: float = Field(
        5.0, gt=0, le=3600, description="How often each Router asks for it."
    )

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not _UPSTREAM_URL.fullmatch(url):
            raise ValueError(
                "write a URL with http or https, without a name, a key or parameters in it"
            )
        return url.rstrip("/")

    @field_validator("key_env")
    @classmethod
    def _is_a_variable(cls, name: str | None) -> str | None:
        if name is not None and not VARIABLE.fullmatch(name):
            raise ValueError("write the name of a variable, not the key itself")
        return name

    @model_validator(mode="after")
    def _has_one_key(self) -> UpstreamConfig:
        if self.key_env is not None and self.key_file is not None:
            raise ValueError("set one of 'key_env' and 'key_file', not both")
        return self


class PatienceConfig(Settings):
    """Time limits, in seconds, after which a silent library counts as hung.

    Once a board's speed is known, `first_token_s`, `prefill_per_token_s` and `token_s` are upper
    limits: a run then counts as hung after 20 times the usual time between two tokens, or 10 times
    the usual time of such a prompt and `least_s` more. On a CPU with `n_batch` above 1, whose
    prompts take turns, the first two are multiplied by `n_batch`, and the 10 times by three times
    that.
    """

    first_token_s: float = Field(
        30.0, gt=0, description="For the first token, besides the prompt's own time."
    )
    prefill_per_token_s: float = Field(
        0.1, ge=0, description="More for each prompt token: long prompts legally take minutes."
    )
    image_s: float = Field(
        30.0,
        ge=0,
        description="More for each image, which is encoded and takes part in the prompt.",
    )
    token_s: float = Field(10.0, gt=0, description="Between two tokens.")
    abort_s: float = Field(
        2.5,
        gt=0,
        description="From an abort to the run's return, besides the time of four tokens; then the "
        "engine is killed.",
    )
    least_s: float = Field(
        3.0,
        gt=0,
        description="The limits that follow the measured speed are never shorter: an engine may "
        "stand still for so long without being replaced. A value above the other limits "
        "switches the measured ones off.",
    )


class PromptCacheConfig(Settings):
    """Prompt cache files on each board's disk: named ones, and parked conversations."""

    park: bool = Field(
        True,
        description="Park a conversation's KV cache on disk when another one takes the board, and "
        "restore it when it comes back. It needs limits per run (RKLLM 1.3.0); off anyway on 1.2.x "
        "and for models known not to support it.",
    )
    park_min_tokens: int = Field(
        256, ge=1, description="Shorter contexts are not parked: to prefill them is cheap."
    )
    max_bytes: int = Field(
        2 * 1024**3,
        ge=0,
        description="Disk that the cache files of one board may take; 0 turns all of them off. "
        "Parked conversations are evicted, the least recently used first; named caches never are.",
    )
    folder: Path | None = Field(
        None, description="Folder for the files, on a local disk; empty: `cache` in state_dir."
    )
    share_mb_per_s: float = Field(
        100.0,
        ge=0,
        description="The most that a board sends of its files to other boards of the same SoC, "
        "model and library, in MB/s (gigabit Ethernet carries 117); 0: nothing. A board fetches a "
        "file where that is twice as fast as the prefill, and only where files of one board are "
        "known to load on another (quirk `prompt_cache_portable`).",
    )
    system_prompt: str | None = Field(
        None,
        min_length=1,
        description="A system prompt whose KV cache every board of the group builds when it "
        "starts, and boards that join later, too, as the prompt cache `system-prompt`. "
        "Conversations that begin with it are not prefilled from the start.",
    )

    @model_validator(mode="after")
    def _has_room(self) -> PromptCacheConfig:
        if self.system_prompt is not None and self.max_bytes == 0:
            raise ValueError("'system_prompt' needs prompt caches, and 'max_bytes' 0 has none")
        return self


class BoardGroupConfig(Settings):
    """Boards that serve one model: one Ray Serve deployment, one replica per board."""

    name: str = Field(..., description="Name of the group; its deployment is `Board-<name>`.")
    model: Path = Field(
        ...,
        description="Model folder, the same path on head and boards; its name is the model id. "
        "With `cpu` also a `.gguf` file. "
        "A relative path is looked up in the working directory and then, in a checkout, in the "
        "project's folder. `catalog:NAME` is the model of that name in the head's catalogue "
        "(`catalog.folder`), which boards fetch before they start.",
    )
    library: Path | None = Field(
        None, description="Path of librkllmrt.so on the boards. Leave out for simulated boards."
    )
    simulated: SimulatedConfig | None = Field(
        None,
        description="Simulate the boards. Exactly one of library, simulated, cpu and upstream is "
        "set.",
    )
    cpu: CpuConfig | None = Field(
        None,
        description="Compute on the CPU: the model folder's `*.gguf` file, or the file that "
        "`model` is, with llama.cpp (`pip install 'rkserve[cpu]'` on the boards). `cpu: {}` takes "
        "all defaults.",
    )
    upstream: UpstreamConfig | None = Field(
        None,
        description="Send requests to a server with OpenAI's API, without boards. `model` is then "
        "the model's name for clients; that of board groups, or their folder, makes the upstream "
        "take their overflow.",
    )
    encoder_library: Path = Field(
        Path("/usr/lib/librknnrt.so"),
        description="Path of librknnrt.so on the boards, for models that see images.",
    )
    encoder_cores: int = Field(
        1, ge=1, le=3, description="NPU cores that an image encoder runs on."
    )
    image_cache_bytes: int = Field(
        64 * 1024 * 1024,
        ge=0,
        description="What each board keeps of images that it has encoded, the longest unused "
        "going first: an image takes its tokens times the model's embedding size times 4 bytes.",
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
        (),
        description="CPU cores that the library may use, at least as many as the NPU has cores "
        "(3 on RK3588, 2 on RK3576); empty leaves its own choice (4 to 7).",
    )
    embed_flash: bool | None = Field(
        None,
        description="Whether the library reads the embedding table from the model's file instead "
        "of keeping it in memory, which saves memory for slower prompts. Empty leaves it to the "
        "library.",
    )
    pin_cpus: tuple[NonNegativeInt, ...] = Field(
        (), description="Cores that the engine process is pinned to; empty leaves all."
    )
    engine_environ: tuple[str, ...] = Field(
        (),
        description="Names of more environment variables that engine processes inherit from the "
        "board's replica, such as `OMP_WAIT_POLICY`. They get few by themselves: no keys and "
        "tokens, which the vendor's library has no use for.",
    )
    confine: Confine = Field(
        Confine.AUTO,
        description="Whether the kernel confines engine processes (Landlock, seccomp): they read "
        "the model's folder, libraries and the kernel's figures, write the prompt caches, use the "
        "NPU's devices, and reach no network, no other process and no other file. `auto` takes "
        "what the kernel has, and starts an engine without where its model does not load so; "
        "`confined` of the board has the means. `on` refuses to start with less; `off` is without.",
    )
    instances: int = Field(
        1,
        ge=1,
        le=8,
        description="Copies of the model on one board, each a handle of its own with its share of "
        "`rknpu`, its own `base_domain_id` (counted up from this one) and its own memory.",
    )
    instance_cpus: tuple[tuple[NonNegativeInt, ...], ...] = Field(
        (),
        description="CPU cores of each instance's library, one list per instance, each of at least "
        "as many as the NPU has cores. Lists may overlap.",
    )
    n_batch: int = Field(
        1,
        ge=1,
        le=100,
        description="Generations that are computed together; each has its own context in memory. "
        "On NPUs they share one run, begin and end together, and reuse no KV cache; the vendor "
        "recommends 8 at most. On CPUs they begin and end by themselves.",
    )
    batch_window_ms: float = Field(
        20.0,
        ge=0,
        description="How long a batch that is not full waits for more requests; on CPUs none does.",
    )
    pause_hold_s: float = Field(
        30.0,
        ge=0,
        description="How long a generation that is paused with its KV cache kept may hold the "
        "board while others wait, over all of its pauses; then its KV cache is given up.",
    )
    pause_timeout_s: float = Field(
        600.0,
        gt=0,
        description="How long a generation may stay paused; then it ends with an error.",
    )
    max_paused: int = Field(
        32,
        ge=0,
        description="Paused generations that one board keeps. Beyond it a pause that is asked for "
        "is refused, and a generation that would pause by itself ends with an error.",
    )
    prompt_cache: PromptCacheConfig = PromptCacheConfig()
    hooks: tuple[str, ...] = Field(
        (),
        description="Intervention hooks for every generation, each as `package.module:factory`; "
        "docs/how-to/interrupting.md says what a factory is.",
    )
    quirks: dict[str, bool] = Field(
        {},
        description="What this group's runtime may be trusted with beyond the table in "
        "docs/reference/quirks.md: name and true or false. Only what was proven on the board "
        "itself.",
    )
    quirks_file: Path | None = Field(
        None,
        description="The quirks.json that `rkserve probe --out` wrote on such a board, a path on "
        "the boards: what was proven there. It is refused with another library than the probed "
        "one. `quirks` takes precedence.",
    )
    allow_unlisted: bool = Field(
        False,
        description="Whether to try a later release of the library than the listed ones, if its "
        "default parameters are laid out as those of a listed one. It makes a short run in a "
        "process of its own first, and is then driven as the newest release of that layout; "
        "`release` of the board says so. The rest of its structs may differ all the same: a wrong "
        "one corrupts memory.",
    )
    guided: Guided = Field(
        Guided.AUTO,
        description="How answers are made that follow a grammar: of single steps (`steps`), or by "
        "the library itself, which is set right where it leaves the grammar (`optimistic`). `auto` "
        "is the latter where the runtime cannot keep a context over steps (quirk "
        "`logits_with_history`). Requests with a seed, logprobs or the like take steps anyway.",
    )
    queue_limit: int = Field(
        16,
        ge=0,
        le=10_000,
        description="Requests that may wait for one board, or for the upstream; then 429.",
    )
    queue_timeout_s: float = Field(
        300.0, gt=0, description="Longest wait for a board; then the request is given up."
    )
    patience: PatienceConfig = PatienceConfig()
    load_timeout_s: float = Field(
        180.0, gt=0, description="Longest time for loading the model into the NPU."
    )
    idle_unload_s: float | None = Field(
        None,
        gt=0,
        description="Unload the model once its boards have had no request for so many seconds, "
        "which frees their memory; empty never does. Where several groups serve one model, all of "
        "them have it and the longest counts.",
    )
    wake_on_request: bool = Field(
        True,
        description="Load a model that was unloaded, because it was idle or by POST "
        "/v1/models/unload, at the next request for it; the request waits meanwhile. "
        "Otherwise requests are refused until POST /v1/models/load.",
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
    engine_growth_mb: int = Field(
        512,
        ge=0,
        description="Growth of an engine process's memory since its load, in MB, after which it is "
        "replaced between two runs, at the earliest after 10 minutes. It is up to a quarter more, "
        "so that boards do not load at once. An engine with more than half of its possible files "
        "open is replaced as well. 0 replaces none.",
    )
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

    @field_validator("model")
    @classmethod
    def _catalog_has_names(cls, model: Path) -> Path:
        text = str(model)
        if text.startswith(CATALOG) and not MODEL_NAME.fullmatch(text.removeprefix(CATALOG)):
            raise ValueError(f"write the name of a model behind '{CATALOG}'")
        return model

    @property
    def catalog_model(self) -> str | None:
        """The name of the model in the head's catalogue; None if ``model`` is a path."""
        text = str(self.model)
        return text.removeprefix(CATALOG) if text.startswith(CATALOG) else None

    @field_validator("confine", mode="before")
    @classmethod
    def _read_switch(cls, value: object) -> object:
        # YAML reads the words without quotes as booleans.
        return {True: Confine.ON, False: Confine.OFF}[value] if isinstance(value, bool) else value

    @field_validator("engine_environ")
    @classmethod
    def _variables_are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(VARIABLE.fullmatch(name) for name in names):
            raise ValueError("write each as a name of letters, digits and '_', without a value")
        return names

    @field_validator("hooks")
    @classmethod
    def _hooks_are_paths(cls, hooks: tuple[str, ...]) -> tuple[str, ...]:
        if not all(HOOK_PATH.fullmatch(hook) for hook in hooks):
            raise ValueError("write each as package.module:factory")
        return hooks

    @model_validator(mode="after")
    def _one_kind_of_board(self) -> BoardGroupConfig:
        kinds = (self.library, self.simulated, self.cpu, self.upstream)
        if sum(one is not None for one in kinds) != 1:
            raise ValueError(
                "set exactly one of 'library' (NPUs), 'cpu' (llama.cpp), 'simulated' and "
                "'upstream' (a server with OpenAI's API)"
            )
        return self

    @model_validator(mode="after")
    def _upstream_has_no_boards(self) -> BoardGroupConfig:
        if self.upstream is None:
            return self
        given = sorted(self.model_fields_set - OF_UPSTREAM)
        if given:
            raise ValueError(
                f"'{given[0]}' is a setting of boards, and the group is an upstream; leave it out"
            )
        if not MODEL_NAME.fullmatch(self.model_id):
            raise ValueError(
                "'model' is the name of the upstream's model for clients: letters, digits, '.', "
                "'_' and '-'"
            )
        return self

    @property
    def model_id(self) -> str:
        """The name of the model for clients: that of its folder, or in the catalogue."""
        return self.catalog_model or self.model.name

    @model_validator(mode="after")
    def _cpu_has_no_npu(self) -> BoardGroupConfig:
        if self.cpu is None:
            return self
        given = sorted(OF_RKLLM & self.model_fields_set)
        if given:
            raise ValueError(
                f"'{given[0]}' is a setting of NPUs, and the group computes on the CPU ('cpu'); "
                "leave it out"
            )
        return self

    @property
    def resource(self) -> tuple[str, float]:
        """The custom resource of Ray that a replica takes, and its share; not if simulated."""
        return (NPU, self.rknpu) if self.cpu is None else (CPU, self.cpu.share)

    @model_validator(mode="after")
    def _batches_have_no_caches(self) -> BoardGroupConfig:
        if self.prompt_cache.system_prompt is not None and self.n_batch > 1:
            raise ValueError(
                "'prompt_cache.system_prompt' needs prompt caches, and boards that serve batches "
                f"(n_batch {self.n_batch}) have none"
            )
        return self

    @model_validator(mode="after")
    def _instances_fit(self) -> BoardGroupConfig:
        if self.instance_cpus and len(self.instance_cpus) != self.instances:
            raise ValueError(
                f"'instance_cpus' has {len(self.instance_cpus)} lists for {self.instances} "
                "instances; give one list per instance, or none at all"
            )
        if self.base_domain_id + self.instances > MAX_DOMAINS:
            raise ValueError(
                f"{self.instances} instances from base_domain_id {self.base_domain_id} on need "
                f"more than the {MAX_DOMAINS} domains that there are"
            )
        return self

    def deployed(self) -> tuple[BoardGroupConfig, ...]:
        """Return one group per instance, each of which becomes a deployment."""
        if self.instances == 1:
            return (self,)
        return tuple(
            self.model_copy(
                update={
                    "name": f"{self.name}-i{number}",
                    "instances": 1,
                    "instance_cpus": (),
                    "rknpu": self.rknpu / self.instances,
                    "base_domain_id": self.base_domain_id + number,
                    "library_cpus": self.instance_cpus[number]
                    if self.instance_cpus
                    else self.library_cpus,
                }
            )
            for number in range(self.instances)
        )
