"""The rest of the library's interface against a scripted C library: batches, asynchronous runs,
evaluations, adapters, prompt caches, inputs that are no text, hooks, drains.

What a misuse would do to the library is not known or bad; so each is seen not to reach it.
"""

from __future__ import annotations

import gc
import re
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import CallFailed, LoadFailed, Misuse, NativeError, NothingComputed
from rkserve.core.run_params import Sampling
from rkserve.native.binding.releases import RELEASES
from rkserve.native.binding.runtime import Binding, open_runtime
from rkserve.native.handle_states import HandleState
from rkserve.native.runtime import (
    CrossAttention,
    EmbedInput,
    EvaluateMode,
    Image,
    LoadParams,
    Matrix,
    MultimodalInput,
    PromptInput,
    RunEnd,
    RunInput,
    RunOutcome,
    RunParams,
    Runtime,
    SinkAction,
    TokenInput,
    TokenPiece,
    Video,
)
from rkserve.native.runtime import Step as RunStep
from tests.support.paths import PROJECT
from tests.support.sim.binding_driver import (
    IDS,
    UNTIL_ABORT,
    UNTIL_GO,
    WAIT_S,
    Catch,
    running,
    until,
)
from tests.support.sim.rkllm_fake import CALL, ERROR, NORMAL, WAITING, Fake, ended, token

pytest_plugins = ["tests.support.sim.binding_fixtures"]

Call = Callable[[Binding], object]
Open = Callable[..., Binding]


def floats(*values: float) -> bytes:
    return struct.pack(f"{len(values)}f", *values)


def ints(*values: int) -> bytes:
    return struct.pack(f"{len(values)}i", *values)


def prompt(text: str) -> RunParams:
    return RunParams((PromptInput(text),))


def batch(n: int, **changes: Any) -> RunParams:
    return RunParams(tuple(TokenInput((10 * i + 1, 10 * i + 2)) for i in range(n)), **changes)


@pytest.fixture
def opened(fake: Fake, load: LoadParams) -> Iterator[Open]:
    """Opens bindings with quirks and changes of the load, and destroys them."""
    made: list[Binding] = []

    def open_with(quirks: dict[str, bool] | None = None, **changes: Any) -> Binding:
        binding = open_runtime(fake.path, quirks)
        binding.load(replace(load, **changes))
        made.append(binding)
        return binding

    yield open_with
    fake.script.other_return = 0
    for binding in made:
        if binding.state in (HandleState.IDLE, HandleState.PAUSED):
            binding.destroy()


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    path = tmp_path / "adapter.rkllm"
    path.write_bytes(b"lora")
    return str(path)


@pytest.fixture
def cache(tmp_path: Path) -> str:
    path = tmp_path / "cache é.bin"
    path.write_bytes(b"kv")
    return str(path)


def test_the_binding_is_a_runtime(handle: Binding) -> None:
    runtime: Runtime = handle  # judged by the type checker
    assert (runtime.is_running(), runtime.poll_async()) == (False, False)


# -- load -----------------------------------------------------------------------------------------


def test_what_a_load_says_reaches_the_library(fake: Fake, opened: Open, fake_release: str) -> None:
    new = fake_release == "1.3.0"
    only_new = {"ignore_eos_token": True} if new else {"image_tags": ("<img>", "</img>", "")}
    sampling = Sampling(mirostat=2, mirostat_tau=4.5, mirostat_eta=0.25)
    opened(n_batch=8, embed_flash=False, use_cross_attn=True, sampling=sampling, **only_new)
    seen = fake.seen
    assert (seen.n_batch, seen.embed_flash, seen.use_cross_attn) == (8, 0, 1)
    assert (seen.mirostat, seen.mirostat_tau, seen.mirostat_eta) == (2, 4.5, 0.25)
    assert seen.null_image_tags == 0
    if new:
        assert (seen.ignore_eos, seen.has_tokenizer, seen.has_embed) == (1, 0, 0)
    else:
        assert (fake.string("img_start"), fake.string("img_content")) == (b"<img>", b"")


def test_greedy_sampling_leaves_nothing_to_mirostat(fake: Fake, opened: Open) -> None:
    opened(sampling=Sampling(temperature=0.0, mirostat=2))
    assert (fake.seen.top_k, fake.seen.mirostat) == (1, 0)


