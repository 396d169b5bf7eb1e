"""A board that gets other base weights: every token is said by the weights that its span names."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore
from rkserve.core.board_report import BoardState, GenerationState
from rkserve.core.desired_state import ActivePause, Adoption, InFlight, PauseMode, Scope, SleepLevel
from rkserve.core.errors import (
    BoardBehind,
    CacheNotFound,
    EngineDied,
    GenerationNotFound,
    RebaseFailed,
    StateConflict,
)
from rkserve.core.messages import ControlAction, FinishReason, GenerateRequest
from rkserve.native.sim.models import reseed
from tests.support.boards.board_bench import Listener, until
from tests.support.boards.holding import PACE, SAYING, in_turn, rest, seeded
from tests.support.boards.rebased import (
    BROKEN,
    CONTENT,
    SEEDS,
    Rebased,
    Voices,
    base_of,
    give,
    play,
    started,
)
from tests.support.sim.sim_board import FOLDER, GREEDY, words

WAYS = pytest.mark.parametrize("in_flight", list(InFlight), ids=lambda way: way.value)
S = GenerationState
UNHURRIED = 2.0  # some 100 ms a token


async def ends(*clients: Listener) -> None:
    await asyncio.gather(*(client.end() for client in clients))


def is_on(it: Rebased, label: str) -> bool:
    report = it.board.report()
    base = it.bases.get(label)
    return (report.state, report.base) == (BoardState.READY, "" if base is None else base.digest)


# -- which file, and whose caches --------------------------------------------------------------


# -- what becomes of requests ---------------------------------------------------------------------


@in_turn
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
def test_switched_ones_go_on_from_their_words_with_the_other_weights(
    tmp_path: Path, release: str, n_batch: int, native: bool
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        first = await it.midway(native_pause=native)
        others = [it.told.ask(f"{SAYING} {n}", native_pause=native) for n in range(3)]
        adoption = await it.switch("w1")
        assert (adoption.held, adoption.missing_base, adoption.refused) == (False, None, "")
        assert adoption.switched >= 1
        assert adoption.kept == 0  # the KV cache is of the other weights
        assert is_on(it, "w1")
        await ends(first, *others)
        voices.check(first, "default", "w1")
        for client in others:
            voices.check(client)
            assert client.finished is not None
            assert client.finished.versions[-1].version == "w1"
        report = it.board.report()
        assert (report.state, report.reason, report.engine_renewals) == (BoardState.READY, "", 1)
        assert report.last_recovery == "its base weights are replaced"
        said = voices.says("default", first.asked.prompt_ids, len(first.ids))
        assert said != first.ids  # else nobody could tell the weights apart

    play(tmp_path, body, release, n_batch)


@in_turn
def test_pinned_ones_end_first_and_what_comes_meanwhile_waits(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        first = await it.midway()
        before = it.told.ask(f"{SAYING} before")
        await until(lambda: it.board.report().queued == 1)
        adopting = started(it.switch("w1", InFlight.PIN))
        await rest()
        after = it.told.ask(f"{SAYING} after")
        await until(lambda: it.board.report().queued == 2)
        await rest()
        assert (adopting.done(), len(first.ids)) == (False, 5)
        assert it.board.report().base == ""
        it.sim.tap.release()
        assert (await adopting).switched == 0
        await ends(first, before, after)
        voices.check(first, "default")
        voices.check(before, "w1")
        voices.check(after, "w1")

    play(tmp_path, body, release, n_batch)


@in_turn
def test_aborted_ones_keep_what_they_have_and_those_that_wait_get_the_other_weights(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        first = await it.midway()
        waits = it.told.ask(f"{SAYING} later")
        await until(lambda: it.board.report().queued == 1)
        adoption = await it.switch("w1", InFlight.ABORT)
        assert (adoption.aborted, adoption.switched) == (1, 0)
        assert (await first.end())[1] is FinishReason.ABORT
        await ends(waits)
        voices.check(first, "default")
        voices.check(waits, "w1")

    play(tmp_path, body, release, n_batch)


@in_turn
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
@pytest.mark.parametrize("in_flight", [InFlight.PIN, InFlight.SWITCH], ids=["pin", "switch"])
def test_whoever_is_paused_by_its_client_is_not_waited_for_and_goes_on_with_the_others(
    tmp_path: Path, release: str, n_batch: int, native: bool, in_flight: InFlight
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        # A pause inside the runtime must not come after the last token.
        client = await it.midway(slowly=UNHURRIED, native_pause=native)
        generation = client.asked.request_id.partition("/")[0]
        await it.board.control(generation, ControlAction.PAUSE)
        await until(lambda: it.told.state(client) is S.PAUSED)
        await until(lambda: not any(job.pending for job in it.board.books.jobs.values()))
        it.sim.pace(PACE)
        there = list(client.ids)
        await it.switch("w1", in_flight)
        assert is_on(it, "w1")
        await rest()
        assert (it.told.state(client), client.ids) == (S.PAUSED, there)
        await it.board.control(generation, ControlAction.RESUME)
        await ends(client)
        voices.check(client, "default", "w1")

    play(tmp_path, body, release, n_batch)


@in_turn
@WAYS
def test_under_a_pause_nobody_is_waited_for_and_all_go_on_after_the_release(
    tmp_path: Path, release: str, n_batch: int, in_flight: InFlight
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        first = await it.midway(slowly=UNHURRIED, native_pause=True)
        others = [it.told.ask(f"{SAYING} {n}") for n in range(2)]
        await it.told.hold()
        it.sim.pace(PACE)
        there = list(first.ids)
        adoption = await it.switch("w1", in_flight)
        assert adoption.held
        assert is_on(it, "w1")
        await rest()
        assert first.ids == there
        await it.told.release()
        await ends(first, *others)
        if in_flight is InFlight.ABORT:
            assert first.finished is not None
            assert first.finished.reason is FinishReason.ABORT
            voices.check(first, "default")
        else:
            voices.check(first, "default", "w1")
        for client in others:
            voices.check(client)

    play(tmp_path, body, release, n_batch)


def test_other_weights_and_the_release_may_come_in_one_epoch(tmp_path: Path) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        client = await it.midway()
        await it.told.hold()
        await it.switch("w1", pauses=())
        assert is_on(it, "w1")
        await ends(client)
        voices.check(client, "default", "w1")

    play(tmp_path, body)


def test_one_that_forbids_a_switch_ends_first(tmp_path: Path) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        client = await it.midway(keep_version=True)
        adopting = started(it.switch("w1"))
        await rest()
        assert not adopting.done()
        it.sim.tap.release()
        await adopting
        await ends(client)
        voices.check(client, "default")

    play(tmp_path, body)


def test_a_label_alone_loads_nothing(tmp_path: Path) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        await it.switch("w1")
        loads = list(it.sim.loads)
        it.bases["step-7"] = base_of(reseed(CONTENT, SEEDS["w1"]), "step-7")
        await it.switch("step-7")
        assert it.sim.loads == loads
        client = it.told.ask()
        await ends(client)
        assert client.finished is not None
        assert [span.version for span in client.finished.versions] == ["step-7"]

    play(tmp_path, body)


# -- told otherwise meanwhile ---------------------------------------------------------------------


@in_turn
def test_weights_that_nobody_wants_any_more_are_not_loaded(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        client = await it.midway()
        adopting = started(it.switch("w1", InFlight.PIN))
        await rest()
        back = await it.switch("default", InFlight.PIN)
        first = await adopting
        assert (first.epoch, back.epoch) == (back.epoch, back.epoch)
        assert len(it.sim.loads) == 1
        it.sim.tap.release()
        await ends(client)
        voices.check(client, "default")

    play(tmp_path, body, release, n_batch)


@in_turn
@pytest.mark.parametrize("then", ["default", "w2", "w1"])
def test_what_it_is_told_while_it_loads_counts_in_the_end(
    tmp_path: Path, release: str, n_batch: int, then: str
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        client = await it.midway()
        adopting = started(it.switch("w1"))
        await until(lambda: len(it.sim.loads) == 2)
        later = await it.switch(then)
        assert (await adopting).epoch == later.epoch
        assert is_on(it, then)
        await ends(client)
        voices.check(client, "default", *([] if then == "default" else [then]))
        assert len(it.sim.loads) == (2 if then == "w1" else 3)

    play(tmp_path, body, release, n_batch)


def test_a_pause_that_comes_while_it_loads_holds_and_so_does_a_switch_after_a_pin(
    tmp_path: Path,
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        client = await it.midway()
        adopting = started(it.switch("w1", InFlight.PIN))
        await rest()
        assert not adopting.done()
        held, hurried = await asyncio.gather(
            it.told.hold(), it.switch("w1", InFlight.SWITCH, pauses=_keep())
        )
        assert (held.held, hurried.held) == (True, True)
        await adopting
        assert is_on(it, "w1")
        there = list(client.ids)
        await rest()
        assert client.ids == there
        await it.told.release()
        await ends(client)
        voices.check(client, "default", "w1")

    play(tmp_path, body)


def _keep() -> tuple[ActivePause, ...]:
    return (ActivePause("op", Scope(), PauseMode.KEEP),)


def test_whoever_asked_may_leave_and_it_is_done_all_the_same(tmp_path: Path) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        client = await it.midway()
        adopting = started(it.switch("w1", InFlight.PIN))
        await rest()
        adopting.cancel()
        await asyncio.wait({adopting})
        it.sim.tap.release()
        await ends(client)
        await until(lambda: is_on(it, "w1"))
        after = it.told.ask()
        await ends(after)
        voices.check(after, "w1")

    play(tmp_path, body)


def test_an_engine_that_crashes_while_it_waits_for_its_end_is_replaced_by_the_other_one(
    tmp_path: Path,
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        client = await it.midway()
        adopting = started(it.switch("w1", InFlight.PIN))
        await rest()
        it.told.kill()
        await until(lambda: it.board.report().state is not BoardState.READY)
        it.sim.tap.release()
        await adopting
        assert is_on(it, "w1")
        await asyncio.wait({client.task})
        assert isinstance(client.error, EngineDied)
        after = it.told.ask()
        await ends(after)
        voices.check(after, "w1")

    play(tmp_path, body)


def test_an_engine_that_crashes_later_is_loaded_with_the_same_weights(tmp_path: Path) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        await it.switch("w1")
        it.told.kill()
        await until(lambda: it.board.report().engine_starts == 3)
        assert it.sim.loads[-1].stem == it.bases["w1"].digest
        client = it.told.ask()
        await ends(client)
        voices.check(client, "w1")

    play(tmp_path, body)


# -- files ----------------------------------------------------------------------------------------


def test_without_the_file_it_serves_nothing_new_until_that_has_come(tmp_path: Path) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        client = await it.midway()
        content = reseed(CONTENT, 3)
        it.bases["w3"] = base_of(content, "w3")
        adoption = await it.switch("w3")
        assert adoption.missing_base == it.bases["w3"]
        assert adoption.lacking == (it.bases["w3"],)
        report = it.board.report()
        assert (report.state, report.missing, report.base) == (BoardState.JOINING, 1, "")
        assert "w3" in report.reason
        with pytest.raises(BoardBehind, match="missing files"):
            await it.told.ask().end()
        it.sim.tap.release()  # what it has begun it ends
        await ends(client)
        voices.check(client, "default")
        give(it.board, content, "w3")
        assert it.bases["w3"].key in it.board.report().staged
        again = await it.board.adopt(it.told.desired)
        assert (again.missing_base, again.epoch) == (None, adoption.epoch)
        assert is_on(it, "w3")

    play(tmp_path, body)


def test_prompt_caches_of_other_weights_are_never_used_and_named_ones_come_back_with_theirs(
    tmp_path: Path,
) -> None:
    prompt = words(f"{SAYING} of long ago, " * 4)
    caches = CacheStore(tmp_path / "cache", CacheFingerprint("folder", "1.3.0"), 1 << 30)

    async def restores(it: Rebased, voices: Voices, label: str, *asked: int, **extra: Any) -> bool:
        await it.board.clear_kv(keep_system_prompt=False)  # what is in RAM needs no file
        client = Listener(
            it.board,
            GenerateRequest("c", FOLDER.id, (*prompt, *asked), 20, sampling=GREEDY, **extra),
        )
        await ends(client)
        voices.check(client, label)
        return it.sim.tap.commands[-1].load_cache is not None

    async def body(it: Rebased, voices: Voices) -> None:
        await it.board.build_cache("doc", prompt)
        assert await restores(it, voices, "default", 7, use_cache="doc")
        await it.told.ask(f"{SAYING} and more of it").end()
        await it.told.ask("Something else").end()  # parks what was there
        await it.board.caching.settled()
        assert [entry.name for entry in it.board.caches()].count(None) >= 1
        await it.switch("w1")
        assert it.board.caches() == []
        with pytest.raises(CacheNotFound):
            await restores(it, voices, "w1", 7, use_cache="doc")
        assert not await restores(it, voices, "w1", 7)
        await it.board.build_cache("doc", prompt)
        assert await restores(it, voices, "w1", 8, use_cache="doc")
        await it.switch("default")
        assert [entry.name for entry in it.board.caches()] == ["doc"]
        assert await restores(it, voices, "default", 8, use_cache="doc")
        it.bases["bad"] = give(it.board, BROKEN["magic"][0], "bad")
        with pytest.raises(RebaseFailed):
            await it.switch("bad")
        await it.switch("default")
        assert [entry.name for entry in it.board.caches()] == ["doc"]

    play(tmp_path, body, caches=caches, park_min_tokens=10)


# -- asleep ---------------------------------------------------------------------------------------


ASLEEP = (ActivePause("op", Scope(), PauseMode.KEEP, level=SleepLevel.UNLOADED),)


@in_turn
def test_a_board_that_sleeps_notes_its_weights_and_loads_them_when_it_wakes(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        client = await it.midway()
        await it.told.tell(pauses=ASLEEP)
        adoption = await it.switch("w1")
        assert (adoption.level, adoption.refused) == (SleepLevel.UNLOADED, "")
        report = it.board.report()
        assert (report.state, report.base) == (BoardState.ASLEEP, it.bases["w1"].digest)
        assert len(it.sim.loads) == 1
        await it.told.release()
        assert is_on(it, "w1")
        assert [file.stem for file in it.sim.loads[1:]] == [it.bases["w1"].digest]
        await ends(client)
        voices.check(client, "default", "w1")

    play(tmp_path, body, release, n_batch)


def test_weights_and_sleep_may_come_in_one_epoch_and_so_may_others_and_the_wake(
    tmp_path: Path,
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        client = await it.midway()
        asleep = await it.switch("w1", pauses=ASLEEP)
        assert (asleep.level, it.board.report().base) == (
            SleepLevel.UNLOADED,
            it.bases["w1"].digest,
        )
        await it.switch("w2", pauses=())
        assert is_on(it, "w2")
        assert [file.stem for file in it.sim.loads[1:]] == [it.bases["w2"].digest]
        await ends(client)
        voices.check(client, "default", "w2")

    play(tmp_path, body)


def test_weights_that_cannot_be_loaded_at_the_wake_give_way_to_those_of_before(
    tmp_path: Path,
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        it.bases["bad"] = give(it.board, BROKEN["magic"][0], "bad")
        await it.switch("w1")
        await it.told.tell(pauses=ASLEEP)
        await it.switch("bad")
        with pytest.raises(RebaseFailed, match="magic"):
            await it.told.release()
        report = it.board.report()
        assert (report.state, report.base) == (BoardState.JOINING, it.bases["w1"].digest)
        asleep = await it.told.tell(pauses=ASLEEP)  # that works all the same
        assert (asleep.level, "magic" in asleep.refused) == (SleepLevel.UNLOADED, True)
        await it.switch("w1", pauses=())
        client = it.told.ask()
        await ends(client)
        voices.check(client, "w1")

    play(tmp_path, body)


# -- whatever happens -----------------------------------------------------------------------------


class Chance:
    """Random things done to a board that is given random weights."""

    def __init__(self, it: Rebased, seed: int, *, kills: bool) -> None:
        self.it = it
        self.kills = kills
        self.rolls = random.Random(seed)
        self.clients: list[Listener] = []
        self.calls: list[asyncio.Task[Adoption]] = []

    async def step(self) -> None:
        it, rolls = self.it, self.rolls
        roll = rolls.random()
        if roll < 0.35:
            native, tokens = rolls.random() < 0.5, rolls.choice((5, 40, 90))
            said = f"{SAYING} {len(self.clients)}"
            self.clients.append(it.told.ask(said, tokens, native_pause=native))
        elif roll < 0.6:
            label = rolls.choice(("default", *SEEDS))
            self.calls.append(started(it.switch(label, rolls.choice(list(InFlight)))))
        elif roll < 0.7:
            self.calls.append(started(it.told.hold()))
        elif roll < 0.8:
            self.calls.append(started(it.told.release()))
        elif roll < 0.85:
            self.calls.append(started(it.told.tell(pauses=ASLEEP)))
        elif roll < 0.95 and self.clients:
            await self._control(rolls.choice(self.clients))
        elif roll < 0.97 and self.calls:
            rolls.choice(self.calls).cancel()
        elif self.kills and it.board.report().engine_pid:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                it.told.kill()
        await asyncio.sleep(rolls.choice((0.0, 0.0, 0.01, 0.05)))

    async def _control(self, client: Listener) -> None:
        action = self.rolls.choice((ControlAction.PAUSE, ControlAction.RESUME))
        try:
            await self.it.board.control(client.asked.request_id.partition("/")[0], action)
        except (StateConflict, GenerationNotFound):
            return  # it is not in a state for that

    async def settle(self) -> None:
        """Let everything go on and come to its end."""
        await self.it.told.release()
        for call in self.calls:
            await asyncio.wait({call})
            if not call.cancelled() and not self.kills:
                call.result()  # none of these weights is bad
        for label in ("w2", "w1"):  # an engine that was killed in a trial has refused one of them
            await self.it.switch(label)
        while not all(client.task.done() for client in self.clients):
            for client in self.clients:
                if self.it.told.state(client) is S.PAUSED:
                    await self.it.board.control(
                        client.asked.request_id.partition("/")[0], ControlAction.RESUME
                    )
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "kills",
    [pytest.param(False, id="calm", marks=pytest.mark.long), pytest.param(True, id="crashes")],
)
@seeded(3)
def test_whatever_happens_every_word_is_of_the_weights_that_it_is_put_down_to(
    tmp_path: Path, release: str, n_batch: int, seed: int, kills: bool
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        chance = Chance(it, seed, kills=kills)
        for _ in range(40):
            await chance.step()
        await chance.settle()
        assert is_on(it, "w1")
        for client in chance.clients:
            if client.error is None:
                voices.check(client)
            else:  # an engine may be killed in the trial run of weights, too: the board is behind
                assert isinstance(client.error, (EngineDied, BoardBehind) if kills else BoardBehind)

    play(tmp_path, body, release, n_batch)
