"""Access control: keys of clients and operators, host names, and web pages of other origins."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import aclosing
from enum import Enum
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rkserve.config.router import RouterConfig
from rkserve.core.api_keys import KeyScope
from rkserve.core.errors import (
    ControlPortOnly,
    Forbidden,
    HaproxyBypassed,
    HostNotAllowed,
    InvalidApiKey,
    OriginNotAllowed,
    RequestError,
    RkserveError,
)
from rkserve.core.request_record import record_of_request
from rkserve.router.auth.key_ring import ClientKey, Grant, KeyRing, WrongKeys

log = logging.getLogger(__name__)

# Headers that show another origin behind a local connection: a proxy in front of the Router, or
# a browser in which a page makes the call.
_FROM_ELSEWHERE = ("forwarded", "x-forwarded-for", "x-rkserve-forwarded", "x-real-ip", "origin")
_ANTHROPIC = "x-api-key"
# Suffixes of machine names in private networks; none is a public domain.
_PRIVATE_SUFFIXES = ("local", "lan", "home", "home.arpa", "internal", "localdomain")
_HOST = re.compile(r"(?:(?P<name>[A-Za-z0-9_.-]+)|\[(?P<v6>[0-9A-Fa-f:.]+)\])(?::[0-9]{0,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
# Machines join and leave; for unknown names the list is renewed at most this often.
_NAMES_AGE_S = 30.0
# Pages that other sites may link to: they neither act nor contain secrets.
_LINKED = ("/", "/cluster", "/openapi.json")
_LINKED_BELOW = "/page/"

Names = Callable[[], Iterable[str]]
Refuse = Callable[[Request, RkserveError], ASGIApp]
T = TypeVar("T")


def machine_names() -> list[str]:
    """Return the names of this machine."""
    return [socket.gethostname(), socket.getfqdn()]


class HostAllowList:
    """The host names that requests may be addressed to.

    IP addresses are always allowed: DNS rebinding needs a name whose address an attacker chooses.
    """

    def __init__(self, configured: Collection[str], names: Names = machine_names) -> None:
        """``names`` returns the names of the cluster's machines; it may block."""
        self._configured = configured
        self._names = names
        self._known: frozenset[str] = frozenset(("localhost",))
        self._looked_s: float | None = None

    async def check(self, host: str) -> None:
        """Raise ``RequestError`` for a malformed Host header, ``HostNotAllowed`` for others."""
        found = _HOST.fullmatch(host)
        if found is None:
            raise RequestError("The Host header is malformed.")
        if found["v6"] is not None or _is_address(found["name"]):
            return
        name = found["name"].lower().removesuffix(".")
        if self._allows(name):
            return
        now_s = time.monotonic()
        if self._looked_s is None or now_s - self._looked_s >= _NAMES_AGE_S:
            self._looked_s = now_s
            try:
                self._known = _with_suffixes(await asyncio.to_thread(self._names))
            except Exception:
                # A failed lookup must not let an unknown host in: the names known so far decide.
                log.exception("the names of the cluster's machines cannot be looked up")
            if self._allows(name):
                return
        raise HostNotAllowed(name)

    def _allows(self, name: str) -> bool:
        return (
            name in self._known
            or name.endswith(".localhost")
            or any(_matches(name, pattern) for pattern in self._configured)
        )


class Listener(Enum):
    """The port at which a request came to HAProxy, by the words of HAProxy's mark.

    ``ANY``: there is no control port; ``BESIDE``: the request did not come by HAProxy, which runs.
    """

    ANY = "any"
    CLIENT = "client"
    CONTROL = "control"
    BESIDE = "beside"


LISTENER = "rkserve.listener"  # the listener in a scope; none is there without HAProxy


class ListenerGuard:
    """ASGI middleware that refuses requests beside HAProxy, before their bodies are read."""

    def __init__(self, app: ASGIApp, refuse: Refuse) -> None:
        self._app, self._refuse = app, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get(LISTENER) is not Listener.BESIDE:
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": HaproxyBypassed.code})
            return

        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The server would read the rest of the request for the sake of the next one.
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        await self._refuse(Request(scope, receive), HaproxyBypassed())(scope, receive, last)