def test_without_a_word_the_embedding_table_is_where_the_library_puts_it(
    fake: Fake, handle: Binding
) -> None:
    assert handle.state is HandleState.IDLE
    assert (fake.seen.embed_flash, fake.seen.use_cross_attn) == (1, 0)


@pytest.mark.parametrize(
    ("fake_release", "change", "words"),
    [
        pytest.param("1.2.3", {"ignore_eos_token": True}, "ignore_eos", id="ignore_eos on 1.2"),
        pytest.param("1.2.3", {"tokenize": lambda _: [1]}, "tokenizer", id="tokenize on 1.2"),
        pytest.param("1.2.3", {"embed": lambda _: b""}, "embedding", id="embed on 1.2"),
        pytest.param("1.3.0", {"image_tags": ("a", "b", "")}, "with each image", id="tags on 1.3"),
    ],
    indirect=["fake_release"],
)
def test_a_setting_of_the_other_interface_is_refused_and_not_lost(
    fake: Fake, load: LoadParams, change: dict[str, Any], words: str
) -> None:
    binding = open_runtime(fake.path)
    with pytest.raises(LoadFailed, match=words):
        binding.load(replace(load, **change))
    assert fake.seen.inits == 0


# -- batches --------------------------------------------------------------------------------------


def test_m8_a_batch_is_one_array_of_inputs_and_one_of_results(fake: Fake, opened: Open) -> None:
    handle = opened(n_batch=3)
    fake.steps(token(1, b"a"), ended(2, 1), ended(3, 0, 1, text=b"\xc3"))
    catch = Catch()
    assert handle.run(batch(3), catch).end is RunEnd.FINISHED
    assert list(fake.seen.last_ids[0:3]) == [2, 12, 22]
    assert catch.steps == [
        (TokenPiece(1, b"a"), TokenPiece(101, b"a"), TokenPiece(201, b"a")),
        (TokenPiece(2, b"x"), None, TokenPiece(202, b"x")),
        (None, None, TokenPiece(203, b"\xc3")),
    ]
    assert handle.kv_cache_sizes() == (42, 43, 44)


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


# -- adapters -------------------------------------------------------------------------------------


def test_m14_every_run_names_its_adapter_or_none(fake: Fake, handle: Binding, adapter: str) -> None:
    handle.load_adapter(adapter, "pirate@1", 0.5)
    seen = fake.seen
    assert (fake.string("lora_path"), fake.string("lora_name")) == (adapter.encode(), b"pirate@1")
    assert seen.lora_scale == 0.5
    handle.run(IDS, Catch())
    assert seen.lora_null == 1
    handle.run(replace(IDS, adapter="pirate@1"), Catch())
    assert (seen.lora_null, fake.string("run_lora")) == (0, b"pirate@1")
    fake.rows((1, 1))
    handle.evaluate(TokenInput((1,)), EvaluateMode.HIDDEN, adapter="pirate@1")
    assert seen.lora_null == 0
    handle.run(IDS, Catch())
    assert seen.lora_null == 1


def test_an_adapter_that_was_not_loaded_is_misuse(
    fake: Fake, handle: Binding, adapter: str
) -> None:
    fake.script.other_return = -1
    with pytest.raises(CallFailed, match="rkllm_load_lora returned -1"):
        handle.load_adapter(adapter, "broken")
    for name in ("broken", "never"):
        with pytest.raises(Misuse, match=f"adapter '{name}' is not loaded"):
            handle.run(replace(IDS, adapter=name), Catch())
    assert fake.seen.runs == 0


@pytest.mark.parametrize(
    ("name", "scale", "missing", "words"),
    [
        pytest.param("one", 1.0, False, "is empty or in use", id="the same name twice"),
        pytest.param("", 1.0, False, "is empty or in use", id="no name"),
        pytest.param("a\0b", 1.0, False, "NUL", id="a NUL in the name"),
        pytest.param("two", float("nan"), False, "finite", id="a scale that is none"),
        pytest.param("two", 1.0, True, "adapter file .* does not exist", id="no file"),
    ],
)
def test_an_adapter_that_could_not_be_told_apart_is_misuse(
    fake: Fake, handle: Binding, adapter: str, *, name: str, scale: float, missing: bool, words: str
) -> None:
    handle.load_adapter(adapter, "one")
    with pytest.raises(Misuse, match=words):
        handle.load_adapter(adapter + "?" if missing else adapter, name, scale)
    assert fake.seen.loras == 1


