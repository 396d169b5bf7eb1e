"""The binding against a scripted C library: what it passes on, what it keeps, what it refuses.

The misuses M1 to M15 that the library would not survive have their numbers in the tests' names;
M1 is in test_library.py.
"""

from __future__ import annotations

import gc
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rkserve.core.errors import CallFailed, LoadFailed, Misuse, NativeError
from rkserve.core.run_params import Sampling
from rkserve.native.binding.library import file_limit
from rkserve.native.binding.preconditions import HandleState
from rkserve.native.binding.releases import RELEASES
from rkserve.native.binding.runtime import Binding, open_runtime
from rkserve.native.quirks import quirks_for
from rkserve.native.runtime import (
    LoadParams,
    Perf,
    PromptInput,
    RunEnd,
    RunOutcome,
    RunParams,
    SinkAction,
    TokenInput,
)
from rkserve.native.runtime import Step as RunStep
from tests.support.sim.binding_driver import (
    IDS,
    UNTIL_ABORT,
    UNTIL_GO,
    WAIT_S,
    Catch,
    running,
    until,
)
from tests.support.sim.rkllm_fake import CALL, ERROR, Fake, Step, token

pytest_plugins = ["tests.support.sim.binding_fixtures"]


def ids_of(step: RunStep) -> list[int]:
    return [piece.token_id for piece in step if piece is not None]


# -- what the library is given --------------------------------------------------------------------


def test_m2_init_starts_from_the_librarys_defaults(
    fake: Fake, load: LoadParams, fake_release: str
) -> None:
    binding = open_runtime(fake.path)
    binding.load(replace(load, cpus=(4, 6), base_domain_id=3, n_keep=5, skip_special_token=False))
    seen = fake.seen
    assert (seen.max_context_len, seen.max_new_tokens) == (2048, 256)
    assert (seen.n_batch, seen.is_async, seen.null_image_tags) == (1, 0, 0)
    assert (seen.cpus_num, seen.cpus_mask) == (2, 0b0101_0000)
    assert (seen.base_domain_id, seen.n_keep, seen.skip_special_token) == (3, 5, 0)
    assert seen.mirostat_tau == pytest.approx(5.0)
    assert binding.release == fake_release
    assert binding.per_run_sampling is (fake_release == "1.3.0")
    assert binding.quirks == quirks_for(RELEASES[fake_release].quirks)


def test_m2_without_cpus_the_librarys_own_choice_stands(fake: Fake, handle: Binding) -> None:
    assert handle.state is HandleState.IDLE
    assert (fake.seen.cpus_num, fake.seen.cpus_mask) == (4, 0xF0)


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 1), (0.5, 40)])
def test_temperature_0_is_top_k_1_at_load(
    fake: Fake, load: LoadParams, temperature: float, top_k: int
) -> None:
    open_runtime(fake.path).load(replace(load, sampling=Sampling(temperature=temperature)))
    assert fake.seen.top_k == top_k
    assert fake.seen.temperature == pytest.approx(temperature)


def test_token_input_is_sent_verbatim(fake: Fake, handle: Binding) -> None:
    handle.run(RunParams((TokenInput((7, 8, 2**31 - 1)),), keep_history=True), Catch())
    seen = fake.seen
    assert (seen.input_type, seen.n_tokens, seen.first_id, seen.last_id) == (1, 3, 7, 2**31 - 1)
    assert seen.keep_history == 1
    assert fake.string("role") == b"user"


def test_prompt_input_is_sent_with_its_role(fake: Fake, handle: Binding) -> None:
    handle.run(RunParams((PromptInput("grüß dich", role="tool", enable_thinking=True),)), Catch())
    assert (fake.seen.input_type, fake.seen.keep_history) == (0, 0)
    assert (fake.string("role"), fake.string("prompt")) == (b"tool", "grüß dich".encode())


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(TokenInput(()), id="no token"),
        pytest.param(TokenInput((1, -1)), id="a negative id"),
        pytest.param(TokenInput((2**31,)), id="an id beyond int32"),
        pytest.param(PromptInput("cut\0off"), id="a NUL in the text"),
        pytest.param(PromptInput("half \ud83d"), id="half a surrogate pair"),
    ],
)
def test_input_that_c_would_see_otherwise_is_misuse(
    fake: Fake, handle: Binding, given: TokenInput | PromptInput
) -> None:
    with pytest.raises(Misuse):
        handle.run(RunParams((given,)), Catch())
    assert fake.seen.runs == 0
    assert handle.state is HandleState.IDLE
    handle.run(IDS, Catch())


