"""Prompt caches on one board: parked conversations, named caches, and what a runtime forbids."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.engine.protocol import EntryCommand, RunEnded
from rkserve.board.operations.report import IDLE_S
from rkserve.board.run.job import RunSpec
from rkserve.board.storage.prompt_cache import CachedFile, CacheFingerprint, CacheHit, CacheStore
from rkserve.core.block_hashes import salted
from rkserve.core.board_report import BoardState, KvReport
from rkserve.core.errors import (
    BoardFailed,
    BoardOutOfOrder,
    CacheNotFound,
    CacheUnsupported,
    CallFailed,
    ContextOverflow,
    EngineDied,
    RequestError,
    RunFailed,
)
from rkserve.core.messages import ControlAction, Finished, FinishReason, Kv
from rkserve.native.runtime import Perf, RunEnd
from tests.support.boards.board_bench import (
    SETTINGS,
    Bench,
    Listener,
    request,
    spoken,
    talker,
    until,
)
from tests.support.boards.fakes import FakeEngine, Script
from tests.support.boards.own_time import run_loop

pytestmark = pytest.mark.virtual_time

LENGTH = 6
TALK = Script([], model=talker(LENGTH))
A, B, C, D = (tuple(range(first, first + 20)) for first in (100, 200, 300, 400))
CACHES = {"prompt_cache_save_with_history": True}
STOP = FinishReason.STOP
SALT = salted("tenant")


class CacheBench(Bench):
    """A board with a store of its own; everything its engines say is thought, not scripted."""

    def __init__(self, folder: Path, *scripts: Script, **extra: Any) -> None:
        self.store = CacheStore(folder, CacheFingerprint("m", "r"), 1 << 20)
        self.load_s = extra.pop("load_s", 0.0)
        limits = {
            "caches": self.store,
            "park_min_tokens": 10,
            "disk_bytes_per_s": 1e12,
            **extra.pop("limits", {}),
        }
        settings = replace(SETTINGS, **limits)
        quirks: Mapping[str, bool] = {**CACHES, **extra.pop("quirks", {})}
        super().__init__(*scripts, settings=settings, quirks=quirks, **extra)

    async def _start(self, weights: Path | None) -> FakeEngine:
        engine = await super()._start(weights)
        engine.facts = replace(engine.facts, load_s=self.load_s)
        return engine

    def _next(self, command: Any) -> Script:
        return self.scripts.pop(0) if self.scripts else TALK

    async def ask(self, ids: tuple[int, ...], **extra: Any) -> Finished:
        client = Listener(self.board, request(*ids, max_tokens=20, **extra))
        assert await client.end() == (spoken(ids, LENGTH), STOP)
        await until(lambda: self.board.report().running == 0)
        await self.board.caching.settled()
        assert client.finished is not None
        return client.finished


def cache_test(
    body: Callable[[CacheBench], Any], folder: Path, *scripts: Script, **extra: Any
) -> None:
    async def main() -> None:
        bench = CacheBench(folder, *scripts, **extra)
        await bench.board.start()
        try:
            await body(bench)
            assert bench.state is BoardState.READY
            assert (bench.board.report().running, bench.board.report().queued) == (0, 0)
        finally:
            await bench.board.stop()

    run_loop(main())


def files(folder: Path, pattern: str) -> list[Path]:
    return list(folder.rglob(pattern))


def follow_up(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the next turn: the prompt, the answer, and something new."""
    return (*ids, *map(int, spoken(ids, LENGTH).split()), 7, 8)