def test_m14_a_context_of_another_adapter_has_to_be_cleared(
    fake: Fake, handle: Binding, adapter: str
) -> None:
    handle.load_adapter(adapter, "one")
    history = replace(IDS, keep_history=True)
    handle.run(history, Catch())
    with pytest.raises(Misuse, match="computed with no adapter, not with adapter 'one'"):
        handle.run(replace(history, adapter="one"), Catch())
    handle.clear_kv_cache(keep_system_prompt=True)
    assert fake.seen.keep_system_prompt == 1
    with pytest.raises(Misuse, match="clear the KV cache first"):
        handle.run(replace(history, adapter="one"), Catch())
    handle.clear_kv_cache()
    handle.run(replace(history, adapter="one"), Catch())
    with pytest.raises(Misuse, match="computed with adapter 'one', not with no adapter"):
        handle.run(history, Catch())
    handle.run(IDS, Catch())  # a single turn drops what was there
    handle.run(history, Catch())


def test_m14_a_pause_is_resumed_with_its_adapter(fake: Fake, handle: Binding, adapter: str) -> None:
    handle.load_adapter(adapter, "one")
    pause(fake, handle, adapter="one")
    with pytest.raises(Misuse, match="with adapter 'one' cannot be resumed with no adapter"):
        handle.run(replace(IDS, resume=True), Catch())
    assert handle.run(replace(IDS, resume=True, adapter="one"), Catch()).end is RunEnd.FINISHED
    assert fake.string("run_lora") == b"one"


# -- prompt caches --------------------------------------------------------------------------------


def test_a_cache_is_saved_loaded_and_released(
    fake: Fake, handle: Binding, cache: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "new.bin")
    handle.run(replace(IDS, save_cache=saved), Catch())
    seen = fake.seen
    assert (seen.save_cache, fake.string("run_cache")) == (1, saved.encode())
    handle.load_prompt_cache(cache)
    assert fake.string("cache_path") == cache.encode()
    handle.run(IDS, Catch())
    assert seen.cache_null == 1
    handle.load_prompt_cache(cache)
    assert (seen.cache_loads, seen.cache_releases) == (2, 1)  # never two at once
    handle.release_prompt_cache()
    handle.release_prompt_cache()
    assert (seen.cache_loads, seen.cache_releases) == (2, 2)


def test_a_cache_that_was_refused_is_not_released(fake: Fake, handle: Binding, cache: str) -> None:
    fake.script.other_return = -1
    with pytest.raises(CallFailed, match="rkllm_load_prompt_cache returned -1"):
        handle.load_prompt_cache(cache)
    fake.script.other_return = 0
    handle.release_prompt_cache()
    assert fake.seen.cache_releases == 0


def test_m12_no_cache_is_loaded_after_an_abort_until_the_handle_is_new(
    fake: Fake, handle: Binding, opened: Open, cache: str
) -> None:
    fake.steps(token(1), UNTIL_ABORT)
    catch = Catch()
    with running(handle, catch):
        assert catch.first.wait(WAIT_S)
        handle.abort()
    fake.steps()
    handle.clear_kv_cache()
    with pytest.raises(Misuse, match="create the handle anew"):
        handle.load_prompt_cache(cache)
    assert fake.seen.cache_loads == 0
    trusting = opened({"prompt_cache_after_abort": True})
    fake.steps(token(1), UNTIL_ABORT)
    with running(trusting, Catch()):
        until(lambda: trusting.state is HandleState.GENERATING)
        trusting.abort()
    trusting.load_prompt_cache(cache)
    assert fake.seen.cache_loads == 1


def test_an_abort_that_came_too_late_to_be_made_does_not_spoil_the_cache(
    fake: Fake, handle: Binding, cache: str
) -> None:
    fake.script.linger = 1
    with running(handle, Catch()):
        until(lambda: len(fake.replies()) == 1)
        handle.abort()
        fake.lib.fake_go = 1
    assert fake.seen.aborts == 0
    handle.load_prompt_cache(cache)


