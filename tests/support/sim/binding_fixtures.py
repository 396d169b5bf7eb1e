"""The scripted C library as fixtures; a pytest plugin.

On the way out the library itself is asked whether anything was done to it that nobody may do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.native.binding.preconditions import HandleState
from rkserve.native.binding.runtime import Binding, open_runtime
from rkserve.native.runtime import LoadParams
from tests.support.sim import rkllm_fake
from tests.support.sim.binding_driver import Open
from tests.support.sim.releases import BOTH
from tests.support.sim.rkllm_fake import Fake


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fakes")
    flags = {"1.2.3": [], "1.3.0": ["-DFAKE_ABI_13"]}
    return {
        release: rkllm_fake.build(
            folder / f"fake-{release}.so", rkllm_fake.version(release), *flags[release]
        )
        for release in BOTH
    }


@pytest.fixture(params=BOTH)
def fake_release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fake(fakes: dict[str, Path], fake_release: str) -> Iterator[Fake]:
    fake = Fake(fakes[fake_release])
    yield fake
    seen = fake.seen
    assert seen.timeouts == 0, "the library waited for something that never came"
    assert seen.overlaps == 0, "two calls were inside the library at once"
    assert seen.idle_aborts == 0, "an abort hit an idle handle"
    assert seen.destroyed_running == 0, "the handle was destroyed under a run"
    assert seen.wrong_replies == 0, "the callback said what the release does not know"


@pytest.fixture
def load(tmp_path: Path) -> LoadParams:
    model = tmp_path / "model.rkllm"
    model.write_bytes(b"weights")
    return LoadParams(str(model), max_context_len=2048, max_new_tokens=256)


@pytest.fixture
def handle(fake: Fake, load: LoadParams) -> Iterator[Binding]:
    binding = open_runtime(fake.path)
    binding.load(load)
    yield binding
    if binding.state in (HandleState.IDLE, HandleState.PAUSED):
        fake.script.other_return = 0
        binding.destroy()


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
