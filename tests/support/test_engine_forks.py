"""Forked engines: they start, answer and end as executed ones do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import engine_forks
from tests.support.boards.engine_bench import Recorder, command
from tests.support.sim.sim_board import Sim, chat


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    return Sim(tmp_path)


def is_forked(pid: int) -> bool:
    return engine_forks.__name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def test_it_answers_in_a_session_of_its_own_and_its_end_is_reported(sim: Sim) -> None:
    async with sim.engine() as engine:
        assert is_forked(engine.pid)
        assert os.getsid(engine.pid) == engine.pid
        got = Recorder()
        await engine.run(command(chat("Count to 3")), got)
        assert got.data.decode() == "1, 2, 3."
        await engine.stop()
        assert engine.died.result() == "the engine process ended (exit code 0)"


async def test_a_killed_one_is_reported_with_its_signal(sim: Sim) -> None:
    async with sim.engine() as engine:
        assert await engine.kill()
        assert "SIGTERM" in engine.died.result()


async def test_it_inherits_no_file_of_another_one(sim: Sim, tmp_path: Path) -> None:
    async with sim.engine() as first, Sim(tmp_path / "other").engine() as second:
        assert open_files(first.pid) == open_files(second.pid)


@pytest.mark.executes_engine
async def test_a_marked_test_executes_its_engines(sim: Sim) -> None:
    async with sim.engine() as engine:
        assert not is_forked(engine.pid)


async def test_one_whose_environment_acts_on_its_start_is_executed(sim: Sim) -> None:
    sim.environ["MALLOC_ARENA_MAX"] = "1"
    async with sim.engine() as engine:
        assert not is_forked(engine.pid)