@pytest.mark.parametrize("fake_release", ["1.2.3"], indirect=True)
@pytest.mark.parametrize(
    "params",
    [replace(IDS, sampling=Sampling()), replace(IDS, max_new_tokens=5)],
    ids=["sampling", "max_new_tokens"],
)
def test_m7_limits_per_run_are_misuse_where_the_release_has_none(
    fake: Fake, handle: Binding, params: RunParams
) -> None:
    with pytest.raises(Misuse, match=r"1\.2\.3 takes sampling and max_new_tokens at load only"):
        handle.run(params, Catch())
    assert fake.seen.runs == 0


@pytest.mark.parametrize("fake_release", ["1.3.0"], indirect=True)
def test_m7_limits_per_run_reach_a_release_that_has_them(fake: Fake, handle: Binding) -> None:
    handle.run(replace(IDS, sampling=Sampling(temperature=0.0), max_new_tokens=5), Catch())
    seen = fake.seen
    assert (seen.run_max_new_tokens, seen.run_top_k, seen.run_temperature) == (5, 1, 0.0)
    assert seen.run_mirostat_tau == pytest.approx(5.0)  # all nine fields override together
    handle.run(IDS, Catch())
    assert (seen.run_max_new_tokens, seen.run_top_k) == (0, -1)  # nothing is left of it


@pytest.mark.parametrize("fake_release", ["1.3.0"], indirect=True)
@pytest.mark.parametrize("limit", [0, -1, 2**31])
def test_a_limit_that_is_none_is_misuse(fake: Fake, handle: Binding, limit: int) -> None:
    with pytest.raises(Misuse):
        handle.run(replace(IDS, max_new_tokens=limit), Catch())
    assert fake.seen.runs == 0


def test_m8_one_batch_one_input_one_result(fake: Fake, handle: Binding) -> None:
    # The fake's FINISH carries a text that crashes whoever reads it.
    assert handle.run(IDS, Catch()).end is RunEnd.FINISHED
    assert fake.seen.n_batch == 1
    assert handle.kv_cache_sizes() == (42,)


def test_m9_a_run_asks_for_generation_and_saves_nothing(fake: Fake, handle: Binding) -> None:
    handle.run(replace(IDS, keep_history=True), Catch())
    assert (fake.seen.mode, fake.seen.cache_null) == (0, 1)


def test_m9_a_run_is_over_when_it_returns_and_does_not_wait_for_finish(
    fake: Fake, handle: Binding
) -> None:
    fake.script.no_finish = 1
    fake.steps(token(1))
    outcome = handle.run(IDS, Catch())
    assert (outcome.end, outcome.perf) == (RunEnd.FAILED, Perf())
    assert handle.state is HandleState.IDLE


def test_m13_rendered_text_is_misuse_while_a_template_is_in_force(
    fake: Fake, handle: Binding
) -> None:
    rendered = RunParams((PromptInput("<|im_start|>user\nhi<|im_end|>"),))
    with pytest.raises(Misuse, match=r"<\|im_start\|>.*empty template"):
        handle.run(rendered, Catch())
    handle.set_chat_template("", "", "")
    handle.run(rendered, Catch())
    handle.set_chat_template("", "<|user|>", "")
    assert fake.string("template_prefix") == b"<|user|>"
    with pytest.raises(Misuse):
        handle.run(rendered, Catch())
    handle.run(RunParams((PromptInput("is a <| b or a |> c?"),)), Catch())
    assert (fake.seen.runs, fake.seen.templates) == (2, 2)


def test_m14_the_adapter_is_said_on_every_run(fake: Fake, handle: Binding) -> None:
    for keep_history in (False, True):
        handle.run(replace(IDS, keep_history=keep_history), Catch())
        assert fake.seen.lora_null == 1


# -- lifetime -------------------------------------------------------------------------------------


