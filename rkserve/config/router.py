"""Settings of the Routers and of the channel between them and the boards."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from rkserve.config.board_group import Settings
from rkserve.core.block_hashes import FILES

ADMIN_KEY_VARIABLE = "RKSERVE_ADMIN_KEY"
MAX_PORT = 65535
_HOST_PATTERN = re.compile(r"\*|(\*\.)?[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_URL = re.compile(r"https?://[^\s/?#]+[^\s?#]*")
_ORIGIN = re.compile(r"\*|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@*]+")


class ImagesConfig(Settings):
    """Limits of images in chats. A request beyond them is a 400 before it reaches a board."""

    max_count: int = Field(
        8, ge=1, le=64, description="Images of one request, those of earlier turns included."
    )
    max_bytes: int = Field(
        8 * 1024 * 1024,
        ge=1,
        description="Longest file of an image. One in a data URI is also bounded by "
        "`max_body_bytes`, of which it takes four bytes for three.",
    )
    max_pixels: int = Field(
        16_000_000,
        ge=1,
        le=100_000_000,
        description="Width times height of an image. Decoding takes up to 22 bytes of the Router's "
        "memory for each (measured: JPEG 3, PNG 8 to 12, WebP 17 to 22); two images are decoded at "
        "once.",
    )
    fetch: bool = Field(
        False,
        description="Whether images may be given by an http(s) URL, which the Router fetches from "
        "public addresses only ([vision.md](../how-to/vision.md#urls)).",
    )
    fetch_hosts: tuple[str, ...] = Field(
        (),
        description="Names of hosts that images may be fetched from, exactly as in the URL. Empty: "
        "all that have public addresses.",
    )
    fetch_timeout_s: float = Field(
        10.0, gt=0, le=120, description="Longest time for an image to be fetched, in all."
    )


class ResponsesConfig(Settings):
    """Storage of the answers of `/v1/responses` ([api.md](api.md#stored-responses))."""

    store: Literal["default", "asked", "never"] = Field(
        "default",
        description="Which are kept: with `default` those of all requests without "
        "`store: false`, as OpenAI does; with `asked` those with `store: true`; with `never` "
        "none, and nothing can go on from an earlier one.",
    )
    keep_s: float = Field(
        7 * 24 * 3600.0,
        gt=0,
        description="How long one is kept after it was made, or after another one went on from it.",
    )
    max_bytes: int = Field(
        256 * 1024**2,
        ge=1024**2,
        description="What all of a node's may take together; the longest unused go first.",
    )


class IdempotencyConfig(Settings):
    """Answers to requests with an `Idempotency-Key`
    ([api.md](api.md#repeating-a-request-safely)), which are kept on the disk of the Router's node.
    """

    enabled: bool = Field(
        True, description="Whether they are kept; without, the header is ignored on such requests."
    )
    keep_s: float = Field(
        3600.0, gt=0, le=7 * 24 * 3600, description="How long after its end an answer is kept."
    )
    max_answers: int = Field(
        10_000, ge=1, description="How many a node keeps; the oldest go first."
    )
    max_bytes: int = Field(
        64 * 1024**2,
        ge=1024**2,
        description="What they may take together, compressed; the oldest go first.",
    )
    max_answer_bytes: int = Field(
        4 * 1024**2,
        ge=1024,
        description="The longest answer that is kept. A repeat of a request with a longer one is a "
        "422.",
    )
    linger_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="How long an answer goes on without its client, for a repeat of its request.",
    )


class ObjectivesConfig(Settings):
    """The targets by which the [verdict](../how-to/runbook.md) judges the answers."""

    ttft_s: float = Field(
        20.0,
        gt=0,
        le=3600,
        description="The first token of a request comes within this time; 99 % of the requests are "
        "to be answered in order and within it. Alerts compare it with the buckets of "
        "`rkserve_ttft_seconds`: choose one of their bounds.",
    )
    queue_wait_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="95 % of the requests wait at most this long in the Router's queue.",
    )


class MetricsConfig(Settings):
    """The contents of `GET /metrics` ([metrics.md](metrics.md))."""

    vllm_names: bool = Field(
        False,
        description="Whether the figures that vLLM has too are there under vLLM's names as well "
        "(`vllm:num_requests_running`, ...), for dashboards and autoscalers that read these "
        "([metrics.md](metrics.md#vllms-names)).",
    )
    keys: int = Field(
        100,
        ge=0,
        le=1000,
        description="API keys with series of their own in `rkserve_key_*`: the first ones of "
        "`api_keys_file`, then those of the cluster in the order of their first call, until they "
        "are revoked. The others are together `(other)` there; `GET /v1/usage` has all by name.",
    )


