"""Imports point one way. The rooms, what each may see of the others, and who owns which package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "rkserve").rglob("*.py"))

GROUND = frozenset(
    {
        "errors",
        "chains",
        "origins",
        "messages",
        "modelfolder",
        "adapterfolder",
        "config",
        "desired",
        "groupconfig",
        "imageconfig",
        "visionsettings",
        "settingwords",
        "digests",
        "disk",
        "discretion",
        "metrics",
        "names",
        "parameters",
        "ports",
        "reports",
        "reranksettings",
        "responsesconfig",
        "runvalues",
        "vocabulary",
    }
)
MAY_IMPORT: dict[str, frozenset[str]] = {
    **dict.fromkeys(GROUND, GROUND),
    "native": GROUND | {"sampling"},
    "sampling": GROUND,
    "images": GROUND,
    "wire": GROUND,
    "reference": GROUND | {"wire", "control.operations"},
    "routing": GROUND,
    "control": GROUND,
    "board": GROUND | {"native.runtime", "native.states", "native.frames", "native.stepparams"},
    "deployments": GROUND
    | {
        "native.runtime",
        "native.sim.build",
        "native.sim.telemetry",
        "sampling.asking",
        "board",
        "wire",
        "routing",
        "control",
        "images",
        "page",
        "reference",
    },
    # A board without Ray: of ``deployments`` only what knows no Ray either.
    "local": GROUND | {"board", "wire", "reference", "deployments.assemble", "deployments.sight"},
    # The one place that knows every part, and the two programs beside it.
    "app": GROUND | {"native", "board", "wire", "routing", "control", "deployments", "preflight"},
    "preflight": GROUND | {"native.quirks", "native.sim.profiles", "deployments.front"},
    "cli": GROUND
    | {"native", "board", "wire", "routing", "control", "deployments", "app", "client", "bench"},
    "client": GROUND,
    "page": frozenset(),
    "bench": GROUND
    | {"native", "sampling", "board", "wire", "routing", "control", "deployments", "app"},
    "__init__": frozenset(),
    "__main__": frozenset({"cli"}),
}
OWNERS = {
    "asyncio": {"board", "deployments", "app", "cli", "bench", "client", "local"},
    "cffi": {"native"},
    "numpy": {"native", "sampling"},
    "llguidance": {"sampling"},
    "PIL": {"images"},
    "httpcore": {"deployments"},
    "ray": {"deployments", "app", "preflight", "cli", "bench"},
    "fastapi": {"deployments"},
    "starlette": {"deployments"},
    "uvicorn": {"deployments"},
    "jinja2": {"wire"},
    "tokenizers": {"wire"},
    "pydantic": {
        "config",
        "groupconfig",
        "imageconfig",
        "visionsettings",
        "reports",
        "reranksettings",
        "responsesconfig",
        "runvalues",
        "settingwords",
        "modelfolder",
        "adapterfolder",
        "wire",
        "deployments",
        "app",
        "preflight",
        "bench",
        "local",
    },
    "prometheus_client": {"metrics", "deployments"},
    "httpx": {"client", "cli", "deployments"},
    "typer": {"cli"},
    "rich": {"cli"},
    "yaml": {"modelfolder", "config", "app", "preflight", "cli", "bench"},
}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (top-level package, rest) of every import, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            yield top, rest


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "rkserve").parts[0].removesuffix(".py")


def under(name: str, rooms: frozenset[str]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_downwards_only(path: Path) -> None:
    room = room_of(path)
    assert room in MAY_IMPORT, f"{room} is a new room: say here what it may import"
    for top, below in imported(path):
        assert room in OWNERS.get(top, {room}), f"{room} must not import {top}"
        if top == "rkserve" and below != "__version__":
            allowed = MAY_IMPORT[room] | {room}
            assert under(below, allowed), f"{room} must not import rkserve.{below}"


@pytest.mark.parametrize(
    ("room", "name", "allowed"),
    [
        pytest.param("board", "native.runtime.Perf", True, id="the protocol"),
        pytest.param("board", "native.binding", False, id="the binding stays in native"),
        pytest.param("board", "native.runtimes", False, id="a name that only begins like it"),
        pytest.param("wire", "board.board", False, id="wire knows no boards"),
        pytest.param("native", "runvalues.Sampling", True, id="ground"),
        pytest.param("config", "native", False, id="ground knows no other room"),
    ],
)
def test_the_rule_itself_tells_them_apart(room: str, name: str, allowed: bool) -> None:
    assert under(name, MAY_IMPORT[room]) is allowed
