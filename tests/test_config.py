"""What serve_config.yaml may say: the shipped files load, and errors name the key and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from rkserve.config import (
    PROJECT,
    BoardGroupConfig,
    PatienceConfig,
    RkserveConfig,
    RouterConfig,
    SimulatedConfig,
    engine_environ,
    parse_config,
    resolve_folder,
)
from rkserve.errors import ConfigError

SETTINGS: tuple[type[BaseModel], ...] = (
    RkserveConfig,
    RouterConfig,
    BoardGroupConfig,
    PatienceConfig,
    SimulatedConfig,
)


def args(**changes: Any) -> dict[str, Any]:
    """Arguments with one group of simulated boards; changes go into the group."""
    return {"boards": [{"name": "sim", "model": "models/sim-chat", "simulated": {}, **changes}]}


def shipped(name: str) -> RkserveConfig:
    """Return the settings of a file of the project."""
    config = yaml.safe_load((PROJECT / name).read_text(encoding="utf-8"))
    (application,) = config["applications"]
    assert application["import_path"] == "rkserve.app:build"
    return parse_config(application["args"])


def test_the_shipped_configuration_simulates_three_boards() -> None:
    (group,) = shipped("serve_config.yaml").boards
    assert group.simulated is not None
    assert (group.simulated.boards, group.simulated.time_scale) == (3, 1.0)
    assert group.simulated.profile == "rk3588-qwen2.5-1.5b-w8a8"
    assert resolve_folder(group.model).is_dir()


def test_the_configuration_for_real_boards_takes_a_whole_npu_each() -> None:
    (group,) = shipped("cluster/serve_config.rk3588.yaml").boards
    assert group.simulated is None
    assert group.library == Path("/usr/lib/librkllmrt.so")
    assert group.rknpu == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param({}, ["boards", "required"], id="nothing"),
        pytest.param({"boards": []}, ["boards", "at least 1"], id="no boards"),
        pytest.param([], ["value", "dictionary"], id="a list"),
        pytest.param(None, ["value", "dictionary"], id="null"),
        pytest.param({**args(), "bords": 1}, ["bords", "not permitted"], id="a typing error"),
        pytest.param(args(modle="x"), ["boards.0.modle", "not permitted"], id="one in a group"),
        pytest.param(args(name="my boards"), ["boards.0.name", "letters"], id="a bad name"),
        pytest.param(args(name=None), ["boards.0.name"], id="no name"),
        pytest.param(args(queue_limit=-1), ["boards.0.queue_limit", "0"], id="a negative queue"),
        pytest.param(args(rknpu=2), ["boards.0.rknpu", "less than or equal to 1"], id="two NPUs"),
        pytest.param(
            args(library="/usr/lib/librkllmrt.so"),
            ["boards.0", "exactly one of library"],
            id="both kinds of board",
        ),
        pytest.param(args(simulated=None), ["boards.0", "exactly one of library"], id="neither"),
        pytest.param(
            args(simulated={"release": "1.2.4"}),
            ["boards.0.simulated.release"],
            id="a release that is not simulated",
        ),
        pytest.param(
            {"boards": args()["boards"] * 2}, ["names must differ", "sim"], id="a name twice"
        ),
        pytest.param(
            {**args(), "router": {"ping_s": 0}}, ["router.ping_s", "greater than 0"], id="router"
        ),
    ],
)
def test_an_error_names_the_key_and_what_it_may_be(given: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(given)
    for word in [*words, "serve_config.yaml", "docs/configuration.md"]:
        assert word in str(caught.value)


def test_every_wrong_key_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"queue_limit.*; .*crash_limit"):
        parse_config(args(queue_limit="many", crash_limit=0))


def test_parsed_settings_pass_through() -> None:
    config = parse_config(args())
    assert parse_config(config) is config


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda model: model.__name__)
def test_settings_are_frozen_closed_and_described(settings: type[BaseModel]) -> None:
    assert settings.model_config["frozen"]
    assert settings.model_config["extra"] == "forbid"
    for name, entry in settings.model_fields.items():
        described = entry.description or isinstance(entry.default, BaseModel)
        assert described, f"{settings.__name__}.{name} has no description"


def test_settings_cannot_be_changed_after_reading() -> None:
    config = parse_config(args())
    with pytest.raises(ValidationError, match="frozen"):
        config.router.ping_s = 1  # type: ignore[misc] # that is the point


def test_folders_are_looked_up_here_and_then_in_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_folder(Path("models/sim-chat")) == PROJECT / "models" / "sim-chat"
    (tmp_path / "models" / "sim-chat").mkdir(parents=True)
    assert resolve_folder(Path("models/sim-chat")) == tmp_path / "models" / "sim-chat"
    assert resolve_folder(Path("/opt/x")) == Path("/opt/x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_folder(Path("~/x")) == tmp_path / "x"


def test_a_real_board_s_engine_gets_no_simulator_settings() -> None:
    group = BoardGroupConfig(name="r", model=Path("m"), library=Path("l.so"))
    assert set(engine_environ(group, "r@host")) == {"RKLLM_LOG_LEVEL"}


@pytest.mark.parametrize(
    ("simulated", "expected"),
    [
        pytest.param(
            {"time_scale": 0.05},
            {"RKSIM_TIME_SCALE": "0.05", "RKSIM_STRICT": "0"},
            id="a time scale",
        ),
        pytest.param({"load_s": 0.2}, {"RKSIM_LOAD_MS": "200.0"}, id="a load time"),
        pytest.param({"strict": True}, {"RKSIM_STRICT": "1"}, id="strict"),
        pytest.param(
            {"control_dir": "/c"}, {"RKSIM_CONTROL": "/c/sim-1.control"}, id="a control folder"
        ),
        pytest.param({"profile": "other"}, {"RKSIM_PROFILE": "other"}, id="a profile"),
    ],
)
def test_a_simulated_board_s_engine_gets_its_settings(
    simulated: dict[str, Any], expected: dict[str, str]
) -> None:
    (group,) = parse_config(args(simulated=simulated)).boards
    environ = engine_environ(group, "sim-1")
    assert environ | expected == environ
    if "load_s" not in simulated:
        assert "RKSIM_LOAD_MS" not in environ
    if "control_dir" not in simulated:
        assert "RKSIM_CONTROL" not in environ


def test_operators_may_raise_the_library_s_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = parse_config(args()).boards
    monkeypatch.delenv("RKLLM_LOG_LEVEL", raising=False)
    assert engine_environ(group, "sim-0")["RKLLM_LOG_LEVEL"] == "0"
    monkeypatch.setenv("RKLLM_LOG_LEVEL", "2")
    assert engine_environ(group, "sim-0")["RKLLM_LOG_LEVEL"] == "2"
