"""What the Router does with a call, without HTTP and without Ray: parse, plan, generate, answer."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from rkserve.config import RouterConfig
from rkserve.deployments.choices import Choices
from rkserve.deployments.fleet import Fleet
from rkserve.errors import ModelNotFound, RkserveError
from rkserve.messages import Accepted, Delta, GenerateRequest
from rkserve.metrics import BoardCollector, RouterMetrics
from rkserve.modelfolder import ModelFolder
from rkserve.wire import sse
from rkserve.wire.answers import ChatAnswer, CompletionAnswer, fingerprint
from rkserve.wire.failures import error_event, error_object
from rkserve.wire.headers import answer_headers
from rkserve.wire.jsonbody import JsonObject
from rkserve.wire.models import model_entry, models_list
from rkserve.wire.openai import ChatCall, CompletionCall
from rkserve.wire.plan import plan
from rkserve.wire.renderer import Renderer

log = logging.getLogger(__name__)

Answer = ChatAnswer | CompletionAnswer
# Shorter bodies are parsed and tokenized in about a millisecond: less than a thread's detour costs
# the token streams of others.
INLINE_BODY_BYTES = 8192


@dataclass(frozen=True)
class ServedModel:
    """A model as the Router needs it."""

    folder: ModelFolder
    renderer: Renderer
    created: int

    @classmethod
    def open(cls, folder: ModelFolder) -> ServedModel:
        """Load tokenizer and template. Raises ``ConfigError``."""
        return cls(folder, Renderer(folder), int(folder.path.stat().st_mtime))


@dataclass
class Opened:
    """A call that boards have accepted, ready to be streamed or collected."""

    call: ChatCall | CompletionCall
    answer: Answer
    choices: Choices
    accepted: list[Accepted]
    started_s: float = field(default_factory=time.monotonic)
    closed: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that tell who answers."""
        return answer_headers(self.accepted)


class Service:
    """One Router. Use it from one event loop."""

    def __init__(self, config: RouterConfig, models: dict[str, ServedModel], fleet: Fleet) -> None:
        self.config = config
        self.fleet = fleet
        self._models = models
        self.registry = CollectorRegistry()
        self.metrics = RouterMetrics(self.registry)
        self.registry.register(BoardCollector(fleet.reports))

    # -- models -------------------------------------------------------------------------------

    def model(self, model_id: str) -> JsonObject:
        """Return the entry of one model. Raises ``ModelNotFound``."""
        served = self._served(model_id)
        return model_entry(
            model_id,
            served.created,
            served.folder.settings.context_length,
            self.fleet.reports(model_id),
        )

    def models(self) -> JsonObject:
        """Return the list of models."""
        return models_list([self.model(model_id) for model_id in self._models])

    def _served(self, model_id: str) -> ServedModel:
        try:
            return self._models[model_id]
        except KeyError:
            raise ModelNotFound(model_id) from None

    # -- calls --------------------------------------------------------------------------------

    async def open(
        self, body: bytes, parse: Callable[[bytes], ChatCall | CompletionCall]
    ) -> Opened:
        """Read a call and have boards accept it. Raises ``RkserveError``; then nothing runs."""
        started_s = time.monotonic()
        if len(body) <= INLINE_BODY_BYTES:
            call, requests = self._read(body, parse)
        else:
            call, requests = await asyncio.to_thread(self._read, body, parse)
        choices = Choices(self.fleet.generate, requests)
        try:
            accepted = await choices.accepted()
        except BaseException:
            await choices.aclose()
            raise
        answer = self._answer(call, accepted[0])
        self.metrics.in_flight.inc()
        return Opened(call, answer, choices, accepted, started_s)

    async def close(self, opened: Opened) -> None:
        """End a call, finished or not, and free its boards; once more does no harm."""
        if opened.closed:
            return
        opened.closed = True
        self.metrics.in_flight.dec()
        await opened.choices.aclose()

    async def whole(self, opened: Opened) -> JsonObject:
        """Return the answer in one piece. Raises ``RkserveError``. Closes the call."""
        answer = opened.answer
        waits_for_first = True
        try:
            while (item := await opened.choices.next()) is not None:
                index, event = item
                if isinstance(event, Delta):
                    if waits_for_first:
                        waits_for_first = self._first_token(opened)
                    answer.add(index, event)
                else:
                    answer.end(index, event)
            self._done(opened)
            return answer.whole()
        except BaseException as exc:
            self._broken(exc)
            raise
        finally:
            await self.close(opened)

    async def stream(self, opened: Opened) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events. Closes the call.

        An error after the headers were sent ends the stream with an error event.
        """
        answer = opened.answer
        waits_for_first = True
        try:
            yield b"".join(answer.opening(index) for index in range(opened.call.choices))
            while True:
                try:
                    item = await opened.choices.next(self.config.ping_s)
                except TimeoutError:
                    yield sse.PING
                    continue
                if item is None:
                    break
                index, event = item
                if not isinstance(event, Delta):
                    yield answer.finish(index, event)
                    continue
                if waits_for_first:
                    waits_for_first = self._first_token(opened)
                if chunk := answer.delta(index, event):
                    yield chunk
            self._done(opened)
            yield answer.usage_chunk() + sse.DONE
        except Exception as exc:
            self._broken(exc)
            if not isinstance(exc, RkserveError):
                log.exception("an answer failed in a way that it should not")
            yield error_event(exc) + sse.DONE
        except BaseException as exc:
            self._broken(exc)
            raise
        finally:
            await self.close(opened)

    def _read(
        self, body: bytes, parse: Callable[[bytes], ChatCall | CompletionCall]
    ) -> tuple[ChatCall | CompletionCall, list[GenerateRequest]]:
        call = parse(body)
        served = self._served(call.model)
        settings = served.folder.settings
        requests = plan(
            call,
            served.renderer,
            settings.sampling.values(),
            settings.context_length,
            lambda: uuid.uuid4().hex,
        )
        return call, requests

    def _answer(self, call: ChatCall | CompletionCall, accepted: Accepted) -> Answer:
        kind = ChatAnswer if isinstance(call, ChatCall) else CompletionAnswer
        seal = fingerprint(call.model, accepted.release)
        return kind(call, uuid.uuid4().hex, int(time.time()), seal)

    def _first_token(self, opened: Opened) -> bool:
        """Record TTFT; returns that nothing is waited for any more."""
        self.metrics.ttft.labels(opened.call.model).observe(time.monotonic() - opened.started_s)
        return False

    def _done(self, opened: Opened) -> None:
        took_s = time.monotonic() - opened.started_s
        self.metrics.duration.labels(opened.call.model).observe(took_s)

    def _broken(self, exc: BaseException) -> None:
        if isinstance(exc, (asyncio.CancelledError, GeneratorExit)):
            self.metrics.hang_ups.inc()
        else:
            code = error_object(exc)[2]["error"]["code"] or "server_error"
            self.metrics.generation_errors.labels(code).inc()
