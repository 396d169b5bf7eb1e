"""The generated files are those of the code, and beside them what Prometheus and Grafana need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from observability.alerts import alert_rules
from observability.generate import FOLDER, files
from observability.metric_table import all_metrics
from observability.promql import labels_of, metrics_of
from rkserve.config.router import ObjectivesConfig
from rkserve.verdicts.reasons import ClusterRule
from rkserve.verdicts.rules import RULES
from tests.support.paths import PROJECT

LABELS = {name: set(row.labels) for row in all_metrics() for name in row.samples}


@pytest.mark.parametrize("name", files())
def test_each_generated_file_is_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == files()[name], "run make docs"


@pytest.mark.slow
def test_a_file_that_is_behind_is_named_and_written_anew(tmp_path: Path) -> None:
    def generate(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "observability.generate", "--into", str(tmp_path)]
        return subprocess.run(
            [*command, *options], capture_output=True, text=True, check=False, cwd=PROJECT
        )

    missing = generate("--check")
    assert missing.returncode == 1
    assert "grafana/fleet.json" in missing.stderr
    assert generate("--ttft", "2.5").returncode == 0
    assert "> 2.5 and" in (tmp_path / "prometheus/alerts.yaml").read_text(encoding="utf-8")
    behind = generate("--check")
    assert (behind.returncode, "alerts.yaml" in behind.stderr) == (1, True)


def test_every_rule_of_the_table_is_an_alert_with_its_runbook() -> None:
    (group,) = yaml.safe_load(alert_rules())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [rule.name for rule in RULES]
    for rule in group["rules"]:
        assert "$" not in rule["expr"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["runbook"].endswith(f"#{rule['alert'].lower()}")


def test_the_objectives_of_a_cluster_are_the_limits_of_its_alerts() -> None:
    (group,) = yaml.safe_load(alert_rules(ObjectivesConfig(ttft_s=2.5, queue_wait_s=7)))["groups"]
    by_name = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert "> 2.5 and" in by_name["TtftP95"]
    assert "> 7 and" in by_name["QueueWaitP95"]


def test_prometheus_scrapes_rkserve_ray_and_haproxy() -> None:
    config = yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    assert [job["job_name"] for job in config["scrape_configs"]] == ["rkserve", "ray", "haproxy"]
    assert config["rule_files"] == ["alerts.yaml"]


def test_grafana_is_given_the_folder_and_the_source_of_the_dashboards() -> None:
    provisioning = FOLDER / "grafana/provisioning"
    providers = yaml.safe_load((provisioning / "dashboards/rkserve.yml").read_text("utf-8"))
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    mounts = {volume.split(":")[-2] for volume in compose["services"]["grafana"]["volumes"][1:3]}
    assert {one["options"]["path"] for one in providers["providers"]} == mounts
    for name in ("fleet", "requests", "boards", "control"):
        made = json.loads((FOLDER / f"grafana/{name}.json").read_text(encoding="utf-8"))
        assert made["uid"] == f"rkserve-{name}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_metric_and_label_of_a_rule_exists(rule: ClusterRule) -> None:
    expr = rule.alert.with_objectives(ObjectivesConfig())
    uses = [*metrics_of(expr)]
    assert uses
    known = {"le"}
    for use in uses:
        assert use.name in LABELS, use.name
        assert set(use.labels) <= LABELS[use.name], use
        known |= LABELS[use.name]
    assert labels_of(expr) <= known