class TracingConfig(Settings):
    """Traces of requests by OpenTelemetry
    ([logs-and-traces.md](../how-to/logs-and-traces.md#traces)).
    """

    enabled: bool = Field(
        False,
        description="Whether requests are traced. It needs `rkserve[otel]` on the nodes of the "
        "Routers.",
    )
    endpoint: str | None = Field(
        None,
        description="Where spans are sent in OTLP over HTTP, such as `http://collector:4318`, "
        "without `/v1/traces`. Empty: as `OTEL_EXPORTER_OTLP_ENDPOINT` in the environment of Ray "
        "has it, else port 4318 of the Router's node. Headers with secrets are for "
        "`OTEL_EXPORTER_OTLP_HEADERS`.",
    )
    sampling_ratio: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Which part of the requests is recorded, where their clients do not decide by "
        "a `traceparent`.",
    )
    prompts: bool = Field(
        False,
        description="Whether prompts and answers are recorded too, for all readers of the traces.",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is not None and not _URL.fullmatch(url):
            raise ValueError("must be a URL such as http://collector:4318")
        return url


class RouterConfig(Settings):
    """The OpenAI ingress."""

    replicas: int = Field(
        2,
        ge=1,
        le=64,
        description="Router replicas. With two, the loss of one costs the requests of the other "
        "nothing. Limits and queues that are stated for one Router hold at each.",
    )
    nodes: str = Field(
        "head",
        min_length=1,
        description="The nodes that they run on: `head`, without which nothing runs anyhow; `any`, "
        "where it is Serve that chooses, boards' nodes too; or those with the Ray resource of that "
        "name, of which each takes a thousandth (`ray start --resources='{\"ingress\": 1}'`).",
    )
    max_concurrent: int = Field(
        1000, ge=1, description="Requests that one Router replica handles at once."
    )
    max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, description="Longest request body; a longer one is a 413."
    )
    body_timeout_s: float = Field(
        30.0, gt=0, description="Longest time for a body to arrive; then 408."
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Host names by which clients reach the service, such as `llm.example.org` or "
        "`*.example.org`, without port; `*` allows every name. Always allowed: IP addresses, "
        "`localhost`, the HTTP host of Serve's configuration, and the names of the cluster's "
        "machines, also with `.local`, `.lan` and the like. Any other `Host` is a 421 "
        "([operations.md](../how-to/operations.md#web-pages-and-host-names)).",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="Origins whose web pages may call the service, such as "
        "`https://chat.example.org`; `*` allows all. They get CORS headers. Requests by pages of "
        "other origins than the service's own are a 403.",
    )
    ping_s: float = Field(
        10.0, gt=0, description="A silent stream gets an SSE comment this often, to keep it open."
    )
    report_s: float = Field(
        1.0, gt=0, description="How often the boards' reports are collected, outside of requests."
    )
    policy: str = Field(
        "prefix",
        description="The routing policy, one of those that [routing.md](../explanation/routing.md) "
        "describes.",
    )
    board_wait_s: float = Field(
        20.0,
        ge=0,
        description="How long a request may wait for the board that has its KV cache, or its "
        "session's board, while others are free. With `prefix` it does so only where it is "
        "thought to have its first token sooner by that.",
    )
    prefix_files_per_board: int = Field(
        FILES,
        ge=1,
        le=FILES,
        description="Parked conversations of each board that a Router remembers with `prefix`, "
        f"about 1 KB each; the longest unused go first. Boards report the last {FILES}.",
    )
    accept_timeout_s: float = Field(
        10.0,
        gt=0,
        description="How long a board may take to accept or queue a request; then "
        "another board is asked.",
    )
    max_continuations: int = Field(
        8,
        ge=0,
        description="How many boards may be lost to one generation that another one goes on with; "
        "then it ends with the error.",
    )
    restart_wait_s: float = Field(
        60.0,
        ge=0,
        description="How long a generation that has lost its board waits where no other one can "
        "take it, such as for the restart of the only one.",
    )
    report_timeout_s: float = Field(
        2.0, gt=0, description="How long a board may take to report before it counts as lost."
    )
    control_timeout_s: float = Field(
        60.0,
        gt=0,
        description="How long a board may take for a control call, such as a pause during a slow "
        "token or building a prompt cache.",
    )
    admin_key: SecretStr | None = Field(
        None,
        description="Key for calls that reach into everybody's generations and caches, as "
        f"`Authorization: Bearer`. Better kept out of the file: `{ADMIN_KEY_VARIABLE}` in the "
        "environment of `serve run` stands in for it. As long as no key may operate, those calls "
        "are taken from this machine only.",
    )
    admin_key_file: Path | None = Field(
        None,
        description="File whose first line that is neither empty nor a comment (`#`) is the admin "
        "key, readable on the nodes that Routers run on; it stands in for `admin_key`. It is read "
        "when a Router starts, and not again.",
    )
    api_keys_file: Path | None = Field(
        None,
        description="File with the keys that inference calls need, one on each line, `#` before "
        "comments; behind a key there may be what its owner may use "
        "([admission.md](../explanation/admission.md#keys)). Keys of the cluster "
        "(`rkserve keys`) work beside them. It is read when a Router starts, and not again.",
    )
    queue_limit: int | None = Field(
        None,
        ge=0,
        le=100_000,
        description="Requests that may wait at one Router for boards of one model; then 429. "
        "Empty: as many as its boards' own queues hold, shared by the Routers.",
    )
    queue_timeout_s: float = Field(
        300.0, gt=0, description="Longest wait in that queue; then the request is given up."
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="How long an answer is of use where the request does not state "
        "(`x-request-timeout`, `timeout`). Empty: for ever.",
    )
    priority_min: int = Field(
        -10, description="The most urgent `priority` that a request may have; lower goes first."
    )
    priority_max: int = Field(10, description="The least urgent one.")
    max_board_s: float | None = Field(
        3600.0,
        gt=0,
        description="How long one generation may have boards, at work, in single steps, or paused "
        "inside the runtime; then it ends with a 504. `null`: for ever.",
    )
    board_seconds_per_minute: int | None = Field(
        600,
        ge=1,
        description="Board time that a key may use in a minute, where its line in "
        "`api_keys_file` does not say: ten boards that do nothing else. Then 429. `null`: any.",
    )
    grammar_processes: int = Field(
        2,
        ge=1,
        le=16,
        description="Processes of each Router in which new grammars are checked. Where keys are "
        "configured, one key never has all of several.",
    )
    grammars_waiting_per_key: int = Field(
        16,
        ge=1,
        description="New grammars of one key, or of all clients without keys, that may wait to be "
        "checked at one Router; then 429.",
    )
    headers_after_s: float = Field(
        10.0,
        gt=0,
        description="When a streamed answer that still waits for a board gets its headers, and "
        "pings from then on.",
    )
    images: ImagesConfig = ImagesConfig()
    responses: ResponsesConfig = ResponsesConfig()
    idempotency: IdempotencyConfig = IdempotencyConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()
    max_viewers: int = Field(
        32,
        ge=0,
        le=1000,
        description="Streams of `GET /v1/cluster/events` that one Router serves at once; then 429.",
    )
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()
    page: bool = Field(True, description="Whether `/` is the [chat page](../how-to/page.md).")

    @field_validator("allowed_hosts")
    @classmethod
    def _are_host_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not _HOST_PATTERN.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no host name; give it without scheme and port, such as "
                    "llm.example.org, *.example.org or *"
                )
        return tuple(name.lower() for name in names)

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin; give scheme, host and port without a path, such as "
                    "https://chat.example.org or http://localhost:3000"
                )
        return tuple(origin.lower() for origin in origins)

    @model_validator(mode="after")
    def _priorities_make_sense(self) -> RouterConfig:
        if not self.priority_min <= 0 <= self.priority_max:
            raise ValueError(
                "priority_min is 0 at most and priority_max 0 at least: 0 is that of a request "
                "which does not say"
            )
        return self


