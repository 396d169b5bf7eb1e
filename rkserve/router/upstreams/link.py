"""An upstream as the one board of a group: generations, reports and control calls.

It is reached by HTTP from the Router itself, so that no deployment of Ray stands behind it. Each
Router reports what it knows itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from pydantic_core import from_json

from rkserve.api.common.answer import AnyCall
from rkserve.api.upstream.answers import AnswerTimes, NoAnswer, UpstreamAnswer
from rkserve.api.upstream.requests import CHARS_OF_A_TOKEN
from rkserve.api.upstream.requests import request as body_of
from rkserve.config.board_group import UpstreamConfig
from rkserve.core.board_report import (
    UPSTREAM,
    BoardReport,
    BoardState,
    Emitted,
    GenerationInfo,
    GenerationState,
)
from rkserve.core.desired_state import Desired, PauseMode
from rkserve.core.errors import (
    BoardFailed,
    BoardStartFailed,
    EnginePaused,
    GenerationNotFound,
    QueueFull,
    RkserveError,
    UpstreamFailed,
    UpstreamUnable,
)
from rkserve.core.messages import (
    Accepted,
    CacheSource,
    ControlAction,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    UpstreamDelta,
)
from rkserve.fleet.fleet import TakeDelta
from rkserve.router.upstreams.exchange import Exchange, Signal
from rkserve.router.upstreams.metrics import UpstreamMetrics

log = logging.getLogger(__name__)

# A request whose status takes longer than this is accepted before it: its client gets headers.
ACCEPT_S = 2.0
FIRST_LOOK_S = 1.0  # a Router that starts waits so long for an upstream's health
RETRY_S = 0.2  # before the first retry; twice as long before each further one
WRITE_S = 30.0
MAX_HEALTH_BYTES = 4 * 1024 * 1024
_BEARER = "Bearer"
# What boards' methods do, in the words of an error.
_WORDS = {
    "kv": "tell what its KV cache holds",
    "clear_kv": "clear its KV cache",
    "caches": "list prompt caches",
    "build_cache": "build a prompt cache",
    "delete_cache": "delete a prompt cache",
    "logs": "show its log",
}


@dataclass(eq=False, slots=True)
class _Work:
    """A generation at the upstream."""

    request: GenerateRequest
    call: AnyCall
    index: int  # of the choice
    began_s: float
    answer: UpstreamAnswer
    first_s: float | None = None
    text: list[str] = field(default_factory=list)
    tokens: int = 0
    accepted: bool = False
    aborted: bool = False
    exchange: Exchange | None = None

    def abort(self) -> None:
        """End it before all that is on the way."""
        self.aborted = True
        if self.exchange is not None:
            self.exchange.abort()

    def times(self, now_s: float) -> AnswerTimes:
        """Return the times of the answer that ends now."""
        first_s = now_s if self.first_s is None else self.first_s
        return AnswerTimes((first_s - self.began_s) * 1e3, (now_s - first_s) * 1e3)


class UpstreamLink:
    """``BoardLink`` of an upstream. Use from one event loop.

    ``name`` is that of its group and of its board, ``key`` its address in the fleet.
    """

    complete = True

    def __init__(
        self,
        name: str,
        model: str,
        config: UpstreamConfig,
        calls: Mapping[str, AnyCall],
        metrics: UpstreamMetrics,
        *,
        secret: str | None = None,
        places: int | None = None,
        queue_limit: int = 0,
        alone: bool = True,
        desired: Callable[[], Desired] = Desired,
        transport: httpx.AsyncBaseTransport | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """``calls`` has the calls in flight by the IDs of their answers. ``secret`` is its key,
        ``queue_limit`` the requests that may wait for it, ``places`` the Router's share of those at
        once, and
        ``alone`` whether the model has no boards. ``transport`` replaces the network.
        """
        self.name, self.model, self.config, self.alone = name, model, config, alone
        self.key = key_of(name)
        self._calls, self._desired = calls, desired
        self._figures = metrics.of(name, model)
        self._rng = rng or random.Random()
        self._timeouts = httpx.Timeout(WRITE_S, connect=config.connect_timeout_s, read=None)
        self._client = httpx.AsyncClient(
            headers={"user-agent": "rkserve", **({} if not secret else _authorization(secret))},
            timeout=self._timeouts,
            transport=transport,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )
        self._running: dict[str, _Work] = {}
        self._report = BoardReport(
            board_id=name,
            model=model,
            state=BoardState.LOADING,
            reason="its health is not known yet",
            platform=UPSTREAM,
            release=config.model or model,
            library=config.url,
            replica=self.key,
            context_len=config.context_length,
            n_batch=config.concurrency if places is None else places,
            queue_limit=queue_limit,
        )
        self._rests_until_s = 0.0  # as it asked for by a Retry-After
        self._ended_s = time.monotonic()
        self._looked = asyncio.Event()
        self._health: asyncio.Task[None] | None = None

    # -- generations --------------------------------------------------------------------------

    async def open(
        self,
        request: GenerateRequest,
        replica: str,
        take: TakeDelta | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Generate; see ``BoardLink``."""
        del replica  # there is one
        self._check()
        work = self._begin(request)
        self._figures.in_flight.inc()
        outcome = "left"
        try:
            async with contextlib.aclosing(self._attempts(work)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        self._ended(event)
                        outcome = "aborted" if work.aborted else "answered"
                    if not (isinstance(event, UpstreamDelta) and take is not None and take(event)):
                        yield event
        except RkserveError as exc:
            outcome = "failed" if isinstance(exc, BoardFailed) else "refused"
            raise
        finally:
            self._left(request, outcome)
            # Last: its reader may be cancelled meanwhile.
            if work.exchange is not None:
                await work.exchange.aclose()

    def _left(self, request: GenerateRequest, outcome: str) -> None:
        """Count a request that has ended."""
        del self._running[request.request_id]
        self._figures.in_flight.dec()
        self._figures.ended(outcome)
        report, self._ended_s = self._report, time.monotonic()
        self._report = replace(
            report,
            requests=report.requests + 1,
            aborted=report.aborted + (outcome in ("aborted", "left")),
            failed=report.failed + (outcome == "failed"),
        )

    def _check(self) -> None:
        """Raise if the upstream is paused, or has asked to be left alone."""
        hold = self._desired().target(self.name, self.model).hold
        if hold is not None and hold.mode is not PauseMode.KEEP:
            raise EnginePaused(f"the upstream {self.name}")
        left_s = self._rests_until_s - time.monotonic()
        if left_s > 0:
            raise QueueFull(0, max(1, round(left_s)))

    def _begin(self, request: GenerateRequest) -> _Work:
        completion, _, index = request.request_id.rpartition("/")
        call = self._calls.get(completion)
        if call is None:
            raise UpstreamFailed(self.name, "the call has ended")
        counted = len(request.prompt_ids) or request.counted
        counted = counted or len(request.prompt_text or "") // CHARS_OF_A_TOKEN
        answer = UpstreamAnswer(call.stop, counted)
        work = _Work(request, call, int(index), time.monotonic(), answer)
        self._running[request.request_id] = work
        return work

    async def _attempts(self, work: _Work) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer, of whichever attempt has its first token."""
        for attempt in range(self.config.retries + 1):
            try:
                async with contextlib.aclosing(self._attempt(work)) as events:
                    async for event in events:
                        yield event
            except UpstreamFailed as exc:
                done = work.answer.begun or work.aborted or attempt == self.config.retries
                if done or not exc.again:
                    raise
                log.info("%s is sent again: %s", work.request.request_id, exc)
                self._figures.retried.inc()
                most_s = RETRY_S * 2**attempt
                await asyncio.sleep(self._rng.uniform(most_s / 2, most_s))
            else:
                return

    async def _attempt(self, work: _Work) -> AsyncGenerator[Event, None]:
        config = self.config
        path, body = body_of(work.call, work.index, config, config.model or self.model)
        if work.exchange is not None:
            await work.exchange.aclose()
        work.exchange = exchange = Exchange(
            self._client, self.name, f"{config.url}{path}", body, slow_s=ACCEPT_S
        )
        if work.aborted:
            exchange.abort()
        while True:
            begun = work.answer.begun
            limit_s = config.token_timeout_s if begun else config.first_token_timeout_s
            item = await exchange.next(limit_s)
            if isinstance(item, RkserveError):
                self._rest(item)
                raise item
            for event in self._events(work, item):
                yield event
                if isinstance(event, Finished):
                    return

    def _events(self, work: _Work, item: bytes | Signal) -> list[Event]:
        """Return the events of an item. Raises ``UpstreamFailed``: it is no part of an answer."""
        found: list[Event] = []
        if not work.accepted:
            work.accepted = True
            found.append(self._accepted())
        if item is Signal.ABORTED:
            return [*found, work.answer.finished(work.times(time.monotonic()), FinishReason.ABORT)]
        if item is Signal.END:
            return [*found, *self._end(work)]
        if isinstance(item, bytes) and item != b"[DONE]":
            try:
                delta = work.answer.event(item)
            except NoAnswer as exc:
                raise UpstreamFailed(self.name, f"its answer is broken off: {exc}") from exc
            if delta is not None:
                found.append(self._counted(work, delta))
        return found

    def _accepted(self) -> Accepted:
        return Accepted(
            self.name,
            self._report.release,
            0,
            version=self._report.release,
            epoch=self._desired().epoch,
        )

    def _counted(self, work: _Work, delta: UpstreamDelta) -> UpstreamDelta:
        if work.first_s is None:
            work.first_s = time.monotonic()
            self._figures.ttft.observe(work.first_s - work.began_s)
        work.tokens += delta.counted
        work.text.append(delta.text)
        return delta

    def _end(self, work: _Work) -> list[Event]:
        if not work.answer.ended:
            raise UpstreamFailed(self.name, "its answer has no end", again=True)
        rest = work.answer.rest()
        if rest is not None:
            work.tokens += rest.counted
        finished = work.answer.finished(work.times(time.monotonic()))
        return [finished] if rest is None else [rest, finished]

    def _rest(self, exc: RkserveError) -> None:
        """Leave the upstream alone for the time that it asks for."""
        if isinstance(exc, QueueFull):
            self._rests_until_s = time.monotonic() + (exc.retry_after_s or 1)

    # -- figures ------------------------------------------------------------------------------

    def _ended(self, end: Finished) -> None:
        usage, times, report = end.usage, end.timings, self._report
        self._figures.tokens(usage.prompt_tokens, usage.completion_tokens)
        self._report = replace(
            report,
            prompt_tokens=report.prompt_tokens + usage.prompt_tokens,
            cached_tokens=report.cached_tokens + usage.cached_tokens,
            completion_tokens=report.completion_tokens + usage.completion_tokens,
            prefill_tokens=report.prefill_tokens + times.prefill_tokens,
            prefill_ms=report.prefill_ms + times.prefill_ms,
            decode_tokens=report.decode_tokens + times.decode_tokens,
            decode_ms=report.decode_ms + times.decode_ms,
        )

    async def reports(self) -> list[BoardReport]:
        """Return the report of this Router; the upstream itself is asked at its own interval."""
        if self._health is None:
            loop = asyncio.get_running_loop()
            self._health = loop.create_task(self._follow(), name=f"health of {self.name}")
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):  # two before 3.11
                await asyncio.wait_for(self._looked.wait(), FIRST_LOOK_S)
        return [self._now()]

    def _now(self) -> BoardReport:
        """Return the report of now."""
        report, now_s = self._report, time.monotonic()
        rests_s = self._rests_until_s - now_s
        if report.state is BoardState.READY and rests_s > 0:
            # Without boards it is asked all the same, for the client to learn when to return.
            state = BoardState.RECOVERING if self.alone else BoardState.FAILED
            why = f"it asked to be left alone for {rests_s:.0f} s more (429)"
            report = replace(report, state=state, reason=why)
        epoch, running = self._desired().epoch, len(self._running)
        idle_s = 0.0 if running else now_s - self._ended_s
        hold = self._desired().target(self.name, self.model).hold
        return replace(
            report,
            running=running,
            idle_s=idle_s,
            epoch=epoch,
            hold="" if hold is None else hold.mode.value,
        )

    async def _follow(self) -> None:
        """Ask for the upstream's health forever."""
        while True:
            reason = await self._why_ill()
            before = self._report.state
            state = BoardState.READY if not reason else BoardState.FAILED
            self._report = replace(self._report, state=state, reason=reason)
            self._figures.up.set(not reason)
            if state is not before:
                level = logging.WARNING if reason else logging.INFO
                log.log(
                    level, "upstream %s is %s%s", self.name, state.value, reason and f": {reason}"
                )
            self._looked.set()
            await asyncio.sleep(self.config.health_period_s)

    async def _why_ill(self) -> str:
        """Return why the upstream is not well; empty if it is."""
        url, limit_s = f"{self.config.url}{self.config.health_path}", self.config.connect_timeout_s
        try:
            response = await self._client.get(url, timeout=httpx.Timeout(limit_s))
        except httpx.HTTPError as exc:
            return f"it cannot be reached for its health ({type(exc).__name__})"
        except Exception as exc:
            log.exception("the health of upstream %s could not be asked for", self.name)
            return f"its health could not be asked for ({type(exc).__name__})"
        if not response.is_success:
            return f"it answers {response.status_code} when asked for its health"
        self._learn(response.content)
        return ""

    def _learn(self, body: bytes) -> None:
        """Note the length of the context, if a list of models tells it."""
        listed = _models(body)
        entry = listed.get(self.config.model or self.model, {})
        length = entry.get("max_model_len")
        if type(length) is int and length > 0:
            self._report = replace(self._report, context_len=length)

    def has_new(self) -> bool:
        """Return False: it does not come and go."""
        return False

    async def has_running(self) -> bool:
        """Return True: nothing is started for it."""
        return True

    async def start_failure(self) -> BoardStartFailed | None:
        """Return None: nothing is started for it."""
        return None

    # -- control ------------------------------------------------------------------------------

    def cache_source(self, replica: str, tokens: int) -> CacheSource | None:
        """Return None: it has no cache files for boards."""
        del replica, tokens
        return None

    async def ask(
        self,
        replica: str,
        method: str,
        *args: Any,
        timeout_s: float,
    ) -> Any:
        """Answer a call on the board; see ``BoardLink``.

        Raises ``UpstreamUnable``: only a board could do that.
        """
        del replica, timeout_s  # there is one replica, and nothing is waited for
        answer = self._answers.get(method)
        if answer is None:
            raise UpstreamUnable(self.name, _WORDS.get(method, method))
        return answer(self, *args)

    async def ask_all(
        self, method: str, *args: Any, timeout_s: float, take: Callable[[Any], None]
    ) -> None:
        """Answer a call on the group; see ``BoardLink``."""
        with contextlib.suppress(UpstreamUnable):
            take(await self.ask(self.key, method, *args, timeout_s=timeout_s))

    def _emitted(self) -> Emitted:
        # Streams are not awaited in a pause: an upstream goes on with its generations.
        return Emitted(self.name, tuple((request_id, 0) for request_id in self._running))

    def _forgiven(self) -> None:
        """Do nothing: it counts no failures that another one would be to blame for."""

    def infos(self) -> list[GenerationInfo]:
        """Return the generations here, of this Router."""
        return [self._info(work) for work in self._running.values()]

    def _control(
        self, generation: str, action: ControlAction, _edit: object, choice: int | None
    ) -> list[GenerationInfo]:
        """Abort a generation's choices here. Raises ``UpstreamUnable`` for all else."""
        found = self.stop(generation, action, choice)
        if not found:
            raise GenerationNotFound(generation)
        if action is not ControlAction.ABORT:
            raise UpstreamUnable(self.name, f"{action.value} a generation")
        return found

    def stop(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> list[GenerationInfo]:
        """Abort a generation's choices here if ``action`` is that, and return their states."""
        meant = [work for one, work in self._running.items() if _is_of(one, generation, choice)]
        if action is ControlAction.ABORT:
            for work in meant:
                work.abort()
        return [self._info(work) for work in meant]

    def cut(self, request_id: str) -> bool:
        """Abort a generation here; return False if it is not here."""
        work = self._running.get(request_id)
        if work is not None:
            work.abort()
        return work is not None

    def _info(self, work: _Work) -> GenerationInfo:
        state = GenerationState.GENERATING if work.answer.begun else GenerationState.PREFILLING
        prompt = work.answer.usage().prompt_tokens
        return GenerationInfo(
            request_id=work.request.request_id,
            board_id=self.name,
            model=self.model,
            state=GenerationState.ABORTING if work.aborted else state,
            prompt_tokens=prompt,
            tokens=work.tokens,
            context_tokens=prompt + work.tokens,
            partial_output="".join(work.text),
            age_s=time.monotonic() - work.began_s,
        )

    _answers: Mapping[str, Callable[..., Any]] = {
        "emitted": _emitted,
        "forgive": _forgiven,
        "generations": infos,
        "control": _control,
    }

    async def aclose(self) -> None:
        """Close all connections."""
        if self._health is not None:
            self._health.cancel()
            await asyncio.gather(self._health, return_exceptions=True)
        await self._client.aclose()


def key_of(name: str) -> str:
    """Return the address of an upstream in the fleet, in the place of a replica's ID."""
    return f"upstream-{name}"


def _authorization(secret: str) -> dict[str, str]:
    return {"authorization": f"{_BEARER} {secret}"}


def _models(body: bytes) -> dict[str, dict[str, Any]]:
    """Return the entries of a list of models by name, as far as it is one."""
    if len(body) > MAX_HEALTH_BYTES:
        return {}
    try:
        found = from_json(body)
    except ValueError:
        return {}
    listed = found.get("data") if isinstance(found, dict) else None
    entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return {one["id"]: one for one in entries if isinstance(one.get("id"), str)}


def _is_of(request_id: str, generation: str, choice: int | None) -> bool:
    completion, _, index = request_id.rpartition("/")
    return completion == generation and choice in (None, int(index))
