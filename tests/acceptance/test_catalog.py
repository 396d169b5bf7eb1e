"""Boards that fetch their model from the head, and from each other, over Ray."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rkserve.core.board_report import BoardReport, BoardState
from rkserve.native.sim.build import ensure_built
from tests.acceptance.test_nodes import home_of
from tests.support.cluster.local_cluster import START_S, App, LocalCluster, wait_for
from tests.support.cluster.varied import CATALOGUED, of
from tests.support.http.talk import CHAT, chat_body
from tests.support.paths import PROJECT

pytestmark = [pytest.mark.ray, pytest.mark.slow]
pytest_plugins = ["tests.support.cluster.varied_fixtures"]

NAME = "fetched-chat"
PIECE = 4096
PADDING = 400 * PIECE


@pytest.fixture
def app(ray_cluster: LocalCluster) -> Iterator[App]:
    """An application whose model is on the head only, before the first board has joined."""
    catalog = ray_cluster.folder / "catalog"
    folder = catalog / NAME
    shutil.copytree(
        PROJECT / "models" / "sim-chat", folder, ignore=shutil.ignore_patterns("adapters")
    )
    (folder / "padding.bin").write_bytes(os.urandom(PADDING))
    group = {
        "name": "fetching",
        "model": f"catalog:{NAME}",
        "library": str(ensure_built("1.3.0")),
        "max_boards": 8,
    }
    ray_cluster.deploy(
        "fetching",
        {
            "boards": [group],
            "state_dir": "~/state",
            "catalog": {
                "folder": str(catalog),
                "piece_bytes": PIECE,
                "max_bytes_per_s": PADDING / 20,
            },
        },
    )
    yield App(ray_cluster, "fetching", "fetching", boards=0)
    ray_cluster.delete("fetching")
    for node in list(ray_cluster.cluster.worker_nodes):
        ray_cluster.remove_node(node)


@pytest.mark.long
def test_a_board_fetches_its_model_resumes_after_its_end_and_shares_it(app: App) -> None:
    _join(app.cluster, "localhost")
    first = _fetching(app, PADDING // 4)
    home = home_of(first.pid)
    _expect_progress(app)

    psutil.Process(first.pid).kill()
    again = _fetching(app, 1, but=first.pid)
    assert again.fetch is not None
    assert again.fetch.fetched_bytes >= PADDING // 4  # it went on where the first one was
    _expect_an_answer(app)
    (ready,) = app.reports()
    assert (ready.model, ready.fetch, len(ready.copy)) == (NAME, None, 64)
    _expect_a_copy(app, home)
    _expect_a_copy_before_a_deployment(app, home, ready.board_id)

    _join(app.cluster, "127.0.0.2")
    second = wait_for("a second board that reports", lambda: _other(app, ready.board_id), START_S)
    other = home_of(second.pid)
    assert other != home
    sources = _sources_until_ready(app, second.board_id)
    assert ready.board_id in sources
    _expect_a_copy(app, other)


def test_a_board_on_the_head_serves_the_catalogue_in_its_place(varied: App) -> None:
    app = of(varied, varied.group)
    _expect_an_answer(app, CATALOGUED)
    (report,) = app.reports()
    assert (report.model, report.fetch, report.copy) == (CATALOGUED, None, "")
    assert not (app.cluster.folder / "state" / "models").exists()
    with app.http_sync() as http:
        (listed,) = http.get("/v1/catalog/models").json()["models"]
    assert (listed["name"], listed["copies"]) == (CATALOGUED, [])


def _join(cluster: LocalCluster, address: str) -> None:
    cluster.add_board_node(address=address, RKSIM_TIME_SCALE="0.3", RKSIM_LOAD_MS="100")


def _fetching(app: App, least_bytes: int, but: int = 0) -> BoardReport:
    """Wait until a board has fetched so much; ``but`` is the process of an earlier replica."""

    def look() -> BoardReport | None:
        for report in app.reports():
            if report.fetch is not None and report.pid != but:
                assert report.state is BoardState.FETCHING, report.reason
                if report.fetch.fetched_bytes >= least_bytes:
                    return report
        return None

    return wait_for(f"a board that has fetched {least_bytes} bytes", look, START_S)


def _expect_progress(app: App) -> None:
    """A request is refused with the progress, which the list of boards has, too."""
    with app.http_sync() as http:

        def refused() -> Any:
            response = http.post(CHAT, json=chat_body("Hello", model=NAME))
            assert response.status_code == 503
            is_fetching = response.json()["error"]["code"] == "model_fetching"
            return response if is_fetching else None

        response = wait_for("the Router to know of the fetch", refused)
        assert 1 <= int(response.headers["retry-after"]) <= 3600
        assert "MB (" in response.json()["error"]["message"]
        (board,) = http.get("/v1/boards").json()["data"]
    assert board["state"] == "fetching"
    assert 0 < board["fetch"]["fetched_bytes"] < board["fetch"]["total_bytes"]
    assert board["fetch"]["source"] == "head"


def _expect_an_answer(app: App, model: str = NAME) -> None:
    def answered() -> bool:
        with app.http_sync() as http:
            response = http.post(CHAT, json=chat_body("Repeat after me: here", model=model))
        if response.status_code in (404, 503):
            return False  # neither the Router nor the board is there yet
        return bool(response.json()["choices"][0]["message"]["content"] == "here")

    wait_for("an answer", answered, START_S)


def _expect_a_copy(app: App, home: str) -> None:
    copy = app.cluster.folder / home / "state" / "models" / NAME
    head = app.cluster.folder / "catalog" / NAME
    files = {one.relative_to(head) for one in head.rglob("*") if one.is_file()}
    assert files == {one.relative_to(copy) for one in copy.rglob("*") if one.is_file()}
    assert all((copy / one).read_bytes() == (head / one).read_bytes() for one in files)
    assert not (copy.parent / f".{NAME}.adding").exists()


def _expect_a_copy_before_a_deployment(app: App, home: str, board_id: str) -> None:
    """A board fetches a model of no group while it serves another one."""
    source = PROJECT / "models" / "sim-embed"
    shutil.copytree(source, app.cluster.folder / "catalog" / "later")
    with app.http_sync() as http:

        def copy() -> Any:
            (row,) = http.post("/v1/catalog/models/later/prefetch", json={}).json()["boards"]
            return row if row["state"] != "fetching" else None

        row = wait_for("a copy of the other model", copy, START_S)
    assert (row["board"], row["state"], row["reason"]) == (board_id, "present", "")
    files = {one.name: one.read_bytes() for one in source.iterdir()}
    assert row["fetched_bytes"] == row["total_bytes"] == sum(map(len, files.values()))
    fetched = app.cluster.folder / home / "state" / "models" / "later"
    assert {one.name: one.read_bytes() for one in fetched.iterdir()} == files


def _other(app: App, board_id: str) -> BoardReport | None:
    return next((one for one in app.reports() if one.board_id != board_id), None)


def _sources_until_ready(app: App, board_id: str) -> set[str]:
    """Return the machines that were seen to send pieces, up to the board's first readiness."""
    sources: set[str] = set()

    def ready() -> bool:
        report = app.report(board_id)
        if report is not None and report.fetch is not None:
            sources.add(report.fetch.source)
        return report is not None and report.state is BoardState.READY

    wait_for("the second board to be ready", ready, START_S)
    return sources
