"""Signed manifests of weight files: the statement, its DSSE envelope, and Ed25519 keys as OpenSSH
writes them.

A manifest is signed as canonical JSON, in which it has one form only; the envelope is that of the
Dead Simple Signing Envelope 1.0. Nothing here reads a clock, a ledger or a board.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rkserve.config.serve_config import PUBLIC_KEY, explain
from rkserve.core.errors import ConfigError, ManifestInvalid, SignatureInvalid
from rkserve.core.files import DIGEST, MANIFEST_MAX_CHARS, MAX_SIGNED_VERSION, NAME

PAYLOAD_TYPE = "application/vnd.rkserve.artifact.v1+json"
PAYLOAD_MAX_BYTES = 4096
MAX_SIGNATURES = 8
MAX_SIZE_BYTES = 2**40
MAX_TIME_S = 2**33  # the year 2242
KEYS_MAX_BYTES = 64 * 1024
OTHERS = 0o077  # permissions of the group and of everybody
_BLOB = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"  # what an OpenSSH public key begins with

Sha256 = Annotated[str, Field(pattern=f"^{DIGEST.pattern}$")]
ReleaseNumber = Annotated[str, Field(pattern=r"^[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}$")]
SocName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
ModelId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
UnixTime = Annotated[int, Field(ge=0, le=MAX_TIME_S)]


class _Stated(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class ManifestBase(_Stated):
    """The base model of an adapter, and the sha256 of its file where that is known."""

    model: ModelId
    sha256: Sha256 | None = None


class RuntimeRange(_Stated):
    """The oldest and the newest release of the runtime that load the file."""

    min: ReleaseNumber | None = None
    max: ReleaseNumber | None = None


class ArtifactManifest(_Stated):
    """A statement about one file of weights: an adapter, or base weights (``model``); or about a
    whole model folder, by the version of its index and the size of all files.

    ``created`` and ``expires`` are seconds since 1970.
    """

    kind: Literal["adapter", "model", "folder"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    version: Annotated[int, Field(ge=1, le=MAX_SIGNED_VERSION)]
    sha256: Sha256
    size: Annotated[int, Field(ge=1, le=MAX_SIZE_BYTES)]
    base: ManifestBase | None = None
    soc: Annotated[tuple[SocName, ...], Field(max_length=16)] = ()
    toolkit: ReleaseNumber | None = None
    runtime: RuntimeRange | None = None
    created: UnixTime | None = None
    expires: UnixTime | None = None

    @model_validator(mode="after")
    def _fits_its_kind(self) -> ArtifactManifest:
        if (self.kind == "adapter") != (self.base is not None):
            raise ValueError("an adapter has a 'base', and no other kind has one")
        if self.kind == "adapter" and not NAME.fullmatch(self.name):
            raise ValueError("the name of an adapter has at most 64 characters")
        return self

    @property
    def model(self) -> str:
        """The model that the file is for."""
        return self.name if self.base is None else self.base.model

    @property
    def label(self) -> str:
        """The default label of the version."""
        return f"v{self.version}"

    def canonical(self) -> bytes:
        """Return the one form that is signed: sorted keys, no white space, no nulls, UTF-8."""
        return json.dumps(
            self.model_dump(mode="json", exclude_none=True),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        ).encode()


class _Signature(BaseModel):
    model_config = ConfigDict(strict=True)  # DSSE wants unknown keys ignored

    keyid: str = Field("", max_length=256)
    sig: str = Field(max_length=128)


class _Envelope(BaseModel):
    model_config = ConfigDict(strict=True)

    payload: str
    payloadType: str  # noqa: N815 - DSSE's own name
    signatures: tuple[_Signature, ...] = Field(max_length=MAX_SIGNATURES)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A pinned public key; ``key_id`` is its fingerprint as ``ssh-keygen -l`` prints it."""

    name: str
    key_id: str
    public: bytes

    def signed(self, signature: bytes, message: bytes) -> bool:
        """Return whether the key's owner has signed a message."""
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class CheckedManifest:
    """A manifest, and the key that signed it; None is a manifest without a signature that was
    verified. ``signatures`` is their number in the envelope.
    """

    manifest: ArtifactManifest
    key: TrustedKey | None
    signatures: int


# -- manifests ------------------------------------------------------------------------------------


