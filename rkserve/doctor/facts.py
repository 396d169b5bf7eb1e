"""Facts about a board as frozen values, and the findings of the rules over them: the JSON report.

None is a fact that was not looked at, or does not apply; an attempt that failed is in ``unread``.
The hardware is the reading that a board also reports to its Router, so that the same rules hold for
a report of a cluster.
"""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict

from rkserve.core.board_report import Hardware


class FrozenModel(BaseModel):
    """A frozen value without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Severity(str, Enum):
    """The weight of a finding: it stops serving, it disturbs, or a check was impossible."""

    ERROR = "error"
    WARNING = "warning"
    UNKNOWN = "unknown"


class Finding(FrozenModel):
    """One finding. ``id`` is stable; ``command`` mends it, or is a comment where none can."""

    id: str
    severity: Severity
    sentence: str
    evidence: tuple[str, ...] = ()
    command: str


class UnreadSource(FrozenModel):
    """A source that exists and could not be read."""

    path: str
    reason: str


class DeviceNode(FrozenModel):
    """A device file with its owner and mode. ``group`` is the name of ``gid``, if it has one."""

    path: str
    mode: int
    uid: int
    gid: int
    group: str = ""


class UserIdentity(FrozenModel):
    """The user that runs Ray on the board."""

    name: str
    uid: int
    gids: tuple[int, ...]
    home: str = ""


class ClockDomain(FrozenModel):
    """A clock that the kernel can change: ``limit_hz`` is the highest that it may use now,
    ``highest_hz`` the highest that the hardware has.
    """

    name: str
    path: str
    governor: str | None = None
    current_hz: int | None = None
    limit_hz: int | None = None
    highest_hz: int | None = None


class CoolingDevice(FrozenModel):
    """A limit that the kernel sets because of heat; 0 is none."""

    path: str
    kind: str
    state: int


class MemoryFigures(FrozenModel):
    """Memory beside the total and the available one, which are in ``Hardware``.

    ``npu_iommu`` is False where the NPU takes its memory from the contiguous area (CMA).
    """

    swap_total_bytes: int = 0
    swap_free_bytes: int = 0
    cma_total_bytes: int | None = None
    npu_iommu: bool | None = None


class LibraryFile(FrozenModel):
    """The vendor's library as a file; it is not loaded.

    ``problem`` is the reason why it cannot be read. ``machine`` is None for a file that is no
    library. ``versions`` are those named in it, ``missing`` the libraries that it needs and that no
    library folder has.
    """

    path: str
    exists: bool = True
    problem: str = ""
    machine: str | None = None
    is_64_bit: bool = True
    size_bytes: int = 0
    promised_bytes: int = 0
    versions: tuple[str, ...] = ()
    simulated: bool = False
    missing: tuple[str, ...] = ()


class ModelFiles(FrozenModel):
    """A model folder. ``problem`` is the reason why it cannot be opened, ``unfit`` the reason why
    its weights are no model for RKLLM; both are empty otherwise.

    ``eos_hint`` are the ids of the end tokens that its tokenizer files name. A model for embeddings
    ``generates`` no text, and a decoder of an encoder's output is not ``measurable`` without it.
    ``cpu`` is True for a model that CPUs alone compute.
    """

    path: str
    problem: str = ""
    weights: str | None = None
    weights_bytes: int = 0
    unfit: str = ""
    platform: str | None = None
    dtype: str | None = None
    toolkit: str | None = None
    max_context: int | None = None
    context_length: int = 0
    kv_bytes_per_token: int | None = None
    has_tokenizer: bool = False
    tokenizer_problem: str = ""
    has_template: bool = False
    generates: bool = True
    measurable: bool = True
    eos_token_ids: tuple[int, ...] = ()
    eos_hint: tuple[int, ...] = ()
    cpu: bool = False


class DiskSpace(FrozenModel):
    """The file system of a folder that rkserve writes to or reads its model from.

    ``kind`` is the type of the file system, ``sd_card`` True on a removable card. ``uid`` owns the
    folder, or the nearest one above it where it does not exist.
    """

    folder: str
    use: str
    kind: str = ""
    device: str = ""
    free_bytes: int | None = None
    read_only: bool = False
    sd_card: bool = False
    exists: bool = True
    uid: int | None = None


class ProcessLimits(FrozenModel):
    """The environment of this process: what a node's Ray would start with.

    ``python_wanted`` are the oldest version of Python that rkserve runs on, and the first one that
    is too new. ``localhost_problem`` is the reason why that name has no loopback address.
    """

    machine: str
    python: tuple[int, int]
    python_wanted: tuple[tuple[int, int], tuple[int, int]] | None = None
    libc: tuple[int, int] | None = None
    cpus: int
    open_files: int | None = None
    ray: str | None = None
    ray_wanted: str | None = None
    localhost_problem: str = ""


class RayletEnvironment(FrozenModel):
    """The variables of a running raylet that matter to rkserve, if this user may read them."""

    pid: int
    readable: bool = True
    auth_mode: str = ""
    niceness: str = ""
    log_level: str = ""


class ClockState(FrozenModel):
    """The wall clock: its year, and the service that keeps it. ``skew_s`` is against the head."""

    year: int
    kept_by: str = ""
    skew_s: float | None = None


class HeadAnswer(FrozenModel):
    """The head as it is seen from here: Ray's port at ``address``, and rkserve at ``url``. The
    problems are empty where these accept connections.
    """

    address: str
    problem: str = ""
    url: str = ""
    url_problem: str = ""
    ray: str | None = None


class TokenFile(FrozenModel):
    """Ray's token file; a ``mode`` of None is a missing file."""

    path: str
    mode: int | None = None


