"""Facts about clusters: a healthy one, and one with a planted cause for each rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rkserve.core.board_report import BoardReport, BoardState, Hardware
from rkserve.core.desired_state import ActivePause, BoardTarget, Desired, PauseMode, Scope
from rkserve.core.metrics import TTFT_BUCKETS_S, WAIT_BUCKETS_S
from rkserve.verdicts.facts import WINDOWS, BoardView, ClusterFacts, TrafficCounts

NOW_S = 1_800_000_000.0
MODEL = "qwen3-1.7b"
EPOCH = 12
HEALTHY = Hardware(
    soc="RK3588",
    npu_load=(48.0, 47.0, 49.0),
    npu_hz=1_000_000_000,
    npu_max_hz=1_000_000_000,
    npu_governor="performance",
    ddr_hz=2_112_000_000,
    ddr_max_hz=2_112_000_000,
    ddr_governor="performance",
    temperature_c=61.0,
    driver_version="0.9.8",
    memory_total_bytes=16 * 10**9,
    memory_available_bytes=9 * 10**9,
    disk_total_bytes=58 * 10**9,
    disk_free_bytes=21 * 10**9,
)


def board(number: int, hardware: Hardware = HEALTHY, **changes: Any) -> BoardView:
    """A board that has worked for a minute at the speed of its kind.

    ``changes`` are of its report, where that has a field of the name, else of the view.
    """
    of_report = {name: changes.pop(name) for name in list(changes) if name in REPORT_FIELDS}
    report = BoardReport(
        board_id=f"rock-{number:02d}",
        model=MODEL,
        state=BoardState.READY,
        platform="RK3588",
        node=f"rock-{number:02d}",
        release="1.3.0",
        replica=f"replica-{number}",
        context_len=4096,
        kv_positions=410,
        running=1,
        prompt_tokens=1000,
        cached_tokens=600,
        epoch=EPOCH,
        hardware=hardware,
    )
    report = replace(report, **of_report)
    view = BoardView(
        report,
        BoardTarget(EPOCH),
        state_since_s=NOW_S - 3600,
        prefill_tokens_per_s=40.2,
        decode_tokens_per_s=12.1,
        speed_tokens_per_s=12.4,
        at_work=report.hardware,
        expected_tokens_per_s=12.5,
        basis="published for Qwen3 1.7B w8a8 on RK3588",
    )
    return replace(view, **changes)


REPORT_FIELDS = frozenset(BoardReport.__dataclass_fields__)


def histogram(bounds: tuple[float, ...], seconds: float, count: int) -> tuple[int, ...]:
    """The counts of a histogram's buckets with that many samples of one value."""
    at = next((index for index, bound in enumerate(bounds) if seconds <= bound), len(bounds))
    return tuple(count if index == at else 0 for index in range(len(bounds) + 1))


def traffic(count: int = 200, **changes: Any) -> TrafficCounts:
    """Requests that were answered well; ``ttft_s`` and ``wait_s`` are of all of them."""
    ttft_s, wait_s = changes.pop("ttft_s", 1.0), changes.pop("wait_s", 0.2)
    counts = TrafficCounts(
        good=count,
        expected=100 * count,
        found=90 * count,
        ttft=histogram(TTFT_BUCKETS_S, ttft_s, count),
        queue_wait=histogram(WAIT_BUCKETS_S, wait_s, count),
    )
    return replace(counts, **changes)


def with_traffic(**changes: Any) -> ClusterFacts:
    """A cluster of which each window has that traffic."""
    return replace(healthy(), traffic={MODEL: dict.fromkeys(WINDOWS, traffic(**changes))})


def healthy(*boards: BoardView, count: int = 4) -> ClusterFacts:
    """A cluster that is well, with these boards in the place of the first ones."""
    others = tuple(board(number) for number in range(len(boards) + 1, count + 1))
    return ClusterFacts(
        NOW_S,
        (MODEL,),
        (*boards, *others),
        Desired(epoch=EPOCH),
        NOW_S - 3600,
        traffic={MODEL: dict.fromkeys(WINDOWS, traffic())},
        ttft_bounds_s=TTFT_BUCKETS_S,
        wait_bounds_s=WAIT_BUCKETS_S,
        streams={"channel": 200, "ray": 1},
        coordinator_silent_s=1.0,
        routers_up=("router-1", "router-2"),
    )


