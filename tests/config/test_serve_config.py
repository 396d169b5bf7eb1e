"""The shipped settings load, and validation errors name the key, the allowed values and the fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.serve_config import (
    PROJECT,
    RkserveConfig,
    config_digest,
    engine_environ,
    explain,
    parse_config,
    resolve_folder,
)
from rkserve.core.errors import ConfigError
from rkserve.core.run_params import SimulatedRelease
from rkserve.models.folder import open_model_folder
from tests.support.values.config_args import REAL, SETTINGS, args

SIMULATED = " or ".join(get_args(SimulatedRelease))


def wrong(given: Any) -> str:
    """Return what is said about wrong settings, without what is said about all of them."""
    with pytest.raises(ConfigError) as caught:
        parse_config(given)
    said = str(caught.value)
    begin, end = "serve_config.yaml, args: ", " docs/reference/configuration.md lists all keys."
    assert said.startswith(begin)
    assert said.endswith(end)
    return said.removeprefix(begin).removesuffix(end)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(
            {},
            "boards: this key is missing; it must be a list with at least one entry, each entry a "
            "block of keys.",
            id="nothing",
        ),
        pytest.param(
            {"boards": []},
            "boards: must be a list with at least one entry, each entry a block of keys, not an "
            "empty list.",
            id="no boards",
        ),
        pytest.param([1], "must be a block of keys, not a list.", id="a list"),
        pytest.param(None, "must be a block of keys, not null.", id="null"),
        pytest.param(
            {**args(), "router": None},
            "router: must be a block of keys, not null.",
            id="a block that was left empty",
        ),
        pytest.param(
            {"boards": ["sim"]},
            "boards[0]: must be a block of keys, not 'sim'.",
            id="text as group",
        ),
        pytest.param(
            {**args(), "bords": 1},
            "bords: unknown key 'bords'; did you mean 'boards'?",
            id="a typo",
        ),
        pytest.param(
            args(simulated={"relase": "1.3.0"}),
            "boards[0].simulated.relase: unknown key 'relase'; did you mean 'release'?",
            id="a typo further down",
        ),
        pytest.param(
            {**args(), "router": {"port": 8000}},
            "router.port: unknown key 'port'; did you mean 'report_s'?",
            id="an unknown key that is a bit like one",
        ),
        pytest.param(
            {**args(), "x": 1},
            "x: unknown key 'x'; the keys here are boards, router, coordinator, catalog, "
            "security, channel, state_dir.",
            id="an unknown key like none",
        ),
        pytest.param(
            dict([*args().items(), (7, 1)]),
            "7: unknown key '7'; the keys here are boards, router, coordinator, catalog, "
            "security, channel, state_dir.",
            id="a number as key",
        ),
        pytest.param(
            args(name="my boards"),
            "boards[0].name: use up to 32 letters, digits and '-', beginning with a letter; not "
            "'my boards'.",
            id="a bad name",
        ),
        pytest.param(args(name=None), "boards[0].name: must be text, not null.", id="no name"),
        pytest.param(args(model=3), "boards[0].model: must be a path, not 3.", id="no path"),
        pytest.param(
            args(queue_limit=-1),
            "boards[0].queue_limit: must be a whole number from 0 to 10000, not -1.",
            id="a negative queue",
        ),
        pytest.param(
            args(queue_limit=1.5),
            "boards[0].queue_limit: must be a whole number from 0 to 10000, not 1.5.",
            id="half a request",
        ),
        pytest.param(
            args(crash_limit=0),
            "boards[0].crash_limit: must be a whole number of at least 1, not 0.",
            id="no crash",
        ),
        pytest.param(
            args(rknpu=2),
            "boards[0].rknpu: must be a number above 0, up to 1, not 2.",
            id="two NPUs",
        ),
        pytest.param(
            {**args(), "router": {"ping_s": 0}},
            "router.ping_s: must be a number above 0, not 0.",
            id="no pause",
        ),
        pytest.param(
            args(queue_timeout_s=float("inf")),
            "boards[0].queue_timeout_s: must be a number above 0, not inf.",
            id="for ever",
        ),
        pytest.param(
            args(load_timeout_s="x" * 100),
            f"boards[0].load_timeout_s: must be a number above 0, not '{'x' * 40}...'.",
            id="long nonsense",
        ),
        pytest.param(
            args(simulated={"load_s": [1]}),
            "boards[0].simulated.load_s: must be a number from 0 to 600, not a list.",
            id="a list for an optional number",
        ),
        pytest.param(
            args(simulated={"strict": "maybe"}),
            "boards[0].simulated.strict: must be true or false, not 'maybe'.",
            id="neither true nor false",
        ),
        pytest.param(
            args(simulated={"release": "1.2.4"}),
            f"boards[0].simulated.release: must be {SIMULATED}, not '1.2.4'.",
            id="a release that is not simulated",
        ),
        pytest.param(
            args(simulated={"release": 1.3}),
            f"boards[0].simulated.release: must be {SIMULATED}, not 1.3.",
            id="a release that YAML reads as a number",
        ),
        pytest.param(
            args(pin_cpus=[0, -4]),
            "boards[0].pin_cpus[1]: must be a whole number of at least 0, not -4.",
            id="a negative core to pin to",
        ),
        pytest.param(
            args(library_cpus=[-1]),
            "boards[0].library_cpus[0]: must be a whole number of at least 0, not -1.",
            id="a negative core for the library",
        ),
        pytest.param(
            args(library_cpus="4-7"),
            "boards[0].library_cpus: must be a list, each entry a whole number of at least 0, not "
            "'4-7'.",
            id="a range of cores",
        ),
        pytest.param(
            args(**REAL),
            "boards[0]: set exactly one of 'library' (NPUs), 'cpu' (llama.cpp), 'simulated' and "
            "'upstream' (a server with OpenAI's API).",
            id="both kinds of board",
        ),
        pytest.param(
            args(simulated=None),
            "boards[0]: set exactly one of 'library' (NPUs), 'cpu' (llama.cpp), 'simulated' and "
            "'upstream' (a server with OpenAI's API).",
            id="neither kind of board",
        ),
        pytest.param(
            {"boards": args()["boards"] * 2},
            "group names must differ; used twice: sim.",
            id="a name twice",
        ),
        pytest.param(
            {"boards": [{"name": name, "model": "m", "cpu": {"share": 0.6}} for name in "ab"]},
            "the shares 'cpu.share' of the groups with 'cpu' add up to 1.2, but every one of these "
            "groups gets a replica on every node; give them 1 at most together.",
            id="more shares than a CPU has",
        ),
        pytest.param(
            {"boards": [{"name": "a", "model": "m", "cpu": {}, "embed_flash": True}]},
            "boards[0]: 'embed_flash' is a setting of NPUs, and the group computes on the CPU "
            "('cpu'); leave it out.",
            id="a setting of NPUs for a CPU",
        ),
        pytest.param(
            {"boards": [{**REAL, "name": "a"}, {**REAL, "name": "b", "rknpu": 0.5}]},
            "the shares 'rknpu' of the groups with a library add up to 1.5 (a: 1, b: 0.5), but "
            "every one of these groups gets a replica on every board; give them 1 at most "
            "together, 0.5 each for example.",
            id="more shares than an NPU has",
        ),
        pytest.param(
            {
                "boards": [
                    {**REAL, "name": name, "rknpu": 0.3, "base_domain_id": number}
                    for name, number in (("a", 1), ("b", 0), ("c", 1))
                ]
            },
            "the groups a and c have the same base_domain_id 1, but they meet on every board, and "
            "each model needs a domain of its own; give each group another number from 0 to 15.",
            id="two models in a domain",
        ),
    ],
)
def test_an_error_says_what_is_wrong_and_what_would_be_right(given: Any, said: str) -> None:
    assert wrong(given) == said


def test_every_wrong_key_is_named_at_once_and_once() -> None:
    group = {"name": "sim", "modle": "m", "simulated": {}, "queue_limit": "many"}
    assert wrong({"boards": [args()["boards"][0], group], "router": {"ping_s": -1}}) == (
        "boards[1].model: this key is missing; it must be a path. "
        "boards[1].queue_limit: must be a whole number from 0 to 10000, not 'many'. "
        "boards[1].modle: unknown key 'modle'; did you mean 'model'? "
        "router.ping_s: must be a number above 0, not -1."
    )


# What pydantic says to programmers.
JARGON = re.compile(
    r"Input|instance of|dictionary|tuple|Value error|validation|pydantic|<class", re.I
)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("given", [None, [], [[]], {}, {"x": 1}, object(), "x", -1e9, b""])
def test_no_wrong_value_of_any_key_is_answered_in_jargon(
    settings: type[BaseModel], given: Any
) -> None:
    said = ""
    for name in settings.model_fields:
        try:
            settings.model_validate({name: given})
        except ValidationError as exc:
            said += explain(exc, settings)
    assert not JARGON.search(said), said
    assert said


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


def test_the_digest_of_a_configuration_depends_on_every_setting_and_on_no_key() -> None:
    one = config_digest(parse_config({**args(), "router": {"admin_key": "lion"}}))
    other = config_digest(parse_config({**args(), "router": {"admin_key": "tiger"}}))
    assert one == other
    assert one != config_digest(parse_config({**args(), "router": {"ping_s": 3}}))
    assert one == config_digest(parse_config({**args(), "router": {"admin_key": "lion"}}))
    assert len(one) == 12


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


def test_a_group_names_a_folder_or_a_model_of_the_catalogue(tmp_path: Path) -> None:
    (tmp_path / "chat").mkdir()
    given = {**args(model="catalog:chat"), "catalog": {"folder": str(tmp_path)}}
    config = parse_config(given)
    (group,) = config.boards
    assert group.catalog_model == "chat"
    assert config.folder_of(group) == tmp_path / "chat"
    (by_path,) = parse_config(args(model=str(tmp_path / "chat"))).boards
    assert by_path.catalog_model is None
    assert config.folder_of(by_path) == tmp_path / "chat"


def test_a_model_that_the_catalogue_lacks_is_named_with_the_command(tmp_path: Path) -> None:
    config = parse_config({**args(model="catalog:chat"), "catalog": {"folder": str(tmp_path)}})
    with pytest.raises(ConfigError, match=f"has no model chat.*--name chat --into {tmp_path}"):
        config.folder_of(config.boards[0])


@pytest.mark.parametrize("model", ["catalog:", "catalog:../chat", "catalog:a/b", "catalog:.chat"])
def test_a_name_behind_catalog_must_be_one_of_a_model(model: str) -> None:
    assert "write the name of a model behind 'catalog:'" in wrong(args(model=model))


def test_a_model_of_the_catalogue_needs_routers_on_the_head() -> None:
    given = {**args(model="catalog:chat"), "router": {"nodes": "any"}}
    assert "set router.nodes to head" in wrong(given)


KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'b' * 43} release"


@pytest.mark.parametrize(
    ("security", "words"),
    [
        pytest.param(
            {"require_signatures": "adapters"},
            "security: require_signatures is 'adapters', and there is no key",
            id="no key",
        ),
        pytest.param({"require_signatures": "some"}, "none or adapters or all", id="a rule"),
        pytest.param({"trusted_keys": ["ssh-rsa AAAA x"]}, "the line of an Ed25519 key", id="RSA"),
        pytest.param({"trusted_keys": [KEY[:-8]]}, "the line of an Ed25519 key", id="no name"),
        pytest.param({"trusted_keys": [f"{KEY}\nx"]}, "the line of an Ed25519 key", id="two lines"),
    ],
)
def test_a_rule_of_signatures_needs_keys_in_openssh_s_form(
    security: dict[str, Any], words: str
) -> None:
    assert words in wrong({**args(), "security": security})


def test_keys_and_a_rule_are_read() -> None:
    security = {"trusted_keys": [KEY], "require_signatures": "all"}
    found = parse_config({**args(), "security": security}).security
    assert (found.trusted_keys, found.require_signatures.value) == ((KEY,), "all")
