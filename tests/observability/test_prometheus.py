"""A Prometheus of its own scrapes a cluster at work: what panels and alerts ask for is there.

``make check-observability`` runs it, with Debian's prometheus.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from observability.dashboards import DASHBOARDS
from observability.generate import FOLDER
from observability.panels import RATE
from observability.promql import MetricUse, metrics_of
from rkserve.core.child_process import free_port
from rkserve.native.sim.build import ensure_built
from rkserve.verdicts.rules import RULES
from tests.support.cluster.local_cluster import START_S, App, LocalCluster, wait_for
from tests.support.http.talk import CHAT, MODEL, chat_body

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.promtool,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]
EVERY_S = 5
PATIENCE_S = 300.0
LOST = "farm"
Found = list[dict[str, Any]]


@dataclass
class Prometheus:
    """A server that scrapes one target."""

    url: str

    def ask(self, path: str, **query: str) -> Any:
        """Return the data of an answer of its API."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=query, timeout=60.0).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expr: str) -> Found:
        """Return the series of an expression now."""
        found: Found = self.ask("query", query=expr)["result"]
        return found

    def alerts(self, name: str) -> dict[str, Any]:
        """Return an alert rule with its state."""
        (group,) = self.ask("rules")["groups"]
        (rule,) = (one for one in group["rules"] if one["name"] == name)
        found: dict[str, Any] = rule
        return found


