"""A board under the cluster's holds: what is held emits nothing, and goes on as if nothing was."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.run.job import EngineRun
from rkserve.core.board_report import BoardState, GenerationState
from rkserve.core.desired_state import (
    ActivePause,
    Desired,
    InFlight,
    PauseMode,
    Probe,
    Scope,
)
from rkserve.core.errors import (
    BoardBehind,
    BoardFailed,
    EnginePaused,
    GenerationNotFound,
    PauseExpired,
    QueueTimeout,
    RunFailed,
    StateConflict,
)
from rkserve.core.messages import ControlAction, FailoverState, FinishReason
from rkserve.native.sim import models as sim_models
from tests.support.boards.board_bench import SETTINGS, Bench, Listener, request, until
from tests.support.boards.fakes import EOS, Script, run_loop, tokens_of
from tests.support.boards.holding import (
    LINE,
    PACE,
    SAYING,
    Governed,
    Oracle,
    governed,
    in_turn,
    rest,
    seeded,
)
from tests.support.sim.sim_board import words

S = GenerationState


def play(
    place: Path,
    body: Callable[[Governed, Oracle], Coroutine[Any, Any, None]],
    *args: Any,
    **extra: Any,
) -> None:
    """Run ``body`` with a board and an oracle that holds the same versions."""

    async def main() -> None:
        async with governed(place, *args, **extra) as told:
            oracle = Oracle()
            for version, seed in (("v1", 1), ("v2", 2)):
                content = sim_models.render_adapter("Tone", seed=seed)
                oracle.stage(told.stage_content(version, content), content)
            await body(told, oracle)

    run_loop(main(), 120.0)


@pytest.mark.promise("Pause", "It is answered when every selected board has stopped emitting")
@in_turn
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
@pytest.mark.parametrize("clear", [False, True], ids=["kept", "cleared"])
def test_nothing_comes_after_the_answer_and_the_rest_after_the_release(
    tmp_path: Path, release: str, n_batch: int, native: bool, clear: bool
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        clients = [told.ask(f"{SAYING} {n}", 200, native_pause=native) for n in range(4)]
        await told.said(clients[0], 5)
        for _ in range(3):
            adoption = await told.hold(clear=clear)
            before = [list(client.ids) for client in clients]
            assert adoption.stopped >= 1
            assert adoption.kept == int(native and n_batch == 1 and not clear)
            assert (adoption.held, told.board.report().hold) == (True, "keep")
            await rest()
            assert [client.ids for client in clients] == before
            told.stand(3)
            await told.release()
            there = sum(len(ids) for ids in before)
            await until(lambda: sum(len(c.ids) for c in clients) >= there + 3)  # noqa: B023
        told.pace()
        for client in clients:
            assert (await client.end())[1] in (FinishReason.LENGTH, FinishReason.STOP)
            oracle.check(client, told.versions)

    play(tmp_path, body, release, n_batch)


LONG = " ".join([SAYING] * 60)


async def in_prefill(told: Governed, count: int = 1, **extra: Any) -> list[Listener]:
    """Start so many requests that are in their prefill, and stay there until ``told.sim.pace``."""
    told.sim.gate("prefill")
    await told.hold()  # so that a batch begins with all of them, however busy the machine is
    clients = [told.ask(f"{LONG} {n}", **extra) for n in range(count)]
    await until(lambda: told.board.report().queued == count)
    await told.release()
    await told.sim.at_gate()
    busy = clients[: told.board.settings.n_batch]
    await until(lambda: all(told.state(client) is S.PREFILLING for client in busy))
    return clients


def running(told: Governed) -> EngineRun:
    run = told.board.slot.live.running
    assert run is not None
    return run


@in_turn
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
def test_a_hold_in_the_prefill_does_not_wait_for_its_end(
    tmp_path: Path, release: str, n_batch: int, native: bool
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        clients = await in_prefill(told, n_batch, native_pause=native)
        run = running(told)
        adoption = await told.hold()
        assert (adoption.stopped, adoption.kept, adoption.held) == (n_batch, 0, True)
        assert not run.over.done()
        assert [told.state(client) for client in clients] == [S.PAUSED] * n_batch
        assert told.board.report().running == n_batch  # the handle is busy until that run is over
        told.pace()
        await run.over
        await rest()
        assert [client.ids for client in clients] == [[]] * n_batch
        assert told.board.slot.live.context.ids in (None, ())
        await told.release()
        for client in clients:
            await client.end()
            oracle.check(client, told.versions)
            assert client.finished is not None
            assert client.finished.usage.prompt_tokens == len(client.asked.prompt_ids)
            assert client.finished.timings.prefill_tokens == len(client.asked.prompt_ids)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_a_hold_does_not_wait_for_the_end_of_a_decoding_step(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        told.sim.gate("token:5")  # where it stays whatever it is asked
        await told.hold()
        clients = [told.ask(f"{SAYING} {n}") for n in range(n_batch)]
        await until(lambda: told.board.report().queued == n_batch)
        await told.release()
        await until(lambda: all(len(client.ids) >= 5 for client in clients))
        run = running(told)
        before = [list(client.ids) for client in clients]
        adoption = await told.hold()
        assert (adoption.stopped, adoption.kept, adoption.held) == (n_batch, 0, True)
        assert dict(adoption.emitted) == {c.asked.request_id: len(c.ids) for c in clients}
        assert not run.over.done()
        assert [told.state(client) for client in clients] == [S.PAUSED] * n_batch
        told.pace()
        await run.over
        await rest()
        assert [client.ids for client in clients] == before
        await told.release()
        for client in clients:
            await client.end()
            oracle.check(client, told.versions)
            assert client.finished is not None
            assert client.finished.usage.completion_tokens == len(client.ids)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_an_answer_that_is_stopped_again_in_the_prefill_keeps_what_it_has(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        client = told.ask(LONG, 80, native_pause=True)
        await told.said(client, 5)
        await told.hold(clear=True)
        there = list(client.ids)
        told.sim.gate("prefill")
        await told.release()
        await told.sim.at_gate()
        await until(lambda: told.state(client) is S.PREFILLING)
        run = running(told)
        await told.hold()
        assert not run.over.done()
        assert (client.ids, told.state(client)) == (there, S.PAUSED)
        told.pace()
        await told.release()
        await client.end()
        assert client.ids[: len(there)] == there
        oracle.check(client, told.versions)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_released_and_held_again_while_the_muted_run_goes_on(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        clients = await in_prefill(told, n_batch)
        run = running(told)
        for _ in range(3):
            await told.hold()
            states = {told.state(client) for client in clients}
            assert states <= {S.PAUSED, S.QUEUED}
            await told.release()
            assert {told.state(client) for client in clients} == {S.QUEUED}
        assert running(told) is run
        await told.hold()
        told.pace()
        await run.over
        await rest()
        assert [client.ids for client in clients] == [[]] * n_batch
        assert told.board.report().running == 0
        await told.release()
        for client in clients:
            await client.end()
            oracle.check(client, told.versions)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_what_is_muted_can_be_aborted_left_and_paused_by_its_client(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        for what in ("abort", "hang up", "pause"):
            told.number = 0
            clients = await in_prefill(told, n_batch)
            run = running(told)
            await told.hold()
            if what == "abort":
                await told.board.control("g1", ControlAction.ABORT)
                assert (await clients[0].end()) == ("", FinishReason.ABORT)
            elif what == "hang up":
                await clients[0].hang_up()
            else:
                [info] = await told.board.control("g1", ControlAction.PAUSE)
                assert (info.state, info.paused_by) == (S.PAUSED, "request")
            assert not run.over.done()
            await told.release()
            told.pace()
            if what == "pause":
                await run.over
                await rest()
                assert (clients[0].ids, told.state(clients[0])) == ([], S.PAUSED)
                await told.board.control("g1", ControlAction.RESUME)
            for client in clients if what == "pause" else clients[1:]:
                await client.end()
                oracle.check(client, told.versions)
            await until(lambda: told.board.report().running == 0)

    play(tmp_path, body, release, n_batch)


@in_turn
@pytest.mark.parametrize("released", [False, True], ids=["held", "released"])
def test_an_engine_that_dies_in_a_muted_run_costs_nobody_an_answer(
    tmp_path: Path, release: str, n_batch: int, released: bool
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        clients = await in_prefill(told, n_batch)
        run = running(told)
        await told.hold()
        if released:
            await told.release()
        assert not run.over.done()
        told.kill()
        told.pace()
        await until(lambda: told.board.report().engine_starts == 2)
        if not released:
            await rest()
            assert [client.ids for client in clients] == [[]] * n_batch
            await told.release()
        for client in clients:
            await client.end()
            oracle.check(client, told.versions)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_errands_and_a_clear_wait_for_the_end_of_a_muted_run(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        clients = await in_prefill(told, n_batch)
        run = running(told)
        await told.hold()
        ref, prompt = told.versions["v1"].ref, clients[0].asked.prompt_ids
        loading = asyncio.create_task(told.board.load_adapter(ref, prompt, 4))
        asked = [asyncio.create_task(told.hold(clear=True)) for _ in range(2)]
        await rest()
        assert not run.over.done()
        assert not any(task.done() for task in (loading, *asked))
        told.pace()
        assert (await loading).tokens == 4
        assert all([(await task).held for task in asked])
        assert run.over.done()
        assert set(told.board.slot.live.positions) == {0}
        await told.release()
        for client in clients:
            await client.end()
            oracle.check(client, told.versions)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_an_abort_in_the_prefill_does_not_wait_for_its_end(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        clients = await in_prefill(told, n_batch + 1)
        run = running(told)
        adoption = await told.hold(PauseMode.ABORT)
        assert (adoption.aborted, adoption.held) == (n_batch + 1, True)
        assert not run.over.done()
        for client in clients:
            assert await client.end() == ("", FinishReason.ABORT)
        await told.release()
        told.pace()
        after = told.ask()
        await after.end()
        oracle.check(after, told.versions)

    play(tmp_path, body, release, n_batch)


LIMIT_S = 1.0  # longer than the machine stands still where the time has just begun to run


def test_what_is_asked_under_a_hold_waits_without_its_time_running(tmp_path: Path) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        client = told.ask()
        await told.said(client, 4)
        await told.board.control("g1", ControlAction.PAUSE)
        await told.hold()
        late = told.ask(f"{SAYING} late")
        await rest(1.3 * LIMIT_S)
        assert (told.state(client), told.state(late)) == (S.PAUSED, S.QUEUED)
        await told.release()
        await late.end()
        oracle.check(late, told.versions)
        with pytest.raises(PauseExpired):
            await client.end()

    play(tmp_path, body, queue_timeout_s=LIMIT_S, pause_timeout_s=LIMIT_S)


def test_time_runs_again_after_the_release(tmp_path: Path) -> None:
    async def body(told: Governed, _: Oracle) -> None:
        told.sim.gate("prefill")
        await told.hold()
        first, second = told.ask(max_tokens=400), told.ask()
        await told.release()
        with pytest.raises(QueueTimeout):
            await second.end()
        told.pace()
        await first.hang_up()

    play(tmp_path, body, queue_timeout_s=LIMIT_S)


def test_a_clients_own_pause_outlives_the_hold_and_its_resumption_waits_for_the_release(
    tmp_path: Path,
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        mine, theirs = told.ask(native_pause=True), None
        await told.said(mine, 4)
        await told.board.control("g1", ControlAction.PAUSE)
        await told.hold()
        await told.release()
        await rest()
        assert told.state(mine) is S.PAUSED
        await told.hold()
        [info] = await told.board.control("g1", ControlAction.RESUME)
        assert (info.state, info.paused_by) == (S.PAUSED, "cluster")
        theirs = list(mine.ids)
        await rest()
        assert mine.ids == theirs
        await told.release()
        await mine.end()
        oracle.check(mine, told.versions)

    play(tmp_path, body)


def test_what_the_cluster_stopped_a_client_can_pause_for_longer(tmp_path: Path) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        client = told.ask()
        await told.said(client, 4)
        await told.hold()
        [info] = await told.board.control("g1", ControlAction.PAUSE)
        assert (info.state, info.paused_by) == (S.PAUSED, "request")
        with pytest.raises(StateConflict):
            await told.board.control("g1", ControlAction.PAUSE)
        await told.release()
        await rest()
        assert told.state(client) is S.PAUSED
        await told.board.control("g1", ControlAction.RESUME)
        await client.end()
        oracle.check(client, told.versions)

    play(tmp_path, body)


@in_turn
def test_abort_ends_all_and_takes_nothing_new(tmp_path: Path, release: str, n_batch: int) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        clients = [told.ask(f"{SAYING} {n}") for n in range(4)]
        await told.said(clients[0], 4)
        adoption = await told.hold(PauseMode.ABORT, expires_s=time.time() + 41.5)
        assert adoption.aborted == 4
        assert [(await client.end())[1] for client in clients] == [FinishReason.ABORT] * 4
        oracle.check(clients[0], told.versions)
        with pytest.raises(EnginePaused) as refused:
            await told.ask().end()
        assert refused.value.retry_after_s in (41, 42)
        await told.release()
        assert (await told.ask(max_tokens=3).end())[1] is FinishReason.LENGTH

    play(tmp_path, body, release, n_batch)


@pytest.mark.promise(
    "Pause", "`abort` and `wait`: new requests get 503 `engine_paused` with `Retry-After`"
)
@in_turn
def test_wait_returns_when_all_have_ended(tmp_path: Path, release: str, n_batch: int) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        clients = [told.ask(f"{SAYING} {n}") for n in range(4)]
        last = told.ask(f"{SAYING} and stay")
        await told.said(clients[0], 4)
        adopting = asyncio.create_task(told.hold(PauseMode.WAIT))
        await until(lambda: told.board.report().hold == "wait")
        with pytest.raises(EnginePaused):
            await told.ask().end()
        told.pace()
        adoption = await adopting
        assert (adoption.stopped, adoption.aborted) == (0, 0)
        assert told.board.slot.live.running is None
        for client in (*clients, last):
            assert client.task.done()
            oracle.check(client, told.versions)

    play(tmp_path, body, release, n_batch)


WAITS = ActivePause("waits", Scope(), PauseMode.WAIT)
KEEPS = ActivePause("keeps", Scope(), PauseMode.KEEP)


@pytest.mark.virtual_time
@pytest.mark.parametrize("pauses", [(WAITS,), (KEEPS, WAITS)], ids=["wait", "keep and wait"])
async def test_an_answer_of_a_lost_board_waits_for_the_end_of_a_confirmed_pause(
    pauses: tuple[ActivePause, ...],
) -> None:
    bench = Bench()
    async with bench.running():
        await bench.board.adopt(Desired(1, pauses=pauses))
        client = Listener(bench.board, request(continued=FailoverState()))
        await asyncio.sleep(5.0)
        assert (client.accepted, client.ids) == (True, [])
        await bench.board.adopt(Desired(2))
        assert await client.end() == ("Hello", FinishReason.STOP)


@pytest.mark.virtual_time
async def test_a_broadcast_gives_no_board_its_first_state() -> None:
    bench = Bench(settings=replace(SETTINGS, governed=True))
    await bench.board.start()
    with pytest.raises(BoardBehind, match="no desired state yet"):
        await bench.board.follow(Desired(7))
    assert bench.state is BoardState.JOINING
    await bench.board.adopt(Desired(7))
    assert (await bench.board.follow(Desired(8))).epoch == 8
    await bench.board.stop()


@pytest.mark.virtual_time
async def test_an_answer_of_a_lost_board_ends_while_a_pause_waits_for_others() -> None:
    slow = Script([*tokens_of("a", "b", "c", "d"), (EOS, b"")], pace_s=0.2)
    bench = Bench(slow)
    async with bench.running():
        first = Listener(bench.board, request())
        await until(lambda: first.ids != [])
        adopting = asyncio.create_task(bench.board.adopt(Desired(1, pauses=(WAITS,))))
        await until(lambda: bench.board.report().hold == "wait")
        client = Listener(bench.board, request(continued=FailoverState()))
        await adopting
        assert await first.end() == ("abcd", FinishReason.STOP)
        assert await client.end() == ("Hello", FinishReason.STOP)
        await bench.board.adopt(Desired(2))


@pytest.mark.virtual_time
async def test_keep_stops_what_a_wait_lets_end_and_its_end_resumes_nothing() -> None:
    bench = Bench(Script([*tokens_of("Hel", "lo"), (EOS, b"")], pace_s=0.2))
    async with bench.running():
        client = Listener(bench.board, request())
        await until(lambda: client.ids != [])
        waiting = asyncio.create_task(bench.board.adopt(Desired(1, pauses=(WAITS,))))
        await until(lambda: bench.board.report().hold == "wait")
        await bench.board.adopt(Desired(2, pauses=(WAITS, KEEPS)))
        await waiting
        before = list(client.ids)
        assert len(before) == 1  # of three
        await bench.board.adopt(Desired(3, pauses=(WAITS,)))
        await asyncio.sleep(5.0)
        assert client.ids == before
        await bench.board.adopt(Desired(4))
        assert (await client.end())[1] is FinishReason.STOP


@pytest.mark.promise("Pause", "Per cluster, model, boards or adapter")
def test_a_hold_of_one_adapter_leaves_the_others_alone(tmp_path: Path) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        await told.serve("v1")
        held = told.ask(line=LINE)
        await told.said(held, 4)
        await told.hold(adapter=LINE)
        before, other = list(held.ids), told.ask()
        await other.end()
        assert held.ids == before
        await told.release()
        await held.end()
        for client in (held, other):
            oracle.check(client, told.versions)

    play(tmp_path, body)


def test_epochs_never_go_back_and_the_later_of_two_wins(tmp_path: Path) -> None:
    async def body(told: Governed, _: Oracle) -> None:
        client = told.ask(max_tokens=400)
        await told.said(client, 4)
        waiting = asyncio.create_task(told.hold(PauseMode.WAIT))
        await until(lambda: told.board.report().epoch == 1)
        released = await told.release()
        assert (await waiting).epoch == released.epoch == 2
        assert (await told.board.adopt(Desired(epoch=1))).epoch == 2
        assert told.board.report().hold == ""
        await client.hang_up()

    play(tmp_path, body)


def test_who_is_overtaken_answers_when_the_later_one_rests(tmp_path: Path) -> None:
    async def body(told: Governed, _: Oracle) -> None:
        [client] = await in_prefill(told, max_tokens=20)
        first = asyncio.create_task(told.hold(clear=True))  # clears when the run has ended
        await until(lambda: told.board.report().hold == PauseMode.KEEP.value)
        await told.release()
        later = asyncio.create_task(told.hold(PauseMode.WAIT))
        await until(lambda: told.board.report().hold == PauseMode.WAIT.value)
        told.sim.gate("token:3")
        await until(lambda: len(client.ids) >= 3)
        await rest()
        assert not first.done()
        told.pace()
        await client.end()
        assert (await first).epoch == (await later).epoch == told.desired.epoch

    play(tmp_path, body)


@in_turn
def test_an_engine_that_dies_under_a_hold_leaves_it_held_and_nothing_lost(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        clients = [told.ask(f"{SAYING} {n}", native_pause=n == 0) for n in range(3)]
        await told.said(clients[0], 5)
        await told.hold()
        before = [list(client.ids) for client in clients]
        told.kill()
        await until(lambda: told.board.report().engine_starts == 2)
        await rest()
        assert [client.ids for client in clients] == before
        assert told.board.report().hold == "keep"
        await told.release()
        for client in clients:
            await client.end()
            oracle.check(client, told.versions)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_a_hang_up_under_a_hold_frees_everything(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, _: Oracle) -> None:
        clients = [told.ask(f"{SAYING} {n}", native_pause=True) for n in range(4)]
        await told.said(clients[0], 4)
        await told.hold()
        for client in clients:
            await client.hang_up()
        await until(lambda: told.board.report().running == 0)
        report = told.board.report()
        assert (report.queued, report.paused, told.board.generations()) == (0, 0, [])

    play(tmp_path, body, release, n_batch)


def test_errands_are_done_on_a_held_board_at_once(tmp_path: Path) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        client = told.ask(native_pause=True)
        await told.said(client, 4)
        await told.hold()
        probe = await told.board.load_adapter(told.versions["v2"].ref, client.asked.prompt_ids, 8)
        assert (probe.tokens, probe.key) == (8, told.versions["v2"].ref.key)
        assert told.board.report().adapters == (probe.key,)
        await told.board.refresh("for the test")
        assert told.board.report().adapters == ()
        await told.release()
        await client.end()
        oracle.check(client, told.versions)

    play(tmp_path, body)


class Crowd:
    """Random things done to a board that is told random things."""

    def __init__(self, told: Governed, oracle: Oracle, seed: int) -> None:
        self.told, self.oracle = told, oracle
        self.rolls = random.Random(seed)
        self.clients: list[Listener] = []
        self.held: dict[int, int] = {}  # tokens that were there when a hold was acknowledged
        self.aborted: set[int] = set()
        self.hung_up: set[int] = set()
        self.killed = False
        self.loads: list[asyncio.Task[Probe]] = []
        self.story: list[str] = []

    async def step(self) -> None:
        steps = (self.ask, self.ask, self.hold, self.release, self.control, self.control)
        more = (self.switch, self.load, self.hang_up, self.pace, self.wait, self.wait)
        one = self.rolls.choice((*steps, *more, self.kill)) if self.rolls.random() < 0.9 else None
        self.story.append("wait" if one is None else one.__name__)
        await (one or self.wait)()
        for at, tokens in self.held.items():
            assert len(self.clients[at].ids) == tokens, (at, self.story)

    async def wait(self) -> None:
        await asyncio.sleep(self.rolls.choice((0.0, 0.001, 0.01, 0.03)))

    async def ask(self) -> None:
        if len(self.clients) < 12:
            rolls = self.rolls
            extra = rolls.choice(({}, {"line": LINE}, {"line": LINE, "keep_version": True}))
            said = " ".join([SAYING] * rolls.choice((1, 1, 12))) + f" {len(self.clients)}"
            native, most = rolls.random() < 0.5, rolls.choice((5, 60, 120))
            self.clients.append(self.told.ask(said, most, native_pause=native, **extra))

    async def hold(self) -> None:
        self.held.clear()
        adapter = self.rolls.choice((None, None, LINE))
        await self.told.hold(adapter=adapter, clear=self.rolls.random() < 0.3)
        for at, client in enumerate(self.clients):
            if adapter is None or client.asked.line == adapter:
                self.held[at] = len(client.ids)

    async def release(self) -> None:
        self.held.clear()
        await self.told.release()

    async def switch(self) -> None:
        if self.rolls.random() < 0.5:
            self.held.clear()
            await self.told.serve(self.rolls.choice(("v1", "v2")), InFlight.SWITCH, pauses=())
        else:
            how = self.rolls.choice((InFlight.PIN, InFlight.SWITCH))
            await self.told.serve(self.rolls.choice(("v1", "v2")), how)

    async def pace(self) -> None:
        """Now and then a prefill takes so long that it is held, released, or made to give way."""
        self.told.sim.pace(self.rolls.choice((PACE, PACE, 0.2)))

    async def load(self) -> None:
        ref = self.rolls.choice(list(self.told.versions.values())).ref
        self.loads.append(asyncio.create_task(self.told.board.load_adapter(ref, words(SAYING), 3)))

    async def control(self) -> None:
        if not self.clients:
            return
        at = self.rolls.randrange(len(self.clients))
        action = self.rolls.choice(
            (ControlAction.PAUSE, ControlAction.PAUSE, ControlAction.RESUME, ControlAction.ABORT)
        )
        if action is ControlAction.ABORT and self.rolls.random() < 0.6:
            return
        try:
            await self.told.board.control(f"g{at + 1}", action)
        except (StateConflict, GenerationNotFound):  # it has not begun, or has ended
            return
        if action is ControlAction.ABORT:
            self.aborted.add(at)

    async def hang_up(self) -> None:
        if self.clients and self.rolls.random() < 0.4:
            at = self.rolls.randrange(len(self.clients))
            self.hung_up.add(at)
            await self.clients[at].hang_up()

    async def kill(self) -> None:
        if self.rolls.random() < 0.3:
            starts = self.told.board.report().engine_starts
            self.told.kill()
            self.killed = True
            await until(lambda: self.told.board.report().engine_starts > starts)

    async def settle(self) -> int:
        """Everybody goes on and gets what is due; return how many answers were whole."""
        await self.release()
        self.told.pace()
        for found in await asyncio.gather(*self.loads, return_exceptions=True):
            lost = self.killed and isinstance(found, BoardFailed)
            assert lost or (isinstance(found, Probe) and found.tokens == 3), (found, self.story)
        whole = 0
        for at, client in enumerate(self.clients):
            while not client.task.done():
                if self.told.state(client) is S.PAUSED:
                    await self.told.board.control(f"g{at + 1}", ControlAction.RESUME)
                await asyncio.sleep(0.002)
            if client.error is not None:
                assert self.killed, (client.error, self.story)
                # What the engine refuses was asked for wrongly.
                assert isinstance(client.error, BoardFailed), client.error
                assert not isinstance(client.error, RunFailed), (client.error, self.story)
            elif at not in self.hung_up:
                self.oracle.check(client, self.told.versions)
                finished = client.finished
                assert finished is not None
                aborted = finished.reason is FinishReason.ABORT
                assert not aborted or at in self.aborted
                whole += not aborted
        await until(lambda: self.told.board.report().running == 0)
        report = self.told.board.report()
        assert (report.queued, report.paused, self.told.board.generations()) == (0, 0, [])
        return whole


@seeded(6, 3)
def test_at_random_nothing_is_lost_or_mixed_up(
    tmp_path: Path, release: str, n_batch: int, seed: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        await told.serve("v1")
        for at in range(3):
            told.stage(f"x{at}", at + 10)
        whole = 0
        for part in range(3):
            crowd = Crowd(told, oracle, seed * 100 + part)
            told.number = 0
            for _ in range(40):
                await crowd.step()
            whole += await crowd.settle()
        assert whole >= 5

    play(tmp_path, body, release, n_batch, max_paused=100, load_patience_s=0.005)
