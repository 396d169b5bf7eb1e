"""Boards that obey what they are told, without a model, and a Coordinator that tells them.

A fake board keeps to the contract of ``adopt`` and of staging, can die, freeze, come back and
refuse, and notes whatever was served beside what it should have been.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rkserve.config.serve_config import CoordinatorConfig
from rkserve.control.calls import (
    ArtifactMetadata,
    DeclaredArtifact,
    OperationKind,
    OperationRequest,
)
from rkserve.control.operations import OperationOutcome
from rkserve.control.sleep import SleepPolicy
from rkserve.coordinator.boards.transfer import TransferLimits
from rkserve.coordinator.coordinator import Coordinator, CoordinatorPorts
from rkserve.coordinator.operations.prompt_caches import CacheTimes
from rkserve.coordinator.operations.trust import TrustRules
from rkserve.coordinator.state.ledger import Ledger
from rkserve.core.board_report import (
    AdapterTrial,
    BoardReport,
    BoardState,
    CacheEntry,
    LedgerCopy,
    TrialVerdict,
)
from rkserve.core.board_report import VersionFigures as Figures
from rkserve.core.desired_state import (
    AdapterVersion,
    Adoption,
    Artifact,
    BaseVersion,
    BoardTarget,
    Desired,
    DesiredCache,
    PauseMode,
    Probe,
    SleepLevel,
)
from rkserve.core.errors import (
    ArtifactNotFound,
    ArtifactRefused,
    BoardAsleep,
    BoardGone,
    BoardSilent,
    BoardStartFailed,
    OperationConflict,
    RebaseFailed,
    RkserveError,
    StageFailed,
)
from rkserve.core.files import ids_digest
from rkserve.core.messages import AdapterRef, Event, GenerateRequest
from rkserve.fleet.fleet import Fleet
from tests.support.boards.fake_boards import eventually
from tests.support.values.control_values import read_action

MODEL = "sim-chat"
CONTENT = {"v1": b"one" * 100, "v2": b"two" * 150, "v3": b"three" * 200}
# So that a board that is gone, or cannot, is given up in the time of a test.
PACE = TransferLimits(
    chunk_bytes=64, patience_s=0.3, tries=2, first_delay_s=0.01, longest_delay_s=0.05
)


class Killed(BaseException):
    """The Coordinator's process ends here. No handler of the program catches it."""


