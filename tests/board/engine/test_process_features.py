"""Batches, adapters and prompt caches in a real engine process over the simulated runtime."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.engine.process import EngineProcess
from rkserve.board.engine.protocol import EntryCommand, RunCommand
from rkserve.core.errors import CallFailed, Misuse
from rkserve.core.run_params import Sampling
from rkserve.native.runtime import RunEnd
from rkserve.native.sim import models
from tests.support.boards.engine_bench import Recorder, command
from tests.support.sim.sim_board import Sim, both_releases, chat

TEXTS = ("one", "zwei Grüße", "三 🍵", "quatre, enfin")
WHO = chat("Who are you?")


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    """Return a place for one simulated board."""
    return Sim(tmp_path)


@asynccontextmanager
async def loaded(sim: Sim, **params: Any) -> AsyncIterator[EngineProcess]:
    """Start an engine that is greedy and loaded with ``params`` besides."""
    greedy = replace(sim.spec().params, sampling=Sampling(temperature=0.0), **params)
    async with sim.engine(params=greedy) as engine:
        yield engine


def repeat(text: str) -> EntryCommand:
    return EntryCommand(chat(f"Repeat after me: {text}"))


async def say(engine: EngineProcess, prompt: tuple[int, ...], run_id: int, **extra: Any) -> str:
    """Return an answer that must come in order."""
    got = Recorder()
    ended = await engine.run(command(prompt, run_id, **extra), got)
    assert ended.in_order, ended
    assert ended.cache_refused is None
    return got.data.decode()


# -- batches ----------------------------------------------------------------------------------


@both_releases
async def test_every_entry_of_a_batch_gets_its_own_answer(sim: Sim, release: str) -> None:
    sim.release = release
    async with loaded(sim, n_batch=4) as engine:
        assert engine.facts.n_batch == 4
        got = Recorder()
        entries = tuple(repeat(text) for text in TEXTS)
        ended = await engine.run(RunCommand(1, entries, keep_history=True), got)
        assert ended.in_order
        assert [got.entry_data[at].decode() for at in range(4)] == list(TEXTS)
        lengths = [len(got.entries[at]) for at in range(4)]
        assert len(set(lengths)) > 1  # they ended at different steps
        held = tuple(len(e.ids) + n - 1 for e, n in zip(entries, lengths, strict=True))
        assert ended.kv_positions == held == await engine.call("kv_sizes")
        await engine.call("clear_kv")
        assert await engine.call("kv_sizes") == (0, 0, 0, 0)


@pytest.mark.parametrize("count", [1, 3, 5])
async def test_a_batch_of_another_size_never_reaches_the_library(sim: Sim, count: int) -> None:
    async with loaded(sim, n_batch=4) as engine:
        got = Recorder()
        entries = (repeat("x"),) * count
        ended = await engine.run(RunCommand(1, entries), got)
        assert (ended.end, got.entries) == (RunEnd.FAILED, {})
        assert ended.error is not None
        assert "4" in ended.error
        ended = await engine.run(RunCommand(2, (repeat("x"),) * 4), got)
        assert ended.in_order
        assert got.entry_data == dict.fromkeys(range(4), b"x")


async def test_an_abort_ends_every_entry_of_a_batch(sim: Sim) -> None:
    sim.environ["RKSIM_TIME_SCALE"] = "0.1"
    async with loaded(sim, n_batch=2) as engine:
        got = Recorder(lambda n: engine.abort(1) if n == 3 else None)
        entries = (EntryCommand(chat("Write 3000 tokens")),) * 2
        ended = await engine.run(RunCommand(1, entries), got)
        assert ended.end is RunEnd.FINISHED
        assert {len(ids) < 3000 for ids in got.entries.values()} == {True}


# -- adapters ---------------------------------------------------------------------------------


@both_releases
async def test_a_run_speaks_through_the_adapter_that_it_names(sim: Sim, release: str) -> None:
    files = {
        name: str(models.write_adapter(sim.place / name, f"the {name}")) for name in ("law", "sea")
    }
    sim.release = release
    async with loaded(sim) as engine:
        plain = await say(engine, WHO, 1)
        for name, path in files.items():
            await engine.call("load_adapter", path=path, name=name, scale=1.0)
        for run_id, name in enumerate(("law", "sea", "law"), 2):
            assert f"the {name}" in await say(engine, WHO, run_id, adapter=name)
        assert await say(engine, WHO, 9) == plain
        assert "the sea" not in plain


async def test_an_adapter_that_cannot_be_had_is_refused_and_the_engine_goes_on(sim: Sim) -> None:
    good = models.write_adapter(sim.place / "good", "the good")
    bad = sim.place / "bad"
    bad.write_bytes(good.read_bytes()[:-1] + b"!")
    async with loaded(sim) as engine:
        with pytest.raises(CallFailed, match=r"rkllm_load_lora .*logged: E rkllm"):
            await engine.call("load_adapter", path=str(bad), name="bad")
        await engine.call("load_adapter", path=str(good), name="good")
        with pytest.raises(Misuse, match="good"):
            await engine.call("load_adapter", path=str(good), name="good")
        ended = await engine.run(command(WHO, 1, adapter="bad"), Recorder())
        assert ended.end is RunEnd.FAILED
        assert ended.error is not None
        assert "bad" in ended.error
        assert "the good" in await say(engine, WHO, 2, adapter="good")


# -- prompt caches ----------------------------------------------------------------------------


@both_releases
async def test_a_cache_saves_its_prefill_and_is_gone_after_its_release(
    sim: Sim, release: str
) -> None:
    file = str(sim.place / "kv.cache")
    question = chat("Count to 3")
    sim.release = release
    async with loaded(sim) as engine:
        assert await say(engine, question, 1, save_cache=file) == "1, 2, 3."
        prefilled = []
        changes: list[dict[str, Any]] = [{}, {"load_cache": file}, {}, {"release_cache": True}]
        for run_id, extra in enumerate(changes):
            await engine.call("clear_kv")  # 1.3 would find the question in RAM, too
            got = Recorder()
            ended = await engine.run(command(question, 2 + run_id, **extra), got)
            assert (got.data, ended.cache_refused) == (b"1, 2, 3.", None)
            prefilled.append(ended.perf.prefill_tokens)
        whole = len(question)
        assert prefilled[0] == prefilled[3] == whole
        assert max(prefilled[1:3]) < whole / 2  # it stays loaded for the run after, too
        await engine.call("release_cache")


@pytest.mark.parametrize("content", [None, b"no cache at all"], ids=["missing", "damaged"])
async def test_a_cache_that_is_refused_costs_time_and_no_answer(
    sim: Sim, content: bytes | None
) -> None:
    file = sim.place / "kv.cache"
    if content is not None:
        file.write_bytes(content)
    async with loaded(sim) as engine:
        got = Recorder()
        ended = await engine.run(command(chat("Count to 3"), load_cache=str(file)), got)
        assert ended.in_order
        assert got.data == b"1, 2, 3."
        assert ended.perf.prefill_tokens == len(chat("Count to 3"))
        assert ended.cache_refused is not None
        assert "kv.cache" in ended.cache_refused
