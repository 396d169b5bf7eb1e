"""Who may make a call: a client, or the operator who reaches into everybody's work."""

from __future__ import annotations

import ipaddress

from starlette.requests import Request

from rkserve.deployments.keys import ClientKey, Keys
from rkserve.errors import Forbidden, InvalidApiKey

# What tells of another machine behind a local connection: a proxy in front of the Router, or a
# browser in which some page makes the call.
_FROM_ELSEWHERE = ("forwarded", "x-forwarded-for", "x-real-ip", "origin")
_ANTHROPIC = "x-api-key"


def check_operator(request: Request, keys: Keys) -> str:
    """Let the operator pass: by the admin key where there is one, else by coming from this machine.

    Returns what the audit calls the caller.

    Raises:
        Forbidden: it is somebody else; the message says what to do.
    """
    if keys.admin is None:
        if _is_local(request):
            return f"local {_host(request)}"
        raise Forbidden(
            "Without an admin key this call is taken from the Router's own machine only. Set "
            "RKSERVE_ADMIN_KEY (or router.admin_key) where the application is started, and send it "
            "as 'Authorization: Bearer <key>'."
        )
    if not keys.is_admin(_sent(request)):
        raise Forbidden("This call needs the admin key: send 'Authorization: Bearer <key>'.")
    return f"admin {_host(request)}"


def check_client(request: Request, keys: Keys) -> ClientKey | None:
    """Let a client pass: by an API key, or the admin key, where API keys are configured.

    Returns its key; None is the operator, or anybody where no keys are configured.

    Raises:
        InvalidApiKey: it sent none of those.
    """
    if keys.clients is None:
        return None
    # Anthropic's clients have a header of their own for it.
    sent = _sent(request) or request.headers.get(_ANTHROPIC, "").strip().encode("latin-1")
    client = keys.client(sent)
    if client is None and not keys.is_admin(sent):
        raise InvalidApiKey("Incorrect API key: send yours as 'Authorization: Bearer <key>'.")
    return client


def _sent(request: Request) -> bytes:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    # The framework decodes headers as Latin-1; the key was set as UTF-8.
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _host(request: Request) -> str:
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
