"""TLS 1.3 for a connection of the channel, over bytes: there is no input or output here.

A board's certificate is made for one replica and pinned by Routers, so that there are no files, no
authority and no dates. asyncio's own TLS takes more processor time, and a connection's limits would
not hold before the end of its handshake.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import ssl
from dataclasses import dataclass

RECORD = 16 * 1024  # the most that one record carries
_BEGIN, _END = (
    datetime.datetime(year, 1, 1, tzinfo=datetime.timezone.utc) for year in (2000, 9999)
)


class EncryptionError(Exception):
    """The TLS handshake or a record failed, or the certificate is another one."""


@dataclass(frozen=True)
class BoardIdentity:
    """The certificate of one replica. ``fingerprint`` is its SHA-256."""

    fingerprint: bytes
    context: ssl.SSLContext


def new_identity() -> BoardIdentity:
    """Return a new key with its certificate; neither is ever in a file of a disk.

    Raises:
        OSError: the kernel has no file in memory, or OpenSSL no TLS 1.3.
    """
    # Three megabytes and 0.1 s of processor time, for boards that encrypt only.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rkserve board")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    context = _tls13(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no connection is resumed
    # The library reads certificates from files only.
    handle = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(handle, pem)
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)
    return BoardIdentity(
        hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).digest(), context
    )


def _tls13(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


@functools.cache
def _pinning_context() -> ssl.SSLContext:
    context = _tls13(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the certificate is compared with the pinned one
    return context


class TlsRecords:
    """One end of TLS on a connection: plain bytes in, bytes for the wire out, and back."""

    def __init__(self, peer: BoardIdentity | bytes) -> None:
        """Begin the board's end with its identity, a Router's with the pinned fingerprint."""
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._pinned = b""
        if isinstance(peer, BoardIdentity):
            context = peer.context
        else:
            self._pinned = peer
            context = _pinning_context()
        self._tls = context.wrap_bio(self._in, self._out, server_side=not self._pinned)
        self._waiting = bytearray()  # for the end of the handshake
        self._established = False

    def begin(self) -> bytes:
        """Return the first bytes for the wire; none at the board's end."""
        self._shake()
        return self._out.read()

    def encrypt(self, data: bytes) -> bytes:
        """Return the records of some bytes; before the end of the handshake they wait for it."""
        if not self._established:
            self._waiting += data
            return b""
        self._write(data)
        return self._out.read()

    def decrypt(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the plain bytes of what has arrived, and bytes for the wire.

        Raises:
            EncryptionError: it is no TLS, was changed, or comes from another certificate's owner.
        """
        self._in.write(data)
        try:
            if not self._established and not self._shake():
                return b"", self._out.read()
            return self._read(), self._out.read() if self._out.pending else b""
        except ssl.SSLError as exc:
            raise EncryptionError(f"TLS failed: {exc.reason or exc}") from exc

    def _shake(self) -> bool:
        """Go on with the handshake; return whether it has ended. Raises ``EncryptionError``."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        if self._pinned:
            shown = hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").digest()
            if shown != self._pinned:
                raise EncryptionError(
                    "the certificate is not the board's: something between them answers for it"
                )
        self._established = True
        if self._waiting:
            self._write(bytes(self._waiting))
            self._waiting.clear()
        return True

    def _read(self) -> bytes:
        parts = []
        while self._in.pending or self._tls.pending():
            try:
                part = self._tls.read(RECORD)
            except ssl.SSLWantReadError:
                break  # a part of a record
            if not part:
                raise EncryptionError("the peer has ended TLS")
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _write(self, data: bytes) -> None:
        at = self._tls.write(data)
        while at < len(data):  # OpenSSL may take a record at a time
            at += self._tls.write(memoryview(data)[at:])
