"""The calls of the generation routes, without HTTP and Ray: parse, plan, generate, answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from rkserve.api.common.answer import AnswerOrigin, AnyCall, Dialect, DialectAnswer
from rkserve.api.common.calls import ChatCall, CompletionCall, named_answer
from rkserve.api.common.logprobs import TokenTexts
from rkserve.api.common.output import answer_headers, tool_headers
from rkserve.api.common.plan import held, plan, prompt_texts, reading
from rkserve.api.common.version_policy import ANY, ResolvedModel, VersionPolicy
from rkserve.api.json.fields import MAX_SESSION_CHARS, JsonObject, quoted
from rkserve.api.openai.models import board_entry, boards_list
from rkserve.api.parsing.answer_parser import ParserOptions
from rkserve.api.parsing.tool_choice import NO_TOOLS
from rkserve.api.prompting.conversation import Message, images_of
from rkserve.api.upstream.requests import generations
from rkserve.config.router import RouterConfig
from rkserve.core.board_report import BoardReport
from rkserve.core.errors import (
    BoardAsleep,
    BoardNotFound,
    BoardTimeExceeded,
    DeadlineExceeded,
    EnginePaused,
    NoBoard,
    RateLimited,
    RequestError,
    RkserveError,
)
from rkserve.core.messages import (
    FIRST_LABEL,
    Accepted,
    Delta,
    Event,
    Finished,
    GenerateRequest,
    Paused,
)
from rkserve.core.metrics import RouterMetrics
from rkserve.core.request_record import RequestRecord, Tracing, record_of_request
from rkserve.core.run_params import Picture
from rkserve.router.auth.callers import Caller, Callers, queue_terms
from rkserve.router.auth.key_ring import KeyRing, open_keys
from rkserve.router.coordinator_client import CoordinatorClient, WakeOnRequest
from rkserve.router.dispatch.dispatch import Dispatch
from rkserve.router.idempotency.answers import KeyedAnswers
from rkserve.router.images import ImageInputs, fetch_of
from rkserve.router.off_loop import INLINE_BODY_BYTES, GrammarChecker, off_loop
from rkserve.router.queue.admission import QueueTerms
from rkserve.router.request_log import AnswerMeter, RequestLog, is_fault, noted
from rkserve.router.served_models import ServedModel, ServedModels
from rkserve.router.stored_responses import CallMemory
from rkserve.router.streams import Choices, ChunkWriter, OpenStreams
from rkserve.router.upstreams.upstreams import Upstreams

log = logging.getLogger(__name__)

CallT = TypeVar("CallT")
PartT = TypeVar("PartT")


async def read_call(body: bytes, parse: Callable[[bytes], CallT]) -> CallT:
    """Return what a body asks for. Raises ``RequestError``."""
    if len(body) <= INLINE_BODY_BYTES:
        return parse(body)
    return await off_loop(len(body), partial(parse, body))


@dataclass
class Opened:
    """A call that boards have accepted, to be streamed or collected."""

    call: AnyCall
    dialect: Dialect
    answer: DialectAnswer
    choices: Choices
    accepted: list[Accepted]
    requests: list[GenerateRequest]
    caller: Caller
    meter: AnswerMeter
    memory: CallMemory | None = None
    closed: bool = False
    # Called with the answer, or the end of its stream, when it is complete and before it is counted
    # as given.
    completed: Callable[[Any], Awaitable[None]] | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Response headers with the boards, and the weights as far as known."""
        headers = answer_headers(self.accepted, self.answer.versions)
        return {**headers, **tool_headers(self.call.left_out)}

    async def keep(self, failure: BaseException | None = None) -> None:
        """Store the answer for later calls that may refer to it."""
        if self.memory is not None:
            await self.memory.keep(self.answer, failure)

    def keep_later(self) -> None:
        """Store the part of an answer whose client has left, in the background."""
        if self.memory is not None:
            self.memory.left(self.answer)


