"""Rules about single boards: their state, epoch, clocks, heat, memory, disk and speed."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median

from rkserve.core.board_report import BoardState, Hardware
from rkserve.core.errors.requests import without_folders
from rkserve.verdicts.facts import BoardView, ClusterFacts
from rkserve.verdicts.hardware import (
    HOT_C,
    LOW_BYTES,
    NEARLY,
    SCARCE,
    Shortfall,
    heat,
    low_ddr,
    low_disk,
    low_memory,
    low_npu,
)
from rkserve.verdicts.reasons import ClusterRule, Gravity, PrometheusAlert, Reason

GONE = (BoardState.LOST, BoardState.FAILED, BoardState.STOPPED)
COMING = (BoardState.LOADING, BoardState.JOINING, BoardState.FETCHING)
COMING_S = 600.0  # a large model from a slow card takes some minutes
BEHIND_S = 30.0  # boards adopt an epoch within seconds
SLOW = 0.8  # of the median of its kind
FEWEST_OF_A_KIND = 3
LOADED_PERCENT = 30.0  # three cores at 48 to 50 % is what a decoding RK3588 showed


def _board_state(states: str) -> str:
    return f'max by (board, model) (rkserve_board_state{{state=~"{states}"}})'


def _lost(facts: ClusterFacts) -> Iterator[Reason]:
    for board in facts.boards:
        report = board.report
        if report.state not in GONE:
            continue
        if report.state is BoardState.LOST:
            command = "sudo systemctl restart rkserve-board  # or rkserve join, without the service"
        elif report.state is BoardState.FAILED:
            command = "rkserve doctor"
        else:
            command = "serve status"
        on_head = report.state is BoardState.STOPPED
        yield Reason(
            "BoardLost",
            f"It is {report.state.value} and serves nothing.",
            command,
            boards=(board.id,),
            evidence=_reasons(board),
            run_on="head" if on_head else "board",
        )


def _quarantined(facts: ClusterFacts) -> Iterator[Reason]:
    for board in facts.boards:
        if board.report.state is BoardState.QUARANTINED:
            yield Reason(
                "BoardQuarantined",
                "Its engine crashed too often in a short time, and it rests for a while.",
                "rkserve doctor",
                boards=(board.id,),
                evidence=(*_reasons(board), *_crashes(board)),
                run_on="board",
            )


def _recovering(facts: ClusterFacts) -> Iterator[Reason]:
    for board in facts.boards:
        state, since_s = board.report.state, facts.now_s - board.state_since_s
        if state in (BoardState.RECOVERING, BoardState.HUNG):
            sentence = "Its engine is replaced; requests wait or go to other boards."
        elif state in COMING and since_s > COMING_S:
            sentence = f"It is {state.value} for {since_s / 60:.0f} minutes."
        elif board.circuit == "open" and state is BoardState.READY:
            sentence = "The Router sends it no requests for a while, because they kept failing."
        else:
            continue
        yield Reason(
            "BoardRecovering",
            sentence,
            f"rkserve boards show {shlex.quote(board.id)}",
            boards=(board.id,),
            evidence=(*_reasons(board), *_crashes(board)),
        )


def _behind(facts: ClusterFacts) -> Iterator[Reason]:
    if facts.now_s - facts.epoch_since_s <= BEHIND_S:
        return
    for board in facts.boards:
        report = board.report
        settled = facts.now_s - board.state_since_s > BEHIND_S
        if report.state in GONE or report.fetch is not None or not settled:
            continue
        if (report.epoch or 0) < facts.desired.epoch:
            lacks = f"; it lacks {report.missing} files" if report.missing else ""
            yield Reason(
                "BoardsBehindEpoch",
                f"It obeys epoch {report.epoch or 0}, and the cluster's is {facts.desired.epoch}"
                f"{lacks}.",
                "rkserve operations",
                boards=(board.id,),
                figure=float(report.epoch or 0),
                limit=float(facts.desired.epoch),
                unit="epoch",
                evidence=_reasons(board),
            )


def _reasons(board: BoardView) -> tuple[str, ...]:
    """Return what a board and its Router report about its state, without paths of folders."""
    report = board.report
    found = (report.reason, board.circuit_reason, report.last_recovery)
    node = f"node {report.node}" if report.node else ""
    return tuple(dict.fromkeys(filter(None, (*map(without_folders, found), node))))


def _crashes(board: BoardView) -> tuple[str, ...]:
    counts = ", ".join(f"{kind} {count}" for kind, count in board.report.crashes)
    return (f"engines that ended: {counts}",) if counts else ()


def _of_hardware(
    name: str, look: Callable[[Hardware], Shortfall | None]
) -> Callable[[ClusterFacts], Iterator[Reason]]:
    """Return the condition of a rule about readings of hardware."""

    def find(facts: ClusterFacts) -> Iterator[Reason]:
        for board in facts.boards:
            hardware = board.report.hardware
            if hardware is None or board.report.state in GONE:
                continue
            if (found := look(hardware)) is not None:
                yield Reason.of(name, board.id, found)

    return find


def _of_clock(
    name: str,
    look: Callable[[Hardware], Shortfall | None],
    low: Callable[[Hardware], Shortfall | None],
) -> Callable[[ClusterFacts], Iterator[Reason]]:
    """Return the condition of a rule about a clock that is ``low``, by ``look`` at work.

    An idle board lowers its clocks in order, so that its readings at work count; between two
    requests the latest ones do, until the clock is seen to be high.
    """

    def find(facts: ClusterFacts) -> Iterator[Reason]:
        for board in facts.boards:
            now, at_work = board.report.hardware, board.at_work
            if now is None or at_work is None or board.report.state in GONE or low(now) is None:
                continue
            if (found := look(at_work)) is not None:
                yield Reason.of(name, board.id, found)

    return find


def _loaded_npu(hardware: Hardware) -> Shortfall | None:
    if max(hardware.npu_load, default=0.0) < LOADED_PERCENT:
        return None
    return low_npu(hardware)


def _slower(facts: ClusterFacts) -> Iterator[Reason]:
    kinds: dict[tuple[str, str], list[tuple[BoardView, float]]] = defaultdict(list)
    for board in facts.boards:
        if board.speed_tokens_per_s is not None and board.report.state not in GONE:
            kinds[board.kind].append((board, board.speed_tokens_per_s))
    for (soc, model), found in kinds.items():
        middle = median(speed for _, speed in found)
        for board, speed in found:
            if len(found) < FEWEST_OF_A_KIND or speed >= SLOW * middle:
                continue
            yield Reason(
                "BoardSlowerThanItsKind",
                f"It decodes {speed:.1f} tokens/s, {speed / middle:.0%} of the median of the "
                f"{len(found)} boards with {soc or 'this SoC'} and {model}.",
                "rkserve doctor",
                boards=(board.id,),
                figure=speed,
                limit=SLOW * middle,
                unit="tokens/s",
                evidence=(f"median of its kind: {middle:.1f} tokens/s", *_expected(board)),
                run_on="board",
            )


def _expected(board: BoardView) -> tuple[str, ...]:
    if board.expected_tokens_per_s is None:
        return ()
    return (f"expected: {board.expected_tokens_per_s:.1f} tokens/s, {board.basis}",)


_SPEED = (
    "(max by (board, model) (rate(rkserve_decode_tokens_total[10m])) "
    "/ (max by (board, model) (rate(rkserve_decode_seconds_total[10m])) > 0)) "
    "* on (board, model) group_left (soc) max by (board, model, soc) (rkserve_board_info)"
)
_BUSY = "max by (board) (min_over_time(rkserve_board_running[1m])) > 0"

BOARD_LOST = ClusterRule(
    "BoardLost",
    Gravity.CRITICAL,
    _lost,
    PrometheusAlert(
        # A Router lists a lost board for half a minute.
        f"{_board_state('lost|failed|stopped')} == 1 or (max by (board, model) "
        '(max_over_time(rkserve_board_state{state="lost"}[30m])) == 1 '
        "unless on (board) max by (board) (rkserve_board_state))",
        30,
        "Board {{ $labels.board }} serves nothing: it is lost, failed or stopped.",
    ),
)
BOARD_QUARANTINED = ClusterRule(
    "BoardQuarantined",
    Gravity.CRITICAL,
    _quarantined,
    PrometheusAlert(
        f"{_board_state('quarantined')} == 1",
        0,
        "The engine of board {{ $labels.board }} crashed too often in a short time.",
    ),
)
BOARD_RECOVERING = ClusterRule(
    "BoardRecovering",
    Gravity.WARNING,
    _recovering,
    PrometheusAlert(
        # A series of another state than ready is there only while the board has it.
        f"{_board_state('recovering|hung')} == 1 or ({_board_state('loading|joining|fetching')} "
        "== 1 and on (board, model) max by (board, model) "
        '(max_over_time(rkserve_board_state{state="ready"}[10m])) == 0 and on (board, model) '
        'max by (board, model) (rkserve_board_state{state="ready"} offset 10m) == 0)',
        60,
        "Board {{ $labels.board }} is recovering, or has been loading for ten minutes.",
    ),
)
BOARDS_BEHIND = ClusterRule(
    "BoardsBehindEpoch",
    Gravity.WARNING,
    _behind,
    PrometheusAlert(
        "max(rkserve_boards_behind) > 0",
        60,
        "{{ $value }} boards do not obey the latest desired state.",
    ),
)
DDR_BELOW_MAX = ClusterRule(
    "DdrBelowMax",
    Gravity.WARNING,
    _of_clock("DdrBelowMax", low_ddr, low_ddr),
    PrometheusAlert(
        "max by (board) (rkserve_ddr_frequency_hertz) "
        f"< {NEARLY} * max by (board) (rkserve_ddr_max_frequency_hertz) and {_BUSY}",
        60,
        "The DDR clock of board {{ $labels.board }} is {{ $value | humanize }}Hz while it works.",
    ),
    explained_by=("Hot",),
)
NPU_BELOW_MAX = ClusterRule(
    "NpuClockBelowMaxUnderLoad",
    Gravity.WARNING,
    _of_clock("NpuClockBelowMaxUnderLoad", _loaded_npu, low_npu),
    PrometheusAlert(
        "max by (board) (rkserve_npu_frequency_hertz) "
        f"< {NEARLY} * max by (board) (rkserve_npu_max_frequency_hertz) and {_BUSY} "
        f"and max by (board) (rkserve_npu_load_ratio) >= {LOADED_PERCENT / 100}",
        60,
        "The NPU clock of board {{ $labels.board }} is {{ $value | humanize }}Hz while it works.",
    ),
    explained_by=("Hot",),
)
HOT = ClusterRule(
    "Hot",
    Gravity.WARNING,
    _of_hardware("Hot", heat),
    PrometheusAlert(
        f"max by (board) (rkserve_temperature_celsius) >= {HOT_C:g}",
        60,
        "Board {{ $labels.board }} has {{ $value }} degrees Celsius.",
    ),
)
MEMORY_LOW = ClusterRule(
    "MemoryLow",
    Gravity.WARNING,
    _of_hardware("MemoryLow", low_memory),
    PrometheusAlert(
        "min by (board) (rkserve_memory_available_bytes) "
        f"< min by (board) (rkserve_memory_total_bytes) / {SCARCE}",
        60,
        "Board {{ $labels.board }} has {{ $value | humanize1024 }}B of memory left.",
    ),
)
DISK_LOW = ClusterRule(
    "DiskLow",
    Gravity.WARNING,
    _of_hardware("DiskLow", lambda hardware: low_disk("", hardware.disk_free_bytes)),
    PrometheusAlert(
        f"min by (board) (rkserve_disk_free_bytes) < {LOW_BYTES}",
        300,
        "The disk of board {{ $labels.board }} has {{ $value | humanize1024 }}B left.",
    ),
)
BOARD_SLOWER = ClusterRule(
    "BoardSlowerThanItsKind",
    Gravity.WARNING,
    _slower,
    PrometheusAlert(
        f"({_SPEED}) < on (soc, model) group_left () "
        f"({SLOW} * quantile by (soc, model) (0.5, {_SPEED}) "
        f"and count by (soc, model) ({_SPEED}) >= {FEWEST_OF_A_KIND})",
        300,
        "Board {{ $labels.board }} decodes {{ $value | humanize }} tokens/s, less than its kind.",
    ),
    explained_by=("DdrBelowMax", "NpuClockBelowMaxUnderLoad", "Hot", "MemoryLow"),
)
