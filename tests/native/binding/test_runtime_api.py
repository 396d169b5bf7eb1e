"""The rest of the library's interface against a scripted C library: loads, texts, hooks.

What a misuse would do to the library is not known or bad; so each is seen not to reach it.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from rkserve.core.errors import CallFailed, LoadFailed, Misuse, NativeError
from rkserve.core.run_params import Sampling
from rkserve.native.binding import preconditions
from rkserve.native.binding.preconditions import HandleState
from rkserve.native.binding.releases import RELEASES
from rkserve.native.binding.runtime import Binding, open_runtime
from rkserve.native.runtime import (
    CrossAttention,
    LoadParams,
    PromptInput,
    RunEnd,
    RunOutcome,
    RunParams,
    SinkAction,
    TokenPiece,
)
from rkserve.native.runtime import Step as RunStep
from tests.support.paths import PROJECT, TESTS
from tests.support.sim.binding_driver import (
    IDS,
    UNTIL_ABORT,
    UNTIL_GO,
    WAIT_S,
    Catch,
    Open,
    batch,
    floats,
    ints,
    running,
    until,
)
from tests.support.sim.rkllm_fake import NORMAL, Fake, ended, token

pytest_plugins = ["tests.support.sim.binding_fixtures"]

Call = Callable[[Binding], object]


def prompt(text: str) -> RunParams:
    return RunParams((PromptInput(text),))


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


@pytest.mark.parametrize("fake_release", ["1.3.0"], indirect=True)
@pytest.mark.parametrize(
    ("board", "cpus", "quirks", "loads"),
    [
        pytest.param("rk3588", (6, 7), {}, False, id="two for three cores"),
        pytest.param("rk3588", (5, 6, 7), {}, True, id="three for three cores"),
        pytest.param("rk3588", (), {}, True, id="the library's own choice"),
        pytest.param("rk3588", (6,), {"fewer_cpus_than_cores": True}, True, id="the quirk"),
        pytest.param("rk3576", (7,), {}, False, id="one for two cores"),
        pytest.param("rk3562", (3,), {}, True, id="one for one core"),
        pytest.param("none", (3,), {}, True, id="no device tree"),
    ],
)
def test_fewer_cpus_than_npu_cores_are_refused_before_the_load(
    fake: Fake,
    load: LoadParams,
    board: str,
    cpus: tuple[int, ...],
    quirks: dict[str, bool],
    *,
    loads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compatible = TESTS / "data" / board / "proc" / "device-tree" / "compatible"
    monkeypatch.setattr(preconditions, "_DEVICE_TREE", compatible)
    binding = open_runtime(fake.path, quirks)
    if loads:
        binding.load(replace(load, cpus=cpus))
        binding.destroy()
    else:
        with pytest.raises(LoadFailed, match="fewer CPUs than NPU cores"):
            binding.load(replace(load, cpus=cpus))
    assert fake.seen.inits == int(loads)


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


CROSS = CrossAttention(floats(1, 2, 3, 4), floats(5, 6, 7, 8), floats(1, 1), ints(4, 5), 2)


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
