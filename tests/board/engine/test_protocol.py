"""The engine's protocol: its values, and the engine of a board whose model is unloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rkserve.board.engine.protocol import (
    UNLOADED_REASON,
    Engine,
    EngineFacts,
    EngineSpec,
    EntryCommand,
    RunCommand,
    RunEnded,
    UnloadedEngine,
    end_kind,
    with_weights,
)
from rkserve.core.errors import EngineDied
from rkserve.native.runtime import LoadParams, Perf, RunEnd

FACTS = EngineFacts("1.3.0", True, {}, 1.0)


def test_other_weights_change_the_model_file_alone() -> None:
    spec = EngineSpec("lib.so", LoadParams("/models/a.rkllm", 64, 16, n_batch=2), "/run/npu")
    changed = with_weights(spec, Path("/staged/b.rkllm"))
    assert changed.params.model_path == "/staged/b.rkllm"
    assert with_weights(changed, Path("/models/a.rkllm")) == spec
    assert with_weights(spec, None) is spec


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        pytest.param(
            "the engine process ended (killed by SIGSEGV: E oops)", "SIGSEGV", id="signal"
        ),
        pytest.param("the engine process ended (exit code 3)", "exit", id="exit"),
        pytest.param("killed by whatever", "exit", id="no signal's name"),
    ],
)
def test_the_end_of_an_engine_is_counted_by_a_word(reason: str, kind: str) -> None:
    assert end_kind(reason) == kind


@pytest.mark.parametrize(
    ("end", "in_order"),
    [(RunEnd.FINISHED, True), (RunEnd.PAUSED, False), (RunEnd.FAILED, False), (None, False)],
)
def test_only_a_finished_run_ended_in_order(end: RunEnd | None, in_order: bool) -> None:
    assert RunEnded(end, Perf(), 0, (), None).in_order is in_order


async def test_an_unloaded_engine_fails_runs_and_calls_and_survives_everything_else() -> None:
    made = UnloadedEngine("board-1", FACTS)
    engine: Engine = made  # judged by the type checker
    assert await engine.died == UNLOADED_REASON
    for refused in (
        engine.run(RunCommand(1, (EntryCommand((1,)),)), lambda *_: None),
        engine.call("kv_sizes"),
    ):
        with pytest.raises(EngineDied, match=UNLOADED_REASON):
            await refused
    engine.pause(1)
    engine.abort(1)
    await engine.stop()
    assert (engine.pid, engine.silent_s(), await engine.kill()) == (0, 0.0, True)
