"""The runs of a handle against a scripted C library: batches, pauses, drains, evaluations.

What a misuse would do to the library is not known or bad; so each is seen not to reach it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from rkserve.core.errors import CallFailed, Misuse, NativeError, NothingComputed
from rkserve.native.binding.preconditions import HandleState
from rkserve.native.binding.releases import RELEASES
from rkserve.native.binding.runtime import Binding
from rkserve.native.runtime import (
    CrossAttention,
    EmbedInput,
    EvaluateMode,
    Matrix,
    PromptInput,
    RunEnd,
    RunOutcome,
    RunParams,
    TokenInput,
    TokenPiece,
)
from tests.support.sim.binding_driver import (
    IDS,
    UNTIL_ABORT,
    WAIT_S,
    Catch,
    Open,
    batch,
    floats,
    until,
)
from tests.support.sim.rkllm_fake import CALL, ERROR, WAITING, Fake, ended, token

pytest_plugins = ["tests.support.sim.binding_fixtures"]

Call = Callable[[Binding], object]


def test_a_waiting_callback_of_a_batch_holds_every_text_back(fake: Fake, opened: Open) -> None:
    handle = opened(n_batch=2)
    fake.steps((CALL, WAITING, 1, b"?"), token(2, None))
    catch = Catch()
    handle.run(batch(2), catch)
    assert catch.steps == [
        (TokenPiece(1, b"", waiting=True), TokenPiece(101, b"", waiting=True)),
        (TokenPiece(2, b""), TokenPiece(102, b"")),
    ]


@pytest.mark.parametrize("given", [0, 1, 2, 4, 5])
def test_m8_any_other_number_of_inputs_is_misuse(fake: Fake, opened: Open, given: int) -> None:
    handle = opened(n_batch=3)
    with pytest.raises(Misuse, match=rf"exactly 3 inputs \(n_batch\), not {given}"):
        handle.run(batch(given), Catch())
    assert fake.seen.runs == 0


def test_a_batch_is_not_paused_unless_a_quirk_allows_it(fake: Fake, opened: Open) -> None:
    handle = opened(n_batch=2)
    fake.steps(token(1), UNTIL_ABORT)
    with pytest.raises(Misuse, match="not known to pause a batch"):
        handle.run(batch(2), Catch(101))
    assert 1 not in fake.replies()


def test_a_batch_is_paused_and_drained_as_a_whole_where_a_quirk_allows_it(
    fake: Fake, opened: Open
) -> None:
    handle = opened({"pause_with_batch": True}, n_batch=2)
    fake.steps(token(1), ended(2, 0))
    assert handle.run(batch(2), Catch(102)).end is RunEnd.PAUSED
    handle.clear_kv_range([(0, 0), (40, 43)])
    seen = fake.seen
    assert list(zip(seen.range_start[0:2], seen.range_end[0:2], strict=True)) == [(0, 0), (40, 43)]
    fake.steps(token(3), UNTIL_ABORT)
    if handle.per_run_sampling:
        fake.steps(token(3))
    handle.drain()
    # Entry 0 had ended: what it is resumed with is of no account, but it must be an id.
    assert list(seen.last_ids[0:2]) == [102, 102]
    assert handle.state is HandleState.IDLE


# -- pause, ranges, drain -------------------------------------------------------------------------


def pause(fake: Fake, handle: Binding, **changes: Any) -> None:
    fake.steps(token(1), token(7))
    assert handle.run(replace(IDS, **changes), Catch(7)).end is RunEnd.PAUSED
    fake.steps()


def test_a_range_is_cut_out_of_a_paused_context(fake: Fake, handle: Binding) -> None:
    pause(fake, handle)
    handle.clear_kv_range([(40, 42)])
    seen = fake.seen
    assert (seen.ranges, seen.range_start[0], seen.range_end[0]) == (1, 40, 42)
    handle.clear_kv_range([(5, 5)])
    assert (seen.ranges, seen.clears) == (1, 0)


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        pytest.param([(3, 2)], r"\[3, 2\) of entry 0", id="backwards"),
        pytest.param([(-1, 2)], r"\[-1, 2\)", id="before the start"),
        pytest.param([(40, 43)], "within the 42 positions", id="beyond the end"),
        pytest.param([(1, 2), (1, 2)], r"exactly 1 ranges \(n_batch\), not 2", id="two of one"),
        pytest.param([], r"exactly 1 ranges \(n_batch\), not 0", id="none"),
    ],
)
def test_a_range_that_the_cache_does_not_hold_is_misuse(
    fake: Fake, handle: Binding, ranges: list[tuple[int, int]], words: str
) -> None:
    pause(fake, handle)
    with pytest.raises(Misuse, match=words):
        handle.clear_kv_range(ranges)
    assert (fake.seen.ranges, handle.state) == (0, HandleState.PAUSED)


def test_ranges_are_for_paused_single_turns_only(fake: Fake, opened: Open) -> None:
    handle = opened({"pause_with_history": True})
    with pytest.raises(Misuse, match="while the handle is idle"):
        handle.clear_kv_range([(0, 1)])
    pause(fake, handle, keep_history=True)
    with pytest.raises(Misuse, match="while a run without keep_history"):
        handle.clear_kv_range([(0, 1)])
    assert fake.seen.ranges == 0


@pytest.mark.parametrize("limited", [True, False])
def test_a_drain_ends_a_pause_with_one_token_that_nobody_sees(
    fake: Fake, opened: Open, limited: bool
) -> None:
    handle = opened({"drain_by_limit": limited})
    pause(fake, handle)
    by_limit = limited and handle.per_run_sampling
    fake.steps(token(8), *([] if by_limit else [UNTIL_ABORT, token(9)]))
    handle.drain()
    seen = fake.seen
    assert (seen.last_id, seen.n_tokens, seen.clears) == (7, 1, 0)
    assert (seen.aborts, seen.run_max_new_tokens) == ((0, 1) if by_limit else (1, 0))
    assert fake.replies() == [0, 1, 0, 0] if by_limit else [0, 1, 0, 0, 0]
    assert handle.state is HandleState.IDLE
    handle.clear_kv_cache()
    fake.steps()
    assert handle.run(IDS, Catch()).end is RunEnd.FINISHED


def test_a_drain_by_a_limit_that_does_not_hold_becomes_an_abort(fake: Fake, opened: Open) -> None:
    handle = opened({"drain_by_limit": True})
    pause(fake, handle)
    fake.steps(token(8), token(9), UNTIL_ABORT)
    handle.drain()
    assert (fake.seen.aborts, handle.state) == (1, HandleState.IDLE)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda handle: handle.drain(), id="drain"),
        pytest.param(lambda handle: handle.run(replace(IDS, resume=True), Catch()), id="resume"),
    ],
)
def test_a_refused_resumption_leaves_no_handle_that_only_looks_idle(
    fake: Fake, handle: Binding, call: Call
) -> None:
    pause(fake, handle)
    fake.script.run_return, fake.script.no_finish = -1, 1
    with pytest.raises(CallFailed, match=r"to end a paused run\) returned -1"):
        call(handle)
    assert handle.state.value == "paused"
    with pytest.raises(Misuse):
        handle.clear_kv_cache()
    fake.script.run_return, fake.script.no_finish = 0, 0
    fake.steps(token(8), *([] if handle.per_run_sampling else [UNTIL_ABORT]))
    handle.drain()
    assert handle.state is HandleState.IDLE


def test_a_drain_that_errs_is_told_and_the_pause_is_over(fake: Fake, handle: Binding) -> None:
    pause(fake, handle)
    fake.steps((CALL, ERROR, 0, None))
    with pytest.raises(CallFailed):
        handle.drain()
    assert handle.state is HandleState.IDLE


def test_a_drained_conversation_has_to_be_cleared(fake: Fake, opened: Open) -> None:
    handle = opened({"pause_with_history": True, "kv_valid_after_abort": True})
    history = replace(IDS, keep_history=True)
    pause(fake, handle, keep_history=True)
    fake.steps(token(8), *([] if handle.per_run_sampling else [UNTIL_ABORT]))
    handle.drain()
    fake.steps()
    with pytest.raises(Misuse, match="clear the KV cache"):
        handle.run(history, Catch())
    handle.clear_kv_cache()
    handle.run(history, Catch())


def test_m4_many_pauses_keep_everything_until_the_last_resumption_ends(
    fake: Fake, handle: Binding
) -> None:
    pause(fake, handle)
    for last in range(1000, 1050):
        fake.steps(token(7))
        params = RunParams((TokenInput((5, last)),), resume=True)
        assert handle.run(params, Catch(7)).end is RunEnd.PAUSED
        gc.collect()
        assert fake.lib.fake_reread_last_id() == last
        assert fake.lib.fake_reread_earlier_id() == (13 if last == 1000 else last - 1)
    fake.steps(token(9))
    assert handle.run(RunParams((TokenInput((7,)),), resume=True), Catch()).end is RunEnd.FINISHED


PAUSED_REFUSES: dict[str, Call] = {
    "drain while idle is not this": lambda handle: handle.clear_kv_cache(keep_system_prompt=True),
    "an evaluation": lambda handle: handle.evaluate(TokenInput((1,)), EvaluateMode.LOGITS),
    "an asynchronous run": lambda handle: handle.run_async(IDS, Catch(), print),
    "a resumption that is asynchronous": lambda handle: handle.run_async(
        replace(IDS, resume=True), Catch(), print
    ),
    "an adapter": lambda handle: handle.load_adapter("/dev/null", "a"),
    "a prompt cache": lambda handle: handle.load_prompt_cache("/dev/null"),
    "the release of one": lambda handle: handle.release_prompt_cache(),
    "tools": lambda handle: handle.set_function_tools("", "[]", ""),
    "cross attention": lambda handle: handle.set_cross_attention(
        CrossAttention(b"", b"", b"", b"", 0)
    ),
    "embeddings": lambda handle: handle.run(
        RunParams((EmbedInput(floats(1, 2), 1),), resume=True), Catch()
    ),
}


@pytest.mark.parametrize("call", PAUSED_REFUSES.values(), ids=PAUSED_REFUSES)
def test_m6_a_paused_handle_refuses(fake: Fake, handle: Binding, call: Call) -> None:
    pause(fake, handle)
    before = bytes(fake.ffi.buffer(fake.ffi.addressof(fake.seen)))
    with pytest.raises(Misuse):
        call(handle)
    assert bytes(fake.ffi.buffer(fake.ffi.addressof(fake.seen))) == before
    assert handle.state is HandleState.PAUSED


def test_a_drain_of_what_is_not_paused_is_misuse(fake: Fake, handle: Binding) -> None:
    with pytest.raises(Misuse, match="'drain' is not allowed while the handle is idle"):
        handle.drain()
    assert fake.seen.runs == 0


# -- asynchronous runs ----------------------------------------------------------------------------


class Ended:
    """Hears the end of an asynchronous run, and counts how often."""

    def __init__(self) -> None:
        self.heard: Future[RunOutcome | BaseException] = Future()
        self.times = 0

    def __call__(self, outcome: RunOutcome | BaseException) -> None:
        self.times += 1
        self.heard.set_result(outcome)

    def outcome(self) -> RunOutcome:
        heard = self.heard.result(WAIT_S)
        assert isinstance(heard, RunOutcome)
        return heard


def test_m4_an_asynchronous_run_finds_its_input_however_late_it_looks(
    fake: Fake, handle: Binding
) -> None:
    fake.script.async_late = 1
    fake.steps(token(1), token(2))
    catch, told = Catch(), Ended()
    handle.run_async(RunParams((TokenInput(tuple(range(2000))),)), catch, told)
    gc.collect()
    litter = [bytearray(b"\xee" * 8000) for _ in range(100)]
    assert handle.poll_async()
    fake.lib.fake_go = 1
    assert told.outcome().end is RunEnd.FINISHED
    assert (catch.ids, fake.seen.last_id, told.times) == ([1, 2], 1999, 1)
    assert handle.state is HandleState.IDLE
    until(lambda: not handle.poll_async())
    del litter


def test_the_next_call_waits_until_an_asynchronous_run_has_left_the_library(
    fake: Fake, handle: Binding
) -> None:
    fake.script.linger = 1
    told = Ended()
    handle.run_async(IDS, Catch(), told)
    told.outcome()
    assert handle.is_running()
    threading.Timer(0.05, lambda: setattr(fake.lib, "fake_go", 1)).start()
    handle.clear_kv_cache()  # the fake counts calls that overlap
    assert fake.seen.clears == 1


def test_nothing_is_called_from_within_what_hears_of_the_end(fake: Fake, handle: Binding) -> None:
    heard: Future[BaseException] = Future()

    def ended_in(_: object) -> None:
        try:
            handle.clear_kv_cache()
        except Misuse as exc:
            heard.set_result(exc)

    handle.run_async(IDS, Catch(), ended_in)
    assert "while the handle is" in str(heard.result(WAIT_S))
    assert fake.seen.clears == 0
    until(lambda: not handle.is_running())


def test_a_pause_of_an_asynchronous_run_is_misuse_that_ends_it(fake: Fake, handle: Binding) -> None:
    fake.steps(token(1), UNTIL_ABORT)
    told = Ended()
    handle.run_async(IDS, Catch(1), told)
    assert "cannot be paused" in str(told.heard.result(WAIT_S))
    assert isinstance(told.heard.result(), Misuse)
    assert 1 not in fake.replies()
    until(lambda: not handle.is_running())


def test_an_asynchronous_run_is_aborted_as_any_other(fake: Fake, handle: Binding) -> None:
    fake.steps(token(1), UNTIL_ABORT)
    catch, told = Catch(), Ended()
    handle.run_async(IDS, catch, told)
    assert catch.first.wait(WAIT_S)
    with pytest.raises(Misuse):
        handle.run(IDS, Catch())
    handle.abort()
    assert told.outcome().end is RunEnd.FINISHED
    until(lambda: not handle.is_running())


def test_the_error_of_an_asynchronous_run_is_told(fake: Fake, handle: Binding) -> None:
    fake.steps((CALL, ERROR, 0, None))
    told = Ended()
    handle.run_async(IDS, Catch(), told)
    assert told.outcome().end is RunEnd.FAILED
    until(lambda: not handle.is_running())


def test_m15_an_asynchronous_run_that_never_calls_back_is_given_up_once(
    fake: Fake, handle: Binding
) -> None:
    fake.script.async_lost = fake.script.async_late = 1
    told = Ended()
    handle.run_async(RunParams((TokenInput(tuple(range(2000))),)), Catch(), told)
    assert handle.poll_async()  # one look proves nothing
    assert not told.heard.done()
    until(lambda: not handle.poll_async())
    assert (told.outcome().end, told.times) == (RunEnd.FAILED, 1)
    assert handle.poll_async() is False
    gc.collect()
    litter = [bytearray(b"\xee" * 8000) for _ in range(100)]
    fake.lib.fake_go = 1  # it was only late, and reads what it was given
    until(lambda: fake.seen.last_id == 1999)
    del litter
    assert handle.run(IDS, Catch()).end is RunEnd.FINISHED


def test_an_asynchronous_run_that_is_refused_never_tells_an_end(
    fake: Fake, handle: Binding
) -> None:
    fake.script.run_return = -1
    told = Ended()
    with pytest.raises(CallFailed, match="rkllm_run_async returned -1"):
        handle.run_async(IDS, Catch(), told)
    assert (told.times, handle.state, handle.poll_async()) == (0, HandleState.IDLE, False)


def test_an_end_that_was_told_is_not_raised_as_well(fake: Fake, handle: Binding) -> None:
    fake.script.async_error, fake.script.run_return = 1, -1
    told = Ended()
    handle.run_async(IDS, Catch(), told)
    assert told.outcome().end is RunEnd.FAILED
    fake.script.run_return = 0
    assert handle.run(IDS, Catch()).end is RunEnd.FINISHED
    assert told.times == 1


def test_whoever_hears_of_the_end_and_fails_harms_nothing(
    fake: Fake, handle: Binding, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise ValueError("deaf")

    handle.run_async(IDS, Catch(), broken)
    until(lambda: not handle.poll_async())
    assert "deaf" in caplog.text
    assert handle.run(IDS, Catch()).end is RunEnd.FINISHED


def test_asynchronous_runs_are_misuse_where_they_are_broken(fake: Fake, opened: Open) -> None:
    handle = opened({"run_async": False})
    with pytest.raises(Misuse, match="are broken"):
        handle.run_async(IDS, Catch(), print)
    assert (fake.seen.async_runs, handle.state) == (0, HandleState.IDLE)


# -- evaluations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "number"), [(EvaluateMode.HIDDEN, 1), (EvaluateMode.LOGITS, 2)])
@pytest.mark.parametrize("shapes", [((3, 4),), ((0, 0), (3, 4), (1, 4))], ids=["once", "thrice"])
@pytest.mark.parametrize("no_finish", [0, 1], ids=["FINISH", "no FINISH"])
def test_m9_rows_are_copied_at_normal_and_complete_on_return(
    fake: Fake,
    handle: Binding,
    *,
    mode: EvaluateMode,
    number: int,
    shapes: tuple[tuple[int, int], ...],
    no_finish: int,
) -> None:
    fake.script.no_finish = no_finish
    fake.rows(*shapes)
    matrix = handle.evaluate(TokenInput((1, 2, 3)), mode)
    assert matrix == Matrix(3, 4, floats(*range(12)))
    frees = 2 if handle.quirks["return_2_frees_buffer"] else 0
    assert fake.replies()[: len(shapes)] == [frees if rows else 0 for rows, _ in shapes]
    assert (fake.seen.mode, handle.state) == (number, HandleState.IDLE)
    fake.script.no_finish = 0
    fake.steps(token(1))
    handle.run(IDS, Catch())
    assert (fake.seen.mode, fake.replies()[-2:]) == (0, [0, 0])


def test_only_the_last_row_is_copied_where_that_is_all_that_is_wanted(
    fake: Fake, handle: Binding
) -> None:
    fake.rows((0, 0), (3, 4))
    matrix = handle.evaluate(TokenInput((1, 2, 3)), EvaluateMode.HIDDEN, last=True)
    assert matrix == Matrix(1, 4, floats(*range(8, 12)))
    fake.rows((1, 4))
    assert handle.evaluate(TokenInput((1,)), EvaluateMode.HIDDEN, last=True).rows == 1


@pytest.mark.parametrize(
    ("steps", "code", "error", "words"),
    [
        pytest.param([token(1)], 0, NothingComputed, "nothing of logits", id="no data"),
        pytest.param([], 0, NothingComputed, "gave no reason", id="no callback but FINISH"),
        pytest.param([token(1)], -1, CallFailed, "returned -1", id="refused"),
        pytest.param([(CALL, ERROR, 0, None)], 0, CallFailed, "rkllm_run", id="ERROR"),
    ],
)
def test_an_evaluation_that_brings_nothing_says_so(
    fake: Fake,
    handle: Binding,
    *,
    steps: list[Any],
    code: int,
    error: type[NativeError],
    words: str,
) -> None:
    fake.script.run_return = code
    fake.steps(*steps)
    with pytest.raises(error, match=words):
        handle.evaluate(TokenInput((1,)), EvaluateMode.LOGITS)
    fake.script.run_return = 0
    assert handle.state is HandleState.IDLE


@pytest.mark.parametrize("code", [0, -1], ids=["0", "-1"])
def test_logits_are_limited_to_one_token_by_the_run_or_by_an_abort(
    fake: Fake, fake_release: str, handle: Binding, code: int
) -> None:
    limited = RELEASES[fake_release].per_run_sampling
    fake.script.run_return = 0 if limited else code
    fake.rows((3, 4), (1, 4), go_on=not limited)
    before = fake.calls("rkllm_abort")
    assert handle.evaluate(TokenInput((1, 2, 3)), EvaluateMode.LOGITS).rows == 3
    assert handle.state is HandleState.IDLE
    assert fake.calls("rkllm_abort") - before == int(not limited)
    if limited:
        assert fake.seen.run_max_new_tokens == 1
        handle.evaluate(TokenInput((1,)), EvaluateMode.HIDDEN)
        assert fake.seen.run_max_new_tokens == 0
    fake.script.run_return = 0


def test_an_evaluation_can_be_aborted(fake: Fake, handle: Binding) -> None:
    fake.steps(UNTIL_ABORT)
    told: Future[BaseException] = Future()

    def evaluate() -> None:
        try:
            handle.evaluate(TokenInput((1,)), EvaluateMode.HIDDEN)
        except NothingComputed as exc:
            told.set_result(exc)

    thread = threading.Thread(target=evaluate)
    thread.start()
    until(lambda: bool(fake.lib.fake_in_run))
    handle.abort()
    thread.join(WAIT_S)
    assert "it was aborted" in str(told.result(WAIT_S))


def test_m9_logits_of_ids_with_history_are_misuse_unless_trusted(
    fake: Fake, handle: Binding, opened: Open
) -> None:
    with pytest.raises(Misuse, match="logits of token input with keep_history"):
        handle.evaluate(TokenInput((1,)), EvaluateMode.LOGITS, keep_history=True)
    assert fake.seen.runs == 0
    fake.rows((1, 2))
    handle.evaluate(PromptInput("hi"), EvaluateMode.LOGITS, keep_history=True)
    handle.evaluate(TokenInput((1,)), EvaluateMode.HIDDEN, keep_history=True)
    opened({"logits_with_history": True}).evaluate(
        TokenInput((1,)), EvaluateMode.LOGITS, keep_history=True
    )
    assert (fake.seen.runs, fake.seen.keep_history) == (3, 1)


def test_m9_a_batch_is_not_evaluated(fake: Fake, opened: Open) -> None:
    handle = opened(n_batch=2)
    with pytest.raises(Misuse, match="of a batch"):
        handle.evaluate(TokenInput((1,)), EvaluateMode.HIDDEN)
    assert fake.seen.runs == 0
