"""The words of the code: unique class names, docstrings that open plainly, no private language."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

# Declarations are written by cffi.
PACKAGE = [p for p in sorted((PROJECT / "rkserve").rglob("*.py")) if p.parent.name != "decl"]
BESIDE = ("benchmarks", "examples", "scripts")
SOURCES = [*PACKAGE, *(p for name in BESIDE for p in sorted((PROJECT / name).rglob("*.py")))]
# A noun phrase or an imperative opens a docstring; these words open a clause in its place.
CLAUSE = re.compile(r"(What|Whether|Who|Whoever|Whose|How|That|Which|Where|When)\b")
# Boards and modules do not talk: they report, send, log, emit, record.
TALK = frozenset({"said", "told", "heard", "say", "tell", "hear"})
BANNED = re.compile(r"\b(shall|shalt|whoever|whosoever|whatsoever)\b", re.IGNORECASE)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def test_public_class_names_are_unique_in_the_package() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PROJECT)))
    assert not {name: where for name, where in found.items() if len(where) > 1}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_docstrings_open_with_a_noun_phrase_or_an_imperative(path: Path) -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = (node for node in ast.walk(parsed(path)) if isinstance(node, kinds))
    texts = ((getattr(node, "lineno", 1), ast.get_docstring(node) or "") for node in documented)
    assert not [f"{line}: {text.splitlines()[0]}" for line, text in texts if CLAUSE.match(text)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_no_word_of_a_private_language_is_used(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not [f"{n}: {line.strip()}" for n, line in enumerate(lines, 1) if BANNED.search(line)]


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(PROJECT)))
def test_no_name_is_a_word_of_talk(path: Path) -> None:
    tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline))
    names = [
        (token.start[0], token.string)
        for before, token in pairwise(tokens)
        if token.type == tokenize.NAME
        and (before.string, token.string) != (".", "tell")  # of files
    ]
    assert not [f"{line}: {name}" for line, name in names if name.lower().lstrip("_") in TALK]
