"""Named prompt caches as desired state: every board of a model builds those that it lacks,
including boards that join late or lost their files.

It compares, repeatedly, the boards' files with the ledger and the configuration. After a failure a
board is retried later; the failure is shown in lists and in the log, and delays nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from rkserve.coordinator.operations.operation_run import OperationContext
from rkserve.coordinator.state.ledger import Ledger
from rkserve.core.board_report import BoardReport, BoardState, CacheEntry
from rkserve.core.desired_state import SYSTEM_PROMPT, DesiredCache
from rkserve.core.errors import BoardGone, CacheUnsupported, RequestError, RkserveError
from rkserve.core.files import ids_digest
from rkserve.core.messages import AdapterRef
from rkserve.fleet.board_table import BoardAddress

log = logging.getLogger(__name__)

MAX_CACHES = 64  # of one model
MAX_TOMBSTONES = 256
ASK_S = 10.0
BUILD_S = 600.0  # a long prompt on a board that is busy with others
FIRST_DELAY_S, LONGEST_DELAY_S = 2.0, 60.0


@dataclass(frozen=True)
class CacheTimes:
    """Time limits, in seconds. A board is checked again after ``again_s``; a file of another
    content is left for ``differs_s`` to the call that may be building it.
    """

    again_s: float = 30.0
    differs_s: float = 10.0


@dataclass
class _Board:
    """The known state of one replica."""

    replica: str
    looked_s: float = float("-inf")
    settled: object = None  # the caches of the last comparison that found no difference
    failures: int = 0
    wait_until_s: float = 0.0
    problems: dict[str, str] = field(
        default_factory=dict
    )  # by cache name: the reason why it is not built
    differs_s: dict[str, float] = field(default_factory=dict)  # by cache name: the time since then


class PromptCacheKeeper:
    """Use it from the Coordinator's event loop."""

    def __init__(
        self,
        context: OperationContext,
        ledger: Ledger,
        configured: Mapping[str, DesiredCache],
        times: CacheTimes | None = None,
    ) -> None:
        """``configured`` has the system prompt of each group of boards that has one."""
        self._context = context
        self._ledger = ledger
        self._configured = configured
        self._times = times or CacheTimes()
        self._kept = {(one.model, one.name): one for one in ledger.caches()}
        self._boards: dict[str, _Board] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    # -- what is kept --------------------------------------------------------------------------

    def keep(self, cache: DesiredCache) -> None:
        """Have every board of the model hold it from now on.

        Raises:
            RequestError: the name is the configuration's, or the model has too many.
            LedgerFailed: it cannot be stored.
        """
        self._check_free(cache.model, cache.name)
        there = [one for one in self._of(cache.model) if one.ids and one.name != cache.name]
        if len(there) >= MAX_CACHES:
            raise RequestError(
                f"Model '{cache.model}' has {len(there)} named prompt caches; the limit is "
                f"{MAX_CACHES}. Delete one first.",
                "cache_name",
            )
        self._write(cache)

    def drop(self, model: str, name: str) -> bool:
        """Have no board hold it any more; False if it was not kept.

        Raises:
            RequestError: the configuration requires it.
            LedgerFailed: it cannot be stored.
        """
        self._check_free(model, name)
        known = self._kept.get((model, name))
        if known is None or not known.ids:
            return False
        # An absent board may return with the file: deleted names stay known.
        self._write(DesiredCache(model, name, at_s=self._context.now_s()))
        return True

    def _check_free(self, model: str, name: str) -> None:
        if name == SYSTEM_PROMPT and any(one.model == model for one in self._configured.values()):
            raise RequestError(
                f"'{name}' is the prompt cache of the configured system prompt: change "
                "`prompt_cache.system_prompt` of the group instead.",
                "cache_name",
            )

    def _write(self, cache: DesiredCache) -> None:
        gone = sorted((one for one in self._kept.values() if not one.ids), key=lambda c: c.at_s)
        forgotten = gone[: max(0, len(gone) + (not cache.ids) - MAX_TOMBSTONES)]
        self._ledger.write_caches([cache], forgotten)
        for one in forgotten:
            self._kept.pop((one.model, one.name), None)
        self._kept[cache.model, cache.name] = cache

    def _of(self, model: str) -> list[DesiredCache]:
        return [one for one in self._kept.values() if one.model == model]

    def desired(self, model: str) -> list[dict[str, object]]:
        """Return a model's desired caches, and the boards that could not build them."""
        configured = {one.name: one for one in self._configured.values() if one.model == model}
        kept = {one.name: one for one in self._of(model) if one.ids}
        return [
            {
                "cache_name": one.name,
                "adapter": one.line or (None if one.ref is None else one.ref.name),
                "tokens": len(one.ids),
                "configured": name in configured,
                "failed": [
                    {"board": board, "message": known.problems[name]}
                    for board, known in sorted(self._boards.items())
                    if name in known.problems
                ],
            }
            for name, one in sorted({**kept, **configured}.items())
        ]

    # -- what boards have ----------------------------------------------------------------------

    def look(self) -> None:
        """Begin to compare and to build on every board that is free."""
        reports = {one.replica: one for one in self._context.roster.reports() if one.replica}
        addresses = self._context.roster.addresses()
        there = {address.board_id for address in addresses}
        self._boards = {name: one for name, one in self._boards.items() if name in there}
        for address in addresses:
            report, wanted = reports.get(address.replica), self._wanted(address)
            if report is None or not wanted or not _is_free(report):
                continue
            known = self._boards.get(address.board_id)
            if known is None or known.replica != address.replica:
                known = self._boards[address.board_id] = _Board(address.replica)
            if address.board_id not in self._tasks and self._is_due(known, report, wanted):
                task = asyncio.get_running_loop().create_task(self._bring(address, known, report))
                self._tasks[address.board_id] = task
                task.add_done_callback(partial(self._ended, address.board_id))

    def _ended(self, board: str, _task: asyncio.Task[None]) -> None:
        self._tasks.pop(board, None)

    def _is_due(self, known: _Board, report: BoardReport, wanted: list[DesiredCache]) -> bool:
        now_s = time.monotonic()
        if now_s < known.wait_until_s:
            return False
        compared = (report.base, self._with_refs(wanted))
        return known.settled != compared or now_s - known.looked_s >= self._times.again_s

    def _wanted(self, address: BoardAddress) -> list[DesiredCache]:
        """Return the caches that the board must hold and, without IDs, those that it must not
        hold.
        """
        kept = [one for one in self._of(address.model) if one.name != SYSTEM_PROMPT]
        configured = self._configured.get(address.group)
        if configured is not None:
            return [configured, *kept]
        return [*kept, *(one for one in self._of(address.model) if one.name == SYSTEM_PROMPT)]

    def _with_refs(
        self, wanted: Iterable[DesiredCache]
    ) -> tuple[tuple[DesiredCache, str | None], ...]:
        """Return caches with the keys of the adapters with which they are computed now."""
        found = []
        for one in wanted:
            ref = self._ref(one)
            found.append((one, None if ref is None else ref.key))
        return tuple(found)

    def _ref(self, cache: DesiredCache) -> AdapterRef | None:
        """Return the adapter of a cache: for a bare name, its active version."""
        if cache.line is None:
            return cache.ref
        line = self._context.state.desired.line(cache.model, cache.line)
        if line is None:
            return None
        version = line.active if cache.version is None else line.version(cache.version)
        return None if version is None else version.ref

    async def _bring(self, address: BoardAddress, known: _Board, report: BoardReport) -> None:
        """Compare one board with its desired caches, and build or delete the differences."""
        known.looked_s, wanted = time.monotonic(), self._wanted(address)
        compared = (report.base, self._with_refs(wanted))
        known.problems = {}
        waits = False
        try:
            entries: list[CacheEntry] = await self._context.roster.ask_one(
                address, "caches", timeout_s=ASK_S
            )
            there = {entry.name: entry for entry in entries if entry.name is not None}
            for cache in wanted:
                waits = await self._align(address, known, cache, there.get(cache.name)) or waits
        except BoardGone:
            return
        except RkserveError as exc:
            log.warning("board %s: its prompt caches are not known: %s", address.board_id, exc)
            self._delay(known)
            return
        except Exception:
            # No caller awaits this task: the error is logged, and the next round tries again.
            log.exception("board %s: its prompt caches could not be compared", address.board_id)
            self._delay(known)
            return
        if known.problems:
            self._delay(known)
        elif not waits:
            known.failures, known.settled = 0, compared

    async def _align(
        self, address: BoardAddress, known: _Board, cache: DesiredCache, entry: CacheEntry | None
    ) -> bool:
        """Build or delete one cache if due; return whether it is still to be done."""
        ref = self._ref(cache)
        if cache.line is not None and ref is None:
            return False  # its adapter has no active version to compute it with
        key = None if ref is None else ref.key
        held = None if entry is None else (entry.adapter, entry.digest)
        if held == ((key, ids_digest(cache.ids)) if cache.ids else None):
            known.differs_s.pop(cache.name, None)
            return False
        since_s = known.differs_s.setdefault(cache.name, time.monotonic())
        if held is not None and time.monotonic() - since_s < self._times.differs_s:
            return True
        ask = self._context.roster.ask_one
        try:
            if cache.ids:
                built = (cache.name, cache.ids, ref)
                await ask(address, "build_cache", *built, timeout_s=BUILD_S)
            else:
                await ask(address, "delete_cache", cache.name, timeout_s=ASK_S)
        except BoardGone:
            raise
        except RkserveError as exc:
            self._note(address, known, cache, exc)
            return False
        known.differs_s.pop(cache.name, None)
        done = "built" if cache.ids else "deleted"
        log.info("board %s has %s the prompt cache '%s'", address.board_id, done, cache.name)
        return False

    def _note(
        self, address: BoardAddress, known: _Board, cache: DesiredCache, exc: RkserveError
    ) -> None:
        known.problems[cache.name] = exc.message
        self._context.metrics.board_failures.labels(
            "build_cache", exc.code or "internal_error"
        ).inc()
        if isinstance(exc, CacheUnsupported):
            known.failures = max(known.failures, 8)  # waiting does not help; the board must change
        log.warning(
            "board %s has not built the prompt cache '%s': %s",
            address.board_id,
            cache.name,
            exc.message,
        )

    def _delay(self, known: _Board) -> None:
        delay_s = min(FIRST_DELAY_S * 2.0**known.failures, LONGEST_DELAY_S)
        known.failures += 1
        known.wait_until_s = time.monotonic() + delay_s

    async def stop(self) -> None:
        """Stop; boards keep their files."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_free(report: BoardReport) -> bool:
    """Return whether the board could build something: it is loaded, and nothing holds it."""
    return report.state is BoardState.READY and not report.hold
