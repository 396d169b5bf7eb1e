"""Call flows as generators without I/O: retries, waiting for operations, uploads.

Both clients drive these generators. A flow yields steps: a ``Request`` (the client sends back the
response, or throws in the exception that httpx raised), a ``Delay`` or a ``BlockingCall``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import httpx
from typing_extensions import TypedDict

from rkserve.client import answers, requests
from rkserve.client.answers import Operation, Pushed, PushedWeights
from rkserve.client.errors import UnexpectedAnswer, Unreachable, WaitTimeout
from rkserve.client.requests import InFlight, Names, Request, Strategy, Upload

T = TypeVar("T")
ADAPTERS, OPERATIONS = "/v1/lora_adapters", "/v1/operations"
POLL_S = (0.05, 1.0)  # the first pause between looks at an operation, and the longest
RETRY_S = (0.2, 3.0)
PROXY_ERRORS = frozenset({500, 502, 503, 504})
# Some of these leave open whether the request arrived; its key makes a repeat harmless.
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
    """A pause before the next step."""

    seconds: float


@dataclass(frozen=True, slots=True)
class BlockingCall:
    """A function that blocks, such as reading a file."""

    do: Callable[[], Any]


Flow: TypeAlias = Generator["Request | Delay | BlockingCall", Any, T]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The time within which a call is tried again, and the monotonic clock that measures it."""

    seconds: float
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of an upload (``step`` is ``upload``, in bytes) or an operation (in boards).

    For an operation ``step`` is its kind, ``phase`` its current phase and ``operation`` its state.
    For the fetch of a model ``step`` is ``fetch``, in bytes, and ``phase`` the board.
    """

    step: str
    done: int
    total: int
    phase: str = ""
    operation: Operation | None = None


OnProgress: TypeAlias = Callable[[Progress], None]


class Where(TypedDict, total=False):
    """A part of the cluster. ``boards`` are ids or shell patterns such as ``sim-*``."""

    models: Names | None
    boards: Names | None


class WhereOrAdapter(Where, total=False):
    """A part of the cluster, or the requests for one ``adapter`` in it."""

    adapter: str | None


class ChangeOptions(TypedDict, total=False):
    """Options of every change: its time limit, and the idempotency ``key`` of a repeated call."""

    timeout_s: float | None
    key: str | None


class EpochOptions(ChangeOptions, total=False):
    """Options of a change that ``epoch`` refuses if the cluster has changed since."""

    epoch: int | None


class WaitOptions(ChangeOptions, total=False):
    """Options of a change that without ``wait`` returns while its operation still runs."""

    wait: bool
    on_progress: OnProgress | None


class WaitEpochOptions(WaitOptions, EpochOptions, total=False):
    """Options of a change that may be waited for, and refused by ``epoch``."""


class RolloutOptions(TypedDict, total=False):
    """The parameters of a rollout; the server chooses what is left out."""

    strategy: Strategy | None
    max_unavailable: int | None
    weight: float | None
    in_flight: InFlight | None
    observe_s: float | None
    auto: bool | None


def exchange(request: Request, retry: RetryPolicy) -> Flow[httpx.Response]:
    """Send a request; retry it after lost connections and while the Coordinator is away.

    Raises:
        Unreachable: no answer within the policy's time, or the answer took too long.
        UnexpectedAnswer: the response cannot be decoded.
    """
    began, delay = retry.clock(), RETRY_S[0]
    while True:
        wait_s = delay
        try:
            response: httpx.Response = yield request
        except LOST as exc:
            if retry.clock() - began + wait_s > retry.seconds:
                raise Unreachable(transport_error(request, exc)) from exc
        except httpx.DecodingError as exc:
            raise UnexpectedAnswer(transport_error(request, exc)) from exc
        except httpx.RequestError as exc:
            raise Unreachable(transport_error(request, exc)) from exc
        else:
            wait_s = max(delay, answers.retry_after_s(response) or 0.0)
            over = retry.clock() - began + wait_s > retry.seconds
            if over or not _will_pass(response):
                return response
        yield Delay(wait_s)
        delay = min(2 * delay, RETRY_S[1])


def once(retry: RetryPolicy) -> RetryPolicy:
    """Return a policy without retries, for calls that must not be sent twice."""
    return replace(retry, seconds=0.0)


def _will_pass(response: httpx.Response) -> bool:
    """Return whether a retry is likely to succeed."""
    ours, code = answers.error_code(response)
    if ours:
        return code == "coordinator_unavailable"
    # Serve's proxy answers without rkserve's error object while a Router is being replaced.
    return response.status_code in PROXY_ERRORS


def transport_error(request: Request, exc: httpx.RequestError) -> str:
    """Return the error text for a call that failed in transport."""
    what = str(exc) or type(exc).__name__
    if isinstance(exc, httpx.TimeoutException) and not isinstance(exc, httpx.ConnectTimeout):
        what = "no answer came in time"
    return f"{request.method} {request.path}: {what}"


def ask(request: Request, retry: RetryPolicy, read: Callable[[dict[str, Any]], T]) -> Flow[T]:
    """Send a request and return its decoded answer."""
    response = yield from exchange(request, retry)
    return read(answers.json_of(response))


def perform(request: Request, retry: RetryPolicy) -> Flow[Operation]:
    """Send a change and return its operation, which may still be running."""
    response = yield from exchange(request, retry)
    return answers.settled(answers.operation_of(response))


def follow(
    operation_id: str,
    retry: RetryPolicy,
    *,
    timeout_s: float | None = None,
    on_progress: OnProgress | None = None,
) -> Flow[Operation]:
    """Poll an operation until it ends, in whatever state.

    Raises:
        WaitTimeout: it has not ended after ``timeout_s`` seconds.
    """
    began, delay = retry.clock(), POLL_S[0]
    request = requests.fetch(requests.path_of(OPERATIONS, operation_id))
    while True:
        one: Operation = yield from ask(request, retry, answers.operation)
        if on_progress is not None:
            on_progress(Progress(one.kind, one.succeeded, one.total, one.phase, one))
        if one.over:
            return one
        if timeout_s is not None and retry.clock() - began >= timeout_s:
            raise WaitTimeout(one, timeout_s)
        yield Delay(delay)
        delay = min(1.5 * delay, POLL_S[1])


def complete(
    request: Request,
    retry: RetryPolicy,
    *,
    wait: bool = True,
    on_progress: OnProgress | None = None,
) -> Flow[Operation]:
    """Start an operation in the background and return it once it has succeeded.

    Raises:
        OperationFailed: it ended without taking effect.
        PartlyDone: some boards have not followed yet.
    """
    begun = yield from perform(request, retry)
    if begun.over or not wait:
        return begun
    ended = yield from follow(begun.id, retry, on_progress=on_progress)
    return answers.settled(replace(ended, applied=begun.applied))


def push_adapter(
    source: Path | str | bytes,
    params: Mapping[str, Any],
    rollout: Mapping[str, Any] | None,
    key: str | None,
    *,
    timeout_s: float | None,
    retry: RetryPolicy,
    on_progress: OnProgress | None,
) -> Flow[Pushed]:
    """Upload an adapter, stage it on every board, and roll it out unless only staging is asked for.

    ``params`` are those of the upload, ``rollout`` those of the rollout. Staging and rollout have
    keys derived from one: a push that is repeated with the same key continues where the first one
    was lost.
    """
    key = key or requests.new_key()
    params = {**params, "manifest": (yield from manifest_of(source, params["manifest"]))}
    file = yield from _opened(source, on_progress)
    staged = {**params, "timeout_s": timeout_s, "activate": "false", "async": "true"}
    # The head answers once it has all bytes on its disk and has read them again.
    read_s = (timeout_s or requests.OPERATION_TIMEOUT_S) + requests.MARGIN_S
    request = requests.send_file(ADAPTERS, file, staged, key=key, read_s=read_s)
    response = yield from exchange(request, retry)
    body = answers.json_of(response)
    staging = answers.settled(answers.operation(body))
    if not staging.over:
        ended = yield from follow(staging.id, retry, on_progress=on_progress)
        staging = answers.settled(replace(ended, applied=staging.applied))
    name, version, model = (
        params["name"],
        answers.text_of(body, "version"),
        answers.text_of(body, "model"),
    )
    pushed = Pushed(name, version, model, file.sha256, file.size_bytes, staging, rollout=None)
    if rollout is None:
        return pushed
    begin = requests.change(
        "POST",
        requests.path_of(ADAPTERS, name, "rollout"),
        {"version": version, "model": model, **rollout},
        key=f"{key}:rollout",
        timeout_s=timeout_s,
        background=True,
    )
    return replace(pushed, rollout=(yield from complete(begin, retry, on_progress=on_progress)))


def push_weights(
    source: Path | str | bytes,
    params: Mapping[str, Any],
    key: str | None,
    retry: RetryPolicy,
    on_progress: OnProgress | None,
) -> Flow[PushedWeights]:
    """Upload base weights to the head; ``params`` are those of the upload."""
    params = {**params, "manifest": (yield from manifest_of(source, params["manifest"]))}
    file = yield from _opened(source, on_progress)
    request = requests.send_file(
        "/v1/weights", file, params, key=key or requests.new_key(), read_s=requests.FILE_S
    )
    body = yield from ask(request, retry, dict)
    label, model = answers.text_of(body, "id"), answers.text_of(body, "model")
    return PushedWeights(label, model, file.sha256, file.size_bytes, body)


def manifest_of(
    source: Path | str | bytes, given: Path | str | Mapping[str, Any] | None
) -> Flow[str | None]:
    """Read the signed manifest of a source; see ``requests.manifest_of``."""
    found: str | None = yield BlockingCall(lambda: requests.manifest_of(source, given))
    return found


def _opened(source: Path | str | bytes, on_progress: OnProgress | None) -> Flow[Upload]:
    """Read size and sha256 of what is to be uploaded."""
    size = 0

    def sent(count: int) -> None:
        if on_progress is not None:
            on_progress(Progress("upload", count, size))

    upload: Upload = yield BlockingCall(lambda: Upload.of(source, sent))
    size = upload.size_bytes
    return upload
