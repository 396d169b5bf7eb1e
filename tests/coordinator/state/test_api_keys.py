"""The cluster's keys at the Coordinator: what it stores, and how Routers get it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rkserve.control.keys import (
    CreateKey,
    KeyChange,
    KeyRequest,
    RevokeKey,
    RotateKey,
    SecretDigest,
)
from rkserve.coordinator.state.api_keys import (
    SAVE_USED_S,
    SETTLE_S,
    KeyKeeper,
    create_offline,
    has_keys,
)
from rkserve.coordinator.state.ledger import MIGRATIONS, Ledger
from rkserve.coordinator.state.ledger_files import FILE
from rkserve.core.api_keys import KeyScope, KeyTable
from rkserve.core.errors import KeyExists, LedgerFailed, RequestError

pytestmark = pytest.mark.virtual_time

DIGEST = "ab" * 32
CREATE = CreateKey("team", (KeyScope.INFER,), ("m",))


def call(what: KeyChange = CREATE, key: str | None = None, digest: str = DIGEST) -> KeyRequest:
    return KeyRequest(what, SecretDigest(digest, "rks-..."), "ann 192.0.2.7", key)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger.open(tmp_path)) as made:
        yield made


async def test_keys_survive_a_restart_with_their_revision(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        keeper = KeyKeeper(ledger)
        assert keeper.table == KeyTable()
        made = keeper.change(call())
        other = keeper.change(call(CreateKey("other", (KeyScope.ADMIN,)), digest="cd" * 32))
        rotated = keeper.change(call(RotateKey(made.key.id, 60.0), digest="ef" * 32))
        table = keeper.table
        assert table == KeyTable(3, (rotated.key, other.key))
    with closing(Ledger.open(tmp_path)) as ledger:
        keeper = KeyKeeper(ledger)
        assert keeper.table == table
        keeper.change(call(RevokeKey(other.key.id)))
    with closing(Ledger.open(tmp_path)) as ledger:
        assert KeyKeeper(ledger).table == KeyTable(4, (rotated.key,))


async def test_each_change_is_in_the_audit_log_and_the_file_has_no_secret(ledger: Ledger) -> None:
    keeper = KeyKeeper(ledger, lambda: 7.0)
    key = keeper.change(call()).key
    with pytest.raises(KeyExists):
        keeper.change(call())
    keeper.change(call(RotateKey(key.id), digest="cd" * 32))
    keeper.change(call(RevokeKey(key.id)))
    lines = ledger.audit()[::-1]
    kinds = [(one.kind, one.outcome, one.status) for one in lines]
    assert kinds == [
        ("key_create", "succeeded", 200),
        ("key_create", "key_exists", 409),
        ("key_rotate", "succeeded", 200),
        ("key_revoke", "succeeded", 200),
    ]
    assert {one.who for one in lines} == {"ann 192.0.2.7"}
    assert lines[0].params == {
        "id": key.id,
        "name": "team",
        "scopes": ["infer"],
        "models": ["m"],
    }
    assert DIGEST not in str(lines)


async def test_a_repeated_call_is_answered_as_the_first_and_changes_nothing(
    ledger: Ledger,
) -> None:
    keeper = KeyKeeper(ledger)
    first = keeper.change(call(key="once"))
    again = keeper.change(call(key="once", digest="cd" * 32))
    assert (again.key, again.applied) == (first.key, False)
    assert len(keeper.table.keys) == 1
    with pytest.raises(RequestError, match="Idempotency-Key"):
        keeper.change(call(RevokeKey(first.key.id), key="once"))
    done = keeper.change(call(RevokeKey(first.key.id), key="twice"))
    repeated = KeyKeeper(ledger).change(call(RevokeKey(first.key.id), key="twice"))
    assert (done.applied, repeated.applied, repeated.key) == (True, False, first.key)


async def test_a_change_that_cannot_be_stored_is_not_in_force(ledger: Ledger) -> None:
    keeper = KeyKeeper(ledger)
    key = keeper.change(call()).key
    ledger._database.execute("PRAGMA query_only = ON")
    with pytest.raises(LedgerFailed):
        keeper.change(call(RevokeKey(key.id)))
    assert keeper.table == KeyTable(1, (key,))


async def poll(keeper: KeyKeeper, router: str, has: list[KeyTable]) -> None:
    """Follow the keys as a Router does."""
    while True:
        has.append(await keeper.after(router, has[-1].revision if has else -1, 20.0, {}))


async def test_a_change_is_answered_when_every_router_has_it(ledger: Ledger) -> None:
    keeper = KeyKeeper(ledger)
    key = keeper.change(call()).key
    seen: list[list[KeyTable]] = [[], []]
    tasks = [asyncio.create_task(poll(keeper, str(number), has)) for number, has in enumerate(seen)]
    await asyncio.sleep(1.0)
    began_s = asyncio.get_running_loop().time()
    outcome = await keeper.perform(call(RevokeKey(key.id)))
    assert outcome.routers_behind == 0
    assert [has[-1] for has in seen] == [KeyTable(2)] * 2
    assert asyncio.get_running_loop().time() - began_s < SETTLE_S
    for task in tasks:
        task.cancel()


async def test_a_router_that_does_not_answer_delays_a_change_by_a_second_and_is_counted(
    ledger: Ledger,
) -> None:
    keeper = KeyKeeper(ledger)
    await keeper.after("gone", -1, 0.0, {})
    outcome = await keeper.perform(call(key="once"))
    assert (outcome.applied, outcome.routers_behind) == (True, 1)
    await keeper.after("gone", 1, 0.0, {})
    assert (await keeper.perform(call(key="once"))).routers_behind == 0
    assert keeper.table.key(outcome.key.id) is not None


async def test_a_poll_ends_without_a_change(ledger: Ledger) -> None:
    keeper = KeyKeeper(ledger)
    assert await keeper.after("one", 0, 20.0, {}) == KeyTable()
    assert asyncio.get_running_loop().time() >= 20.0


async def test_after_a_lost_ledger_routers_take_the_keys_of_the_other_one(ledger: Ledger) -> None:
    keeper = KeyKeeper(ledger)
    found = await keeper.after("one", 41, 20.0, {})
    assert found == KeyTable(42)


async def test_the_last_use_is_stored_once_a_minute(ledger: Ledger) -> None:
    now_s = [1000.0]
    keeper = KeyKeeper(ledger, lambda: now_s[0])
    key = keeper.change(call()).key
    assert keeper.listed() == [(key, None)]
    await keeper.after("one", -1, 0.0, {key.id: 900.0, "key_unknown": 1.0})
    await keeper.after("two", -1, 0.0, {key.id: 800.0})
    assert keeper.listed() == [(key, 900.0)]
    keeper.save_used()
    assert KeyKeeper(ledger).listed() == [(key, None)]
    now_s[0] += SAVE_USED_S
    keeper.save_used()
    assert KeyKeeper(ledger).listed() == [(key, 900.0)]


def test_a_key_is_made_before_there_is_a_coordinator(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert not has_keys(folder)
    made = create_offline(folder, call())
    assert has_keys(folder)
    with closing(Ledger.open(folder)) as ledger:
        assert KeyKeeper(ledger).table.keys == (made.key,)
        assert has_keys(folder), "also while a Coordinator has it open"
        with pytest.raises(LedgerFailed, match="in use"):
            create_offline(folder, call())


def test_a_ledger_of_an_earlier_release_has_no_keys(tmp_path: Path) -> None:
    Ledger.open(tmp_path, migrations=MIGRATIONS[:3]).close()
    assert not has_keys(tmp_path)
    with closing(Ledger.open(tmp_path)) as ledger:
        assert KeyKeeper(ledger).table == KeyTable()


def test_a_ledger_that_cannot_be_read_is_no_ledger_without_keys(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)
    with pytest.raises(LedgerFailed, match="cannot be read"):
        has_keys(tmp_path)