def test_m4_what_a_paused_run_was_given_stays_alive_until_it_ends(
    fake: Fake, handle: Binding
) -> None:
    fake.steps(token(1))
    outcome = handle.run(RunParams((TokenInput(tuple(range(1000))),)), Catch(1))
    assert outcome.end is RunEnd.PAUSED
    del outcome
    gc.collect()
    litter = [bytearray(b"\xee" * 4000) for _ in range(200)]
    assert fake.lib.fake_reread_last_id() == 999
    del litter


# -- one at a time --------------------------------------------------------------------------------

Call = Callable[[Binding], object]
BLOCKED_WHILE_RUNNING: dict[str, Call] = {
    "run": lambda handle: handle.run(IDS, Catch()),
    "resume": lambda handle: handle.run(replace(IDS, resume=True), Catch()),
    "clear": lambda handle: handle.clear_kv_cache(),
    "size": lambda handle: handle.kv_cache_sizes(),
    "template": lambda handle: handle.set_chat_template("", "", ""),
    "destroy": lambda handle: handle.destroy(),
}
EVERY_CALL: tuple[Call, ...] = (*BLOCKED_WHILE_RUNNING.values(), lambda handle: handle.abort())


def counts(fake: Fake) -> tuple[int, ...]:
    seen = fake.seen
    return (seen.inits, seen.runs, seen.clears, seen.sizes, seen.templates, seen.destroys)


@pytest.mark.parametrize(
    "call", BLOCKED_WHILE_RUNNING.values(), ids=[f"m5-m11-{name}" for name in BLOCKED_WHILE_RUNNING]
)
@pytest.mark.parametrize(
    "phase", [HandleState.PREFILL, HandleState.GENERATING, HandleState.ABORTING]
)
def test_nothing_else_enters_the_library_during_a_run(
    fake: Fake, handle: Binding, call: Call, phase: HandleState
) -> None:
    fake.steps(*([] if phase is HandleState.PREFILL else [token(1)]), UNTIL_GO)
    with running(handle, Catch()) as run:
        if phase is HandleState.ABORTING:
            until(lambda: handle.state is HandleState.GENERATING)
            handle.abort()
        until(lambda: bool(fake.lib.fake_in_run) and handle.state is phase)
        before = counts(fake)
        with pytest.raises(Misuse, match=phase.value):
            call(handle)
        assert counts(fake) == before
        fake.lib.fake_go = 1
        assert run.result(WAIT_S).end is RunEnd.FINISHED


@pytest.mark.parametrize(
    "call", BLOCKED_WHILE_RUNNING.values(), ids=[f"m5-{name}" for name in BLOCKED_WHILE_RUNNING]
)
def test_nothing_enters_the_library_from_within_a_sink(
    fake: Fake, handle: Binding, call: Call
) -> None:
    def sink(_: RunStep) -> SinkAction:
        call(handle)
        return SinkAction.CONTINUE

    fake.steps(token(1), UNTIL_ABORT)
    with pytest.raises(Misuse):
        handle.run(IDS, sink)
    assert handle.state is HandleState.IDLE


def test_m5_abort_and_is_running_get_through_while_a_sink_is_busy(
    fake: Fake, handle: Binding
) -> None:
    busy, release_sink = threading.Event(), threading.Event()

    def sink(_: RunStep) -> SinkAction:
        busy.set()
        assert release_sink.wait(WAIT_S)
        return SinkAction.CONTINUE

    fake.steps(token(1), UNTIL_ABORT)
    assert handle.is_running() is False
    with running(handle, sink) as run:
        assert busy.wait(WAIT_S)
        assert handle.is_running() is True
        handle.abort()
        assert fake.seen.aborts == 1
        release_sink.set()
        assert run.result(WAIT_S).end is RunEnd.FINISHED
    assert handle.is_running() is False


@pytest.mark.parametrize("trusted", [False, True])
def test_an_abort_from_the_sink_is_made_where_the_release_allows_it(
    fake: Fake, load: LoadParams, trusted: bool
) -> None:
    binding = open_runtime(fake.path, {"abort_in_callback": trusted})
    binding.load(load)

    def sink(step: RunStep) -> SinkAction:
        if ids_of(step) == [2]:
            binding.abort()
        return SinkAction.CONTINUE

    fake.steps(token(1), token(2), UNTIL_ABORT)
    assert binding.run(IDS, sink).end is RunEnd.FINISHED
    assert (fake.seen.aborts, fake.seen.abort_in_callback) == (1, int(trusted))


