"""Keys: where they come from, which open what, and that nothing shows one."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import SecretStr

from rkserve.config.router import RouterConfig
from rkserve.core.block_hashes import salted
from rkserve.core.errors import ConfigError, RateLimited
from rkserve.core.metrics import RouterMetrics
from rkserve.router.auth import Caller, CallerLimits, Callers, Keys, open_keys


def opens(keys: Keys, key: bytes) -> bool:
    return keys.client(key) is not None or keys.is_admin(key)


def test_without_any_setting_there_are_no_keys() -> None:
    keys = open_keys(RouterConfig())
    assert keys == Keys()
    assert not keys.is_admin(b"")
    assert not opens(keys, b"")


def test_keys_are_read_from_files_without_comments_and_blanks(tmp_path: Path) -> None:
    admin, clients = tmp_path / "admin", tmp_path / "clients"
    admin.write_bytes("# rotated in May\n  gehëim  \nsecond line\n".encode())
    clients.write_bytes(b"\n# ours\none\r\n\ttwo\n#three\n")
    keys = open_keys(RouterConfig(admin_key_file=admin, api_keys_file=clients))
    assert keys.is_admin("gehëim".encode())
    assert not keys.is_admin(b"second line")
    assert all(opens(keys, key) for key in (b"one", b"two"))
    assert not any(opens(keys, key) for key in (b"three", b"#three", b"# ours", b"", b"one "))
    assert opens(keys, "gehëim".encode()), "the admin key opens everything"
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


def test_callers_with_keys_share_no_kv_cache() -> None:
    anybody, one, two = (Caller(name, CallerLimits()) for name in ("", "one", "two"))
    salts = ["", salted("tenant")]
    assert [anybody.salt(salt) for salt in salts] == salts, "as without any keys"
    made = [caller.salt(salt) for caller in (one, two) for salt in salts]
    assert len({*made, *salts}) == 6
    assert one.salt("") == Caller("one", CallerLimits()).salt(""), "at every Router"


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


@pytest.mark.promise(
    "Every call that changes something",
    "It needs the admin key; without one it accepts loopback only",
)
def test_nothing_that_is_printed_shows_a_key(tmp_path: Path) -> None:
    file = tmp_path / "clients"
    file.write_text("tiger\n")
    config = RouterConfig(admin_key=SecretStr("lion"), api_keys_file=file)
    shown = f"{open_keys(config)!r} {config!r}"
    assert "lion" not in shown
    assert "tiger" not in shown


# -- limits of a key ------------------------------------------------------------------------------


def test_requests_per_minute_come_back_evenly() -> None:
    now_s = [0.0]
    caller = Caller("key", CallerLimits(requests_per_minute=60), lambda: now_s[0])
    for _ in range(60):
        caller.enter()
    with pytest.raises(RateLimited, match="60 requests per minute") as caught:
        caller.enter()
    assert caught.value.retry_after_s == 1
    now_s[0] = 1.0
    caller.enter()
    with pytest.raises(RateLimited):
        caller.enter()
    now_s[0] = 1000.0
    for _ in range(60):
        caller.enter()
    with pytest.raises(RateLimited):
        caller.enter()  # no more than a minute's worth is saved up


def test_tokens_may_get_into_debt_which_is_waited_out() -> None:
    now_s = [0.0]
    caller = Caller("key", CallerLimits(tokens_per_minute=600), lambda: now_s[0])
    caller.enter()
    caller.spend(900)
    with pytest.raises(RateLimited, match="600 tokens per minute") as caught:
        caller.enter()
    assert caught.value.retry_after_s == 31, "the debt, and the first token beyond it"
    now_s[0] = 31.0
    caller.enter()


def test_only_so_many_calls_go_on_at_once_and_one_that_is_refused_costs_nothing() -> None:
    caller = Caller("key", CallerLimits(concurrent=2, requests_per_minute=3), lambda: 0.0)
    caller.enter()
    caller.enter()
    for _ in range(5):
        with pytest.raises(RateLimited, match="2 calls at once"):
            caller.enter()
    caller.leave()
    caller.enter()
    caller.leave()
    with pytest.raises(RateLimited, match="3 requests per minute"):
        caller.enter()


def test_a_key_without_limits_is_never_refused() -> None:
    caller = Caller("key", CallerLimits())
    for _ in range(1000):
        caller.enter()
        caller.spend(10_000)


# -- usage ----------------------------------------------------------------------------------------


def test_the_first_keys_are_counted_by_name_and_the_others_together(tmp_path: Path) -> None:
    file = tmp_path / "clients"
    file.write_text("tiger name=team-a\nlion\npuma name=team-c\nlynx name=team-d\n")
    keys = open_keys(RouterConfig(api_keys_file=file))
    metrics = RouterMetrics(CollectorRegistry())
    callers = Callers(keys, metrics, counted_keys=2)
    for key in keys.clients or ():
        caller = callers.of(key)
        caller.enter()
        caller.spend(10)
        caller.spend(completion=3)
        caller.leave()
    callers.anybody.enter()
    found = {
        (sample.name.removeprefix("rkserve_key_"), sample.labels["key"]): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith("rkserve_key_")
    }
    names = {"team-a", "key-2", "(other)", "(none)"}
    assert {name for _, name in found} == names
    assert found["requests_total", "team-a"] == found["requests_total", "(none)"] == 1
    assert found["requests_total", "(other)"] == 2
    assert found["prompt_tokens_total", "key-2"] == 10
    assert found["prompt_tokens_total", "(other)"] == 20
    assert found["completion_tokens_total", "(other)"] == 6
    assert {one.key for one in metrics.usage.rows()} == names
    text = generate_latest(metrics.registry).decode()
    assert not any(secret in text for secret in ("tiger", "lion", "puma", "lynx"))


def test_board_time_is_usage_of_the_key_without_a_limit_too() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    caller = Caller("team", CallerLimits(), usage=metrics.key_usage("team"))
    caller.use_board(2.5)
    caller.use_board(1.0)
    (found,) = metrics.usage.rows()
    assert (found.key, found.board_s, found.requests) == ("team", 3.5, 0)


def test_a_call_that_is_refused_is_no_usage() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    usage = metrics.key_usage("team")
    caller = Caller("team", CallerLimits(concurrent=1), usage=usage)
    caller.enter()
    with pytest.raises(RateLimited):
        caller.enter()
    assert metrics.registry.get_sample_value("rkserve_key_requests_total", {"key": "team"}) == 1
