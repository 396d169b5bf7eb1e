"""Mutate the pure rooms and run their tests: a mutant that survives shows what no test asserts.

``python scripts/mutation.py`` takes a seeded sample of mutants of each area, runs the tests of the
mirrored folder on each one, the module's own first, and prints the figures and the survivors. The
mutants are made in a copy of the tree in a temporary folder. Tests run in forks of one process that
has the third-party packages loaded.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AREAS = (
    "control",
    "router/policies.py",
    "board/answer",
    "board/rules",
    "native/engine",
)
NEEDED = ("rkserve", "tests", "models", "docs", "pyproject.toml", "serve_config.yaml")
OWN = ("rkserve", "tests", "benchmarks", "scripts", "conftest", "__main__", "__mp_main__")
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
LOGS = re.compile(r"(self\.)?_?log(ger)?\.")
TIMES, MORE_S = 4.0, 30.0  # the limit of a mutant, from the time that the unchanged tree takes


class Verdict(str, Enum):
    """The result of a mutant's test run."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the text from ``start`` to ``end`` (line and byte) is replaced."""

    file: str
    kind: str
    start: tuple[int, int]
    end: tuple[int, int]
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        """Return the changed source."""
        lines = source.splitlines(keepends=True)
        head = b"".join(lines[: self.start[0] - 1]) + lines[self.start[0] - 1][: self.start[1]]
        tail = lines[self.end[0] - 1][self.end[1] :] + b"".join(lines[self.end[0] :])
        return head + self.after.encode() + tail

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:90] for text in (self.before, self.after))
        return f"{self.file}:{self.start[0]}: {self.kind}: {before}  ->  {after}"


