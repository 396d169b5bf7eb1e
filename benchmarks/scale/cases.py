"""The simulated cases: policies side by side, growth, overload, rollouts, and memory."""

from __future__ import annotations

import gc
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from benchmarks.scale.board import Disk, PaperBoard
from benchmarks.scale.conversations import Shape
from benchmarks.scale.other_routers import RayPrefix, TwoChoices
from benchmarks.scale.own_router import MODEL, OwnRouter
from benchmarks.scale.rollout import Converged, Rolling
from benchmarks.scale.router import Router, Spent
from benchmarks.scale.simulation import Seen, World
from rkserve.control.calls import Strategy
from rkserve.core.block_hashes import BlockHashes, CachedPrefixes, FilePrefix, pack, seed_of
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.fleet.load import ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import PrefixIndex
from rkserve.native.sim import profiles
from rkserve.router.policies import POLICIES, PrefixPolicy, RoutingRequest
from rkserve.router.queue.admission import QueueTerms

FAST, SLOW = "rk3588-qwen2.5-1.5b-w8a8", "rk3576-internlm2-1.8b-w4a16"
OWN = tuple(POLICIES)
OTHERS: dict[str, Callable[[list[PaperBoard], Random], Router]] = {
    "Ray, two choices": TwoChoices,
    "Ray, prefix affinity": RayPrefix,
}
# 8 boards and 200 sessions: from half busy to more than there is capacity for.
LOADS = {
    "light": Shape(rate=0.25, think_s=30),
    "busy": Shape(rate=0.5, think_s=30),
    "overloaded": Shape(rate=1.0, think_s=30),
    "at once, few turns": Shape(rate=20, think_s=20, turns=2.5, most_turns=5, user_tokens=80),
}
SESSIONS_PER_BOARD = 100
RATE_PER_BOARD = 0.06
KEYS, GREEDY = 10, 5
SLO_S = 20.0
Says = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulation in figures. decisions in CPU time, all else simulated."""

    name: str
    turns: int
    hit: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tokens_per_s: float
    busy: float
    decide_p50_us: float
    decide_p99_us: float
    hash_p50_us: float
    report_p50_us: float
    decisions: int


def outcome(name: str, seen: Seen, spent: Spent, boards: int) -> Outcome:
    """Return what came out."""
    return Outcome(
        name=name,
        turns=seen.ended,
        hit=seen.cached / max(1, seen.prompt),
        ttft_p50_ms=quantile(seen.ttft_ms, 0.5),
        ttft_p90_ms=quantile(seen.ttft_ms, 0.9),
        ttft_p99_ms=quantile(seen.ttft_ms, 0.99),
        tokens_per_s=seen.tokens / max(seen.end_s, 1e-9),
        busy=seen.board_ms / 1e3 / boards / max(seen.end_s, 1e-9),
        decide_p50_us=quantile(spent.decide_us, 0.5),
        decide_p99_us=quantile(spent.decide_us, 0.99),
        hash_p50_us=quantile(spent.hash_us, 0.5),
        report_p50_us=quantile(spent.report_us, 0.5),
        decisions=len(spent.decide_us),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share stays at or below; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 where all have the same, 1/n where one has all."""
    total = sum(shares)
    return total * total / (len(shares) * sum(one * one for one in shares)) if total else 1.0


