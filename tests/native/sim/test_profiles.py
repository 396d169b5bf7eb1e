"""Board profiles: the published figures, and the simulated clock that keeps them."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from rkserve.native.sim import profiles
from tests.support.paths import PROJECT
from tests.support.sim.sim_driver import Event, Sim, chat

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")

# A run of 0.4 s on a machine that does other things: at its best it is not this late.
BUSY_MS = 1000.0

# --- the clock


def profile_of(name: str) -> profiles.Profile:
    return {profile.name: profile for profile in profiles.load()}[name]


@pytest.mark.parametrize("row", profiles.derive()[: -len(profiles.FITTED)], ids=lambda p: p.name)
def test_a_published_profile_reproduces_its_figures(row: profiles.Profile) -> None:
    published = {
        f"{r['platform']}-{r['model']}-{r['size'].split('(')[0]}-{r['dtype']}".lower(): r
        for r in profiles.read_benchmarks()
    }[row.name]
    built = profile_of(row.name)
    assert built.prefill_ms(128) == pytest.approx(float(published["ttft_ms"]), rel=0.01)
    rate = float(published["decode_tokens_per_s"])
    assert built.tokens_per_s(128, 64) == pytest.approx(rate, rel=0.01)
    assert min(built.a, built.b, built.d0) > 0


def test_the_committed_profiles_are_the_derived_ones() -> None:
    assert profiles.render(profiles.derive()) == profiles.PROFILES.read_text()
    names = [profile.name for profile in profiles.load()]
    assert len(names) == len(set(names))


def test_the_documentation_lists_every_profile() -> None:
    page = (PROJECT / "docs" / "reference" / "simulator.md").read_text()
    assert [p.name for p in profiles.load() if f"`{p.name}`" not in page] == []


def test_the_library_keeps_the_clock_of_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSIM_TIME_SCALE", "1")
    monkeypatch.setenv("RKSIM_PROFILE", "rk3588-qwen2-0.5b-w8a8")
    monkeypatch.setenv("RKSIM_PREFIX_REUSE", "0")  # each run prefills all of it
    profile = profile_of("rk3588-qwen2-0.5b-w8a8")
    sim = Sim("1.3.0", max_new_tokens=12)
    prompt = (chat("word " * 200))[-128:]
    late_ms: list[float] = []
    for _ in range(3):
        prefill_ms, _, generate_ms, tokens, memory = sim.run(prompt).finish.perf
        wanted_ms = sum(profile.decode_ms(128 + step) for step in range(1, tokens))
        # Never early; late by what a busy machine adds.
        assert prefill_ms >= profile.prefill_ms(128)
        assert generate_ms >= wanted_ms
        assert memory == pytest.approx(profile.memory_mb, rel=1e-5)
        late_ms.append(prefill_ms + generate_ms - profile.prefill_ms(128) - wanted_ms)
    assert min(late_ms) < BUSY_MS
    assert sim.destroy() == 0


def test_the_next_decode_starts_when_the_callback_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RKSIM_TIME_SCALE", "0.2")
    monkeypatch.setenv("RKSIM_PROFILE", "rk3588-qwen2.5-1.5b-w8a8")
    sim = Sim("1.3.0", max_new_tokens=4)
    prompt = chat("Write 9 tokens")
    decode_s = 0.2 * profile_of("rk3588-qwen2.5-1.5b-w8a8").decode_ms(len(prompt)) / 1e3
    stamps: list[tuple[float, float]] = []

    def slow(_event: Event, _result: Any) -> int:
        entered = time.monotonic()
        time.sleep(0.05)
        stamps.append((entered, time.monotonic()))
        return 0

    sim.run(prompt, slow)
    for before, after in itertools.pairwise(stamps[:4]):  # the fifth, FINISH, comes at once
        assert after[0] - before[1] >= decode_s
    assert sim.destroy() == 0
