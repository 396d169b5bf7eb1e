"""The keys of a Router: where they come from, which open what, and that nothing shows one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from rkserve.config.router import RouterConfig
from rkserve.core.api_keys import (
    ApiKey,
    CallerLimits,
    KeyScope,
    KeyTable,
    digest_of,
    granted,
)
from rkserve.core.errors import ConfigError, KeysUnknown, TooManyWrongKeys
from rkserve.router.auth.key_ring import (
    MOST_ADDRESSES,
    WRONG_KEYS,
    KeyRing,
    Keys,
    WrongKeys,
    open_keys,
)

NOW_S = 1000.0


def opens(keys: Keys, key: bytes) -> bool:
    return KeyRing(keys).find(key) is not None


def is_admin(keys: Keys, key: bytes) -> bool:
    found = KeyRing(keys).find(key)
    return found is not None and KeyScope.ADMIN in found.scopes


def test_without_any_setting_there_are_no_keys() -> None:
    keys = open_keys(RouterConfig())
    assert keys == Keys()
    assert not is_admin(keys, b"")
    assert not opens(keys, b"")


def test_keys_are_read_from_files_without_comments_and_blanks(tmp_path: Path) -> None:
    admin, clients = tmp_path / "admin", tmp_path / "clients"
    admin.write_bytes("# rotated in May\n  gehëim  \nsecond line\n".encode())
    clients.write_bytes(b"\n# ours\none\r\n\ttwo\n#three\n")
    keys = open_keys(RouterConfig(admin_key_file=admin, api_keys_file=clients))
    assert is_admin(keys, "gehëim".encode())
    assert not is_admin(keys, b"second line")
    assert all(opens(keys, key) for key in (b"one", b"two"))
    assert not any(opens(keys, key) for key in (b"three", b"#three", b"# ours", b"", b"one "))
    assert opens(keys, "gehëim".encode()), "the admin key opens everything"
    assert not is_admin(keys, b"one")


def test_the_key_of_the_configuration_goes_before_its_file(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    file.write_text("other")
    keys = open_keys(RouterConfig(admin_key=SecretStr("mine"), admin_key_file=file))
    assert is_admin(keys, b"mine")
    assert not is_admin(keys, b"other")


def test_white_space_around_a_key_is_not_of_the_key() -> None:
    keys = open_keys(RouterConfig(admin_key=SecretStr(" lion\n")))
    assert is_admin(keys, b"lion")
    assert not is_admin(keys, b"lion\n")


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


# -- keys of the cluster --------------------------------------------------------------------------


def key(secret: str = "one", **changes: object) -> ApiKey:
    """A key of the cluster."""
    made = ApiKey(f"key_{secret}", secret, digest_of(secret.encode()).hex(), "", (KeyScope.INFER,))
    return replace(made, **changes)  # type: ignore[arg-type] # names of its fields


def ring(*keys: ApiKey, **options: object) -> KeyRing:
    """Return the ring of a Router that knows these keys."""
    table = KeyTable(len(keys), keys)
    given = {"table": table, "now_s": lambda: NOW_S, **options}
    return KeyRing(Keys(), **given)  # type: ignore[arg-type] # names of its parameters


def test_a_key_of_the_cluster_opens_its_scopes_until_it_is_revoked() -> None:
    it = ring(key("one", scopes=(KeyScope.OPERATE,)), key("two"))
    found = it.find(b"one")
    assert found is not None
    assert found.scopes == {KeyScope.OPERATE, KeyScope.READ}
    assert it.find(b"three") is None
    it.take(KeyTable(3, (key("two"),)))
    assert it.find(b"one") is None
    assert it.find(b"two") is not None


@pytest.mark.parametrize(
    ("expires_s", "good"),
    [(None, True), (NOW_S + 0.1, True), (NOW_S, False), (NOW_S - 1, False)],
)
def test_a_key_that_has_expired_opens_nothing(expires_s: float | None, good: bool) -> None:
    assert (ring(key(expires_s=expires_s)).find(b"one") is not None) is good


def test_after_a_rotation_the_earlier_secret_is_good_for_the_time_of_grace() -> None:
    now_s = [NOW_S]
    old = digest_of(b"old").hex()
    rotated = key(previous=old, previous_until_s=NOW_S + 10, expires_s=NOW_S + 20)
    it = ring(rotated, now_s=lambda: now_s[0])
    assert it.find(b"old") is not None
    now_s[0] += 10
    assert it.find(b"old") is None
    assert it.find(b"one") is not None
    sooner = replace(rotated, previous_until_s=NOW_S + 99)
    now_s[0] = NOW_S + 30
    it.take(KeyTable(9, (sooner,)))
    assert it.find(b"old") is None, "it does not outlive its key"


def test_keys_of_files_and_the_admin_key_work_beside_those_of_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("tiger name=team\n")
    configured = open_keys(RouterConfig(admin_key=SecretStr("lion"), api_keys_file=file))
    it = KeyRing(configured, table=KeyTable(1, (key(),)), now_s=lambda: NOW_S)
    found = {secret: it.find(secret) for secret in (b"tiger", b"lion", b"one")}
    assert {secret: set(grant.scopes) for secret, grant in found.items() if grant} == {
        b"tiger": {KeyScope.INFER, KeyScope.READ},
        b"lion": set(KeyScope),
        b"one": {KeyScope.INFER},
    }
    it.take(KeyTable(2))
    assert it.find(b"tiger") is not None


@pytest.mark.parametrize(
    ("options", "anonymous"),
    [
        pytest.param({}, True, id="this machine, and there never was a key"),
        pytest.param({"local_only": False}, False, id="the network"),
        pytest.param({"local_only": False, "open_to_all": True}, True, id="open on purpose"),
        pytest.param({"table": KeyTable(2)}, False, id="all keys were revoked"),
        pytest.param({"table": KeyTable(1, (key(),))}, False, id="there is a key"),
        pytest.param({"table": None}, False, id="the keys are not known yet"),
    ],
)
def test_callers_without_a_key(options: dict[str, object], anonymous: bool) -> None:
    assert ring(**options).anonymous is anonymous


def test_a_file_of_keys_closes_the_service_to_callers_without_one(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("tiger\n")
    assert not KeyRing(open_keys(RouterConfig(api_keys_file=file))).anonymous


@pytest.mark.parametrize(
    ("keys", "trusted"),
    [
        pytest.param((), True, id="no key"),
        pytest.param((key(),), True, id="keys that may not operate"),
        pytest.param((key(scopes=(KeyScope.OPERATE,)),), False, id="a key that may operate"),
        pytest.param((key(scopes=(KeyScope.ADMIN,)),), False, id="a key that may do everything"),
    ],
)
def test_this_machine_controls_the_cluster_as_long_as_no_key_does(
    keys: tuple[ApiKey, ...], trusted: bool
) -> None:
    assert ring(*keys).trusts_this_machine is trusted
    assert not KeyRing(Keys(admin=digest_of(b"x"))).trusts_this_machine


def test_before_the_keys_are_known_a_foreign_key_is_not_called_wrong() -> None:
    it = ring(table=None)
    with pytest.raises(KeysUnknown):
        it.find(b"one")
    with pytest.raises(KeysUnknown):
        it.require_known()
    assert not it.trusts_this_machine
    it.take(KeyTable(1, (key(),)))
    it.require_known()
    assert it.find(b"one") is not None


def test_only_the_cluster_s_keys_have_a_last_use(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("tiger\n")
    it = KeyRing(
        open_keys(RouterConfig(api_keys_file=file)),
        table=KeyTable(1, (key(),)),
        now_s=lambda: NOW_S,
    )
    for secret in (b"tiger", b"one", b"wrong"):
        it.find(secret)
    used = it.take_used()
    assert used == {"key_one": NOW_S}
    assert it.take_used() == {}
    it.put_back(used)
    assert it.take_used() == used


def test_keys_without_a_limit_of_board_time_have_the_configured_one() -> None:
    own = key("two", limits=CallerLimits(board_seconds_per_minute=7))
    it = ring(key(), own, usual=600)
    found = [it.find(secret) for secret in (b"one", b"two")]
    limits = [one and one.key and one.key.limits.board_seconds_per_minute for one in found]
    assert limits == [600, 7]


def test_operate_includes_read_and_admin_everything() -> None:
    assert granted([KeyScope.OPERATE]) == {KeyScope.OPERATE, KeyScope.READ}
    assert granted([KeyScope.ADMIN]) == set(KeyScope)
    assert granted([KeyScope.INFER]) == {KeyScope.INFER}


# -- wrong keys -----------------------------------------------------------------------------------


def test_an_address_may_send_twenty_wrong_keys_a_minute() -> None:
    now_s = [0.0]
    wrong = WrongKeys(lambda: now_s[0])
    for _ in range(WRONG_KEYS):
        wrong.count("a")
    with pytest.raises(TooManyWrongKeys) as caught:
        wrong.count("a")
    assert caught.value.retry_after_s == 3
    wrong.count("b")
    now_s[0] = 3.0
    wrong.count("a")
    with pytest.raises(TooManyWrongKeys):
        wrong.count("a")
    now_s[0] = 1000.0
    for _ in range(WRONG_KEYS):
        wrong.count("a")
    with pytest.raises(TooManyWrongKeys):
        wrong.count("a")


def test_the_memory_of_wrong_keys_is_constant_and_the_longest_idle_address_is_forgotten() -> None:
    wrong = WrongKeys(lambda: 0.0)
    for address in ("busy", "idle"):
        for _ in range(WRONG_KEYS):
            wrong.count(address)
    for number in range(MOST_ADDRESSES - 1):
        wrong.count(str(number))
        with pytest.raises(TooManyWrongKeys):
            wrong.count("busy")
    assert len(wrong._buckets) == MOST_ADDRESSES
    wrong.count("idle")