class BrowserGuard:
    """ASGI middleware that refuses DNS rebinding and requests by web pages of other origins.

    Programs other than browsers send neither ``Origin`` nor ``Sec-Fetch-Site`` and are not
    affected, except for the check of ``Host``.
    """

    def __init__(
        self, app: ASGIApp, hosts: HostAllowList, origins: Collection[str], refuse: Refuse
    ) -> None:
        self._app, self._hosts, self._origins, self._refuse = app, hosts, origins, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            await self._check(scope)
        except RkserveError as exc:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": exc.code or ""})
                return
            await self._refuse(Request(scope, receive), exc)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (not hosts and scope.get("http_version") == "1.1"):
            raise RequestError("A request has exactly one Host header.")
        if hosts:  # HTTP/1.0 has no Host header, and no browser uses it
            await self._hosts.check(hosts[0])
        self._check_origin(scope, headers, "".join(hosts).lower())

    def _check_origin(self, scope: Scope, headers: Headers, host: str) -> None:
        site, origins = headers.get("sec-fetch-site"), headers.getlist("origin")
        if origins and all(self._is_allowed(origin) for origin in origins):
            return
        if site == "same-origin":  # set by the browser; pages cannot forge it
            return
        if any(_authority(origin) != _without_port(host) for origin in origins):
            raise OriginNotAllowed(origins[0])
        if site == "cross-site" and not _is_link(scope, headers):
            raise OriginNotAllowed(None)

    def _is_allowed(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins


def host_names(config: RouterConfig, names: Names = machine_names) -> HostAllowList:
    """Return the allow-list of a configuration."""
    return HostAllowList(config.allowed_hosts, names)


def is_browser(request: Request) -> bool:
    """Return whether a request carries headers that browsers set and other programs do not."""
    return any(name in request.headers for name in ("origin", "sec-fetch-site", "referer"))


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return name.endswith(pattern[1:])
    return pattern in ("*", name)


def _with_suffixes(names: Iterable[str]) -> frozenset[str]:
    found = {"localhost"}
    for name in names:
        whole = name.lower().removesuffix(".")
        short = whole.partition(".")[0]
        if short:
            found |= {whole, short, *(f"{short}.{suffix}" for suffix in _PRIVATE_SUFFIXES)}
    return frozenset(found)


def _authority(origin: str) -> str | None:
    """Return the host and port of an origin as in a Host header; None without any."""
    scheme, sign, rest = origin.lower().partition("://")
    return rest.removesuffix(_DEFAULT_PORTS.get(scheme, " ")) if sign else None


def _without_port(host: str) -> str:
    """Return a Host header without a default port."""
    for port in _DEFAULT_PORTS.values():
        host = host.removesuffix(port)
    return host


def _is_link(scope: Scope, headers: Headers) -> bool:
    """Return whether the request follows a link of another site to a public page."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return (
        scope.get("method") in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest", "document") == "document"
        and (path in _LINKED or path.startswith(_LINKED_BELOW))
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Access(Enum):
    """The callers that an endpoint admits: those with one of some scopes, or all."""

    OPEN = ()
    INFER = (KeyScope.INFER,)
    CONTROL = (KeyScope.INFER, KeyScope.OPERATE)
    LIST = (KeyScope.INFER, KeyScope.READ)
    READ = (KeyScope.READ,)
    FIGURES = (KeyScope.READ, KeyScope.OPERATE)
    OPERATE = (KeyScope.OPERATE,)
    ADMIN = (KeyScope.ADMIN,)

    @property
    def is_control(self) -> bool:
        """True for the calls that clients of models do not make: the control port has them."""
        return bool(self.value) and KeyScope.INFER not in self.value


_NOBODY = Grant(frozenset(), "anonymous")
_ANYBODY = Grant(frozenset((KeyScope.INFER, KeyScope.READ)), "anonymous")
_ADMITTED = "rkserve.admitted"  # the caller's permissions in a scope
PEER = "rkserve.peer"  # the client's address in a scope, where a proxy in front has named it


def check_listener(request: Request) -> None:
    """Raise ``ControlPortOnly`` for a control call that came at the port of clients."""
    if request.scope.get(LISTENER) is Listener.CLIENT:
        raise ControlPortOnly


class Gate:
    """The check of every call at its route, before its handler."""

    def __init__(self, keys: KeyRing, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._wrong = keys, WrongKeys(clock)

    def admit(self, request: Request, access: Access) -> None:
        """Let a call pass that its caller may make.

        Raises:
            RequestError: it has several keys.
            InvalidApiKey: its key is unknown, or it needs one and has none.
            TooManyWrongKeys: the same, of an address that has sent many.
            Forbidden: its key, or its caller's address, is not good for it.
            KeysUnknown: the Router does not know the cluster's keys yet.
        """
        if access is Access.OPEN:
            return
        secret = secret_of(request)
        grant = self._keys.find(secret) or self._without_key(request)
        request.scope[_ADMITTED] = grant
        if grant.key is not None:
            record = record_of_request()
            record.key, record.models = grant.key.name, grant.key.models
        if grant.scopes.isdisjoint(access.value):
            self._refuse(request, access, grant, secret)

    def still_admits(self, request: Request) -> bool:
        """Return whether the caller of an admitted call has the same permissions now: its key may
        have been revoked or have expired since.
        """
        grant = self._keys.find(secret_of(request)) or self._without_key(request)
        return _admitted(request).scopes <= grant.scopes

    def _without_key(self, request: Request) -> Grant:
        grant = _ANYBODY if self._keys.anonymous else _NOBODY
        if self._keys.trusts_this_machine and _is_local(request):
            return Grant(grant.scopes | _LOCAL, "local")
        return grant

    def _refuse(self, request: Request, access: Access, grant: Grant, secret: bytes) -> None:
        needed = " or ".join(f"'{one.value}'" for one in access.value)
        if grant.key is not None:
            has = ", ".join(one.value for one in KeyScope if one in grant.scopes)
            raise Forbidden(f"This call needs the scope {needed}; the key '{grant.who}' has {has}.")
        self._keys.require_known()
        if secret:
            self._wrong.count(address_of(request))
            raise InvalidApiKey("Incorrect API key: it is unknown, or was revoked or has expired.")
        if access in (Access.OPERATE, Access.ADMIN):
            if not self._keys.trusts_this_machine:
                raise Forbidden(
                    f"This call needs a key with the scope {needed}, such as the admin key, as "
                    "'Authorization: Bearer <key>'."
                )
            raise Forbidden(
                f"This call needs a key with the scope {needed}, and no key has it yet. Make one "
                f"on the Router's machine, by: rkserve keys create NAME --scope "
                f"{access.value[0].value}; or set RKSERVE_ADMIN_KEY where the application is "
                "started. Until then programs on that machine may make this call, but no browser, "
                "and none through a proxy in front of the cluster."
            )
        scope = "" if KeyScope.INFER in access.value else f" --scope {access.value[0].value}"
        raise InvalidApiKey(
            "This call needs an API key: send yours as 'Authorization: Bearer <key>'. The operator "
            f"makes one by: rkserve keys create NAME{scope}"
        )


# Programs of the Router's own machine control it as long as no key does. What clients call needs a
# key of theirs, too, where clients need one.
_LOCAL = frozenset((KeyScope.OPERATE, KeyScope.ADMIN))


def key_of(request: Request) -> ClientKey | None:
    """Return the API key of an admitted call; None for the admin key, and without a key."""
    return _admitted(request).key


def who_of(request: Request) -> str:
    """Return the caller of an admitted call for the audit log: a name and an address."""
    return f"{_admitted(request).who} {address_of(request)}"


def may_operate(request: Request) -> bool:
    """Return whether the caller of an admitted call may control the cluster."""
    return KeyScope.OPERATE in _admitted(request).scopes


def may_administer(request: Request) -> bool:
    """Return whether the caller of an admitted call may do everything."""
    return KeyScope.ADMIN in _admitted(request).scopes


async def while_admitted(
    request: Request, parts: AsyncGenerator[T, None]
) -> AsyncGenerator[T, None]:
    """Yield the parts of a stream without an end, as long as its caller may have them."""
    gate: Gate = request.app.state.gate
    async with aclosing(parts):
        async for part in parts:
            if not gate.still_admits(request):
                return
            yield part


def _admitted(request: Request) -> Grant:
    found = request.scope[_ADMITTED]
    assert isinstance(found, Grant)
    return found


def secret_of(request: Request) -> bytes:
    """Return the key of a call, empty without one. Raises ``RequestError`` for several."""
    for name in ("authorization", _ANTHROPIC):
        if len(request.headers.getlist(name)) > 1:
            raise RequestError(f"The request has several '{name}' headers.", name)
    # Anthropic's clients use a header of their own.
    return bearer_of(request) or request.headers.get(_ANTHROPIC, "").strip().encode("latin-1")


def bearer_of(request: Request) -> bytes:
    """Return the key of the Authorization header, empty without one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    # The framework decodes headers as Latin-1; the key was set as UTF-8.
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def address_of(request: Request) -> str:
    """Return the client's address as the server or the proxy in front knows it."""
    named = request.scope.get(PEER)
    if named is not None:
        return str(named)
    return "unknown" if request.client is None else request.client.host


def _is_local(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in _FROM_ELSEWHERE):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:  # a name, or the path of a socket
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1, on a socket for both
    return (mapped or address).is_loopback
