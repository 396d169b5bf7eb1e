"""The exchange of prompt cache files with other boards of the same model, release and SoC.

A Router names a board that has a file for a prompt, where that should be faster than the prefill;
the file is fetched while the request waits for the board, and published as a parked conversation.
A board that sends files does so at a limited rate, beside its own runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from functools import partial
from io import FileIO

from rkserve.board.answer.transcript import Ids
from rkserve.board.rules.cache_costs import LEAST_BYTES
from rkserve.board.rules.generations import BoardCounters
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.prompt_caching import NO_TIME_MS, PromptCaching
from rkserve.board.run.settings import BoardSettings, FetchCache
from rkserve.core.errors import CacheNotFound, CacheUnsupported, RkserveError
from rkserve.core.messages import CacheOffer, CacheQuery, CacheSource

log = logging.getLogger(__name__)

LEAST_FETCH_S = 0.5  # the limit of a fetch is never shorter
MOST_SENT = 2  # files at once: each gets half of the network
LEAST_SLEEP_S = 0.002  # the event loop wakes no earlier
CHUNK = 1024 * 1024  # of a file that is sent; each is a turn of a thread at both ends
NO_NAME = "of that prompt"  # in the place of a cache's name, which parked conversations lack


class CacheExchange:
    """Fetches files for one board, and sends its own to others."""

    def __init__(
        self, settings: BoardSettings, caching: PromptCaching, figures: BoardCounters
    ) -> None:
        self._settings, self._caching, self._figures = settings, caching, figures
        self._sending = 0
        self._portable = False  # with the last engine

    def compatibility(self, live: LoadedEngine | None) -> int:
        """Return the hash that boards share which may load each other's files; 0: there are none.

        Without an engine, while the board sleeps, the last one counts.
        """
        store = self._caching.store
        if store is None or not self._caching.parks or not self._settings.share_bytes_per_s:
            return 0
        if live is not None:
            self._portable = live.quirk("prompt_cache_portable")
        return store.compatibility(self._settings.platform) if self._portable else 0

    @property
    def fetch_ms(self) -> float:
        """The expected time of fetching and reading a file, in ms per token."""
        costs = self._caching.costs
        return costs.fetch_ms(LEAST_BYTES) / LEAST_BYTES * costs.position_bytes

    def fetch(
        self, live: LoadedEngine, source: CacheSource, wanted: Ids, origin: str | None
    ) -> None:
        """Begin to fetch a file for a prompt from another board, where that should pay.

        The run of this prompt waits for it; see ``PromptCaching.choose``.
        """
        caching, fetch = self._caching, self._settings.fetch_cache
        compatibility, tokens = self.compatibility(live), min(source.tokens, len(wanted) - 1)
        if not compatibility or fetch is None or caching.store is None:
            return
        own = caching.store.find(wanted, origin)
        saved = tokens - (own.tokens if own is not None else 0)
        if saved < self._settings.park_min_tokens or caching.expects(wanted[:tokens], origin):
            return
        prefill_ms = caching.prefill_ms or source.prefill_ms
        if prefill_ms <= NO_TIME_MS or not caching.costs.fetching_pays(saved, tokens, prefill_ms):
            return
        limit_s = max(LEAST_FETCH_S, saved * prefill_ms / 1e3)
        receiving = self._receive(fetch, source, CacheQuery(compatibility, origin, wanted))
        task = asyncio.create_task(
            self._limited(receiving, source, limit_s), name="fetch a prompt cache"
        )
        caching.expect(task, wanted[:tokens], origin)

    async def _limited(
        self, receiving: Coroutine[None, None, None], source: CacheSource, limit_s: float
    ) -> None:
        own, other = self._settings.board_id, source.board_id
        try:
            await asyncio.wait_for(receiving, limit_s)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            log.info("board %s: no prompt cache from %s within %.1f s", own, other, limit_s)
        except (RkserveError, OSError) as exc:
            log.info("board %s: no prompt cache from %s: %s", own, other, exc)

    async def _receive(self, fetch: FetchCache, source: CacheSource, query: CacheQuery) -> None:
        store, figures = self._caching.require(), self._figures
        begun_s, got = time.monotonic(), 0
        async with aclosing(fetch(source, query)) as parts:
            offer = await anext(parts)
            assert isinstance(offer, CacheOffer), "the first part is the offer"
            path = await asyncio.to_thread(store.reserve, offer.file_bytes)
            digest = hashlib.sha256()
            try:
                # It goes to the page cache: the kernel writes it later, and reading finds it there.
                with path.open("xb", buffering=0) as file:
                    async for part in parts:
                        assert isinstance(part, bytes), "parts after the offer are content"
                        await asyncio.to_thread(_take, part, file, digest)
                        got += len(part)
                _verify(digest, offer)
            except BaseException:
                store.abandon(path)
                raise
        commit = partial(store.commit, path, offer.ids, None, query.origin, sha256=offer.sha256)
        await asyncio.to_thread(commit)
        took_s = time.monotonic() - begun_s
        self._caching.costs.network.observe(got, took_s, time.monotonic())
        figures.cache_fetched += 1
        figures.cache_fetched_bytes += got
        figures.cache_fetch_ms += took_s * 1e3

    async def send(self, query: CacheQuery) -> AsyncGenerator[CacheOffer | bytes, None]:
        """Yield the offer of a file for another board, then its content, at a limited rate.

        Raises:
            CacheUnsupported: this board's files are of no use there, or enough are being sent.
            CacheNotFound: it has no such file.
        """
        store = self._caching.require()
        if not query.compatibility or query.compatibility != self.compatibility(None):
            raise CacheUnsupported("The boards differ in model, release, SoC or settings.")
        if self._sending >= MOST_SENT:
            raise CacheUnsupported("This board sends other prompt caches already.")
        self._sending += 1
        try:
            entry = store.find_to_send(query.ids, query.origin)
            if entry is None or not await asyncio.to_thread(store.verify, entry):
                raise CacheNotFound(NO_NAME)
            try:
                file = entry.path.open("rb", buffering=0)
            except OSError as exc:  # removed meanwhile
                raise CacheNotFound(NO_NAME) from exc
            with file:
                yield CacheOffer(tuple(entry.ids), entry.file_bytes, entry.sha256)
                begun_s, sent = time.monotonic(), 0
                while chunk := await asyncio.to_thread(file.read, CHUNK):
                    yield chunk
                    sent += len(chunk)
                    self._figures.cache_sent_bytes += len(chunk)
                    due_s = begun_s + sent / self._settings.share_bytes_per_s
                    if (early_s := due_s - time.monotonic()) > LEAST_SLEEP_S:
                        await asyncio.sleep(early_s)
            self._figures.cache_sent += 1
        finally:
            self._sending -= 1


def _verify(digest: hashlib._Hash, offer: CacheOffer) -> None:
    if digest.hexdigest() != offer.sha256:
        raise CacheUnsupported("Its content is not what was offered.")


def _take(part: bytes, file: FileIO, digest: hashlib._Hash) -> None:
    file.write(part)
    digest.update(part)
