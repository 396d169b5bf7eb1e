"""Which board of a node a replica is: file locks that die with their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rkserve.board.slots import claim_slot
from rkserve.errors import LoadFailed

HOLDER = """
import sys
from pathlib import Path
from rkserve.board.slots import claim_slot
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
