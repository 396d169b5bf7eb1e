"""The configuration of Ray's HAProxy, with some of Ray's lines replaced by rkserve's.

Ray writes it from a template without a switch for these lines. This module does not import Ray.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rkserve.core.errors import ConfigError
from rkserve.deployments.haproxy_listeners import BIND_NAME, Listeners
from rkserve.deployments.haproxy_tls import BIND

MAXCONN = "RAY_SERVE_HAPROXY_MAXCONN"
HEADER_TIMEOUT = "RKSERVE_FRONT_HEADER_TIMEOUT_S"
PER_ADDRESS = "RKSERVE_FRONT_CONNECTIONS_PER_ADDRESS"
PROXIES = "RKSERVE_FRONT_PROXIES"
# Further connections of one address are closed without an answer.
SPARE_CONNECTIONS = 100
MOST_CONNECTIONS = 10_000  # each has 2.5 files, with those that splice, and 20 KB while it is read
OWN_FILES = 500  # HAProxy's files besides those of connections
PREPARED = "# Prepared by rkserve"
# Headers by which HAProxy tells Routers who its client is, and that another proxy is before it.
CLIENT_HEADER = "x-rkserve-client"
FORWARDED_HEADER = "x-rkserve-forwarded"
REMEDY = (
    "Use the Ray release that rkserve's requirements name, or start Ray without "
    "RAY_SERVE_ENABLE_HA_PROXY."
)


@dataclass(frozen=True)
class ProxyLimits:
    """HAProxy's limits. ``proxies`` are addresses that speak for many clients."""

    header_timeout_s: float = 10.0
    connections_per_address: int = 1024
    proxies: tuple[str, ...] = ("127.0.0.0/8", "::1")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ProxyLimits:
        """Return the limits of an environment. Raises ``ConfigError`` naming the variable."""
        limits = cls(
            _number(environ, HEADER_TIMEOUT, cls.header_timeout_s, 0.001),
            int(_number(environ, PER_ADDRESS, cls.connections_per_address, 0)),
            tuple(environ[PROXIES].replace(",", " ").split())
            if PROXIES in environ
            else cls.proxies,
        )
        for address in limits.proxies:
            try:
                ipaddress.ip_network(address, strict=False)
            except ValueError:
                raise ConfigError(
                    f"{PROXIES}: '{address}' is no IP address or network; give a list such as "
                    "127.0.0.0/8,::1,192.0.2.7."
                ) from None
        return limits


@dataclass(frozen=True)
class TemplateEdit:
    """A replacement of the matching lines of one section.

    ``count`` is the required number of matches; None allows any.
    """

    section: str
    line: re.Pattern[str]
    put: Callable[[re.Match[str]], list[str]]
    count: int | None = 1


@dataclass(frozen=True)
class ProxyTls:
    """HAProxy's file with certificate and key, and the script that renews them."""

    pem: Path
    script: Path


def prepare_config(
    text: str,
    limits: ProxyLimits,
    files: int,
    tls: ProxyTls | None = None,
    listeners: Listeners | None = None,
) -> str:
    """Return Ray's configuration with some lines replaced by rkserve's.

    ``files`` is the number of files that HAProxy may open; with ``tls`` clients have to use TLS.
    ``listeners`` are those beside the port of clients. A prepared configuration is returned
    unchanged.

    Raises:
        ConfigError: the configuration lacks lines to be replaced.
    """
    if text.startswith(PREPARED):
        return text
    routed = _ROUTED.search(text) is not None
    edits = _edits(limits, files, tls, listeners or Listeners(), routed=routed)
    found = [0] * len(edits)
    lines = [f"{PREPARED}; Ray writes it anew with every change."]
    section = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            section = " ".join(line.split())
        lines += _edited(line, section, edits, found)
    for edit, count in zip(edits, found, strict=True):
        if edit.count is not None and edit.count != count:
            raise ConfigError(
                f"Unsupported HAProxy configuration of Ray: section "
                f"'{edit.section}' has {count} lines like '{edit.line.pattern}', and not "
                f"{edit.count}. {REMEDY}"
            )
    _refuse_leftovers(lines)
    return "\n".join(lines) + "\n"


def check_template() -> None:
    """Make sure that the installed Ray writes a configuration that can be prepared.

    Raises:
        ConfigError: it does not, or Ray is not there.
    """
    ray = find_spec("ray")  # its package's folder: to import it takes seconds
    if ray is None or ray.origin is None:
        raise ConfigError("Ray is not installed.")
    path = Path(ray.origin).parent / "serve" / "_private" / "haproxy_templates.py"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"Ray's template for HAProxy cannot be read: {exc}.") from exc
    _, _, template = text.partition('HAPROXY_CONFIG_TEMPLATE = """')
    # Every line that the template may write, with 1 in the place of each value.
    lines = re.sub(r"{{.*?}}", "1", re.sub(r"{%.*?%}", "", template.partition('"""')[0]))
    prepare_config(lines, ProxyLimits(), MOST_CONNECTIONS)


