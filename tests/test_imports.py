"""The direction of imports between rooms, and the rooms that own a third-party package."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

PACKAGE = PROJECT / "rkserve"
SOURCES = sorted(PACKAGE.rglob("*.py"))

BASE = frozenset({"core", "config", "models"})
ENGINE_PROTOCOL = frozenset({"native.runtime", "native.engine_frames"})
API = frozenset({"api.json", "api.prompting", "api.parsing", "api.common"})
BOARD_RULES = frozenset({"board.answer", "board.engine", "board.rules", "board.storage"})
# Rooms from the bottom up. The longest name that fits a module is its room; a name stands for all
# modules below it, so that `"board"` allows `board.rules.admission`.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "__init__": frozenset(),
    "core": frozenset(),
    "config": frozenset({"core"}),
    "models": frozenset({"core", "config"}),
    "sampling": BASE,
    "native": BASE,
    "native.binding": BASE | {"native"},
    "native.llama_context": BASE | {"native", "sampling"},
    "native.llama_cpp": BASE | {"native", "native.binding", "sampling"},
    "native.engine": BASE | {"native", "native.binding", "native.llama_cpp", "sampling"},
    "native.sim": BASE,
    "board.answer": BASE,
    "board.engine": BASE | ENGINE_PROTOCOL,
    "board.rules": BASE | ENGINE_PROTOCOL,
    "board.storage": BASE | {"board.answer"},
    "board.run": BASE | BOARD_RULES | ENGINE_PROTOCOL,
    "board.operations": BASE | BOARD_RULES | ENGINE_PROTOCOL | {"board.run"},
    "board": BASE | BOARD_RULES | {"board.run", "board.operations"},
    "api.json": BASE,
    "api.prompting": BASE | {"api.json", "api.parsing"},
    "api.parsing": BASE | {"api.json"},
    "api.common": BASE | {"api.json", "api.prompting", "api.parsing"},
    "api": BASE | API,
    "api.openai": BASE | API,
    "api.responses": BASE | API,
    "api.anthropic": BASE | API,
    "api.ollama": BASE | API | {"api.openai"},
    "api.admin": BASE | API | {"control.calls", "control.keys", "control.operations", "verdicts"},
    "fleet": BASE,
    "control": BASE,
    "router.policies": BASE | {"fleet"},
    "router.queue": BASE | {"fleet", "router.policies"},
    "router.dispatch": BASE
    | {"fleet", "router.policies", "router.queue", "router.upstreams.overflow"},
    "router.upstreams.overflow": BASE | {"fleet", "router.policies"},
    "router.upstreams": BASE | {"fleet", "api", "router.upstreams.overflow"},
    "router.auth": BASE | {"api.json", "router.queue"},
    "router.idempotency": BASE,
    "router.images": BASE | {"api.prompting"},
    "router.response_store": BASE | {"api"},
    "router.stored_responses": BASE | {"api", "router.auth", "router.response_store"},
    "router": BASE
    | {"fleet", "control", "api", "sampling.trial"}
    | {"router.auth", "router.dispatch", "router.idempotency", "router.images", "router.queue"}
    | {"router.stored_responses", "router.upstreams"},
    # Published speeds are the doctor's.
    "router.features": BASE | {"fleet", "control", "api", "router", "verdicts", "doctor.known"},
    "coordinator.state": BASE | {"control"},
    "coordinator.boards": BASE | {"control", "fleet", "coordinator.state"},
    "coordinator.artifacts": BASE | {"control"},
    "coordinator.operations": BASE
    | {"control", "fleet", "api.admin", "coordinator.state", "coordinator.boards"},
    "coordinator": BASE | {"control", "fleet", "coordinator"},
    "transport": BASE,
    "page": frozenset(),
    "http": BASE | {"api", "router", "page"},
    "deployments": BASE
    | {"api", "board", "control", "coordinator", "fleet", "http", "router", "transport"}
    | {"verdicts.facts"}
    | ENGINE_PROTOCOL
    | {"native.library_file", "native.quirks", "native.sim.build", "native.sim.profiles"}
    | {"native.sim.telemetry"},
    # A board without Ray: of `deployments`, only the module that knows no Ray either.
    "local": BASE | {"api", "board", "router.images", "deployments.board_factory"},
    "app": frozenset({"deployments.build"}),
    "probe": BASE | {"native", "api.common", "api.prompting", "board.engine.telemetry"},
    "client": frozenset({"core", "models.index", "models.shelf"}),
    # Pure rules about a running cluster, from which the alerts are made too.
    "verdicts": BASE,
    # Rules over frozen facts, which stay pure, and their collector; only a child loads a library.
    "doctor": BASE
    | {"verdicts", "native.library_file", "native.runtime", "native.binding"}
    | {"native.sim.profiles", "board.engine.telemetry"},
    # Models of this machine: what their files tell, without a cluster.
    "catalog": BASE
    | {"api.prompting", "api.parsing", "doctor.known", "doctor.file_rules", "verdicts.hardware"}
    | {"native.binding.releases", "native.sim.models", "native.sim.profiles"},
    "bench": BASE | {"api.common", "app", "deployments", "native.sim"},
    # Ray is a program there; its processes are read as the benchmarks read theirs.
    "bringup": BASE
    | {"bench.processes", "deployments.haproxy", "deployments.haproxy_listeners"}
    | {"deployments.haproxy_tls", "deployments.preflight"}
    # The first key is made before there is a Coordinator.
    | {"api.admin.heartbeat", "api.admin.join", "api.admin.keys", "api.json", "doctor"}
    | {"control.keys", "coordinator.state.api_keys"}
    | {"router.fleet_update", "router.members", "router.membership"},
    "cli": BASE
    | {"bench", "bringup", "catalog", "client", "deployments", "doctor", "native", "probe"}
    # The ledger is copied and restored while no cluster runs, and boards' copies are listed.
    | {"coordinator.state", "board.storage.ledger_copies", "verdicts"},
    "__main__": frozenset({"cli"}),
}
OWNERS: dict[str, frozenset[str]] = {
    "ray": frozenset({"deployments", "bench.cluster", "bringup.ray_start", "bringup.ray_worker"}),
    "fastapi": frozenset({"http"}),
    "starlette": frozenset({"http", "deployments"}),
    "uvicorn": frozenset(),
    "cffi": frozenset({"native.binding"}),
    "cryptography": frozenset({"models.signing", "transport.encryption"}),
    "_cffi_backend": frozenset({"native.binding", "native.decl"}),
    "numpy": frozenset({"native.engine", "native.llama_context", "native.llama_cpp", "sampling"}),
    "llguidance": frozenset({"sampling"}),
    "PIL": frozenset({"router.images"}),
    "httpcore": frozenset({"router.images"}),
    "jinja2": frozenset({"api.prompting"}),
    "tokenizers": frozenset({"api.prompting"}),
    "pydantic": frozenset(
        {
            "api",
            "bench",
            "catalog.catalog",
            "config",
            "control",
            "coordinator.artifacts",
            "deployments",
            "doctor",
            "cli.doctor",
            "local",
            "models",
        }
    ),
    "opentelemetry": frozenset({"deployments.tracing"}),
    "prometheus_client": frozenset(
        {"core", "http", "coordinator", "deployments", "router.vllm_metrics"}
        | {"router.upstreams.metrics"}
    ),
    "httpx": frozenset({"catalog.hub", "client", "coordinator.artifacts", "router.upstreams"}),
    "typer": frozenset({"cli"}),
    "zeroconf": frozenset({"bringup.discovery"}),
    "rich": frozenset({"cli"}),
    "yaml": frozenset({"catalog", "deployments", "models"}),
}
# Rooms that decide and never wait.
WITHOUT_ASYNCIO = (
    *("config", "models", "sampling", "native", "api", "control", "page", "verdicts"),
    *("board.answer", "board.rules", "board.storage", "router.policies", "router.auth"),
)


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Return the full name of every import, including those inside functions."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def module_of(path: Path) -> str:
    """Return a module's name below the package; a package is named like its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def is_below(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def room_of(module: str) -> str:
    """Return the innermost room of a module."""
    return max((room for room in MAY_IMPORT if is_below(module, room)), key=len, default="")


