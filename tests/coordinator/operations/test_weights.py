"""Weights through the Coordinator: a trainer's updates at one instant, base weights in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rkserve.control.calls import ArtifactMetadata, OperationKind
from rkserve.control.operations import OperationState, Phase, ResultStatus
from rkserve.coordinator.operations.adapters import GarbageCollector
from rkserve.core.desired_state import BaseVersion
from rkserve.core.errors import (
    ArtifactNotFound,
    ArtifactRefused,
    OperationConflict,
    RequestError,
    StageFailed,
    StaleWeights,
)
from rkserve.models.files import Parameter
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import MODEL, Control, FakeBoard, FakeCluster

pytestmark = pytest.mark.slow

K, S = OperationKind, OperationState
ONE, TWO = b"base one" * 30, b"base two" * 31
PARAMETERS = (Parameter("lm_head", (4, 8), "bfloat16"),)


@asynccontextmanager
async def control(folder: Path, **settings: Any) -> AsyncIterator[Control]:
    """A Coordinator of three boards that follow, with the adapter versions v1 (served) and v2."""
    it = Control(folder, FakeCluster.of("a", "b", "c"), settings=settings)
    await it.open()
    try:
        await eventually(lambda: it.follows)
        for version in ("v1", "v2"):
            assert (await it.stage(it.store.add(version, version.encode() * 40))).status == 200
        assert (await it.roll("v1")).status == 200
        yield it
    finally:
        await it.close()


def base(it: Control, name: str = "one", content: bytes = ONE) -> BaseVersion:
    return it.store.add_base(name, content)


def bases(it: Control) -> list[str]:
    """Return what the boards have loaded, by what the cluster calls it."""
    known = {"": "folder"} | {one.digest: one.version for one in it.store.bases.values()}
    return [known[board.base] for board in it.cluster.boards.values()]


def served(it: Control) -> set[str]:
    """Return the versions of the adapter that the boards give to requests by the bare name."""
    lines = {board.target.line("tone") for board in it.cluster.boards.values() if board.target}
    return {one.active.ref.version for one in lines if one is not None and one.active is not None}


def v2(it: Control) -> Any:
    return it.store.add("v2", b"v2" * 40)


def phases(outcome: Any) -> list[str]:
    return [name for name, _ in outcome.operation.phases]


async def reaches(it: Control, phase: Phase) -> None:
    """Wait until an operation is at a phase."""
    await eventually(lambda: any(one.phase is phase for one in it.it._state.running))


# -- a trainer's updates -----------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["pin", "switch", "abort"])
async def test_an_update_of_an_adapter_is_an_atomic_rollout_that_notes_the_step(
    tmp_path: Path, in_flight: str
) -> None:
    async with control(tmp_path) as it:
        for board in it.cluster.boards.values():
            board.stops = 2
        before = it.desired.epoch
        outcome = await it.update(v2(it), 7, in_flight=in_flight)
        assert (outcome.status, outcome.applied) == (200, True)
        assert served(it) == {"v2"}
        assert it.desired.weights_of(MODEL).step == 7
        assert it.held == []
        # One epoch for the hold, one for everything else.
        assert it.desired.epoch == before + 2
        held = ["loading", "stopping"] if in_flight == "pin" else ["stopping", "loading"]
        assert phases(outcome) == ["locking", "staging", *held, "releasing"]
        stopped = [one.details["stopped"] for one in outcome.operation.results.values()]
        assert stopped == [2, 2, 2]


async def test_an_update_of_base_weights_holds_all_boards_until_all_have_loaded(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        emitting: list[set[str]] = []

        def after(_board: FakeBoard, _method: str) -> None:
            emitting.append({one.base for one in it.cluster.boards.values() if one.serves})

        it.cluster.after = after
        outcome = await it.update(base(it), 7)
        assert outcome.status == 200
        assert bases(it) == ["one"] * 3
        assert max(len(one) for one in emitting) == 1
        assert set() in emitting  # all were held
        weights = it.desired.weights_of(MODEL)
        assert (weights.label, weights.step, weights.rebase) == ("one", 7, None)
        assert it.held == []
        expected = ["locking", "checking", "staging", "stopping", "switching", "releasing"]
        assert phases(outcome) == expected


@pytest.mark.promise("Weights", "Two at once and stale steps are a 409; the last step is kept")
@pytest.mark.parametrize("step", [6, 7])
@pytest.mark.parametrize("what", ["adapter", "base"])
async def test_a_step_that_is_not_later_is_refused_before_anything_pauses(
    tmp_path: Path, step: int, what: str
) -> None:
    async with control(tmp_path) as it:
        assert (await it.update(v2(it), 7)).status == 200
        before = it.desired
        late = base(it) if what == "base" else v2(it)
        with pytest.raises(StaleWeights, match="Step 7 of model"):
            await it.update(late, step)
        assert it.desired == before
        assert (await it.update(v2(it), 8)).applied
        assert it.desired.weights_of(MODEL).step == 8


async def test_a_repeat_with_the_same_key_answers_what_the_first_one_did(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        first = await it.update(v2(it), 7, key="step-7")
        again = await it.update(v2(it), 7, key="step-7")
        assert (again.status, again.applied) == (200, False)
        assert again.operation.id == first.operation.id
        with pytest.raises(RequestError, match="Idempotency-Key"):
            await it.update(v2(it), 8, key="step-7")


@pytest.mark.promise("Weights", "Two at once and stale steps are a 409; the last step is kept")
@pytest.mark.parametrize("first", ["update", "rebase"])
@pytest.mark.parametrize("second", ["update", "rebase", "roll", "label"])
async def test_two_at_once_are_refused(tmp_path: Path, first: str, second: str) -> None:
    async with control(tmp_path) as it:
        calls: dict[str, Callable[[], Any]] = {
            "update": lambda: it.update(v2(it), 7),
            "rebase": lambda: it.rebase(base(it)),
            "roll": lambda: it.roll("v2"),
            "label": lambda: it.call(K.LABEL, model=MODEL, label="x"),
        }
        it.cluster["b"].frozen = True
        going_on = asyncio.create_task(calls[first]())
        await eventually(lambda: it.it._state.running)
        with pytest.raises(OperationConflict):
            await calls[second]()
        it.cluster["b"].frozen = False
        assert (await going_on).status == 200


async def test_what_is_not_staged_is_not_found_and_nothing_pauses(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        before = it.desired
        with pytest.raises(ArtifactNotFound):
            await it.update(it.store.add("v9", b"v9"), 7)
        gone = base(it)
        it.store.files.clear()
        outcome = await it.update(gone, 7)
        assert (outcome.status, outcome.operation.state) == (503, S.FAILED)
        assert it.desired == before
        assert it.cluster["a"].asked["adopt"] == it.cluster["b"].asked["adopt"]


async def test_base_weights_cannot_be_pinned_everywhere_at_once(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        with pytest.raises(RequestError, match="in_flight"):
            await it.update(base(it), 7, in_flight="pin")
        assert not it.it._state.running


@pytest.mark.promise("Weights", "An update that fails on one board is undone on all")
async def test_an_update_that_fails_on_one_board_is_undone_on_all(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        assert (await it.update(base(it), 3)).status == 200
        two = base(it, "two", TWO)
        it.cluster["b"].cannot_load.add(two.digest)
        outcome = await it.update(two, 7)
        assert (outcome.status, outcome.operation.state) == (503, S.UNDONE)
        assert outcome.operation.error is not None
        assert outcome.operation.error.code == "rebase_failed"
        assert "b" in outcome.operation.error.message
        await eventually(lambda: it.follows)
        assert bases(it) == ["one"] * 3
        assert it.held == []
        weights = it.desired.weights_of(MODEL)
        assert (weights.step, weights.label) == (3, "one")
        # It was tried once: a load takes long, and the next one would say the same.
        assert it.cluster["b"].loads.count(two.digest) == 1


@pytest.mark.parametrize("method", ["stage_begin", "stage_commit"])
async def test_what_does_not_reach_a_board_pauses_nobody(tmp_path: Path, method: str) -> None:
    async with control(tmp_path) as it:
        it.cluster["b"].refuses[method] = StageFailed("b", "its disk is full")
        before = it.desired
        outcome = await it.update(base(it), 7)
        assert outcome.operation.state is S.FAILED
        assert it.desired == before


async def test_a_board_that_falls_silent_in_the_hold_leaves_nobody_paused(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        it.cluster["b"].slow_s["adopt"] = 60.0
        outcome = await it.update(v2(it), 7)
        assert outcome.operation.state is S.UNDONE
        assert outcome.operation.error is not None
        assert outcome.operation.results["b"].status is ResultStatus.SILENT
        it.cluster["b"].slow_s.clear()
        await eventually(lambda: it.follows)
        assert it.held == []
        assert served(it) == {"v1"}
        assert it.desired.weights_of(MODEL).step is None


async def test_a_board_that_joins_while_others_load_has_the_new_weights_before_it_serves(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        served_by_d: set[str] = set()

        def after(_board: FakeBoard, _method: str) -> None:
            if "d" in it.cluster.boards and it.cluster["d"].serves:
                served_by_d.add(it.cluster["d"].base)

        it.cluster.after = after
        one = base(it)

        def before(board: FakeBoard, method: str) -> None:
            switching = any(o.phase is Phase.SWITCHING for o in it.it._state.running)
            if method == "adopt" and switching and "d" not in it.cluster.boards:
                it.cluster.boards["d"] = FakeBoard("d")

        it.cluster.before = before
        assert (await it.update(one, 7)).status in (200, 207)
        await eventually(lambda: it.follows and "d" in it.cluster.boards)
        await eventually(lambda: it.cluster["d"].serves)
        await eventually(lambda: served_by_d)
        assert served_by_d == {one.digest}


# -- base weights in turn ----------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2])
async def test_boards_load_base_weights_in_turn(tmp_path: Path, most: int) -> None:
    async with control(tmp_path) as it:
        one = base(it)
        away: list[int] = []

        def before(_board: FakeBoard, method: str) -> None:
            boards = it.cluster.boards.values()
            if method == "adopt":
                away.append(sum(one.base != one.wanted_base for one in boards))

        for board in it.cluster.boards.values():
            board.stops = 3
        it.cluster.before = before
        outcome = await it.rebase(one, max_unavailable=most)
        assert (outcome.status, outcome.operation.state) == (200, S.SUCCEEDED)
        assert bases(it) == ["one"] * 3
        assert it.held == []
        assert it.desired.pauses == ()
        assert it.desired.weights_of(MODEL).base == one
        switched = [board.loads for board in it.cluster.boards.values()]
        assert switched == [[one.digest]] * 3
        stopped = [result.details["stopped"] for result in outcome.operation.results.values()]
        # A board that another call has sent the new state to before has nothing left to stop.
        assert 3 in stopped
        assert set(stopped) <= {0, 3}


@pytest.mark.promise("Weights", "Base weights come board by board, or to all at once for a trainer")
async def test_the_next_board_begins_only_when_the_one_before_serves(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        one = base(it)
        it.cluster["a"].slow_s["adopt"] = 0.3
        going_on = asyncio.create_task(it.rebase(one))
        await eventually(lambda: it.desired.weights_of(MODEL).rebase is not None)
        await eventually(lambda: it.cluster["a"].asked["adopt"] > 0)
        while it.cluster["a"].base != one.digest:
            assert [it.cluster[name].base for name in "bc"] == ["", ""]
            await asyncio.sleep(0.001)
        assert (await going_on).status == 200
        assert bases(it) == ["one"] * 3


async def test_what_is_loaded_already_is_not_loaded_again(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        assert (await it.rebase(base(it))).applied
        again = await it.rebase(base(it), label=None)
        assert (again.status, again.applied) == (200, False)
        renamed = await it.rebase(base(it), label="better")
        assert (renamed.status, renamed.applied) == (200, True)
        assert it.desired.weights_of(MODEL).label == "better"
        assert [len(board.loads) for board in it.cluster.boards.values()] == [1, 1, 1]


async def test_the_way_back_is_the_same_call(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        one, two = base(it), base(it, "two", TWO)
        for target in (one, two, one, None):
            assert (await it.rebase(target)).status == 200
        assert bases(it) == ["folder"] * 3
        weights = it.desired.weights_of(MODEL)
        assert (weights.base, weights.label) == (None, "default")


@pytest.mark.promise("Weights", "An update that fails on one board is undone on all")
@pytest.mark.parametrize("bad", ["a", "b", "c"])
async def test_weights_that_one_board_cannot_load_are_taken_back_from_all(
    tmp_path: Path, bad: str
) -> None:
    async with control(tmp_path) as it:
        one = base(it)
        it.cluster[bad].cannot_load.add(one.digest)
        outcome = await it.rebase(one)
        assert (outcome.status, outcome.operation.state) == (503, S.UNDONE)
        await eventually(lambda: it.follows)
        assert bases(it) == ["folder"] * 3
        tried = [name for name in "abc" if it.cluster[name].loads]
        assert tried == list("abc"[: "abc".index(bad) + 1])
        assert it.desired.weights_of(MODEL).label == "default"


async def test_weights_that_a_board_has_refused_before_are_taken_back_as_well(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        one = base(it)
        it.cluster["b"].cannot_load.add(one.digest)
        for _ in range(2):
            outcome = await it.rebase(one)
            assert outcome.operation.state is S.UNDONE
            assert outcome.operation.error is not None
            assert outcome.operation.error.code == "rebase_failed"
            await eventually(lambda: it.follows)
            assert bases(it) == ["folder"] * 3
        assert it.cluster["b"].loads == [one.digest]


async def test_a_board_that_is_silent_at_the_commit_follows_later(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        one = base(it)

        def before(board: FakeBoard, method: str) -> None:
            committed = any(o.phase is Phase.RELEASING for o in it.it._state.running)
            if method == "adopt" and committed and board.board_id == "b":
                board.frozen = True

        it.cluster.before = before
        outcome = await it.rebase(one)
        assert (outcome.status, outcome.operation.state) == (207, S.PARTIAL)
        assert not outcome.operation.results["b"].good
        it.cluster.before = lambda _board, _method: None
        it.cluster["b"].frozen = False
        name = outcome.operation.id
        await eventually(lambda: it.it.operation(name).state is S.SUCCEEDED)
        assert bases(it) == ["one"] * 3


async def test_a_board_that_dies_in_its_turn_stops_it_and_comes_back_with_the_old_weights(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        one = base(it)

        def before(board: FakeBoard, method: str) -> None:
            rebase = it.desired.weights_of(MODEL).rebase
            turn = rebase is not None and rebase.switched == ("a", "b")
            if method == "adopt" and board.board_id == "b" and turn:
                board.dead = True

        it.cluster.before = before
        outcome = await it.rebase(one)
        assert (outcome.status, outcome.operation.state) == (503, S.UNDONE)
        assert outcome.operation.results["b"].status is ResultStatus.GONE
        assert it.cluster["c"].loads == []
        it.cluster.before = lambda _board, _method: None
        it.cluster["b"].restart()
        await eventually(lambda: it.follows)
        assert bases(it) == ["folder"] * 3


async def test_a_board_that_joins_in_the_middle_gets_its_turn_and_the_file(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        one = base(it)

        def before(_board: FakeBoard, _method: str) -> None:
            if it.cluster["a"].base == one.digest and "d" not in it.cluster.boards:
                it.cluster.boards["d"] = FakeBoard("d")

        it.cluster.before = before
        outcome = await it.rebase(one)
        assert outcome.status in (200, 207)
        await eventually(lambda: len(it.cluster.boards) == 4 and it.follows)
        assert bases(it) == ["one"] * 4
        assert one.key in it.cluster["d"].whole


async def test_a_board_that_comes_back_with_an_empty_disk_gets_the_base_before_it_serves(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        one = base(it)
        assert (await it.rebase(one)).status == 200
        it.cluster["b"].restart(disk=False)
        assert not it.cluster["b"].serves
        await eventually(lambda: it.follows)
        assert it.cluster["b"].serves
        assert it.cluster["b"].base == one.digest


async def test_a_rollback_does_not_wait_for_base_weights_that_a_board_has_yet_to_get(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        assert (await it.roll("v2")).status == 200
        assert (await it.rebase(base(it))).status == 200
        it.cluster["b"].slow_s["stage_chunk"] = 3600.0
        it.cluster["b"].restart(disk=False)
        await eventually(lambda: it.cluster["b"].missing_base is not None)
        done = await it.call(K.ADAPTER_ROLLBACK, model=MODEL, name="tone")
        assert done.operation.error is None
        assert served(it) == {"v1"}
        it.cluster["b"].slow_s.clear()


async def test_a_trainer_may_begin_anew(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        assert (await it.update(v2(it), 7)).status == 200
        assert (await it.call(K.LABEL, model=MODEL, label="x")).status == 200
        assert it.desired.weights_of(MODEL).step == 7
        assert (await it.call(K.LABEL, model=MODEL, label="x", reset_step=True)).status == 200
        assert it.desired.weights_of(MODEL).step is None
        assert (await it.update(v2(it), 1)).status == 200
        assert it.desired.weights_of(MODEL).step == 1


async def test_boards_that_sleep_load_it_when_they_wake(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        one = base(it)
        assert (await it.sleep(boards=["b"])).status == 200
        assert (await it.rebase(one)).status == 200
        assert it.cluster["b"].loads == []
        assert one.key in it.cluster["b"].whole
        assert (await it.wake()).status == 200
        await eventually(lambda: it.follows)
        assert it.cluster["b"].base == one.digest


async def test_files_of_weights_that_nobody_names_any_more_are_removed(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        one, two = base(it), base(it, "two", TWO)
        assert (await it.rebase(one)).status == 200
        assert (await it.rebase(two)).status == 200
        garbage_collector = GarbageCollector(it.it._context, it.store, grace_s=0.0)
        garbage_collector.remember(await asyncio.to_thread(it.it._state.stagings))

        async def gone() -> bool:
            await garbage_collector.look()
            await asyncio.sleep(0.02)
            keys = {key for board in it.cluster.boards.values() for key in board.whole}
            return one.key not in keys and one.digest not in it.store.files

        for _ in range(200):
            if await gone():
                break
        assert await gone()
        assert two.digest in it.store.files
        assert all(two.key in board.whole for board in it.cluster.boards.values())


# -- what artifacts are -------------------------------------------------------------------------


async def test_an_artifact_is_found_by_its_name_with_what_was_said_of_it(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        version, one = v2(it), base(it)
        it.store.said[version.digest] = ArtifactMetadata(PARAMETERS)
        found = await it.it.find_weights(MODEL, "tone@v2")
        assert (found.version, found.parameters) == (version, PARAMETERS)
        assert (await it.it.find_weights(MODEL, f"{MODEL}@one")).version == one
        for missing in ("tone@v9", f"{MODEL}@v9", "tone", "@v1", "tone@"):
            with pytest.raises(ArtifactNotFound):
                await it.it.find_weights(MODEL, missing)


async def test_a_later_rollout_compares_base_digest_with_the_weights_of_then(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        version, one = v2(it), base(it)
        it.store.own = "f" * 64
        it.store.said[version.digest] = ArtifactMetadata(base_digest=it.store.own)
        assert (await it.stage(version)).status == 200
        assert (await it.rebase(one)).status == 200
        why = f"tone@v2 does not fit.*{'f' * 12}.* has {one.digest[:12]}"
        before = it.it.operations(100)
        with pytest.raises(ArtifactRefused, match=why):
            await it.roll("v2")
        with pytest.raises(ArtifactRefused, match=why):
            await it.update(version, 3)
        assert it.it.operations(100) == before, "nothing has begun"
        assert (await it.rebase(None)).status == 200
        assert (await it.roll("v2")).status == 200
        # It is not rolled back to, either, where the weights are others by then.
        other = it.store.add("v3", b"third")
        assert (await it.stage(other)).status == 200
        assert (await it.roll("v3")).status == 200
        assert (await it.rebase(one)).status == 200
        with pytest.raises(ArtifactRefused, match=why):
            await it.call(OperationKind.ADAPTER_ROLLBACK, model=MODEL, name="tone")


async def test_what_was_trained_on_other_base_weights_does_not_fit(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        version, one = v2(it), base(it)
        it.store.said[version.digest] = ArtifactMetadata(base_digest=one.digest)
        with pytest.raises(ArtifactRefused, match="have reported the sha256 of its file"):
            await it.it.find_weights(MODEL, "tone@v2")
        it.store.own = "f" * 64
        with pytest.raises(ArtifactRefused, match="trained on base weights"):
            await it.it.find_weights(MODEL, "tone@v2")
        assert (await it.rebase(one)).status == 200
        assert (await it.it.find_weights(MODEL, "tone@v2")).version == version
        assert (await it.rebase(None)).status == 200
        it.store.own = one.digest
        assert (await it.it.find_weights(MODEL, "tone@v2")).version == version