@dataclass
class FakeBoard:
    """One board and its replica of the moment."""

    board_id: str
    model: str = MODEL
    life: int = 0
    desired: Desired | None = None
    files: dict[str, bytearray] = field(default_factory=dict)
    whole: dict[str, Artifact] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    dead: bool = False
    frozen: bool = False
    refuses: dict[str, Exception] = field(default_factory=dict)
    slow_s: dict[str, float] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    dies_in: str = ""
    base: str = ""  # the sha256 of the weights that it has loaded; those of its folder have none
    loads: list[str] = field(default_factory=list)
    cannot_load: set[str] = field(default_factory=set)
    stops: int = 0  # requests that a hold or other weights stop
    asleep: bool = False  # its model is unloaded
    context: int = 0  # tokens in its KV cache, of which ``parks`` survive level 1
    parks: int = 0
    jobs: int = 0
    idle_s: float = 0.0
    figures: tuple[Figures, ...] = ()
    prompts: dict[str, CacheEntry] = field(default_factory=dict)  # named caches on its disk
    tried: list[str] = field(default_factory=list)  # digests of adapters, in a fresh engine
    verdicts: dict[str, tuple[TrialVerdict, str]] = field(default_factory=dict)
    trying: str = ""  # the key of an adapter whose trial has its engine
    busy: bool = False  # a run has its engine, and a trial waits
    release: str = ""
    node: str = ""
    on_head: bool = False
    contents: dict[str, bytes] = field(default_factory=dict)  # of the whole files
    ledgers: list[LedgerCopy] = field(default_factory=list)
    _derived: tuple[Desired, BoardTarget] | None = None  # the target of a desired state

    @property
    def replica(self) -> str:
        return f"{self.board_id}/{self.life}"

    @property
    def target(self) -> BoardTarget | None:
        if self.desired is None:
            return None
        if self._derived is None or self._derived[0] is not self.desired:
            self._derived = (self.desired, self.desired.target(self.board_id, self.model))
        return self._derived[1]

    @property
    def missing(self) -> tuple[AdapterVersion, ...]:
        wanted = () if self.target is None else self.target.versions
        return tuple(version for version in wanted if version.key not in self.whole)

    @property
    def wanted_base(self) -> str:
        """The sha256 of the weights that it must load."""
        base = None if self.target is None else self.target.base
        return "" if base is None else base.digest

    @property
    def missing_base(self) -> BaseVersion | None:
        base = None if self.target is None else self.target.base
        return None if base is None or base.key in self.whole else base

    @property
    def serves(self) -> bool:
        """Whether it would emit a token for a request by the bare name now."""
        obeys = self.target is not None and not self.missing and not self.is_held
        obeys = obeys and self.base == self.wanted_base
        return not self.dead and obeys and not self.asleep

    @property
    def is_held(self) -> bool:
        return self.target is not None and self.target.held("tone") is not None

    def restart(self, *, disk: bool = True) -> None:
        """Another replica takes its place: it knows nothing but what is on its disk."""
        self.life += 1
        self.desired, self.dead, self.frozen = None, False, False
        self.loaded, self.asleep, self.jobs, self.base = set(), False, 0, ""
        if not disk:
            self.files, self.whole, self.prompts = {}, {}, {}

    def report(self) -> BoardReport:
        lacking = len(self.missing) + (self.missing_base is not None)
        ready = self.desired is not None and not lacking and self.base == self.wanted_base
        held = None if self.target is None else self.target.hold
        state = BoardState.READY if ready else BoardState.JOINING
        level = None if self.target is None else self.target.level
        return BoardReport(
            self.board_id,
            self.model,
            BoardState.ASLEEP if self.asleep else state,
            queued=self.jobs,
            level=int(SleepLevel.UNLOADED) if level is None and self.asleep else level,
            idle_s=0.0 if self.jobs else self.idle_s,
            replica=self.replica,
            epoch=None if self.desired is None else self.desired.epoch,
            hold="" if held is None else held.mode.value,
            missing=lacking,
            base=self.wanted_base if self.asleep else self.base,
            staged=tuple(self.whole),
            adapters=tuple(self.loaded),
            versions=self.figures,
            release=self.release,
            trying=self.trying,
            node=self.node,
            on_head=self.on_head,
        )

    def adopt(self, desired: Desired) -> Adoption:
        if self.desired is None or desired.epoch > self.desired.epoch:
            self.desired = desired
        target = self.desired.target(self.board_id, self.model)
        level = target.level
        self.jobs = 0 if target.moves else self.jobs
        fell_asleep = not self.asleep and level is not None and level > SleepLevel.PAUSED
        self.asleep = level is not None and level > SleepLevel.PAUSED
        stopped = self.stops if self.is_held or self.base != self.wanted_base else 0
        refused = self._load()
        kept = self.parks if fell_asleep and level is SleepLevel.UNLOADED else 0
        return Adoption(
            self.board_id,
            self.desired.epoch,
            self.missing,
            held=self.is_held,
            stopped=stopped,
            latency_ms=1.0,
            missing_base=self.missing_base,
            refused=refused,
            level=level,
            kept_tokens=kept,
            dropped_tokens=self.context - kept if fell_asleep else 0,
        )

    def _load(self) -> str:
        """Load its desired weights; one that cannot goes on with those that it had, and
        says so at once when it is told the same again.
        """
        wanted = self.wanted_base
        if self.asleep or self.base == wanted or self.missing_base is not None:
            return ""
        if wanted in self.cannot_load and wanted in self.loads:
            return "the trial generation ended with an error a moment ago"
        self.loads.append(wanted)
        if wanted in self.cannot_load:
            raise RebaseFailed(self.board_id, "the trial generation ended with an error")
        self.base = wanted
        return ""

    def ledger_copies(self, cluster: str) -> tuple[LedgerCopy, ...]:
        copies = [one for one in self.ledgers if one.cluster == cluster]
        return tuple(sorted(copies, key=lambda one: -one.number))

    def staged_part(self, version: Artifact, offset: int, size: int) -> bytes:
        return self.contents[version.digest][offset : offset + size]

    def stage_begin(self, version: Artifact | LedgerCopy) -> int:
        if version.key in self.whole:
            return version.size_bytes
        return len(self.files.setdefault(version.digest, bytearray()))

    def stage_chunk(self, digest: str, offset: int, data: bytes) -> int:
        there = self.files[digest]
        if offset != len(there):
            return len(there)
        there += data
        return len(there)

    def stage_commit(self, version: Artifact | LedgerCopy) -> None:
        if version.key in self.whole:
            return
        content = self.files.pop(version.digest)
        if hashlib.sha256(content).hexdigest() != version.digest:
            raise StageFailed(self.board_id, "the sha256 differs")
        self.contents[version.digest] = bytes(content)
        if isinstance(version, LedgerCopy):
            self.ledgers.append(version)
            return
        self.whole[version.key] = version

    def unstage(self, version: Artifact) -> bool:
        return self.whole.pop(version.key, None) is not None

    def load_adapter(self, ref: AdapterRef, prompt_ids: tuple[int, ...], tokens: int) -> Probe:
        if self.asleep:
            raise BoardAsleep(self.board_id, "its model is unloaded")
        assert ref.key in self.whole
        assert prompt_ids
        self.loaded.add(ref.key)
        return Probe(self.board_id, ref.key, 3.0, tokens, 16.0)

    def try_adapter(
        self, ref: AdapterRef, prompt_ids: tuple[int, ...], tokens: int
    ) -> AdapterTrial:
        if self.asleep:
            raise BoardAsleep(self.board_id, "its model is unloaded")
        assert ref.key in self.whole
        assert prompt_ids
        assert tokens
        self.tried.append(ref.digest)
        self.trying = ""
        self.loaded.clear()
        verdict, reason = self.verdicts.get(ref.digest, (TrialVerdict.PASSED, ""))
        if verdict is TrialVerdict.PASSED:
            self.loaded.add(ref.key)
        return AdapterTrial(
            self.model,
            ref.digest,
            verdict,
            ref.label,
            self.board_id,
            reason,
            scale=ref.scale,
            release=self.release,
        )

    def renew(self, reason: str) -> None:
        assert reason
        self.loaded.clear()

    restart_engine = renew

    def measure(self, seconds: float, wait: bool) -> Probe:
        if self.jobs and not wait:
            raise OperationConflict(f"Board {self.board_id} has {self.jobs} requests")
        return Probe(self.board_id, "", 0.0, 64, 12.5, 40.0 * seconds)

    def clear_kv(self, keep_system_prompt: bool) -> str:
        return f"cleared {keep_system_prompt}"

    def caches(self) -> list[CacheEntry]:
        return list(self.prompts.values())

    def build_cache(
        self, name: str, ids: tuple[int, ...], adapter: AdapterRef | None
    ) -> CacheEntry:
        key = None if adapter is None else adapter.key
        self.prompts[name] = CacheEntry(
            self.board_id, self.model, name, len(ids), 100, key, digest=ids_digest(ids)
        )
        return self.prompts[name]

    def delete_cache(self, name: str) -> bool:
        return self.prompts.pop(name, None) is not None

    def abort_all(self, request_ids: tuple[str, ...] | None) -> int:
        return 7 if request_ids is None else len(request_ids)


