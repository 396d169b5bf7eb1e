"""Who may make the calls that reach into everybody's generations and caches."""

from __future__ import annotations

import hmac
import ipaddress

from pydantic import SecretStr
from starlette.requests import Request

from rkserve.errors import Forbidden

# What tells of another machine behind a local connection: a proxy in front of the Router, or a
# browser in which some page makes the call.
_FROM_ELSEWHERE = ("forwarded", "x-forwarded-for", "x-real-ip", "origin")


def check_operator(request: Request, key: SecretStr | None) -> None:
    """Let the operator pass: by the admin key where there is one, else by coming from this machine.

    Raises:
        Forbidden: it is somebody else; the message says what to do.
    """
    if key is None:
        if _is_local(request):
            return
        raise Forbidden(
            "Without an admin key this call is taken from the Router's own machine only. Set "
            "RKSERVE_ADMIN_KEY (or router.admin_key) where the application is started, and send it "
            "as 'Authorization: Bearer <key>'."
        )
    if not hmac.compare_digest(_sent(request), key.get_secret_value().encode()):
        raise Forbidden("This call needs the admin key: send 'Authorization: Bearer <key>'.")


def _sent(request: Request) -> bytes:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    # The framework decodes headers as Latin-1; the key was set as UTF-8.
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _is_local(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in _FROM_ELSEWHERE):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:  # a name, or the path of a socket
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1, on a socket for both
    return (mapped or address).is_loopback