class Service:
    """One Router. Use from one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        models: Mapping[str, ServedModel],
        dispatch: Dispatch,
        cluster: CoordinatorClient,
        metrics: RouterMetrics,
        *,
        tracing: Tracing | None = None,
        keyed: KeyedAnswers | None = None,
        keys: KeyRing | None = None,
        upstreams: Upstreams | None = None,
    ) -> None:
        """``keyed`` are the answers to requests with an ``Idempotency-Key``, ``keys`` the keys in
        force, without them those of the configuration. ``upstreams`` serve beside the boards.

        Raises ``ConfigError``: a key file cannot be used.
        """
        self.config = config
        self.keyed = keyed
        self.log = RequestLog(tracing)
        self.keys = keys or KeyRing(open_keys(config))
        self.callers = Callers(self.keys.configured, metrics, config.metrics.keys)
        self.fleet = fleet = dispatch.fleet
        self.dispatch = dispatch
        self.cluster = cluster
        self.flows = OpenStreams(fleet)
        self.guiding = GrammarChecker(
            config.grammar_processes,
            config.grammars_waiting_per_key,
            keys=not self.keys.anonymous,
        )
        self._sight = ImageInputs(config.images, fetch_of(config.images))
        self.waking = WakeOnRequest(cluster, fleet, config.control_timeout_s)
        self.models = ServedModels(models, cluster, fleet)
        self.keys.changed.append(self._keys_changed)
        self.unassigned = dispatch.unassigned
        self.upstreams = upstreams or Upstreams()
        self.unassigned.cut = self.upstreams.cut
        self._named: set[str] = set()  # ids of answers to requests that clients have named
        self.metrics = metrics
        self.registry = metrics.registry
        for name, served in models.items():
            metrics.expect(name, embeds=served.folder.settings.embedding is not None)

    def _keys_changed(self, ids: frozenset[str]) -> None:
        self.callers.keep(ids)
        self.guiding.share(among_keys=not self.keys.anonymous)

    # -- models -------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """The number of calls in flight at this Router."""
        return int(self.registry.get_sample_value("rkserve_requests_in_flight") or 0)

    def boards(self) -> JsonObject:
        """Return the latest reports of all boards."""
        return boards_list((report, self._circuit(report)) for report in self.fleet.reports())

    def board(self, board_id: str) -> JsonObject:
        """Return the latest report of one board. Raises ``BoardNotFound``."""
        for report in self.fleet.reports():
            if report.board_id == board_id:
                return board_entry(report, self._circuit(report))
        raise BoardNotFound(board_id)

    def _circuit(self, report: BoardReport) -> tuple[str, str]:
        state, reason = self.dispatch.circuit(report.replica)
        return state.value, reason

    # -- calls --------------------------------------------------------------------------------

    async def open(
        self,
        body: bytes,
        dialect: Dialect,
        policy: VersionPolicy = ANY,
        session: str | None = None,
        *,
        caller: Caller | None = None,
        timeout_s: float | None = None,
        memory: CallMemory | None = None,
    ) -> Opened:
        """Read a call and have boards accept it. Raises ``RkserveError``; then nothing runs.

        ``session`` and ``timeout_s`` are from the call's headers. ``memory`` loads earlier answers
        that the call refers to, and stores its own.
        """
        started_s = time.monotonic()
        caller = caller or self.callers.anybody
        record = self.admit(caller)
        completion, model = "", ""
        try:
            call = await read_call(body, dialect.parse)
            if memory is not None:
                call = await memory.recall(call)
            asked = call
            call = replace(call, model=call.model or self.models.only, salt=caller.salt(call.salt))
            terms = queue_terms(
                caller,
                self.config,
                started_s,
                priority=call.priority,
                timeouts_s=(timeout_s, call.timeout_s),
            )
            meant = await self.models.resolve(call.model, policy)
            served = self.models.by_name[model := meant.model]
            unsuited = self.upstreams.unsuited(model, asked, policy)
            terms = replace(terms, unsuited=unsuited)
            if not served.remote:
                call = held(call, served.renderer)
                await self._check_grammar(call, caller, record)
            completion = noted(record, call, meant, self._name(dialect, call))
            self.upstreams.enter(completion, model, replace(asked, salt=call.salt))
            session = (session or call.session or completion)[:MAX_SESSION_CHARS]
            work = await self._work(call, meant, served, completion, session)
            if len(body) <= INLINE_BODY_BYTES and (memory is None or not memory.recalled):
                requests = work()
            else:
                requests = await off_loop(max(len(body), INLINE_BODY_BYTES + 1), work)
            lexicon = await _lexicon(call, served, requests)
            choices, accepted = await self._woken(meant.model, requests, terms)
        except BaseException as exc:
            self._rejected(completion, caller, model, exc)
            raise
        tokens = sum(len(one.prompt_ids) or one.counted for one in requests)
        caller.spend(record.prompted(tokens // call.tries))
        # Sampling values that the board ignored are defaults.
        ignored = {name: getattr(served.sampling, name) for name in accepted[0].sampling_ignored}
        origin = AnswerOrigin(
            meant.model,
            accepted[0].release,
            tuple(one.version or FIRST_LABEL for one in accepted),
            self._key_of(meant),
            len(requests[0].prompt_ids) or requests[0].counted,
            self._reading(call, served, requests[0]),
            lexicon=lexicon,
            ends=_ends(call, served),
            sampling=replace(requests[0].sampling, **ignored),
        )
        answer = dialect.answer(call, completion, int(time.time()), origin)
        target_s = self.config.objectives.ttft_s
        meter = AnswerMeter(self.metrics, requests, started_s, target_s, record)
        return Opened(call, dialect, answer, choices, accepted, requests, caller, meter, memory)

    async def _work(
        self,
        call: AnyCall,
        meant: ResolvedModel,
        served: ServedModel,
        completion: str,
        session: str,
    ) -> Callable[[], list[GenerateRequest]]:
        """Return the function that makes the generations of a call, and may take a while."""
        settings = served.folder.settings
        length = settings.context_length
        if served.remote:
            return partial(
                generations, call, meant.model, completion, context_len=length, session=session
            )
        pictures: tuple[Picture, ...] = ()
        if isinstance(call, ChatCall) and call.images:
            pictures = await self._sight.pictures(call.images, settings.vision)
        return partial(
            plan,
            call,
            meant,
            served.renderer,
            defaults=served.sampling,
            context_len=length,
            completion=completion,
            session=session,
            dice=secrets.randbits(63),
            pictures=pictures,
        )

    def _reading(
        self, call: AnyCall, served: ServedModel, request: GenerateRequest
    ) -> ParserOptions:
        """Return the options of the parser of a call's answers."""
        if served.remote:
            tools = call.tools if isinstance(call, ChatCall) else NO_TOOLS
            return ParserOptions(upstream=True, most_calls=tools.most_calls)
        found = reading(call, served.renderer, request)
        return replace(found, upstream=True) if self.upstreams.serve(request.model) else found

    def _rejected(self, completion: str, caller: Caller, model: str, exc: BaseException) -> None:
        """End a call that no board has accepted; ``model`` is empty if it was not found."""
        self._named.discard(completion)
        self.upstreams.leave(completion)
        caller.leave()
        if model and is_fault(exc):
            self.metrics.judged.labels(model, "failed").inc()

    async def _check_grammar(self, call: AnyCall, caller: Caller, record: RequestRecord) -> None:
        """Check the grammar of a call, if any. Raises ``RequestError``, ``RateLimited``."""
        if call.steps.guide is not None:
            param, guide = call.steps.guide
            with self._counts_rejections(), record.checks_grammar():
                await self.guiding.check(guide, param, caller.owner)

    def admit(self, caller: Caller) -> RequestRecord:
        """Admit a call of the caller until ``caller.leave``, and return the request's record.

        Raises ``RateLimited``, counted.
        """
        record = record_of_request()
        record.key = caller.name
        with self._counts_rejections():
            caller.enter()
        return record

    @contextmanager
    def _counts_rejections(self) -> Iterator[None]:
        try:
            yield
        except RateLimited:
            self.metrics.rate_limited.inc()
            raise

    def _name(self, dialect: Dialect, call: AnyCall) -> str:
        """Return the ID of the answer to a call. Raises ``RequestError`` if it is in use."""
        if call.request_id is None:
            return f"{dialect.prefix}{uuid.uuid4().hex}"
        name = named_answer(call.request_id)
        if name in self._named:
            raise RequestError(
                f"Invalid 'request_id': a request of the id {quoted(call.request_id)} is in flight."
            )
        self._named.add(name)
        return name

    async def _woken(
        self, model: str, requests: list[GenerateRequest], terms: QueueTerms
    ) -> tuple[Choices, list[Accepted]]:
        """Have boards accept the requests of a call, waking a sleeping model."""
        # Only a valid request wakes the model.
        epoch = await self.waking.ready(model) if self.cluster.desired.pauses else 0
        try:
            return await self._accepted(requests, epoch, terms)
        except (EnginePaused, NoBoard, BoardAsleep):
            # The model may have gone to sleep a moment ago; the request wakes it.
            if not self.waking.needed(model):
                raise
        epoch = await self.waking.ready(model)
        return await self._accepted(requests, epoch, terms)

    async def _accepted(
        self, requests: list[GenerateRequest], epoch: int, terms: QueueTerms
    ) -> tuple[Choices, list[Accepted]]:
        """Have boards accept all requests of a call, or none; boards older than ``epoch`` wait."""
        if epoch:
            requests = [replace(one, min_epoch=max(one.min_epoch, epoch)) for one in requests]
        used: dict[str, float] = {}

        def use(request_id: str, seconds: float) -> None:
            terms.use(request_id, seconds)
            self.metrics.board_seconds.labels(requests[0].model).inc(seconds)
            before, limit_s = used.get(request_id, 0.0), self.config.max_board_s
            used[request_id] = before + seconds
            if limit_s is not None and before < limit_s <= used[request_id]:
                choices.fail(BoardTimeExceeded(limit_s))

        metered = replace(terms, use=use)

        def generate(
            request: GenerateRequest, deliver: Callable[[Event], None]
        ) -> AsyncGenerator[Event, None]:
            return self.dispatch.generate(request, metered, deliver)

        choices = Choices(generate, requests)
        if terms.deadline_s is not None:
            # The queue may reject it earlier; at the deadline it is stopped in any case.
            choices.fail_at(terms.deadline_s, DeadlineExceeded(terms.timeout_s))
        try:
            queues = self.dispatch.queues
            waits = [partial(queues.waits, one.request_id) for one in requests]
            with self.metrics.adapters.waits(requests[0].adapter_name):
                return choices, await choices.accepted(lambda index: waits[index]())
        except BaseException:
            await choices.aclose()
            raise

    async def close(self, opened: Opened) -> None:
        """End a call, finished or not, and free its boards; idempotent."""
        if opened.closed:
            return
        opened.closed = True
        self._named.discard(opened.answer.id)
        self.upstreams.leave(opened.answer.id)
        opened.meter.close()
        opened.caller.spend(completion=opened.meter.tokens)
        opened.caller.leave()
        await opened.choices.aclose()

    async def whole(self, opened: Opened) -> JsonObject:
        """Return the whole answer. Raises ``RkserveError``. Closes the call."""
        answer, meter = opened.answer, opened.meter

        def add(index: int, delta: Delta) -> bool:
            meter.delta(index, delta)
            answer.add(index, delta)
            return True

        opened.choices.at_once = add
        try:
            while (item := await opened.choices.next()) is not None:
                index, event = item
                if isinstance(event, Delta):
                    add(index, event)
                elif isinstance(event, Paused):
                    meter.paused(index)
                else:
                    meter.finished(event)
                    answer.end(index, event)
            meter.done(answer.usage())
            await opened.keep()
            return await self._completed(opened, answer.whole())
        except BaseException as exc:
            opened.meter.broken(exc)
            raise
        finally:
            await self.close(opened)

    async def stream(
        self, opened: Opened, writer: ChunkWriter | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answer in chunks of its dialect. Closes the call.

        After the headers, an error is sent as the last event of the stream. Chunks of deltas are
        written to ``writer`` instead, in order with the yielded ones, where it is ready.
        """
        answer = opened.answer
        opened.choices.at_once = partial(self._write, opened, writer)
        for request in opened.requests:
            self.flows.enter(request)
        choices = opened.choices
        held = b"".join(answer.opening(index) for index in range(opened.call.choices))
        try:
            while not choices.over:
                if held and not choices.pending:
                    yield held
                    held = b""
                try:
                    events = await choices.batch(self.config.ping_s)
                except TimeoutError:
                    yield opened.dialect.ping(opened.call)
                    continue
                # All pending events are sent in one chunk, the last ones with the end.
                held += b"".join([self._chunk(opened, *item) for item in events])
                if held and not choices.over:
                    yield held
                    held = b""
                # The generator resumes only after the chunk was sent.
                for index, event in events:
                    self.flows.sent(opened.requests[index].request_id, event)
            opened.meter.done(answer.usage())
            # Before the client sees the end, because its next call may refer to this answer.
            await opened.keep()
            yield _last(await self._completed(opened, held + answer.closing()), writer)
        except Exception as exc:
            opened.meter.broken(exc)
            if not isinstance(exc, RkserveError):
                log.exception("an answer failed in a way that it should not")
            await opened.keep(exc)
            yield _last(held + answer.broken(exc), writer)
        except BaseException as exc:
            opened.meter.broken(exc)
            opened.keep_later()
            raise
        finally:
            self.flows.leave(request.request_id for request in opened.requests)
            await self.close(opened)

    async def _completed(self, opened: Opened, last: PartT) -> PartT:
        if opened.completed is not None:
            await opened.completed(last)
        return last

    def _write(self, opened: Opened, writer: ChunkWriter | None, index: int, delta: Delta) -> bool:
        """Write the chunk of a delta; return False if the client is not ready for it."""
        if writer is None or not writer.ready:
            return False
        sent = partial(self.flows.sent, opened.requests[index].request_id, delta)
        if chunk := self._chunk(opened, index, delta):
            writer.write(chunk, sent)
        else:
            sent()
        return True

    def _chunk(self, opened: Opened, index: int, event: Delta | Paused | Finished) -> bytes:
        if isinstance(event, Delta):
            opened.meter.delta(index, event)
            return opened.answer.delta(index, event)
        if isinstance(event, Paused):
            opened.meter.paused(index)
            return opened.answer.paused(index, event)
        opened.meter.finished(event)
        return opened.answer.finish(index, event)

    def _key_of(self, meant: ResolvedModel) -> Callable[[str], str | None]:
        """Return a lookup of versions' content keys.

        It remembers what it found, because a version may be retired while an answer uses it.
        """
        found = {} if meant.adapter is None else {meant.adapter.label: meant.adapter.key}

        def key_of(version: str) -> str | None:
            if version not in found:
                lines = (one for one in self.cluster.desired.lines if one.model == meant.model)
                refs = (one.ref for line in lines for one in line.versions)
                found.update((ref.label, ref.key) for ref in refs if ref.label == version)
            return found.get(version)

        return key_of

    def check_images(self, messages: Sequence[Message], model: str) -> None:
        """Check the number of images of a conversation, without decoding them.

        Raises:
            RequestError: the model takes no images, or there are too many.
        """
        if images := images_of(messages):
            self._sight.check(images, self.models.by_name[model].folder.settings.vision)


def _last(chunk: bytes, writer: ChunkWriter | None) -> bytes:
    if writer is not None:
        writer.last = True
    return chunk


async def _lexicon(
    call: AnyCall, served: ServedModel, requests: list[GenerateRequest]
) -> TokenTexts | None:
    """Return the token strings for log-probabilities and echoes, if the answer needs them.

    Raises ``RequestError`` if the vocabulary is unknown, before any board gets the request.
    """
    raw = call if isinstance(call, CompletionCall) else None
    echo, ranked = raw is not None and raw.echo, raw is not None and raw.ranked
    scored = call.steps.top_logprobs is not None or (raw is not None and raw.prompt_top is not None)
    if not any((scored, echo, ranked, call.token_ids, call.special_tokens)):
        return None
    texts = prompt_texts(call)
    vocabulary = None
    if scored or call.special_tokens or (echo and None in texts):
        param = "skip_special_tokens" if call.special_tokens else "logprobs"
        vocabulary = await asyncio.to_thread(served.renderer.vocabulary, param)
    # Trainers pair ids and log-probabilities, so that none may be missing beside ids.
    # Programs that measure likelihoods count an echo's log-probabilities from its end.
    seen = call.token_ids or call.tokens_as_ids or call.special_tokens or echo
    return TokenTexts(
        vocabulary,
        tuple(one.prompt_ids for one in requests),
        texts,
        hidden=frozenset() if seen else _ends(call, served),
        as_ids=call.tokens_as_ids,
    )


def _ends(call: AnyCall, served: ServedModel) -> frozenset[int]:
    """Return the ids that end an answer and are not part of its text."""
    eos_ids = served.folder.settings.eos_token_ids
    return frozenset((*eos_ids, *(() if call.include_stop else call.stop_ids)))