def allows(room: str, target: str) -> bool:
    """Return whether a room may import a module.

    A room that holds other rooms, such as ``board``, imports them only where they are named; a
    name that is allowed stands for everything below it.
    """
    home = room_of(target)
    if home == room:
        return True
    inner = home.startswith(f"{room}.")
    return any(is_below(target, name) for name in MAY_IMPORT[room] if inner or name != room)


def forbidden(path: Path) -> Iterator[str]:
    """Yield the rules that the imports of a module break."""
    module = module_of(path)
    room = room_of(module)
    if not room:
        yield f"{module} is in no room: add it to MAY_IMPORT"
        return
    for name in imported(path):
        top, _, below = name.partition(".")
        owners = OWNERS.get(top)
        if owners is not None and not any(is_below(module, one) for one in owners):
            yield f"{module} must not import {top}"
        if top == "asyncio" and any(is_below(module, one) for one in WITHOUT_ASYNCIO):
            yield f"{module} must not import asyncio"
        if top in ("benchmarks", "tests"):
            yield f"{module} is in the wheel, and {top} is not"
        if top == "rkserve" and below != "__version__" and not allows(room, below):
            yield f"{module}: {room} must not import rkserve.{below}"


def test_rooms_import_downwards_only() -> None:
    assert not [broken for path in SOURCES for broken in forbidden(path)]


