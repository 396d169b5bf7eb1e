"""Prompts that share their beginning with the last one, where the runtime reuses it by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.run.loaded_engine import RECOMPUTED_LIMIT
from rkserve.core.block_hashes import BLOCK, salted, unpack
from rkserve.core.messages import ControlAction
from tests.board.run.test_prompt_caching import (
    LENGTH,
    A,
    B,
    CacheBench,
    cache_test,
    follow_up,
)
from tests.support.boards.board_bench import Listener, request, spoken, talker, until
from tests.support.boards.fakes import Script

pytestmark = pytest.mark.virtual_time

REUSES = {"prefix_reuse_in_ram": True}
APPENDS = {"prefix_reuse_in_ram": False}
SYSTEM = tuple(range(20, 20 + 2 * BLOCK))
EDITED = (*A[:15], 9, *A[16:])


def prefix_test(
    body: Callable[[CacheBench], Any], folder: Path, *scripts: Script, **extra: Any
) -> None:
    quirks = {**REUSES, **extra.pop("quirks", {})}
    limits = {"context_len": 512, **extra.pop("limits", {})}
    cache_test(body, folder, *scripts, quirks=quirks, limits=limits, **extra)


def test_whole_prompts_are_sent_and_the_runtime_finds_what_it_has(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        again = await bench.ask(A)
        edited = await bench.ask(EDITED)
        later = await bench.ask(follow_up(EDITED))
        cached = [one.usage.cached_tokens for one in (again, edited, later)]
        assert cached == [len(A), 15, len(EDITED) + LENGTH]
        assert [one.timings.prefill_tokens for one in (again, edited, later)] == [0, 5, 2]
        sent = [command.entries[0].ids for command in bench.engine.commands]
        assert sent == [A, A, EDITED, follow_up(EDITED)]
        flags = {(one.keep_history, one.clear) for one in bench.engine.commands}
        assert flags == {(False, False)}

    prefix_test(body, tmp_path, limits={"park": False})


def test_an_appending_board_computes_an_edited_prompt_again(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        assert (await bench.ask(EDITED)).usage.cached_tokens == 0
        assert (await bench.ask(follow_up(EDITED))).usage.cached_tokens == len(EDITED) + LENGTH

    prefix_test(body, tmp_path, quirks=APPENDS, limits={"park": False})


@pytest.mark.parametrize("quirks", [REUSES, APPENDS], ids=["reused", "appended"])
def test_another_owner_finds_nothing_and_the_cache_is_cleared_before(
    tmp_path: Path, quirks: dict[str, bool]
) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A, salt=salted("one"))
        for salt in (salted("two"), "", salted("one")):
            other = await bench.ask(follow_up(A), salt=salt)
            assert other.usage.cached_tokens == 0
            assert bench.engine.commands[-1].clear

    prefix_test(body, tmp_path, quirks=quirks, limits={"park": False})


def test_runs_that_are_no_conversation_leave_nothing_to_the_next_owner(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        text = Listener(bench.board, request(max_tokens=1, prompt_text="hello"))
        await text.task
        await until(lambda: bench.board.report().running == 0)
        await bench.ask(A)
        assert [one.clear for one in bench.engine.commands] == [True, True]

    prefix_test(body, tmp_path, limits={"park": False})


def test_an_aborted_run_is_cleared(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        said = spoken(A, LENGTH).split()[2]
        client = Listener(bench.board, request(*A, max_tokens=20, stop=(said,)))
        await client.end()
        await until(lambda: bench.board.report().running == 0)
        assert (await bench.ask(A)).usage.cached_tokens == 0
        assert bench.engine.commands[-1].clear

    prefix_test(body, tmp_path, limits={"park": False})


def test_a_runtime_that_computes_known_prefixes_again_is_appended_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = SYSTEM

    async def body(bench: CacheBench) -> None:
        nonlocal prompt
        bench.engine.forgetful = True
        for _ in range(RECOMPUTED_LIMIT + 1):
            finished = await bench.ask(prompt)
            assert finished.usage.cached_tokens == 0
            prompt = follow_up(prompt)
        assert "prefix_reuse_in_ram is off" in caplog.text
        await bench.ask(prompt)
        assert (await bench.ask((*prompt, 7, 8))).usage.cached_tokens == len(prompt)
        first, second = bench.engine.commands[-2:]
        assert (first.clear, first.keep_history) == (True, True)
        assert (second.clear, len(second.entries[0].ids)) == (False, 2)

    prefix_test(body, tmp_path, limits={"park": False})


def test_a_pause_in_the_runtime_costs_no_prefix(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        client = Listener(bench.board, request(*A, max_tokens=20, native_pause=True))
        await until(lambda: len(client.ids) >= 2)
        await bench.board.control(client.asked.request_id, ControlAction.PAUSE)
        await bench.board.control(client.asked.request_id, ControlAction.RESUME)
        assert (await client.end())[0] == spoken(A, LENGTH)
        await until(lambda: bench.board.report().running == 0)
        assert (await bench.ask(follow_up(A))).usage.cached_tokens == len(A) + LENGTH
        assert not any(command.clear for command in bench.engine.commands)

    slowly = Script([], model=talker(LENGTH), pace_s=0.1)
    prefix_test(body, tmp_path, slowly, limits={"park": False})


def test_a_shared_beginning_is_kept_and_the_displaced_rest_is_parked(tmp_path: Path) -> None:
    one, other = (*SYSTEM, *A), (*SYSTEM, *B)

    async def body(bench: CacheBench) -> None:
        await bench.ask(one)
        second = await bench.ask(other)
        assert second.usage.cached_tokens == len(SYSTEM)
        parking = bench.engine.commands[1]
        assert (parking.entries[0].ids[: len(one)], parking.keep_history) == (one, False)
        assert [entry.tokens for entry in bench.board.caches()] == [len(one) + LENGTH]
        back = await bench.ask(follow_up(one))
        assert back.usage.cached_tokens == len(one) + LENGTH
        restored = bench.engine.commands[-1]
        assert (restored.load_cache is not None, restored.save_cache) == (True, None)
        # What was restored is live, so the next turn needs no file.
        assert (await bench.ask(follow_up(follow_up(one)))).timings.prefill_tokens == 2

    prefix_test(body, tmp_path)


def test_a_short_rest_is_not_worth_a_file(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(A)
        assert (await bench.ask(A)).usage.cached_tokens == len(A)
        assert bench.board.caches() == []

    prefix_test(body, tmp_path)


def test_the_report_has_every_block_of_the_live_context(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        await bench.ask(SYSTEM)
        held = unpack(bench.board.report().holdings)
        assert held is not None
        assert held.live is not None
        assert (held.appends, held.prefix, held.live.dense) == (True, True, True)
        assert len(held.live.marks) == held.live.tokens // BLOCK

    prefix_test(body, tmp_path)


def test_batches_are_cleared_between_owners(tmp_path: Path) -> None:
    async def body(bench: CacheBench) -> None:
        for salt in (salted("one"), salted("two")):
            client = Listener(bench.board, request(*A, max_tokens=20, salt=salt))
            await client.end()
            await until(lambda: bench.board.report().running == 0)
        assert [one.clear for one in bench.engine.commands] == [False, True]

    prefix_test(body, tmp_path, limits={"park": False, "n_batch": 2})