def with_hardware(**changes: Any) -> ClusterFacts:
    """A cluster whose first board has other readings."""
    return healthy(board(1, replace(HEALTHY, **changes)))


def pause(**changes: Any) -> ActivePause:
    """A pause of one model whose lease has ended a minute ago."""
    found = ActivePause(
        "op-7", Scope((MODEL,)), PauseMode.KEEP, since_s=NOW_S - 120, expires_s=NOW_S - 60
    )
    return replace(found, **changes)


def loading(number: int) -> BoardView:
    """A board that loads its model for a minute."""
    return board(number, state=BoardState.LOADING, state_since_s=NOW_S - 60)


# A planted cause for each rule: the facts, and a part of the command that helps.
PLANTED: Mapping[str, tuple[Callable[[], ClusterFacts], str]] = {
    "ModelWithoutBoards": (
        lambda: healthy(*(loading(number) for number in range(1, 5))),
        "rkserve boards",
    ),
    "CoordinatorDown": (
        lambda: replace(healthy(), coordinator_reachable=False, coordinator_silent_s=31.0),
        "serve status",
    ),
    "ErrorBudgetFast": (lambda: with_traffic(good=160, failed=40), "rkserve doctor --fleet"),
    "BoardLost": (
        lambda: healthy(board(1, state=BoardState.LOST, reason="its replica does not answer")),
        "systemctl restart rkserve-board",
    ),
    "BoardQuarantined": (
        lambda: healthy(board(1, state=BoardState.QUARANTINED, crashes=(("SIGSEGV", 3),))),
        "rkserve doctor",
    ),
    "PauseHeldPastLease": (
        lambda: replace(healthy(), desired=Desired(epoch=EPOCH, pauses=(pause(),))),
        f"rkserve resume --model {MODEL}",
    ),
    "RouterSilent": (
        lambda: replace(healthy(), routers_up=("router-1",), routers_silent=("router-2",)),
        "serve status",
    ),
    "BoardRecovering": (
        lambda: healthy(board(1, state=BoardState.RECOVERING, reason="the engine ended")),
        "rkserve boards show rock-01",
    ),
    "BoardsBehindEpoch": (lambda: healthy(board(1, epoch=10, missing=1)), "rkserve operations"),
    "MemoryLow": (lambda: with_hardware(memory_available_bytes=200 * 10**6), "ps -eo rss"),
    "DiskLow": (lambda: with_hardware(disk_free_bytes=90 * 10**6), "sudo du -xh"),
    "Hot": (lambda: with_hardware(temperature_c=86.0), "heat sink"),
    "DdrBelowMax": (
        lambda: with_hardware(ddr_hz=528_000_000, ddr_governor="powersave"),
        "echo performance | sudo tee /sys/class/devfreq/dmc/governor",
    ),
    "NpuClockBelowMaxUnderLoad": (
        lambda: with_hardware(npu_hz=300_000_000, npu_governor="powersave"),
        "echo performance | sudo tee /sys/class/devfreq/fdab0000.npu/governor",
    ),
    "BoardSlowerThanItsKind": (
        lambda: healthy(board(1, speed_tokens_per_s=6.2)),
        "rkserve doctor",
    ),
    "TurnedAway": (lambda: with_traffic(turned_away=30), "rkserve generations"),
    "QueueWaitP95": (lambda: with_traffic(wait_s=25.0), "rkserve generations"),
    "TtftP95": (lambda: with_traffic(ttft_s=50.0), "rkserve doctor --fleet"),
    "ErrorBudgetSlow": (lambda: with_traffic(good=196, late=4), "rkserve doctor --fleet"),
    "ChannelFallback": (
        lambda: replace(healthy(), streams={"channel": 60, "ray": 40}),
        "channel.ports",
    ),
    "PrefixExpectedNotFound": (lambda: with_traffic(found=300), "rkserve caches"),
}