@dataclass
class FakeCluster:
    """One group of boards behind a ``BoardLink``. ``before`` sees every call before a board does,
    and ``after`` sees the cluster after it: for faults at a chosen moment, and for invariants.
    """

    boards: dict[str, FakeBoard]
    before: Callable[[FakeBoard, str], None] = lambda _board, _method: None
    after: Callable[[FakeBoard, str], None] = lambda _board, _method: None

    @classmethod
    def of(cls, *names: str) -> FakeCluster:
        return cls({name: FakeBoard(name) for name in names})

    def __getitem__(self, name: str) -> FakeBoard:
        return self.boards[name]

    async def open(
        self, request: GenerateRequest, replica: str, take: object = None
    ) -> AsyncGenerator[Event, None]:
        raise AssertionError(f"the Coordinator generates nothing: {request} {replica}")
        yield

    async def ask(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        await asyncio.sleep(0)
        board = next((one for one in self.boards.values() if one.replica == replica), None)
        if board is None or board.dead:
            raise BoardGone(replica, "its replica died")
        self.before(board, method)
        board.asked[method] += 1
        if method == "try_adapter" and not board.busy:
            board.trying = args[0].key
        await self._hold_up(board, method, timeout_s)
        if method == board.dies_in or board.dead:
            board.dead = True
            raise BoardGone(replica, "its replica died")
        if method in board.refuses:
            raise board.refuses[method]
        said = getattr(board, method)(*args)
        self.after(board, method)
        return said

    def cache_source(self, replica: str, tokens: int) -> None:
        return None

    async def ask_all(
        self, method: str, *args: Any, timeout_s: float, take: Callable[[Any], None]
    ) -> None:
        async def one(board: FakeBoard, method: str) -> None:
            if method == "follow":
                if board.desired is None:
                    return  # it refuses
                method = "adopt"
            with contextlib.suppress(RkserveError):
                take(await self.ask(board.replica, method, *args, timeout_s=timeout_s))

        await asyncio.gather(*(one(board, method) for board in list(self.boards.values())))

    async def _hold_up(self, board: FakeBoard, method: str, timeout_s: float) -> None:
        began_s = time.monotonic()
        while board.frozen or time.monotonic() - began_s < board.slow_s.get(method, 0.0):
            left_s = began_s + timeout_s - time.monotonic()
            if left_s <= 0:
                raise BoardSilent(board.replica, f"nothing came within {timeout_s:g} s")
            await asyncio.sleep(min(0.01, left_s))

    @property
    def complete(self) -> bool:
        return not any(one.frozen for one in self.boards.values() if not one.dead)

    async def reports(self) -> list[BoardReport]:
        there = [one for one in self.boards.values() if not one.dead and not one.frozen]
        return [one.report() for one in there]

    def has_new(self) -> bool:
        return False

    async def has_running(self) -> bool:
        return bool(self.boards)

    async def start_failure(self) -> BoardStartFailed | None:
        return None


@dataclass
class FakeStore:
    """The head's store: files by their digests."""

    files: dict[str, bytes] = field(default_factory=dict)
    kept_s: dict[str, float] = field(default_factory=dict)
    said: dict[str, ArtifactMetadata] = field(default_factory=dict)
    bases: dict[str, BaseVersion] = field(default_factory=dict)
    own: str | None = None
    coming: dict[str, bytearray] = field(default_factory=dict)

    def add(self, version: str, content: bytes, name: str = "tone") -> AdapterVersion:
        digest = hashlib.sha256(content).hexdigest()
        self.files[digest] = content
        self.kept_s[digest] = time.monotonic()
        return AdapterVersion(AdapterRef(name, version, digest), len(content))

    def add_base(self, version: str, content: bytes) -> BaseVersion:
        """Keep base weights."""
        digest = self.add(version, content).digest
        base = BaseVersion(MODEL, version, digest, len(content))
        self.bases[f"{MODEL}@{version}"] = base
        return base

    def facts(self, digest: str) -> ArtifactMetadata:
        return self.said.get(digest, ArtifactMetadata())

    def model(self, model: str, version: str) -> BaseVersion:
        try:
            return self.bases[f"{model}@{version}"]
        except KeyError:
            raise ArtifactNotFound(f"no base weights '{model}@{version}'") from None

    def own_digest(self, _model: str) -> str | None:
        return self.own

    def known_own_digest(self, model: str) -> str | None:
        return self.own_digest(model)

    def read(self, digest: str, offset: int, size: int) -> bytes:
        return self.files[digest][offset : offset + size]

    def check(self, version: Artifact) -> None:
        if version.digest not in self.files:
            raise StageFailed("head", "the store has no such file")

    def digests(self) -> tuple[str, ...]:
        return tuple(sorted(self.files))

    def upload_begin(self, declared: DeclaredArtifact) -> str:
        self.coming[declared.sha256 or ""] = bytearray()
        return declared.sha256 or ""

    def upload_part(self, upload: str, offset: int, data: bytes) -> int:
        assert offset == len(self.coming[upload])
        self.coming[upload] += data
        return len(self.coming[upload])

    def upload_end(self, upload: str) -> Artifact:
        content = bytes(self.coming[upload])
        if hashlib.sha256(content).hexdigest() != upload:
            raise ArtifactRefused("sha256 is declared as another one")
        return self.add("again", content)

    def upload_abort(self, upload: str) -> bool:
        return self.coming.pop(upload, None) is not None

    def remove(self, digest: str, idle_s: float = 0.0) -> bool:
        if time.monotonic() - self.kept_s.get(digest, float("-inf")) < idle_s:
            return False
        return self.files.pop(digest, None) is not None


@dataclass
class Control:
    """A Coordinator on fake boards; ``died`` and ``again`` are its crash and its successor."""

    folder: Path
    cluster: FakeCluster
    store: FakeStore = field(default_factory=FakeStore)
    now_s: float = 1_000_000.0
    set_by_s: float = 0.0  # steps of the clock
    trust: TrustRules = field(default_factory=TrustRules)
    settings: Mapping[str, Any] = field(default_factory=dict)
    policies: Mapping[str, SleepPolicy] = field(default_factory=dict)
    routers: Any = None
    mixed: frozenset[str] = frozenset()
    system_prompts: Mapping[str, DesiredCache] = field(default_factory=dict)
    wrap_link: Callable[[FakeCluster], Any] = lambda link: link
    wrap_ledger: Callable[[Ledger], Any] = lambda ledger: ledger

    def __post_init__(self) -> None:
        known = {"report_s": 0.01, "operation_timeout_s": 2.0, "stage_timeout_s": 5.0}
        self.config = CoordinatorConfig(data_dir=self.folder, **{**known, **self.settings})

    async def open(self) -> Coordinator:
        """Start a Coordinator on the ledger that there is."""
        self.ledger = Ledger.open(self.folder)
        # A death that is played loses nothing that was written, so no test waits for the disk.
        self.ledger._database.execute("PRAGMA synchronous = OFF")
        links = {"only": self.wrap_link(self.cluster)}
        outside = CoordinatorPorts(
            Fleet(links, {"only": MODEL}),
            self.wrap_ledger(self.ledger),
            self.store,
            lambda data: data,
            lambda: self.now_s + self.set_by_s,
            PACE,
            self.policies,
            system_prompts=self.system_prompts,
            cache_times=CacheTimes(again_s=0.2, differs_s=0.1),
            routers=self.routers,
            elapsed_s=lambda: self.now_s,
            trust=self.trust,
            mixed=self.mixed,
        )
        self.it = Coordinator(self.config, outside)
        await self.it.start()
        return self.it

    async def close(self) -> None:
        """End it, as Ray ends a replica or as the kernel ends a process: the ledger is let go."""
        await self.it.stop()
        self.ledger.close()

    async def again(self) -> Coordinator:
        """Replace it."""
        await self.close()
        return await self.open()

    async def call(
        self, kind: OperationKind, /, *, key: str | None = None, **params: Any
    ) -> OperationOutcome:
        """Make one call."""
        options = {
            name: params.pop(name)
            for name in ("timeout_s", "expected_epoch", "background", "who", "request_id")
            if name in params
        }
        return await self.it.perform(
            OperationRequest(read_action(kind, params), key=key, **options)
        )

    async def pause(self, **params: Any) -> OperationOutcome:
        return await self.call(OperationKind.PAUSE, **{"mode": PauseMode.KEEP.value, **params})

    async def resume(self, **params: Any) -> OperationOutcome:
        return await self.call(OperationKind.RESUME, **params)

    async def sleep(self, **params: Any) -> OperationOutcome:
        return await self.call(OperationKind.SLEEP, **params)

    async def wake(self, **params: Any) -> OperationOutcome:
        return await self.call(OperationKind.WAKE, **params)

    async def stage(self, version: AdapterVersion, **params: Any) -> OperationOutcome:
        ref = version.ref
        known = {"model": MODEL, "name": ref.name, "version": ref.version, "digest": ref.digest}
        return await self.call(
            OperationKind.ADAPTER_STAGE, **{**known, "size_bytes": version.size_bytes, **params}
        )

    async def roll(self, version: str, **params: Any) -> OperationOutcome:
        known = {"model": MODEL, "name": "tone", "version": version}
        return await self.call(OperationKind.ADAPTER_ROLLOUT, **{**known, **params})

    async def rebase(self, base: BaseVersion | None, **params: Any) -> OperationOutcome:
        """Have other base weights loaded board by board."""
        known = {
            "model": MODEL,
            "digest": None if base is None else base.digest,
            "size_bytes": None if base is None else base.size_bytes,
            "label": None if base is None else base.version,
        }
        return await self.call(OperationKind.REBASE, **{**known, **params})

    async def update(self, what: Artifact, step: int, **params: Any) -> OperationOutcome:
        """Make a trainer's update."""
        known: dict[str, Any] = {"model": MODEL, "step": step}
        if isinstance(what, BaseVersion):
            known |= {"digest": what.digest, "size_bytes": what.size_bytes}
            known["version"] = what.version
        else:
            known |= {"name": what.ref.name, "version": what.ref.version}
        return await self.call(OperationKind.WEIGHT_UPDATE, **{**known, **params})

    @property
    def held(self) -> list[str]:
        """The boards that are held as a whole or for the adapter."""
        return [name for name, board in self.cluster.boards.items() if board.is_held]

    @property
    def asleep(self) -> list[str]:
        """The boards whose model is unloaded."""
        return [name for name, board in self.cluster.boards.items() if board.asleep]

    @property
    def desired(self) -> Desired:
        return self.ledger.desired()

    async def heard(self) -> None:
        """Wait until the Coordinator has heard all boards anew, and has looked at what they say."""
        roster = self.it._roster
        rounds = {roster.asked_s}

        def look() -> bool:
            rounds.add(roster.asked_s)
            return len(rounds) > 3

        await eventually(look)

    @property
    def follows(self) -> bool:
        """Whether every board that is there obeys the latest, has what it needs, and is let be."""
        alive = [one for one in self.cluster.boards.values() if not one.dead and not one.frozen]
        bringing = self.it._reconciler._bringing
        going_on = {board for board, task in bringing.items() if not task.done()}
        return all(
            one.desired == self.desired
            and not one.missing
            and (one.asleep or one.base == one.wanted_base)
            and one.board_id not in going_on
            for one in alive
        )


@asynccontextmanager
async def started(it: Control) -> AsyncIterator[Control]:
    """Start a Coordinator, wait until every board follows, and end it in order."""
    await it.open()
    try:
        await eventually(lambda: it.follows)
        yield it
    finally:
        await it.close()


@asynccontextmanager
async def controlled(folder: Path, *boards: str, **settings: Any) -> AsyncIterator[Control]:
    """A Coordinator that every board follows."""
    cluster = FakeCluster.of(*(boards or ("a", "b", "c")))
    async with started(Control(folder, cluster, settings=settings)) as it:
        yield it


@asynccontextmanager
async def serving(folder: Path, *versions: str, **settings: Any) -> AsyncIterator[Control]:
    """A Coordinator with these versions of ``CONTENT`` staged, of which the first is served."""
    async with controlled(folder, **settings) as it:
        for version in versions:
            staged = await it.stage(it.store.add(version, CONTENT[version]))
            assert staged.status == 200, staged
        if versions:
            assert (await it.roll(versions[0])).status == 200
        yield it


def served(it: Control, board: str = "a") -> str | None:
    """Return the version that a board gives to a request by the bare name."""
    target = it.cluster[board].target
    line = None if target is None else target.line("tone")
    ref = None if line is None else line.serves(board, "session")
    return None if ref is None else ref.version
