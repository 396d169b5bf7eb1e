"""What the model names of requests mean, as the folders of this machine change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rkserve.api.common.version_policy import ResolvedModel
from rkserve.core.errors import AdapterBroken, ModelNotFound
from rkserve.router import served_models as rules
from rkserve.router.served_models import ModelNames
from tests.support.boards.own_time import run_loop

pytestmark = pytest.mark.virtual_time


def add_adapter(model: Path, name: str, version: str, content: bytes = b"LoRA") -> Path:
    """Put an adapter into a model folder."""
    folder = model / "adapters" / name / version
    folder.mkdir(parents=True)
    (folder / "adapter.rkllm").write_bytes(content)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    return folder


async def _a_while() -> None:
    await asyncio.sleep(rules.LOOK_AGAIN_S * 1.1)


async def test_a_model_is_itself_and_costs_no_look(model: Path) -> None:
    found = ModelNames({"tiny": model, "gone": model / "nowhere"})
    assert await found.resolve("gone") == ResolvedModel("gone")
    assert await found.resolve("tiny") == ResolvedModel("tiny")


async def test_an_adapter_that_is_copied_there_is_found_by_its_first_request(model: Path) -> None:
    found = ModelNames({"tiny": model})
    with pytest.raises(ModelNotFound):
        await found.resolve("kind")
    add_adapter(model, "kind", "v9")
    await _a_while()
    first = await found.resolve("tiny:kind")
    assert first.adapter is not None
    assert (first.model, first.adapter.version) == ("tiny", "v9")
    add_adapter(model, "kind", "v10", b"another")
    await _a_while()
    newest = (await found.resolve("kind")).adapter
    assert newest is not None
    assert newest.version == "v10"
    assert (await found.resolve("kind@v9")).adapter == first.adapter
    (versions,) = await found.adapters("tiny")
    assert [one.version for one in versions] == ["v9", "v10"]


async def test_names_that_nobody_knows_cost_one_look_a_second(model: Path) -> None:
    found = ModelNames({"tiny": model})
    with pytest.raises(ModelNotFound):
        await found.resolve("kind")
    add_adapter(model, "kind", "v1")
    for _ in range(20):
        with pytest.raises(ModelNotFound):  # not looked for again within the second
            await found.resolve("kind")
    await _a_while()
    assert (await found.resolve("kind")).adapter is not None


async def test_a_broken_adapter_is_refused_by_its_name(model: Path) -> None:
    folder = add_adapter(model, "kind", "v1")
    (folder / "manifest.json").write_text('{"size": 999}')
    with pytest.raises(AdapterBroken, match=r"kind@v1.*size 999"):
        await ModelNames({"tiny": model}).resolve("kind")


def test_a_folder_that_cannot_be_listed_leaves_what_was_known(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        add_adapter(model, "kind", "v1")
        found = ModelNames({"tiny": model})
        known = await found.resolve("kind")
        (model / "adapters").rename(model / "away")
        (model / "adapters").write_text("no folder")
        await _a_while()
        assert await found.resolve("kind") == known

    run_loop(main())
    assert "stay as they were" in caplog.text
