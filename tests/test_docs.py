"""The documentation says what the code says: generated pages, error codes, metrics, keys, paths."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from typer.main import get_command

from rkserve.cli import app as cli
from rkserve.config.serve_config import RkserveConfig, inner_model
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.errors import RkserveError
from rkserve.core.metrics import BoardCollector, CoordinatorMetrics, RouterMetrics, StreamCollector
from rkserve.models.settings import FolderSettings
from rkserve.native.quirks import NAMES as QUIRKS
from rkserve.native.sim import profiles
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

DOCS = PROJECT / "docs"
PAGES = sorted([PROJECT / "README.md", PROJECT / "CHANGELOG.md", *DOCS.rglob("*.md")])
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Made by building, not part of the project.
MADE = ("rkserve/native/sim/build/", "cluster/offline")  # by make sim, and for provisioning


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def make_docs(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "scripts" / "make_docs.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)


def test_generated_pages_are_what_the_code_says() -> None:
    done = make_docs("--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_metrics_page_has_labels_that_no_sample_shows_yet() -> None:
    rows = page("reference/metrics.md")
    assert "| `rkserve_turned_away` | counter | model, reason |" in rows
    assert "| `rkserve_held_seconds` | histogram | model, by |" in rows
    assert "| `rkserve_ttft_seconds` | histogram | model |" in rows
    assert "| `rkserve_hang_ups` | counter | none |" in rows


def test_a_generated_page_that_is_behind_is_named_and_written_anew(tmp_path: Path) -> None:
    generated = (
        "reference/api-reference.md",
        "reference/configuration.md",
        "reference/metrics.md",
        "explanation/states.md",
        "reference/quirks.md",
        "reference/client.md",
        "reference/control-tests.md",
    )
    for name in generated:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(DOCS / name, tmp_path / name)
    quirks = tmp_path / "reference" / "quirks.md"
    quirks.write_text("old", encoding="utf-8")
    (tmp_path / "explanation" / "states.md").unlink()
    done = make_docs("--check", "--docs", str(tmp_path))
    assert done.returncode == 1
    assert "explanation/states.md, reference/quirks.md" in done.stderr
    assert quirks.read_text(encoding="utf-8") == "old"
    assert make_docs("--docs", str(tmp_path)).returncode == 0
    assert make_docs("--check", "--docs", str(tmp_path)).returncode == 0


def subclasses(parent: type[RkserveError]) -> Iterator[type[RkserveError]]:
    yield parent
    for child in parent.__subclasses__():
        yield from subclasses(child)


CODES = sorted({error.code for error in subclasses(RkserveError) if error.code is not None})


@pytest.mark.parametrize("code", CODES)
def test_every_error_code_is_explained(code: str) -> None:
    assert f"`{code}`" in page("reference/api.md")


def metric_names() -> set[str]:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    CoordinatorMetrics(registry)
    example = BoardReport(board_id="sim-0", model="sim-chat", state=BoardState.READY)
    registry.register(BoardCollector(lambda: [example]))
    registry.register(StreamCollector(lambda: ({"channel": 0, "ray": 0}, 0)))
    return {family.name for family in registry.collect()}


@pytest.mark.parametrize("name", sorted(metric_names()))
def test_every_metric_is_explained(name: str) -> None:
    (row,) = (
        line
        for line in page("reference/metrics.md").splitlines()
        if line.startswith(f"| `{name}` |")
    )
    assert len(row.rstrip(" |").split("|")[-1].strip()) > len("meaning")


def keys(model: type[BaseModel], title: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield title, name
        inner = inner_model(field.annotation)
        if inner is not None:
            yield from keys(inner, f"{title}.{name}")


KEYS = [*keys(RkserveConfig, "args"), *keys(FolderSettings, "rkserve.yaml")]


@pytest.mark.parametrize(("title", "key"), KEYS, ids=str)
def test_every_key_of_the_configuration_is_explained(title: str, key: str) -> None:
    _, _, section = page("reference/configuration.md").partition(f"### `{title}`\n")
    section, _, _ = section.partition("\n### ")
    (row,) = (line for line in section.splitlines() if line.startswith(f"| `{key}` |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert all(cells), f"{title}.{key} has an empty cell: {row}"


@pytest.mark.parametrize("name", sorted(QUIRKS))
def test_every_quirk_is_explained(name: str) -> None:
    assert f"\n## {name}\n" in page("reference/quirks.md")


@pytest.mark.parametrize("profile", profiles.load(), ids=lambda profile: profile.name)
def test_every_profile_is_listed(profile: profiles.Profile) -> None:
    first_ms, rate = profile.prefill_ms(128), profile.tokens_per_s(128, 64)
    assert (
        f"| `{profile.name}` | {first_ms:.0f} ms | {rate:.2f} | {profile.memory_mb:.0f} MB |"
    ) in page("reference/simulator.md")


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


@pytest.mark.parametrize(("file", "path"), MENTIONED)
def test_every_path_of_the_project_that_a_page_names_exists(file: str, path: str) -> None:
    assert path in MADE or any(PROJECT.glob(path.rstrip("/"))), f"{file} names {path}"


LINKS = sorted(
    {
        (str(file.relative_to(PROJECT)), link)
        for file in PAGES
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text(encoding="utf-8"))
    }
)


@pytest.mark.parametrize(("file", "link"), LINKS)
def test_every_link_between_pages_leads_somewhere(file: str, link: str) -> None:
    assert (PROJECT / file).parent.joinpath(link).exists(), f"{file} links to {link}"


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


@pytest.mark.parametrize(("file", "function"), WALK)
def test_every_function_of_the_walk_exists(file: str, function: str) -> None:
    assert function in {*functions(file)}


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


@pytest.mark.parametrize(("file", "command"), SHELL)
def test_every_command_of_a_page_exists_with_its_options(file: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        assert words[1] in TARGETS, f"{file}: make {words[1]}"
    elif words[0] == "rkserve":
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert not given - options_of(words[1:]), f"{file}: {command}"
    elif words[1] == "-c":
        compile(words[2], file, "exec")
    elif words[1] == "-m":
        assert words[2] == "venv" or importlib.util.find_spec(words[2]), f"{file}: {command}"
    else:
        assert (PROJECT / words[1]).is_file(), f"{file}: {command}"


def options_of(words: list[str]) -> set[str]:
    """Return the options of an ``rkserve`` command. Raises ``KeyError`` for an unknown command."""
    command: Any = get_command(cli)
    for word in words:
        if not getattr(command, "commands", None) or word.startswith("-"):
            break
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