class MeasuredSpeed(FrozenModel):
    """A measurement with the model, and the hardware while it ran.

    ``problem`` is the reason for its failure. ``basis`` says where the expected rate is from.
    """

    problem: str = ""
    release: str = ""
    load_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    decode_tokens: int = 0
    expected_tokens_per_s: float | None = None
    slow_share: float = 0.0
    basis: str = ""
    hardware: Hardware | None = None


class ReportedState(FrozenModel):
    """The state of a board of a running cluster, as its Router reports it.

    ``circuit`` is that of the Router's circuit breaker for it.
    """

    id: str
    state: str
    reason: str = ""
    circuit: str = "closed"
    circuit_reason: str = ""


class BoardFacts(FrozenModel):
    """Everything that is known about one board."""

    hardware: Hardware | None = None
    kernel: str | None = None
    security_modules: str | None = None
    npu_driver: bool | None = None
    rocket_driver: bool = False
    npu: ClockDomain | None = None
    ddr: ClockDomain | None = None
    cpus: tuple[ClockDomain, ...] = ()
    cooling: tuple[CoolingDevice, ...] = ()
    nodes: tuple[DeviceNode, ...] | None = None
    heaps: tuple[DeviceNode, ...] = ()
    user: UserIdentity | None = None
    memory: MemoryFigures | None = None
    library: LibraryFile | None = None
    model: ModelFiles | None = None
    llama_cpp: str | None = None  # the installed release, empty without one, for models of CPUs
    memory_need_mb: float | None = None
    disks: tuple[DiskSpace, ...] = ()
    process: ProcessLimits | None = None
    raylet: RayletEnvironment | None = None
    clock: ClockState | None = None
    head: HeadAnswer | None = None
    token: TokenFile | None = None
    measured: MeasuredSpeed | None = None
    status: ReportedState | None = None
    unread: tuple[UnreadSource, ...] = ()

    @property
    def simulated(self) -> bool:
        """True where the library is the simulator, which needs no board."""
        return self.library is not None and self.library.simulated


class DoctorReport(FrozenModel):
    """The answer of ``rkserve doctor --json``: findings by severity, and all facts."""

    version: int = 1
    board: str = ""
    healthy: bool
    findings: tuple[Finding, ...]
    facts: BoardFacts


class FleetReport(FrozenModel):
    """The answer of ``rkserve doctor --fleet --json``: a report for each board."""

    version: int = 1
    healthy: bool
    boards: tuple[DoctorReport, ...]
