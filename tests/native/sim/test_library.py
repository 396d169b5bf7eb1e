"""The simulated runtime of both releases: init, callbacks, results, KV cache, templates."""

from __future__ import annotations

import functools
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.block_hashes import common_prefix
from rkserve.core.errors import LibraryMissing
from rkserve.native.binding.releases import RELEASES
from rkserve.native.sim import build
from tests.support.sim.releases import BOTH, EVERY
from tests.support.sim.sim_driver import (
    FINISH,
    MODEL,
    NORMAL,
    WAITING,
    Aborted,
    Event,
    Sim,
    chat,
    child,
    ids_of,
    tokenizer,
    violations,
)

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")

# --- two releases from one source


def exported(library: Path) -> set[str]:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    return {line.split()[-1] for line in listing.stdout.splitlines()}


def test_a_library_exports_the_fifteen_symbols_and_nothing_else(release: str) -> None:
    names = (
        "createDefaultParam init load_lora load_prompt_cache release_prompt_cache destroy run "
        "run_async abort is_running clear_kv_cache get_kv_cache_size set_chat_template "
        "set_function_tools set_cross_attn_params"
    )
    library = build.ensure_built(release)
    assert exported(library) == {f"rkllm_{name}" for name in names.split()}
    assert f"RKLLM SDK (version: {release} (sim)".encode() in library.read_bytes()


def test_the_default_param_has_the_vendors_values(sim: Sim) -> None:
    param = sim.lib.rkllm_createDefaultParam()
    assert (param.top_k, param.n_keep, param.mirostat) == (40, -1, 0)
    assert param.top_p == pytest.approx(0.9)
    assert param.temperature == pytest.approx(0.8)
    assert param.repeat_penalty == pytest.approx(1.1)
    assert (param.mirostat_tau, param.mirostat_eta) == (5.0, pytest.approx(0.1))
    assert not param.skip_special_token
    assert not param.is_async
    extend = param.extend_param
    assert (extend.base_domain_id, extend.n_batch, extend.use_cross_attn) == (0, 1, 0)
    assert (extend.enabled_cpus_num, extend.enabled_cpus_mask) == (4, 0xF0)
    if sim.release == "1.2.3":
        assert [sim.ffi.string(tag) for tag in (param.img_start, param.img_end)] == [b"", b""]


