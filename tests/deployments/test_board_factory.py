"""From a group's settings to a board: what is refused before anything is started."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from rkserve.config.board_group import BoardGroupConfig, SimulatedConfig
from rkserve.core.desired_state import BaseVersion, Desired
from rkserve.core.errors import AdapterBroken, ConfigError
from rkserve.core.messages import GenerateRequest
from rkserve.deployments.board_factory import BoardLocation, assemble, vision_params
from rkserve.models.adapters import adapters
from rkserve.models.folder import open_model_folder
from tests.support.paths import PROJECT

MODEL = PROJECT / "models" / "sim-chat"


def group(model: Path, n_batch: int) -> BoardGroupConfig:
    return BoardGroupConfig(name="g", model=model, simulated=SimulatedConfig(), n_batch=n_batch)


def place(folder: Path) -> BoardLocation:
    return BoardLocation("b", "n", folder)


def test_a_group_that_serves_batches_needs_a_tokenizer(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.rkllm").write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"n_batch: group g .*bare has no tokenizer\.json"):
        assemble(group(bare, 2), place(tmp_path), "rk3588")
    assert assemble(group(bare, 1), place(tmp_path), "rk3588").settings.n_batch == 1


def test_a_group_whose_model_sees_has_an_encoder_and_no_batches() -> None:
    folder = open_model_folder(MODEL.parent / "sim-vision")
    real = group(folder.path, 1).model_copy(
        update={"simulated": None, "library": Path("/l.so"), "encoder_cores": 3}
    )
    found = vision_params(real, folder)
    assert found is not None
    assert (found.library, found.model) == (
        Path("/usr/lib/librknnrt.so"),
        folder.path / "vision.rknn",
    )
    assert (found.width, found.height, found.tokens, found.cores) == (392, 392, 196, 3)
    assert vision_params(real, open_model_folder(MODEL)) is None


def test_a_model_that_sees_is_served_without_batches(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"n_batch: group g .*sees images"):
        assemble(group(MODEL.parent / "sim-vision", 2), place(tmp_path), "rk3588")


async def test_the_memory_of_adapters_is_the_model_folders_to_limit(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    shutil.copy(MODEL / "model.rkllm", folder)
    (folder / "adapters/a/1").mkdir(parents=True)
    (folder / "rkserve.yaml").write_text("max_adapter_bytes: 5\n")
    (folder / "adapters/a/1/adapter.rkllm").write_bytes(b"123456")
    board = assemble(group(folder, 1), place(tmp_path), "rk3588")
    (found,) = adapters(folder)
    await board.start()
    await board.adopt(Desired())
    asked = GenerateRequest("r", "small", (), 4, prompt_text="Hi", adapter=found.ref())
    with pytest.raises(AdapterBroken, match=r"6 bytes.* 5 bytes"):
        async for _ in board.generate(asked):
            pass
    await board.stop()


def test_the_groups_limits_are_the_boards(tmp_path: Path) -> None:
    settings = group(MODEL, 1).model_copy(update={"max_paused": 3, "pause_timeout_s": 7.0})
    board = assemble(settings, place(tmp_path), "rk3588")
    assert (board.settings.max_paused, board.settings.pause_timeout_s) == (3, 7.0)


def test_weights_that_are_sent_lie_beside_the_boards_other_state(tmp_path: Path) -> None:
    here = place(tmp_path)
    board = assemble(group(MODEL, 1), here, "rk3588")
    content = b"some weights" * 100
    base = BaseVersion(
        board.settings.model, "w1", hashlib.sha256(content).hexdigest(), len(content)
    )
    board.intake.begin(base)
    board.intake.chunk(base.digest, 0, content)
    board.intake.commit(base)
    folder = here.state_dir / "weights" / here.board_id
    assert (folder / f"{base.digest}.rkllm").read_bytes() == content
