"""Verdicts and reports from observations, without the library."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.probe.verdicts import (
    PLANS,
    Baseline,
    ExperimentResult,
    Observation,
    ProbeReport,
    Verdict,
    baseline_of,
    combined,
    verdict_of,
)

PLAN = {plan.name: plan for plan in PLANS}
SOUND = {
    "end": "finished",
    "tokens": 43,
    "sent": 41,
    "kept": 42,
    "kv": 83,
    "kv_cleared": 0,
    "repeated": True,
    "prefill_tokens": 41,
    "limits": True,
    "limited": 5,
}
PAUSED = {"end": "paused", "whole": 43, "held": -1, "resumed": "finished", "same": 43}
STOPPED = {"end": "paused", "next_same": True}


def settled(name: str, figures: dict[str, Any]) -> bool | None:
    return verdict_of(PLAN[name], Observation(figures), Baseline()).value


@pytest.mark.parametrize(
    ("name", "figures", "value"),
    [
        pytest.param("pause_with_history", PAUSED, True, id="paused and resumed"),
        pytest.param("pause_with_history", PAUSED | {"end": "finished"}, False, id="ignored"),
        pytest.param("pause_with_history", PAUSED | {"same": 7}, False, id="another text"),
        pytest.param("pause_with_history", PAUSED | {"held": 0}, False, id="one position more"),
        pytest.param(
            "stop_by_pause",
            STOPPED
            | {"abort_ms": [90, 99, 95], "pause_ms": [9, 8, 9]}
            | {"abort_median_ms": 95, "pause_median_ms": 9},
            True,
            id="a pause is faster",
        ),
        pytest.param(
            "stop_by_pause",
            STOPPED
            | {"abort_ms": [90, 9, 95], "pause_ms": [40, 8, 50]}
            | {"abort_median_ms": 90, "pause_median_ms": 40},
            None,
            id="the times overlap",
        ),
        pytest.param(
            "prefix_reuse_in_ram", {"first": 300, "again": 180}, None, id="between all and few"
        ),
        pytest.param("waiting_token_id_valid", {"waiting": 0, "match": True}, None, id="none came"),
        pytest.param(
            "eos_uint32_misread",
            {"end": "finished", "tokens": 48, "cap": 48, "eos_at": 2},
            True,
            id="it goes on after its end token",
        ),
        pytest.param(
            "eos_uint32_misread",
            {"end": "finished", "tokens": 48, "cap": 48, "eos_at": -1},
            None,
            id="no end token within the limit",
        ),
        pytest.param(
            "return_2_frees_buffer", {"bytes": 100, "kept": 3, "freed": 2}, None, id="none is kept"
        ),
        pytest.param(
            "resume_with_other_token",
            {"end": "paused", "resumed": "finished", "same": 3, "whole": 40},
            False,
            id="the token of the pause was kept",
        ),
        pytest.param("logits_after_drain", {"end": "finished"}, None, id="not paused"),
        pytest.param(
            "load_after_kill",
            {"running": True, "end": "failed", "tokens": 0},
            False,
            id="the NPU was not freed",
        ),
        pytest.param("load_after_kill", {"running": False}, None, id="nothing was killed"),
        pytest.param("fewer_cpus_than_cores", {"loaded": True, "cores": 1}, None, id="one core"),
        pytest.param("fewer_cpus_than_cores", {"loaded": True, "cores": 3}, True, id="one of 3"),
        pytest.param("init_may_crash", {"loaded": True}, None, id="half a file was loaded"),
        pytest.param("pause_with_history", {"end": "paused"}, None, id="figures are missing"),
    ],
)
def test_a_verdict_follows_from_the_figures(
    name: str, figures: dict[str, Any], value: bool | None
) -> None:
    assert settled(name, figures) is value


@pytest.mark.parametrize(
    ("name", "seen", "value"),
    [
        pytest.param("run_async", Observation(crash="SIGSEGV", stage="trial"), False, id="crash"),
        pytest.param("run_async", Observation(crash="SIGSEGV"), None, id="crash before"),
        pytest.param("run_async", Observation(hang_s=9, stage="trial"), False, id="hang"),
        pytest.param(
            "run_async",
            Observation(refused="-1", error="CallFailed", stage="trial"),
            False,
            id="refused",
        ),
        pytest.param(
            "run_async",
            Observation(refused="no", error="IndexError", stage="trial"),
            None,
            id="the experiment's own fault",
        ),
        pytest.param(
            "eos_uint32_misread", Observation(crash="SIGBUS", stage="trial"), None, id="a fact"
        ),
        pytest.param(
            "init_may_crash", Observation(crash="SIGSEGV", stage="trial"), True, id="init"
        ),
        pytest.param("init_may_crash", Observation(hang_s=9, stage="trial"), None, id="init hangs"),
        pytest.param(
            "init_may_crash",
            Observation(refused="-1", error="LoadFailed", stage="trial"),
            False,
            id="init refuses",
        ),
    ],
)
def test_an_ending_is_a_verdict_only_in_the_trial(
    name: str, seen: Observation, value: bool | None
) -> None:
    verdict = verdict_of(PLAN[name], seen, Baseline())
    assert verdict.value is value
    assert verdict.evidence == seen.ending
    assert bool(verdict.why) is (value is None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, Baseline(), id="sound"),
        pytest.param({"kv": 82}, Baseline(), id="the last token is not in the cache"),
        pytest.param({"kv": 90}, Baseline(kv=False), id="sizes are off"),
        pytest.param({"kv_cleared": 7}, Baseline(kv=False), id="a cleared cache is not empty"),
        pytest.param({"prefill_tokens": 1}, Baseline(prefill=False), id="prefill is off"),
        pytest.param({"repeated": False}, Baseline(repeats=False), id="answers differ"),
        pytest.param({"end": "failed"}, None, id="failed"),
        pytest.param({"tokens": 0}, None, id="nothing came"),
    ],
)
def test_the_baseline_names_the_measures_to_trust(
    changes: dict[str, Any], expected: Baseline | None
) -> None:
    assert baseline_of(Observation(SOUND | changes)) == expected


@pytest.mark.parametrize("need", ["repeats", "kv"])
def test_without_a_sound_measure_nothing_that_needs_it_is_settled(need: str) -> None:
    unsound = Baseline(**{need: False})
    verdict = verdict_of(PLAN["pause_with_history"], Observation(PAUSED), unsound)
    assert verdict.value is None
    assert need in verdict.why


YES, NO, OPEN = Verdict(True, "worked"), Verdict(False, "crashed"), Verdict(None, "?", "why")


@pytest.mark.parametrize(
    ("name", "verdicts", "expected"),
    [
        pytest.param("run_async", [YES], YES, id="once"),
        pytest.param(
            "run_async", [YES, YES], Verdict(True, "2 of 2 times: worked"), id="each time"
        ),
        pytest.param(
            "run_async", [YES, NO, YES], Verdict(False, "1 of 3 times: crashed"), id="failed once"
        ),
        pytest.param(
            "init_may_crash", [NO, YES], Verdict(True, "1 of 2 times: worked"), id="may crash"
        ),
        pytest.param(
            "run_async",
            [YES, OPEN],
            Verdict(None, "?; another time: worked", "2 repetitions differ"),
            id="open once",
        ),
        pytest.param(
            "prefix_reuse_in_ram",
            [YES, NO],
            Verdict(None, "crashed; another time: worked", "2 repetitions differ"),
            id="a fact that changes",
        ),
    ],
)
def test_repetitions_are_judged_cautiously(
    name: str, verdicts: list[Verdict], expected: Verdict
) -> None:
    assert combined(PLAN[name], verdicts) == expected


def test_a_report_leaves_out_what_is_inconclusive_and_marks_what_differs() -> None:
    report = ProbeReport(
        simulated=True,
        board={"soc": "RK3588"},
        library={"release": "1.3.0", "library_sha256": "ab"},
        model={"model_digest": "cd"},
        results=(
            ExperimentResult(PLAN["run_async"], Verdict(False, "crashed: SIGSEGV"), 1.0),
            ExperimentResult(PLAN["abort_in_callback"], Verdict(None, "a | b", "no"), 2.0),
            ExperimentResult(PLAN["baseline"], Verdict(True, "kv 83"), 0.5),
        ),
        known={"run_async": True, "abort_in_callback": False},
    )
    assert report.quirks == {"run_async": False}
    page = report.as_markdown()
    assert "| run_async | **false** | true | 1.0 | crashed: SIGSEGV |" in page
    assert "| abort_in_callback | inconclusive | false | 2.0 | no; a \\| b |" in page
    assert "2 of 3 experiments settled" in page
    assert report.as_json()["experiments"][1]["inconclusive"] == "no"
