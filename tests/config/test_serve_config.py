"""What serve_config.yaml may say: the shipped files load, and errors name the key and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from rkserve.config.board_group import (
    BoardGroupConfig,
)
from rkserve.config.serve_config import (
    PROJECT,
    RkserveConfig,
    engine_environ,
    parse_config,
    resolve_folder,
)
from rkserve.core.errors import ConfigError
from rkserve.models.folder import open_model_folder
from tests.support.values.config_args import SETTINGS, args


def shipped(name: str) -> RkserveConfig:
    """Return the settings of a file of the project."""
    config = yaml.safe_load((PROJECT / name).read_text(encoding="utf-8"))
    (application,) = config["applications"]
    assert application["import_path"] == "rkserve.app:build"
    return parse_config(application["args"])


def test_the_shipped_configuration_has_a_model_of_each_kind() -> None:
    groups = shipped("serve_config.yaml").boards
    folders = [open_model_folder(resolve_folder(group.model)) for group in groups]
    assert [folder.id for folder in folders] == ["sim-chat", "sim-embed"]
    assert [folder.settings.embedding is not None for folder in folders] == [False, True]
    group = groups[0]
    assert group.simulated is not None
    assert (group.simulated.boards, group.simulated.time_scale) == (3, 1.0)
    assert group.simulated.profile == "rk3588-qwen2.5-1.5b-w8a8"
    assert resolve_folder(group.model).is_dir()


def test_the_configuration_with_images_has_a_model_that_sees() -> None:
    (group,) = shipped("serve_config.vision.yaml").boards
    assert open_model_folder(resolve_folder(group.model)).settings.vision is not None


def test_the_configuration_for_real_boards_takes_a_whole_npu_each() -> None:
    (group,) = shipped("cluster/serve_config.rk3588.yaml").boards
    assert group.simulated is None
    assert group.library == Path("/usr/lib/librkllmrt.so")
    assert group.rknpu == 1


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


def test_folders_are_looked_up_here_and_then_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_folder(Path("models/sim-chat")) == PROJECT / "models" / "sim-chat"
    (tmp_path / "models" / "sim-chat").mkdir(parents=True)
    assert resolve_folder(Path("models/sim-chat")) == tmp_path / "models" / "sim-chat"
    assert resolve_folder(Path("/opt/x")) == Path("/opt/x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_folder(Path("~/x")) == tmp_path / "x"


def test_an_installed_package_has_no_models_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, here = tmp_path / "site-packages", tmp_path / "here"
    (packages / "models" / "m").mkdir(parents=True)  # of some other package
    here.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(ConfigError) as caught:
        resolve_folder(Path("models/m"), packages)
    assert str(caught.value) == (
        f"The model folder models/m does not exist; it was looked up in {here}. Check `model` in "
        "the config, and best give the whole path."
    )
    (packages / "pyproject.toml").write_text("", encoding="utf-8")  # a checkout after all
    assert resolve_folder(Path("models/m"), packages) == packages / "models" / "m"
    with pytest.raises(ConfigError, match=f"looked up in {here} and in {packages}. Check"):
        resolve_folder(Path("models/n"), packages)


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
        pytest.param(
            {"control_dir": "~/c"},
            {"RKSIM_CONTROL": f"{Path.home()}/c/sim-1.control"},
            id="a control folder at home",
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


def test_the_admin_key_comes_from_the_environment_and_is_never_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RKSERVE_ADMIN_KEY", "s3cret")
    config = parse_config(args())
    assert config.router.admin_key is not None
    assert config.router.admin_key.get_secret_value() == "s3cret"
    assert "s3cret" not in repr(config)


def test_the_file_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSERVE_ADMIN_KEY", "from the environment")
    config = parse_config({**args(), "router": {"admin_key": "from the file"}})
    assert config.router.admin_key is not None
    assert config.router.admin_key.get_secret_value() == "from the file"


def test_the_newline_at_the_end_of_a_mounted_secret_is_not_of_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RKSERVE_ADMIN_KEY", "s3cret\n")
    config = parse_config(args())
    assert config.router.admin_key is not None
    assert config.router.admin_key.get_secret_value() == "s3cret"
    monkeypatch.setenv("RKSERVE_ADMIN_KEY", " \n")
    assert parse_config(args()).router.admin_key is None


@pytest.mark.parametrize(
    ("set_to", "expected"),
    [
        pytest.param(None, "~/.local/share/rkserve", id="unset"),
        pytest.param("", "~/.local/share/rkserve", id="empty"),
        pytest.param("some/where", "~/.local/share/rkserve", id="relative, which is to be ignored"),
        pytest.param("/srv/data", "/srv/data/rkserve", id="absolute"),
    ],
)
def test_the_ledger_is_where_a_user_s_programs_keep_their_data(
    monkeypatch: pytest.MonkeyPatch, set_to: str | None, expected: str
) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    if set_to is not None:
        monkeypatch.setenv("XDG_DATA_HOME", set_to)
    assert parse_config(args()).coordinator.data_dir == Path(expected)
