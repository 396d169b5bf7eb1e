"""The document of a cluster's view, made from facts and a verdict."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rkserve import __version__
from rkserve.api.admin.cluster_view import (
    BoardEntry,
    BoardHistoryAnswer,
    HistoryEntry,
    KeyUsageAnswer,
    ModelView,
    OperationView,
    PauseView,
    ReasonEntry,
    RequestEntry,
    RolloutView,
    RoutersEntry,
    StateSpan,
    VerdictAnswer,
    VerdictEntry,
    ViewDocument,
    WindowEntry,
)
from rkserve.api.json.fields import JsonObject
from rkserve.control.operations import ControlOperation, ResultStatus
from rkserve.core.answer_metrics import DAY_S, UsageReport
from rkserve.core.board_report import BoardState, Hardware
from rkserve.core.desired_state import ActivePause, AdapterVersions, Desired
from rkserve.core.errors.requests import without_folders
from rkserve.core.metrics import NO_KEY
from rkserve.verdicts.facts import (
    FEWEST,
    WINDOWS,
    BoardView,
    ClusterFacts,
    RequestView,
    TrafficCounts,
    percentile,
)
from rkserve.verdicts.hardware import MEGA, highest_ddr_hz
from rkserve.verdicts.history import (
    EVERY_S,
    FIGURES,
    POINTS,
    SPARK_POINTS,
    BoardHistory,
    figures_of,
)
from rkserve.verdicts.reasons import Reason
from rkserve.verdicts.rules import BY_NAME, ClusterVerdict

T = TypeVar("T")
ANONYMOUS = "anonymous"  # in the place of a key's name
P95 = 0.95
MOST_NAMES = 3  # of an operation's boards
# Free space changes by a few blocks with each log line; a page shows gigabytes.
DISK_STEP_MB = 100


@dataclass(frozen=True, slots=True)
class ViewContext:
    """The contents of a document beside facts and verdict.

    ``tick`` counts the samples. ``operations`` are None for a reader who is not the operator.
    """

    router: str
    tick: int
    operations: Sequence[ControlOperation] | None = None


def document(facts: ClusterFacts, verdict: ClusterVerdict, about: ViewContext) -> ViewDocument:
    """Return the document of a cluster."""
    operator = about.operations is not None
    rows = [figures_of(board) for board in facts.boards]
    now = {name: [row[index] for row in rows] for index, name in enumerate(FIGURES)}
    desired = facts.desired
    return {
        "object": "cluster.view",
        "version": __version__,
        "operator": operator,
        "router": about.router,
        "routers": routers_entry(facts),
        "every_s": EVERY_S,
        "tick": about.tick,
        "at_s": round(facts.now_s, 1),
        "epoch": desired.epoch,
        "coordinator": "reachable" if facts.coordinator_reachable else "unreachable",
        "verdict": verdict_entry(verdict),
        "models": {model: _model(facts, model) for model in facts.models},
        "pauses": {pause.operation: _pause(pause) for pause in desired.pauses},
        "rollouts": dict(_rollouts(desired, facts.boards)),
        "order": [board.id for board in facts.boards],
        "now": now,
        "boards": {board.id: _board(board, facts, verdict) for board in facts.boards},
        "requests": {one.id: _request(one, operator=operator) for one in facts.requests},
        "operations": {one.id: _operation(one) for one in about.operations or ()},
    }


def verdict_answer(facts: ClusterFacts, verdict: ClusterVerdict) -> VerdictAnswer:
    """Return the answer of GET /v1/cluster/verdict."""
    return {
        "object": "cluster.verdict",
        **verdict_entry(verdict),
        "at_s": round(facts.now_s, 3),
        "epoch": facts.desired.epoch,
        "boards": len(facts.boards),
        "ready": sum(one.report.state is BoardState.READY for one in facts.boards),
        "routers": routers_entry(facts),
    }


def verdict_entry(verdict: ClusterVerdict) -> VerdictEntry:
    """Return a verdict with its reasons."""
    return {
        "verdict": verdict.outcome.value,
        "reasons": [_reason(one) for one in verdict.reasons],
        "more": verdict.more,
    }


def routers_entry(facts: ClusterFacts) -> RoutersEntry:
    """Return the Routers whose figures are in the facts."""
    return {"up": sorted(facts.routers_up), "silent": sorted(facts.routers_silent)}


def _reason(reason: Reason) -> ReasonEntry:
    rule = BY_NAME[reason.rule]
    entry: ReasonEntry = {
        "rule": reason.rule,
        "severity": rule.gravity.value,
        "sentence": reason.message,
        "boards": list(reason.boards),
        "evidence": list(reason.evidence),
        "command": reason.command,
        "run_on": reason.run_on,
        "runbook": rule.runbook,
    }
    more = {
        "model": reason.model,
        "figure": _tenth(reason.figure),
        "limit": _tenth(reason.limit),
        "unit": reason.unit,
    }
    return cast(ReasonEntry, {**entry, **_known(more)})


def _model(facts: ClusterFacts, model: str) -> ModelView:
    boards = [board for board in facts.boards if board.report.model == model]
    weights = facts.desired.weights_of(model)
    entry: ModelView = {
        "weights": weights.label,
        "boards": len(boards),
        "ready": sum(board.report.state is BoardState.READY for board in boards),
        "waiting": facts.waiting(model),
        "traffic": {name: _window(facts.window(model, name), facts) for name in WINDOWS},
    }
    if weights.step is not None:
        entry["step"] = weights.step
    return entry


def _window(counts: TrafficCounts, facts: ClusterFacts) -> WindowEntry:
    entry: WindowEntry = {
        "good": counts.good,
        "late": counts.late,
        "failed": counts.failed,
        "turned_away": counts.turned_away,
    }
    if (ttft := _p95(counts.ttft, facts.ttft_bounds_s)) is not None:
        entry["ttft_p95_s"] = ttft
    if (wait := _p95(counts.queue_wait, facts.wait_bounds_s)) is not None:
        entry["queue_wait_p95_s"] = wait
    return entry


def _p95(counts: Sequence[int], bounds: Sequence[float]) -> float | None:
    found = percentile(counts, bounds, P95) if sum(counts) >= FEWEST else None
    return None if found is None else round(found, 2)


def _pause(pause: ActivePause) -> PauseView:
    scope = pause.scope
    entry: PauseView = {
        "models": list(scope.models),
        "boards": list(scope.boards),
        "mode": pause.mode.value,
        "since_s": round(pause.since_s, 1),
    }
    more = {
        "adapter": scope.adapter,
        "level": None if pause.level is None else int(pause.level),
        "expires_s": _tenth(pause.expires_s),
    }
    return cast(PauseView, {**entry, **_known(more)})


def _rollouts(desired: Desired, boards: Iterable[BoardView]) -> Iterable[tuple[str, RolloutView]]:
    reports = [board.report for board in boards]
    for line in desired.lines:
        if line.candidate is not None:
            there = [one.board_id for one in reports if one.model == line.model]
            yield f"{line.model}:{line.name}", _rollout(line, there)


def _rollout(line: AdapterVersions, boards: Sequence[str]) -> RolloutView:
    assert line.candidate is not None  # the caller has checked it
    entry: RolloutView = {
        "model": line.model,
        "adapter": line.name,
        "candidate": line.candidate.ref.version,
        "switched": sum(board in line.switched for board in boards),
        "total": len(boards),
        "weight": line.weight,
    }
    if line.active is not None:
        entry["active"] = line.active.ref.version
    if line.previous is not None:
        entry["previous"] = line.previous.ref.version
    return entry


def _board(board: BoardView, facts: ClusterFacts, verdict: ClusterVerdict) -> BoardEntry:
    report, target = board.report, board.target
    entry: BoardEntry = {
        "state": report.state.value,
        "state_since_s": round(board.state_since_s, 1),
        "model": report.model,
        "weights": target.label,
        "kv_capacity": report.context_len * report.n_batch,
        "queue_limit": report.queue_limit,
        "engine_starts": report.engine_starts,
    }
    more: JsonObject = {
        "reason": without_folders(report.reason),
        "rules": list(verdict.by_board.get(board.id, ())),
        "adapters": list(report.adapters),
        "epoch": report.epoch,
        "behind": max(0, facts.desired.epoch - (report.epoch or 0)) or None,
        "hold": None if target.hold is None else target.hold.mode.value,
        "level": None if target.level is None else int(target.level),
        "drained": True if target.drained else None,
        "node": report.node,
        "runtime": report.release,
        "version": report.version,
        "expected_tokens_per_s": _tenth(board.expected_tokens_per_s),
        "basis": board.basis,
        "prompt_cache_mb": _step(report.cache_bytes, 1) or None,
        "crashes": dict(report.crashes),
        "last_recovery": without_folders(report.last_recovery),
        **(_hardware(report.hardware) if report.hardware is not None else {}),
    }
    if board.circuit != "closed":
        more["circuit"] = {"state": board.circuit, "reason": without_folders(board.circuit_reason)}
    if (fetch := report.fetch) is not None:
        more["fetch"] = {
            "fetched_bytes": fetch.fetched_bytes,
            "total_bytes": fetch.total_bytes,
            "bytes_per_s": round(fetch.bytes_per_s),
            "source": fetch.source,
        }
    return cast(BoardEntry, {**entry, **_known(more)})


def _hardware(found: Hardware) -> JsonObject:
    return {
        "soc": found.soc,
        "driver": found.driver_version,
        "npu_cores": len(found.npu_load) or None,
        "npu_max_mhz": _step(found.npu_max_hz, 1),
        "ddr_max_mhz": _step(highest_ddr_hz(found), 1),
        "memory_total_mb": _step(found.memory_total_bytes, 1),
        "disk_total_mb": _step(found.disk_total_bytes, DISK_STEP_MB),
        "disk_free_mb": _step(found.disk_free_bytes, DISK_STEP_MB),
    }


def _step(count: int | None, step: int) -> int | None:
    return None if count is None else count // (step * MEGA) * step


def _request(one: RequestView, *, operator: bool) -> RequestEntry:
    entry: RequestEntry = {
        "phase": one.phase.value,
        "since_s": round(one.since_s, 1),
    }
    if one.board:
        entry["board"] = one.board
    else:
        entry["model"] = one.model
    if one.failovers:
        entry["failovers"] = one.failovers
    if operator:
        entry["key"] = one.key or ANONYMOUS
    return entry


def _operation(one: ControlOperation) -> OperationView:
    entry: OperationView = {
        "kind": one.kind.value,
        "state": one.state.value,
        "phase": one.phase.value,
        "done": one.succeeded,
        "failed": sum(
            not did.good and did.status is not ResultStatus.WAITING for did in one.results.values()
        ),
        "total": len(one.results),
        "created_s": round(one.created_s, 1),
    }
    more = {
        "finished_s": _tenth(one.finished_s),
        "subject": operation_subject(one.params),
        "who": one.who,
        "error": None if one.error is None else one.error.message,
    }
    return cast(OperationView, {**entry, **_known(more)})


def operation_subject(params: Mapping[str, Any]) -> str | None:
    """Return the adapter or the boards or models of an operation, by its parameters."""
    if adapter := params.get("name") or params.get("adapter"):
        version = params.get("version")
        return f"{adapter}@{version}" if version else str(adapter)
    found = params.get("boards") or params.get("models")
    names = list(map(str, found or ()))
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*names[:MOST_NAMES], *more]) or None


def history_entry(histories: Mapping[str, BoardHistory], end_s: float) -> HistoryEntry:
    """Return the sparklines of all boards."""
    entry: HistoryEntry = {
        "every_s": EVERY_S * POINTS / SPARK_POINTS,
        "end_s": round(end_s, 1),
        "columns": {},
        "states": {},
    }
    for board, history in histories.items():
        columns, spans = history.sparks()
        entry["columns"][board] = columns
        entry["states"][board] = _spans(spans)
    return entry


def board_history(board: str, history: BoardHistory, end_s: float) -> BoardHistoryAnswer:
    """Return the answer of GET /v1/boards/{board_id}/history."""
    return {
        "object": "board.history",
        "board": board,
        "every_s": EVERY_S,
        "end_s": round(end_s, 1),
        "states": _spans(history.spans()),
        "columns": {name: history.column(index) for index, name in enumerate(FIGURES)},
    }


def usage_answer(report: UsageReport) -> KeyUsageAnswer:
    """Return the answer of GET /v1/usage."""
    named = ((one, ANONYMOUS if one.key == NO_KEY else one.key) for one in report.days)
    ordered = sorted(named, key=lambda each: (-each[0].day, each[1]))
    return {
        "object": "list",
        "data": [
            {
                "day": time.strftime("%Y-%m-%d", time.gmtime(one.day * DAY_S)),
                "key": name,
                "requests": one.requests,
                "prompt_tokens": one.prompt_tokens,
                "completion_tokens": one.completion_tokens,
                "board_s": round(one.board_s, 1),
            }
            for one, name in ordered
        ],
        "routers": {"up": sorted(report.up), "silent": sorted(report.silent)},
        "unstored": sorted(report.unstored),
    }


def _spans(spans: Iterable[tuple[BoardState, int]]) -> list[StateSpan]:
    return [{"state": state.value, "points": points} for state, points in spans]


def _tenth(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _known(values: Mapping[str, Any]) -> JsonObject:
    """Return the keys that have a value; in a patch, null would remove a key."""
    return {name: value for name, value in values.items() if value not in (None, "", [], {})}
