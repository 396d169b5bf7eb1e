"""What every test run shares: the header, and the markers that need something special."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_cluster import App, LocalCluster, running_cluster

from rkserve.errors import RkserveError
from rkserve.native.detect import detect
from rkserve.native.sim.build import RELEASES, ensure_built


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--board", action="store_true", help="also run what needs a real board")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--board"):
        return
    for item in items:
        if item.get_closest_marker("board"):
            item.add_marker(pytest.mark.skip(reason="needs a real board; run with --board"))


def pytest_report_header() -> list[str]:
    """Name the libraries under test, as detected and not as configured."""
    lines = []
    for release in RELEASES:
        try:
            path = ensure_built(release)
            found = detect(path)
        except RkserveError as exc:
            lines.append(f"simulated runtime {release}: {exc}")
        else:
            lines.append(f"simulated runtime {found.release}, ABI {found.abi.value}, {path}")
    return lines


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalCluster]:
    """One Ray cluster for every test that needs one."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def three_boards(ray_cluster: LocalCluster) -> App:
    """Three simulated boards of release 1.3.0; ``boards`` lends them to a test."""
    patience = {"token_s": 3.0, "abort_s": 1.0}
    return App.deploy(ray_cluster, "sim", 3, queue_limit=64, crash_limit=50, patience=patience)


@pytest.fixture(scope="session")
def single_old_board(ray_cluster: LocalCluster, three_boards: App) -> App:
    """One board of release 1.2.3 with a short queue; it loads while the three do."""
    return App.deploy(ray_cluster, "old", 1, queue_limit=1, simulated={"release": "1.2.3"})


@pytest.fixture(scope="module")
def boards(three_boards: App, single_old_board: App) -> App:
    """The three boards, all ready and idle."""
    three_boards.settled()
    return three_boards


@pytest.fixture(scope="module")
def old_board(single_old_board: App) -> App:
    """The board of release 1.2.3, ready and idle."""
    single_old_board.settled()
    return single_old_board