def test_an_abort_before_the_first_token_is_not_lost(fake: Fake, handle: Binding) -> None:
    fake.script.deaf_until_token = 1  # as a library that has not begun yet
    fake.steps(UNTIL_GO, token(1), UNTIL_ABORT)
    with running(handle, Catch()) as run:
        until(lambda: bool(fake.lib.fake_in_run))
        handle.abort()
        assert handle.state is HandleState.ABORTING
        fake.lib.fake_go = 1
        assert run.result(WAIT_S).end is RunEnd.FINISHED
    assert (fake.seen.aborts, fake.seen.abort_in_callback) == (2, 0)


def test_an_abort_of_an_idle_handle_is_not_passed_on(fake: Fake, handle: Binding) -> None:
    handle.abort()
    assert fake.seen.aborts == 0
    fake.steps(token(1))
    assert handle.run(IDS, Catch()).end is RunEnd.FINISHED


def test_an_abort_that_fails_is_logged(
    fake: Fake, handle: Binding, caplog: pytest.LogCaptureFixture
) -> None:
    fake.script.abort_return = -1
    fake.steps(token(1), UNTIL_ABORT)
    catch = Catch()
    with running(handle, catch):
        assert catch.first.wait(WAIT_S)
        handle.abort()
    assert "rkllm_abort returned -1 during a run" in caplog.text


def test_m7_late_tokens_of_an_abort_are_drained_before_the_run_returns(
    fake: Fake, handle: Binding
) -> None:
    fake.steps(token(1), UNTIL_ABORT, token(2), token(3))
    catch = Catch()
    with running(handle, catch) as run:
        assert catch.first.wait(WAIT_S)
        handle.abort()
        assert run.result(WAIT_S).end is RunEnd.FINISHED
    assert catch.ids == [1, 2, 3]
    assert 1 not in fake.replies()
    fake.steps(token(4))
    fresh = Catch()
    handle.run(IDS, fresh)
    assert (fresh.ids, catch.ids, handle.late_callbacks) == ([4], [1, 2, 3], 0)


def test_m15_a_hung_run_leaves_abort_and_is_running_usable(fake: Fake, handle: Binding) -> None:
    fake.steps(UNTIL_GO)  # deaf to aborts, as a library that hangs
    with running(handle, Catch()) as run:
        until(lambda: bool(fake.lib.fake_in_run))
        for _ in range(3):
            handle.abort()
            assert handle.is_running() is True
        assert not run.done()
        fake.lib.fake_go = 1


def test_m15_a_run_that_never_called_back_has_failed(fake: Fake, handle: Binding) -> None:
    fake.script.no_finish = 1
    assert handle.run(IDS, Catch()) == RunOutcome(RunEnd.FAILED, Perf(), 0)


# -- pause ----------------------------------------------------------------------------------------


def paused(fake: Fake, handle: Binding) -> Catch:
    fake.steps(token(1), token(2), token(3))
    catch = Catch(2)
    assert handle.run(IDS, catch).end is RunEnd.PAUSED
    assert (catch.ids, fake.replies()) == ([1, 2], [0, 1])
    assert handle.state is HandleState.PAUSED
    return catch


def test_a_paused_run_is_resumed_with_the_same_userdata(fake: Fake, handle: Binding) -> None:
    paused(fake, handle)
    userdata = fake.seen.userdata
    fake.steps(token(3))
    rest = Catch()
    resume = RunParams((TokenInput((2,)),), resume=True)
    assert handle.run(resume, rest).end is RunEnd.FINISHED
    assert (rest.ids, fake.seen.userdata, fake.seen.last_id) == ([3], userdata, 2)
    assert handle.state is HandleState.IDLE
    handle.run(IDS, Catch())
    assert fake.seen.userdata != userdata


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda handle: handle.run(IDS, Catch()), id="m6-another conversation"),
        pytest.param(lambda handle: handle.clear_kv_cache(), id="m6-a full clear"),
        pytest.param(lambda handle: handle.set_chat_template("", "", ""), id="m6-a template"),
        pytest.param(lambda handle: handle.abort(), id="m6-an abort"),
        pytest.param(
            lambda handle: handle.run(RunParams((PromptInput("on"),), resume=True), Catch()),
            id="m6-resuming with text",
        ),
        pytest.param(
            lambda handle: handle.run(replace(IDS, resume=True, keep_history=True), Catch()),
            id="m6-resuming with another keep_history",
        ),
    ],
)
def test_a_paused_handle_refuses(fake: Fake, handle: Binding, call: Call) -> None:
    paused(fake, handle)
    before = counts(fake)
    with pytest.raises(Misuse):
        call(handle)
    assert (counts(fake), fake.seen.aborts) == (before, 0)
    assert handle.state is HandleState.PAUSED
    assert handle.kv_cache_sizes() == (42,)
    handle.destroy()
    assert fake.seen.destroys == 1


