"""What every test run shares: the header, and the markers that need something special."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import random
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx._transports.default
import httpx2._transports.default
import pytest
from hypothesis import HealthCheck, settings

from rkserve.core import child_process
from rkserve.core.errors import RkserveError
from rkserve.core.request_record import log_for
from rkserve.native.binding.library import detect
from rkserve.native.sim.build import RELEASES, ensure_built
from tests.support import engine_forks
from tests.support.boards import fakes, own_time
from tests.support.cluster.local_cluster import App, LocalCluster, running_cluster
from tests.support.forks import Forks
from tests.support.sampler import Sampler

# Each option with the environment variable that stands in for it.
BOARD_OPTIONS = {
    "--board-library": "RKSERVE_BOARD_LIBRARY",
    "--board-model": "RKSERVE_BOARD_MODEL",
}
# An example is not wrong because the machine stood still while it was tried. Each run draws others,
# so that many runs try many; --hypothesis-profile thorough tries them at once.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("patient", PATIENT, max_examples=60)
settings.register_profile("thorough", PATIENT, max_examples=1000)
settings.register_profile("quick", PATIENT, max_examples=15)  # of make test-quick
settings.load_profile("patient")

# Each client would read 140 certificates, which takes longer than most of its requests.
for transports in (httpx._transports.default, httpx2._transports.default):
    vars(transports)["create_ssl_context"] = functools.cache(transports.create_ssl_context)

NO_BOARD = f"needs a real board; run with --board and {' and '.join(BOARD_OPTIONS)}"
# Markers of tests that are skipped without their option, each with the reason.
OPTIONAL = {
    "long": "takes long, and checks code that changes rarely; run by make test-long",
    "page": "drives Chromium; run by make page-test",
    "promtool": "needs Prometheus' promtool; run by make check-observability",
}
NOTES: pytest.StashKey[list[str]] = pytest.StashKey()
FIGURES: pytest.StashKey[list[str]] = pytest.StashKey()
CLUSTER: pytest.StashKey[LocalCluster] = pytest.StashKey()


# The engines of boards in this process; a replica on Ray executes its own.
child_process._vfork = engine_forks.start


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("real boards")
    group.addoption("--board", action="store_true", help="also run what needs a real board")
    what = {"--board-library": "librkllmrt.so", "--board-model": "the model folder"}
    for option, variable in BOARD_OPTIONS.items():
        text = f"path of {what[option]} for --board (or ${variable})"
        group.addoption(option, metavar="PATH", default=os.environ.get(variable), help=text)
    group = parser.getgroup("processes")
    text = "run the tests in so many forks of this process, a file's in one"
    group.addoption("--forks", type=int, default=0, metavar="N", help=text)
    group = parser.getgroup("left out by default")
    for name, reason in OPTIONAL.items():
        group.addoption(f"--{name}", action="store_true", help=f"also run each test that {reason}")
    group = parser.getgroup("interruptions")
    for option, default, text in (
        ("--cycles", 12, "random pauses for each n_batch"),
        ("--machine-seed", random.SystemRandom().randrange(2**32), "what the random ones begin at"),
        ("--soak-seconds", 4, "how long 16 clients disturb one board"),
        ("--schemas-every", 12, "which of a thousand schemas are tried: 1 is all of them"),
        ("--odd-every", 64, "which of 42,000 odd requests are made: 1 is all of them"),
        ("--every", 3, "which cases of exhaustive tests are tried: 1 is all of them"),
        ("--latency-pauses", 4, "pauses of each kind whose latency is measured"),
    ):
        group.addoption(option, type=int, default=default, help=f"{text} (%(default)s)")


# Support modules that load the simulated library, most of them in an engine process.
ENGINE_SUPPORT = (
    "tests.support.sim.",
    "tests.support.boards.engine_bench",
    "tests.support.boards.holding",
    "tests.support.boards.interrupt_bench",
    "tests.support.boards.rebased",
    "tests.support.boards.sleeping",
    "tests.support.http.tool_talk",
)


@functools.cache
def uses_engine(module: ModuleType) -> bool:
    """Return whether a test module imports something that needs the simulated library."""
    names = (getattr(value, "__module__", None) or "" for value in vars(module).values())
    plugins = getattr(module, "pytest_plugins", ())
    return any(name.startswith(ENGINE_SUPPORT) for name in (*names, *plugins))


# Applications that several files share. Each process has a Ray cluster of its own: files that share
# an application run in one, so that the other need not deploy it, too. Those that take longest are
# first.
SHARED_APPS = ("controlled", "three_boards", "varied", "two_routers")


def groups_of(items: list[pytest.Item]) -> dict[Path, str]:
    """Return for each file the group whose tests run in one process."""
    groups: dict[Path, str] = {}
    for item in items:
        names = getattr(item, "fixturenames", ())
        shared = [name for name in SHARED_APPS if name in names]
        groups[item.path] = shared[0] if shared else groups.get(item.path, str(item.path))
    return groups


def take_turns(items: list[pytest.Item]) -> None:
    """Mark as long what is left out where the cases of a file take turns over parameters.

    A file with one case has all values of the parameters.
    """
    files: dict[Path, dict[tuple[Any, ...], list[pytest.Function]]] = {}
    for item in items:
        turns = item.get_closest_marker("turns")
        if turns is not None and isinstance(item, pytest.Function):
            params = item.callspec.params.items()  # not all values can be hashed
            case = tuple((name, id(value)) for name, value in params if name not in turns.args)
            cases = files.setdefault(item.path, {})
            cases.setdefault((item.originalname, *case), []).append(item)
    for cases in files.values():
        for number, values in enumerate(cases.values() if len(cases) > 1 else ()):
            del values[(number + number // 2) % len(values)]
            for item in values:
                item.add_marker(pytest.mark.long)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    take_turns(items)
    # Large groups first, then slow files: at the end one process would wait for the other's.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    groups = groups_of(items)
    turns = {name: number for number, name in enumerate(SHARED_APPS)}
    last = len(SHARED_APPS)
    items.sort(key=lambda item: (turns.get(groups[item.path], last), item.path not in slow))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item.path]))
        if isinstance(item, pytest.Function) and uses_engine(item.module):
            item.add_marker(pytest.mark.engine)
    for name, reason in OPTIONAL.items():
        if not config.getoption(f"--{name}"):
            for item in items:
                if item.get_closest_marker(name):
                    item.add_marker(pytest.mark.skip(reason=reason))
    on_boards = [item for item in items if item.get_closest_marker("board")]
    if config.getoption("--board"):
        missing = [f"{o} (or ${v})" for o, v in BOARD_OPTIONS.items() if not config.getoption(o)]
        if on_boards and missing:
            raise pytest.UsageError(f"--board needs {' and '.join(missing)}")
        return
    for item in on_boards:
        item.add_marker(pytest.mark.skip(reason=NO_BOARD))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which looks through all tests again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the collector away from thousands of collected tests: loops collect after each test."""
    # pytest-xdist passes groups on in the names of tests; pytest 9.2 ignored that without a word.
    if session.config.getoption("loadgroup", False):
        assert all(item.nodeid.endswith(f"@{_group_of(item)}") for item in session.items)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks of this process, if asked to; each group is a job of one of them."""
    count = session.config.getoption("--forks")
    if count < 1 or session.config.option.collectonly or session.testsfailed or not session.items:
        return None
    jobs: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        jobs.setdefault(_group_of(item), []).append(item)
    Forks(session, list(jobs.values())).run(count)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an ``async def`` test in a loop of its own, with ``virtual_time`` in a time of its own.

    An error that nothing awaited fails the test, too.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run = own_time.run_loop if pyfuncitem.get_closest_marker("virtual_time") else fakes.run_loop
    names = pyfuncitem._fixtureinfo.argnames
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have the test's engines executed where it is about that, otherwise forked."""
    marker = item.get_closest_marker("executes_engine")
    engine_forks.executes_engine = marker is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Keep the collector away from what earlier test files left behind, such as modules.

    An idle application takes a tenth of a core: shared ones end with their group's last test.
    """
    yield
    log_for("")  # the context of this process outlives a test that has logged for a request
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    if nextitem is not None and _group_of(nextitem) != _group_of(item) in SHARED_APPS:
        item.config.stash[CLUSTER].delete_shared()


def _group_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])


@pytest.fixture(scope="session")
def board_notes(pytestconfig: pytest.Config) -> list[str]:
    """What tests saw on a real board; printed at the end, whatever became of the tests."""
    return pytestconfig.stash.setdefault(NOTES, [])


@pytest.fixture(scope="session")
def sampled(pytestconfig: pytest.Config) -> Sampler:
    """Take some of a test's cases, others in each run; with ``--long`` all of them."""
    every = 1 if pytestconfig.getoption("--long") else pytestconfig.getoption("--every")
    return Sampler(every, pytestconfig.getoption("--machine-seed"))


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Keep a sentence about what was measured; printed at the end."""
    return pytestconfig.stash.setdefault(FIGURES, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for key, title in ((NOTES, "what the board showed"), (FIGURES, "what was measured")):
        lines = config.stash.get(key, [])
        if lines:
            terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the libraries under test, as detected and not as configured, and the random seed."""
    lines = [f"interruptions: --machine-seed={config.getoption('--machine-seed')}"]
    for release in RELEASES:
        try:
            path = ensure_built(release)
            found = detect(path)
        except RkserveError as exc:
            lines.append(f"simulated runtime {release}: {exc}")
        else:
            lines.append(f"simulated runtime {found.version}, {found.declarations}.h, {path}")
    return lines


@pytest.fixture(scope="session")
def ray_cluster(pytestconfig: pytest.Config) -> Iterator[LocalCluster]:
    """One Ray cluster for every test that needs one."""
    with running_cluster() as cluster:
        pytestconfig.stash[CLUSTER] = cluster
        yield cluster


@pytest.fixture(scope="session")
def three_boards(ray_cluster: LocalCluster) -> App:
    """Three simulated boards of release 1.3.0; ``boards`` lends them to a test."""
    patience = {"token_s": 3.0, "abort_s": 1.0}
    ray_cluster.shared.append("sim")
    return App.deploy(ray_cluster, "sim", 3, queue_limit=64, crash_limit=50, patience=patience)


@pytest.fixture(scope="session")
def single_old_board(ray_cluster: LocalCluster, three_boards: App) -> App:
    """One board of release 1.2.3 with a short queue; it loads while the three do."""
    ray_cluster.shared.append("old")
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
