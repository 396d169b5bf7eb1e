"""From a group's settings to a board: what is refused before anything is started."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rkserve.config.board_group import BoardGroupConfig, SimulatedConfig
from rkserve.config.serve_config import default_state_dir
from rkserve.core.desired_state import BaseVersion, Desired
from rkserve.core.errors import AdapterBroken, ConfigError, LoadFailed
from rkserve.core.files import UnsafeFolder, write_private
from rkserve.core.messages import GenerateRequest
from rkserve.deployments.board_factory import (
    BoardLocation,
    assemble,
    claim_slot,
    quirks_of,
    vision_params,
)
from rkserve.models.adapters import adapters
from rkserve.models.folder import open_model_folder
from rkserve.native.engine_frames import NpuLock
from rkserve.native.quirks import QUIRKS_FORMAT
from rkserve.native.sim.build import ensure_built
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


def test_a_group_takes_the_quirks_that_a_probe_found_and_its_own_first(tmp_path: Path) -> None:
    file = tmp_path / "quirks.json"
    content = {
        "format": QUIRKS_FORMAT,
        "library_sha256": hashlib.sha256(ensure_built("1.3.0").read_bytes()).hexdigest(),
        "quirks": {"abort_in_callback": True, "run_async": False},
    }
    file.write_text(json.dumps(content))
    probed = group(MODEL, 1).model_copy(
        update={"quirks_file": file, "quirks": {"abort_in_callback": False}}
    )
    assert quirks_of(probed) == {
        "abort_in_callback": False,
        "run_async": False,
        "prompt_cache_portable": True,  # of simulated boards
    }
    other = probed.model_copy(update={"simulated": SimulatedConfig(release="1.2.3")})
    with pytest.raises(ConfigError, match="Run rkserve probe again"):
        assemble(other, place(tmp_path), "rk3588")


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


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
HOLDER = """
import sys
from collections.abc import Callable
from pathlib import Path
from rkserve.deployments.board_factory import claim_slot
print(claim_slot(Path(sys.argv[1]), "sim", 2).index, flush=True)
sys.stdin.read()
"""


def test_replicas_get_the_lowest_free_slot_and_give_it_back(tmp_path: Path) -> None:
    first, second = claim_slot(tmp_path, "sim", 3), claim_slot(tmp_path, "sim", 3)
    assert (first.index, second.index) == (0, 1)
    first.release()
    again = claim_slot(tmp_path, "sim", 3)
    assert again.index == 0
    again.release()
    second.release()


def test_groups_do_not_share_slots(tmp_path: Path) -> None:
    one, other = claim_slot(tmp_path, "one", 1), claim_slot(tmp_path, "other", 1)
    assert one.index == other.index == 0
    one.release()
    other.release()


def test_more_replicas_than_slots_are_told_which_folder_says_so(tmp_path: Path) -> None:
    held = claim_slot(tmp_path, "sim", 1)
    with pytest.raises(LoadFailed, match=f"all 1 slots of group sim .*{tmp_path}"):
        claim_slot(tmp_path, "sim", 1)
    held.release()


def test_a_killed_process_leaves_its_slot_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "0\n"
        held = claim_slot(tmp_path, "sim", 2)
        assert held.index == 1
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
    free = claim_slot(tmp_path, "sim", 2)
    assert free.index == 0
    free.release()
    held.release()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.touch()
    with pytest.raises(LoadFailed, match="a file/state cannot be used"):
        claim_slot(file / "state", "sim", 1)


def test_the_folder_is_made_where_it_is_missing(tmp_path: Path) -> None:
    slot = claim_slot(tmp_path / "not" / "yet", "sim", 1)
    assert os.listdir(tmp_path / "not" / "yet") == ["sim-0.slot"]  # noqa: PTH208 - names only
    slot.release()


def test_the_folder_and_its_files_are_for_this_account_only(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    claim_slot(tmp_path / "state", "sim", 1).release()
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "state" / "sim-0.slot").stat().st_mode) == 0o600


def linked(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def with_a_link(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "sim-0.slot").symlink_to(folder.parent / "precious")


def of_a_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def given_away(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)


def in_anothers_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder.parent, 12345, 12345)


def in_an_open_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.parent.chmod(0o777)


def with_anothers_file(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "sim-0.slot").write_text("1")
    os.chown(folder / "sim-0.slot", 12345, 12345)


def with_a_pipe(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "sim-0.slot")


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        pytest.param(linked, "is a symbolic link", id="a link to a folder"),
        pytest.param(with_a_link, "is a symbolic link", id="a link to a file"),
        pytest.param(of_a_group, "other accounts may write", id="a folder of a group"),
        pytest.param(in_an_open_folder, "every account may rename", id="in an open folder"),
        pytest.param(with_a_pipe, "is no regular file", id="a pipe that nothing writes to"),
        pytest.param(given_away, "belongs to user 12345", id="another's", marks=as_root),
        pytest.param(in_anothers_folder, "belongs to user 12345", id="in another's", marks=as_root),
        pytest.param(
            with_anothers_file, "belongs to user 12345", id="another's file", marks=as_root
        ),
    ],
)
def test_a_folder_that_others_prepared_is_refused_and_nothing_of_it_changed(
    prepare: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "place").mkdir()
    precious = tmp_path / "place" / "precious"
    precious.write_text("not to be truncated")
    state = tmp_path / "place" / "state"
    prepare(state)
    with pytest.raises(LoadFailed, match=sentence):
        claim_slot(state, "sim", 1)
    with pytest.raises(LoadFailed, match=sentence):
        NpuLock(state / "sim-0.slot").take(0.0)
    assert precious.read_text() == "not to be truncated"


def test_the_default_folder_is_outside_of_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_state_dir() == Path("~/.local/state/rkserve")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "rkserve"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert default_state_dir() == Path("~/.local/state/rkserve")


def test_a_file_that_is_written_follows_no_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("another's")
    (tmp_path / "link").symlink_to(elsewhere)
    with pytest.raises(UnsafeFolder, match="symbolic link"):
        write_private(tmp_path / "link", "mine")
    assert elsewhere.read_text() == "another's"
    write_private(tmp_path / "new", "longer")
    write_private(tmp_path / "new", "mine")
    assert (tmp_path / "new").read_text() == "mine"
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
