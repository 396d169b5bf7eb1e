"""llama.cpp as a runtime, with real inference on a tiny model of random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from rkserve.core.errors import CallFailed, LibraryMissing, LoadFailed, Misuse, ReleaseRefused
from rkserve.core.run_params import Sampling
from rkserve.native import library_file, llama_cpp
from rkserve.native.library_file import llama_cpp_library
from rkserve.native.llama_context import LlamaContext
from rkserve.native.llama_cpp import LlamaCppRuntime, LlamaLibrary, open_llama_cpp
from rkserve.native.runtime import (
    EvaluateMode,
    LoadParams,
    PromptInput,
    RunEnd,
    RunParams,
    SinkAction,
    Step,
    TokenInput,
)
from tests.support.paths import PROJECT
from tests.support.values.tiny_gguf import write_lora, write_tiny

pytestmark = pytest.mark.engine
GREEDY = Sampling(temperature=0, repeat_penalty=1.0)
CONTEXT = 256
PROMPT = tuple(range(300, 360))
Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny(path)
    return path


def loaded(model: Path, **more: Any) -> LlamaCppRuntime:
    runtime = open_llama_cpp(llama_cpp_library())
    given = {"max_context_len": CONTEXT, "max_new_tokens": CONTEXT, "cpus": (0,), **more}
    runtime.load(LoadParams(str(model), sampling=GREEDY, ignore_eos_token=True, **given))
    return runtime


@pytest.fixture
def runtime(model: Path) -> Iterator[LlamaCppRuntime]:
    runtime = loaded(model)
    yield runtime
    runtime.destroy()


def run(
    runtime: LlamaCppRuntime,
    ids: Ids,
    limit: int = 12,
    *,
    pause_at: int | None = None,
    **more: Any,
) -> tuple[Ids, Any]:
    """Return the generated ids, and the outcome."""
    got: list[int] = []

    def sink(step: Step) -> SinkAction:
        (piece,) = step
        assert piece is not None
        got.append(piece.token_id)
        return SinkAction.PAUSE if len(got) == pause_at else SinkAction.CONTINUE

    outcome = runtime.run(RunParams((TokenInput(ids),), max_new_tokens=limit, **more), sink)
    return tuple(got), outcome


def test_answers_depend_on_the_prompt_and_are_the_same_again(runtime: LlamaCppRuntime) -> None:
    first, outcome = run(runtime, PROMPT)
    assert (len(first), outcome.end) == (12, RunEnd.FINISHED)
    assert outcome.perf.prefill_tokens == len(PROMPT)
    assert runtime.kv_cache_sizes() == (len(PROMPT) + 11,)  # the last token is not computed
    other, _ = run(runtime, (*PROMPT[:10], 7, *PROMPT[11:]))
    assert other != first
    assert run(runtime, PROMPT)[0] == first


def test_a_prompt_is_computed_from_where_it_differs(runtime: LlamaCppRuntime) -> None:
    first, _ = run(runtime, PROMPT)
    follow = (*PROMPT, *first, 5, 6, 7)
    answer, outcome = run(runtime, follow)
    assert outcome.perf.prefill_tokens == 4  # the last token of the answer, and the new ones
    runtime.clear_kv_cache()
    assert runtime.kv_cache_sizes() == (0,)
    afresh, outcome = run(runtime, follow)
    assert (afresh, outcome.perf.prefill_tokens) == (answer, len(follow))


def test_history_is_appended_to(runtime: LlamaCppRuntime) -> None:
    first, _ = run(runtime, PROMPT)
    whole, _ = run(runtime, (*PROMPT, *first, 5, 6, 7))
    runtime.clear_kv_cache()
    run(runtime, PROMPT, keep_history=True)
    answer, outcome = run(runtime, (first[-1], 5, 6, 7), keep_history=True)
    assert (answer, outcome.perf.prefill_tokens) == (whole, 4)


@pytest.mark.parametrize("at", [1, 5, 11])
def test_a_paused_run_resumes_token_for_token(runtime: LlamaCppRuntime, at: int) -> None:
    whole, _ = run(runtime, PROMPT)
    begun, outcome = run(runtime, PROMPT, pause_at=at)
    assert outcome.end is RunEnd.PAUSED
    assert runtime.kv_cache_sizes() == (len(PROMPT) + at - 1,)
    with pytest.raises(Misuse, match="paused"):
        run(runtime, PROMPT)
    rest, outcome = run(runtime, begun[-1:], 12 - at, resume=True)
    assert (begun + rest, outcome.end) == (whole, RunEnd.FINISHED)


def test_a_range_is_cut_out_of_a_paused_context(runtime: LlamaCppRuntime) -> None:
    begun, _ = run(runtime, PROMPT, pause_at=6)
    size = runtime.kv_cache_sizes()[0]
    with pytest.raises(Misuse, match="outside"):
        runtime.clear_kv_range([(0, size + 1)])
    runtime.clear_kv_range([(size - 3, size)])  # of the end: as if it had never been generated
    assert runtime.kv_cache_sizes() == (size - 3,)
    rest, _ = run(runtime, begun[2:3], 4, resume=True)
    assert rest == run(runtime, (*PROMPT, *begun[:3]), 4)[0]


def test_a_range_in_the_middle_moves_what_follows(runtime: LlamaCppRuntime) -> None:
    run(runtime, PROMPT, pause_at=2)
    size = runtime.kv_cache_sizes()[0]
    runtime.clear_kv_range([(10, 20)])
    assert runtime.kv_cache_sizes() == (size - 10,)
    rest, outcome = run(runtime, (5,), 4, resume=True)
    assert (len(rest), outcome.end) == (4, RunEnd.FINISHED)
    runtime.clear_kv_cache()
    assert run(runtime, PROMPT)[1].perf.prefill_tokens == len(PROMPT)


def test_a_drained_pause_leaves_an_idle_handle(runtime: LlamaCppRuntime) -> None:
    run(runtime, PROMPT, pause_at=2)
    runtime.drain()
    with pytest.raises(Misuse, match="no run is paused"):
        runtime.drain()
    with pytest.raises(Misuse, match="no run is paused"):
        run(runtime, (1,), resume=True)


def test_an_abort_ends_the_run_and_the_context_stays(runtime: LlamaCppRuntime) -> None:
    whole, _ = run(runtime, PROMPT)
    got: list[int] = []

    def sink(step: Step) -> SinkAction:
        assert step[0] is not None
        got.append(step[0].token_id)
        if len(got) == 3:
            aborter = Thread(target=runtime.abort)
            aborter.start()
            aborter.join()
        return SinkAction.CONTINUE

    outcome = runtime.run(RunParams((TokenInput(PROMPT),), max_new_tokens=12), sink)
    assert (outcome.end, tuple(got)) == (RunEnd.FINISHED, whole[:3])
    assert runtime.kv_cache_sizes() == (len(PROMPT) + 2,)
    assert not runtime.is_running()
    rest, outcome = run(runtime, (*PROMPT, *got), 9)
    assert (rest, outcome.perf.prefill_tokens) == (whole[3:], 1)


def test_an_abort_ends_a_long_prompt_between_its_parts(
    runtime: LlamaCppRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "LEAST_PART", 8)
    monkeypatch.setattr(llama_cpp, "MOST_PART", 8)
    runtime._part = 8
    compute, parts = LlamaContext.compute, list[int]()

    def abort_after_two(context: LlamaContext, given: Any, *, hidden: bool = False) -> None:
        compute(context, given, hidden=hidden)
        parts.append(len(given[0].ids))
        if len(parts) == 2:
            runtime.abort()

    monkeypatch.setattr(LlamaContext, "compute", abort_after_two)
    got, outcome = run(runtime, PROMPT)
    assert (got, outcome.end, parts) == ((), RunEnd.FINISHED, [8, 8])
    assert runtime.kv_cache_sizes() == (16,)


def test_an_error_of_the_sink_ends_the_run_and_is_raised(runtime: LlamaCppRuntime) -> None:
    def sink(_: Step) -> SinkAction:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        runtime.run(RunParams((TokenInput(PROMPT),)), sink)
    assert not runtime.is_running()
    assert len(run(runtime, PROMPT)[0]) == 12


def test_a_full_context_ends_the_answer(runtime: LlamaCppRuntime) -> None:
    ids = tuple(range(CONTEXT - 4))
    got, outcome = run(runtime, ids, 50)
    assert (len(got), outcome.end) == (5, RunEnd.FINISHED)
    with pytest.raises(Misuse, match="do not fit"):
        run(runtime, tuple(range(CONTEXT + 1)))
    with pytest.raises(Misuse, match="empty"):
        run(runtime, ())
    assert len(run(runtime, PROMPT)[0]) == 12


def test_an_answer_ends_with_a_token_that_ends_generation(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = loaded(model)
    whole, _ = run(runtime, PROMPT, 6)
    library = llama_cpp_library()
    runtime.destroy()

    monkeypatch.setattr(LlamaContext, "ends", lambda _, token: token == whole[3])
    runtime = open_llama_cpp(library)
    runtime.load(LoadParams(str(model), CONTEXT, CONTEXT, sampling=GREEDY, cpus=(0,)))
    assert run(runtime, PROMPT)[0] == whole[: whole.index(whole[3]) + 1]
    runtime.destroy()


def test_prompt_caches_restore_on_another_handle(model: Path, tmp_path: Path) -> None:
    one, other = loaded(model), loaded(model)
    file = tmp_path / "cache"
    whole, _ = run(one, PROMPT)
    one.clear_kv_cache()
    run(one, PROMPT, 1, save_cache=str(file))
    other.load_prompt_cache(str(file))
    assert other.kv_cache_sizes() == (len(PROMPT),)
    answer, outcome = run(other, PROMPT)
    assert (answer, outcome.perf.prefill_tokens) == (whole, 1)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CallFailed, match="llama_state_seq_load_file"):
        other.load_prompt_cache(str(file))
    assert other.kv_cache_sizes() == (0,)
    assert run(other, PROMPT)[0] == whole
    one.clear_kv_cache()
    run(one, PROMPT, 1, save_cache=str(file))
    other.load_prompt_cache(str(file))
    other.release_prompt_cache()  # no run has used it: the next one must not, by its adapter
    assert other.kv_cache_sizes() == (0,)
    assert run(other, PROMPT)[0] == whole
    other.release_prompt_cache()
    assert other.kv_cache_sizes() == (len(PROMPT) + 11,)
    one.destroy()
    other.destroy()


def test_logits_are_those_by_which_tokens_are_chosen(runtime: LlamaCppRuntime) -> None:
    whole, _ = run(runtime, PROMPT, 3)
    matrix = runtime.evaluate(TokenInput(PROMPT), EvaluateMode.LOGITS)
    rows = np.frombuffer(matrix.data, np.float32).reshape(matrix.rows, matrix.columns)
    assert matrix.rows == len(PROMPT)
    assert int(rows[-1].argmax()) == whole[0]
    for at in (1, 2):
        last = runtime.evaluate(
            TokenInput(whole[at - 1 : at]), EvaluateMode.LOGITS, keep_history=True, last=True
        )
        assert last.rows == 1
        assert int(np.frombuffer(last.data, np.float32).argmax()) == whole[at]
    assert runtime.kv_cache_sizes() == (len(PROMPT) + 2,)


def test_hidden_states_have_a_row_for_each_token(runtime: LlamaCppRuntime) -> None:
    matrix = runtime.evaluate(TokenInput(PROMPT), EvaluateMode.HIDDEN)
    assert (matrix.rows, matrix.columns) == (len(PROMPT), 32)
    rows = np.frombuffer(matrix.data, np.float32).reshape(matrix.rows, matrix.columns)
    assert np.isfinite(rows).all()
    assert len({row.tobytes() for row in rows}) == len(PROMPT)
    last = runtime.evaluate(TokenInput(PROMPT), EvaluateMode.HIDDEN, last=True)
    np.testing.assert_allclose(np.frombuffer(last.data, np.float32), rows[-1], rtol=1e-3, atol=1e-4)
    assert len(run(runtime, PROMPT)[0]) == 12  # generation still has its logits


def test_sampling_of_a_run_replaces_that_of_the_load(runtime: LlamaCppRuntime) -> None:
    greedy, _ = run(runtime, PROMPT)
    hot = Sampling(temperature=2.0, top_k=0, top_p=1.0, repeat_penalty=1.0)
    drawn = {run(runtime, PROMPT, sampling=hot)[0] for _ in range(3)}
    assert len(drawn | {greedy}) == 4
    punished, _ = run(runtime, PROMPT, 40, sampling=Sampling(temperature=0, repeat_penalty=50.0))
    assert not set(punished) & set(PROMPT)
    assert len(set(punished)) == 40


def test_an_adapter_changes_the_answer_and_its_positions_are_its_own(
    runtime: LlamaCppRuntime, tmp_path: Path
) -> None:
    base, _ = run(runtime, PROMPT)
    for name, scale in (("half", 0.5), ("whole", 1.0)):
        write_lora(tmp_path / f"{name}.gguf")
        runtime.load_adapter(str(tmp_path / f"{name}.gguf"), name, scale)
    with pytest.raises(Misuse, match="'half' is loaded"):
        runtime.load_adapter(str(tmp_path / "half.gguf"), "half")
    answers = [base]
    for name in ("half", "whole"):
        answer, outcome = run(runtime, PROMPT, adapter=name)
        assert outcome.perf.prefill_tokens == len(PROMPT)  # no position of another adapter
        assert run(runtime, PROMPT, adapter=name)[1].perf.prefill_tokens == 1
        answers.append(answer)
    assert len(set(answers)) == 3
    assert run(runtime, PROMPT)[0] == base


def test_other_inputs_and_calls_are_refused_by_name(runtime: LlamaCppRuntime) -> None:
    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: runtime.run(RunParams((PromptInput("a"),)), lambda _: SinkAction.CONTINUE),
            "token ids",
        ),
        (lambda: run(runtime, PROMPT, adapter="a"), "adapter 'a' is not loaded"),
        (lambda: runtime.set_function_tools("", "[]", ""), "token ids"),
        (lambda: runtime.clear_kv_range([(0, 1)]), "paused"),
        (lambda: runtime.load(LoadParams("m", 1, 1)), "a model is loaded"),
    ]
    for call, why in refused:
        with pytest.raises(Misuse, match=why):
            call()
    with pytest.raises(CallFailed, match="llama_adapter_lora_init"):
        runtime.load_adapter("/no/such/adapter.gguf", "a")


def test_a_broken_model_is_refused_with_the_librarys_reason(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(model.read_bytes()[:5000])
    runtime = open_llama_cpp(llama_cpp_library())
    with pytest.raises(LoadFailed, match=r"cut.gguf was not loaded: .+"):
        runtime.load(LoadParams(str(file), CONTEXT, CONTEXT))
    with pytest.raises(LoadFailed, match="does not exist"):
        runtime.load(LoadParams(str(tmp_path / "none.gguf"), CONTEXT, CONTEXT))
    with pytest.raises(Misuse, match="no model is loaded"):
        runtime.clear_kv_cache()


def test_a_library_with_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(library: LlamaLibrary) -> Any:
        given = library.lib.llama_context_default_params()
        given.offload_kqv = False
        return given

    monkeypatch.setattr(LlamaLibrary, "context_params", shifted)
    with pytest.raises(ReleaseRefused, match=r"not laid out as .* Install that one"):
        LlamaLibrary(llama_cpp_library())


def test_the_extra_names_the_declared_release() -> None:
    pinned = f'cpu = ["{library_file.LLAMA_CPP}=={llama_cpp.RELEASE}"]'
    assert pinned in (PROJECT / "pyproject.toml").read_text(encoding="utf-8")


def test_a_missing_wheel_is_named_with_its_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library_file, "LLAMA_CPP", "no_such_wheel")
    with pytest.raises(LibraryMissing, match=r"pip install 'rkserve\[cpu\]'"):
        llama_cpp_library()
    with pytest.raises(LibraryMissing, match="cannot be read"):
        LlamaLibrary(tmp_path / "none.so")
