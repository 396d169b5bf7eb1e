"""The probe finds the truth: every quirk is switched either way in the simulated library."""

from __future__ import annotations

from pathlib import Path

import pytest

from rkserve.models.folder import open_model_folder
from rkserve.native.quirks import NAMES
from rkserve.native.sim.build import ensure_built
from rkserve.probe.experiments import EXPERIMENTS
from rkserve.probe.probe import ProbeOptions, ProbeRun
from rkserve.probe.verdicts import PLANS, Baseline, Verdict, verdict_of
from tests.support.sim.sim_driver import FAST, MODEL

pytestmark = pytest.mark.slow

PLAN = {plan.name: plan for plan in PLANS}
# The switches under which each quirk is true, and under which it is false.
SWITCHES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "pause_with_history": ({"PAUSE_WITH_HISTORY": "1"}, {}),
    "pause_with_batch": ({"PAUSE_WITH_BATCH": "1"}, {}),
    "clear_range_with_history": (
        {"PAUSE_WITH_HISTORY": "1", "RANGE_WITH_HISTORY": "1"},
        {"PAUSE_WITH_HISTORY": "1"},
    ),
    "drain_by_limit": ({}, {"RESUME_UNLIMITED": "1"}),
    "stop_by_pause": (
        {"TIME_SCALE": "0.5", "FAULT": "ignore_abort_ms:900"},
        {"TIME_SCALE": "0.5", "RESUME_UNLIMITED": "1"},
    ),
    "resume_with_prompt": ({}, {"RESUME_TEMPLATE": "1"}),
    "abort_in_callback": ({}, {"ABORT_DEADLOCKS": "1"}),
    "prompt_cache_after_abort": ({"CACHE_AFTER_ABORT": "ok"}, {"CACHE_AFTER_ABORT": "crash"}),
    "prompt_cache_load_with_history": ({"CACHE_WITH_HISTORY": "1"}, {}),
    "prompt_cache_save_with_history": ({}, {"NO_SAVE_WITH_HISTORY": "1"}),
    "prompt_cache_portable": ({}, {"CACHE_BOUND": "1"}),
    "run_async": ({}, {"ASYNC_BROKEN": "1"}),
    "prefix_reuse_in_ram": ({}, {"PREFIX_REUSE": "0"}),
    "append_tokens_with_history": ({}, {"CLOSE_TURNS": "1"}),
    "kv_valid_after_abort": ({}, {"ABORT_LOSES": "1"}),
    "waiting_token_id_valid": ({}, {"WAITING_NO_ID": "1"}),
    "finish_in_hidden_modes": ({"HIDDEN_FINISH": "1"}, {}),
    "logits_with_history": ({}, {"LOGITS_GENERATE": "1", "LAST_TOKEN_IN_KV": "1"}),
    "eos_uint32_misread": ({"EOS_MISREAD": "1"}, {}),
    "thinking_ends_run": ({"THINK_FINISH": "1"}, {}),
    "is_running_while_paused": ({"PAUSED_IS_RUNNING": "1"}, {}),
    "return_2_frees_buffer": ({}, {"KEEP_ROWS": "1"}),
    "fewer_cpus_than_cores": ({"FEWER_CPUS": "1"}, {}),
    "init_may_crash": ({"INIT_CRASHES": "1"}, {}),
}


# Facts that nothing in rkserve depends on.
FACTS = {"finish_in_hidden_modes", "is_running_while_paused", "init_may_crash"}


def judged(
    folder: Path, name: str, switches: dict[str, str], release: str = "1.3.0", limit_s: float = 60.0
) -> Verdict:
    """Make one experiment on a simulated library with these switches."""
    given = {"TIME_SCALE": "0.01", **switches}
    if fault := given.pop("FAULT", None):
        control = folder / "board.control"
        control.write_text(f"fault={fault}\nsticky=1\n")
        given["CONTROL"] = str(control)
    options = ProbeOptions(
        library=ensure_built(release),
        folder=open_model_folder(MODEL),
        simulated=True,
        limit_s=limit_s,
        environ=FAST | {f"RKSIM_{key}": value for key, value in given.items()},
        cache_file=folder / "cache.bin",
    )
    if name == "prompt_cache_portable":
        written = verdict_of(PLAN[name], ProbeRun(options).observe(name), Baseline())
        assert written.value is None
    return verdict_of(PLAN[name], ProbeRun(options).observe(name), Baseline())


def test_every_quirk_has_an_experiment_and_switches() -> None:
    assert {plan.name for plan in PLANS if plan.quirk} == NAMES
    assert set(SWITCHES) == NAMES | FACTS
    assert set(PLAN) == {name for name in EXPERIMENTS if not name.startswith("_")}


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", SWITCHES)
def test_the_probe_finds_the_truth(name: str, value: bool, tmp_path: Path) -> None:
    hangs = name == "abort_in_callback" and not value
    verdict = judged(tmp_path, name, SWITCHES[name][not value], limit_s=8 if hangs else 60)
    assert verdict.value is value, verdict


@pytest.mark.parametrize(
    ("name", "switches", "value", "words"),
    [
        pytest.param("logits_with_history", {"STRICT": "1"}, False, "SIGABRT", id="it asserts"),
        pytest.param("pause_with_history", {"STRICT": "1"}, False, "SIGABRT", id="a misuse"),
        pytest.param("drain_by_limit", {}, False, "no limit per run", id="no limit per run"),
        pytest.param("clear_range_with_history", {}, None, "", id="it cannot be paused"),
        pytest.param("append_tokens_with_history", {}, True, "same", id="appended"),
        pytest.param("return_2_frees_buffer", {}, False, "bytes", id="2 is not known"),
    ],
)
def test_the_older_interface_is_probed_as_well(
    name: str, switches: dict[str, str], value: bool | None, words: str, tmp_path: Path
) -> None:
    verdict = judged(tmp_path, name, switches, release="1.2.3")
    assert verdict.value is value, verdict
    assert words in verdict.evidence


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("segv_at_token:2", "crashed: SIGSEGV", id="a crash"),
        pytest.param("hang_in_prefill", "hung", id="a hang"),
        pytest.param("error_at_token:2", "refused", id="an error"),
    ],
)
def test_what_fails_before_the_trial_settles_nothing(
    fault: str, words: str, tmp_path: Path
) -> None:
    verdict = judged(tmp_path, "run_async", {"FAULT": fault}, limit_s=4)
    assert verdict.value is None
    assert words in verdict.evidence


def test_a_hang_in_the_trial_is_an_answer(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "load_after_kill", {"FAULT": "hang_at_token:2"}, limit_s=4)
    assert verdict.value is False
    assert "hung" in verdict.evidence
