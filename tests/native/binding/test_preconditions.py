"""Adapters, caches and inputs against a scripted C library: what it must not be given is refused.

What a misuse would do to the library is not known or bad; so each is seen not to reach it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import CallFailed, Misuse
from rkserve.native.binding.preconditions import HandleState
from rkserve.native.binding.runtime import Binding
from rkserve.native.runtime import (
    CrossAttention,
    EmbedInput,
    EvaluateMode,
    Image,
    MultimodalInput,
    PromptInput,
    RunEnd,
    RunInput,
    RunParams,
    TokenInput,
    Video,
)
from tests.support.sim.binding_driver import (
    IDS,
    UNTIL_ABORT,
    WAIT_S,
    Catch,
    Open,
    batch,
    floats,
    ints,
    running,
    until,
)
from tests.support.sim.rkllm_fake import Fake, token

pytest_plugins = ["tests.support.sim.binding_fixtures"]

Call = Callable[[Binding], object]


def prompt(text: str) -> RunParams:
    return RunParams((PromptInput(text),))


# -- pause, ranges, drain -------------------------------------------------------------------------


def pause(fake: Fake, handle: Binding, **changes: Any) -> None:
    fake.steps(token(1), token(7))
    assert handle.run(replace(IDS, **changes), Catch(7)).end is RunEnd.PAUSED
    fake.steps()


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
