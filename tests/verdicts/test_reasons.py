"""Reasons in words, and alerts with the objectives of a configuration."""

from __future__ import annotations

from rkserve.config.router import ObjectivesConfig
from rkserve.verdicts.hardware import Shortfall
from rkserve.verdicts.reasons import ClusterRule, Gravity, PrometheusAlert, Reason

LOW = Shortfall("It is low.", "file: 1", "raise it", 1.0, 4.0, "MHz")


def test_a_message_begins_with_its_subject() -> None:
    reason = Reason.of("Low", "rock-01", LOW)
    assert reason.message == "rock-01: It is low."
    assert (reason.run_on, reason.evidence, reason.distance) == ("board", ("file: 1",), 0.75)
    assert Reason("R", "All is lost.", "x").message == "All is lost."
    assert Reason("R", "It is slow.", "x", model="m").message == "m: It is slow."
    two = Reason("R", "It is slow.", "x", boards=("a", "b"))
    assert two.message == "2 boards, the first is a: It is slow."
    assert two.with_evidence("seen").evidence == ("seen",)


def test_an_alert_takes_the_objectives_of_the_configuration() -> None:
    alert = PrometheusAlert("a > $ttft_s or b > $queue_wait_s", 60, "{{ $value }}")
    assert alert.with_objectives(ObjectivesConfig(ttft_s=2.5, queue_wait_s=4)) == "a > 2.5 or b > 4"


def test_a_rule_names_its_place_in_the_runbook() -> None:
    rule = ClusterRule(
        "DdrBelowMax", Gravity.WARNING, lambda _: iter(()), PrometheusAlert("", 0, "")
    )
    assert rule.runbook == "docs/how-to/runbook.md#ddrbelowmax"