class Mutator(ast.NodeVisitor):
    """Collect a file's mutants; annotations, decorators, texts and logging stay as they are."""

    def __init__(self, file: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._file = file
        self.visit(ast.parse(source))

    def _add(self, kind: str, node: ast.expr | ast.stmt, after: ast.AST | str) -> None:
        text = after if isinstance(after, str) else ast.unparse(after)
        if isinstance(node, ast.expr):
            text = f"({text})"
        start, end = (
            (node.lineno, node.col_offset),
            (node.end_lineno or 0, node.end_col_offset or 0),
        )
        self.found.append(Mutant(self._file, kind, start, end, ast.unparse(node), text))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Visit the body and the defaults."""
        for one in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(one)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - NodeVisitor's name - as above

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visit the body."""
        for one in node.body:
            self.visit(one)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visit the value."""
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out formatted texts."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Remove a raise; what it raises stays as it is."""
        if node.exc is not None:
            self._add("statement", node, "pass")

    def visit_Assign(self, node: ast.Assign) -> None:
        """Remove assignments to what lives longer than the function."""
        if all(isinstance(one, ast.Attribute | ast.Subscript) for one in node.targets):
            self._add("statement", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Turn the operator round, or remove the statement."""
        self._add("statement", node, "pass")
        if after := COMPUTED.get(type(node.op)):
            self._add("arithmetic", node, ast.AugAssign(node.target, after(), node.value))
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Remove a call, unless it logs."""
        if isinstance(node.value, ast.Constant):
            return
        if LOGS.match(ast.unparse(node)):
            return
        if not isinstance(node.value, ast.Yield | ast.YieldFrom):
            self._add("statement", node, "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """Return None, or the other truth."""
        if node.value is None:
            return
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add("return", node, "return None")
        self.visit(node.value)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        """Turn a plain condition round; comparisons and the like are mutated by themselves."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
            self._add("boolean", node.test, f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    visit_While = visit_If  # noqa: N815 - NodeVisitor's name
    visit_IfExp = visit_If  # noqa: N815 - NodeVisitor's name

    def visit_Compare(self, node: ast.Compare) -> None:
        """Change one comparison."""
        for at, op in enumerate(node.ops):
            if after := COMPARED.get(type(op)):
                ops = [*node.ops[:at], after(), *node.ops[at + 1 :]]
                self._add("comparison", node, ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Exchange and and or."""
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("boolean", node, ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Remove a not."""
        if isinstance(node.op, ast.Not):
            self._add("boolean", node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Exchange an operator, unless it joins texts."""
        texts = any(
            isinstance(one, ast.JoinedStr)
            or (isinstance(one, ast.Constant) and isinstance(one.value, str | bytes))
            for one in (node.left, node.right)
        )
        if (after := COMPUTED.get(type(node.op))) and not texts:
            self._add("arithmetic", node, ast.BinOp(node.left, after(), node.right))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Turn a truth round, or make a number larger by one."""
        if isinstance(node.value, bool):
            self._add("constant", node, repr(not node.value))
        elif isinstance(node.value, int | float):
            self._add("constant", node, repr(node.value + 1))


@dataclass(frozen=True)
class Limits:
    """The seconds that a test run may take on the clock and of the processor."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Trial:
    """The outcome of one test run in a fork."""

    verdict: Verdict
    wall_s: float
    cpu_s: float


def mutants(tree: Path, area: str) -> list[Mutant]:
    """Return all mutants of an area (a folder, or one module), in the order of its files."""
    found: list[Mutant] = []
    for path in sorted((tree / "rkserve").glob(area if area.endswith(".py") else f"{area}/*.py")):
        name = str(path.relative_to(tree))
        found += Mutator(name, path.read_text(encoding="utf-8")).found
    return found


def sample(tree: Path, area: str, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of an area; the same seed draws the same ones from the same tree."""
    every = mutants(tree, area)
    drawn = random.Random(f"{seed} {area}").sample(range(len(every)), min(count, len(every)))
    return [every[at] for at in sorted(drawn)]


def files_of(tree: Path, area: str, module: str = "") -> list[str]:
    """Return the test files of an area, those named after the module first."""
    folder, _, stem = (
        area.removesuffix(".py").rpartition("/") if area.endswith(".py") else (area, "", "")
    )
    files = sorted((tree / "tests" / folder).glob(f"test_{stem}*.py"))
    files.sort(key=lambda one: not (module and one.stem.startswith(f"test_{module}")))
    return [str(one.relative_to(tree)) for one in files]


def copy_tree(tree: Path, to: Path) -> None:
    """Copy what the tests need, with times, so that compiled modules stay valid."""
    for name in NEEDED:
        source = tree / name
        if source.is_dir():
            shutil.copytree(source, to / name, symlinks=True)
        elif source.exists():
            shutil.copy2(source, to / name)


def run_tests(tree: Path, files: Sequence[str], limits: Limits | None, *, first: bool) -> Trial:
    """Run pytest in a fork, and end all processes that it leaves behind."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_child(tree, files, limits, first=first)
    status, usage = _wait(child, None if limits is None else began + limits.wall_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    wall_s = time.monotonic() - began
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (9, signal.SIGXCPU)):
        return Trial(Verdict.TIMEOUT, wall_s, usage)
    return Trial(Verdict.KILLED if status else Verdict.SURVIVED, wall_s, usage)


def _wait(child: int, until: float | None) -> tuple[int | None, float]:
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            return status, used.ru_utime + used.ru_stime
        if until is not None and time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            _, _, used = os.wait4(child, 0)
            return None, used.ru_utime + used.ru_stime
        time.sleep(0.05)


def _be_child(tree: Path, files: Sequence[str], limits: Limits | None, *, first: bool) -> None:
    code = 3
    try:
        os.setsid()
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        if not first:
            # A mutant must not be found compiled by the next one.
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        if limits is not None:
            cpu_s = int(limits.cpu_s)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
        quiet = os.open("last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not ray", "--hypothesis-seed=1"]
        options += ["--machine-seed=1", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = int(pytest.main([*options, *files]))
        if first:
            names = [one for one in sys.modules if one.split(".")[0] not in OWN]
            Path("loaded.json").write_text(json.dumps(names), encoding="utf-8")
    finally:
        sys.stdout.flush()
        os._exit(code)


def preload(tree: Path) -> None:
    """Import the third-party modules of the first run, so that the forks need not."""
    for name in json.loads((tree / "loaded.json").read_text(encoding="utf-8")):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def try_mutant(tree: Path, mutant: Mutant, area: str, limits: Limits, number: int) -> Trial:
    """Run the tests on a mutant, and restore the file."""
    path = tree / mutant.file
    source, kept = path.read_bytes(), path.stat()
    path.write_bytes(mutant.apply(source))
    # Compiled modules are recognised by seconds and size.
    os.utime(path, (kept.st_atime, kept.st_mtime + 10 + number))
    try:
        return run_tests(tree, files_of(tree, area, path.stem), limits, first=False)
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))


def run_area(tree: Path, area: str, count: int, seed: int, say: Callable[[str], None]) -> bool:
    """Try an area's mutants and print the outcome; False where its tests fail without them."""
    files = files_of(tree, area)
    whole = run_tests(tree, files, None, first=True)
    if whole.verdict is not Verdict.SURVIVED:
        say(f"{area}: the tests fail on the unchanged tree:\n{(tree / 'last.log').read_text()}")
        return False
    preload(tree)
    whole = run_tests(tree, files, None, first=False)
    limits = Limits(TIMES * whole.wall_s + MORE_S, TIMES * whole.cpu_s + MORE_S)
    drawn = sample(tree, area, count, seed)
    say(
        f"{area}: {len(drawn)} of {len(mutants(tree, area))} mutants; the tests take "
        f"{whole.cpu_s:.1f} s of the processor"
    )
    tried: list[tuple[Mutant, Verdict]] = []
    for number, mutant in enumerate(drawn):
        trial = try_mutant(tree, mutant, area, limits, number)
        tried.append((mutant, trial.verdict))
        say(f"  {trial.verdict.value:8} {trial.wall_s:6.1f} s  {mutant}")
    say("\n".join(summary(area, tried)))
    return True


def summary(area: str, tried: Sequence[tuple[Mutant, Verdict]]) -> Iterator[str]:
    """Yield the figures of each module and of the area, then the survivors."""
    rows = {name: Counter[Verdict]() for name in sorted({one.file for one, _ in tried})}
    for mutant, verdict in tried:
        rows[mutant.file][verdict] += 1
    rows[area] = sum(rows.values(), Counter())
    yield f"\n{'':44} " + " ".join(f"{one.value:>9}" for one in Verdict)
    for name, counts in rows.items():
        yield f"{name:44} " + " ".join(f"{counts[one]:9}" for one in Verdict)
    yield "survivors:"
    yield from (f"  {mutant}" for mutant, verdict in tried if verdict is Verdict.SURVIVED)


def main() -> int:
    """Run it. Returns the exit code: 1 where tests fail without a mutant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", default=AREAS, help="folders or modules below rkserve/")
    parser.add_argument("--count", type=int, default=40, help="mutants of each area")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout")
    given = parser.parse_args()
    good = True
    for area in given.areas:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            tree = Path(folder)
            copy_tree(given.tree.resolve(), tree)
            # A fork of its own for each area, because of what preloading leaves behind.
            child = os.fork()
            if child == 0:
                said = run_area(tree, area, given.count, given.seed, lambda t: print(t, flush=True))
                sys.stdout.flush()
                os._exit(0 if said else 1)
            good = os.waitpid(child, 0)[1] == 0 and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
