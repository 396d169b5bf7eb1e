"""The status of the cluster: totals over boards, pauses, and served weights.

It is made from the boards' reports and the desired state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

from rkserve.api.admin.pause import ModeName
from rkserve.api.admin.weights import (
    VersionEntry,
    WeightInfoAnswer,
    base_entry,
    loaded_digest,
    weights_entry,
)
from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import Count
from rkserve.core.board_report import BoardReport, BoardState, VersionFigures
from rkserve.core.desired_state import ActivePause, Desired
from rkserve.core.errors.requests import without_folders


@dataclass(frozen=True, slots=True)
class BoardStatus:
    """One board: its report, its recent tokens per second, and the bytes of one KV position."""

    report: BoardReport
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    position_bytes: int | None = None


class CoordinatorEntry(TypedDict):
    """The Coordinator, as this Router sees it, and the seconds since its last answer."""

    reachable: bool
    heard_s_ago: float | None


class TotalEntry(TypedDict):
    """Figures of several boards together."""

    boards: Count
    ready: Count
    joining: Count
    paused_boards: Count
    asleep: Count
    drained: Count
    positions: Count
    capacity: Count
    bytes: Count | None
    hit_ratio: float | None
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    running: Count
    queued: Count
    paused: Count
    temperature_c: float | None


class ModelTotalEntry(TotalEntry, VersionEntry):
    """The boards of one model, and its weights."""

    base: str


class ClusterAnswer(TypedDict):
    """The cluster at a glance."""

    object: Literal["cluster"]
    epoch: int
    coordinator: CoordinatorEntry
    total: TotalEntry
    models: dict[str, ModelTotalEntry]
    boards: list[dict[str, Any]]
    pauses: list[dict[str, Any]]


class BoardPauseEntry(TypedDict):
    """The pause of a board."""

    paused: bool
    mode: ModeName | None
    level: int | None
    reported: str | None
    epoch: int | None


class AdapterPauseEntry(TypedDict):
    """The pause of an adapter."""

    mode: ModeName


class PausedAnswer(TypedDict):
    """The paused boards."""

    is_paused: bool
    all: bool
    epoch: int
    boards: dict[str, BoardPauseEntry]
    adapters: dict[str, AdapterPauseEntry]


class BoardSleepEntry(TypedDict):
    """The sleep of a board."""

    sleeping: bool
    level: int | None
    reported: int | None
    state: str
    epoch: int | None


class SleepingAnswer(TypedDict):
    """The sleeping boards."""

    is_sleeping: bool
    all: bool
    epoch: int
    boards: dict[str, BoardSleepEntry]


class WorldSizeAnswer(TypedDict):
    """The number of boards."""

    world_size: Count


class ServerLoadAnswer(TypedDict):
    """The number of requests that this Router answers."""

    server_load: Count


def cluster_entry(
    desired: Desired, models: Sequence[str], boards: Iterable[BoardStatus], head: CoordinatorEntry
) -> ClusterAnswer:
    """Return the answer of GET /v1/cluster."""
    known = sorted(boards, key=lambda one: one.report.board_id)
    by_model = {model: [one for one in known if one.report.model == model] for model in models}
    ago_s = head["heard_s_ago"]
    return {
        "object": "cluster",
        "epoch": desired.epoch,
        "coordinator": {
            "reachable": head["reachable"],
            "heard_s_ago": None if ago_s is None else round(ago_s, 3),
        },
        "total": _total(known, desired),
        "models": {model: _model(desired, model, found) for model, found in by_model.items()},
        "boards": [_board(one, desired) for one in known],
        "pauses": [_pause(pause) for pause in desired.pauses],
    }


def is_paused_entry(
    desired: Desired, boards: Iterable[BoardReport], model: str | None
) -> PausedAnswer:
    """Return the answer of GET /is_paused: any and all boards, and each of them.

    ``paused`` is the desired state, in force once its pause was answered; ``reported`` is the
    board's latest report. A sleeping board is paused as well, and has a level.
    """
    states: dict[str, BoardPauseEntry] = {}
    adapters: dict[str, AdapterPauseEntry] = {}
    for board in sorted(boards, key=lambda one: one.board_id):
        target = desired.target(board.board_id, board.model)
        mode = None if target.hold is None else target.hold.mode.value
        states[board.board_id] = {
            "paused": mode is not None,
            "mode": mode,
            "level": target.level,
            "reported": board.hold or None,
            "epoch": board.epoch,
        }
        adapters |= {name: {"mode": hold.mode.value} for name, hold in target.adapter_holds}
    whole = [pause for pause in desired.pauses if pause.scope.adapter is None]
    some, all_of = _held([entry["paused"] for entry in states.values()], whole, model)
    return {
        "is_paused": some,
        "all": all_of,
        "epoch": desired.epoch,
        "boards": states,
        "adapters": dict(sorted(adapters.items())),
    }


def is_sleeping_entry(
    desired: Desired, boards: Iterable[BoardReport], model: str | None
) -> SleepingAnswer:
    """Return the answer of GET /is_sleeping: any and all boards, and each of them.

    ``sleeping`` is the desired state, in force once its sleep was answered; ``reported`` is the
    level in the board's latest report.
    """
    states: dict[str, BoardSleepEntry] = {}
    for board in sorted(boards, key=lambda one: one.board_id):
        level = desired.target(board.board_id, board.model).level
        states[board.board_id] = {
            "sleeping": level is not None,
            "level": level,
            "reported": board.level,
            "state": board.state.value,
            "epoch": board.epoch,
        }
    sleeps = [pause for pause in desired.pauses if pause.level is not None]
    some, all_of = _held([entry["sleeping"] for entry in states.values()], sleeps, model)
    return {
        "is_sleeping": some,
        "all": all_of,
        "epoch": desired.epoch,
        "boards": states,
    }


def _held(
    boards: list[bool], pauses: Iterable[ActivePause], model: str | None
) -> tuple[bool, bool]:
    """Return whether any and all boards are held; a pause or sleep holds even without a board."""
    if boards:
        return any(boards), all(boards)
    scopes = [pause.scope.models for pause in pauses]
    meant = any(not models or model in (None, *models) for models in scopes)
    return meant, meant


def weight_info(
    desired: Desired,
    models: Sequence[str],
    model: str | None,
    boards: Sequence[BoardReport] = (),
) -> WeightInfoAnswer:
    """Return the answer of GET /weight_info: of one model, the first where none is named."""
    chosen = models[0] if model is None else model
    meant = desired.weights_of(chosen)
    return {
        "weight_version": meant.label,
        "step": meant.step,
        "model": chosen,
        "epoch": desired.epoch,
        "models": {
            one: {
                **weights_entry(desired, one, boards),
                "adapters": {
                    line.name: None if line.active is None else line.active.ref.version
                    for line in desired.lines
                    if line.model == one
                },
                "adapter_digests": {
                    line.name: line.active.digest
                    for line in desired.lines
                    if line.model == one and line.active is not None
                },
            }
            for one in models
        },
    }


def _model(desired: Desired, model: str, boards: Sequence[BoardStatus]) -> ModelTotalEntry:
    meant = desired.weights_of(model)
    base = base_entry(meant, [one.report for one in boards])["digest"]
    return {
        **_total(boards, desired),
        "weight_version": meant.label,
        "step": meant.step,
        "base": base,
    }


def _board(one: BoardStatus, desired: Desired) -> JsonObject:
    report = one.report
    target = desired.target(report.board_id, report.model)
    hold = target.hold
    return {
        "id": report.board_id,
        "model": report.model,
        "state": report.state.value,
        "reason": without_folders(report.reason),
        "epoch": report.epoch,
        "hold": None if hold is None else hold.mode.value,
        "missing": report.missing,
        "positions": report.kv_positions,
        "capacity": _capacity(report),
        "bytes": _bytes([one]),
        "hit_ratio": _hits([report]),
        "prefill_tokens_per_s": round(one.prefill_tokens_per_s, 2),
        "decode_tokens_per_s": round(one.decode_tokens_per_s, 2),
        "prefill_speed": _speed(report.prefill_tokens, report.prefill_ms),
        "decode_speed": _speed(report.decode_tokens, report.decode_ms),
        "running": report.running,
        "queued": report.queued,
        "paused": report.paused,
        "asleep": target.level is not None,
        "level": target.level,
        "drained": target.drained,
        "idle_s": round(report.idle_s, 1),
        "base": loaded_digest(report),
        "own_base": not report.base,
        "adapters": list(report.adapters),
        "staged": list(report.staged),
        "versions": [_figures(figures) for figures in report.versions],
        "temperature_c": _heat([report]),
    }


def _total(boards: Sequence[BoardStatus], desired: Desired) -> TotalEntry:
    reports = [one.report for one in boards]
    targets = [desired.target(one.board_id, one.model) for one in reports]
    return {
        "boards": len(reports),
        "ready": sum(one.state is BoardState.READY for one in reports),
        "joining": sum(one.state is BoardState.JOINING for one in reports),
        "paused_boards": sum(target.hold is not None for target in targets),
        "asleep": sum(target.level is not None for target in targets),
        "drained": sum(target.drained for target in targets),
        "positions": sum(one.kv_positions for one in reports),
        "capacity": sum(_capacity(one) for one in reports),
        "bytes": _bytes(boards),
        "hit_ratio": _hits(reports),
        "prefill_tokens_per_s": round(sum(one.prefill_tokens_per_s for one in boards), 2),
        "decode_tokens_per_s": round(sum(one.decode_tokens_per_s for one in boards), 2),
        "running": sum(one.running for one in reports),
        "queued": sum(one.queued for one in reports),
        "paused": sum(one.paused for one in reports),
        "temperature_c": _heat(reports),
    }


def _capacity(report: BoardReport) -> int:
    return report.context_len * report.n_batch


def _bytes(boards: Sequence[BoardStatus]) -> int | None:
    """Return the bytes of the live KV caches; None if a model folder does not state them."""
    found = 0
    for one in boards:
        if one.position_bytes is None:
            return None
        found += one.report.kv_positions * one.position_bytes
    return found


def _hits(reports: Sequence[BoardReport]) -> float | None:
    asked = sum(report.prompt_tokens for report in reports)
    return round(sum(r.cached_tokens for r in reports) / asked, 4) if asked else None


def _heat(reports: Sequence[BoardReport]) -> float | None:
    temperatures = (
        report.hardware.temperature_c for report in reports if report.hardware is not None
    )
    return max((one for one in temperatures if one is not None), default=None)


def _speed(tokens: int, ms: float) -> float | None:
    return round(tokens * 1e3 / ms, 2) if ms > 0 else None


def _figures(figures: VersionFigures) -> JsonObject:
    return {
        "version": figures.version,
        "requests": figures.requests,
        "failed": figures.failed,
        "tokens": figures.tokens,
        "decode_tokens_per_s": _speed(figures.tokens, figures.decode_ms),
    }


def _pause(pause: ActivePause) -> JsonObject:
    return {
        "operation": pause.operation,
        "models": list(pause.scope.models),
        "boards": list(pause.scope.boards),
        "adapter": pause.scope.adapter,
        "mode": pause.mode.value,
        "clear_cache": pause.clear_cache,
        "level": pause.level,
        "wake_on_request": pause.wakes,
        "since_s": pause.since_s,
        "expires_s": pause.expires_s,
    }