def test_m6_an_abort_of_a_resumption_waits_for_its_first_token(fake: Fake, handle: Binding) -> None:
    paused(fake, handle)
    fake.steps(UNTIL_GO, token(3), UNTIL_ABORT)  # until it has begun, the library is paused
    with running(handle, Catch(), RunParams((TokenInput((2,)),), resume=True)) as run:
        until(lambda: bool(fake.lib.fake_in_run))
        handle.abort()
        assert (handle.state, fake.seen.aborts) == (HandleState.ABORTING, 0)
        fake.lib.fake_go = 1
        assert run.result(WAIT_S).end is RunEnd.FINISHED
    assert (fake.seen.aborts, fake.seen.abort_in_callback) == (1, 0)


def test_resuming_what_is_not_paused_is_misuse(fake: Fake, handle: Binding) -> None:
    with pytest.raises(Misuse, match="resume"):
        handle.run(replace(IDS, resume=True), Catch())
    assert fake.seen.runs == 0


def test_a_pause_with_history_is_misuse_unless_the_release_is_trusted(
    fake: Fake, handle: Binding
) -> None:
    fake.steps(token(1), UNTIL_ABORT)
    with pytest.raises(Misuse, match="not known to pause a run with keep_history"):
        handle.run(replace(IDS, keep_history=True), Catch(1))
    assert 1 not in fake.replies()


def test_a_pause_with_history_is_made_where_a_quirk_allows_it(fake: Fake, load: LoadParams) -> None:
    binding = open_runtime(fake.path, {"pause_with_history": True})
    binding.load(load)
    fake.steps(token(1), token(2))
    assert binding.run(replace(IDS, keep_history=True), Catch(1)).end is RunEnd.PAUSED
    binding.run(replace(IDS, keep_history=True, resume=True), Catch())


def test_an_abort_beats_a_pause_of_the_same_token(fake: Fake, handle: Binding) -> None:
    def sink(_: RunStep) -> SinkAction:
        handle.abort()
        return SinkAction.PAUSE

    fake.steps(token(1), UNTIL_ABORT)
    assert handle.run(IDS, sink).end is RunEnd.FINISHED
    assert 1 not in fake.replies()


def test_a_library_that_goes_on_after_a_pause_is_not_paused(fake: Fake, handle: Binding) -> None:
    fake.script.ignore_pause = 1
    fake.steps(token(1), token(2))
    catch = Catch(1)
    assert handle.run(IDS, catch).end is RunEnd.FINISHED
    assert (catch.ids, handle.state) == ([1, 2], HandleState.IDLE)
    assert fake.replies() == [1, 0, 0]


@pytest.mark.parametrize(
    ("pause_on", "end"),
    [
        pytest.param((1,), RunEnd.PAUSED, id="m6-after the callback said pause"),
        pytest.param((), RunEnd.FINISHED, id="after FINISH"),
    ],
)
def test_an_abort_that_comes_after_the_last_callback_is_not_passed_on(
    fake: Fake, handle: Binding, pause_on: tuple[int, ...], end: RunEnd
) -> None:
    fake.script.linger = 1
    fake.steps(token(1))
    with running(handle, Catch(*pause_on)) as run:
        until(lambda: len(fake.replies()) == (1 if pause_on else 2))
        handle.abort()
        assert handle.state is HandleState.ABORTING
        fake.lib.fake_go = 1
        assert run.result(WAIT_S).end is end
    assert fake.seen.aborts == 0