def signed_envelope(manifest: ArtifactManifest, key: Ed25519PrivateKey) -> str:
    """Return the envelope of a manifest with the signature of a key."""
    payload = manifest.canonical()
    signature = key.sign(pre_authentication(PAYLOAD_TYPE, payload))
    return json.dumps(
        {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [
                {
                    "keyid": key_id_of(key.public_key().public_bytes_raw()),
                    "sig": base64.b64encode(signature).decode(),
                }
            ],
        },
        separators=(",", ":"),
    )


def pre_authentication(kind: str, payload: bytes) -> bytes:
    """Return the bytes that DSSE signs, in which type and payload cannot be exchanged."""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)


def check_envelope(text: str, keys: Sequence[TrustedKey]) -> CheckedManifest:
    """Return the manifest of an envelope, and the pinned key that signed it.

    Without pinned keys no signature can be verified, and the manifest counts as unsigned.

    Raises:
        SignatureInvalid: it has signatures, and none is by a pinned key.
        ManifestInvalid: it is no envelope, or its manifest is not valid or not canonical.
    """
    if len(text) > MANIFEST_MAX_CHARS:
        raise ManifestInvalid(
            f"The manifest's envelope has {len(text)} characters; the limit is "
            f"{MANIFEST_MAX_CHARS}.",
            "manifest",
        )
    try:
        envelope = _Envelope.model_validate_json(text)
    except ValidationError as exc:
        raise ManifestInvalid(
            f"The manifest is no DSSE envelope: {_first(exc)}.", "manifest"
        ) from None
    if envelope.payloadType != PAYLOAD_TYPE:
        raise ManifestInvalid(
            f"The payload of the manifest is of another type than {PAYLOAD_TYPE}.", "manifest"
        )
    payload = _decoded(envelope.payload, "payload")
    # The signature first: content that no pinned key vouches for is not interpreted.
    key = _signer(envelope, payload, keys)
    if key is None and keys and envelope.signatures:
        names = ", ".join(one.name for one in keys)
        raise SignatureInvalid(
            f"None of the pinned keys ({names}) has signed this manifest.", "manifest"
        )
    return CheckedManifest(read_manifest_payload(payload), key, len(envelope.signatures))


def _signer(envelope: _Envelope, payload: bytes, keys: Sequence[TrustedKey]) -> TrustedKey | None:
    message = pre_authentication(envelope.payloadType, payload)
    # The key id is a hint that is not signed, so that each pinned key is tried.
    for one in envelope.signatures:
        signature = _decoded(one.sig, "sig")
        found = next((key for key in keys if key.signed(signature, message)), None)
        if found is not None:
            return found
    return None


def read_manifest_payload(payload: bytes) -> ArtifactManifest:
    """Return a manifest from its canonical bytes. Raises ``ManifestInvalid``."""
    if len(payload) > PAYLOAD_MAX_BYTES:
        raise ManifestInvalid(
            f"The manifest has {len(payload)} bytes; the limit is {PAYLOAD_MAX_BYTES}.", "manifest"
        )
    try:
        found = ArtifactManifest.model_validate_json(payload)
    except ValidationError as exc:
        raise ManifestInvalid(f"The manifest is not valid: {_first(exc)}.", "manifest") from None
    # Duplicate keys, other orders, white space and escapes are all other bytes.
    if found.canonical() != payload:
        raise ManifestInvalid(
            "The manifest is not in canonical form: sorted keys, each once, without white space "
            "and nulls.",
            "manifest",
        )
    return found


def make_manifest(**stated: object) -> ArtifactManifest:
    """Return a manifest of Python values. Raises ``ManifestInvalid``."""
    try:
        return ArtifactManifest.model_validate_json(json.dumps(stated))
    except ValidationError as exc:
        raise ManifestInvalid(explain(exc, ArtifactManifest), "manifest") from exc


def _first(error: ValidationError) -> str:
    """Return the first problem, without the content of the document."""
    one = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in one["loc"])
    words = one["msg"].removeprefix("Value error, ")
    return f"{place}: {words}" if place else words


def _decoded(text: str, what: str) -> bytes:
    """Return the bytes of base64, of either alphabet, as DSSE allows."""
    try:
        return base64.b64decode(text.translate(_URL_SAFE), validate=True)
    except (binascii.Error, ValueError):  # the latter for characters outside ASCII
        raise ManifestInvalid(
            f"'{what}' of the manifest's envelope is not base64.", "manifest"
        ) from None