def resident_mb() -> float:
    """The largest memory that this process had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass(frozen=True, slots=True)
class Grown:
    """A cluster of one size. ``contexts`` are remembered by its Router; memory in MB."""

    boards: int
    sessions: int
    outcome: Outcome
    contexts: int
    links: int
    resident_mb: float
    report_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """One load on one cluster. ``fairness`` is Jain's index of board time over keys that all have
    more to do than they get; ``greedy`` the part of one that asks for five times as much.
    """

    factor: float
    offered: int
    good: int
    good_per_s: float
    refused: int
    late: int
    greedy: float
    fairness: float


@dataclass(frozen=True, slots=True)
class Remembered:
    """Memory of a Router with so many contexts, all different but for a system prompt."""

    contexts: int
    tokens: int
    bytes_each: float


@dataclass(frozen=True, slots=True)
class Decided:
    """The cost of choices and reports for a Router that knows so many boards and contexts.

    ``full_report_us`` is for a report of 64 files of which one has changed; ``report_bytes`` its
    holdings.
    """

    boards: int
    contexts: int
    tokens: int
    decide_p50_us: float
    decide_p99_us: float
    hash_p50_us: float
    full_report_us: float
    same_report_us: float
    report_bytes: int


@dataclass(slots=True)
class Results:
    """All figures of one run of the command."""

    seed: int
    policies: dict[str, list[Outcome]] = field(default_factory=dict)
    grown: list[Grown] = field(default_factory=list)
    loaded: list[Loaded] = field(default_factory=list)
    decided: list[Decided] = field(default_factory=list)
    rollouts: list[Converged] = field(default_factory=list)
    remembered: list[Remembered] = field(default_factory=list)


def cluster(boards: int, slow: float = 0.0, disk: Disk | None = None) -> list[PaperBoard]:
    """Return boards of which a part is slow, spread evenly."""
    known = {one.name: one for one in profiles.load()}
    each = round(1 / slow) if slow else 0
    return [
        PaperBoard(
            f"board-{number:04}",
            known[SLOW if each and number % each == 0 else FAST],
            disk or Disk(),
        )
        for number in range(boards)
    ]


def policies(seed: int, boards: int, says: Says) -> Iterator[tuple[str, list[Outcome]]]:
    """Play the same conversations against every policy."""
    for load, shape in LOADS.items():
        found = []
        for name in (*OWN, *OTHERS):
            says(f"{load}, {name}")
            there, rng = cluster(boards), Random(seed)
            router: Router = (
                OwnRouter(name, there, rng) if name in OWN else OTHERS[name](there, rng)
            )
            seen = World(replace(shape, sessions=25 * boards), there, router, seed).run()
            found.append(outcome(name, seen, router.spent, boards))
        yield load, found


def grow(seed: int, boards: int, sessions: int, says: Says, *, name: str = "prefix") -> Grown:
    """Play a cluster whose boards are as busy as those of any other size, a third of them slow."""
    report_s = max(1.0, boards / 200)
    shape = Shape(sessions=sessions, rate=RATE_PER_BOARD * boards, turns=3, systems=32)
    there = cluster(boards, slow=1 / 3)
    router = OwnRouter(name, there, Random(seed))
    began = time.monotonic()

    def tell(done: int, of: int) -> None:
        if done % max(1, of // 200) == 0:
            says(f"{boards} boards, {name}: {done} of {of} sessions")

    world = World(shape, there, router, seed, report_s=report_s, says=tell, steps=2)
    seen = world.run()
    index = router.boards.index
    return Grown(
        boards=boards,
        sessions=sessions,
        outcome=outcome(name, seen, router.spent, boards),
        contexts=len(index) if index is not None else 0,
        links=index.links if index is not None else 0,
        resident_mb=resident_mb(),
        report_s=report_s,
        took_s=time.monotonic() - began,
    )


def load(seed: int, boards: int, factor: float, says: Says) -> Loaded:
    """Offer so many times what the boards can do, by keys of which one asks for more than others.

    Every request wants its whole answer within ``SLO_S``.
    """
    says(f"{factor:g} times the capacity")
    there = cluster(boards)
    typical_s = 250 * 2.8e-3 + 64 * 0.061
    per_s = factor * boards / typical_s
    shape = Shape(sessions=int(per_s * 240), rate=per_s, turns=1, systems=0, user_tokens=250)
    router = OwnRouter("prefix", there, Random(seed), limit=8 * boards, timeout_s=60.0)
    world: World

    def claim(number: int) -> QueueTerms:
        lot = number % (KEYS + GREEDY - 1)
        flow = "greedy" if lot < GREEDY else f"key {lot}"
        return QueueTerms(flow=flow, deadline_s=world.now_s + SLO_S, timeout_s=SLO_S)

    world = World(shape, there, router, seed, claims=claim)
    seen = world.run()
    shares = list(seen.by_flow.values())
    modest = [share for flow, share in seen.by_flow.items() if flow != "greedy"]
    return Loaded(
        factor=factor,
        offered=seen.ended + seen.refused,
        good=seen.good,
        good_per_s=seen.good / seen.end_s,
        refused=seen.refused,
        late=seen.ended - seen.good,
        greedy=seen.by_flow.get("greedy", 0.0) / max(1e-9, sum(shares)),
        fairness=jain([*modest, min(seen.by_flow.get("greedy", 0.0), max(modest, default=0.0))]),
    )


def rollouts(seed: int, boards: int) -> Iterator[Converged]:
    """Bring a new version to all boards, in two ways."""
    for strategy in (Strategy.ROLLING, Strategy.ATOMIC):
        yield Rolling(boards, strategy, seed).run()


def decide(seed: int, boards: int, tokens: int = 1500, samples: int = 2000) -> Decided:
    """Time choices of a Router that knows a hundred contexts of each board; a fifth is free.

    Half of the prompts go on with one of these, the others share a system prompt with all.
    """
    rng = Random(seed)
    known, system = ModelBoards(rng, PrefixIndex(SESSIONS_PER_BOARD)), tuple(range(256))
    held: list[tuple[FilePrefix, ...]] = []

    def ids(session: int, size: int) -> tuple[int, ...]:
        return (*system, *range(session * 10_000, session * 10_000 + size - len(system)))

    def hear(number: int, packed: bytes) -> float:
        report = board_report(number, packed, running=int(number % 5 > 0))
        board = known.get(str(number))
        if board is not None:
            board.asked(board.asked_s + 1 if board.asked_s > 0 else 1.0)
        began = time.thread_time()
        known.update(MODEL, report, ready=True, held=PauseEffect.NOT)
        return (time.thread_time() - began) * 1e6

    for number in range(boards):
        first = number * SESSIONS_PER_BOARD
        chains = (
            BlockHashes(ids(session, tokens), seed_of(None))
            for session in range(first, first + SESSIONS_PER_BOARD)
        )
        files = tuple(FilePrefix(tokens, chain.marks) for chain in chains)
        held.append(files)
        hear(number, pack(CachedPrefixes(True, 256, None, files)))
    contexts = len(known.index or ())
    hash_us, decide_us, policy = [], [], PrefixPolicy()
    for sample in range(samples):
        session = rng.randrange(boards * SESSIONS_PER_BOARD) + (sample % 2) * 10**7
        prompt = ids(session, tokens + 60)
        began = time.thread_time()
        chain = BlockHashes(prompt, seed_of(None))
        hashed = time.thread_time()
        policy.choose(RoutingRequest(str(sample), MODEL, len(prompt), 64, chain), known, 0.0)
        decide_us.append((time.thread_time() - hashed) * 1e6)
        hash_us.append((hashed - began) * 1e6)
    full_us, same_us = [], []
    for number in range(min(boards, 200)):
        files = held[number][-64:]
        packed = pack(CachedPrefixes(True, 256, None, files))
        hear(number, packed)
        full_us.append(hear(number, pack(CachedPrefixes(True, 256, None, (*files[1:], files[0])))))
        same_us.append(hear(number, pack(CachedPrefixes(True, 256, None, (*files[1:], files[0])))))
    return Decided(
        boards,
        contexts,
        tokens,
        quantile(decide_us, 0.5),
        quantile(decide_us, 0.99),
        quantile(hash_us, 0.5),
        quantile(full_us, 0.5),
        quantile(same_us, 0.5),
        len(packed),
    )


def board_report(number: int, holdings: bytes, running: int = 0) -> BoardReport:
    """Return the report of a ready board."""
    name = str(number)
    report = BoardReport(name, MODEL, BoardState.READY, platform="RK3588", replica=name)
    return replace(report, running=running, holdings=holdings)


def remember(contexts: int, tokens: int) -> Remembered:
    """Let a Router hear reports of contexts of one length, a hundred of each board."""
    boards = ModelBoards(Random(1), PrefixIndex(SESSIONS_PER_BOARD))
    system = tuple(range(1 << 30, (1 << 30) + 256))

    def report(number: int) -> bytes:
        files = []
        for session in range(number * SESSIONS_PER_BOARD, (number + 1) * SESSIONS_PER_BOARD):
            own = range(session * 10_000, session * 10_000 + tokens - len(system))
            files.append(FilePrefix(tokens, BlockHashes((*system, *own), seed_of(None)).marks))
        return pack(CachedPrefixes(True, 256, None, tuple(files)))

    # Hashing is not what is measured, and would take minutes while memory is traced.
    reports = [report(number) for number in range(contexts // SESSIONS_PER_BOARD)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number, packed in enumerate(reports):
        mine = bytes(bytearray(packed))  # a Router keeps what it was told, and so that counts
        heard = board_report(number, mine)
        boards.update(MODEL, heard, ready=True, held=PauseEffect.NOT)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    known = len(boards.index or ())
    return Remembered(known, tokens, grown / max(1, known))