def test_m14_a_cache_serves_one_adapter_and_no_evaluation(
    fake: Fake, handle: Binding, adapter: str, cache: str
) -> None:
    handle.load_adapter(adapter, "one")
    handle.load_prompt_cache(cache)
    handle.run(replace(IDS, adapter="one"), Catch())
    handle.run(replace(IDS, adapter="one"), Catch())
    assert fake.seen.cache_releases == 0
    handle.run(IDS, Catch())
    assert fake.seen.cache_releases == 1
    handle.load_prompt_cache(cache)
    fake.rows((1, 1))
    handle.evaluate(TokenInput((1,)), EvaluateMode.HIDDEN)
    assert fake.seen.cache_releases == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(
            lambda handle: handle.run(replace(IDS, save_cache="/nowhere/at/all.bin"), Catch()),
            "folder of the prompt cache",
            id="no folder to save in",
        ),
        pytest.param(
            lambda handle: handle.run(replace(IDS, save_cache="/tmp/a\0b"), Catch()),
            "contains a NUL",
            id="a NUL in the path",
        ),
        pytest.param(
            lambda handle: handle.load_prompt_cache("/nowhere/at/all.bin"),
            "prompt cache file",
            id="nothing to load",
        ),
    ],
)
def test_a_path_that_the_library_could_not_use_is_misuse(
    fake: Fake, handle: Binding, call: Call, words: str
) -> None:
    with pytest.raises(Misuse, match=words):
        call(handle)
    assert (fake.seen.runs, fake.seen.cache_loads) == (0, 0)


def test_caches_of_batches_and_of_untrusted_conversations_are_misuse(
    fake: Fake, opened: Open, cache: str
) -> None:
    two = opened(n_batch=2)
    with pytest.raises(Misuse, match="with a batch"):
        two.load_prompt_cache(cache)
    with pytest.raises(Misuse, match="with a batch"):
        two.run(batch(2, save_cache=cache), Catch())
    wary = opened({"prompt_cache_save_with_history": False})
    with pytest.raises(Misuse, match="save its whole context"):
        wary.run(replace(IDS, keep_history=True, save_cache=cache), Catch())
    assert (fake.seen.runs, fake.seen.cache_loads) == (0, 0)


# -- inputs that are no text ----------------------------------------------------------------------


def test_embeddings_are_read_whole(fake: Fake, handle: Binding) -> None:
    handle.run(RunParams((EmbedInput(floats(1, 2, 3, 4, 5, 6), 3),)), Catch())
    assert (fake.seen.input_type, fake.seen.n_tokens, fake.seen.embed_sum) == (2, 3, 21)
    assert fake.string("role") == b"user"


IMAGE = Image(floats(*range(12)), n_tokens=3, n_images=2, width=640, height=480)
VIDEO = Video(floats(*range(16)), n_tokens=2, n_frames=4, n_videos=1, width=64, height=48)


def test_an_image_reaches_the_library_with_its_numbers(
    fake: Fake, handle: Binding, fake_release: str
) -> None:
    tags = ("<s>", "</s>", "") if fake_release == "1.3.0" else ("", "", "")
    given = MultimodalInput("<image><image> what?", image=replace(IMAGE, tags=tags))
    handle.run(RunParams((given,)), Catch())
    seen = fake.seen
    assert (seen.input_type, seen.images, seen.image_tokens, seen.image_width) == (3, 2, 3, 640)
    assert (seen.image_sum, fake.string("prompt")) == (66, b"<image><image> what?")
    if fake_release == "1.3.0":
        assert (fake.string("image_start"), seen.videos) == (b"<s>", 0)


@pytest.mark.parametrize("fake_release", ["1.3.0"], indirect=True)
def test_a_video_reaches_the_library_with_its_numbers(fake: Fake, handle: Binding) -> None:
    given = MultimodalInput("<video> what?", video=replace(VIDEO, tags=("", "", "pad")))
    handle.run(RunParams((given,)), Catch())
    seen = fake.seen
    assert (seen.videos, seen.frames, seen.frame_tokens, seen.frame_height) == (1, 4, 2, 48)
    assert (seen.video_sum, seen.images, fake.string("video_content")) == (120, 0, b"pad")


