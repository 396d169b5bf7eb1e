"""Each alert with Prometheus' own promtool: silent on a healthy cluster, firing for its cause.

Series have a sample a minute. ``make check-observability`` runs these, with Debian's prometheus.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from observability.generate import FOLDER
from rkserve.verdicts.rules import RULES

PROMTOOL = shutil.which("promtool")
RULE_FILE = FOLDER / "prometheus" / "alerts.yaml"
pytestmark = [pytest.mark.slow, pytest.mark.promtool]
BOARDS = ("a", "b", "c", "d")
LONG = 400  # minutes
AT = "390m"
Samples = dict[str, str]


def still(value: float) -> str:
    return f"{value}x{LONG}"


def growing(step: float) -> str:
    return f"0+{step}x{LONG}"


def buckets(name: str, quick: float, slow: float) -> Samples:
    """A histogram of which some are within a second and others within a minute, each minute."""
    labels = 'model="m",router="0"'
    return {
        f'{name}_bucket{{{labels},le="1.0"}}': growing(quick),
        f'{name}_bucket{{{labels},le="60.0"}}': growing(quick + slow),
        f'{name}_bucket{{{labels},le="+Inf"}}': growing(quick + slow),
        f"{name}_count{{{labels}}}": growing(quick + slow),
    }


def healthy() -> Samples:
    """A cluster of four boards at work."""
    found: Samples = {}
    for name in BOARDS:
        both = f'board="{name}",model="m"'
        found |= {
            f'rkserve_board_state{{{both},state="ready"}}': still(1),
            f"rkserve_board_running{{{both}}}": still(1),
            f"rkserve_decode_tokens_total{{{both}}}": growing(900),
            f"rkserve_decode_seconds_total{{{both}}}": growing(60),
            f'rkserve_board_info{{{both},soc="RK3588"}}': still(1),
            f'rkserve_ddr_frequency_hertz{{board="{name}"}}': still(2.112e9),
            f'rkserve_ddr_max_frequency_hertz{{board="{name}"}}': still(2.112e9),
            f'rkserve_npu_frequency_hertz{{board="{name}"}}': still(1e9),
            f'rkserve_npu_max_frequency_hertz{{board="{name}"}}': still(1e9),
            f'rkserve_npu_load_ratio{{board="{name}",core="0"}}': still(0.5),
            f'rkserve_temperature_celsius{{board="{name}"}}': still(60),
            f'rkserve_memory_available_bytes{{board="{name}"}}': still(8e9),
            f'rkserve_memory_total_bytes{{board="{name}"}}': still(1.6e10),
            f'rkserve_disk_free_bytes{{board="{name}"}}': still(2e10),
        }
    router = 'model="m",router="0"'
    return {
        **found,
        'rkserve_router_up{router="0"}': still(1),
        "rkserve_boards_behind": still(0),
        'rkserve_coordinator_reachable{router="0"}': still(1),
        'rkserve_pause_overdue_seconds{router="0"}': still(0),
        'rkserve_channel_enabled{router="0"}': still(1),
        f'rkserve_judged_requests_total{{{router},outcome="good"}}': growing(100),
        f'rkserve_judged_requests_total{{{router},outcome="late"}}': still(0),
        f'rkserve_judged_requests_total{{{router},outcome="failed"}}': still(0),
        f'rkserve_turned_away_total{{{router},reason="queue_full"}}': still(0),
        'rkserve_token_streams_total{path="channel",router="0"}': growing(100),
        'rkserve_token_streams_total{path="ray",router="0"}': still(0),
        f'rkserve_prefix_tokens_total{{{router},what="expected"}}': growing(10_000),
        f'rkserve_prefix_tokens_total{{{router},what="found"}}': growing(9_000),
        **buckets("rkserve_ttft_seconds", 100, 0),
        **buckets("rkserve_queue_wait_seconds", 100, 0),
    }


def state(name: str) -> Samples:
    """Board a is in another state than ready."""
    of = 'board="a",model="m"'
    return {
        f'rkserve_board_state{{{of},state="ready"}}': still(0),
        f'rkserve_board_state{{{of},state="{name}"}}': still(1),
    }


ROUTER = 'model="m",router="0"'
PLANTED: dict[str, Samples] = {
    "ModelWithoutBoards": {
        f'rkserve_board_state{{board="{name}",model="m",state="ready"}}': still(0)
        for name in BOARDS
    },
    "CoordinatorDown": {'rkserve_coordinator_reachable{router="0"}': still(0)},
    "ErrorBudgetFast": {f'rkserve_judged_requests_total{{{ROUTER},outcome="failed"}}': growing(40)},
    "BoardLost": state("lost"),
    "BoardQuarantined": state("quarantined"),
    "PauseHeldPastLease": {'rkserve_pause_overdue_seconds{router="0"}': still(60)},
    "RouterSilent": {'rkserve_router_up{router="1"}': still(0)},
    "BoardRecovering": state("recovering"),
    "BoardsBehindEpoch": {"rkserve_boards_behind": still(2)},
    "MemoryLow": {'rkserve_memory_available_bytes{board="a"}': still(1e8)},
    "DiskLow": {'rkserve_disk_free_bytes{board="a"}': still(1e8)},
    "Hot": {'rkserve_temperature_celsius{board="a"}': still(90)},
    "DdrBelowMax": {'rkserve_ddr_frequency_hertz{board="a"}': still(5.28e8)},
    "NpuClockBelowMaxUnderLoad": {'rkserve_npu_frequency_hertz{board="a"}': still(6e8)},
    "BoardSlowerThanItsKind": {
        'rkserve_decode_tokens_total{board="a",model="m"}': growing(300),
    },
    "TurnedAway": {f'rkserve_turned_away_total{{{ROUTER},reason="queue_full"}}': growing(10)},
    "QueueWaitP95": buckets("rkserve_queue_wait_seconds", 50, 50),
    "TtftP95": buckets("rkserve_ttft_seconds", 50, 50),
    "ErrorBudgetSlow": {f'rkserve_judged_requests_total{{{ROUTER},outcome="late"}}': growing(3)},
    "ChannelFallback": {'rkserve_token_streams_total{path="ray",router="0"}': growing(50)},
    "PrefixExpectedNotFound": {
        f'rkserve_prefix_tokens_total{{{ROUTER},what="found"}}': growing(1_000)
    },
}


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)


def tried(tmp_path: Path, series: Samples, firing: dict[str, int]) -> str:
    """Return what promtool reports about the alerts that fire; nothing if they are as expected."""
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0',
                "eval_time": AT,
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"}}', "value": value}
                    for name, value in firing.items()
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    content = {"rule_files": [str(RULE_FILE)], "evaluation_interval": "1m", "tests": [test]}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    done = promtool("test", "rules", str(file))
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_rules_and_the_configuration_are_valid() -> None:
    assert promtool("check", "rules", str(RULE_FILE)).returncode == 0
    done = promtool("check", "config", str(FOLDER / "prometheus" / "prometheus.yml"))
    assert done.returncode == 0, done.stderr


def test_no_alert_fires_on_a_healthy_cluster(tmp_path: Path) -> None:
    assert tried(tmp_path, healthy(), {}) == ""


def test_every_rule_has_a_planted_cause() -> None:
    assert set(PLANTED) == {rule.name for rule in RULES}


# Causes that are errors for clients at the same time fire their alerts, too.
ALSO = {"ErrorBudgetFast": ("ErrorBudgetSlow",)}


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_each_alert_fires_for_its_cause_alone(name: str, tmp_path: Path) -> None:
    firing = dict.fromkeys((name, *ALSO.get(name, ())), 1)
    assert tried(tmp_path, {**healthy(), **PLANTED[name]}, firing) == ""