def test_the_sources_compile_without_a_warning(release: str, tmp_path: Path) -> None:
    (tmp_path / "profiles_generated.h").write_text(build.profiles_header())
    command = build.compile_command(release, None, "none", tmp_path)
    done = subprocess.run(
        [*command, "-Werror", "-fsyntax-only"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_compiler_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(LibraryMissing, match="install gcc"):
        build.compiler()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(LibraryMissing, match="no-such-compiler"):
        build.compiler()


def test_a_library_made_from_other_sources_is_stale(tmp_path: Path) -> None:
    stamp = build.source_hash()
    library = tmp_path / "library.so"
    assert not build.is_current(library, stamp)
    library.write_bytes(b"...rksim-source:0123456789abcdef;...")
    assert not build.is_current(library, stamp)
    assert build.is_current(build.ensure_built("1.3.0"), stamp)


def test_builders_at_the_same_time_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, folder, log = BOTH[-1], tmp_path / "built", tmp_path / "log"
    # A compiler that writes a library in two halves, each builder's while the others' is half done.
    whole = build.ensure_built(release)
    compiler = tmp_path / "slow"
    compiler.write_text(
        "#!/bin/sh\nfor output; do :; done\n"
        f'head -c 9999 {whole} > "$output"\n'
        f"echo begun >> {log}\n"
        f"until [ $(wc -l < {log}) -ge 3 ]; do sleep 0.01; done\n"
        f'cp {whole} "$output"\n',
        encoding="utf-8",
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with ThreadPoolExecutor(3) as pool:
        built = set(pool.map(lambda _: build.ensure_built(release, into=folder), range(3)))
    assert built == {folder / build.library_name(release, None)}
    assert [path.name for path in folder.iterdir()] == [build.library_name(release, None)]
    assert build.is_current(built.pop(), build.source_hash())


def test_an_unknown_release_is_refused_by_name() -> None:
    with pytest.raises(LibraryMissing, match=r"1\.1\.4"):
        build.ensure_built("1.1.4")


# --- init


@functools.cache
def model_bytes() -> bytes:
    return (MODEL / "model.rkllm").read_bytes()


def patched(at: int, new: bytes) -> bytes:
    return model_bytes()[:at] + new + model_bytes()[at + len(new) :]


@pytest.mark.parametrize(
    ("param", "env", "line"),
    [
        pytest.param(
            {"extend_n_batch": 0},
            {},
            "E rkllm: The n_batch must be between 1 and 100, but got 0",
            id="n_batch 0",
        ),
        pytest.param(
            {"extend_n_batch": 101},
            {},
            "E rkllm: The n_batch must be between 1 and 100, but got 101",
            id="n_batch 101",
        ),
        pytest.param(
            {"extend_base_domain_id": 16},
            {},
            "E rkllm: The base_domain_id must be between 0 and 15, but got 16",
            id="domain 16",
        ),
        pytest.param(
            {"extend_base_domain_id": -1}, {}, "between 0 and 15, but got -1", id="domain -1"
        ),
        pytest.param(
            {"extend_enabled_cpus_num": 3},
            {},
            "E rkllm: enabled_cpus_num[3] does not match enabled_cpus_mask[0xf0]",
            id="three of four cores",
        ),
        pytest.param(
            {"extend_enabled_cpus_num": 0, "extend_enabled_cpus_mask": 0},
            {},
            "enabled_cpus_num[0] does not match enabled_cpus_mask[0x0]",
            id="no cores",
        ),
        pytest.param(
            {"extend_enabled_cpus_num": 2, "extend_enabled_cpus_mask": 0xC0},
            {},
            "E rkllm: The number of enabled CPUs must be greater than or equal to the number of "
            "NPU cores.",
            id="two CPUs for three NPU cores",
        ),
        pytest.param({}, {"RKSIM_BATCH_GAIN": "huge"}, "but got 'huge'", id="batch gain"),
        pytest.param(
            {"max_context_len": 4097},
            {},
            "E rkllm: max_context[4097] must be less than the model's max_context_limit[4096]",
            id="context beyond the model",
        ),
        pytest.param({"max_context_len": 0}, {}, "max_context[0]", id="no context"),
        pytest.param({"model": "/none.rkllm"}, {}, "failed to load model '/none", id="no file"),
        pytest.param({}, {"RKSIM_PROFILE": "rk9"}, "unknown profile 'rk9'", id="profile"),
        pytest.param({}, {"RKSIM_TIME_SCALE": "fast"}, "RKSIM_TIME_SCALE must", id="time scale"),
        pytest.param({}, {"RKSIM_LOAD_MS": "-3"}, "RKSIM_LOAD_MS must", id="load time"),
        pytest.param(
            {},
            {"RKSIM_MEMORY_MB": "4097"},
            "E RKNN: failed to malloc npu memory, size: 4296015872, flags: 0x2",
            id="memory",
        ),
    ],
)
def test_init_refuses_with_the_vendors_line(
    param: dict[str, Any],
    env: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for release in BOTH:
        sim = Sim(release, **param)
        assert (sim.code, sim.handle) == (-1, sim.ffi.NULL)
        printed = capfd.readouterr().err
        assert line in printed
        assert "E rkllm: rkllm_init failed" in printed


@pytest.mark.parametrize(
    ("profile", "cpus"),
    [("rk3576-qwen2-0.5b-w8a8", 2), ("rk3562-qwen2-0.5b-w8a8", 1)],
)
def test_as_many_cpus_as_the_board_has_npu_cores_suffice(
    profile: str, cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_PROFILE", profile)
    sim = Sim("1.3.0", extend_enabled_cpus_num=cpus, extend_enabled_cpus_mask=(1 << cpus) - 1)
    assert sim.code == 0
    assert sim.destroy() == 0


@pytest.mark.parametrize(
    ("content", "line"),
    [
        pytest.param(b"GGUF" + bytes(400), "invalid rknn llm model magic", id="another format"),
        pytest.param(b"RKSI", "invalid rknn llm model magic", id="four bytes"),
        pytest.param(b"RKSIMLLM", "unknown format", id="magic alone"),
        pytest.param(patched(8, b"\x09"), "unknown format", id="future format"),
        pytest.param(model_bytes()[:-1], "damaged file", id="one byte short"),
        pytest.param(patched(208, b"\xff" * 4), "damaged file", id="more pieces than bytes"),
        pytest.param(patched(232, b"\xff" * 4), "damaged file", id="marker out of range"),
        pytest.param(patched(252, b"\xff" * 4), "damaged file", id="piece outside"),
        pytest.param(patched(80, b"RK3576"), "target_platform does not match", id="platform"),
    ],
)
def test_init_survives_every_broken_model_file(
    content: bytes, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.rkllm"
    file.write_bytes(content)
    assert Sim("1.3.0", model=file).code == -1
    assert line in capfd.readouterr().err


def test_init_prints_the_lines_that_operators_know(
    release: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKLLM_LOG_LEVEL", "2")
    sim = Sim(release)
    sim.run(chat("Count to 3"), keep_history=1)
    assert sim.destroy() == 0
    printed = capfd.readouterr().err
    wanted = [
        f"I rkllm: rkllm-runtime version: {release}, rknpu driver version: 0.9.8, platform: RK3588",
        f"I rkllm: loading rkllm model from {MODEL / 'model.rkllm'}",
        "I rkllm: rkllm-toolkit version: 1.2.3, max_context_limit: 4096, npu_core_num: 3, "
        "target_platform: any, model_dtype: W8A8",
        "I rkllm: Enabled cpus: [4, 5, 6, 7]",
        "I rkllm: Enabled cpus num: 4",
        "I rkllm: Top-K: 1",
        "I rkllm: current kv cache size: 0",
        "I rkllm:  Prefill ",
        "I rkllm: In this conversation: the newly added user cache size is",
    ]
    places = [printed.index(line) for line in wanted]
    assert printed.index("I rkllm:  Generate") > printed.index("I rkllm:  Prefill")
    assert places[:6] == sorted(places[:6])


def test_one_domain_holds_four_gigabytes(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setenv("RKSIM_MEMORY_MB", "1690")
    first, second = Sim(release), Sim(release)
    third, elsewhere = Sim(release), Sim(release, extend_base_domain_id=1)
    assert [s.code for s in (first, second, third, elsewhere)] == [0, 0, -1, 0]
    assert first.destroy() == 0
    again = Sim(release)
    assert again.code == 0
    for sim in (second, elsewhere, again):
        assert sim.destroy() == 0


def test_a_null_image_tag_crashes_1_2_under_strict() -> None:
    code, _ = child("Sim('1.2.3', img_start=None)", {"RKSIM_STRICT": "1"})
    assert code == -signal.SIGSEGV
    code, printed = child("assert Sim('1.2.3', img_start=None).code == 0")
    assert code == 0, printed


# --- callbacks


def test_callbacks_come_in_the_callers_thread_and_finish_comes_once(sim: Sim) -> None:
    threads = set()

    def note(_event: Event, _result: Any) -> int:
        threads.add(threading.get_ident())
        return 0

    run = sim.run(chat("Count to 5"), note)
    assert run.code == 0
    assert threads == {threading.get_ident()}
    assert [event.state for event in run.events].count(FINISH) == 1
    assert run.events[-1].state == FINISH
    assert run.reply == "1, 2, 3, 4, 5.<|im_end|>"


@pytest.mark.parametrize("counted", [False, True])
def test_only_finish_carries_figures(
    release: str, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_COUNT_FIRST_TOKEN", str(int(counted)))
    sim = Sim(release)
    prompt = chat("Count to 5")
    run = sim.run(prompt)
    assert {event.perf for event in run.tokens} == {(0, 0, 0, 0, 0)}
    _, prefilled, _, generated, memory = run.finish.perf
    # The first token comes with the prefill; real boards do not count it.
    assert (prefilled, generated) == (len(prompt), len(run.tokens) - (not counted))
    assert memory == pytest.approx(1689.21)
    assert sim.destroy() == 0


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("release", EVERY)
def test_the_last_token_joins_the_context_only_where_it_is_switched_so(
    release: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_LAST_TOKEN_IN_KV", str(int(kept)))
    prompt = chat("Write 40 tokens")
    sim = Sim(release, max_new_tokens=3)
    limited = sim.run(prompt, keep_history=1)
    assert (len(limited.tokens), sim.kv) == (3, len(prompt) + 2 + kept)
    assert sim.destroy() == 0
    sim = Sim(release)
    aborted = sim.run(prompt, Aborted(sim, 3), keep_history=1)
    assert sim.kv == len(prompt) + len(aborted.tokens) - 1 + kept
    assert sim.clear() == 0
    ended = sim.run(chat("Count to 2"), keep_history=1)
    assert sim.kv == len(chat("Count to 2")) + len(ended.tokens) - 1, "an EOS never does"
    assert sim.destroy() == 0


@pytest.mark.parametrize(
    ("skip", "last"), [(True, b""), (False, b"<|im_end|>")], ids=["skipped", "shown"]
)
def test_eos_is_a_normal_with_or_without_its_text(release: str, skip: bool, last: bytes) -> None:
    sim = Sim(release, skip_special_token=skip)
    event = sim.run(chat("Count to 2")).tokens[-1]
    assert (event.state, event.token_id, event.text) == (NORMAL, ids_of("<|im_end|>")[0], last)
    assert sim.destroy() == 0


def test_a_token_that_ends_inside_a_character_waits(sim: Sim) -> None:
    run = sim.run(chat("Greet me in many languages"))
    states = [event.state for event in run.tokens]
    assert states.count(WAITING) > 10
    assert all(event.text is None for event in run.tokens if event.state == WAITING)
    for event in run.tokens:  # every piece is text by itself
        (event.text or b"").decode()
    assert {"你好", "🌍", "é"} <= {part for part in ("你好", "🌍", "é") if part in run.reply}
    assert run.reply == tokenizer().decode(run.ids, skip_special_tokens=False)


def test_some_tokens_have_no_text_at_all(sim: Sim) -> None:
    silent = [
        event
        for turn in range(30)
        for event in sim.run(chat(f"Tell me about number {turn}")).tokens
        if event.state == NORMAL and event.text is None
    ]
    assert {event.token_id for event in silent} == set(ids_of("<|pad|>"))


def test_a_token_without_text_may_come_with_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSIM_NO_NULL_TEXT", "1")
    sim = Sim("1.3.0")
    found = [
        event.text
        for turn in range(30)
        for event in sim.run(chat(f"Tell me about number {turn}")).tokens
        if event.state == NORMAL and event.token_id in ids_of("<|pad|>")
    ]
    assert set(found) == {b""}
    assert sim.destroy() == 0


# --- results die with the callback


def test_a_result_is_poisoned_when_its_callback_returns(sim: Sim) -> None:
    kept: list[Any] = []

    def keep(event: Event, result: Any) -> int:
        if event.text:
            kept[:] = [result.text]
        return 0

    sim.run(chat("Repeat after me: something long enough"), keep)
    assert bytes(sim.ffi.buffer(kept[0], 4)) == b"\xdd" * 4
    assert sim.last.token_id == int.from_bytes(b"\xdd" * 4, "little", signed=True)


def test_return_2_frees_at_once_on_1_3_and_is_misuse_before(
    sim: Sim, capfd: pytest.CaptureFixture[str]
) -> None:
    run = sim.run(chat("Count to 3"), lambda event, _: 2 if event.state == NORMAL else 0)
    assert run.reply.startswith("1, 2, 3.")
    found = violations(capfd)
    assert set(found) == (set() if sim.release == "1.3.0" else {"return_2_before_1_3"})


# --- the KV cache


def test_a_token_enters_the_cache_after_its_callback(sim: Sim) -> None:
    prompt = chat("Count to 6")
    run = sim.run(prompt)
    assert [event.kv for event in run.tokens] == [len(prompt) + at for at in range(len(run.tokens))]
    assert sim.kv == 0


def test_a_conversation_adds_prefill_and_reply_but_not_eos(sim: Sim) -> None:
    prompt = chat("Count to 6")
    first = sim.run(prompt, keep_history=1)
    assert sim.kv == len(prompt) + len(first.tokens) - 1
    more = ids_of("<|im_end|>\n<|im_start|>user\nWhat did I say first?<|im_end|>\n")
    more += ids_of("<|im_start|>assistant\n")
    second = sim.run(more, keep_history=1)
    assert second.reply == 'You said first: "Count to 6"<|im_end|>'
    assert second.finish.perf[1] == len(more)
    assert sim.kv == len(prompt) + len(first.tokens) - 1 + len(more) + len(second.tokens) - 1


def test_a_single_turn_hears_nothing_of_the_conversation_before(sim: Sim) -> None:
    alone = sim.run(chat("Why?")).ids
    sim.run(chat("Count to 6"), keep_history=1)
    assert sim.run(chat("Why?")).ids == alone
    assert sim.kv == 0


def test_clearing_can_keep_the_system_turn(sim: Sim) -> None:
    system = ids_of("<|im_start|>system\nYou are Ada.<|im_end|>\n")
    sim.run(chat("Hi", system="You are Ada."), keep_history=1)
    assert sim.clear(keep_system=True) == 0
    assert sim.kv == len(system)
    assert sim.clear() == 0
    assert sim.kv == 0


@pytest.mark.parametrize("history", [0, 1])
def test_a_prompt_beyond_the_context_fails_and_costs_nothing(release: str, history: int) -> None:
    sim = Sim(release, max_context_len=64)
    sim.run(ids_of("Count to 5\n"), keep_history=1)
    held = sim.kv
    run = sim.run([ids_of("word")[0]] * 65, keep_history=history)
    assert (run.code, run.events) == (-1, [])
    assert sim.kv == held
    assert sim.run([ids_of("word")[0]] * 64).code == 0
    assert sim.destroy() == 0


@pytest.mark.parametrize(
    ("history", "n_keep", "switch"),
    [
        pytest.param(0, 8, "0", id="a single turn"),
        pytest.param(0, 8, "1", id="a single turn that ends"),
        pytest.param(0, -1, "0", id="a single turn without n_keep"),
        pytest.param(1, -1, "0", id="a conversation without n_keep"),
        pytest.param(1, 8, "1", id="a conversation"),
    ],
)
def test_a_full_context_ends_or_shifts(
    release: str, history: int, n_keep: int, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_NO_SHIFT", switch)
    shifts = n_keep >= 0 and (history == 1 or switch == "0")
    sim = Sim(release, max_context_len=64, n_keep=n_keep, max_new_tokens=200)
    prompt = ids_of("Write 500 tokens\n")
    run = sim.run(prompt, keep_history=history)
    assert run.code == 0
    assert run.events[-1].state == FINISH
    assert max(event.kv for event in run.tokens) == 64
    room = 64 - len(prompt) + 1
    assert len(run.tokens) > room if shifts else len(run.tokens) == room
    assert sim.destroy() == 0


@pytest.mark.parametrize("reuses", [True, False])
@pytest.mark.parametrize("release", EVERY)
def test_a_single_turn_may_leave_its_context_to_the_next_one_that_begins_like_it(
    release: str, reuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_PREFIX_REUSE", str(int(reuses)))
    sim = Sim(release)
    prompt, other = chat("Count to 5"), chat("Count to 6")
    shared = common_prefix(prompt, other)
    first = sim.run(prompt)
    assert (sim.kv, first.finish.perf[1]) == (0, len(prompt))
    again, edited = sim.run(prompt), sim.run(other)
    assert again.ids == first.ids
    assert edited.reply.startswith("1, 2, 3, 4, 5, 6.")
    assert again.finish.perf[1] == (0 if reuses else len(prompt))
    assert edited.finish.perf[1] == len(other) - (shared if reuses else 0)
    turn = [*other, *edited.ids, *ids_of("\n<|im_start|>user\nCount to 2<|im_end|>\n")]
    assert sim.run(turn).finish.perf[1] <= (len(turn) - len(other) if reuses else len(turn))
    assert sim.clear() == 0
    assert sim.run(turn).finish.perf[1] == len(turn), "cleared"
    talk = sim.run(turn, keep_history=1)
    assert talk.finish.perf[1] == len(turn), "a conversation begins from nothing"
    assert sim.run(turn).finish.perf[1] == len(turn), "nor is one reused by a single turn"
    assert sim.destroy() == 0


@pytest.mark.parametrize("release", EVERY)
def test_what_a_single_turn_leaves_to_the_next_is_the_releases_default(release: str) -> None:
    sim = Sim(release)
    prompt = chat("Count to 5")
    sim.run(prompt)
    assert (sim.run(prompt).finish.perf[1] == 0) is RELEASES[release].quirks.get(
        "prefix_reuse_in_ram", False
    )
    assert sim.destroy() == 0