class ChannelConfig(Settings):
    """The connections over which boards send tokens to Routers. `channel: off` does without."""

    enabled: bool = Field(
        True, description="Whether boards listen for Routers. Without, tokens come through Ray."
    )
    ports: tuple[int, int] | None = Field(
        None,
        description="First and last port that boards may listen on, at their node's address, such "
        "as `[10100, 10131]` for a firewall: one for each board of a node. Without it any port.",
    )
    encrypt: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether the connections are encrypted by TLS 1.3, with a certificate that "
        "each board makes for itself when it starts. `auto`: except where boards listen on "
        "127.0.0.1 or ::1. `always`: also there, and a Router makes no connection to a board of an "
        "earlier version, which cannot "
        "([operations.md](../how-to/operations.md#encryption-of-the-channel)).",
    )
    heartbeat_s: float = Field(
        0.5,
        gt=0,
        le=60,
        description="The interval of heartbeats between both ends of a connection.",
    )
    silence_s: float = Field(
        3.0,
        gt=0,
        le=600,
        description="How long the other end may be silent before it counts as lost; that is "
        "noticed one heartbeat later at most. A process that was stopped itself does not count "
        "that time.",
    )
    connect_s: float = Field(
        10.0,
        gt=0,
        le=600,
        description="How long the other end may take to be reached.",
    )
    retry_s: float = Field(
        15.0,
        gt=0,
        description="How often a Router tries again to reach a board to which it has no "
        "connection; its generations go through Ray until then.",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> ChannelConfig:
        first, last = self.ports or (1, 1)
        if not 0 < first <= last <= MAX_PORT:
            raise ValueError(f"ports: {first} to {last} is no range of ports")
        if self.silence_s < 2 * self.heartbeat_s:
            raise ValueError("silence_s must be twice heartbeat_s at least")
        return self

    def encrypts(self, host: str) -> bool:
        """Return whether connections to a board that listens on an address are encrypted."""
        if self.encrypt != "auto":
            return self.encrypt == "always"
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:  # a name
            return host != "localhost"

    def candidates(self) -> Iterable[int]:
        """Ports to try; 0 is any."""
        return (0,) if self.ports is None else range(self.ports[0], self.ports[1] + 1)
