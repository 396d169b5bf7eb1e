"""The callback against a scripted C library: tokens are copied, sinks may fail, late calls too."""

from __future__ import annotations

import gc

import pytest

from rkserve.core.errors import CallFailed
from rkserve.native.binding.preconditions import HandleState
from rkserve.native.binding.runtime import Binding, open_runtime
from rkserve.native.runtime import (
    LoadParams,
    Perf,
    RunEnd,
    RunOutcome,
    SinkAction,
    TokenPiece,
)
from rkserve.native.runtime import Step as RunStep
from tests.support.sim.binding_driver import (
    IDS,
    UNTIL_ABORT,
    UNTIL_GO,
    WAIT_S,
    Catch,
    running,
)
from tests.support.sim.rkllm_fake import CALL, ERROR, NORMAL, WAITING, Fake, token

pytest_plugins = ["tests.support.sim.binding_fixtures"]


class Sunk(Exception):
    """What a broken sink raises."""


def ids_of(step: RunStep) -> list[int]:
    return [piece.token_id for piece in step if piece is not None]


# -- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign", [0, 1], ids=["the caller's thread", "a foreign thread"])
def test_a_run_delivers_every_token_and_the_figures(
    fake: Fake, handle: Binding, foreign: int
) -> None:
    fake.script.foreign_thread = foreign
    fake.steps(
        token(1, b"He"), token(2, b"\xe4\xbd"), (CALL, WAITING, 3, b"\xbd"), token(4, None),
        token(5, b""), token(6, "你".encode()),
    )  # fmt: skip
    catch = Catch()
    outcome = handle.run(IDS, catch)
    assert catch.pieces == [
        TokenPiece(1, b"He"),
        TokenPiece(2, b"\xe4\xbd"),
        TokenPiece(3, b"", waiting=True),
        TokenPiece(4, b""),
        TokenPiece(5, b""),
        TokenPiece(6, "你".encode()),
    ]
    perf = Perf(prefill_ms=12.5, prefill_tokens=7, decode_ms=30.0, decode_tokens=3, memory_mb=99.0)
    assert outcome == RunOutcome(RunEnd.FINISHED, perf, 0)
    assert handle.state is HandleState.IDLE


def test_m3_text_is_copied_before_the_library_poisons_it(fake: Fake, handle: Binding) -> None:
    fake.steps(*(token(i, f"piece {i}".encode()) for i in range(20)))
    catch = Catch()
    handle.run(IDS, catch)
    assert [piece.text for piece in catch.pieces] == [f"piece {i}".encode() for i in range(20)]


def test_m3_a_sink_that_raises_ends_the_run_and_is_heard_after_it(
    fake: Fake, handle: Binding
) -> None:
    fake.steps(token(1), token(2), UNTIL_ABORT, token(3))
    seen: list[int] = []

    def sink(step: RunStep) -> SinkAction:
        seen.append(ids_of(step)[0])
        if ids_of(step) == [2]:
            raise Sunk
        return SinkAction.CONTINUE

    with pytest.raises(Sunk):
        handle.run(IDS, sink)
    assert seen == [1, 2]
    assert fake.replies() == [0, 0, 0, 0]
    assert (fake.seen.aborts, fake.seen.abort_in_callback) == (1, 0)
    assert handle.state is HandleState.IDLE


@pytest.mark.parametrize("escape", [KeyboardInterrupt, SystemExit])
def test_m3_not_even_an_interrupt_unwinds_through_c(
    fake: Fake, handle: Binding, escape: type[BaseException]
) -> None:
    def sink(_: RunStep) -> SinkAction:
        raise escape

    fake.steps(token(1), UNTIL_ABORT)
    with pytest.raises(escape):
        handle.run(IDS, sink)
    assert fake.replies() == [0, 0]


def test_m3_whatever_the_sink_returns_the_library_gets_a_number(
    fake: Fake, handle: Binding
) -> None:
    fake.steps(token(1), token(2))
    handle.run(IDS, lambda _: None)  # type: ignore[arg-type, return-value]
    assert fake.replies() == [0, 0, 0]


@pytest.mark.parametrize("state", [WAITING, ERROR], ids=["waiting", "error"])
def test_m3_only_a_normal_token_may_pause(fake: Fake, handle: Binding, state: int) -> None:
    fake.steps((CALL, state, 5, None))
    handle.run(IDS, Catch(5))
    assert 1 not in fake.replies()
    assert handle.state is HandleState.IDLE


def test_m3_a_state_that_no_header_knows_ends_the_run(fake: Fake, handle: Binding) -> None:
    fake.steps(token(1), (CALL, 4, 2, None), UNTIL_ABORT)
    with pytest.raises(CallFailed, match="callback's state returned 4"):
        handle.run(IDS, Catch())
    assert fake.replies() == [0, 0, 0]


@pytest.mark.parametrize(("trusted", "ids"), [(True, [1, 2, 3]), (False, [1, 3])])
def test_a_waiting_token_is_delivered_where_its_id_is_trusted(
    fake: Fake, load: LoadParams, trusted: bool, ids: list[int]
) -> None:
    binding = open_runtime(fake.path, {"waiting_token_id_valid": trusted})
    binding.load(load)
    fake.steps(token(1), (CALL, WAITING, 2, None), token(3))
    catch = Catch()
    binding.run(IDS, catch)
    assert catch.ids == ids


def test_m4_a_late_callback_is_ignored_and_counted(fake: Fake, handle: Binding) -> None:
    fake.steps(token(1))
    catch = Catch()
    handle.run(IDS, catch)
    assert fake.lib.fake_call_back(NORMAL, 99, fake.seen.userdata) == 0
    assert fake.lib.fake_call_back(NORMAL, 99, 0) == 0
    assert (catch.ids, handle.late_callbacks) == ([1], 2)


def test_m4_a_token_of_an_earlier_run_never_reaches_the_next(fake: Fake, handle: Binding) -> None:
    handle.run(IDS, Catch())
    stale = fake.seen.userdata
    fake.steps(token(1), UNTIL_GO, token(2))
    catch = Catch()
    with running(handle, catch):
        assert catch.first.wait(WAIT_S)
        assert fake.seen.userdata != stale
        assert fake.lib.fake_call_back(NORMAL, 99, stale) == 0
        fake.lib.fake_go = 1
    assert (catch.ids, handle.late_callbacks) == ([1, 2], 1)


def test_m4_a_late_callback_after_destroy_is_harmless(fake: Fake, handle: Binding) -> None:
    handle.run(IDS, Catch())
    handle.destroy()
    gc.collect()
    assert fake.lib.fake_call_back(NORMAL, 99, fake.seen.userdata) == 0
    assert handle.late_callbacks == 1
