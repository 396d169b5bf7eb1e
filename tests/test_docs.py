"""The documentation says what the code says: generated pages, error codes, metrics, keys, paths."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.main import get_command

from observability.metric_table import all_metrics
from rkserve.cli import app as cli
from rkserve.cli.sign import FileFirst
from rkserve.config.serve_config import RkserveConfig, inner_model
from rkserve.models.settings import FolderSettings
from rkserve.native.quirks import NAMES as QUIRKS
from rkserve.native.sim import profiles
from scripts import make_docs
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

DOCS = PROJECT / "docs"
PAGES = sorted([PROJECT / "README.md", PROJECT / "CHANGELOG.md", *DOCS.rglob("*.md")])
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Made by building, not part of the project.
MADE = ("rkserve/native/sim/build/", "cluster/offline")  # by make sim, and for provisioning


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_generated_pages_are_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert (make_docs.main(["--check"]), capsys.readouterr().err) == (0, "")


def test_the_metrics_page_has_labels_that_no_sample_shows_yet() -> None:
    rows = page("reference/metrics.md")
    assert "| `rkserve_turned_away` | counter | model, reason, router |" in rows
    assert "| `rkserve_held_seconds` | histogram | model, by, router |" in rows
    assert "| `rkserve_ttft_seconds` | histogram | model, router |" in rows
    assert "| `rkserve_hang_ups` | counter | router |" in rows


def test_a_generated_page_that_is_behind_is_named_and_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in make_docs.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(DOCS / name, tmp_path / name)
    quirks = tmp_path / "reference" / "quirks.md"
    quirks.write_text("old", encoding="utf-8")
    (tmp_path / "explanation" / "states.md").unlink()
    assert make_docs.main(["--check", "--docs", str(tmp_path)]) == 1
    assert "explanation/states.md, reference/quirks.md" in capsys.readouterr().err
    assert quirks.read_text(encoding="utf-8") == "old"
    assert make_docs.main(["--docs", str(tmp_path)]) == 0
    assert quirks.read_text(encoding="utf-8") == page("reference/quirks.md")
    assert make_docs.main(["--check", "--docs", str(tmp_path)]) == 0


def test_every_metric_is_explained() -> None:
    lines = page("reference/metrics.md").splitlines()
    names = [row.name for row in all_metrics()]
    assert len(names) > 50
    for name in names:
        rows = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert len(rows) == 1, name
        assert len(rows[0].rstrip(" |").split("|")[-1].strip()) > len("meaning"), name


def keys(model: type[BaseModel], title: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield title, name
        inner = inner_model(field.annotation)
        if inner is not None:
            yield from keys(inner, f"{title}.{name}")


KEYS = [*keys(RkserveConfig, "args"), *keys(FolderSettings, "rkserve.yaml")]


def test_every_key_of_the_configuration_is_explained() -> None:
    text = page("reference/configuration.md")
    assert len(KEYS) > 100
    for title, key in KEYS:
        _, _, section = text.partition(f"### `{title}`\n")
        section, _, _ = section.partition("\n### ")
        rows = [line for line in section.splitlines() if line.startswith(f"| `{key}` |")]
        assert len(rows) == 1, f"{title}.{key}"
        cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
        assert all(cells), f"{title}.{key} has an empty cell: {rows[0]}"


def test_every_quirk_is_explained() -> None:
    explained = page("reference/quirks.md")
    assert not [name for name in QUIRKS if f"\n## {name}\n" not in explained]


def row_of(profile: profiles.Profile) -> str:
    first_ms, rate = profile.prefill_ms(128), profile.tokens_per_s(128, 64)
    return f"| `{profile.name}` | {first_ms:.0f} ms | {rate:.2f} | {profile.memory_mb:.0f} MB |"


def test_every_profile_is_listed() -> None:
    rows, listed = [row_of(profile) for profile in profiles.load()], page("reference/simulator.md")
    assert rows
    assert not [row for row in rows if row not in listed]


MENTIONED = sorted(
    {
        (str(file.relative_to(PROJECT)), path)
        for file in PAGES
        for path in re.findall(
            r"`((?:rkserve|scripts|tests|models|cluster)/[^\s`:]*)",
            file.read_text(encoding="utf-8"),
        )
    }
)


def test_every_path_of_the_project_that_a_page_names_exists() -> None:
    assert not [
        f"{file} names {path}"
        for file, path in MENTIONED
        if path not in MADE and not any(PROJECT.glob(path.rstrip("/")))
    ]


LINKS = sorted(
    {
        (str(file.relative_to(PROJECT)), link)
        for file in PAGES
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text(encoding="utf-8"))
    }
)


def test_every_link_between_pages_leads_somewhere() -> None:
    assert not [
        f"{file} links to {link}"
        for file, link in LINKS
        if not (PROJECT / file).parent.joinpath(link).exists()
    ]


WALK = re.findall(
    r"^\| \d+ \| `(rkserve/[\w/]+\.py)` \| `([\w.]+)` \|",
    page("explanation/architecture.md"),
    re.M,
)


def functions(file: str) -> Iterator[str]:
    """Yield the names of a module's functions, methods as ``Class.method``."""
    for node in ast.parse((PROJECT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{one.name}" for one in node.body if isinstance(one, FUNCTION))
        elif isinstance(node, FUNCTION):
            yield node.name


def test_the_walk_of_a_request_is_short() -> None:
    assert 15 < len(WALK) <= 22


def test_every_function_of_the_walk_exists() -> None:
    assert not [f"{file}: {name}" for file, name in WALK if name not in {*functions(file)}]


def test_every_room_is_described() -> None:
    text = page("explanation/architecture.md")
    rooms = {file.parent.name for file in (PROJECT / "rkserve").glob("*/*.py")}
    assert not {room for room in rooms if f"| `rkserve/{room}/`" not in text} - {"cli"}


def test_every_decision_is_listed() -> None:
    listed = page("adr/index.md")
    for file in (DOCS / "adr").glob("0*.md"):
        title = file.read_text(encoding="utf-8").partition("\n")[0].partition(". ")[2]
        assert f"]({file.name}): {title}\n" in listed


SHELL = sorted(
    {
        (str(file.relative_to(PROJECT)), command.strip())
        for file in PAGES
        for block in re.findall(
            r"^```sh\n(.*?)^```$", file.read_text(encoding="utf-8"), re.S | re.M
        )
        for command in re.findall(
            r"^(?:\.venv/bin/)?((?:make|rkserve|python3?) .*)$", block.replace("\\\n", " "), re.M
        )
    }
)
TARGETS = set(
    re.findall(r"^([a-z0-9-]+):", (PROJECT / "Makefile").read_text(encoding="utf-8"), re.M)
)


def test_every_command_of_a_page_exists_with_its_options() -> None:
    problems = (f"{file}: {command}: {problem(command)}" for file, command in SHELL)
    assert not [text for text in problems if not text.endswith(": ")]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("make unit", ""),
        ("make units", "no such target"),
        ("rkserve models list --no-such-option x", "no such option: --no-such-option"),
        ("rkserve no-such-command", "no such command: no-such-command"),
        ("python -c 'import json'", ""),
        ("python -c 'import'", "no Python"),
        ("python3 -m rkserve", ""),
        ("python3 -m rkserves", "no such module"),
        ("python scripts/fuzz.py", ""),
        ("python scripts/no_demo.py", "no such file"),
    ],
)
def test_a_wrong_command_of_a_page_is_found(command: str, said: str) -> None:
    assert problem(command) == said


