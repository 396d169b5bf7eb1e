"""The real engine process over the simulated runtime: runs, loads, and its own end."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.engine.process import EngineProcess, EngineStarts, _confinement
from rkserve.board.engine.protocol import EngineSpec, EntryCommand, RunCommand, RunEnded
from rkserve.board.engine.telemetry import read_engine_use
from rkserve.core.errors import (
    BoardFailed,
    EngineDied,
    FrameCorrupt,
    LibraryMissing,
    LoadFailed,
    NativeError,
    ReleaseRefused,
    RunFailed,
)
from rkserve.core.messages import Delta, Finished, FinishReason, GenerateRequest
from rkserve.core.run_params import Confine
from rkserve.native import engine_frames
from rkserve.native.engine.confinement import landlock_version
from rkserve.native.engine_frames import FrameKind
from rkserve.native.runtime import RunEnd
from rkserve.native.sim.build import ensure_built
from tests.support.boards.board_bench import answer, text_of, until
from tests.support.boards.engine_bench import Recorder, command
from tests.support.boards.fakes import FakeEngine, Script, run_loop
from tests.support.sim.sim_board import TOKENIZER, Sim, ask, both_releases, chat

pytestmark = pytest.mark.executes_engine


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    """Return a place for one simulated board."""
    return Sim(tmp_path)


async def test_the_growth_of_a_leaking_engine_is_measured(sim: Sim) -> None:
    async with sim.engine() as engine:
        await engine.run(command(chat("Count to 3")), Recorder())
        before = read_engine_use(Path("/"), engine.pid)
        sim.leak(20, 7)
        for _ in range(3):
            await engine.run(command(chat("Count to 3")), Recorder())
        after = read_engine_use(Path("/"), engine.pid)
        assert before is not None
        assert before.files is not None
        assert after is not None
        assert after.files == before.files + 21
        assert after.most_files == before.most_files
        assert 55e6 < after.memory_bytes - before.memory_bytes < 90e6
        await engine.stop()
    assert read_engine_use(Path("/"), engine.pid) is None


# -- runs -------------------------------------------------------------------------------------


@both_releases
async def test_an_engine_loads_runs_and_stops_in_order(sim: Sim, release: str) -> None:
    sim.release = release
    async with sim.engine() as engine:
        assert engine.facts.release == release
        assert engine.facts.per_run_sampling is (release == "1.3.0")
        got = Recorder()
        prompt = chat("Repeat after me: Grüße, 你好 🍵!")
        ended = await engine.run(command(prompt, keep_history=True), got)
        assert got.data.decode() == "Grüße, 你好 🍵!"
        assert ended.end is RunEnd.FINISHED
        assert ended.perf.prefill_tokens == len(prompt)
        assert ended.kv_positions == (len(prompt) + len(got.ids) - 1,)  # without the EOS
        await engine.stop()
        assert engine.died.result() == "the engine process ended (exit code 0)"


@both_releases
async def test_the_second_turn_prefills_only_what_is_new(sim: Sim, release: str) -> None:
    sim.release = release
    async with sim.board() as board:
        first = await ask(board, chat("Count to 5"))
        prompt = chat("Count to 5", text_of(first), "What did I say first?")
        held = board.report().kv_positions
        second = await ask(board, prompt)
        end = second[-1]
        assert isinstance(end, Finished)
        assert 0 < held < len(prompt)
        assert end.usage.cached_tokens == held
        assert end.timings.prefill_tokens == len(prompt) - held
        assert "Count to 5" in text_of(second)
        fresh = await ask(board, chat("Count to 3"))
        assert text_of(fresh) == "1, 2, 3."


@both_releases
@pytest.mark.parametrize(
    ("extra", "text", "reason"),
    [
        pytest.param({"max_tokens": 4}, None, FinishReason.LENGTH, id="the token limit"),
        pytest.param({"stop": ("4, 5",)}, "1, 2, 3, ", FinishReason.STOP, id="a stop string"),
    ],
)
async def test_an_answer_that_is_cut_leaves_the_board_clean(
    sim: Sim, release: str, extra: dict[str, Any], text: str | None, reason: FinishReason
) -> None:
    sim.release = release
    async with sim.board() as board:
        cut = await ask(board, chat("Count to 50"), **extra)
        end = cut[-1]
        assert isinstance(end, Finished)
        assert end.reason is reason
        assert text_of(cut)
        assert "1, 2, 3, 4, 5".startswith(text_of(cut))
        assert text in (None, text_of(cut))
        assert end.usage.completion_tokens == extra.get("max_tokens", end.usage.completion_tokens)
        whole = await ask(board, chat("Count to 6"))
        assert text_of(whole) == "1, 2, 3, 4, 5, 6."
        assert board.report().engine_starts == 1


@both_releases
async def test_an_abort_ends_the_run_within_a_token(sim: Sim, release: str) -> None:
    sim.release = release
    sim.environ["RKSIM_TIME_SCALE"] = "0.1"
    async with sim.engine() as engine:
        got = Recorder()
        ended = engine.run(command(chat("Write 3000 tokens")), got)
        await got.first.wait()
        engine.abort(1)
        assert (await ended).end is RunEnd.FINISHED
        assert len(got.ids) < 3000
        again = Recorder()
        await engine.run(replace(command(chat("Count to 3"), 2), clear=True), again)
        assert again.data == b"1, 2, 3."


async def test_an_abort_right_behind_its_run_is_not_lost(sim: Sim) -> None:
    sim.environ["RKSIM_TIME_SCALE"] = "0.1"  # slow enough for a busy machine to abort in time
    async with sim.engine() as engine:
        for run_id in range(1, 21):
            got = Recorder()
            prompt = replace(command(chat("Write 3000 tokens"), run_id), clear=True)
            ended = engine.run(prompt, got)
            engine.abort(run_id)
            assert (await ended).end in (RunEnd.FINISHED, None)
            assert len(got.ids) < 3000


async def test_a_late_abort_does_not_touch_the_next_run(sim: Sim) -> None:
    async with sim.engine() as engine:
        for run_id in range(1, 21):
            got = Recorder()
            await engine.run(replace(command(chat("Count to 3"), run_id), clear=True), got)
            assert got.data == b"1, 2, 3."
            engine.abort(run_id)  # it has ended


@both_releases
async def test_hanging_up_frees_the_board(sim: Sim, release: str) -> None:
    sim.release = release
    sim.environ["RKSIM_TIME_SCALE"] = "0.5"
    async with sim.board() as board:
        events = board.generate(GenerateRequest("r", "m", chat("Write 3000 tokens"), 3000))
        async for event in events:
            if isinstance(event, Delta):
                break
        await events.aclose()
        started_s = time.monotonic()
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."
        assert time.monotonic() - started_s < 60.0  # 3,000 tokens would take over 100 s
        assert board.report().aborted == 1


async def test_what_the_library_refuses_is_explained_in_its_own_words(sim: Sim) -> None:
    async with sim.board(context_len=100_000) as board:
        with pytest.raises(RunFailed, match="E rkllm"):
            await ask(board, chat("far too long " * 4000))
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."
        assert board.report().engine_starts == 1


async def test_a_request_that_cannot_travel_fails_alone(sim: Sim) -> None:
    async with sim.board() as board:
        with pytest.raises(FrameCorrupt, match="32 bits"):
            await ask(board, (2**40,))
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."
        assert board.report().engine_starts == 1


# -- loading ----------------------------------------------------------------------------------


def text_file(place: Path) -> Path:
    file = place / "librkllmrt.so"
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    return file


def other_release(place: Path) -> Path:
    """A copy of the simulator that calls itself something else."""
    file = place / "librkllmrt.so"
    library = ensure_built("1.3.0").read_bytes()
    file.write_bytes(library.replace(b"RKLLM SDK (version: 1.3.0", b"RKLLM SDK (version: 1.3.2"))
    return file


@pytest.mark.parametrize(
    ("library", "error", "words"),
    [
        pytest.param(lambda p: p / "nowhere.so", LibraryMissing, "cannot be read", id="missing"),
        pytest.param(text_file, LibraryMissing, "not a shared library", id="not a library"),
        pytest.param(other_release, ReleaseRefused, r"1\.3\.2", id="an unknown release"),
    ],
)
async def test_a_library_that_cannot_be_used_is_refused_with_the_reason(
    sim: Sim, library: Callable[[Path], Path], error: type[NativeError], words: str
) -> None:
    with pytest.raises(error, match=words) as refused:
        await EngineProcess.start("b", replace(sim.spec(), library=str(library(sim.place))))
    assert type(refused.value) is error


@both_releases
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(
            "init_fail", "rkllm_init returned -1 .*the library logged: E rk", id="refused"
        ),
        pytest.param("init_segv", "crashed while it loaded the model: .*SIGSEGV", id="crash"),
        pytest.param(
            "init_signal:4", "SIGILL, .*this build of the library is not for this CPU", id="SIGILL"
        ),
        pytest.param("init_signal:7", "SIGBUS, .*compare checksums", id="SIGBUS"),
        pytest.param("init_null_handle", "no handle", id="0 and no handle"),
        pytest.param("init_hang", "not loaded within 2 s", id="hang"),
    ],
)
async def test_a_load_that_fails_says_why(sim: Sim, release: str, fault: str, words: str) -> None:
    sim.release = release
    sim.fault(fault)
    limit_s = 2.0 if fault == "init_hang" else 30.0
    spec = replace(sim.spec(), load_timeout_s=limit_s, fence_timeout_s=0.0)
    with pytest.raises(LoadFailed, match=words):
        await EngineProcess.start("b", spec)
    with (sim.place / "npu.fence").open() as fence:
        fcntl.flock(fence, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the process is really gone


async def test_a_model_that_does_not_fit_is_explained_by_the_library(sim: Sim) -> None:
    params = replace(sim.spec().params, max_context_len=1 << 20)
    with pytest.raises(LoadFailed, match="max_context_limit"):
        await EngineProcess.start("b", replace(sim.spec(), params=params))


async def test_a_later_release_is_served_where_that_is_allowed_and_named_as_unlisted(
    sim: Sim,
) -> None:
    later: dict[str, Any] = {"library": str(other_release(sim.place)), "allow_unlisted": True}
    async with sim.engine(**later) as engine:
        assert engine.facts.release == "1.3.2 (unlisted, driven as 1.3.1)"
        ended = await engine.run(command(chat("Count to 3")), Recorder())
        assert ended.end is RunEnd.FINISHED
    sim.fault("segv_at_token:1")  # of the trial: the fault occurs once
    with pytest.raises(ReleaseRefused, match=r"1\.3\.2 .*failed its trial: crashed: SIGSEGV"):
        await EngineProcess.start("b", replace(sim.spec(), **later))


async def test_an_unknown_quirk_is_refused_by_name(sim: Sim) -> None:
    with pytest.raises(LoadFailed, match="unknown name flies"):
        await EngineProcess.start("b", replace(sim.spec(), quirks={"flies": True}))


async def test_the_fence_keeps_a_second_engine_off_the_npu(sim: Sim) -> None:
    async with sim.engine() as engine:
        with pytest.raises(LoadFailed, match=f"held by another engine .pid {engine.pid},"):
            await EngineProcess.start("b", replace(sim.spec(), fence_timeout_s=0.2))
        waiting = asyncio.create_task(EngineProcess.start("b", sim.spec()))
        await asyncio.sleep(0.2)
        assert await engine.kill()
        second = await waiting  # it waited for its predecessor's end
        await second.stop()


async def test_text_mode_sends_the_prompt_as_it_is(sim: Sim) -> None:
    rendered = "<|im_start|>user\nRepeat after me: once<|im_end|>\n<|im_start|>assistant\n"
    async with sim.engine(text_mode=True) as engine:
        got = Recorder()
        asked = RunCommand(1, (EntryCommand(prompt_text=rendered),), clear=True)
        ended = await engine.run(asked, got)
        assert got.data == b"once"
        assert ended.perf.prefill_tokens == len(TOKENIZER.encode(rendered).ids)


async def test_cancelling_a_start_leaves_no_process(sim: Sim) -> None:
    sim.fault("init_hang")
    starting = asyncio.create_task(EngineProcess.start("b", sim.spec()))
    fence = sim.place / "npu.fence"
    await until(lambda: fence.exists() and fence.read_text() != "")
    pid = int(fence.read_text())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_start_that_is_cancelled_as_its_process_begins_leaves_none(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: asyncio.Future[EngineProcess] = asyncio.get_running_loop().create_future()
    spawn = EngineProcess._spawn

    async def spawned(engine: EngineProcess, spec: EngineSpec) -> None:
        await spawn(engine, spec)
        begun.set_result(engine)  # this test resumes before the start does

    monkeypatch.setattr(EngineProcess, "_spawn", spawned)
    starting = asyncio.create_task(EngineProcess.start("b", sim.spec()))
    engine = await begun
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.died.done()


async def test_a_program_that_cannot_be_started_is_reported(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(sim.place / "missing"))
    with pytest.raises(FileNotFoundError):
        await EngineProcess.start("b", sim.spec())


def test_an_engine_whose_loop_ends_has_its_pipes_closed(sim: Sim) -> None:
    """The engine of a replica that ends without having stopped it ends by itself."""

    async def start() -> EngineProcess:
        return await EngineProcess.start("b", sim.spec())

    engine = asyncio.run(start())
    assert engine._child._process.wait(timeout=60) == 0
    pipes = (engine._child._process.stdin, engine._child._process.stdout)
    assert all(pipe is not None and pipe.closed for pipe in pipes)


# -- the process by itself --------------------------------------------------------------------


def engine_alone(**kwargs: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rkserve.native.engine.process", "0.05"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


def test_an_engine_ends_when_its_stdin_closes() -> None:
    with engine_alone() as process:
        assert process.stdout is not None
        assert process.stdout.read(5)  # a beat: it is up
        assert process.communicate(timeout=60)[1] == b""
        assert process.returncode == 0


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


async def test_an_engine_takes_no_memory_for_openssl_and_numpy(sim: Sim) -> None:
    async with sim.engine() as engine:
        maps = maps_of(engine.pid)
    assert "librkllmrt-sim" in maps
    assert "libcrypto" not in maps
    assert "numpy" not in maps


async def test_an_engine_in_the_middle_of_a_run_ends_when_its_stdin_closes(sim: Sim) -> None:
    """What happens when a board's replica is killed: nothing may go on holding the NPU."""
    async with sim.engine() as engine:
        sim.fault("hang_at_token:4")
        got = Recorder()
        ended = engine.run(command(chat("Count to 50")), got)
        await got.first.wait()
        engine._child.stdin.close()
        await asyncio.wait_for(asyncio.shield(engine.died), 60)
        with pytest.raises(EngineDied):
            await ended


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        pytest.param(b"this is no frame at all", b"FrameCorrupt", id="no frames"),
        pytest.param(
            engine_frames.pack(FrameKind.LOAD, {}),
            b"E rkserve: internal error: KeyError",
            id="a bug",
        ),
    ],
)
def test_an_engine_that_cannot_go_on_says_so_and_ends(sent: bytes, words: bytes) -> None:
    with engine_alone() as process:
        assert process.stdin is not None
        process.stdin.write(sent)
        process.stdin.flush()
        assert process.wait(timeout=60) == os.EX_SOFTWARE
        assert process.stderr is not None
        assert words in process.stderr.read()


