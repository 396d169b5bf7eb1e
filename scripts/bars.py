"""Count what keeps the code base habitable, and print it beside the figures of before the redesign.

``python scripts/bars.py`` prints a table; ``--names`` also lists what makes up each figure, and
``--trace`` adds the files that a streamed chat executes, for which a board is started.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rkserve"
SMALL_LINES = 60
RELATIVE = re.compile(r"(What|Whether|Who(ever|se)?|How|That|Which|Where|When)\b")


@dataclass(frozen=True)
class Bar:
    """One figure: before the redesign, now, the bar, and the names that make up the figure."""

    name: str
    before: str
    now: int
    bar: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module:
    """A module of the package, parsed."""

    path: Path
    lines: int
    tree: ast.Module

    @property
    def name(self) -> str:
        """The dotted name; a package is named like its folder."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def imported(self) -> Iterator[str]:
        """Yield the dotted names of all imports, also those inside functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def docstrings(self) -> Iterator[tuple[int, str]]:
        """Yield line and text of the docstrings of the module, its classes and functions."""
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(self.tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield getattr(node, "lineno", 1), text


def modules() -> list[Module]:
    """Parse the package; declarations that cffi writes do not count."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if not re.match(r"rk\w+\.py", path.name) or path.parent.name != "decl":
            text = path.read_text(encoding="utf-8")
            found.append(Module(path, text.count("\n"), ast.parse(text)))
    return found


def single_use(of: list[Module]) -> list[str]:
    """Return small modules with a single importer; a Protocol is a border and stays."""
    importers: dict[str, set[str]] = defaultdict(set)
    names = {one.name for one in of}
    for one in of:
        for name in set(one.imported()) & names:
            importers[name].add(one.name)
    return [
        f"{one.name} ({one.lines} lines, for {next(iter(importers[one.name]))})"
        for one in of
        if one.lines < SMALL_LINES
        and one.path.name not in ("__init__.py", "__main__.py")
        and len(importers[one.name]) == 1
        and "(Protocol" not in one.path.read_text(encoding="utf-8")
    ]


def public_classes(of: list[Module]) -> dict[str, list[str]]:
    """Return for each public class name the modules that define a class of that name."""
    found: dict[str, list[str]] = defaultdict(list)
    for one in of:
        for node in one.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(one.name)
    return found


def openings(of: list[Module]) -> list[str]:
    """Return docstrings that open with a relative or interrogative word."""
    return [
        f"{one.path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for one in of
        for line, text in one.docstrings()
        if RELATIVE.match(text)
    ]


def untested(of: list[Module]) -> list[str]:
    """Return modules without ``tests/<room>/test_<module>*.py``."""
    return [
        one.name
        for one in of
        if one.path.name not in ("__init__.py", "__main__.py")
        and not [
            *(ROOT / "tests" / one.path.parent.relative_to(PACKAGE)).glob(
                f"test_{one.path.stem}*.py"
            )
        ]
    ]


def spine() -> list[str]:
    """Return the files of the walk through the architecture, in their order."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    return list(dict.fromkeys(re.findall(r"^\| \d+ \| `([^`]+)`", page, re.MULTILINE)))


def recipes() -> dict[str, list[str]]:
    """Return for each recipe of the contributing page the files that its steps name.

    A folder counts where no file of it is named: a file is added to it.
    """
    page = (ROOT / "docs" / "how-to" / "contributing.md").read_text(encoding="utf-8")
    text = page.partition("\n## Recipes\n")[2].partition("\n## ")[0]
    found = {}
    for part in text.split("\n### ")[1:]:
        steps = "\n".join(re.findall(r"^\d+\. (?:.|\n(?=   ))*", part, re.MULTILINE))
        paths = set(re.findall(r"`((?:rkserve|tests|docs|scripts)/[^`\s]+)`", steps))
        named = [one for one in paths if not any(o != one and o.startswith(one) for o in paths)]
        found[part.partition("\n")[0]] = sorted(named)
    return found


def recipe_bars() -> list[Bar]:
    """Return the recipes that have a bar."""
    known = {
        "A routing policy": ("5", "3"),
        "A tool-call form": ("6", "3"),
        "A runtime release": ("16-20", "3"),
        "A control call with its command": ("17", "8"),
    }
    named = recipes()
    return [
        Bar(f"files named: {name.lower()}", before, len(named[name]), bar, tuple(named[name]))
        for name, (before, bar) in known.items()
    ]


def traced() -> Bar:
    """Trace a streamed chat, in a process of its own."""
    command = [sys.executable, str(ROOT / "scripts" / "trace_chat.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = sorted({line.strip() for line in done.stdout.splitlines() if line.startswith("  ")})
    return Bar("files executed by a streamed chat", "113", len(names), "65", tuple(names))


def measure() -> list[Bar]:
    """Return all figures that need no process."""
    of = modules()
    folders = Counter(one.path.parent for one in of)
    twice = {name: where for name, where in public_classes(of).items() if len(where) > 1}
    tests = Counter(path.parent for path in (ROOT / "tests").rglob("test_*.py"))
    test_lines = sum(
        path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "tests").rglob("*.py")
    )
    walk = spine()
    single, opened, alone = single_use(of), openings(of), untested(of)
    return [
        Bar("lines of Python in the package", "74.9k", sum(one.lines for one in of), "56k"),
        Bar("modules in the package", "452", len(of), "280"),
        Bar("files in the largest folder", "92", max(folders.values()), "20"),
        Bar("small modules with one importer", "~60", len(single), "10", tuple(single)),
        Bar(
            "public class names used twice",
            "87",
            len(twice),
            "0",
            tuple(f"{name}: {', '.join(where)}" for name, where in sorted(twice.items())),
        ),
        Bar("docstrings that open with What, Whether, ...", "607", len(opened), "0", tuple(opened)),
        Bar("files of the walk through the architecture", "46", len(walk), "22", tuple(walk)),
        *recipe_bars(),
        Bar("lines of tests", "81k", test_lines, "-"),
        Bar("test files in the largest folder", "305", max(tests.values()), "20"),
        Bar("modules without a test of their name", "?", len(alone), "0", tuple(alone)),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="list what makes up each figure")
    parser.add_argument("--trace", action="store_true", help="also trace a chat; takes seconds")
    given = parser.parse_args()
    print(f"{'':45} {'before':>8} {'now':>8} {'bar':>8}")
    for bar in (*measure(), *([traced()] if given.trace else [])):
        print(f"{bar.name:45} {bar.before:>8} {bar.now:>8} {bar.bar:>8}")
        for name in bar.names if given.names else ():
            print(f"    {name}")


if __name__ == "__main__":
    main()
