"""Rules of security for the source, which no linter has: beside those of bandit in ruff."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import PROJECT

PACKAGE = PROJECT / "rkserve"
LOGGED = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
LOGGERS = frozenset({"log", "logger", "logging"})
# Names of values of clients and of secrets; a board's library prints `text`, which is logged.
CONFIDENTIAL = frozenset({"prompt", "prompts", "messages", "body", "secret", "authorization"})
SECRET = re.compile(r"(^|_)(secret|proof|token|digest|mac)$")
# Rooms that decide who may do what, and those that make secrets.
DECIDING = (
    *("core/api_keys.py", "control/keys.py", "coordinator/state/api_keys.py", "http/auth.py"),
    *("router/auth/", "router/membership.py", "transport/", "deployments/router.py"),
)
MAKING = ("core/api_keys.py", "router/membership.py", "bringup/first_key.py", "transport/")


def last_name(node: ast.AST) -> str:
    """Return the last name of an expression, such as ``digest`` of ``key.digest``."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return str(getattr(node, "attr", getattr(node, "id", "")))


def logs_confidential(node: ast.AST) -> bool:
    """A call of a logger with a value that a client sent, or with a secret."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    if node.func.attr not in LOGGED or last_name(node.func.value) not in LOGGERS:
        return False
    return any(last_name(one) in CONFIDENTIAL for arg in node.args for one in ast.walk(arg))


def compares_secret(node: ast.AST) -> bool:
    """A comparison of a secret that takes longer the more of it is right."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    if any(isinstance(one, ast.Constant) for one in sides):
        return False
    equal = any(isinstance(one, ast.Eq | ast.NotEq) for one in node.ops)
    return equal and any(SECRET.search(last_name(one)) for one in sides)


def imports_random(node: ast.AST) -> bool:
    """An import of numbers that can be guessed."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "random"
    return isinstance(node, ast.Import) and any(one.name == "random" for one in node.names)


def offenders(rule: Callable[[ast.AST], bool], rooms: tuple[str, ...]) -> Iterator[str]:
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if name.startswith(rooms):
            yield from offending(rule, file.read_text(encoding="utf-8"), file)


def offending(rule: Callable[[ast.AST], bool], text: str, file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if rule(node):
            yield f"{file}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:100]}"


@pytest.mark.parametrize(
    ("rule", "rooms", "example"),
    [
        pytest.param(logs_confidential, ("",), "log.info('%s', call.prompt)", id="logs"),
        pytest.param(compares_secret, DECIDING, "found = key.digest == sent", id="comparisons"),
        pytest.param(imports_random, MAKING, "from random import choice", id="random numbers"),
    ],
)
def test_a_rule_finds_its_example_and_nothing_in_the_package(
    rule: Callable[[ast.AST], bool], rooms: tuple[str, ...], example: str
) -> None:
    assert list(offending(rule, example, Path("example.py")))
    for name in rooms:
        assert (PACKAGE / name).exists(), f"the rooms of the rule have moved: {name}"
    assert not list(offenders(rule, rooms))