# -- how runs end ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "code", "end"),
    [
        pytest.param([token(1), (CALL, ERROR, 0, None)], 0, RunEnd.FAILED, id="ERROR, returns 0"),
        pytest.param([(CALL, ERROR, 0, None)], -1, RunEnd.FAILED, id="ERROR, returns -1"),
        pytest.param([token(1)], -1, RunEnd.FAILED, id="FINISH, returns -1"),
        pytest.param([token(1)], 0, RunEnd.FINISHED, id="FINISH, returns 0"),
    ],
)
def test_a_run_ends_as_the_library_showed_it(
    fake: Fake, handle: Binding, steps: list[Step], code: int, end: RunEnd
) -> None:
    fake.script.run_return = code
    fake.steps(*steps)
    outcome = handle.run(IDS, Catch())
    assert (outcome.end, outcome.return_code) == (end, code)
    fake.script.run_return = 0
    assert handle.run(IDS, Catch()).return_code == 0  # the handle lives on


@pytest.mark.parametrize(
    ("code", "no_finish", "end"),
    [
        pytest.param(0, 1, RunEnd.FINISHED, id="no FINISH after the abort"),
        pytest.param(-1, 0, RunEnd.FINISHED, id="FINISH, but -1"),
        pytest.param(-1, 1, RunEnd.FAILED, id="neither"),
    ],
)
def test_an_aborted_run_ended_well_by_finish_or_by_its_return(
    fake: Fake, handle: Binding, code: int, no_finish: int, end: RunEnd
) -> None:
    fake.script.run_return, fake.script.no_finish = code, no_finish
    fake.steps(token(1), UNTIL_ABORT)
    catch = Catch()
    with running(handle, catch) as run:
        assert catch.first.wait(WAIT_S)
        handle.abort()
        assert run.result(WAIT_S).end is end


@pytest.mark.parametrize(
    ("what", "words"), [("abort", "was aborted"), ("error", "failed")], ids=["aborted", "failed"]
)
def test_m12_a_spoilt_conversation_must_be_cleared_first(
    fake: Fake, handle: Binding, what: str, words: str
) -> None:
    history = replace(IDS, keep_history=True)
    fake.steps(token(1), UNTIL_ABORT if what == "abort" else (CALL, ERROR, 0, None))
    catch = Catch()
    with running(handle, catch, history):
        assert catch.first.wait(WAIT_S)
        if what == "abort":
            handle.abort()
    runs = fake.seen.runs
    with pytest.raises(Misuse, match=f"{words}: clear the KV cache"):
        handle.run(history, Catch())
    assert fake.seen.runs == runs
    handle.clear_kv_cache()
    fake.steps(token(2))
    assert handle.run(history, Catch()).end is RunEnd.FINISHED
    assert handle.run(history, Catch()).end is RunEnd.FINISHED


def test_m12_a_conversation_goes_on_after_an_abort_where_a_quirk_says_so(
    fake: Fake, load: LoadParams
) -> None:
    binding = open_runtime(fake.path, {"kv_valid_after_abort": True})
    binding.load(load)
    history = replace(IDS, keep_history=True)
    fake.steps(token(1), UNTIL_ABORT)
    catch = Catch()
    with running(binding, catch, history):
        assert catch.first.wait(WAIT_S)
        binding.abort()
    fake.steps(token(2))
    assert binding.run(history, Catch()).end is RunEnd.FINISHED