def _edited(line: str, section: str, edits: list[TemplateEdit], found: list[int]) -> list[str]:
    for number, edit in enumerate(edits):
        if section == edit.section and (match := edit.line.fullmatch(line.strip())):
            found[number] += 1
            return [f"    {new}" for new in edit.put(match)]
    return [line]


_ROUTED = re.compile(r"^\s+use_backend ", re.MULTILINE)
_LEFTOVER = re.compile(r"\s*(option splice-(request|auto)\b|stats socket (?!\S+ mode 600 ))")


def _refuse_leftovers(lines: list[str]) -> None:
    for line in lines:
        if _LEFTOVER.match(line):
            raise ConfigError(
                "Unsupported HAProxy configuration of Ray: it has the "
                f"line '{line.strip()}' in an unknown place. {REMEDY}"
            )


def _edits(
    limits: ProxyLimits, files: int, tls: ProxyTls | None, listeners: Listeners, *, routed: bool
) -> list[TemplateEdit]:
    """Return the edits; ``routed`` means that an application is known to Ray's HAProxy."""
    return [
        TemplateEdit(
            "global",
            re.compile(r"(stats socket \S+) mode 666 (level admin expose-fd listeners)"),
            lambda match: [f"{match[1]} mode 600 {match[2]}"],
        ),
        TemplateEdit(
            "global",
            re.compile(r"maxconn (\d+)"),
            lambda match: [
                _maxconn(match[1], files),
                *([f"lua-load {tls.script}"] if tls is not None else []),
            ],
        ),
        # With it HAProxy does not see that a client leaves whose request came in two segments.
        TemplateEdit("defaults", re.compile(r"option splice-request"), lambda _: []),
        TemplateEdit("defaults", re.compile(r"timeout http-request .*"), lambda _: [], count=None),
        TemplateEdit("defaults", re.compile(r"errorfile 50[234] .*"), lambda _: [], count=3),
        TemplateEdit(
            "defaults",
            re.compile(r"option abortonclose"),
            lambda match: [
                match[0],
                f"timeout http-request {_ms(limits.header_timeout_s)}",
                # Browsers connect before they know what to ask: no 408 for a request of no byte.
                "option http-ignore-probes",
                *_own_errors(),
            ],
        ),
        # Both would fill the table of connections of all, too.
        TemplateEdit(
            "frontend prometheus", re.compile(r"bind :\d+"), lambda m: [m[0], "maxconn 64"]
        ),
        TemplateEdit(
            "listen stats",
            re.compile(r"bind \*:(\d+)"),
            lambda match: [f"bind 127.0.0.1:{match[1]}", "maxconn 64"],
        ),
        TemplateEdit(
            "frontend http_frontend",
            re.compile(r"bind \S+:\d+"),
            lambda match: [
                *_binds(match[0], tls, listeners),
                *_per_address(limits),
                *_client_headers(),
                *listeners.rules(),
                _hide_serve(),
                *_retries(),
                _serve_errors(),
                "http-response del-header server",  # a name and its faults are not for strangers
            ],
        ),
        TemplateEdit(
            "backend default_backend",
            re.compile(r"http-request return status 404 content-type text/plain .*"),
            lambda _: [_unrouted(routed)],
        ),
    ]


def _maxconn(given: str, files: int) -> str:
    """Return as many connections as the file limit allows, unless an operator chose a number."""
    if MAXCONN in os.environ:
        return f"maxconn {given}"
    return f"maxconn {max(1, min(MOST_CONNECTIONS, (files - OWN_FILES) * 2 // 5))}"


def _binds(line: str, tls: ProxyTls | None, listeners: Listeners) -> list[str]:
    """Return the line of the clients' port, and that of the control port, which is of the same
    frontend: it has the same TLS, limits and rules.
    """
    lines = [line]
    if listeners.control is not None:
        lines.append(f"bind {listeners.control} name {BIND_NAME}")
    return lines if tls is None else [f"{one} {BIND.format(pem=tls.pem)}" for one in lines]


def _per_address(limits: ProxyLimits) -> list[str]:
    """Limit the connections of an address, or of an IPv6 network of 64 bits."""
    most = limits.connections_per_address
    if not most:
        return []
    error = _error(
        f"This address has more than {most} connections; use fewer at once, or have the "
        f"operator list a proxy in {PROXIES}.",
        "rate_limit_exceeded",
        "too_many_connections",
    )
    many = "{ sc0_conn_cur gt %d }"
    return [
        "stick-table type ipv6 size 100k expire 1m store conn_cur",
        *(f"acl rkserve_proxy src {address}" for address in limits.proxies),
        "tcp-request connection track-sc0 src,ipmask(32,64)"
        + (" unless rkserve_proxy" if limits.proxies else ""),
        f"tcp-request connection reject if {many % (most + SPARE_CONNECTIONS)}",
        f"tcp-request connection set-var(sess.rkserve_crowded) bool(true) if {many % most}",
        "http-request return status 429 content-type application/json "
        "hdr retry-after 1 hdr connection close "
        f"string '{error}' if {{ var(sess.rkserve_crowded) -m bool }}",
    ]