BAD_INPUTS: dict[str, tuple[RunInput, str]] = {
    "a row cut short": (EmbedInput(b"\0" * 11, 3), "are not 3 rows"),
    "rows that are no floats": (EmbedInput(b"\0" * 9, 3), "are not 3 rows"),
    "no rows": (EmbedInput(b"\0" * 8, 0), "are not 0 rows"),
    "no bytes": (EmbedInput(b"", 1), "are not 1 rows"),
    "no picture": (MultimodalInput("hi"), "needs an image or a video"),
    "no place for it": (
        MultimodalInput("hi", image=IMAGE),
        "<image> 0 times; the number of images is 2",
    ),
    "too many places": (
        MultimodalInput("<image>" * 3, image=IMAGE),
        "<image> 3 times; the number of images is 2",
    ),
    "counts not set": (
        MultimodalInput("<image>", image=replace(IMAGE, n_images=0)),
        "needs counts",
    ),
    "fewer rows than counted": (
        MultimodalInput("<image><image>", image=replace(IMAGE, data=floats(1, 2, 3))),
        "are not 6 rows",
    ),
    "rendered text": (MultimodalInput("<|im_start|><image><image>", image=IMAGE), "empty template"),
}


@pytest.mark.parametrize(("given", "words"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_m15_an_input_that_c_would_read_past_or_never_answer_is_misuse(
    fake: Fake, handle: Binding, given: RunInput, words: str
) -> None:
    with pytest.raises(Misuse, match=words):
        handle.run(RunParams((given,)), Catch())
    assert fake.seen.runs == 0


@pytest.mark.parametrize(
    ("fake_release", "given", "words"),
    [
        pytest.param(
            "1.2.3", MultimodalInput("<video>", video=VIDEO), "takes no video", id="video on 1.2"
        ),
        pytest.param(
            "1.2.3",
            MultimodalInput("<image>", image=replace(IMAGE, tags=("a", "", ""))),
            "tags at load",
            id="tags on 1.2",
        ),
        pytest.param(
            "1.3.0",
            MultimodalInput("<image>", image=IMAGE),
            "<image> 1 times",
            id="one place for two images on 1.3",
        ),
        pytest.param(
            "1.3.0",
            MultimodalInput("<video><video>", video=VIDEO),
            "<video> 2 times",
            id="two places for one video",
        ),
    ],
    indirect=["fake_release"],
)
def test_an_input_that_the_release_cannot_take_is_misuse(
    fake: Fake, handle: Binding, given: RunInput, words: str
) -> None:
    with pytest.raises(Misuse, match=words):
        handle.run(RunParams((given,)), Catch())
    assert fake.seen.runs == 0


# -- tools, templates, cross attention ------------------------------------------------------------


def test_tools_reach_the_library_and_bring_the_template_back(fake: Fake, handle: Binding) -> None:
    handle.set_chat_template("", "", "")
    handle.run(prompt("<|im_start|>"), Catch())
    handle.set_function_tools("be kind", '[{"name": "f"}]', "tool_response")
    assert fake.string("tools_json") == b'[{"name": "f"}]'
    assert fake.string("tools_tag") == b"tool_response"
    with pytest.raises(Misuse):
        handle.run(prompt("<|im_start|>"), Catch())
    with pytest.raises(Misuse, match="not JSON"):
        handle.set_function_tools("", "[{", "x")
    handle.set_function_tools("", "", "")
    assert fake.seen.tools == 2


def test_m4_texts_stay_alive_until_others_take_their_place(
    fake: Fake, handle: Binding, adapter: str, cache: str
) -> None:
    handle.set_chat_template("", "<prefix>", "")
    handle.set_function_tools("", '["tools"]', "")
    handle.load_adapter(adapter, "the adapter")
    handle.load_prompt_cache(cache)
    gc.collect()
    litter = [bytes([number]) * 64 for number in range(256)]
    assert fake.kept() == f'<prefix>;["tools"];the adapter;{cache};'
    del litter


CROSS = CrossAttention(floats(1, 2, 3, 4), floats(5, 6, 7, 8), floats(1, 1), ints(4, 5), 2)


def test_m4_an_encoders_output_stays_alive(fake: Fake, opened: Open) -> None:
    handle = opened(use_cross_attn=True)
    handle.set_cross_attention(
        CrossAttention(
            floats(*range(400)), floats(*range(400)), floats(*[1] * 200), bytes(800), 200
        )
    )
    gc.collect()
    litter = [bytes([number]) * 1600 for number in range(256)]
    assert fake.lib.fake_reread_cross() == 2 * sum(range(400))
    del litter


def test_an_encoders_output_is_handed_over_whole(fake: Fake, opened: Open) -> None:
    handle = opened(use_cross_attn=True)
    handle.run(replace(IDS, keep_history=True), Catch())
    handle.set_cross_attention(CROSS)
    seen = fake.seen
    assert (seen.cross_tokens, seen.cross_positions) == (2, 9)
    assert (seen.cross_k, seen.cross_v, seen.cross_mask) == (10, 26, 2)
    with pytest.raises(Misuse, match="encoder's output was replaced"):
        handle.run(replace(IDS, keep_history=True), Catch())
    handle.clear_kv_cache()
    handle.run(replace(IDS, keep_history=True), Catch())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"n_tokens": 0}, "are not 0 rows", id="no tokens"),
        pytest.param({"k_cache": b""}, "are not 2 rows", id="no K cache"),
        pytest.param({"v_cache": floats(1)}, "the same size", id="V is shorter than K"),
        pytest.param({"mask": floats(1)}, "mask must have one", id="a short mask"),
        pytest.param({"positions": ints(1, 2, 3)}, "positions must have one", id="long positions"),
    ],
)
def test_an_encoders_output_that_c_would_read_past_is_misuse(
    fake: Fake, opened: Open, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(Misuse, match=words):
        opened(use_cross_attn=True).set_cross_attention(replace(CROSS, **change))
    assert fake.seen.cross == 0


def test_cross_attention_is_misuse_on_a_handle_that_was_not_loaded_for_it(
    fake: Fake, handle: Binding
) -> None:
    with pytest.raises(Misuse, match="use_cross_attn"):
        handle.set_cross_attention(CROSS)
    assert fake.seen.cross == 0


@pytest.mark.parametrize(
    ("call", "function"),
    [
        pytest.param(
            lambda handle: handle.set_function_tools("", "[]", ""),
            "rkllm_set_function_tools",
            id="tools",
        ),
        pytest.param(
            lambda handle: handle.set_cross_attention(CROSS),
            "rkllm_set_cross_attn_params",
            id="cross attention",
        ),
        pytest.param(
            lambda handle: handle.kv_cache_sizes(), "rkllm_get_kv_cache_size", id="kv sizes"
        ),
    ],
)
def test_an_error_code_is_raised_with_the_functions_name(
    fake: Fake, opened: Open, call: Call, function: str
) -> None:
    handle = opened(use_cross_attn=True)
    fake.script.other_return = -3
    with pytest.raises(CallFailed, match=f"{function} returned -3"):
        call(handle)


# -- hooks of 1.3.0 -------------------------------------------------------------------------------


@pytest.mark.parametrize("fake_release", ["1.3.0"], indirect=True)
def test_the_tokenizer_hook_turns_exactly_the_librarys_text_into_ids(
    fake: Fake, opened: Open
) -> None:
    texts: list[str] = []

    def tokenize(text: str) -> list[int]:
        texts.append(text)
        return [7, 8, 9]

    handle = opened(tokenize=tokenize)
    assert (fake.seen.has_tokenizer, fake.seen.has_embed) == (1, 0)
    gc.collect()
    fake.script.token_room = 3
    assert handle.run(prompt("grüß dich"), Catch()).end is RunEnd.FINISHED
    assert (texts, fake.seen.tokenized) == (["grüß dich"], 3)
    assert list(fake.seen.token_ids[0:3]) == [7, 8, 9]


@pytest.mark.parametrize("fake_release", ["1.3.0"], indirect=True)
def test_the_embedding_hook_fills_exactly_the_librarys_buffer(fake: Fake, opened: Open) -> None:
    handle = opened(embed=lambda ids: floats(*ids, 0.5, 0.5))
    fake.script.embed_bytes = 16
    handle.run(IDS, Catch())
    assert (fake.seen.embedded, fake.seen.embedding_sum) == (0, 12)


def fail(_: object) -> Any:
    raise KeyError("nothing for that")


@pytest.mark.parametrize("fake_release", ["1.3.0"], indirect=True)
@pytest.mark.parametrize(
    ("hooks", "error", "words"),
    [
        pytest.param(
            {"tokenize": lambda _: [1, 2, 3, 4]}, NativeError, "takes 3", id="too many ids"
        ),
        pytest.param({"tokenize": fail}, KeyError, "nothing", id="a tokenizer that fails"),
        pytest.param({"tokenize": lambda _: [2**40]}, OverflowError, "32", id="an id beyond int32"),
        pytest.param({"embed": lambda _: b"1234"}, NativeError, "takes 16", id="a short row"),
        pytest.param({"embed": lambda _: b"1" * 17}, NativeError, "are 17 bytes", id="a long row"),
        pytest.param({"embed": fail}, KeyError, "nothing", id="an embedding that fails"),
    ],
)
def test_a_hook_that_fails_ends_its_run_and_nothing_else(
    fake: Fake, opened: Open, hooks: dict[str, Any], error: type[Exception], words: str
) -> None:
    handle = opened(**hooks)
    fake.script.token_room = 3 if "tokenize" in hooks else 0
    fake.script.embed_bytes = 16 if "embed" in hooks else 0
    with pytest.raises(error, match=words):
        handle.run(prompt("hi"), Catch())
    assert (fake.seen.tokenized or fake.seen.embedded) == -1
    fake.script.token_room = fake.script.embed_bytes = 0
    assert handle.run(IDS, Catch()).end is RunEnd.FINISHED


@pytest.mark.parametrize("fake_release", ["1.3.0"], indirect=True)
def test_a_hook_that_fails_in_the_load_is_why_the_load_failed(fake: Fake, load: LoadParams) -> None:
    fake.script.init_tokenizes, fake.script.init_return = 1, -1
    binding = open_runtime(fake.path)
    with pytest.raises(LoadFailed) as caught:
        binding.load(replace(load, tokenize=fail))
    assert isinstance(caught.value.__cause__, KeyError)
    assert fake.seen.tokenized == -1


@pytest.mark.parametrize("fake_release", ["1.3.0"], indirect=True)
def test_m4_a_late_hook_after_destroy_is_harmless(fake: Fake, opened: Open) -> None:
    handle = opened(tokenize=lambda _: [1, 2])
    handle.destroy()
    del handle
    gc.collect()
    assert fake.lib.fake_tokenize() == 2


# -- all of it ------------------------------------------------------------------------------------


def functions(release: str) -> set[str]:
    name = f"{RELEASES[release].declarations}.h"
    header = PROJECT / "rkserve" / "native" / "decl" / name
    return set(re.findall(r"^\w+ (rkllm_\w+)\(", header.read_text(), re.MULTILINE))


def test_every_function_of_the_header_is_called_through_the_binding(
    fake: Fake, fake_release: str, load: LoadParams, adapter: str, cache: str
) -> None:
    names = functions(fake_release)
    assert len(names) == 15
    before = {name: fake.calls(name) for name in names}
    handle = open_runtime(fake.path)
    handle.load(replace(load, use_cross_attn=True))
    handle.set_chat_template("", "", "")
    handle.set_function_tools("", "[]", "")
    handle.set_cross_attention(CROSS)
    handle.load_adapter(adapter, "one")
    handle.load_prompt_cache(cache)
    handle.release_prompt_cache()
    fake.steps(token(1), UNTIL_ABORT)

    def stop(_: RunStep) -> SinkAction:
        handle.abort()
        return SinkAction.CONTINUE

    handle.run(IDS, stop)
    told = Ended()
    fake.steps(token(1))
    handle.run_async(IDS, Catch(), told)
    told.outcome()
    handle.is_running()
    handle.clear_kv_cache()
    handle.kv_cache_sizes()
    handle.destroy()
    assert [name for name in sorted(names) if fake.calls(name) == before[name]] == []


def test_an_owner_is_never_waited_for(fake: Fake, handle: Binding) -> None:
    """A call that finds another one inside says so at once, whatever the state table allows."""
    fake.steps(UNTIL_GO)
    with running(handle, Catch()):
        until(lambda: bool(fake.lib.fake_in_run))
        assert handle.poll_async() is True  # a run is there, and not looked after from here
        with pytest.raises(Misuse, match="'drain' is not allowed while the handle is prefill"):
            handle.drain()
        fake.lib.fake_go = 1
    assert (handle.poll_async(), NORMAL) == (False, 0)