class SlowDisk(CacheStore):
    """A disk on which publishing takes until ``done`` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, CacheFingerprint("m", "r"), 1 << 20)
        self.done = threading.Event()

    def commit(
        self,
        path: Path,
        ids: Sequence[int],
        name: str | None = None,
        origin: str | None = None,
        *,
        sha256: str | None = None,
    ) -> CachedFile:
        assert self.done.wait(20)
        return super().commit(path, ids, name, origin, sha256=sha256)


# -- parking ----------------------------------------------------------------------------------


def test_a_conversation_is_parked_for_another_one_and_restored_when_it_returns(
    tmp_path: Path,
) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        await bench.ask(B)
        assert [entry.tokens for entry in bench.board.caches()] == [len(A) + LENGTH]
        returned = follow_up(A)
        # What the model says depends on all of its context: it was there.
        client = Listener(bench.board, request(*returned, max_tokens=20))
        await client.end()
        assert client.finished is not None
        assert client.finished.usage.cached_tokens == len(A) + LENGTH
        assert client.finished.timings.prefill_tokens == 2
        first, park_a, second, park_b, third = bench.engine.commands
        assert (first.save_cache, second.save_cache, second.load_cache) == (None, None, None)
        for park in (park_a, park_b):
            assert (park.keep_history, park.max_new_tokens, park.clear) == (True, 1, False)
            assert park.save_cache is not None
        assert (third.clear, third.keep_history) == (True, False)
        assert third.load_cache is not None
        await until(lambda: bench.board.report().running == 0)
        await bench.board.caching.settled()
        report = bench.board.report()
        assert (report.parked, report.restored) == (3, 1)  # the restored one was saved again

    cache_test(body, tmp_path)


def on_a_disk_of(bench: CacheBench, bytes_per_s: float) -> None:
    """Have the board know its disk: 100,000 bytes a token, and 100 ms for its prefill."""
    costs, counters = bench.board.caching.costs, bench.board.books.counters
    costs.position_bytes = 100_000
    costs.writing.set(bytes_per_s)
    costs.reading.set(bytes_per_s)
    counters.prefill_ms, counters.prefill_tokens = 1e8, 1_000_000


def test_on_a_slow_disk_nothing_is_parked_and_no_file_is_expected_of_the_board(
    tmp_path: Path,
) -> None:
    async def body(bench: CacheBench) -> None:
        on_a_disk_of(bench, 0.9e6)  # it takes longer to read than to compute
        for ids in (A, B, A, B):
            await bench.ask(ids)
        assert bench.board.caches() == []
        assert (bench.board.report().parked, bench.board.report().restored) == (0, 0)
        live = bench.board.supervisor.live
        assert live is not None
        assert bench.board.caching.worth_from(live) == 0

    cache_test(body, tmp_path)


def test_a_disk_that_writes_at_the_cost_of_others_is_left_to_those_that_come_back(
    tmp_path: Path,
) -> None:
    async def body(bench: CacheBench) -> None:
        on_a_disk_of(bench, 5e6)  # 0.2 of the prefill each way: 0.3 * 0.8 < 2 * 0.2 < 0.6 * 0.8
        one, other = tuple(range(1000, 1040)), tuple(range(2000, 2040))
        await bench.ask(one)
        await bench.ask(other)
        assert bench.board.report().parked == 0
        await bench.ask(follow_up(other))
        await bench.ask(one)  # the other one was continued, and is parked for it
        assert bench.board.report().parked == 1
        (entry,) = bench.store.entries()
        assert entry.ids[: len(other)] == other

    cache_test(body, tmp_path)


def test_a_board_that_idles_parks_once_conversations_displace_each_other(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        on_a_disk_of(bench, 2e6)  # writing pays only where no request waits for it
        await bench.ask(A)
        await asyncio.sleep(2 * IDLE_S)
        assert bench.board.report().parked == 0  # nothing has displaced anything
        await bench.ask(B)
        assert bench.board.report().parked == 0
        await asyncio.sleep(2 * IDLE_S)
        await bench.board.caching.settled()
        assert bench.board.report().parked == 1
        (entry,) = bench.board.caches()
        assert entry.tokens == len(B) + LENGTH
        finished = await bench.ask(follow_up(B))  # its context is still in memory
        assert finished.usage.cached_tokens == len(B) + LENGTH
        assert bench.board.report().restored == 0

    cache_test(body, tmp_path, quirks={"prefix_reuse_in_ram": True})


def test_the_time_for_files_is_in_the_answer_and_in_the_report(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        assert (await bench.ask(A)).timings.cache_ms == 0
        bench.engine.disk_s = 0.5
        assert (await bench.ask(B)).timings.cache_ms == pytest.approx(500, abs=50)  # A is parked
        # B is parked, and A's longer context is written again.
        assert (await bench.ask(follow_up(A))).timings.cache_ms == pytest.approx(1000, abs=50)
        report = bench.board.report()
        assert report.cache_write_ms == pytest.approx(1500, abs=100)
        assert report.cache_written_bytes > 0
        assert report.cache_read_bytes > 0

    cache_test(body, tmp_path)


def test_a_conversation_that_was_not_disturbed_is_extended_and_not_parked(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        client = Listener(bench.board, request(*follow_up(A), max_tokens=20))
        await client.end()
        assert client.finished is not None
        assert client.finished.usage.cached_tokens == len(A) + LENGTH
        assert bench.board.caches() == []

    cache_test(body, tmp_path)


def test_a_short_conversation_and_one_that_is_stored_are_not_parked(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask((5, 6))
        await bench.ask(A)
        await bench.ask(B)
        await bench.ask(A)  # from its file, and the next one finds it stored
        await bench.ask((5, 6))
        saves = [c.save_cache is not None and c.load_cache is None for c in bench.engine.commands]
        assert saves.count(True) == 2

    cache_test(body, tmp_path)


def test_what_is_asked_once_is_not_parked_unless_somebody_goes_on_from_it(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A, once=True)
        await bench.ask(B)
        assert bench.board.caches() == []
        await bench.ask(C, once=True)
        (entry,) = bench.board.caches()
        assert entry.tokens == len(B) + LENGTH
        # Somebody did go on from it: it is a conversation like others.
        await bench.ask(follow_up(C))
        await bench.ask(D)
        assert len(follow_up(C)) in [entry.tokens for entry in bench.board.caches()]

    cache_test(body, tmp_path)


def test_what_is_asked_once_may_begin_from_a_file_and_leaves_that_alone(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        await bench.ask(B)
        finished = await bench.ask((*A, 7, 8), once=True)
        assert finished.usage.cached_tokens >= len(A)
        assert sorted(entry.tokens for entry in bench.board.caches()) == [len(A) + LENGTH] * 2

    cache_test(body, tmp_path)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param("", SALT, id="without one"),
        pytest.param(SALT, "", id="with one, for those without"),
        pytest.param(SALT, salted("another"), id="with another"),
    ],
)
def test_nothing_live_or_parked_serves_another_salt(tmp_path: Path, ours: str, theirs: str) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A, salt=ours)
        assert (await bench.ask(follow_up(A), salt=theirs)).usage.cached_tokens == 0  # live
        await bench.ask(B)
        assert (await bench.ask((*A, 9), salt=theirs)).usage.cached_tokens == len(A)  # its own
        await bench.ask(C)
        assert (await bench.ask(follow_up(A), salt=ours)).usage.cached_tokens == len(A) + LENGTH
        assert {entry.adapter for entry in bench.board.caches()} == {None}

    cache_test(body, tmp_path)


def test_a_cache_that_somebody_names_serves_every_salt(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.board.build_cache("mine", A, None)
        finished = await bench.ask((*A, 9), salt=SALT, use_cache="mine")
        assert finished.usage.cached_tokens == len(A)
        await bench.ask(B)
        found = await bench.ask((*A, 8), salt=salted("another"))  # also where it is not named
        assert found.usage.cached_tokens == len(A)

    cache_test(body, tmp_path)


@pytest.mark.parametrize(
    ("why", "extra"),
    [
        pytest.param("quirk", {"quirks": {"prompt_cache_save_with_history": False}}, id="quirk"),
        pytest.param("release", {"per_run": False}, id="no limit per run"),
        pytest.param("switch", {"limits": {"park": False}}, id="switched off"),
    ],
)
def test_where_parking_is_not_possible_the_answers_are_the_same(
    tmp_path: Path, why: str, extra: dict[str, Any]
) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        await bench.ask(B)
        await bench.ask(A)
        assert bench.board.caches() == []

    assert why
    cache_test(body, tmp_path, **extra)


def test_a_cache_that_another_run_would_find_loaded_is_released(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        await bench.ask(B)
        await bench.ask(A)
        assert bench.engine.cache is not None
        await bench.ask((5, 6))
        assert bench.engine.commands[-1].release_cache
        assert bench.engine.cache is None

    cache_test(body, tmp_path)


async def stopped(bench: CacheBench) -> None:
    """Let a stop string abort a run: no cache may be loaded on this handle any more."""
    word = spoken(C, LENGTH).split()[1]
    await Listener(bench.board, request(*C, max_tokens=20, stop=(word,))).end()
    await until(lambda: bench.board.report().running == 0)
    await bench.board.caching.settled()  # what it displaced counts as parked only then
    assert bench.board.slot.live.aborted


def test_after_an_abort_a_restore_that_pays_for_a_load_gets_a_fresh_handle(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        await bench.ask(B)
        await stopped(bench)
        await bench.ask(D)
        finished = await bench.ask(A)
        assert finished.usage.cached_tokens == len(A) - 1
        old, fresh = bench.engines
        assert all(c.load_cache is None for c in old.commands)
        # What was live is saved, which an abort does not forbid, and comes back as well.
        assert (old.commands[-1].max_new_tokens, old.commands[-1].save_cache is None) == (1, False)
        assert old.stopped
        assert fresh.commands[0].load_cache is not None
        assert (await bench.ask(D)).usage.cached_tokens == len(D) - 1
        report = bench.board.report()
        assert (report.engine_starts, report.engine_renewals) == (2, 1)
        assert (report.failed, report.restored) == (0, 2)

    cache_test(body, tmp_path)


def test_a_restore_that_costs_more_than_it_saves_is_a_cold_run(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        await bench.ask(B)
        await bench.board.build_cache("mine", A, None)
        await stopped(bench)
        parked = bench.board.report().parked
        assert (await bench.ask(A)).usage.cached_tokens == 0
        assert (await bench.ask((*A, 5), use_cache="mine")).usage.cached_tokens == 0
        await bench.ask(D)
        assert (bench.board.report().parked, len(bench.engines)) == (parked, 1), "to no purpose"
        assert all(c.load_cache is None for c in bench.engine.commands)

    cache_test(body, tmp_path, load_s=3600.0)


def test_a_named_cache_is_worth_a_fresh_handle_too(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.board.build_cache("mine", A, None)
        await stopped(bench)
        assert (await bench.ask((*A, 5), use_cache="mine")).usage.cached_tokens == len(A)
        await stopped(bench)
        assert (await bench.ask(B, use_cache="mine")).usage.cached_tokens == 0, "nothing to gain"
        assert len(bench.engines) == 2

    cache_test(body, tmp_path, limits={"park": False})


def test_before_the_first_run_nothing_is_known_and_no_handle_renewed(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.board.build_cache("mine", A, None)
        bench.board.slot.live.aborted = True
        assert (await bench.ask((*A, 5), use_cache="mine")).usage.cached_tokens == 0
        assert len(bench.engines) == 1

    cache_test(body, tmp_path)


@pytest.mark.parametrize("end", [None, RunEnd.FAILED], ids=["never begun", "refused"])
def test_a_cache_stays_to_be_released_until_a_run_has_really_begun(
    tmp_path: Path, end: RunEnd | None
) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        await bench.ask(B)
        await bench.ask(A)
        live = bench.board.slot.live
        other = RunSpec(entries=(EntryCommand((5, 6)),))
        run = live._seat([None], other)
        assert live._command(run, None).release_cache
        live._settle(run, RunEnded(end, Perf(), 0, (0,), None))
        assert live._command(run, None).release_cache
        live._settle(run, RunEnded(RunEnd.FINISHED, Perf(), 0, (0,), None))
        assert not live._command(run, None).release_cache
        begun = replace(other, hit=CacheHit(bench.store.entries()[0], 3))
        live._settle(live._seat([None], begun), RunEnded(end, Perf(), 0, (0,), None))
        assert live._command(run, None).release_cache

    cache_test(body, tmp_path)


def test_a_cache_that_the_library_will_not_release_is_told_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        await bench.ask(B)
        await bench.ask(A)
        bench.engine.no_release = True
        await bench.ask((5, 6))
        assert bench.engine.commands[-1].release_cache
        assert "rkllm_release_prompt_cache returned -1" in caplog.text

    cache_test(body, tmp_path)


def test_parking_that_kills_the_engine_costs_no_request_and_is_not_tried_again(
    tmp_path: Path,
) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        bench.scripts = [replace(TALK, die_at=0)]
        await bench.ask(B)
        assert len(bench.engines) == 2
        await bench.ask(A)
        assert len(bench.engines) == 2
        assert bench.board.caches() == []
        assert files(tmp_path, "*.tmp") == []

    cache_test(body, tmp_path)


def test_parking_that_the_runtime_refuses_costs_nothing(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        bench.scripts = [replace(TALK, end=RunEnd.FAILED)]
        await bench.ask(B)
        assert (bench.board.caches(), len(bench.engines)) == ([], 1)

    cache_test(body, tmp_path)


def test_a_file_that_cannot_be_loaded_is_a_miss(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        await bench.ask(B)
        for file in files(tmp_path, "*.kv"):
            file.write_bytes(b"\0" * file.stat().st_size)
        finished = await bench.ask(A)
        assert finished.usage.cached_tokens == 0

    cache_test(body, tmp_path)


def test_a_runtime_that_gains_nothing_from_files_is_not_given_any(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        await bench.ask(B)
        bench.engine.blind_to_caches = True
        for _ in range(3):
            await bench.ask(A)
            await bench.ask(B)
        count = len(bench.engine.commands)
        await bench.ask(A)
        later = bench.engine.commands[count:]
        assert all(c.load_cache is None and c.save_cache is None for c in later)

    cache_test(body, tmp_path)


async def restored(bench: CacheBench, script: Script, **extra: Any) -> Listener:
    """Return a client whose conversation has just been restored, and is to be parked again."""
    await bench.ask(A)
    await bench.ask(B)  # parks the first conversation
    bench.scripts = [TALK, script]  # to park the second one is a run, too
    asked = replace(request(*follow_up(A), max_tokens=20, **extra), request_id="c")
    client = Listener(bench.board, asked)
    await until(lambda: len(client.ids) >= 2)
    restore = bench.engine.commands[-1]
    assert restore.load_cache is not None
    assert restore.save_cache is not None
    await bench.board.caching.settled()  # what the second one left counts as parked only then
    return client


# In virtual time: the file of the conversation before is written first.
LONGER = replace(TALK, model=talker(2 * LENGTH), pace_s=0.05)


def test_a_restored_run_that_the_runtime_pauses_holds_the_board_when_that_is_told(
    tmp_path: Path,
) -> None:
    async def body(bench: CacheBench) -> None:
        client = await restored(bench, LONGER, native_pause=True)
        [paused] = await bench.board.control("c", ControlAction.PAUSE)
        assert paused.kv is Kv.KEPT
        await bench.board.control("c", ControlAction.RESUME)
        assert (await client.end())[1] is STOP
        assert bench.engine.commands[-1].resume
        assert client.finished is not None
        assert client.finished.usage.cached_tokens == len(A) + LENGTH
        assert not files(tmp_path, "*.tmp")

    cache_test(body, tmp_path)


@pytest.mark.parametrize(
    ("script", "pause"),
    [
        pytest.param(LONGER, True, id="it was stopped for a pause"),
        pytest.param(replace(LONGER, kv_off=-3), False, id="the runtime holds something else"),
    ],
)
def test_what_a_restored_run_wrote_is_kept_only_if_it_is_known_what_it_is(
    tmp_path: Path, script: Script, pause: bool
) -> None:
    async def body(bench: CacheBench) -> None:
        client = await restored(bench, script)
        parked = bench.board.report().parked
        if pause:
            await bench.board.control("c", ControlAction.PAUSE)
            await bench.board.control("c", ControlAction.ABORT)
        await client.end()
        await until(lambda: bench.board.report().running == 0)
        await bench.board.caching.settled()
        assert bench.board.report().parked == parked
        assert not files(tmp_path, "*.tmp")

    cache_test(body, tmp_path)


# -- named ------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_run", [True, False], ids=["1.3.0", "1.2.3"])
def test_a_named_cache_is_built_and_used_by_name(tmp_path: Path, per_run: bool) -> None:
    async def body(bench: CacheBench) -> None:
        entry = await bench.board.build_cache("system", A, None)
        assert (entry.name, entry.tokens) == ("system", len(A))
        command = bench.engines[0].commands[0]
        assert (command.max_new_tokens, command.keep_history) == (1 if per_run else None, False)
        finished = await bench.ask((*A, 9), use_cache="system")
        assert finished.usage.cached_tokens == len(A)
        assert [found.name for found in bench.board.caches()] == ["system"]
        assert await bench.board.delete_cache("system")
        assert not await bench.board.delete_cache("system")
        with pytest.raises(CacheNotFound):
            await bench.ask(A, use_cache="system")

    cache_test(body, tmp_path, per_run=per_run, limits={"park": False})


@pytest.mark.parametrize(
    ("name", "ids", "error"),
    [
        pytest.param("../../etc/passwd", A, RequestError, id="a name that climbs"),
        pytest.param("x", (), CacheUnsupported, id="no ids"),
        pytest.param("x", tuple(range(64)), ContextOverflow, id="longer than the context"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(
    tmp_path: Path, name: str, ids: tuple[int, ...], error: type[Exception]
) -> None:
    async def body(bench: CacheBench) -> None:
        with pytest.raises(error):
            await bench.board.build_cache(name, ids, None)
        assert bench.engine.commands == []

    cache_test(body, tmp_path)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        pytest.param(replace(TALK, end=RunEnd.FAILED), RunFailed, id="the run fails"),
        pytest.param(replace(TALK, die_at=0), EngineDied, id="the engine dies"),
    ],
)
def test_a_build_that_fails_says_so_and_leaves_no_file(
    tmp_path: Path, script: Script, error: type[Exception]
) -> None:
    async def body(bench: CacheBench) -> None:
        with pytest.raises(error):
            await bench.board.build_cache("x", A, None)
        assert bench.board.caches() == []
        assert files(tmp_path, "*.tmp") == []
        await until(lambda: bench.state is BoardState.READY)

    cache_test(body, tmp_path, script)


async def test_a_board_that_is_out_of_order_builds_nothing_and_says_so_at_once(
    tmp_path: Path,
) -> None:
    limits = {"crash_limit": 1, "quarantine_s": 60.0}
    bench = CacheBench(tmp_path, replace(TALK, die_at=0), limits=limits)
    await bench.board.start()
    with pytest.raises(BoardFailed):
        await Listener(bench.board, request(*A)).end()
    await until(lambda: bench.state is BoardState.QUARANTINED)
    with pytest.raises(BoardOutOfOrder, match="quarantined"):
        await asyncio.wait_for(bench.board.build_cache("x", A, None), 20)
    await bench.board.stop()
    with pytest.raises(BoardOutOfOrder, match="stopped"):
        await asyncio.wait_for(bench.board.build_cache("x", A, None), 20)


def test_a_build_that_is_withdrawn_is_not_made_or_not_kept(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        gate = asyncio.Event()
        bench.scripts = [replace(TALK, prefill=gate), replace(TALK, prefill=gate)]
        talking = Listener(bench.board, request(5, 6))
        await until(lambda: len(bench.engine.commands) == 1)
        waits = asyncio.create_task(bench.board.build_cache("waits", B, None))
        await until(lambda: bench.board.report().queued == 1)
        waits.cancel()
        await until(lambda: bench.board.report().queued == 0)
        begun = asyncio.create_task(bench.board.build_cache("begun", A, None))
        await until(lambda: bench.board.report().queued == 1)
        gate.set()
        gate.clear()
        await talking.end()
        await until(lambda: len(bench.engine.commands) == 2)
        begun.cancel()
        await asyncio.wait({begun})
        gate.set()
        await until(lambda: bench.board.report().running == 0)
        assert [c.entries[0].ids for c in bench.engine.commands] == [(5, 6), A]
        assert (begun.cancelled(), waits.cancelled()) == (True, True)
        assert (bench.board.caches(), files(tmp_path, "*.tmp")) == ([], [])

    cache_test(body, tmp_path)


async def test_a_board_without_caches_says_so() -> None:
    bench = Bench()
    await bench.board.start()
    with pytest.raises(CacheUnsupported, match="keeps no prompt caches"):
        await bench.board.build_cache("x", A, None)
    with pytest.raises(CacheUnsupported):
        await anext(bench.board.generate(request(use_cache="x")))
    assert bench.board.caches() == []
    assert not await bench.board.delete_cache("x")
    await bench.board.stop()


# -- the KV cache -----------------------------------------------------------------------------


def test_the_kv_cache_is_told_and_cleared(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        full = KvReport("b", "m", (len(A) + LENGTH,), capacity=64)
        assert bench.board.kv() == full
        cleared = await bench.board.clear_kv(keep_system_prompt=False)
        assert cleared == KvReport("b", "m", (0,), capacity=64, status="cleared")
        assert bench.engine.kv == []
        await bench.ask(A)
        assert not bench.engine.commands[-1].clear

    cache_test(body, tmp_path)


def test_a_clear_waits_for_the_run_and_comes_before_the_next(tmp_path: Path) -> None:
    cache_test(_cleared, tmp_path)


async def _cleared(bench: CacheBench) -> None:
    gate = asyncio.Event()
    bench.scripts = [replace(TALK, prefill=gate)]
    running = Listener(bench.board, request(*A, max_tokens=20))
    await until(lambda: len(bench.engine.commands) == 1)
    queued = Listener(bench.board, request(*follow_up(A), max_tokens=20))
    await until(lambda: bench.board.report().queued == 1)
    report = await bench.board.clear_kv(keep_system_prompt=True)
    assert report.status == "pending"
    assert bench.engine.calls == []
    gate.set()
    await running.end()
    await queued.end()
    assert queued.finished is not None
    assert queued.finished.usage.cached_tokens == 0
    assert ("clear_kv", {"keep_system_prompt": True}) in bench.engine.calls


def test_what_a_clear_spares_of_the_system_prompt_is_not_computed_again(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        bench.engine.system_prompt = 5
        report = await bench.board.clear_kv(keep_system_prompt=True)
        assert (report.status, report.entries) == ("cleared", (5,))
        finished = await bench.ask((*A[:5], 7, 8))
        assert finished.usage.cached_tokens == 5
        assert bench.engine.commands[-1].entries[0].ids == (7, 8)

    cache_test(body, tmp_path, limits={"park": False})


def test_a_clear_that_the_runtime_refuses_leaves_nothing_to_be_trusted(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        bench.engine.call_errors["clear_kv"] = CallFailed("rkllm_clear_kv_cache", -1)
        with pytest.raises(CallFailed):
            await bench.board.clear_kv(keep_system_prompt=True)
        assert (await bench.ask(follow_up(A)[:-1])).usage.cached_tokens == 0

    cache_test(body, tmp_path, limits={"park": False})


@pytest.mark.parametrize("limited", [True, False], ids=["by limit", "by abort"])
def test_only_a_drain_that_aborts_keeps_caches_from_being_loaded(
    tmp_path: Path, limited: bool
) -> None:
    async def body(bench: CacheBench) -> None:
        bench.scripts = [replace(TALK, pace_s=0.01)]
        asked = replace(request(*A, max_tokens=20, native_pause=True), request_id="c/0")
        client = Listener(bench.board, asked)
        await until(lambda: len(client.ids) >= 2)
        await bench.board.control("c", ControlAction.PAUSE)
        await bench.board.control("c", ControlAction.ABORT)
        await client.end()
        await until(lambda: bench.board.report().running == 0)
        assert [method for method, _ in bench.engine.calls] == ["drain"]
        assert bench.board.slot.live.aborted is not limited

    cache_test(body, tmp_path, quirks={"drain_by_limit": limited})


def test_a_pause_inside_the_runtime_is_not_disturbed_by_a_clear(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        bench.scripts = [replace(TALK, pace_s=0.01)]
        asked = replace(request(*A, max_tokens=20, native_pause=True), request_id="c/0")
        client = Listener(bench.board, asked)
        await until(lambda: len(client.ids) >= 2)
        await bench.board.control("c", ControlAction.PAUSE)
        report = await bench.board.clear_kv(keep_system_prompt=False)
        assert (report.status, bench.engine.calls) == ("pending", [])
        await bench.board.control("c", ControlAction.RESUME)
        assert await client.end() == (spoken(A, LENGTH), STOP)
        await until(lambda: bench.board.report().running == 0)
        assert bench.engine.kv == []

    cache_test(body, tmp_path)


def test_a_slow_disk_holds_up_nobody_but_the_conversation_that_comes_back(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)

    async def body(bench: CacheBench) -> None:
        for ids in (A, B):  # the second one parks the first, which the disk takes its time for
            client = Listener(bench.board, request(*ids, max_tokens=20))
            assert await client.end() == (spoken(ids, LENGTH), STOP)
        assert bench.board.caches() == []
        back = Listener(bench.board, request(*follow_up(A), max_tokens=20))
        for _ in range(20):
            await asyncio.sleep(0)
        assert back.text == ""
        disk.done.set()
        await back.end()
        assert back.finished is not None
        assert back.finished.usage.cached_tokens == len(A) + LENGTH

    cache_test(body, tmp_path, limits={"caches": disk})


def test_a_board_whose_cache_folder_cannot_be_used_serves_without_caches(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")

    async def body(bench: CacheBench) -> None:
        assert bench.board.caches() == []
        await bench.ask(A)
        await bench.ask(B)
        assert bench.board.report().parked == 0
        with pytest.raises(CacheUnsupported):
            await bench.board.build_cache("name", A, None)

    cache_test(body, tmp_path / "taken")
