"""The table of all rules, the gravest first, and the verdict on a cluster by them.

The page, ``rkserve status``, the runbook and the alerts of Prometheus are made from ``RULES``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from rkserve.verdicts import board_rules as board
from rkserve.verdicts import service_rules as service
from rkserve.verdicts.facts import ClusterFacts
from rkserve.verdicts.reasons import ClusterRule, Reason

MOST_REASONS = 5
MOST_EVIDENCE = 6
RULES: tuple[ClusterRule, ...] = (
    service.MODEL_WITHOUT_BOARDS,
    service.COORDINATOR_DOWN,
    service.BUDGET_FAST,
    board.BOARD_LOST,
    board.BOARD_QUARANTINED,
    service.PAUSE_OVERDUE,
    service.ROUTER_SILENT,
    board.BOARD_RECOVERING,
    board.BOARDS_BEHIND,
    board.MEMORY_LOW,
    board.DISK_LOW,
    board.HOT,
    board.DDR_BELOW_MAX,
    board.NPU_BELOW_MAX,
    board.BOARD_SLOWER,
    # Effects of the boards' state more often than causes.
    service.TURNED_AWAY_RULE,
    service.QUEUE_WAIT_P95,
    service.TTFT_P95,
    service.BUDGET_SLOW,
    service.CHANNEL_FALLBACK,
    service.PREFIX_NOT_FOUND,
)
BY_NAME: Mapping[str, ClusterRule] = {rule.name: rule for rule in RULES}


class VerdictOutcome(str, Enum):
    """The verdict in one word."""

    READY = "READY"
    DEGRADED = "DEGRADED"
    NOT_READY = "NOT READY"


@dataclass(frozen=True, slots=True)
class ClusterVerdict:
    """The verdict, its reasons in the order of their gravity, and the rules of each board.

    ``reasons`` are at most ``MOST_REASONS``, and ``more`` counts the others.
    """

    outcome: VerdictOutcome = VerdictOutcome.READY
    reasons: tuple[Reason, ...] = ()
    more: int = 0
    by_board: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def reasons_of(facts: ClusterFacts, rules: Iterable[ClusterRule] = RULES) -> list[Reason]:
    """Return all reasons, those of one rule for several boards as one, in the order of the rules.

    A reason with a cause among the others is evidence of that one.
    """
    found = {rule.name: list(rule.find(facts)) for rule in rules}
    for rule in rules:
        causes = [name for name in rule.explained_by if name in found]
        found[rule.name] = [one for one in found[rule.name] if not _explained(one, causes, found)]
    return [one for rule in rules for one in _together(found[rule.name])]


def _explained(reason: Reason, causes: Sequence[str], found: Mapping[str, list[Reason]]) -> bool:
    """Add a reason to its first cause, as evidence; False if it has none."""
    for name in causes:
        for at, cause in enumerate(found[name]):
            if (cause.boards, cause.model) == (reason.boards, reason.model):
                found[name][at] = cause.with_evidence(f"{reason.rule}: {reason.sentence}")
                return True
    return False


def _together(reasons: Sequence[Reason]) -> list[Reason]:
    """Return the reasons of one rule; those about boards become one, the worst board first."""
    about = [one for one in reasons if one.boards]
    if not about:
        return list(reasons)
    worst, *others = sorted(about, key=lambda one: (-one.distance, one.boards))
    boards = tuple(board for one in (worst, *others) for board in one.boards)
    evidence = [*worst.evidence, *(line for one in others for line in _lines(one))]
    return [replace(worst, boards=boards, evidence=tuple(evidence[:MOST_EVIDENCE]))]


def _lines(reason: Reason) -> list[str]:
    return [f"{reason.boards[0]}: {line}" for line in reason.evidence[:1]]


def judge(facts: ClusterFacts, rules: Sequence[ClusterRule] = RULES) -> ClusterVerdict:
    """Return the verdict on a cluster."""
    reasons = reasons_of(facts, rules)
    firing = {one.rule for one in reasons}
    outcome = VerdictOutcome.DEGRADED if reasons else VerdictOutcome.READY
    if any(rule.stops for rule in rules if rule.name in firing):
        outcome = VerdictOutcome.NOT_READY
    by_board: dict[str, list[str]] = defaultdict(list)
    for reason in reasons:
        for name in reason.boards:
            by_board[name].append(reason.rule)
    return ClusterVerdict(
        outcome,
        tuple(reasons[:MOST_REASONS]),
        max(0, len(reasons) - MOST_REASONS),
        {name: tuple(names) for name, names in by_board.items()},
    )
