"""Prompt caches that are no good to the simulated runtime: damaged, foreign, or at a bad time."""

from __future__ import annotations

import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rkserve.native.sim import models
from tests.support.sim.sim_driver import Aborted, chat, child, violations
from tests.support.sim.sim_features import CACHE_FIELDS, CACHE_HEADER, FeatureSim, held, opened

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("files_only")


@pytest.fixture
def sim(release: str, files_only: None) -> Iterator[FeatureSim]:
    sim = opened(release)
    yield sim
    assert sim.destroy() == 0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache.bin"


# --- files that are no good


def rewritten(content: bytes, **fields: object) -> bytes:
    """A file with other header fields and the CRC that belongs to them."""
    values = dict(zip(CACHE_FIELDS, CACHE_HEADER.unpack_from(content), strict=True)) | fields
    tail = content[CACHE_HEADER.size :]
    end = 20 * int(str(values["n"]))
    rest = CACHE_HEADER.pack(*values.values())[16:] + tail[:end]
    return CACHE_HEADER.pack(*(values | {"crc": zlib.crc32(rest)}).values()) + tail


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        pytest.param(lambda _: b"", "not a prompt cache", id="empty"),
        pytest.param(lambda c: c[:50], "not a prompt cache", id="less than a header"),
        pytest.param(lambda c: b"GGUF" + c[4:], "not a prompt cache", id="foreign magic"),
        pytest.param(lambda c: rewritten(c, format=3), "unknown format", id="format"),
        pytest.param(lambda c: c[:-1], "damaged file", id="cut short"),
        pytest.param(lambda c: c[:2000], "damaged file", id="written by half"),
        pytest.param(lambda c: flipped(c, CACHE_HEADER.size + 500), "damaged file", id="an id"),
        pytest.param(lambda c: rewritten(c, n=1 << 31), "damaged file", id="too many tokens"),
        pytest.param(
            lambda c: rewritten(c, model=b"sim-other"), "it was made with another model", id="model"
        ),
    ],
)
def test_a_file_that_is_no_good_is_refused(
    sim: FeatureSim,
    cache: Path,
    capfd: pytest.CaptureFixture[str],
    *,
    spoil: Callable[[bytes], bytes],
    why: str,
) -> None:
    prompt = chat("Count to 5")
    sim.run(prompt, save=cache)
    cache.write_bytes(spoil(cache.read_bytes()))
    assert sim.load_cache(cache) == -1
    assert f"E rkllm: failed to load prompt cache '{cache}': {why}\n" in capfd.readouterr().err
    assert sim.run(prompt).finish.perf[1] == len(prompt)


def test_an_id_that_the_model_has_not_is_refused(sim: FeatureSim, cache: Path) -> None:
    sim.run(chat("Count to 5"), save=cache)
    content = bytearray(cache.read_bytes())
    n = len(held(cache))
    struct.pack_into("<i", content, CACHE_HEADER.size + 16 * n, 1 << 30)
    cache.write_bytes(rewritten(bytes(content)))
    assert sim.load_cache(cache) == -1


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_what_is_no_file_is_refused(sim: FeatureSim, tmp_path: Path, path: str) -> None:
    assert sim.load_cache(tmp_path / path) == -1
    assert sim.lib.rkllm_load_prompt_cache(sim.handle, sim.ffi.NULL) == -1


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda c: rewritten(c, model=b"sim-other"), id="of another model"),
        pytest.param(lambda c: flipped(c, CACHE_HEADER.size + 9), id="damaged"),
    ],
)
def test_a_runtime_may_accept_such_a_file_and_answer_wrongly(
    release: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    spoil: Callable[[bytes], bytes],
) -> None:
    monkeypatch.setenv("RKSIM_FOREIGN_CACHE", "1")
    sim = opened(release)
    prompt = chat("Count to 5")
    sim.run(prompt, save=cache)
    cache.write_bytes(spoil(cache.read_bytes()))
    assert sim.load_cache(cache) == 0
    run = sim.run(prompt)
    assert run.code == 0
    assert run.finish.perf[1] < len(prompt)
    assert run.reply != "1, 2, 3, 4, 5."
    assert violations(capfd) == ["kv_of_another_model"]
    assert sim.release_cache() == 0
    assert sim.run(prompt).reply == "1, 2, 3, 4, 5."
    assert sim.destroy() == 0


def test_a_cache_of_another_adapter_is_a_violation_and_visibly_wrong(
    sim: FeatureSim, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sim.load_lora(models.write_adapter(tmp_path / "a", "Pirate"), "p") == 0
    prompt = chat("Count to 5")
    sim.run(prompt, lora="p", save=cache)
    assert sim.load_cache(cache) == 0
    assert sim.run(prompt, lora="p").reply == "1, 2, 3, 4, 5."
    assert violations(capfd) == []
    assert sim.run(prompt).reply != "1, 2, 3, 4, 5."
    assert violations(capfd) == ["kv_of_another_adapter"]


# --- when it may be loaded


@pytest.mark.parametrize("call", ["load", "release"])
def test_while_running_or_paused_the_cache_is_left_alone(
    sim: FeatureSim, cache: Path, call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sim.run(chat("Count to 9"), save=cache)
    codes = []

    def ask() -> int:
        return sim.load_cache(cache) if call == "load" else sim.release_cache()

    def meddle(*_: object) -> int:
        codes.append(ask())
        return int(len(sim.now.tokens) == 2)

    sim.run(chat("Count to 9"), meddle)
    codes.append(ask())
    assert codes == [-1, -1, -1]
    assert violations(capfd) == ["cache_while_running", "cache_while_running", "cache_while_paused"]


def test_loading_after_an_abort_is_counted(
    sim: FeatureSim, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sim.run(chat("Write 500 tokens"), Aborted(sim, 1), save=cache)
    assert sim.load_cache(cache) == 0
    assert violations(capfd) == ["prompt_cache_after_abort"]


AFTER_ABORT = """
from tests.support.sim.sim_features import CACHE_FIELDS, CACHE_HEADER, FeatureSim, held, opened
sim = FeatureSim({release!r})
sim.run(chat("Write 500 tokens"), Aborted(sim, 1), save={path!r})
print("code", sim.load_cache({path!r}))
"""


@pytest.mark.parametrize(
    ("env", "died", "said"),
    [
        pytest.param(
            {"RKSIM_STRICT": "1"}, signal.SIGABRT, "prompt_cache_after_abort", id="strict"
        ),
        pytest.param({"RKSIM_CACHE_AFTER_ABORT": "crash"}, signal.SIGSEGV, "", id="crash"),
        pytest.param({"RKSIM_CACHE_AFTER_ABORT": "ok", "RKSIM_STRICT": "1"}, 0, "code 0", id="ok"),
    ],
)
def test_what_loading_after_an_abort_does_can_be_chosen(
    release: str, cache: Path, *, env: dict[str, str], died: int, said: str
) -> None:
    code, printed = child(AFTER_ABORT.format(release=release, path=str(cache)), env)
    assert code == -died
    assert said in printed


def test_a_wrong_choice_fails_the_init(
    release: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RKSIM_CACHE_AFTER_ABORT", "maybe")
    assert FeatureSim(release).code == -1
    assert "RKSIM_CACHE_AFTER_ABORT must be crash or ok, but got 'maybe'" in capfd.readouterr().err