def problem(command: str) -> str:
    """Return why a command of a page would fail; empty where it would not."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        return "" if words[1] in TARGETS else "no such target"
    if words[0] == "rkserve":
        try:
            known = options_of(words[1:])
        except KeyError as exc:
            return f"no such command: {exc.args[0]}"
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        unknown = sorted(given - known)
        return f"no such option: {', '.join(unknown)}" if unknown else ""
    return problem_of_python(words[1:])


def problem_of_python(words: list[str]) -> str:
    """Return why Python would fail with these arguments; empty where it would not."""
    if words[0] == "-c":
        try:
            compile(words[1], "-c", "exec")
        except SyntaxError:
            return "no Python"
        return ""
    if words[0] == "-m":
        return "" if words[1] == "venv" or importlib.util.find_spec(words[1]) else "no such module"
    return "" if (PROJECT / words[0]).is_file() else "no such file"


@functools.cache
def command_line() -> Any:
    """Return the whole command; making it takes longer than all else here."""
    return get_command(cli)


def options_of(words: list[str]) -> set[str]:
    """Return the options of an ``rkserve`` command. Raises ``KeyError`` for an unknown command."""
    command = command_line()
    for word in words:
        if not getattr(command, "commands", None) or word.startswith("-"):
            break
        if word not in command.commands and isinstance(command, FileFirst):
            word = command.default  # `rkserve sign FILE`  # noqa: PLW2901 - as the group does
        command = command.commands[word]
    options = (option for parameter in command.params for option in parameter.opts)
    return {*options, "--help", "--version"}


def test_there_are_paths_and_links_to_check() -> None:
    assert len(MENTIONED) > len(PAGES) / 2
    assert len(LINKS) > len(PAGES) / 2
    assert len(SHELL) > 50


HEADERS = sorted((PROJECT / "rkserve" / "native" / "decl").glob("rkllm_1_*.h"))


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.name)
def test_the_vendor_s_declarations_name_their_origin_and_licence(header: Path) -> None:
    declared = header.read_text(encoding="utf-8")
    assert "https://github.com/airockchip/rknn-llm" in declared
    assert "Copyright (c) Rockchip Electronics Co." in declared
    notice = (PROJECT / "NOTICE").read_text(encoding="utf-8")
    assert "rkserve/native/decl/rkllm_*.h" in notice
    assert 'IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS"' in notice


# -- the runtime's parameters ---------------------------------------------------------------------

STRUCTS = ("RKLLMParam", "RKLLMExtendParam", "RKLLMInferParam", "RKLLMSamplingParam", "RKLLMInput")


def runtime_parameters() -> set[str]:
    """Every field of the structs that the library is told something in, of all releases."""
    found = set()
    for header in HEADERS:
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(encoding="utf-8"), flags=re.S)
        for body, name in re.findall(r"typedef struct \{(.*?)\}\s*(\w+);", text, re.S):
            if name in STRUCTS:
                found |= set(re.findall(r"(\w+)(?:\[\d+\])?;", body))
    return found


def test_every_parameter_of_the_runtime_has_its_setting_or_its_reason() -> None:
    listed = set(re.findall(r"`(\w+)`", page("reference/runtime-parameters.md")))
    fields = runtime_parameters()
    assert {"embed_flash", "ignore_eos_token", "use_cross_attn", "top_k", "input_type"} <= fields
    assert fields <= listed, f"not on the page: {sorted(fields - listed)}"
