"""Keys: where they come from, which open what, and that nothing shows one."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from rkserve.config.router import RouterConfig
from rkserve.core.errors import ConfigError
from rkserve.router.auth import Keys, open_keys


def test_without_any_setting_there_are_no_keys() -> None:
    keys = open_keys(RouterConfig())
    assert keys == Keys()
    assert not keys.is_admin(b"")
    assert not keys.is_client(b"")


def test_keys_are_read_from_files_without_comments_and_blanks(tmp_path: Path) -> None:
    admin, clients = tmp_path / "admin", tmp_path / "clients"
    admin.write_bytes("# rotated in May\n  gehëim  \nsecond line\n".encode())
    clients.write_bytes(b"\n# ours\none\r\n\ttwo\n#three\n")
    keys = open_keys(RouterConfig(admin_key_file=admin, api_keys_file=clients))
    assert keys.is_admin("gehëim".encode())
    assert not keys.is_admin(b"second line")
    assert all(keys.is_client(key) for key in (b"one", b"two"))
    assert not any(keys.is_client(key) for key in (b"three", b"#three", b"# ours", b"", b"one "))
    assert keys.is_client("gehëim".encode()), "the admin key opens everything"
    assert not keys.is_admin(b"one")


def test_the_key_of_the_configuration_goes_before_its_file(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    file.write_text("other")
    keys = open_keys(RouterConfig(admin_key=SecretStr("mine"), admin_key_file=file))
    assert keys.is_admin(b"mine")
    assert not keys.is_admin(b"other")


def test_white_space_around_a_key_is_not_of_the_key() -> None:
    keys = open_keys(RouterConfig(admin_key=SecretStr(" lion\n")))
    assert keys.is_admin(b"lion")
    assert not keys.is_admin(b"lion\n")


@pytest.mark.parametrize("given", ["", " ", "\n"])
def test_an_empty_key_is_refused_rather_than_let_everybody_in(given: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.admin_key is empty"):
        open_keys(RouterConfig(admin_key=SecretStr(given)))


@pytest.mark.parametrize("bad", ["ti\nger", "ti\0ger", "ti\x7fger"])
def test_a_key_that_no_header_can_bring_is_refused_and_not_shown(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.admin_key: .*cannot be printed") as caught:
        open_keys(RouterConfig(admin_key=SecretStr(bad)))
    assert "ger" not in f"{caught.value!r} {caught.value}"


@pytest.mark.parametrize("setting", ["admin_key_file", "api_keys_file"])
def test_a_key_of_a_file_that_no_header_can_bring_is_refused_and_not_shown(
    setting: str, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"ti\0ger\n")
    with pytest.raises(ConfigError, match=rf"router\.{setting}: .*cannot be printed") as caught:
        open_keys(RouterConfig.model_validate({setting: file}))
    assert "ger" not in f"{caught.value!r} {caught.value}"


@pytest.mark.parametrize("setting", ["admin_key_file", "api_keys_file"])
@pytest.mark.parametrize("content", [None, b"", b"# nothing but a comment\n\n"])
def test_a_file_without_a_key_stops_the_router(
    setting: str, content: bytes | None, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=setting):
        open_keys(RouterConfig.model_validate({setting: file}))


def test_nothing_that_is_printed_shows_a_key(tmp_path: Path) -> None:
    file = tmp_path / "clients"
    file.write_text("tiger\n")
    config = RouterConfig(admin_key=SecretStr("lion"), api_keys_file=file)
    shown = f"{open_keys(config)!r} {config!r}"
    assert "lion" not in shown
    assert "tiger" not in shown
