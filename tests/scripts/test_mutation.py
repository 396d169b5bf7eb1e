"""The mutants of scripts/mutation.py: what is changed, what stays, and how a sample is tried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from scripts import mutation
from scripts.mutation import Mutator, Verdict
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow


def changes(source: str) -> set[tuple[str, str]]:
    """Return every mutant's kind and the changed source."""
    text = dedent(source)
    found = Mutator("x.py", text).found
    return {(one.kind, one.apply(text.encode()).decode()) for one in found}


@pytest.mark.parametrize(
    ("source", "kind", "changed"),
    [
        ("x = a < b\n", "comparison", "x = (a <= b)\n"),
        ("x = a is not b\n", "comparison", "x = (a is b)\n"),
        ("x = a and b\n", "boolean", "x = (a or b)\n"),
        ("x = not a\n", "boolean", "x = (a)\n"),
        ("x = a + b\n", "arithmetic", "x = (a - b)\n"),
        ("x += 2\n", "arithmetic", "x -= 2\n"),
        ("x += 2\n", "statement", "pass\n"),
        ("x = 3\n", "constant", "x = (4)\n"),
        ("x = True\n", "constant", "x = (False)\n"),
        ("def f():\n    return a\n", "return", "def f():\n    return None\n"),
        ("self.a = b\n", "statement", "pass\n"),
        ("a()\n", "statement", "pass\n"),
        ("raise ValueError(a)\n", "statement", "pass\n"),
        ("x = 'ä', a < b\n", "comparison", "x = 'ä', (a <= b)\n"),
        ("x = (a +\n     b)\n", "arithmetic", "x = ((a - b))\n"),
    ],
)
def test_a_change_is_made_at_its_place(source: str, kind: str, changed: str) -> None:
    assert (kind, changed) in changes(source)


def test_an_if_is_turned_round() -> None:
    assert ("boolean", "if (not (a)):\n    b()\n") in changes("if a:\n    b()\n")


@pytest.mark.parametrize(
    "source",
    [
        '"""A module."""\n',
        "def f(a: Literal[1] = b) -> Literal[2]: ...\n",
        "@dataclass(frozen=True)\nclass A: ...\n",
        "log.warning('%s is late', a)\n",
        "self._log.info('late')\n",
        "x = f'{a + b}'\n",
        "x = 'a' + b\n",
        "x = a\n",
        "def f():\n    return None\n",
    ],
)
def test_texts_annotations_decorators_and_logging_stay(source: str) -> None:
    assert not changes(source)


def test_every_mutant_of_the_areas_is_still_python() -> None:
    for area in mutation.AREAS:
        found = mutation.mutants(PROJECT, area)
        assert len(found) > 100
        for one in found[::25]:
            source = one.apply((PROJECT / one.file).read_bytes())
            compile(source, one.file, "exec")


def test_one_seed_draws_the_same_sample() -> None:
    drawn = [mutation.sample(PROJECT, "board/rules", 10, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert len(set(drawn[0])) == 10


def test_the_tests_of_the_mutated_module_come_first() -> None:
    files = mutation.files_of(PROJECT, "board/rules", "obligations")
    assert files[0] == "tests/board/rules/test_obligations.py"
    assert len(files) == len(mutation.files_of(PROJECT, "board/rules"))


def made_tree(root: Path) -> Path:
    """Write a tree with one module, of which its test asserts a part."""
    module, test = root / "rkserve" / "toy" / "sums.py", root / "tests" / "toy" / "test_sums.py"
    for path in (module, test):
        path.parent.mkdir(parents=True)
        for folder in (path.parent, path.parent.parent):
            (folder / "__init__.py").touch()
    module.write_text("def add(a, b):\n    return a + b\n\n\ndef loop(a):\n    return a > 7\n")
    test.write_text(
        "from rkserve.toy.sums import add, loop\n\n\n"
        "def test_add():\n    assert add(2, 3) == 5\n    assert loop(99)\n"
    )
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['ray']\n")
    (root / "tests" / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--machine-seed')\n"
    )
    return root


def test_a_run_names_killed_and_surviving_mutants_and_leaves_the_tree_alone(tmp_path: Path) -> None:
    tree = made_tree(tmp_path)
    before = (tree / "rkserve" / "toy" / "sums.py").read_bytes()
    command = [sys.executable, str(PROJECT / "scripts" / "mutation.py"), "toy"]
    done = subprocess.run(
        [*command, "--tree", str(tree)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{'rkserve/toy/sums.py':44} {3:9} {2:9} {0:9}" in done.stdout
    survivors = done.stdout.partition("survivors:\n")[2]
    assert "sums.py:6: comparison: a > 7  ->  (a >= 7)" in survivors
    assert "sums.py:6: constant: 7  ->  (8)" in survivors
    assert (tree / "rkserve" / "toy" / "sums.py").read_bytes() == before


def test_tests_that_fail_without_a_mutant_are_an_error(tmp_path: Path) -> None:
    tree = made_tree(tmp_path)
    (tree / "rkserve" / "toy" / "sums.py").write_text("add = loop = None\n")
    command = [sys.executable, str(PROJECT / "scripts" / "mutation.py"), "toy"]
    done = subprocess.run(
        [*command, "--tree", str(tree)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "the tests fail on the unchanged tree" in done.stdout


def test_a_run_that_hangs_is_a_timeout(tmp_path: Path) -> None:
    tree = made_tree(tmp_path)
    path = tree / "tests" / "toy" / "test_sums.py"
    path.write_text("import time\n\n\ndef test_nothing():\n    time.sleep(600)\n")
    program = """
import sys
from pathlib import Path
from scripts.mutation import Limits, run_tests
tests = ["tests/toy/test_sums.py"]
trial = run_tests(Path(sys.argv[1]), tests, Limits(wall_s=5.0, cpu_s=60.0), first=False)
print(trial.verdict.value)
"""
    command = [sys.executable, "-c", program, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT)
    assert done.stdout == f"{Verdict.TIMEOUT.value}\n"
