"""Rollouts through the Coordinator: switched at once, board by board or as a canary, and undone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rkserve.control.calls import OperationKind
from rkserve.control.operations import OperationOutcome, OperationState, Phase
from rkserve.coordinator.state.ledger import Ledger
from rkserve.core.board_report import VersionFigures
from rkserve.core.errors import (
    AdapterBroken,
    LedgerFailed,
    ModelNotFound,
    OperationConflict,
)
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import MODEL, Control, FakeBoard, served, serving

pytestmark = [pytest.mark.virtual_time, pytest.mark.slow]

K, S = OperationKind, OperationState


def watch_for_mixtures(it: Control) -> list[str]:
    """Note every moment in which boards that emit would answer with different versions."""
    found: list[str] = []

    def look(board: FakeBoard, method: str) -> None:
        emitting = {served(it, b.board_id) for b in it.cluster.boards.values() if b.serves}
        if len(emitting) > 1:
            found.append(f"{emitting} after {method} on {board.board_id}")

    it.cluster.after = look
    return found


async def test_an_atomic_rollout_switches_all_boards_at_once_and_resumes(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        mixtures = watch_for_mixtures(it)
        outcome = await it.roll("v2")
        assert (outcome.status, outcome.operation.state) == (200, S.SUCCEEDED)
        assert [served(it, board) for board in "abc"] == ["v2"] * 3
        assert it.held == []
        assert mixtures == []
        assert all(len(board.loaded) == 2 for board in it.cluster.boards.values())
        for result in outcome.operation.results.values():
            assert {"stage_ms", "load_ms", "held", "emitted_until_ms"} <= set(result.details)
        phases = [name for name, _ in outcome.operation.phases]
        assert phases == ["staging", "loading", "stopping", "releasing"]
        line = it.desired.line(MODEL, "tone")
        assert line is not None
        assert line.previous is not None
        assert line.previous.ref.version == "v1"


@pytest.mark.promise(
    "Adapters", "`atomic` is one epoch for all; `rolling` takes `max_unavailable` boards"
)
async def test_a_rolling_rollout_takes_so_many_boards_at_a_time(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        loading: set[str] = set()
        most = 0

        def before(board: FakeBoard, method: str) -> None:
            nonlocal most
            if method == "load_adapter":
                loading.add(board.board_id)
                most = max(most, len(loading))

        def after(board: FakeBoard, method: str) -> None:
            if method == "adopt" and served(it, board.board_id) == "v2":
                loading.discard(board.board_id)

        it.cluster.before, it.cluster.after = before, after
        outcome = await it.roll("v2", strategy="rolling", max_unavailable=2)
        assert outcome.status == 200
        assert most == 2
        await eventually(lambda: it.follows)
        assert [served(it, board) for board in "abc"] == ["v2"] * 3
        assert it.desired.pauses == ()


@pytest.mark.parametrize("strategy", ["atomic", "rolling", "canary"])
async def test_a_load_that_fails_on_one_board_takes_everything_back(
    tmp_path: Path, strategy: str
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        it.cluster["b"].refuses["load_adapter"] = AdapterBroken("tone", "it is for another")
        outcome = await it.roll("v2", strategy=strategy)
        assert outcome.status == 503
        assert outcome.operation.state in (S.UNDONE, S.FAILED)
        await eventually(lambda: it.follows)
        assert [served(it, board) for board in "abc"] == ["v1"] * 3
        assert it.held == []
        line = it.desired.line(MODEL, "tone")
        assert line is not None
        assert line.candidate is None


@pytest.mark.parametrize("method", ["load_adapter", "adopt"])
async def test_a_board_that_dies_in_a_rollout_is_left_out_and_comes_back_with_the_new_version(
    tmp_path: Path, method: str
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        mixtures = watch_for_mixtures(it)
        it.cluster["b"].dies_in = method
        assert (await it.roll("v2")).status == 200
        it.cluster["b"].dies_in = ""
        it.cluster["b"].restart()
        await eventually(lambda: it.follows)
        assert [served(it, board) for board in "abc"] == ["v2"] * 3
        assert mixtures == []


def joins(it: Control, name: str) -> None:
    """Let a board join, or come back."""
    if name not in it.cluster.boards:
        it.cluster.boards[name] = FakeBoard(name)
    it.cluster[name].restart()


async def rolls_while_one_joins(it: Control, name: str) -> asyncio.Task[OperationOutcome]:
    """Return an atomic rollout in which a board has joined, and serves, while others load."""
    for board in "ac":
        it.cluster[board].slow_s["load_adapter"] = 0.3
    if name == "b":
        it.cluster["b"].dies_in = "load_adapter"
    rolling = asyncio.create_task(it.roll("v2"))
    await eventually(lambda: it.it.operations(1)[0].phase is Phase.LOADING)
    await eventually(lambda: name == "d" or it.cluster["b"].dead)
    it.cluster["b"].dies_in = ""
    joins(it, name)
    await eventually(lambda: it.cluster[name].serves)
    assert served(it, name) == "v1"
    return rolling


@pytest.mark.parametrize("name", ["d", "b"], ids=["joins", "comes back"])
async def test_a_board_that_joins_while_others_load_is_switched_with_them(
    tmp_path: Path, name: str
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        mixtures = watch_for_mixtures(it)
        rolling = await rolls_while_one_joins(it, name)
        it.cluster[name].slow_s["adopt"] = 0.2
        outcome = await rolling
        assert (outcome.status, outcome.operation.results[name].good) == (200, True)
        assert {served(it, board) for board in it.cluster.boards} == {"v2"}
        assert mixtures == []


@pytest.mark.parametrize("name", ["d", "b"], ids=["joins", "comes back"])
async def test_a_board_that_joins_and_freezes_undoes_the_rollout(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path, "v1", "v2", operation_timeout_s=0.4) as it:
        mixtures = watch_for_mixtures(it)
        rolling = await rolls_while_one_joins(it, name)
        it.cluster[name].frozen = True
        outcome = await rolling
        assert outcome.operation.state is S.UNDONE
        assert name in outcome.operation.results
        it.cluster[name].frozen = False
        await eventually(lambda: it.follows)
        assert {served(it, board) for board in it.cluster.boards} == {"v1"}
        assert it.held == []
        assert mixtures == []


async def test_a_silent_board_undoes_an_atomic_rollout_and_wakes_up_with_the_old_version(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2", operation_timeout_s=0.4) as it:
        mixtures = watch_for_mixtures(it)

        def freeze(board: FakeBoard, method: str) -> None:
            if board.board_id == "b" and method == "adopt":
                board.frozen = True

        it.cluster.before = freeze
        outcome = await it.roll("v2")
        assert outcome.operation.state is S.UNDONE
        assert outcome.status >= 500
        it.cluster.before = lambda _board, _method: None
        it.cluster["b"].frozen = False
        await eventually(lambda: it.follows)
        assert [served(it, board) for board in "abc"] == ["v1"] * 3
        assert it.held == []
        assert mixtures == []


@dataclass
class FailingLedger:
    """A ledger whose disk is full while ``full`` says so."""

    real: Ledger
    full: Callable[[], bool]

    def write(self, **what: Any) -> None:
        if self.full():
            raise LedgerFailed("the disk is full")
        self.real.write(**what)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


async def test_a_coordinator_starts_on_a_full_disk_and_writes_down_later_what_it_found(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        it.cluster["b"].slow_s["load_adapter"], before = 30.0, it.cluster["b"].asked.copy()
        rolling = asyncio.create_task(it.roll("v2"))
        await eventually(lambda: it.cluster["b"].asked["load_adapter"] > before["load_adapter"])
        (begun,) = it.it.operations(1)
        assert begun.state is S.RUNNING
        state = {"full": True}
        it.wrap_ledger = lambda ledger: FailingLedger(ledger, lambda: state["full"])
        await it.again()  # its predecessor left a rollout that is to be undone
        rolling.cancel()
        await eventually(lambda: it.follows)
        assert it.it.operation(begun.id).state in (S.UNDONE, S.FAILED)
        with pytest.raises(LedgerFailed):
            await it.pause()
        assert it.ledger.operation(begun.id) == begun, "nothing could be written yet"
        state["full"] = False
        assert (await it.pause()).status == 200
        written = it.ledger.operation(begun.id)
        assert written is not None
        assert written.state in (S.UNDONE, S.FAILED)
        assert (await it.resume()).status == 200


@pytest.mark.parametrize(
    "method", ["load_adapter", "adopt"], ids=["before the hold", "before the commit"]
)
async def test_a_disk_that_fills_up_in_a_rollout_undoes_it_as_soon_as_that_can_be_written(
    tmp_path: Path, method: str
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        state = {"full": False}
        it.wrap_ledger = lambda ledger: FailingLedger(ledger, lambda: state["full"])
        await it.again()

        def fill(_board: FakeBoard, asked: str) -> None:
            state["full"] = state["full"] or asked == method

        await eventually(lambda: it.follows)
        it.cluster.before = fill
        rolling = asyncio.create_task(it.roll("v2"))
        await eventually(lambda: state["full"])
        await asyncio.sleep(0.3)
        assert not rolling.done()
        state["full"], it.cluster.before = False, lambda _board, _method: None
        outcome = await rolling
        assert outcome.operation.state in (S.UNDONE, S.FAILED)
        assert outcome.operation.error is not None
        assert outcome.operation.error.code == "ledger_failed"
        await eventually(lambda: it.follows)
        assert [served(it, board) for board in "abc"] == ["v1"] * 3
        assert it.held == []


async def test_a_commit_that_runs_out_of_time_names_lagging_boards_until_they_follow(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:

        def freeze(board: FakeBoard, method: str) -> None:
            if board.board_id == "c" and method == "adopt" and board.is_held:
                board.frozen = True

        it.cluster.after = freeze
        outcome = await it.roll("v2", timeout_s=2.0)
        assert (outcome.status, outcome.operation.state) == (207, S.PARTIAL)
        lagging = {b for b, result in outcome.operation.results.items() if not result.good}
        assert lagging == {"c"}
        name = outcome.operation.id
        await asyncio.sleep(0.1)
        assert it.it.operation(name).state is S.PARTIAL
        it.cluster["c"].frozen = False
        await eventually(lambda: it.it.operation(name).state is S.SUCCEEDED)
        assert [served(it, board) for board in "abc"] == ["v2"] * 3


async def test_a_pause_and_a_resume_do_not_wait_for_boards_that_follow_a_commit(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:

        def freeze(board: FakeBoard, method: str) -> None:
            if board.board_id == "c" and method == "adopt" and board.is_held:
                board.frozen = True

        it.cluster.after = freeze
        rolling = asyncio.create_task(it.roll("v2"))
        await eventually(lambda: it.it.operations(1)[0].phase is Phase.RELEASING)
        it.cluster.after = lambda _board, _method: None
        assert (await it.pause(boards=["a"])).status == 200
        assert (await it.resume(boards=["a"])).status == 200
        assert not rolling.done()
        it.cluster["c"].frozen = False
        assert (await rolling).operation.state is S.SUCCEEDED
        assert it.held == []


async def test_a_paused_cluster_resumes_while_engines_are_renewed_for_a_retirement(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1") as it:
        await it.pause()
        await eventually(lambda: all(one.adapters for one in it.it._context.roster.reports()))
        it.cluster["a"].slow_s["renew"] = 1.0
        retiring = asyncio.create_task(it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone"))
        await eventually(lambda: it.cluster["a"].asked["renew"])
        assert (await it.resume()).status == 200
        assert it.held == []
        assert not retiring.done()
        assert (await retiring).status == 200


@pytest.mark.parametrize("said", [{"strategy": "atomic"}, {}], ids=["atomic", "default"])
async def test_a_resume_takes_no_hold_of_a_rollout_away(
    tmp_path: Path, said: dict[str, str]
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        it.cluster["b"].slow_s["adopt"] = 0.2
        rolling = asyncio.create_task(it.roll("v2", **said))
        await eventually(lambda: it.held == ["a", "c"])
        with pytest.raises(OperationConflict, match="try again"):
            await it.resume()
        assert (await rolling).status == 200
        assert [served(it, board) for board in "abc"] == ["v2"] * 3


@dataclass
class FullAtTheEnd:
    """A ledger whose disk is full for the record of an operation that has ended, so many times."""

    real: Ledger
    times: int = 1

    def write(self, **what: Any) -> None:
        if self.times and any(one.over for one in what.get("operations", ())):
            self.times -= 1
            raise LedgerFailed("the disk is full")
        self.real.write(**what)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


TONE = {"name": "tone"}


@pytest.mark.parametrize(
    ("kind", "params", "state"),
    [
        pytest.param(K.ADAPTER_ROLLOUT, {**TONE, "version": "v2"}, S.SUCCEEDED, id="a rollout"),
        pytest.param(K.ADAPTER_ROLLBACK, TONE, S.SUCCEEDED, id="a rollback"),
        pytest.param(K.ADAPTER_RETIRE, {**TONE, "version": "v3"}, S.SUCCEEDED, id="a retirement"),
        pytest.param(K.LABEL, {"label": "new"}, S.SUCCEEDED, id="a label"),
    ],
)
async def test_an_end_that_cannot_be_written_down_at_once_is_recorded_as_it_was(
    tmp_path: Path, kind: OperationKind, params: dict[str, str], state: OperationState
) -> None:
    async with serving(tmp_path, "v1", "v2", "v3") as it:
        await it.roll("v3")
        await it.roll("v1")
        it.wrap_ledger = FullAtTheEnd
        await it.again()
        await eventually(lambda: it.follows)
        outcome = await it.call(kind, key="k", model=MODEL, **params)
        assert (outcome.status, outcome.operation.state) == (200, state)
        assert outcome.operation.error is None
        again = await it.call(kind, key="k", model=MODEL, **params)
        assert again.operation == outcome.operation


@pytest.mark.promise("Pause", "A pause that fails leaves nothing paused")
async def test_a_pause_whose_end_cannot_be_written_down_holds_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path) as it:
        it.wrap_ledger = FullAtTheEnd
        await it.again()
        await eventually(lambda: it.follows)
        outcome = await it.pause()
        assert outcome.operation.state is S.UNDONE
        assert outcome.operation.error is not None
        assert outcome.operation.error.code == "ledger_failed"
        await eventually(lambda: it.follows)
        assert it.held == []


async def test_a_version_that_was_never_staged_is_not_found(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1") as it:
        with pytest.raises(ModelNotFound):
            await it.roll("v9")
        assert (await it.roll("v1")).applied is False


@pytest.mark.promise("Every call that changes something", "A conflict, and a stale epoch, is a 409")
async def test_two_rollouts_of_a_model_do_not_meet_and_a_pause_waits_for_the_switch(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2", "v3") as it:
        it.cluster["b"].slow_s["adopt"] = 0.2
        rolling = asyncio.create_task(it.roll("v2"))
        await eventually(lambda: it.held == ["a", "c"])
        with pytest.raises(OperationConflict, match="only one operation"):
            await it.roll("v3")
        with pytest.raises(OperationConflict, match="try again"):
            await it.pause()
        assert (await rolling).status == 200


async def test_a_rollout_of_a_paused_cluster_stays_paused(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        await it.pause()
        assert (await it.roll("v2")).status == 200
        assert it.held == ["a", "b", "c"]
        await it.resume()
        assert [served(it, board) for board in "abc"] == ["v2"] * 3


@pytest.mark.promise(
    "Adapters", "A canary is judged by errors and speed; promote and rollback by hand"
)
async def test_a_rollback_returns_to_the_version_before_and_only_once(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        await it.roll("v2")
        back = await it.call(K.ADAPTER_ROLLBACK, model=MODEL, name="tone")
        assert back.status == 200
        assert [served(it, board) for board in "abc"] == ["v1"] * 3
        assert it.held == []
        with pytest.raises(OperationConflict, match="no version to roll back to"):
            await it.call(K.ADAPTER_ROLLBACK, model=MODEL, name="tone")


async def test_a_rollout_that_breaks_down_is_undone_and_the_log_says_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        it.cluster["b"].refuses["load_adapter"] = ValueError("nobody thought of this")
        outcome = await it.roll("v2")
        assert outcome.status == 500
        assert [served(it, board) for board in "abc"] == ["v1"] * 3
        said = [record for record in caplog.records if record.exc_info]
        assert any("nobody thought of this" in str(one.exc_info) for one in said)


async def test_a_rollout_that_runs_out_of_time_is_undone(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        it.cluster["b"].slow_s["load_adapter"] = 5.0
        outcome = await it.roll("v2", timeout_s=0.2)
        assert outcome.status in (503, 504)
        assert outcome.operation.error is not None
        assert [served(it, board) for board in "abc"] == ["v1"] * 3


# -- canaries ----------------------------------------------------------------------------------


def figures(v1: tuple[int, int, float], v2: tuple[int, int, float]) -> tuple[VersionFigures, ...]:
    """Requests, failures and milliseconds of 1000 tokens, of two versions."""
    return tuple(
        VersionFigures(f"tone@{name}", requests, failed, 1000, decode_ms)
        for name, (requests, failed, decode_ms) in (("v1", v1), ("v2", v2))
    )


async def observed(it: Control, task: asyncio.Task[Any]) -> None:
    """Wait until the canary is judged."""
    await eventually(
        lambda: task.done() or any(one.phase is Phase.OBSERVING for one in it.it.operations(1))
    )
    assert not task.done(), task.result()
    await asyncio.sleep(0.1)  # a round of reports, from which it counts


@pytest.mark.promise(
    "Adapters", "A canary is judged by errors and speed; promote and rollback by hand"
)
@pytest.mark.parametrize(
    ("v2", "status", "ends_with"),
    [
        pytest.param((40, 0, 1000.0), 200, "v2", id="as good as the old one"),
        pytest.param((40, 20, 1000.0), 409, "v1", id="requests fail"),
        pytest.param((40, 0, 2000.0), 409, "v1", id="it is slower"),
    ],
)
async def test_a_canary_is_promoted_or_rolled_back_by_what_boards_report(
    tmp_path: Path, v2: tuple[int, int, float], status: int, ends_with: str
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        rolling = asyncio.create_task(it.roll("v2", strategy="canary", weight=0.5, observe_s=0.2))
        await observed(it, rolling)
        for board in it.cluster.boards.values():
            board.figures = figures((40, 0, 1000.0), v2)
        outcome = await rolling
        assert outcome.status == status, outcome
        await eventually(lambda: it.follows)
        assert [served(it, board) for board in "abc"] == [ends_with] * 3


@pytest.mark.parametrize(
    ("limits", "v2", "status"),
    [
        pytest.param({"failures": 0.6}, (40, 20, 1000.0), 200, id="failures"),
        pytest.param({"speed": 0.3}, (40, 0, 2000.0), 200, id="speed"),
        pytest.param({"failures": 0.0}, (40, 1, 1000.0), 409, id="none may fail"),
        pytest.param({"requests": 3, "tokens": 5}, (4, 0, 1000.0), 200, id="fewer requests"),
    ],
)
async def test_the_limits_of_the_verdict_are_configured(
    tmp_path: Path, limits: dict[str, float], v2: tuple[int, int, float], status: int
) -> None:
    async with serving(tmp_path, "v1", "v2", canary=limits) as it:
        rolling = asyncio.create_task(it.roll("v2", strategy="canary", weight=0.5, observe_s=0.2))
        await observed(it, rolling)
        it.cluster["a"].figures = figures((40, 0, 1000.0), v2)
        outcome = await rolling
        assert outcome.status == status, outcome


@pytest.mark.promise(
    "Adapters", "A canary is judged by errors and speed; promote and rollback by hand"
)
@pytest.mark.parametrize(
    ("kind", "ends_with", "state"),
    [
        pytest.param(K.ADAPTER_PROMOTE, "v2", S.SUCCEEDED, id="promoted"),
        pytest.param(K.ADAPTER_ROLLBACK, "v1", S.UNDONE, id="rolled back"),
    ],
)
async def test_an_observed_canary_is_decided_by_hand(
    tmp_path: Path, kind: OperationKind, ends_with: str, state: OperationState
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        rolling = asyncio.create_task(
            it.roll("v2", strategy="canary", weight=0.5, observe_s=0.0, auto=False)
        )
        await observed(it, rolling)
        decided = await it.call(kind, model=MODEL, name="tone", who="operator")
        assert decided.status == 200, decided
        assert (await rolling).operation.state is state
        await eventually(lambda: it.follows)
        assert [served(it, board) for board in "abc"] == [ends_with] * 3


@pytest.mark.parametrize("auto", [True, False], ids=["by itself", "by hand"])
async def test_a_canary_may_be_observed_for_longer_than_the_time_limit(
    tmp_path: Path, auto: bool
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        observe_s = 1.2 if auto else 0.0
        rolling = asyncio.create_task(
            it.roll("v2", strategy="canary", observe_s=observe_s, auto=auto, timeout_s=1.0)
        )
        await observed(it, rolling)
        for board in it.cluster.boards.values():
            board.figures = figures((40, 0, 1000.0), (40, 0, 1000.0))
            board.slow_s["adopt"] = 0.05
        if not auto:
            await asyncio.sleep(1.2)
            await it.call(K.ADAPTER_PROMOTE, model=MODEL, name="tone")
        outcome = await rolling
        assert (outcome.status, outcome.operation.state) == (200, S.SUCCEEDED)
        assert [served(it, board) for board in "abc"] == ["v2"] * 3


async def test_there_is_nothing_to_promote_without_a_canary(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1") as it:
        with pytest.raises(OperationConflict):
            await it.call(K.ADAPTER_PROMOTE, model=MODEL, name="tone")
