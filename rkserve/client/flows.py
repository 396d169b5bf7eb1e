"""Call flows as generators without I/O: retries, waiting for operations, uploads.

Both clients drive these generators. A flow yields steps: a ``Request`` (the client sends back the
response, or throws in the exception that httpx raised), a ``Delay`` or a ``BlockingCall``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import httpx

from rkserve.client import answers, calls
from rkserve.client.answers import Operation, Pushed
from rkserve.client.calls import Request, RolloutParams
from rkserve.client.errors import UnexpectedAnswer, Unreachable, WaitTimeout
from rkserve.client.upload import Upload

T = TypeVar("T")
POLL_S = (0.05, 1.0)  # the first pause between looks at an operation, and the longest
RETRY_S = (0.2, 3.0)
PROXY_ERRORS = frozenset({500, 502, 503, 504})
# Whether the request arrived is not known for some of these; its key makes a repeat harmless.
LOST = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.ReadError,
    httpx.WriteError,
    httpx.CloseError,
    httpx.RemoteProtocolError,
)


@dataclass(frozen=True, slots=True)
class Delay:
    """Do nothing for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class BlockingCall:
    """Something that blocks, and is no call."""

    do: Callable[[], Any]


Flow: TypeAlias = Generator["Request | Delay | BlockingCall", Any, T]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a call is tried again, by which clock (seconds that only grow)."""

    seconds: float
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far long work is. ``step`` is ``upload`` (bytes) or an operation's kind (boards).

    ``phase`` is what the operation is at, and ``operation`` all that is known of it.
    """

    step: str
    done: int
    total: int
    phase: str = ""
    operation: Operation | None = None


OnProgress: TypeAlias = Callable[[Progress], None]


def exchange(request: Request, patience: RetryPolicy) -> Flow[httpx.Response]:
    """Send a request, again where nobody can say that it arrived, or the Coordinator is away.

    Raises:
        Unreachable: nobody answered as long as patience lasted, or the answer took too long.
        UnexpectedAnswer: what came cannot be decoded.
    """
    began, delay = patience.clock(), RETRY_S[0]
    while True:
        wait_s = delay
        try:
            response: httpx.Response = yield request
        except LOST as exc:
            if patience.clock() - began + wait_s > patience.seconds:
                raise Unreachable(why(request, exc)) from exc
        except httpx.DecodingError as exc:
            raise UnexpectedAnswer(why(request, exc)) from exc
        except httpx.RequestError as exc:
            raise Unreachable(why(request, exc)) from exc
        else:
            wait_s = max(delay, answers.retry_after_s(response) or 0.0)
            over = patience.clock() - began + wait_s > patience.seconds
            if over or not _will_pass(response):
                return response
        yield Delay(wait_s)
        delay = min(2 * delay, RETRY_S[1])


def once(patience: RetryPolicy) -> RetryPolicy:
    """Return the patience for a call that must not be sent twice."""
    return replace(patience, seconds=0.0)


def _will_pass(response: httpx.Response) -> bool:
    """Whether the same call is likely to be answered in a moment."""
    ours, code = answers.error_code(response)
    if ours:
        return code == "coordinator_unavailable"
    # Serve's proxy answers in its own words while a Router is being replaced.
    return response.status_code in PROXY_ERRORS


def why(request: Request, exc: httpx.RequestError) -> str:
    """Return the call and what became of it."""
    what = str(exc) or type(exc).__name__
    if isinstance(exc, httpx.TimeoutException) and not isinstance(exc, httpx.ConnectTimeout):
        what = "no answer came in time"
    return f"{request.method} {request.path}: {what}"


def ask(request: Request, patience: RetryPolicy, read: Callable[[dict[str, Any]], T]) -> Flow[T]:
    """Return what an answer says."""
    response = yield from exchange(request, patience)
    return read(answers.json_of(response))


