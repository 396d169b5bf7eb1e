"""TLS of rkserve's own calls to a head: the authorities that they trust.

Contexts are kept: to read a machine's authorities takes longer than a call.
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Mapping
from pathlib import Path

CA_FILE = "RKSERVE_CA_FILE"
# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name.
NO_CHECK_TIME = 0x200000
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
HINT = (
    f" If the certificate is one of your own, name a copy of it by --ca-file or {CA_FILE}; it must "
    "be for the host of the URL."
)


def context_for(url: str, ca_file: Path | None = None) -> ssl.SSLContext | None:
    """Return the context for calls to a URL; None without TLS.

    The machine's authorities are trusted (those of ``SSL_CERT_FILE`` where it is set), and those in
    ``ca_file``, or else in the file that ``RKSERVE_CA_FILE`` names.

    Raises:
        ValueError: that file cannot be read, or has no certificate.
    """
    if not url.startswith("https://"):
        return None
    file = ca_file or named_authorities(os.environ)
    return _trusting(file, _changed_ns(file) if file is not None else 0)


def named_authorities(environ: Mapping[str, str]) -> Path | None:
    """Return the file of authorities that an environment names."""
    return Path(environ[CA_FILE]) if environ.get(CA_FILE) else None


def add_authorities(context: ssl.SSLContext, file: Path) -> None:
    """Have a context trust the certificates of a file, too. Raises ``ValueError``."""
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as exc:
        raise ValueError(f"the CA file {file} has no certificate in PEM format") from exc
    except OSError as exc:
        raise ValueError(f"the CA file {file} cannot be read: {exc.strerror or exc}") from exc


def pinned_context(certificate: Path) -> ssl.SSLContext:
    """Return the context for calls of this machine to itself, where it shows that certificate.

    Its names and dates do not matter, and neither does its authority.

    Raises:
        ValueError: the file cannot be read, or has no certificate.
    """
    return _pinned(certificate, _changed_ns(certificate))


def hint(error: object) -> str:
    """Return advice about a failed call whose certificate was not trusted; else nothing."""
    return HINT if UNTRUSTED in str(error) else ""


def _changed_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError as exc:
        raise ValueError(f"the CA file {file} cannot be read: {exc.strerror or exc}") from exc


@functools.lru_cache(4)
def _trusting(file: Path | None, _changed: int) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if file is not None:
        add_authorities(context, file)
    return context


@functools.lru_cache(4)
def _pinned(file: Path, _changed: int) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    add_authorities(context, file)
    return context