# -- load and the small calls ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "null", "words"),
    [
        pytest.param(-1, 0, "rkllm_init returned -1", id="m10-an error"),
        pytest.param(-1, 1, "rkllm_init returned -1", id="m10-an error without handle"),
        pytest.param(0, 1, "returned 0 but no handle", id="m10-success without handle"),
    ],
)
def test_a_failed_init_breaks_the_handle_for_good(
    fake: Fake, load: LoadParams, code: int, null: int, words: str
) -> None:
    fake.script.init_return, fake.script.init_null_handle = code, null
    binding = open_runtime(fake.path)
    with pytest.raises(LoadFailed, match=words):
        binding.load(load)
    assert binding.state is HandleState.BROKEN
    assert binding.is_running() is False
    before = counts(fake)
    for call in EVERY_CALL:
        with pytest.raises(Misuse, match="broken"):
            call(binding)
    with pytest.raises(Misuse, match="broken"):
        binding.load(load)
    assert counts(fake) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"model_path": "/nowhere/model.rkllm"}, "model file /nowhere", id="no model"),
        pytest.param({"max_context_len": 0}, "at least 1", id="no context"),
        pytest.param({"max_new_tokens": -1}, "at least 1", id="the old -1 for no limit"),
        pytest.param({"max_context_len": 2**31}, "does not fit", id="beyond int32"),
        pytest.param({"cpus": (4, 4)}, "distinct", id="a core twice"),
        pytest.param({"cpus": (32,)}, "0 to 31", id="core 32"),
        pytest.param({"n_batch": 0}, "n_batch must be from 1 to 100", id="m8-no batch"),
        pytest.param({"n_batch": 101}, "n_batch must be from 1 to 100", id="m8-batches of 101"),
        pytest.param({"base_domain_id": 16}, "0 to 15", id="m10-domain 16"),
        pytest.param({"image_tags": ("a\0", "", "")}, "NUL|at load", id="a NUL in a tag"),
    ],
)
def test_a_load_that_must_fail_never_reaches_the_library(
    fake: Fake, load: LoadParams, change: dict[str, object], words: str
) -> None:
    binding = open_runtime(fake.path)
    with pytest.raises(LoadFailed, match=words):
        binding.load(replace(load, **change))  # type: ignore[arg-type]
    assert fake.seen.inits == 0
    binding.load(load)  # nothing has happened to the handle


def test_m10_inits_of_a_process_never_overlap(fake: Fake, load: LoadParams) -> None:
    fake.script.init_ms = 50
    bindings = [open_runtime(fake.path) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda binding: binding.load(load), bindings))
    assert (fake.seen.inits, fake.seen.init_overlaps) == (3, 0)


@pytest.mark.parametrize(
    ("soft", "hard", "after"),
    [
        pytest.param(1024, 4096, 4096, id="m10-up to the hard limit"),
        pytest.param(1024, 1 << 20, 102_400, id="m10-up to what the library needs"),
        pytest.param(1024, -1, 102_400, id="m10-no hard limit"),
        pytest.param(150_000, 200_000, 150_000, id="m10-never down"),
        pytest.param(-1, -1, -1, id="m10-no limit at all"),
    ],
)
def test_the_limit_of_open_files(soft: int, hard: int, after: int) -> None:
    assert file_limit(soft, hard) == after


def test_m10_load_raises_the_limit_of_open_files(fake: Fake, load: LoadParams) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        open_runtime(fake.path).load(load)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert (soft, hard) == (min(before[1], 102_400), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("call", "function"),
    [
        pytest.param(lambda handle: handle.clear_kv_cache(), "rkllm_clear_kv_cache", id="clear"),
        pytest.param(lambda handle: handle.kv_cache_sizes(), "rkllm_get_kv_cache_size", id="size"),
        pytest.param(
            lambda handle: handle.set_chat_template("", "", ""),
            "rkllm_set_chat_template",
            id="template",
        ),
        pytest.param(lambda handle: handle.destroy(), "rkllm_destroy", id="destroy"),
    ],
)
def test_an_error_code_is_raised_with_the_functions_name(
    fake: Fake, handle: Binding, call: Call, function: str
) -> None:
    fake.script.other_return = -7
    with pytest.raises(CallFailed, match=f"{function} returned -7"):
        call(handle)


def test_a_template_that_was_not_taken_does_not_count_as_emptied(
    fake: Fake, handle: Binding
) -> None:
    fake.script.other_return = -1
    with pytest.raises(CallFailed):
        handle.set_chat_template("", "", "")
    with pytest.raises(Misuse):
        handle.run(RunParams((PromptInput("<|im_start|>"),)), Catch())


def test_m11_a_destroyed_handle_is_never_used_again(fake: Fake, handle: Binding) -> None:
    handle.destroy()
    before = counts(fake)
    for call in EVERY_CALL:
        with pytest.raises(Misuse, match="destroyed"):
            call(handle)
    assert handle.is_running() is False
    assert (counts(fake), fake.seen.is_running_calls) == (before, 0)


def test_an_unloaded_handle_does_nothing(fake: Fake) -> None:
    binding = open_runtime(fake.path)
    for call in EVERY_CALL:
        with pytest.raises(NativeError, match="unloaded"):
            call(binding)
    assert counts(fake) == (0, 0, 0, 0, 0, 0)
