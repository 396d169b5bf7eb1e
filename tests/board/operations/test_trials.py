"""LoRA adapters on one board: loaded when needed, selected in every run, reclaimed together."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore
from rkserve.core.board_report import AdapterTrial, BoardState, GenerationState, TrialVerdict
from rkserve.core.desired_state import AdapterVersion
from rkserve.core.errors import (
    AdapterBroken,
    BoardFailed,
    CallFailed,
    EngineDied,
    LoadFailed,
    RequestError,
)
from rkserve.core.messages import AdapterRef, ControlAction, Finished, FinishReason, Kv
from tests.support.boards.board_bench import SETTINGS, Bench, Listener, request, talker, until
from tests.support.boards.fakes import FakeEngine, Script
from tests.support.boards.own_time import run_loop

pytestmark = pytest.mark.virtual_time

TALK = Script([], model=talker(6))
PROMPT = (5, 6, 7)
PASSED = TrialVerdict.PASSED
SLOW = replace(TALK, pace_s=0.01)


class AdapterBench(Bench):
    """A board over a model folder with the adapters a, b and c."""

    def __init__(self, folder: Path, *scripts: Script, **limits: Any) -> None:
        self.folder = folder
        self.refs = {name: self.put(name) for name in "abc"}
        super().__init__(*scripts, settings=replace(SETTINGS, model_dir=folder, **limits))

    def put(self, name: str) -> AdapterRef:
        content = f"weights of {name}".encode()
        place = self.file(name).parent
        place.mkdir(parents=True)
        (place / "adapter.rkllm").write_bytes(content)
        return AdapterRef(name, "1", hashlib.sha256(content).hexdigest())

    def file(self, name: str) -> Path:
        return self.folder / "adapters" / name / "1" / "adapter.rkllm"

    def _next(self, command: Any) -> Script:
        return self.scripts.pop(0) if self.scripts else TALK

    async def ask(self, name: str | None, *ids: int, **extra: Any) -> Finished:
        ref = self.refs[name] if name is not None else None
        asked = request(*(ids or PROMPT), max_tokens=20, adapter=ref, **extra)
        client = Listener(self.board, asked)
        await client.end()
        await until(lambda: self.board.report().running == 0)
        assert client.finished is not None
        return client.finished


def adapter_test(
    body: Callable[[AdapterBench], Any], folder: Path, *scripts: Script, **limits: Any
) -> None:
    async def main() -> None:
        bench = AdapterBench(folder, *scripts, **limits)
        await bench.board.start()
        try:
            await body(bench)
        finally:
            await bench.board.stop()

    run_loop(main())


def test_an_adapter_is_loaded_once_and_selected_in_every_run(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        a, b = bench.refs["a"].key, bench.refs["b"].key
        for name in ("a", None, "b", "a"):
            await bench.ask(name)
        assert [command.adapter for command in bench.engine.commands] == [a, None, b, a]
        assert [args["name"] for _, args in bench.engine.calls] == [a, b]
        assert bench.board.report().adapters == (b, a)
        assert len(bench.engines) == 1

    adapter_test(body, tmp_path)


def test_a_context_is_not_reused_under_another_adapter(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.ask("a")
        longer = (*PROMPT, *bench.engine.kv[3:], 9)
        assert (await bench.ask("b", *longer)).usage.cached_tokens == 0
        assert bench.engine.commands[-1].clear
        longer = (*longer, *bench.engine.kv[len(longer) :], 9)
        assert (await bench.ask("b", *longer)).usage.cached_tokens > 0

    adapter_test(body, tmp_path)


def test_a_version_that_was_staged_is_found_though_the_model_folder_has_none(
    tmp_path: Path,
) -> None:
    content = b"weights that were sent"
    ref = AdapterRef("sent", "7", hashlib.sha256(content).hexdigest())
    version = AdapterVersion(ref, len(content))

    async def body(bench: AdapterBench) -> None:
        bench.refs["sent"] = ref
        with pytest.raises(AdapterBroken, match="missing"):
            await bench.ask("sent")
        staged = bench.board.staged
        assert staged.begin(version) == 0
        staged.chunk(ref.digest, 0, content)
        staged.commit(version)
        assert (await bench.ask("sent")).reason is FinishReason.STOP
        assert bench.board.report().adapters == (ref.key,)

    adapter_test(body, tmp_path / "models", staged_dir=tmp_path / "own")


def test_the_limit_is_kept_by_a_fresh_handle_and_nobody_is_lost(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        asked = replace(
            request(*PROMPT, max_tokens=20, adapter=bench.refs["a"]), request_id="paused/0"
        )
        bench.scripts = [SLOW]
        paused = Listener(bench.board, asked)
        await until(lambda: len(paused.ids) >= 2)
        await bench.board.control("paused", ControlAction.PAUSE)
        await bench.ask("a")
        await bench.ask("b")
        queued = [
            Listener(bench.board, request(*PROMPT, max_tokens=20, adapter=bench.refs[name]))
            for name in "cab"
        ]
        for client in queued:
            assert (await client.end())[1] is FinishReason.STOP
        report = bench.board.report()
        assert (report.state, report.failed) == (BoardState.READY, 0)
        assert len(report.adapters) <= 2
        assert len(bench.engines) >= 2
        assert all(engine.stopped for engine in bench.engines[:-1])
        assert "reclaimed" in report.last_recovery
        (info,) = bench.board.generations()
        assert (info.state, info.kv) == (GenerationState.PAUSED, Kv.RECOMPUTED)
        await bench.board.control("paused", ControlAction.RESUME)
        assert (await paused.end())[1] is FinishReason.STOP

    adapter_test(body, tmp_path, max_adapters=2, crash_limit=1)


@pytest.mark.parametrize(
    "hurt",
    [
        pytest.param(lambda file: file.unlink(), id="it is missing"),
        pytest.param(lambda file: file.write_bytes(b"other"), id="it has changed"),
    ],
)
def test_a_file_that_is_not_the_adapter_is_refused_and_the_board_goes_on(
    tmp_path: Path, hurt: Callable[[Path], Any]
) -> None:
    async def body(bench: AdapterBench) -> None:
        hurt(bench.file("a"))
        with pytest.raises(AdapterBroken, match="'a@1' cannot be used: "):
            await bench.ask("a")
        await bench.ask("b")
        assert (bench.board.report().failed, len(bench.engines)) == (1, 1)

    adapter_test(body, tmp_path)


def test_a_file_that_the_runtime_refuses_is_named_and_not_tried_again(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        bench.engine.call_errors["load_adapter"] = CallFailed("rkllm_load_lora", -1)
        for _ in range(2):
            with pytest.raises(AdapterBroken, match=r"'a@1' .* rkllm_load_lora returned -1"):
                await bench.ask("a")
        assert len(bench.engine.calls) == 1
        await bench.ask("b")

    adapter_test(body, tmp_path)


async def test_a_board_without_a_folder_serves_no_adapter() -> None:
    bench = Bench()
    await bench.board.start()
    ref = AdapterRef("a", "1", "0" * 64)
    with pytest.raises(AdapterBroken, match="serves no adapters"):
        await Listener(bench.board, request(adapter=ref)).end()
    await bench.board.stop()


class DyingBench(AdapterBench):
    """Each of its engines dies of its first call."""

    async def _start(self, weights: Path | None) -> FakeEngine:
        engine = await super()._start(weights)
        call = engine.call

        def deadly(method: str, **args: Any) -> asyncio.Future[Any]:
            result = call(method, **args)
            engine.die("SIGSEGV")
            return result

        engine.call = deadly  # type: ignore[method-assign] # of a fake
        return engine


async def test_an_adapter_that_kills_engines_is_tried_twice(tmp_path: Path) -> None:
    bench = DyingBench(tmp_path)
    await bench.board.start()
    with pytest.raises(EngineDied):
        await bench.ask("a")
    await until(lambda: len(bench.engines) == 3 and bench.state is BoardState.READY)
    await bench.ask(None)
    await bench.board.stop()


# -- trials in a fresh engine ---------------------------------------------------------------------


class TrialBench(AdapterBench):
    """A board whose second engine, that of the trial, may be in trouble."""

    def __init__(self, folder: Path, trouble: Callable[[FakeEngine], Any] | None = None) -> None:
        super().__init__(folder, adapter_load_s=0.5, load_patience_s=0.05)
        self.trouble = trouble
        self.trying: list[str] = []  # as reported while engines start

    async def _start(self, weights: Path | None) -> FakeEngine:
        if self.engines:
            self.trying.append(self.board.report().trying)
        engine = await super()._start(weights)
        if len(self.engines) == 2 and self.trouble is not None:
            self.trouble(engine)
        return engine


def play_trial(
    folder: Path,
    body: Callable[[TrialBench], Any],
    trouble: Callable[[FakeEngine], Any] | None = None,
) -> None:
    async def main() -> None:
        bench = TrialBench(folder, trouble)
        await bench.board.start()
        try:
            await body(bench)
        finally:
            await bench.board.stop()
        assert all(engine.died.done() for engine in bench.engines), "none is left behind"

    run_loop(main())


def test_a_trial_takes_a_fresh_engine_that_serves_once_it_has_passed(tmp_path: Path) -> None:
    async def body(bench: TrialBench) -> None:
        bench.scripts = [SLOW]
        running = Listener(bench.board, request(*PROMPT, max_tokens=20))
        await until(lambda: len(running.ids) >= 2)
        queued = Listener(bench.board, request(*PROMPT, max_tokens=20))
        trial = asyncio.ensure_future(bench.board.try_adapter(bench.refs["a"], PROMPT, 4))
        await asyncio.sleep(0)
        assert bench.board.report().trying == "", "the run has the engine"
        found = await trial
        assert bench.trying == [bench.refs["a"].key]
        release = bench.engines[0].facts.release
        assert found == AdapterTrial(
            "m", bench.refs["a"].digest, PASSED, "a@1", "b", release=release
        )
        serving, tried = bench.engines
        assert (serving.stopped, serving.calls, serving.commands[0].adapter) == (True, [], None)
        assert [method for method, _ in tried.calls if method == "load_adapter"] == ["load_adapter"]
        for client in (running, queued):
            assert (await client.end())[1] is FinishReason.STOP
        report = bench.board.report()
        assert (report.state, report.failed, report.crashes) == (BoardState.READY, 0, ())
        assert (report.engine_starts, report.engine_renewals, report.trying) == (2, 1, "")
        assert report.adapters == (bench.refs["a"].key,)
        await bench.ask("a")
        assert len(tried.calls) == 1, "it is loaded already"

    play_trial(tmp_path, body)


def _crashes(engine: FakeEngine) -> None:
    call = engine.call

    def deadly(method: str, **args: Any) -> asyncio.Future[Any]:
        result = call(method, **args)
        engine.die("killed by SIGSEGV")
        return result

    engine.call = deadly  # type: ignore[method-assign] # of a fake


def _hangs(engine: FakeEngine) -> None:
    engine.call_gate = asyncio.Event()


def _refuses(engine: FakeEngine) -> None:
    engine.call_errors["load_adapter"] = CallFailed("rkllm_load_lora", -1)


def _gives_nothing(engine: FakeEngine) -> None:
    engine._scripts = lambda _: Script([])


def _dies_in_its_run(engine: FakeEngine) -> None:
    engine._scripts = lambda _: Script([(5, b"x")], die_at=0)


@pytest.mark.parametrize(
    ("trouble", "verdict", "reason"),
    [
        pytest.param(_crashes, TrialVerdict.CRASHED, "SIGSEGV", id="it crashes"),
        pytest.param(_dies_in_its_run, TrialVerdict.CRASHED, "SIGSEGV", id="it crashes in its run"),
        pytest.param(_hangs, TrialVerdict.HUNG, "did not return", id="it hangs"),
        pytest.param(_refuses, TrialVerdict.REFUSED, "returned -1", id="the library refuses it"),
        pytest.param(_gives_nothing, TrialVerdict.REFUSED, "no token", id="it gives nothing"),
    ],
)
def test_a_file_that_fails_its_trial_never_meets_an_engine_that_serves(
    tmp_path: Path, trouble: Callable[[FakeEngine], Any], verdict: TrialVerdict, reason: str
) -> None:
    async def body(bench: TrialBench) -> None:
        queued: list[Listener] = []

        def in_trouble(engine: FakeEngine) -> None:
            queued.append(Listener(bench.board, request(*PROMPT, max_tokens=20)))
            trouble(engine)

        bench.trouble = in_trouble
        found = await bench.board.try_adapter(bench.refs["a"], PROMPT, 4)
        assert (found.verdict, found.board_id) == (verdict, "b")
        assert reason in found.reason
        first, _, third = bench.engines
        assert not any(engine.calls for engine in (first, third))
        assert (await queued[0].end())[1] is FinishReason.STOP
        report = bench.board.report()
        assert (report.state, report.adapters, report.crashes) == (BoardState.READY, (), ())
        assert (await bench.ask(None)).reason is FinishReason.STOP

    play_trial(tmp_path, body)


def test_a_file_that_is_not_there_costs_no_engine(tmp_path: Path) -> None:
    async def body(bench: TrialBench) -> None:
        with pytest.raises(AdapterBroken, match="is missing"):
            await bench.board.try_adapter(AdapterRef("z", "1", "0" * 64), PROMPT, 4)
        assert len(bench.engines) == 1

    play_trial(tmp_path, body)


def test_a_board_that_does_not_come_back_still_tells_the_result(tmp_path: Path) -> None:
    async def body(bench: TrialBench) -> None:
        async def works() -> None:
            bench.starts = [_load_fails]

        bench.starts = [works]
        found = await bench.board.try_adapter(bench.refs["a"], PROMPT, 4)
        assert found.verdict is TrialVerdict.CRASHED
        assert bench.state is BoardState.FAILED

    play_trial(tmp_path, body, _crashes)


def test_no_second_engine_is_loaded_beside_one_that_cannot_be_ended(tmp_path: Path) -> None:
    def survives(engine: FakeEngine) -> None:
        _refuses(engine)
        engine.immortal = True

    async def body(bench: TrialBench) -> None:
        found = await bench.board.try_adapter(bench.refs["a"], PROMPT, 4)
        assert found.verdict is TrialVerdict.REFUSED
        assert (bench.state, len(bench.engines)) == (BoardState.HUNG, 2)
        with pytest.raises(BoardFailed, match="cannot be ended"):
            bench.board.check()
        bench.engine.die("at last")

    play_trial(tmp_path, body, survives)


def test_a_model_that_does_not_load_again_is_no_fault_of_the_file(tmp_path: Path) -> None:
    async def body(bench: TrialBench) -> None:
        bench.starts = [_load_fails]
        with pytest.raises(BoardFailed, match="out of NPU memory"):
            await bench.board.try_adapter(bench.refs["a"], PROMPT, 4)
        assert bench.state is BoardState.FAILED

    play_trial(tmp_path, body)


def test_a_board_that_stops_in_the_middle_of_a_trial_leaves_no_engine_behind(
    tmp_path: Path,
) -> None:
    async def body(bench: TrialBench) -> None:
        trying = asyncio.create_task(bench.board.try_adapter(bench.refs["a"], PROMPT, 4))
        await until(lambda: len(bench.engines) == 2 and bool(bench.engine.calls))
        await bench.board.stop()
        trying.cancel()
        await asyncio.wait({trying})

    play_trial(tmp_path, body, _hangs)


def test_the_bytes_of_the_files_count_and_are_reported(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        size = bench.file("a").stat().st_size
        assert bench.board.report().adapter_bytes == 0
        await bench.ask("a")
        await bench.ask("b")
        assert bench.board.report().adapter_bytes == 2 * size
        await bench.ask("c")
        report = bench.board.report()
        assert (report.adapter_bytes, report.adapters) == (size, (bench.refs["c"].key,))
        assert (report.engine_starts, report.engine_renewals) == (2, 1)

    adapter_test(body, tmp_path, max_adapter_bytes=2 * len(b"weights of a"))


async def _load_fails() -> None:
    raise LoadFailed("out of NPU memory")


def test_a_fresh_handle_that_cannot_be_had_fails_the_board(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.ask("a")
        bench.starts = [_load_fails]
        with pytest.raises(BoardFailed, match="out of NPU memory"):
            await bench.ask("b")
        assert bench.state is BoardState.FAILED

    adapter_test(body, tmp_path, max_adapters=1)


def test_a_named_cache_belongs_to_its_adapter(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "kv", CacheFingerprint("m", "r"), 1 << 20)

    async def body(bench: AdapterBench) -> None:
        await bench.board.build_cache("polite", PROMPT, bench.refs["a"])
        assert bench.engine.commands[0].adapter == bench.refs["a"].key
        with pytest.raises(RequestError, match="'polite' was made with the adapter a@1"):
            await bench.ask(None, use_cache="polite")
        assert (await bench.ask("a", *PROMPT, 9, use_cache="polite")).usage.cached_tokens == 3

    adapter_test(body, tmp_path, caches=store)
