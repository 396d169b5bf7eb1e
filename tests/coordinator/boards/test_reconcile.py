"""Operations that some boards had not followed are settled when they have, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from rkserve.control.calls import OperationKind
from rkserve.control.operations import OperationState, ResultStatus
from rkserve.core.errors import StageFailed
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import MODEL, controlled, serving

pytestmark = pytest.mark.virtual_time

K, S = OperationKind, OperationState


async def test_a_restart_settles_what_boards_followed_meanwhile_and_waits_for_the_others(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as it:
        await it.pause()
        it.cluster["b"].frozen = True
        outcome = await it.resume(timeout_s=0.2)
        assert outcome.operation.state is S.PARTIAL
        name = outcome.operation.id
        await it.again()
        await it.heard()
        assert it.it.operation(name).state is S.PARTIAL
        it.cluster["b"].frozen = False
        await eventually(lambda: it.it.operation(name).state is S.SUCCEEDED)
        assert it.it.operation(name).results["b"].status is ResultStatus.OK


async def test_what_boards_are_asked_for_once_stays_partial_over_a_restart(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["b"].refuses["clear_kv"] = StageFailed("b", "no")
        outcome = await it.call(K.CACHE_RESET)
        assert outcome.operation.state is S.PARTIAL
        await it.again()
        await it.heard()
        assert it.it.operation(outcome.operation.id).state is S.PARTIAL


@pytest.mark.promise("Adapters", "The memory of retired versions is freed, board by board")
async def test_a_retirement_is_settled_when_the_engine_has_given_the_memory_back(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        await it.roll("v2")
        await it.roll("v1")
        await it.heard()
        it.cluster["b"].refuses["renew"] = StageFailed("b", "it is busy")
        outcome = await it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone", version="v2")
        name = outcome.operation.id
        assert outcome.operation.state is S.PARTIAL
        assert outcome.operation.results["b"].status is ResultStatus.FAILED
        await it.heard()
        assert it.it.operation(name).state is S.PARTIAL
        [key] = [one for one in it.cluster["b"].loaded if one.startswith("tone@v2-")]
        it.cluster["b"].loaded.remove(key)
        await eventually(lambda: it.it.operation(name).state is S.SUCCEEDED)
        settled = it.it.operation(name).results["b"]
        assert (settled.status, settled.error, settled.message) == (ResultStatus.OK, "", "")
        assert settled.details == outcome.operation.results["b"].details != {}
