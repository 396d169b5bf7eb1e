"""The words of the code: unique class names, docstrings that open plainly, no private language."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

# Declarations are written by cffi.
PACKAGE = [p for p in sorted((PROJECT / "rkserve").rglob("*.py")) if p.parent.name != "decl"]
BESIDE = ("benchmarks", "examples", "observability", "scripts")
SOURCES = [*PACKAGE, *(p for name in BESIDE for p in sorted((PROJECT / name).rglob("*.py")))]
# A noun phrase or an imperative opens a docstring; these words open a clause in its place.
CLAUSE = re.compile(r"(What|Whether|Who|Whoever|Whose|How|That|Which|Where|When)\b")
# Boards and modules do not talk: they report, send, log, emit, record.
TALK = frozenset({"said", "told", "heard", "say", "tell", "hear"})
BANNED = re.compile(r"\b(shall|shalt|whoever|whosoever|whatsoever|nobody)\b", re.IGNORECASE)
# Most files have none, and are not split into tokens.
TALK_ANYWHERE = re.compile(rf"(?<![a-z])({'|'.join(sorted(TALK))})(?![a-z])", re.IGNORECASE)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(PROJECT)}:{line}"


def test_public_class_names_are_unique_in_the_package() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PROJECT)))
    assert not {name: where for name, where in found.items() if len(where) > 1}


def clauses(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file that open with a clause."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(parsed(path)):
        text = (ast.get_docstring(node) or "") if isinstance(node, kinds) else ""
        if CLAUSE.match(text):
            yield f"{place(path, getattr(node, 'lineno', 1))}: {text.splitlines()[0]}"


def private_words(path: Path) -> Iterator[str]:
    """Yield the lines of a file with a word that is banned."""
    text = path.read_text(encoding="utf-8")
    if not BANNED.search(text):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if BANNED.search(line):
            yield f"{place(path, number)}: {line.strip()}"


def talk(path: Path) -> Iterator[str]:
    """Yield the names in a file that are words of talk."""
    text = path.read_text(encoding="utf-8")
    if not TALK_ANYWHERE.search(text):
        return
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    for before, token in pairwise(tokens):
        of_files = (before.string, token.string) == (".", "tell")
        if (
            token.type == tokenize.NAME
            and token.string.lower().lstrip("_") in TALK
            and not of_files
        ):
            yield f"{place(path, token.start[0])}: {token.string}"


def test_docstrings_open_with_a_noun_phrase_or_an_imperative() -> None:
    assert not [found for path in SOURCES for found in clauses(path)]


def test_no_word_of_a_private_language_is_used() -> None:
    assert not [found for path in SOURCES for found in private_words(path)]


def test_no_name_is_a_word_of_talk() -> None:
    assert not [found for path in PACKAGE for found in talk(path)]


@pytest.mark.parametrize(
    ("look", "source", "lines"),
    [
        pytest.param(clauses, '"""One."""\ndef f():\n    """Whether it is."""\n', [2], id="clause"),
        pytest.param(clauses, '"""How."""\nclass A:\n    """What."""\n', [1, 2], id="clauses"),
        pytest.param(private_words, "a = 1\n# Whoever asks\n", [2], id="a banned word"),
        pytest.param(private_words, "# the marshall\n", [], id="a part of a word"),
        pytest.param(talk, "a = 1\n_told = 2\n", [2], id="talk"),
        pytest.param(talk, "file.tell()\n# told\ntelling = 1\n", [], id="no talk"),
    ],
)
def test_offenders_are_found_with_their_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[[Path], Iterator[str]],
    source: str,
    lines: list[int],
) -> None:
    monkeypatch.setattr("tests.test_words.PROJECT", tmp_path)
    path = tmp_path / "source.py"
    path.write_text(source, encoding="utf-8")
    assert [int(found.split(":")[1]) for found in look(path)] == lines
