"""The collection in cluster/ansible: its files, settings, and the paths that other parts name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rkserve.api.admin.join import JoinAnswer
from rkserve.cli import app
from tests.cluster.commands import options_of
from tests.support.paths import PROJECT

ANSIBLE = PROJECT / "cluster" / "ansible"
ROLES = sorted(path.name for path in (ANSIBLE / "roles").iterdir())
PLAYBOOKS = sorted((ANSIBLE / "playbooks").glob("*.yml"))
YAML = sorted(ANSIBLE.rglob("*.yml"))
UNITS = sorted((PROJECT / "cluster" / "systemd").glob("*.service"))
NODE = (PROJECT / "cluster" / "node" / "rkserve-node").read_text(encoding="utf-8")
# Names that Ansible defines itself.
BUILTIN = {
    *("ansible_facts", "ansible_play_hosts", "group_names", "groups", "hostvars", "item", "omit"),
    *("playbook_dir", "inventory_hostname", "query", "lookup", "ansible_host", "true", "false"),
}


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def tasks_of(content: Any) -> list[dict[str, Any]]:
    """Return all tasks of a file, also those inside blocks and plays."""
    found: list[dict[str, Any]] = []
    for one in content or []:
        found.append(one)
        for key in ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks", "handlers"):
            found += tasks_of(one.get(key))
    return found


TASK_FILES = [path for path in YAML if path.parent.name in ("tasks", "handlers", "playbooks")]
TASKS = [(path, task) for path in TASK_FILES for task in tasks_of(loaded(path))]
SETTINGS: dict[str, Any] = loaded(ANSIBLE / "roles" / "settings" / "defaults" / "main.yml")


def test_there_are_the_roles_and_playbooks_of_the_pages() -> None:
    expected = {"clocks", "models", "observability", "prereq", "rkserve", "runtime", "settings"}
    assert set(ROLES) == expected
    assert [path.stem for path in PLAYBOOKS] == ["doctor", "reset", "rollback", "site", "update"]


@pytest.mark.parametrize("path", YAML, ids=lambda path: str(path.relative_to(ANSIBLE)))
def test_a_file_is_yaml(path: Path) -> None:
    assert loaded(path) is not None


def test_only_builtin_modules_are_used() -> None:
    modules = {key for _, task in TASKS for key in task if "." in key}
    assert modules
    assert [name for name in modules if not name.startswith("ansible.builtin.")] == []
    assert loaded(ANSIBLE / "requirements.yml") == {"collections": []}


def test_each_command_is_named_by_its_effect() -> None:
    """A second run changes nothing only where commands report whether they changed something."""
    for path, task in TASKS:
        if "ansible.builtin.command" in task or "ansible.builtin.shell" in task:
            assert "changed_when" in task, f"{path}: {task['name']}"


def defined() -> set[str]:
    """Return the names of all variables that the collection defines."""
    names = set(BUILTIN)
    for role in ROLES:
        defaults = ANSIBLE / "roles" / role / "defaults" / "main.yml"
        names |= loaded(defaults).keys() if defaults.exists() else set()
    for _, task in TASKS:
        names |= (task.get("ansible.builtin.set_fact") or {}).keys() | (
            task.get("vars") or {}
        ).keys()
        names |= {task["register"]} if "register" in task else set()
        names |= {prompt["name"] for prompt in task.get("vars_prompt") or ()}
    return names


@pytest.mark.parametrize(
    "path",
    [*TASK_FILES, *sorted(ANSIBLE.rglob("*.j2"))],
    ids=lambda path: str(path.relative_to(ANSIBLE)),
)
def test_every_setting_is_defined(path: Path) -> None:
    roles = "|".join(ROLES)
    text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
    # A name of the collection that no file or unit has: rkserve_models_dir, but not rkserve-node.
    used = set(re.findall(rf"(?<![\w/.'-])((?:{roles})_[a-z_]+)\b(?!\.(?:yml|j2))", text))
    optional = {"rkserve_max_unavailable"}
    assert used - defined() - optional == set()


def test_the_example_names_settings_that_exist_with_their_defaults() -> None:
    text = (ANSIBLE / "inventory" / "example.yml").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^    (?:# )?(rkserve_\w+): (.*?)(?: +#.*)?$", text, re.MULTILINE))
    assert len(shown) > 10
    assert shown.keys() <= SETTINGS.keys()
    for name, value in shown.items():
        if name != "rkserve_head_address":
            assert yaml.safe_load(value) == SETTINGS[name], name


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_and_settings_name_the_same_paths(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    for path in re.findall(r"(?<![\w/])/(?:opt|etc|var)/[\w./-]+", text):
        names = [SETTINGS[f"rkserve_{name}"] for name in ("prefix", "state", "etc")]
        assert path.startswith(tuple(names)), path
    if "ExecStart=/opt" in text:
        assert f"ExecStart={SETTINGS['rkserve_prefix']}/venv/bin/rkserve " in text
        assert f"--state {SETTINGS['rkserve_state']}/node" in text


@pytest.mark.parametrize(
    ("variable", "setting"),
    [("PREFIX", "prefix"), ("STATE", "state"), ("ETC", "etc"), ("UNITS", "units"),
     ("LIBRARY", "library"), ("MODELS", "models_dir")],
)  # fmt: skip
def test_the_steps_of_a_node_name_the_same_paths(variable: str, setting: str) -> None:
    assert f"{variable}=${{RKSERVE_{variable}:-{SETTINGS[f'rkserve_{setting}']}}}" in NODE


def test_the_steps_read_each_setting_that_they_are_given() -> None:
    for name in SETTINGS["rkserve_node_environment"]:
        assert f"${{{name}:-" in NODE, name


def test_each_step_that_is_called_exists() -> None:
    steps = set(re.findall(r"^rkserve-node (\w+)", NODE, re.MULTILINE))
    called = {
        argv[1]
        for _, task in TASKS
        for argv in [(task.get("ansible.builtin.command") or {}).get("argv")]
        if isinstance(argv, list) and argv[0] == "{{ rkserve_node }}"
    }
    assert called >= {"user", "install", "find", "use", "join", "back", "reset"}
    assert called <= steps


def test_options_of_the_command_exist() -> None:
    assert set(SETTINGS["rkserve_join_options"].split()) & options_of(app, "join")
    assert {"--no-start", "--state"} <= options_of(app, "join")
    assert "--state" in options_of(app, "token")
    assert {"--json", "--no-measure", "--user", "--library", "--head"} <= options_of(app, "doctor")


def test_the_services_of_the_units_are_those_of_the_playbooks() -> None:
    names = {unit.stem for unit in UNITS}
    text = "".join(path.read_text(encoding="utf-8") for path in TASK_FILES)
    assert names == {"rkserve-board", "rkserve-clocks", "rkserve-head"}
    for name in names:
        assert name in text
        assert name in NODE


def test_alerts_name_metrics_that_exist() -> None:
    page = (PROJECT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    known = dict(re.findall(r"^\| `(rkserve_\w+)` \| (\w+) \|", page, re.MULTILINE))
    file = ANSIBLE / "roles" / "observability" / "files" / "rkserve-alerts.yml"
    rules = [rule for group in loaded(file)["groups"] for rule in group["rules"]]
    for rule in rules:
        for name in re.findall(r"\brkserve_\w+", rule["expr"]):
            counter = name.removesuffix("_total")
            assert known[counter] == ("counter" if name != counter else "gauge"), name


def test_a_join_is_known_by_the_file_that_join_writes() -> None:
    assert "ray_address" in JoinAnswer.__annotations__
    board = (ANSIBLE / "roles" / "rkserve" / "tasks" / "board.yml").read_text(encoding="utf-8")
    source = (PROJECT / "rkserve" / "bringup" / "board.py").read_text(encoding="utf-8")
    assert "/node/joined.json" in board
    assert '"joined.json"' in source