def test_what_the_library_prints_does_not_get_between_the_frames(sim: Sim) -> None:
    """Its stdout is the frames' pipe at birth; the noisiest log level must not reach it."""

    async def main() -> None:
        async with sim.engine() as engine:
            for run_id in (1, 2, 3):
                got = Recorder()
                asked = replace(command(chat("Count to 9"), run_id), clear=True)
                ended: RunEnded = await engine.run(asked, got)
                assert ended.end is RunEnd.FINISHED
                assert got.data == b"1, 2, 3, 4, 5, 6, 7, 8, 9."
            assert any("rkllm" in line for line in engine._stderr)

    sim.environ |= {"RKLLM_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    run_loop(main())


# -- what the process may do ------------------------------------------------------------------


def own(name: str, pid: int | str = "self") -> str:
    return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b"\n").decode()


def proc(engine: EngineProcess, name: str) -> str:
    return own(name, engine.pid)


@both_releases
async def test_an_engine_has_no_secrets_leaves_no_core_and_dies_first(
    sim: Sim, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim.release = release
    monkeypatch.setenv("RKSERVE_ADMIN_KEY", "secret-1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    before = int(own("oom_score_adj"))
    async with sim.engine(inherit=("OMP_WAIT_POLICY",)) as engine:
        environ = proc(engine, "environ")
        assert "secret-1" not in environ
        assert "OMP_WAIT_POLICY=passive" in environ
        (limit,) = [row for row in proc(engine, "limits").splitlines() if "core file" in row]
        assert limit.split()[4:6] == ["1", "1"]
        assert int(proc(engine, "oom_score_adj")) == min(1000, before + 500)
        assert "NoNewPrivs:\t1" in proc(engine, "status")


@both_releases
async def test_a_confined_engine_does_all_that_an_engine_does(sim: Sim, release: str) -> None:
    sim.release = release
    ref = sim.adapter("pirate")
    cache = sim.place / "caches"
    cache.mkdir()
    files: dict[str, Any] = {"reads": (str(sim.models),), "writes": (str(cache),)}
    async with sim.engine(confine=Confine.AUTO, **files) as engine:
        assert "seccomp" in engine.facts.confined
        assert ("Landlock" in engine.facts.confined) == (landlock_version() > 0)
        assert "Seccomp:\t2" in proc(engine, "status")
        path = str(sim.models / "adapters" / "pirate" / "1" / "adapter.rkllm")
        await engine.call("load_adapter", path=path, name=ref.key, scale=1.0)
        prompt, file = chat("Repeat after me: one two three"), str(cache / "kept")
        extras: list[dict[str, Any]] = [{}, {"adapter": ref.key}, {"save_cache": file}]
        for number, extra in enumerate(extras):
            got = Recorder()
            ended = await engine.run(replace(command(prompt, number + 1), **extra), got)
            assert ended.end is RunEnd.FINISHED
            assert b"one two three" in got.data
        kept = await asyncio.to_thread(Path(file).stat)
        assert kept.st_size > 0
        ended = await engine.run(replace(command(prompt, 9), load_cache=file), Recorder())
        assert (ended.end, ended.cache_refused) == (RunEnd.FINISHED, None)


async def test_a_confined_library_notes_its_faults_where_the_node_s_environment_says(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_CONTROL", str(sim.control))
    given = sim.spec().environ
    own = {name: value for name, value in given.items() if name != "RKSIM_CONTROL"}
    sim.fault("error_at_token:2")
    async with sim.engine(confine=Confine.AUTO, environ=own) as engine:
        ended = await engine.run(command(chat("Count to 5"), 1), Recorder())
        assert ended.end is RunEnd.FAILED
        assert sim.control.with_name(f"{sim.control.name}.fired").exists()


async def test_an_engine_that_does_not_load_confined_is_started_without(sim: Sim) -> None:
    starts, spec = EngineStarts("b"), replace(sim.spec(), confine=Confine.AUTO)
    sim.fault("init_fail")  # once
    with pytest.raises(LoadFailed):
        await starts.start(spec, trusted=False)  # weights on trial
    sim.fault("init_fail")
    for _ in range(2):  # the later ones at once
        engine = await starts.start(spec, trusted=True)
        assert engine.facts.confined.startswith("off: it did not load its model confined")
        assert "Seccomp:\t0" in proc(engine, "status")
        await engine.kill()
    sim.fault("init_fail")
    with pytest.raises(LoadFailed):
        await starts.start(replace(spec, confine=Confine.ON), trusted=True)


@pytest.mark.parametrize(
    ("fault", "loaded"), [("init_segv", False), ("init_hang", False), ("init_fail", True)]
)
async def test_an_engine_is_not_started_without_confinement_for_a_fault_of_its_own(
    sim: Sim, fault: str, loaded: bool
) -> None:
    limit_s = 2.0 if fault == "init_hang" else 30.0
    spec = replace(sim.spec(), confine=Confine.AUTO, load_timeout_s=limit_s, fence_timeout_s=0.0)
    starts = EngineStarts("b")
    if loaded:
        await (await starts.start(spec, trusted=True)).kill()
    sim.fault(fault)
    with pytest.raises(LoadFailed):
        await starts.start(spec, trusted=True)


async def test_an_engine_may_read_the_folders_of_libraries(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}::{tmp_path}/absent")
    read = json.loads(_confinement(sim.spec()))["read"]
    assert str(tmp_path) in read
    assert not {"", f"{tmp_path}/absent"} & {*read}


async def test_an_engine_on_cpus_reads_its_file_and_none_beside_it(
    sim: Sim, tmp_path: Path
) -> None:
    (file := tmp_path / "models" / "m.gguf").parent.mkdir()
    (linked := tmp_path / "m.gguf").symlink_to(file)
    spec = sim.spec()
    params = replace(spec.params, model_path=str(linked))
    made = _confinement(replace(spec, cpu=True, params=params))
    read = set(json.loads(made)["read"])
    assert {str(linked), str(file)} <= read
    assert not {str(tmp_path), str(file.parent)} & read


async def test_a_hidden_dependency_is_a_reason_to_start_without_confinement(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[Confine]()

    async def start(_: str, spec: EngineSpec) -> FakeEngine:
        given.append(spec.confine)
        if spec.confine is not Confine.OFF:
            raise LibraryMissing("libdependency.so: cannot open shared object file")
        return FakeEngine(lambda _: Script([]))

    monkeypatch.setattr(EngineProcess, "start", start)
    spec = replace(sim.spec(), confine=Confine.AUTO)
    engine = await EngineStarts("b").start(spec, trusted=True)
    assert given == [Confine.AUTO, Confine.OFF]
    assert engine.facts.confined.startswith("off")


async def test_stop_ends_a_board_in_the_middle_of_a_run(sim: Sim) -> None:
    sim.environ["RKSIM_TIME_SCALE"] = "0.5"
    async with sim.board() as board:
        pid = board.report().engine_pid
        asked = GenerateRequest("r", "m", chat("Write 3000 tokens"), 3000)
        running = asyncio.create_task(answer(board, *asked.prompt_ids, max_tokens=3000))
        await until(lambda: board.report().running == 1)
        await asyncio.sleep(0.2)
        await board.stop()
        with pytest.raises(BoardFailed, match="shuts down"):
            await running
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
