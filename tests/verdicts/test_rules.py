"""The table of rules: each fires for its planted cause and for no other, the gravest is first."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rkserve.core.board_report import BoardState
from rkserve.verdicts.facts import ClusterFacts
from rkserve.verdicts.reasons import ClusterRule
from rkserve.verdicts.rules import BY_NAME, MOST_REASONS, RULES, VerdictOutcome, judge
from tests.support.paths import PROJECT
from tests.support.values.cluster_facts import HEALTHY, PLANTED, board, healthy

EACH = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def test_a_healthy_cluster_is_ready_without_a_reason() -> None:
    verdict = judge(healthy(count=50))
    assert (verdict.outcome, verdict.reasons, verdict.more) == (VerdictOutcome.READY, (), 0)


@EACH
def test_each_rule_fires_for_its_planted_cause_alone(rule: ClusterRule) -> None:
    facts, command = PLANTED[rule.name][0](), PLANTED[rule.name][1]
    verdict = judge(facts)
    first = verdict.reasons[0]
    assert [one.rule for one in verdict.reasons] == [rule.name]
    assert command in first.command
    assert first.sentence.endswith(".")
    assert verdict.outcome is (VerdictOutcome.NOT_READY if rule.stops else VerdictOutcome.DEGRADED)
    assert all(verdict.by_board[name] == (rule.name,) for name in first.boards)


@EACH
def test_each_rule_is_silent_on_a_healthy_cluster(rule: ClusterRule) -> None:
    assert [*rule.find(healthy(count=50))] == []


def test_no_case_is_planted_for_a_rule_that_is_not_in_the_table() -> None:
    assert set(PLANTED) == set(BY_NAME)
    assert len(BY_NAME) == len(RULES)


def test_causes_that_explain_others_are_rules_before_them() -> None:
    order = [rule.name for rule in RULES]
    for rule in RULES:
        assert all(order.index(name) < order.index(rule.name) for name in rule.explained_by)


def test_one_slow_memory_clock_among_fifty_boards_is_the_first_reason_with_its_command() -> None:
    slow = board(
        17,
        replace(HEALTHY, ddr_hz=528_000_000, ddr_governor="dmc_ondemand"),
        speed_tokens_per_s=6.2,
    )
    verdict = judge(healthy(slow, count=50))
    assert [one.rule for one in verdict.reasons] == ["DdrBelowMax"]
    first = verdict.reasons[0]
    assert first.boards == ("rock-17",)
    assert (first.figure, first.unit) == (528.0, "MHz")
    assert first.command == "echo performance | sudo tee /sys/class/devfreq/dmc/governor"
    # Its effect is no reason of its own, and evidence.
    assert any("BoardSlowerThanItsKind" in line for line in first.evidence)


def everything() -> ClusterFacts:
    """A cluster in which many things are wrong at once."""
    return replace(
        healthy(
            board(1, state=BoardState.LOST),
            board(2, state=BoardState.QUARANTINED),
            board(3, replace(HEALTHY, ddr_hz=528_000_000)),
            board(4, replace(HEALTHY, temperature_c=90.0)),
            board(5, replace(HEALTHY, disk_free_bytes=1)),
            board(6, epoch=1),
        ),
        coordinator_reachable=False,
    )


def test_at_most_five_reasons_are_given_the_gravest_first_and_the_others_counted() -> None:
    verdict = judge(everything())
    names = [one.rule for one in verdict.reasons]
    assert names == [
        "CoordinatorDown",
        "BoardLost",
        "BoardQuarantined",
        "BoardsBehindEpoch",
        "DiskLow",
    ]
    assert (len(names), verdict.more) == (MOST_REASONS, 2)
    # The board's page has those beyond the five.
    assert verdict.by_board["rock-03"] == ("DdrBelowMax",)


def test_several_boards_with_one_cause_are_one_reason_with_the_worst_first() -> None:
    boards = [
        board(n, replace(HEALTHY, ddr_hz=hz * 1_000_000))
        for n, hz in ((1, 1560), (2, 528), (3, 1068))
    ]
    verdict = judge(healthy(*boards, count=9))
    (only,) = verdict.reasons
    assert only.boards == ("rock-02", "rock-03", "rock-01")
    assert only.figure == 528.0
    assert only.message.startswith("3 boards, the first is rock-02: The DDR clock is 528")
    assert any(line.startswith("rock-03: ") for line in only.evidence)


@EACH
def test_each_alert_is_a_condition_with_a_summary(rule: ClusterRule) -> None:
    from rkserve.config.router import ObjectivesConfig

    expr = rule.alert.with_objectives(ObjectivesConfig(ttft_s=8, queue_wait_s=4))
    assert "$" not in expr
    assert expr.count("(") == expr.count(")")
    assert "rkserve_" in expr
    assert rule.alert.summary.endswith(".")
    assert rule.alert.for_s >= 0


RUNBOOK = (PROJECT / "docs/how-to/runbook.md").read_text(encoding="utf-8")


def test_the_runbook_has_the_rules_in_the_order_of_the_table() -> None:
    titles = re.findall(r"^## (.*)$", RUNBOOK, re.M)
    assert titles == [rule.name for rule in RULES]


@EACH
def test_the_runbook_has_symptom_evidence_command_and_what_else_helps(rule: ClusterRule) -> None:
    section = RUNBOOK.partition(f"\n## {rule.name}\n")[2].partition("\n## ")[0]
    parts = re.findall(r"^\*\*(.*?)\.\*\*", section, re.M)
    assert parts == ["Symptom", "Evidence", "Command", "If it does not help"]
    assert PLANTED[rule.name][1] in section.replace("\n", " ")
    assert f"#{rule.name.lower()}" == rule.runbook.removeprefix("docs/how-to/runbook.md")
