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
from typing import TypeVar

from rkserve.api.common.output import answer_headers, error_object
from rkserve.api.common.renderer import Prompt, Renderer
from rkserve.api.common.version_policy import ANY, ResolvedModel, VersionPolicy, read_session
from rkserve.api.openai.embeddings import (
    OPENAI,
    EmbeddingChunk,
    EmbeddingDialect,
    VectorOptions,
    check_dimensions,
    chunks_of,
    finished_vector,
    parse_pooling,
    pooling_answer,
    texts_of,
)
from rkserve.core.board_report import BoardState
from rkserve.core.errors import (
    BoardAsleep,
    DeadlineExceeded,
    EmbeddingUnsupported,
    EnginePaused,
    InputTooLong,
    NoBoard,
    QueueFull,
    RateLimited,
    RkserveError,
    RunFailed,
)
from rkserve.core.messages import (
    FIRST_LABEL,
    Accepted,
    Embedded,
    EmbedRequest,
    Finished,
    GenerateRequest,
)
from rkserve.core.run_params import Pooling
from rkserve.models.settings import EmbeddingSettings
from rkserve.router.auth import Caller, claim_of
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


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """The embedding model of a call."""

    meant: ResolvedModel
    settings: EmbeddingSettings
    renderer: Renderer
    context_len: int


@dataclass(slots=True)
class Collected:
    """The results of a call: raw vectors in the order of its texts."""

    vectors: list[bytes]
    accepted: list[Accepted] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    tokens: int = 0

    def take(self, chunk: EmbeddingChunk, made: EmbeddingVectors) -> None:
        """Add the result of one board."""
        for at, vector in zip(chunk.at, made.vectors, strict=True):
            self.vectors[at] = vector
        self.accepted.append(made.accepted)
        spans = made.finished.versions
        self.versions.append(spans[-1].version if spans else made.accepted.version or FIRST_LABEL)
        self.tokens += made.finished.usage.prompt_tokens

    @property
    def headers(self) -> dict[str, str]:
        """Response headers with the boards and weights."""
        return answer_headers(self.accepted, self.versions)


@dataclass(frozen=True, slots=True)
class EmbeddingVectors:
    """The result of one request."""

    accepted: Accepted
    vectors: tuple[bytes, ...]
    finished: Finished


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
            call = await beside(len(body), lambda: form.parse(body))
            model = await self.model(call.wanted, visit)
            check_dimensions(call.dimensions, model.settings)
            texts = await beside(
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

            return await beside(sum(map(len, made.vectors)), answer), made.headers

    async def pool(self, body: bytes, visit: CallContext) -> tuple[bytes, dict[str, str]]:
        """Answer a call for the hidden states of all tokens. Raises ``RkserveError``."""
        with self.entered(visit):
            call = await beside(len(body), lambda: parse_pooling(body))
            meant = await self._service.models.resolve(call.wanted.model, visit.policy)
            served = self._service.models.served(meant.model)
            served.renderer.needs_ids("input")
            context_len = served.folder.settings.context_length
            texts = await beside(
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

            return await beside(sum(map(len, made.vectors)), answer), made.headers

    @contextmanager
    def entered(self, visit: CallContext) -> Iterator[None]:
        """Count a call while it runs. Raises ``RateLimited``."""
        metrics = self._service.metrics
        try:
            visit.caller.enter()
        except RateLimited:
            metrics.rate_limited.inc()
            raise
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

    @property
    def service(self) -> Service:
        """The Router's service."""
        return self._service

    async def model(self, wanted: VectorOptions, visit: CallContext) -> EmbeddingModel:
        """Return the model of a call.

        Raises:
            EmbeddingUnsupported: it makes no embeddings.
            RkserveError: as ``ServedModels.resolve``.
        """
        meant = await self._service.models.resolve(wanted.model, visit.policy)
        served = self._service.models.served(meant.model)
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
        claim = claim_of(wanted, visit.caller, visit.timeout_s, service.config, visit.started_s)
        call_id = EMBEDDING + uuid.uuid4().hex
        boards = sum(report.state in AT_WORK for report in service.fleet.reports(name))
        chunks = chunks_of(
            texts,
            model.meant,
            model.settings,
            call_id,
            session=read_session(visit.session, wanted.session, call_id),
            boards=boards,
            pooling=pooling,
        )
        sending = _Sending(service, chunks, claim, Collected([b""] * len(texts)))
        limit_s = None if claim.deadline_s is None else claim.deadline_s - time.monotonic()
        try:
            made = await asyncio.wait_for(sending.run(max(1, boards)), limit_s)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise DeadlineExceeded(claim.timeout_s) from None
        visit.caller.spend(made.tokens)
        service.metrics.embedded_texts.labels(name).inc(len(texts))
        service.metrics.embedded_tokens.labels(name).inc(made.tokens)
        return made


class _Sending:
    """The requests of one call, sent and unsent."""

    def __init__(
        self, service: Service, chunks: Sequence[EmbeddingChunk], claim: QueueTerms, made: Collected
    ) -> None:
        self._service, self._claim, self._made = service, claim, made
        self._left = deque(chunks)
        self._begun = False  # some board has finished a request

    async def run(self, most: int) -> Collected:
        """Send all requests with limited concurrency. Raises the first error."""
        await side_by_side(self._work, min(most, len(self._left)))
        return self._made

    async def _work(self) -> None:
        while self._left:
            chunk = self._left.popleft()
            self._made.take(chunk, await self._awake(chunk.request))
            self._begun = True

    async def _awake(self, request: EmbedRequest) -> EmbeddingVectors:
        return await awake(self._service, request, self._sent, begun=lambda: self._begun)

    async def _sent(self, request: EmbedRequest) -> EmbeddingVectors:
        accepted: Accepted | None = None
        vectors: tuple[bytes, ...] = ()
        async with aclosing(self._service.events(request, self._claim)) as events:
            async for event in events:
                if isinstance(event, Accepted):
                    accepted = event
                elif isinstance(event, Embedded):
                    vectors = event.vectors
                elif isinstance(event, Finished) and accepted is not None:
                    if len(vectors) != len(request.inputs) + len(request.texts):
                        raise RunFailed(accepted.board_id, f"it made {len(vectors)} vectors")
                    return EmbeddingVectors(accepted, vectors, event)
        raise NoBoard(request.model, "an answer ended before its end")


async def side_by_side(work: Callable[[], Awaitable[None]], count: int) -> None:
    """Run so many workers at once. Raises the first error, after cancelling the others."""
    workers = [asyncio.ensure_future(work()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def awake(
    service: Service,
    request: RequestT,
    send: Callable[[RequestT], Awaitable[T]],
    begun: Callable[[], bool],
) -> T:
    """Send one request of a call, waking its model.

    ``begun``: some board has finished another request of the call.
    """
    waking = service.waking
    request = _as_late_as(request, await waking.ready(request.model))
    while True:
        try:
            return await send(request)
        except (EnginePaused, NoBoard, BoardAsleep):
            if not waking.needed(request.model):
                raise
            request = _as_late_as(request, await waking.ready(request.model))
        except QueueFull:
            if not begun():
                raise
            # The results of the other requests are not discarded for that.
            await asyncio.sleep(QUEUE_FULL_S)


def _as_late_as(request: RequestT, epoch: int) -> RequestT:
    return replace(request, min_epoch=max(request.min_epoch, epoch)) if epoch else request


async def beside(size: int, work: Callable[[], T]) -> T:
    """Run work on so many bytes, in a thread if they are many, to keep token streams moving."""
    return await off_loop(size, work)