@contextmanager
def running(folder: Path, app: App) -> Iterator[Prometheus]:
    """Run a Prometheus with the project's rules, and its first job pointed at the application."""
    config = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text("utf-8"))
    config["global"] = dict.fromkeys(
        ("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{EVERY_S}s"
    )
    (job,) = (one for one in config["scrape_configs"] if one["job_name"] == "rkserve")
    job["static_configs"] = [{"targets": [f"127.0.0.1:{app.cluster.port}"]}]
    job["metrics_path"] = f"/{app.name}/metrics"
    config["scrape_configs"] = [job]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    shutil.copy(FOLDER / "prometheus" / "alerts.yaml", folder)
    port = free_port()
    words = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    words += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    try:
        one = Prometheus(f"http://127.0.0.1:{port}")

        def scraped() -> bool:
            with suppress(httpx.TransportError):
                # 503 while it loads its storage, which a busy machine draws out.
                if httpx.get(f"{one.url}/-/ready", timeout=60.0).status_code == httpx.codes.OK:
                    return bool(one.query("rkserve_router_up"))
            assert process.poll() is None, (folder / "prometheus.log").read_text("utf-8")
            return False

        wait_for("the first scrape", scraped, PATIENCE_S)
        yield one
    finally:
        process.terminate()
        process.wait(60.0)


class Load:
    """Clients of an application, and an operator, until ``close``."""

    def __init__(self, app: App, models: Sequence[str]) -> None:
        self._app, self._over = app, threading.Event()
        self._failed: list[BaseException] = []
        works = [lambda model=model: self._chat(model) for model in models] + [self._operate]
        self._threads = [threading.Thread(target=self._until_over, args=(one,)) for one in works]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the load. Raises what one of them has raised."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        for failure in self._failed:
            raise failure

    def _until_over(self, work: Any) -> None:
        try:
            while not self._over.is_set():
                work()
        except BaseException as exc:  # noqa: BLE001 - raised again by close
            self._failed.append(exc)

    def _chat(self, model: str) -> None:
        text = "Repeat after me: " + "these are many words " * 20
        with self._app.http_sync() as http:
            answer = http.post(CHAT, json=chat_body(text, model=model, max_tokens=20))
        assert answer.status_code in {200, 429, 503}, answer.text

    def _operate(self) -> None:
        with self._app.http_sync() as http:
            for call in ("/pause", "/resume"):
                answer = http.post(call, json={"models": [MODEL]})
                assert answer.status_code == 200, answer.text
        self._over.wait(2.0)


@pytest.fixture(scope="module")
def watched(ray_cluster: LocalCluster, tmp_path_factory: Any) -> Iterator[tuple[App, Prometheus]]:
    """Two Routers, three simulated boards, and a board on a node of its own."""
    group = {
        "name": LOST,
        "model": str(ray_cluster.model_copy(LOST)),
        "library": str(ensure_built("1.3.0")),
        "max_boards": 1,
    }
    groups = [ray_cluster.simulated("watched", 3), group]
    router = {"replicas": 2}
    args = {"boards": groups, "router": router, "state_dir": "~/state"}
    ray_cluster.deploy("watched", args)
    app = App(ray_cluster, "watched", "watched", boards=3)
    ray_cluster.add_board_node(RKSIM_TIME_SCALE="0.05", RKSIM_LOAD_MS="100")
    with app.http_sync() as http:
        wait_for("all models to be ready", lambda: http.get("/ready").status_code == 200, START_S)
    try:
        with running(tmp_path_factory.mktemp("prometheus"), app) as prometheus:
            yield app, prometheus
    finally:
        for node in list(ray_cluster.cluster.worker_nodes):
            ray_cluster.remove_node(node)
        ray_cluster.delete("watched")


def test_every_query_of_every_panel_has_an_answer_from_a_cluster_at_work(
    watched: tuple[App, Prometheus],
) -> None:
    app, prometheus = watched
    queries = {
        (dashboard.uid, panel.title, query.expr)
        for dashboard in DASHBOARDS.values()
        for panel in dashboard.panels
        for query in panel.queries
    }
    load = Load(app, [MODEL, MODEL, LOST])

    until_s = time.monotonic() + PATIENCE_S
    try:
        while queries and time.monotonic() < until_s:
            time.sleep(1.0)
            for query in sorted(queries):
                found = prometheus.query(query[2].replace(RATE, f"{4 * EVERY_S}s"))
                if any(not math.isnan(float(one["value"][1])) for one in found):
                    queries.remove(query)
    finally:
        load.close()
    assert queries == set(), "without an answer"


def test_operations_since_the_first_one_are_an_increase(watched: tuple[App, Prometheus]) -> None:
    app, prometheus = watched
    expr = 'sum(increase(rkserve_operations_total{kind="cache_reset"}[1h]))'
    assert [float(one["value"][1]) for one in prometheus.query(expr)] == [0.0]
    with app.http_sync() as http:
        assert http.post("/reset_prefix_cache", json={}).status_code == 200
    wait_for("the increase", lambda: float(prometheus.query(expr)[0]["value"][1]), PATIENCE_S)


def test_every_series_that_an_alert_reads_is_there_and_no_rule_fails(
    watched: tuple[App, Prometheus],
) -> None:
    app, prometheus = watched
    one = {"boards": [app.reports()[0].board_id]}
    with app.http_sync() as http:  # one of these series is there only while a board is drained
        assert http.post("/v1/boards/drain", json=one).status_code == 200
        wait_for("its drain", lambda: prometheus.query("rkserve_board_drained"), PATIENCE_S)
        try:
            missing = _without_series(prometheus)
        finally:
            assert http.post("/v1/boards/undrain", json=one).status_code == 200
    assert missing == []


def _without_series(prometheus: Prometheus) -> list[tuple[str, MetricUse]]:
    missing = []
    for rule in RULES:
        for use in metrics_of(rule.alert.expr):
            labels = ",".join(f'{label}!=""' for label in use.labels)
            if not prometheus.query(f"{use.name}{{{labels}}}"):
                missing.append((rule.name, use))
        assert prometheus.alerts(rule.name)["health"] == "ok"
    return missing


def test_a_board_whose_node_is_cut_off_is_an_alert_that_fires(
    watched: tuple[App, Prometheus], figures: Callable[[str], None]
) -> None:
    app, prometheus = watched
    assert prometheus.alerts("BoardLost")["state"] == "inactive"
    (node,) = app.cluster.cluster.worker_nodes
    began_s = time.monotonic()
    app.cluster.remove_node(node)

    def fires() -> Found | None:
        rule = prometheus.alerts("BoardLost")
        return rule["alerts"] if rule["state"] == "firing" else None

    (alert,) = wait_for("the alert", fires, PATIENCE_S)
    figures(f"BoardLost fired {time.monotonic() - began_s:.0f} s after a board's node was cut off")
    assert alert["labels"]["board"].startswith(f"{LOST}@"), json.dumps(alert)
    assert alert["labels"]["severity"] == "critical"