# Every board and the Coordinator start in seconds of a small board's time: without the rooms of
# Routers, and what those import. Imports inside functions are those of what is used rarely.
LOADED_WITHOUT = {
    "deployments.board": ("rkserve.api", "rkserve.http", "rkserve.router", "httpx"),
    "deployments.coordinator": ("rkserve.api", "rkserve.http", "rkserve.router", "httpx", "PIL"),
}


def loaded_with(module: str) -> set[str]:
    """Return the full names of the modules that are imported with one, or with those."""
    paths = {f"rkserve.{module_of(path)}": path for path in SOURCES}
    found, new = set[str](), {f"rkserve.{module}"}
    while new:
        found |= new
        names = {name for one in new if one in paths for name in imported_at_once(paths[one])}
        # Else the name of something in a module.
        new = {name if name in paths else name.rpartition(".")[0] or name for name in names} - found
    return found


def imported_at_once(path: Path) -> list[str]:
    """Return the full name of every import that runs with its module's own."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    plain = [alias.name for one in body if isinstance(one, ast.Import) for alias in one.names]
    named = [one for one in body if isinstance(one, ast.ImportFrom)]
    return [*plain, *(f"{one.module}.{alias.name}" for one in named for alias in one.names)]


@pytest.mark.parametrize("module", LOADED_WITHOUT)
def test_a_board_and_the_coordinator_load_nothing_of_a_router(module: str) -> None:
    loaded = loaded_with(module)
    assert "rkserve.core.board_report" in loaded, "it looks at the right modules"
    unwanted = LOADED_WITHOUT[module]
    assert not [one for one in sorted(loaded) if any(is_below(one, room) for room in unwanted)]


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("nowhere/x.py", "", "nowhere.x is in no room: add it to MAY_IMPORT"),
        ("core/x.py", "def f():\n    import ray.serve", "core.x must not import ray"),
        ("control/x.py", "import asyncio", "control.x must not import asyncio"),
        ("core/x.py", "from tests.support import y", "core.x is in the wheel, and tests is not"),
        (
            "fleet/x.py",
            "from rkserve.board.board import Board",
            "fleet.x: fleet must not import rkserve.board.board.Board",
        ),
    ],
)
def test_a_broken_rule_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, said: str
) -> None:
    monkeypatch.setattr("tests.test_imports.PACKAGE", tmp_path)
    path = tmp_path / module
    path.parent.mkdir()
    path.write_text(source, encoding="utf-8")
    assert [*forbidden(path)] == [said]


@pytest.mark.parametrize(
    ("room", "name", "allowed"),
    [
        pytest.param("board.run", "native.runtime.Perf", True, id="the protocol"),
        pytest.param("board.run", "native.binding.runtime", False, id="the binding stays there"),
        pytest.param("board.run", "native.runtimes", False, id="a name that only begins like it"),
        pytest.param("board.rules", "board.run.job", False, id="rules know no runs"),
        pytest.param("board", "board.run.job", True, id="the board knows its rooms"),
        pytest.param("router.queue", "router.service", False, id="a queue knows no service"),
        pytest.param("api.common", "board.board", False, id="schemas know no boards"),
        pytest.param("native.engine", "core.run_params.Sampling", True, id="core is for all"),
        pytest.param("core", "native", False, id="core knows no other room"),
    ],
)
def test_the_rule_itself_tells_them_apart(room: str, name: str, allowed: bool) -> None:
    assert allows(room, name) is allowed


def test_no_two_rooms_import_each_other() -> None:
    """Rooms form an order: what one imports never imports it in turn, however long the way."""
    uses: dict[str, set[str]] = {}
    for path in SOURCES:
        room = room_of(module_of(path))
        for name in imported(path):
            if name.startswith("rkserve.") and (target := room_of(name[len("rkserve.") :])):
                uses.setdefault(room, set()).add(target)
    done: set[str] = set()

    def visit(room: str, above: tuple[str, ...]) -> None:
        assert room not in above, " -> ".join((*above, room))
        if room not in done:
            for below in sorted(uses.get(room, set()) - {room}):
                visit(below, (*above, room))
            done.add(room)

    for room in uses:
        visit(room, ())


def test_no_folder_has_more_than_twenty_files() -> None:
    for folder in {path.parent for path in SOURCES}:
        assert len([*folder.glob("*.py")]) <= 20, folder
