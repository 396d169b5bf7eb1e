"""Embeddings: texts split into requests, run on all boards of a model, and collected.

A call has as many requests in flight as its model has boards, which uses all of them and leaves the
queue to other calls.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from rkserve.api.common.output import answer_headers, error_object
from rkserve.api.common.renderer import Prompt, Renderer
from rkserve.api.common.version_policy import ANY, ResolvedModel, VersionPolicy
from rkserve.api.json.fields import MAX_SESSION_CHARS
from rkserve.api.openai.embeddings import (
    OPENAI,
    EmbeddingDialect,
    VectorOptions,
    check_dimensions,
    chunks_of,
    finished_vector,
    parse_pooling,
    pooling_answer,
    texts_of,
)
from rkserve.config.router import RouterConfig
from rkserve.core.board_report import BoardState
from rkserve.core.errors import (
    BoardAsleep,
    DeadlineExceeded,
    EmbeddingUnsupported,
    EnginePaused,
    InputTooLong,
    NoBoard,
    QueueFull,
    RkserveError,
    RunFailed,
)
from rkserve.core.messages import (
    FIRST_LABEL,
    Accepted,
    Embedded,
    EmbedRequest,
    Event,
    Finished,
    GenerateRequest,
)
from rkserve.core.request_record import RequestRecord, record_of_request
from rkserve.core.run_params import Pooling
from rkserve.models.settings import EmbeddingSettings
from rkserve.router.auth.callers import Caller, queue_terms
from rkserve.router.off_loop import off_loop
from rkserve.router.queue.admission import QueueTerms
from rkserve.router.service import Service

T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=GenerateRequest)
# The interval at which the rest of a call that has begun retries a full queue.
QUEUE_FULL_S = 0.2
EMBEDDING = "embd-"
# States of boards that serve now, or will when a request wakes them.
AT_WORK = (BoardState.READY, BoardState.ASLEEP, BoardState.LOADING, BoardState.RECOVERING)


@dataclass(frozen=True, slots=True)
class CallContext:
    """The caller of a call, and the values of its headers."""

    caller: Caller
    policy: VersionPolicy = ANY
    session: str | None = None
    timeout_s: float | None = None
    started_s: float = field(default_factory=time.monotonic)

    def terms(self, wanted: VectorOptions, config: RouterConfig) -> QueueTerms:
        """Return the queue terms of the call's requests. Raises ``RequestError``."""
        timeouts_s = (self.timeout_s, wanted.timeout_s)
        return queue_terms(
            self.caller, config, self.started_s, priority=wanted.priority, timeouts_s=timeouts_s
        )


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """The embedding model of a call."""

    meant: ResolvedModel
    settings: EmbeddingSettings
    renderer: Renderer
    context_len: int


@dataclass(frozen=True, slots=True)
class Collected:
    """The results of a call: raw vectors in the order of its texts, tokens, boards and headers."""

    vectors: list[bytes]
    tokens: int
    accepted: list[Accepted]
    headers: dict[str, str]