def perform(request: Request, patience: RetryPolicy) -> Flow[Operation]:
    """Change something, and return the operation that it became, which may go on."""
    response = yield from exchange(request, patience)
    return answers.settled(answers.operation_of(response))


def follow(
    operation_id: str,
    patience: RetryPolicy,
    *,
    timeout_s: float | None = None,
    told: OnProgress | None = None,
) -> Flow[Operation]:
    """Return an operation when it is over, however it ended.

    Raises:
        WaitTimeout: it is not over after ``timeout_s`` seconds.
    """
    began, delay = patience.clock(), POLL_S[0]
    request = calls.fetch(calls.operation_path(operation_id))
    while True:
        one: Operation = yield from ask(request, patience, answers.operation)
        if told is not None:
            told(Progress(one.kind, one.succeeded, one.total, one.phase, one))
        if one.over:
            return one
        if timeout_s is not None and patience.clock() - began >= timeout_s:
            raise WaitTimeout(one, timeout_s)
        yield Delay(delay)
        delay = min(1.5 * delay, POLL_S[1])


def complete(
    request: Request, patience: RetryPolicy, *, wait: bool = True, told: OnProgress | None = None
) -> Flow[Operation]:
    """Begin an operation in the background, and return it when it has succeeded.

    Raises:
        OperationFailed: it ended without being in force.
        PartlyDone: some boards have not followed yet.
    """
    begun = yield from perform(request, patience)
    if begun.over or not wait:
        return begun
    ended = yield from follow(begun.id, patience, told=told)
    return answers.settled(replace(ended, applied=begun.applied))


@dataclass(frozen=True, slots=True)
class AdapterPush:
    """What to push: the source, how it is called, how it shall come into use, and what it fits."""

    source: Path | str | bytes
    name: str
    version: str | None
    model: str | None
    scale: float | None
    rollout: RolloutParams | None
    timeout_s: float | None
    key: str
    parameters: Sequence[Mapping[str, Any]] | None = None
    base_digest: str | None = None


def push(what: AdapterPush, patience: RetryPolicy, told: OnProgress | None) -> Flow[Pushed]:
    """Send an adapter, have it staged everywhere, and rolled out unless that is not wanted.

    Two operations under keys that hang together: a push that is repeated with the same key goes
    on where the first one was lost.
    """
    size = 0

    def sent(count: int) -> None:
        if told is not None:
            told(Progress("upload", count, size))

    source: Upload = yield BlockingCall(lambda: Upload.of(what.source, sent))
    size = source.size_bytes
    request = calls.upload(
        source,
        what.name,
        version=what.version,
        model=what.model,
        scale=what.scale,
        parameters=what.parameters,
        base_digest=what.base_digest,
        timeout_s=what.timeout_s,
        key=what.key,
    )
    response = yield from exchange(request, patience)
    body = answers.json_of(response)
    staging = answers.settled(answers.operation(body))
    if not staging.over:
        ended = yield from follow(staging.id, patience, told=told)
        staging = answers.settled(replace(ended, applied=staging.applied))
    version, model = answers.text_of(body, "version"), answers.text_of(body, "model")
    pushed = Pushed(
        what.name, version, model, source.sha256, source.size_bytes, staging, rollout=None
    )
    if what.rollout is None:
        return pushed
    begin = roll_out(
        what.name, version, model, what.rollout, timeout_s=what.timeout_s, key=f"{what.key}:rollout"
    )
    rollout = yield from complete(begin, patience, told=told)
    return replace(pushed, rollout=rollout)


def roll_out(
    name: str,
    version: str,
    model: str | None,
    rollout: RolloutParams,
    *,
    timeout_s: float | None,
    key: str | None,
) -> Request:
    """Have a version that is staged come into use."""
    params = {"version": version, "model": model, **rollout.params()}
    path = calls.adapter_path(name, "rollout")
    return calls.change("POST", path, params, key=key, timeout_s=timeout_s, background=True)
