"""Answers by their keys on the disk of one node: who makes them, and what outlives that process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rkserve.config.router import IdempotencyConfig
from rkserve.core.errors import IdempotencyFailed
from rkserve.router.idempotency.store import (
    FILE,
    AnswerStore,
    KeyState,
    name_of,
)
from tests.support.boards.own_time import SetClock

NAME, DIGEST = name_of("owner", "key"), "d" * 64
HEADERS = {"content-type": "application/json"}
HOUR_S = 3600.0


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


def opened(folder: Path, clock: SetClock, **config: float) -> AnswerStore:
    return AnswerStore(folder / "kept", IdempotencyConfig.model_validate(config), clock=clock)


@pytest.fixture
def store(tmp_path: Path, clock: SetClock) -> Iterator[AnswerStore]:
    one = opened(tmp_path, clock)
    yield one
    one.close()


@pytest.fixture
def other(tmp_path: Path, clock: SetClock, store: AnswerStore) -> Iterator[AnswerStore]:
    """The store of another Router of the node."""
    two = opened(tmp_path, clock)
    yield two
    two.close()


def test_keys_of_two_callers_are_two() -> None:
    assert len({name_of("a", "key"), name_of("b", "key"), name_of("a", "other")}) == 3


def test_a_key_is_made_by_one_router_and_its_answer_is_that_of_all(
    store: AnswerStore, other: AnswerStore
) -> None:
    assert store.claim(NAME, DIGEST).state is KeyState.OWN
    assert other.claim(NAME, DIGEST).state is KeyState.RUNNING
    store.finish(NAME, HEADERS, b"the answer")
    for one in (store, other):
        found = one.claim(NAME, DIGEST)
        assert (found.state, found.headers, found.body) == (KeyState.DONE, HEADERS, b"the answer")


def test_a_key_that_was_freed_without_an_answer_is_anybody_s(
    store: AnswerStore, other: AnswerStore
) -> None:
    store.claim(NAME, DIGEST)
    other.release(NAME)  # it is not that one's
    assert other.claim(NAME, DIGEST).state is KeyState.RUNNING
    store.release(NAME)
    assert other.claim(NAME, "e" * 64).state is KeyState.OWN


def test_another_request_with_the_key_is_refused_while_the_answer_is_made_and_after(
    store: AnswerStore, other: AnswerStore
) -> None:
    store.claim(NAME, DIGEST)
    assert other.claim(NAME, "e" * 64).state is KeyState.REUSED
    store.finish(NAME, HEADERS, b"x")
    assert other.claim(NAME, "e" * 64).state is KeyState.REUSED
    assert other.claim(name_of("owner", "another"), "e" * 64).state is KeyState.OWN


HOLDER = """
import sys
from pathlib import Path
from rkserve.config.router import IdempotencyConfig
from rkserve.router.idempotency.store import AnswerStore
store = AnswerStore(Path(sys.argv[1]), IdempotencyConfig())
for name, digest in zip(sys.argv[2::2], sys.argv[3::2]):
    print(store.claim(name, digest).state.name, flush=True)
store.finish(sys.argv[2], {}, b"done before")
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_router_leaves_its_answers_and_frees_its_keys(
    tmp_path: Path, store: AnswerStore
) -> None:
    done, lost = name_of("owner", "done"), name_of("owner", "lost")
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "kept"), done, DIGEST, lost, DIGEST]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert [holder.stdout.readline() for _ in range(2)] == [b"OWN\n"] * 2
        assert store.claim(lost, DIGEST).state is KeyState.RUNNING
        while store.claim(done, DIGEST).state is KeyState.RUNNING:
            pass
        holder.kill()
        holder.wait()
    assert store.claim(done, DIGEST).body == b"done before"
    assert store.claim(lost, DIGEST).state is KeyState.OWN


def test_an_answer_is_forgotten_after_its_time(store: AnswerStore, clock: SetClock) -> None:
    store.claim(NAME, DIGEST)
    store.finish(NAME, HEADERS, b"x")
    clock.now_s += HOUR_S - 1
    assert store.claim(NAME, DIGEST).state is KeyState.DONE
    clock.now_s += 1
    assert store.claim(NAME, "e" * 64).state is KeyState.OWN
    store.release(NAME)
    store.sweep()
    assert store._database.execute("SELECT count(*) FROM answers").fetchone() == (0,)


def test_an_answer_that_is_too_long_is_noted_and_not_made_again(
    tmp_path: Path, clock: SetClock
) -> None:
    store = opened(tmp_path, clock, max_answer_bytes=1024)
    for name, body in ((NAME, b"x" * 1025), (name_of("owner", "cut off"), None)):
        store.claim(name, DIGEST)
        store.finish(name, HEADERS, body)
        assert store.claim(name, DIGEST).state is KeyState.TOO_LONG
    store.close()


def test_the_oldest_answers_go_first_and_those_that_are_made_stay(
    tmp_path: Path, clock: SetClock
) -> None:
    store = opened(tmp_path, clock, max_answers=10)
    running = name_of("owner", "running")
    store.claim(running, DIGEST)
    names = [name_of("owner", str(number)) for number in range(12)]
    for name in names:
        clock.now_s += 1
        store.claim(name, DIGEST)
        store.finish(name, HEADERS, b"x")
    kept = [name for name in names if store._look(name, DIGEST).state is KeyState.DONE]
    assert kept == names[-len(kept) :]
    assert 8 <= len(kept) <= 10
    assert store._look(running, DIGEST).state is KeyState.RUNNING
    store.close()


def test_a_request_that_waits_at_another_router_is_known_for_a_while(
    store: AnswerStore, other: AnswerStore, clock: SetClock
) -> None:
    store.claim(NAME, DIGEST)
    assert not store.is_wanted(NAME)
    other.claim(NAME, DIGEST)
    assert store.is_wanted(NAME)
    clock.now_s += 10
    assert not store.is_wanted(NAME)


def test_looks_of_a_request_that_waits_write_at_most_once_a_second(
    store: AnswerStore, other: AnswerStore, clock: SetClock
) -> None:
    store.claim(NAME, DIGEST)
    before = other._database.total_changes
    for _ in range(20):  # as often as Routers look, for five seconds
        assert other.claim(NAME, DIGEST).state is KeyState.RUNNING
        assert store.is_wanted(NAME)
        clock.now_s += 0.25
    assert 3 <= other._database.total_changes - before <= 6


def test_a_key_that_one_process_holds_has_no_second_owner_in_it(store: AnswerStore) -> None:
    first, second = object(), object()
    assert store.claim(NAME, DIGEST, first).state is KeyState.OWN
    assert store.claim(NAME, DIGEST, second).state is KeyState.RUNNING
    store.release(NAME, second)  # it is not that one's
    assert store.claim(NAME, DIGEST, second).state is KeyState.RUNNING
    store.release(NAME, first)
    assert store.claim(NAME, DIGEST, second).state is KeyState.OWN


def test_a_damaged_file_is_an_error_and_no_second_answer(tmp_path: Path, clock: SetClock) -> None:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    (folder / FILE).write_bytes(b"no database, but long enough to be looked at" * 20)
    with pytest.raises(IdempotencyFailed):
        opened(tmp_path, clock)