def _client_headers() -> list[str]:
    """Return the rules that send Routers the client's address, and drop malformed request ids.

    A Router's server would take X-Forwarded-For from this machine, so that any client could choose
    its address.
    """
    return [
        f"http-request set-header {CLIENT_HEADER} %[src]",
        f"http-request del-header {FORWARDED_HEADER}",
        f"http-request set-header {FORWARDED_HEADER} 1 if {{ req.hdr(x-forwarded-for) -m found }}",
        "http-request del-header x-forwarded-for",
        # Serve would log any text of a client as the request's id.
        "http-request del-header x-request-id if { req.hdr_cnt(x-request-id) gt 1 }",
        "http-request del-header x-request-id if !{ req.hdr(x-request-id) -m reg "
        "^[A-Za-z0-9_-]{1,64}$ }",
    ]


def _hide_serve() -> str:
    """Return the rule that closes paths of Ray Serve's own, such as its list of routes, except for
    its health check.
    """
    return (
        "http-request return status 404 content-type application/json "
        f"string '{_NOTHING_THERE}' "
        "if { path,url_dec -m beg /-/ } !{ path /-/healthz }"
    )


def _own_errors() -> list[str]:
    """Return HAProxy's own answers as OpenAI's error object; its 400 and 408 cannot be changed."""
    messages = {
        502: "The Router failed before it answered; try again.",
        503: "No Router is ready; try again soon.",
        504: "The Router did not answer in time; try again.",
    }
    return [
        f"http-error status {status} content-type application/json "
        f"string '{_error(message, 'server_error', 'no_router')}' hdr retry-after 1"
        for status, message in messages.items()
    ]


# Calls that change nothing but the answer, by the ends of their paths: applications have prefixes.
REPEATED = (
    *("/chat/completions", "/completions", "/responses", "/messages", "/embeddings", "/pooling"),
    *("/rerank", "/score", "/tokenize", "/detokenize", "/generate", "/api/chat", "/api/embed"),
    "/rkllm_chat",
)
REPEATED_BYTES = 14_000  # of Ray's buffers of 16 kB; HAProxy keeps 1 kB, and headers need some
BODY_S = 30.0  # to send them; Routers have `body_timeout_s` for longer bodies


def _retries() -> list[str]:
    """Return the rules by which calls without effects go to another Router after one that ended
    may have begun them, and no other calls do.

    HAProxy repeats a request only if all of its body was in its buffer when it sent it first, and
    most clients send it in a second segment. Longer bodies do not fit into the buffer.
    """
    ends = " ".join(REPEATED)
    return [
        "acl rkserve_repeatable method GET",
        f"acl rkserve_repeatable path_end {ends}",
        "http-request disable-l7-retry unless rkserve_repeatable",
        f"http-request wait-for-body time {_ms(BODY_S)} if rkserve_repeatable "
        f"!{{ req.hdr_val(content-length) gt {REPEATED_BYTES} }}",
    ]


def _serve_errors() -> str:
    """Return the rule that replaces errors of Ray Serve by one that clients repeat.

    Serve's own proxy, which stands in while no Router runs, answers 404 until the application is
    configured, and clients take a 404 for final. Its errors are plain texts, Routers' are not.
    """
    error = _error("No Router is ready; try again soon.", "server_error", "no_router")
    return (
        "http-response return status 503 content-type application/json hdr retry-after 1 "
        f"string '{error}' if {{ status 404 500:599 }} "
        "{ res.hdr(content-type) -m beg text/plain }"
    )


def _unrouted(routed: bool) -> str:
    """Return the answer to a path of no application; before any is known, it may become one."""
    if routed:
        error = _NOTHING_THERE
        return f"http-request return status 404 content-type application/json string '{error}'"
    error = _error("The application is not ready; try again soon.", "server_error", "no_router")
    return (
        "http-request return status 503 content-type application/json hdr retry-after 1 "
        f"string '{error}'"
    )


def _error(message: str, kind: str, code: str) -> str:
    error = {"message": message, "type": kind, "param": None, "code": code}
    # HAProxy's single quotes know no escape.
    return json.dumps({"error": error}).replace("'", "\\u0027")


def _ms(seconds: float) -> str:
    return f"{max(1, math.ceil(seconds * 1e3))}ms"


def _number(environ: Mapping[str, str], name: str, default: float, least: float) -> float:
    given = environ.get(name, "").strip()
    if not given:
        return default
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:  # false for NaN, too
        raise ConfigError(f"{name}: '{given}' is not a number of {least:g} or more.")
    return value


_NOTHING_THERE = _error("There is nothing at this path.", "invalid_request_error", "not_found")