class Embeddings:
    """The embedding calls of one Router. Use from its event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(
        self, body: bytes, visit: CallContext, form: EmbeddingDialect = OPENAI
    ) -> tuple[bytes, dict[str, str]]:
        """Answer an embedding call: body and headers. Raises ``RkserveError``."""
        started_s = time.monotonic()
        with self.entered(visit):
            call = await off_loop(len(body), lambda: form.parse(body))
            model = await self.model(call.wanted, visit)
            check_dimensions(call.dimensions, model.settings)
            texts = await off_loop(
                len(body),
                lambda: texts_of(
                    call.inputs, call.paths, model.renderer, model.context_len, cut=call.cut
                ),
            )
            made = await self.vectors(call.wanted, model, texts, visit)
            took_s = time.monotonic() - started_s

            def answer() -> bytes:
                vectors = [
                    finished_vector(one, model.settings, call.dimensions) for one in made.vectors
                ]
                return form.answer(call, vectors, made.tokens, took_s)

            return await off_loop(sum(map(len, made.vectors)), answer), made.headers

    async def pool(self, body: bytes, visit: CallContext) -> tuple[bytes, dict[str, str]]:
        """Answer a call for the hidden states of all tokens. Raises ``RkserveError``."""
        with self.entered(visit):
            call = await off_loop(len(body), lambda: parse_pooling(body))
            meant = await self._service.models.resolve(call.wanted.model, visit.policy)
            served = self._service.models.by_name[meant.model]
            served.renderer.needs_ids("input")
            context_len = served.folder.settings.context_length
            texts = await off_loop(
                len(body),
                lambda: texts_of(call.inputs, call.paths, served.renderer, context_len),
            )
            tokens = sum(len(text.ids) for text in texts)
            if tokens > context_len:  # it bounds the memory of the answer, too
                raise InputTooLong(tokens, context_len, "input")
            model = EmbeddingModel(meant, EmbeddingSettings(), served.renderer, context_len)
            made = await self.vectors(call.wanted, model, texts, visit, Pooling.ALL)
            rows = [len(text.ids) for text in texts]
            for data, count in zip(made.vectors, rows, strict=True):
                if not data or len(data) % (4 * count):
                    board = made.accepted[0].board_id
                    raise RunFailed(board, f"{len(data)} bytes are no rows of {count} tokens")
            found = list(zip(made.vectors, rows, strict=True))
            answer_id, created = f"pool-{uuid.uuid4().hex}", int(time.time())

            def answer() -> bytes:
                return pooling_answer(call, found, answer_id, created)

            return await off_loop(sum(map(len, made.vectors)), answer), made.headers

    @contextmanager
    def entered(self, visit: CallContext) -> Iterator[None]:
        """Count a call while it runs. Raises ``RateLimited``."""
        metrics = self._service.metrics
        self._service.admit(visit.caller)
        metrics.in_flight.inc()
        try:
            yield
        except asyncio.CancelledError:
            metrics.hang_ups.inc()
            raise
        except RkserveError as exc:
            code = error_object(exc)[2]["error"]["code"]
            if code is not None:
                metrics.generation_errors.labels(code).inc()
            raise
        finally:
            metrics.in_flight.dec()
            visit.caller.leave()

    async def model(self, wanted: VectorOptions, visit: CallContext) -> EmbeddingModel:
        """Return the model of a call.

        Raises:
            EmbeddingUnsupported: it makes no embeddings.
            RkserveError: as ``ServedModels.resolve``.
        """
        meant = await self._service.models.resolve(wanted.model, visit.policy)
        served = self._service.models.by_name[meant.model]
        settings = served.folder.settings.embedding
        if settings is None:
            raise EmbeddingUnsupported(
                f"The model '{meant.model}' makes no embeddings: the rkserve.yaml of its folder "
                "has no 'embedding' section.",
                "model",
            )
        return EmbeddingModel(
            meant, settings, served.renderer, served.folder.settings.context_length
        )

    async def vectors(
        self,
        wanted: VectorOptions,
        model: EmbeddingModel,
        texts: Sequence[Prompt],
        visit: CallContext,
        pooling: Pooling | None = None,
    ) -> Collected:
        """Compute the vectors of all texts.

        Raises:
            DeadlineExceeded: not in time.
            RkserveError: the error of one request; the others are cancelled.
        """
        service, name = self._service, model.meant.model
        terms = visit.terms(wanted, service.config)
        call_id = EMBEDDING + uuid.uuid4().hex
        boards = boards_at_work(service, name)
        chunks = chunks_of(
            texts,
            model.meant,
            model.settings,
            call_id,
            session=(visit.session or wanted.session or call_id)[:MAX_SESSION_CHARS],
            boards=boards,
            pooling=pooling,
        )
        spread: RequestSpread[EmbedRequest, tuple[bytes, ...]] = RequestSpread(
            service, visit, terms, [chunk.request for chunk in chunks]
        )
        found = await spread.run(boards, _vectors, "it made no vectors")
        vectors = [b""] * len(texts)
        for chunk, made in zip(chunks, found, strict=True):
            for at, vector in zip(chunk.at, made, strict=True):
                vectors[at] = vector
        service.metrics.embedded_texts.labels(name).inc(len(texts))
        service.metrics.embedded_tokens.labels(name).inc(spread.tokens)
        return Collected(vectors, spread.tokens, spread.accepted, spread.headers)


class RequestSpread(Generic[RequestT, T]):
    """The requests of one call, sent side by side: as many at once as its model has boards.

    ``accepted`` are the boards of the completed requests, and ``tokens`` the tokens that they read.
    """

    def __init__(
        self, service: Service, visit: CallContext, terms: QueueTerms, requests: Sequence[RequestT]
    ) -> None:
        self._service, self._visit, self._terms = service, visit, terms
        self._record = record_of_request()
        _note_requests(self._record, requests)
        self._left = deque(enumerate(requests))
        self._values: dict[int, T] = {}
        self._versions: list[str] = []
        self.accepted: list[Accepted] = []
        self.tokens = 0

    @property
    def headers(self) -> dict[str, str]:
        """Response headers with the boards and weights."""
        return answer_headers(self.accepted, self._versions)

    async def run(
        self, boards: int, value: Callable[[RequestT, Event, str], T | None], missing: str
    ) -> list[T]:
        """Send all requests; return their values in order.

        ``value`` returns the value in an event of a board, if there is one; a request without any
        fails with the reason ``missing``.

        Raises:
            DeadlineExceeded: not in time.
            RkserveError: the error of one request; the others are cancelled.
        """
        terms = self._terms

        async def work() -> None:
            while self._left:
                at, request = self._left.popleft()
                self._values[at] = await self._awake(request, value, missing)

        limit_s = None if terms.deadline_s is None else terms.deadline_s - time.monotonic()
        most = min(max(1, boards), len(self._left))
        try:
            await asyncio.wait_for(_side_by_side(work, most), limit_s)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise DeadlineExceeded(terms.timeout_s) from None
        self._visit.caller.spend(self.tokens)
        return [self._values[at] for at in sorted(self._values)]

    async def _awake(
        self, request: RequestT, value: Callable[[RequestT, Event, str], T | None], missing: str
    ) -> T:
        """Send one request, waking its model."""
        waking = self._service.waking
        request = _as_late_as(request, await waking.ready(request.model))
        while True:
            try:
                return await self._sent(request, value, missing)
            except (EnginePaused, NoBoard, BoardAsleep):
                if not waking.needed(request.model):
                    raise
                request = _as_late_as(request, await waking.ready(request.model))
            except QueueFull:
                if not self.accepted:
                    raise
                # The results of the other requests are not discarded for that.
                await asyncio.sleep(QUEUE_FULL_S)

    async def _sent(
        self, request: RequestT, value: Callable[[RequestT, Event, str], T | None], missing: str
    ) -> T:
        accepted: Accepted | None = None
        found: T | None = None
        async with aclosing(self._service.dispatch.generate(request, self._terms)) as events:
            async for event in events:
                if isinstance(event, Accepted):
                    accepted = event
                elif accepted is not None and isinstance(event, Finished):
                    if found is None:
                        raise RunFailed(accepted.board_id, missing)
                    spans = event.versions
                    version = spans[-1].version if spans else accepted.version or FIRST_LABEL
                    self._versions.append(version)
                    self.accepted.append(accepted)
                    self.tokens += event.usage.prompt_tokens
                    self._record.prompt_tokens = self.tokens
                    return found
                elif accepted is not None and found is None:
                    found = value(request, event, accepted.board_id)
        raise NoBoard(request.model, "an answer ended before its end")


def _note_requests(record: RequestRecord, requests: Sequence[GenerateRequest]) -> None:
    for first in requests[:1]:
        record.id, record.model = first.request_id.rpartition("/")[0], first.model
        record.adapter = first.line or (first.adapter.name if first.adapter else "")
        record.operation = "embeddings" if isinstance(first, EmbedRequest) else "rerank"


def boards_at_work(service: Service, model: str) -> int:
    """Return the number of a model's boards that serve now, or will when a request wakes them."""
    return sum(report.state in AT_WORK for report in service.fleet.reports(model))


def _vectors(request: EmbedRequest, event: Event, board_id: str) -> tuple[bytes, ...] | None:
    if not isinstance(event, Embedded):
        return None
    if len(event.vectors) != len(request.inputs) + len(request.texts):
        raise RunFailed(board_id, f"it made {len(event.vectors)} vectors")
    return event.vectors


async def _side_by_side(work: Callable[[], Awaitable[None]], count: int) -> None:
    """Run so many workers at once. Raises the first error, after cancelling the others."""
    workers = [asyncio.ensure_future(work()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _as_late_as(request: RequestT, epoch: int) -> RequestT:
    return replace(request, min_epoch=max(request.min_epoch, epoch)) if epoch else request
