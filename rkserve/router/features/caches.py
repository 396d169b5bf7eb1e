"""KV caches and named prompt caches over all boards: listing, clearing, building, deleting.

The failure of one board does not hide the answers of others.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import Any

from rkserve.api.admin.caches import (
    KvCachesAnswer,
    KvClearBody,
    KvScope,
    KvSizeQuery,
    built,
    caches_list,
    failures,
    ids_of,
    kv_list,
    parse_build,
)
from rkserve.api.admin.generations import EditCall
from rkserve.api.admin.query import ControlRequest, NoParameters
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.json.fields import JsonObject
from rkserve.core.desired_state import SYSTEM_PROMPT, Desired, DesiredCache
from rkserve.core.errors import (
    BoardNotFound,
    BoardSilent,
    CacheNotFound,
    CoordinatorAway,
    LedgerFailed,
    NoBoard,
    RequestError,
)
from rkserve.core.files import check_cache_name
from rkserve.fleet.board_table import BoardAddress
from rkserve.fleet.fleet import Answers, merged
from rkserve.router.features.generations import MULTI_STATUS, OK, Generations
from rkserve.router.off_loop import off_loop
from rkserve.router.service import Service

log = logging.getLogger(__name__)


class Caches:
    """The caches of all boards."""

    def __init__(self, service: Service, generations: Generations) -> None:
        self._service = service
        self._generations = generations

    # -- the KV cache -------------------------------------------------------------------------

    async def kv(self, asked: ControlRequest) -> KvCachesAnswer:
        """Return the contents of KV caches, optionally of one model or some boards."""
        addresses = await self._addresses(asked.read(KvSizeQuery).where)
        answers = await self._ask(addresses, "kv", timeout_s=self._service.config.report_timeout_s)
        return kv_list(list(answers.found.values()), answers.failed)

    async def clear(self, asked: ControlRequest) -> tuple[int, JsonObject]:
        """Clear KV caches of boards, or ranges of a paused generation's cache."""
        call = asked.read(KvClearBody)
        if call.generation is not None:
            edit = EditCall(choice=call.choice, clear=call.ranges or ())
            return await self._generations.apply(call.generation, edit)
        return await self._clear_boards(call)

    async def _clear_boards(self, call: KvClearBody) -> tuple[int, JsonObject]:
        addresses = self._some(await self._addresses(call.where), call.where.model)
        answers = await self._ask(addresses, "clear_kv", call.keep_system_prompt is not False)
        self._service.fleet.forget_prompts(lambda board, _: board in answers.found, files=False)
        answers.require_one()
        results = {
            board: {"status": report.status, "latency_ms": round(answers.took_ms[board], 3)}
            for board, report in sorted(answers.found.items())
        }
        listed = kv_list(list(answers.found.values()), answers.failed)
        return _status(answers), {**listed, "results": results}

    # -- prompt caches ------------------------------------------------------------------------

    async def build(self, model: str, asked: ControlRequest) -> tuple[int, JsonObject]:
        """Build a named prompt cache on every present board of a model."""
        call = await off_loop(len(asked.body), partial(parse_build, asked))
        meant = await self._service.models.resolve(model)
        served = self._service.models.by_name[meant.model]
        work = partial(ids_of, call, served.renderer, served.folder.settings.context_length)
        ids = await off_loop(len(asked.body), work)
        addresses = self._some(self._service.fleet.addresses(meant.model), meant.model)
        answers = await self._ask(addresses, "build_cache", call.cache_name, ids, meant.ref)
        for board, exc in answers.failed.items():
            if isinstance(exc, BoardSilent):
                # The link has cancelled the call, which removes it from the board's queue.
                reason = f"{exc.reason}, and the build was withdrawn; the board may be busy"
                answers.failed[board] = BoardSilent(board, reason)
        answers.require_one()
        desired = self._service.cluster.desired
        kept = await self._keep(_to_keep(call.cache_name, ids, meant, desired))
        made = built(call, model, len(ids), list(answers.found.values()), answers.failed)
        return _status(answers), {**made, "kept": kept}

    async def _keep(self, cache: DesiredCache) -> bool:
        """Have boards that join later build it, too; False if the Coordinator is away.

        Raises ``RequestError`` if the cache must not be kept; then no board holds it.
        """
        try:
            await self._service.cluster.keep_cache(cache)
        except RequestError:
            addresses = self._service.fleet.addresses(cache.model)
            if cache.name != SYSTEM_PROMPT:
                await self._ask(addresses, "delete_cache", cache.name)
            raise
        except (CoordinatorAway, LedgerFailed) as exc:
            log.warning("prompt cache %s: boards that join will not have it: %s", cache.name, exc)
            return False
        return True

    async def listed(self, model: str) -> JsonObject:
        """Return the prompt caches of a model, optionally of one adapter."""
        meant = await self._service.models.resolve(model)
        answers = await self._ask(
            self._service.fleet.addresses(meant.model),
            "caches",
            timeout_s=self._service.config.report_timeout_s,
        )
        entries = merged(answers.found.values())
        if meant.ref is not None:
            entries = [entry for entry in entries if entry.adapter == meant.ref.key]
        listed = caches_list(entries, answers.failed)
        return {**listed, "kept": await self._kept(meant)}

    async def _kept(self, meant: ResolvedModel) -> list[dict[str, object]] | None:
        """Return the caches that joining boards build; None while the Coordinator is away."""
        try:
            kept = await self._service.cluster.kept_caches(meant.model)
        except CoordinatorAway:
            return None
        name = meant.adapter_name
        return kept if name is None else [one for one in kept if one["adapter"] == name]

    async def delete(self, model: str, name: str, asked: ControlRequest) -> tuple[int, JsonObject]:
        """Delete a named prompt cache everywhere, and stop keeping it.

        Raises ``CacheNotFound``, or ``CoordinatorAway`` before anything is deleted: joining boards
        would build it again.
        """
        asked.read(NoParameters)
        check_cache_name(name)
        meant = await self._service.models.resolve(model)
        kept = await self._service.cluster.drop_cache(meant.model, name)
        answers = await self._ask(self._service.fleet.addresses(meant.model), "delete_cache", name)
        had = sorted(board for board, deleted in answers.found.items() if deleted)
        if not had and not kept:
            if answers.failed:
                raise min(answers.failed.items())[1]  # the cache may have existed there
            raise CacheNotFound(name, "cache_name")
        return _status(answers), {
            "cache_name": name,
            "deleted": True,
            "model": model,
            "boards": had,
            "failed": failures(answers.failed),
        }

    # -- which boards -------------------------------------------------------------------------

    async def _addresses(self, where: KvScope) -> list[BoardAddress]:
        """Return the boards that are meant. Raises ``ModelNotFound``, ``BoardNotFound``."""
        base = (
            None if where.model is None else (await self._service.models.resolve(where.model)).model
        )
        addresses = self._service.fleet.addresses(base)
        if where.boards is None:
            return addresses
        by_name = {address.board_id: address for address in addresses}
        for board in where.boards:
            if board not in by_name:
                raise BoardNotFound(board[:80], "boards")
        return [by_name[board] for board in where.boards]

    def _some(self, addresses: list[BoardAddress], model: str | None) -> list[BoardAddress]:
        """Return the boards, of which there must be one. Raises ``NoBoard``."""
        if addresses:
            return addresses
        fleet = self._service.fleet
        wanted = fleet.models[0] if model is None else model
        raise NoBoard(wanted, fleet.why_not_ready(wanted))

    async def _ask(
        self, addresses: list[BoardAddress], method: str, *args: Any, timeout_s: float | None = None
    ) -> Answers[Any]:
        limit_s = self._service.config.control_timeout_s if timeout_s is None else timeout_s
        return await self._service.fleet.ask(addresses, method, *args, timeout_s=limit_s)


def _to_keep(
    name: str, ids: tuple[int, ...], meant: ResolvedModel, desired: Desired
) -> DesiredCache:
    """Return the key of a cache to keep: for an adapter named without a version, no version."""
    made = DesiredCache(meant.model, name, ids, at_s=time.time())
    adapter = meant.adapter_name
    if adapter is None or desired.line(meant.model, adapter) is None:
        return replace(made, ref=meant.adapter)  # the base model, or an adapter in its folder
    named = meant.adapter if meant.named else None
    return replace(made, line=adapter, version=None if named is None else named.version)


def _status(answers: Answers[Any]) -> int:
    return MULTI_STATUS if answers.partial else OK
