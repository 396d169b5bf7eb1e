"""What of the Coordinator's replica needs no Ray: taking the ledger over from a predecessor."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from rkserve.config.serve_config import CoordinatorConfig
from rkserve.coordinator.state.ledger import Ledger
from rkserve.core.errors import LedgerFailed
from rkserve.deployments import coordinator

pytestmark = pytest.mark.virtual_time


async def test_a_successor_waits_until_its_predecessor_lets_go_of_the_ledger(
    tmp_path: Path,
) -> None:
    predecessor = Ledger.open(tmp_path)
    opening = asyncio.create_task(
        coordinator.open_ledger(tmp_path, CoordinatorConfig(), claim_s=20.0)
    )
    await asyncio.sleep(0.3)
    assert not opening.done()
    predecessor.close()
    with closing(await opening) as ledger:
        assert ledger.desired().epoch == 0


async def test_a_second_application_on_the_same_folder_fails_with_a_sentence(
    tmp_path: Path,
) -> None:
    refused = pytest.raises(LedgerFailed, match=r"needs a coordinator\.data_dir of its own")
    with closing(Ledger.open(tmp_path)), refused:
        await coordinator.open_ledger(tmp_path, CoordinatorConfig(), claim_s=0.3)
