"""HAProxy's listeners: the port of clients, that of operators, and the mark by which Routers tell
them apart.

HAProxy replaces the mark in every request. Its proof is made of the token that the nodes of a
cluster share, which clients do not have. This module does not import Ray, and the launcher has the
standard library only.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rkserve.core.child_process import bind_error
from rkserve.core.errors import ConfigError

CONTROL = "RKSERVE_FRONT_CONTROL"
MARK_HEADER = "x-rkserve-listener"
# The words of the mark: a HAProxy without a control port, and the two ports of one with it.
ANY_PORT, CLIENT_PORT, CONTROL_PORT = "any", "client", "control"
BIND_NAME = "rkserve_control"
_MOST = 65535


@dataclass(frozen=True)
class ControlAddress:
    """The address and port at which HAProxy answers operators."""

    host: str
    port: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ControlAddress | None:
        """Return that of an environment, None without one. Raises ``ConfigError``."""
        given = environ.get(CONTROL, "").strip()
        if not given:
            return None
        host, _, port = given.rpartition(":")
        try:
            address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            address = None
        number = int(port) if port.isascii() and port.isdigit() else 0
        if address is None or not 0 < number <= _MOST or getattr(address, "scope_id", None):
            raise ConfigError(
                f"{CONTROL}: '{given}' is no IP address with a port; give one such as "
                "127.0.0.1:8001 or [::1]:8001."
            )
        return cls(str(address), number)

    def __str__(self) -> str:
        """Return it as a URL and HAProxy's configuration have it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def environ(self) -> dict[str, str]:
        """Return the variable that names it."""
        return {CONTROL: str(self)}

    @property
    def local_only(self) -> bool:
        """True if only this machine reaches it."""
        return ipaddress.ip_address(self.host).is_loopback

    def url(self, scheme: str) -> str:
        """Return its URL for programs of this machine."""
        return f"{scheme}://{ControlAddress(local_address(self.host), self.port)}"

    def check_free(self) -> None:
        """Raise ``ConfigError`` if it cannot be listened on."""
        if (exc := bind_error(self.port, self.host)) is not None:
            reason = "it is in use" if exc.errno == errno.EADDRINUSE else exc.strerror or exc
            raise ConfigError(
                f"The control port {self} cannot be listened on: {reason}. Give another one by "
                f"--control or {CONTROL}."
            ) from exc


def local_address(host: str) -> str:
    """Return the address of a server at ``host`` for programs of this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return host
    if not address.is_unspecified:
        return host
    return "::1" if ":" in host else "127.0.0.1"


@dataclass(frozen=True)
class Listeners:
    """HAProxy's control port, if there is one, and the proof in its mark, if there is a secret."""

    control: ControlAddress | None = None
    proof: str = ""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Listeners:
        """Return those of an environment. Raises ``ConfigError`` for a wrong address."""
        return cls(ControlAddress.of(environ), proof_of(environ))

    def rules(self) -> list[str]:
        """Return HAProxy's rules that set the mark."""
        usual = ANY_PORT if self.control is None else CLIENT_PORT
        rules = [self._rule(usual)]
        if self.control is not None:
            rules.append(f"{self._rule(CONTROL_PORT)} if {{ so_name -m str {BIND_NAME} }}")
        return rules

    def _rule(self, word: str) -> str:
        return f'http-request set-header {MARK_HEADER} "{f"{word} {self.proof}".strip()}"'


def proof_of(environ: Mapping[str, str]) -> str:
    """Return the proof that a request came by a HAProxy of this cluster; empty without a secret.

    It is made of Ray's token, which all nodes have and clients do not, and which cannot be computed
    from it.
    """
    if environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return ""
    token = environ.get("RAY_AUTH_TOKEN", "").strip()
    if not token:
        named = environ.get("RAY_AUTH_TOKEN_PATH")
        file = Path(named) if named else Path("~/.ray/auth_token").expanduser()
        try:
            token = file.read_text(encoding="utf-8").strip()
        except OSError as exc:
            raise ConfigError(f"Ray's token {file} cannot be read: {exc.strerror}.") from exc
    return hmac.digest(token.encode(), b"rkserve HAProxy", "sha256").hex() if token else ""