_URL_SAFE = str.maketrans("-_", "+/")


# -- keys -----------------------------------------------------------------------------------------


def key_id_of(public: bytes) -> str:
    """Return the fingerprint of a public key."""
    digest = hashlib.sha256(_BLOB + public).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def public_line(key: Ed25519PrivateKey, name: str) -> str:
    """Return the line of a ``.pub`` file."""
    blob = base64.b64encode(_BLOB + key.public_key().public_bytes_raw()).decode()
    return f"ssh-ed25519 {blob} {name}"


def trusted_keys(lines: Iterable[str], place: str) -> tuple[TrustedKey, ...]:
    """Return the keys of lines such as those of ``.pub`` files; empty ones and comments are left
    out. Raises ``ConfigError`` that names the ``place``.
    """
    found: list[TrustedKey] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not re.fullmatch(PUBLIC_KEY, text):
            raise ConfigError(
                f"{place}, line {number}: not a key; one is 'ssh-ed25519 AAAA... NAME', as in the "
                "file .pub that `rkserve sign keygen` and `ssh-keygen -t ed25519` write."
            )
        _, blob, name = text.split(" ", 2)
        public = base64.b64decode(blob)[len(_BLOB) :]
        found.append(TrustedKey(name, key_id_of(public), public))
    for what in ("name", "key_id"):
        values = [getattr(one, what) for one in found]
        if twice := sorted({one for one in values if values.count(one) > 1}):
            raise ConfigError(f"{place}: {', '.join(twice)} is there twice.")
    return tuple(found)


def read_trusted_keys(file: Path) -> tuple[TrustedKey, ...]:
    """Return the keys of a file of public keys. Raises ``ConfigError``."""
    try:
        with file.open("rb") as opened:
            content = opened.read(KEYS_MAX_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The keys in {file} cannot be read: {exc}") from exc
    if len(content) > KEYS_MAX_BYTES:
        raise ConfigError(f"{file} has more than {KEYS_MAX_BYTES} bytes, and is no list of keys.")
    return trusted_keys(text.splitlines(), str(file))


def make_key(file: Path, name: str) -> str:
    """Make a private key in ``file``, with mode 0600, and its public one in ``<file>.pub``; return
    the line of the latter.

    Raises:
        ConfigError: one of the files is there already, or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    line = public_line(key, name)
    if not re.fullmatch(PUBLIC_KEY, line):
        raise ConfigError(
            f"'{name}' is no name of a key: it has 1 to 64 letters, digits and '._@+-'."
        )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = file.with_name(f"{file.name}.pub")
    made: list[Path] = []
    try:
        for path, content, mode in ((file, secret, 0o600), (public, f"{line}\n".encode(), 0o644)):
            # O_EXCL: a key that is lost cannot be made again, so that none is overwritten.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            made.append(path)
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(content)
    except OSError as exc:
        for path in made:
            path.unlink(missing_ok=True)
        raise ConfigError(f"The key cannot be written: {exc}") from exc
    return line


def read_key(file: Path) -> Ed25519PrivateKey:
    """Return the private key of a file in OpenSSH's or PEM's form.

    Raises:
        ConfigError: it cannot be read, other accounts may read it, or it is another kind of key.
    """
    try:
        mode, content = file.stat().st_mode & 0o777, file.read_bytes()
    except OSError as exc:
        raise ConfigError(f"The key {file} cannot be read: {exc.strerror or exc}") from exc
    if mode & OTHERS:
        raise ConfigError(f"{file} has mode {mode:04o}, but is a private key: chmod 600 {file}")
    load = (
        serialization.load_ssh_private_key
        if b"OPENSSH PRIVATE KEY" in content
        else serialization.load_pem_private_key
    )
    try:
        key = load(content, password=None)
    except TypeError as exc:  # so it reports a passphrase that it needs
        raise ConfigError(
            f"The key {file} has a passphrase, and only keys without one can be read: "
            f"ssh-keygen -p -N '' -f COPY takes it off a copy."
        ) from exc
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise ConfigError(f"{file} is no private key in OpenSSH's or PEM's form.") from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{file} is another kind of key than Ed25519.")
    return key
