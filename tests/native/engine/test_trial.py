"""An unlisted release is tried in a process that may be lost, and named as what it is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import ReleaseRefused
from rkserve.native.engine.process import _open_library
from rkserve.native.engine.trial import try_release
from rkserve.native.runtime import LoadParams
from rkserve.native.sim.build import RELEASES, ensure_built
from tests.support.sim.sim_driver import FAST, MODEL

pytestmark = pytest.mark.slow

NEWEST = tuple(RELEASES)[-1]
NAME = f"1.9.0 (unlisted, driven as {NEWEST})"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest simulated release with the version string of a release to come."""
    file = tmp_path_factory.mktemp("unlisted") / "librkllmrt.so"
    content = ensure_built(NEWEST).read_bytes()
    old, new = (b"RKLLM SDK (version: %s" % number for number in (NEWEST.encode(), b"1.9.0"))
    assert content.count(old) == 1
    file.write_bytes(content.replace(old, new))
    return file


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FAST.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RKSIM_CONTROL", str(tmp_path / "board.control"))
    return tmp_path / "board.control"


def params() -> dict[str, Any]:
    load = LoadParams(str(MODEL / "model.rkllm"), max_context_len=512, max_new_tokens=512)
    return asdict(load)


def command(library: Path, *, allowed: bool) -> dict[str, Any]:
    return {
        "library": str(library),
        "cpu": False,
        "params": params(),
        "quirks": {"abort_in_callback": True},
        "allow_unlisted": allowed,
        "trial_timeout_s": 60.0,
    }


def test_an_engine_drives_it_after_its_trial_and_names_it(library: Path) -> None:
    runtime = _open_library(command(library, allowed=True))
    assert runtime.release == NAME
    assert runtime.per_run_sampling
    assert runtime.quirks["abort_in_callback"]


def test_without_leave_an_engine_refuses_it_with_the_setting(library: Path) -> None:
    with pytest.raises(ReleaseRefused, match="allow_unlisted"):
        _open_library(command(library, allowed=False))


def test_a_listed_release_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSIM_INIT_CRASHES", "1")
    monkeypatch.setenv("RKSIM_PROFILE", "none")  # each init would end its process
    assert _open_library(command(ensure_built("1.3.0"), allowed=True)).release == "1.3.0"


@pytest.mark.parametrize(
    ("fault", "limit_s", "words"),
    [
        pytest.param("segv_at_token:2", 60, "crashed: SIGSEGV", id="it crashes"),
        pytest.param("init_signal:7", 60, "crashed: SIGBUS", id="it cannot load"),
        pytest.param("init_fail", 60, "rkllm_init returned -1", id="it refuses the model"),
        pytest.param("hang_in_prefill", 4, "nothing came within 4 s", id="it hangs"),
        pytest.param("error_at_token:2", 60, "failed after 1", id="its run fails"),
    ],
)
def test_what_fails_its_trial_is_refused_with_the_reason(
    fault: str,
    limit_s: float,
    words: str,
    library: Path,
    control: Path,
) -> None:
    control.write_text(f"fault={fault}\nsticky=1\n")
    with pytest.raises(ReleaseRefused, match=words) as refused:
        try_release(library, params(), NAME, limit_s)
    assert NAME in str(refused.value)
