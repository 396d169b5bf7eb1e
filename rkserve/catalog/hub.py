"""Files of a model repository on the Hugging Face Hub, over plain HTTPS.

Downloads resume where they were cut, and are compared with the digests that the repository states:
sha256 for large files, the id of the Git blob for the others. ``HF_ENDPOINT``, ``HF_TOKEN`` and
``HF_HUB_OFFLINE`` have the meaning that they have for huggingface_hub.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import httpx

from rkserve.core.errors import ConfigError
from rkserve.core.files import FULL

ENDPOINT = "https://huggingface.co"
SCHEME = "hf:"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ADDRESS = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]{{1,100}}))?(?::(.+))?", re.ASCII)
ATTEMPTS = 5  # without a byte more
LISTED_MAX_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
RETRIED = (408, 429, 500, 502, 503, 504)

OnBytes = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class HubAddress:
    """``hf:owner/repository[@revision][:file]``, parsed."""

    repository: str
    revision: str = "main"
    file: str | None = None


def parse_address(text: str) -> HubAddress:
    """Parse an address. Raises ``ConfigError``."""
    found = _ADDRESS.fullmatch(text.removeprefix(SCHEME))
    if found is None or ".." in (found[2] or ""):
        raise ConfigError(f"{text!r} is no address of a model: hf:owner/repository[:file.rkllm]")
    if found[3] is not None and not is_inside(found[3]):
        raise ConfigError(f"{found[3]!r} in {text!r} leads out of the repository")
    return HubAddress(found[1], found[2] or "main", found[3])


def is_inside(name: str) -> bool:
    """Return whether a path of a repository stays in it."""
    path = PurePosixPath(name)
    plain = not path.is_absolute() and ".." not in path.parts
    return bool(path.parts) and plain and "\\" not in name and name.isprintable()


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. ``sha256`` is stated for large files, ``blob`` (sha1) for all."""

    path: str
    size_bytes: int
    sha256: str = ""
    blob: str = ""


@dataclass(frozen=True, slots=True)
class HubRepository:
    """The files of a repository at one commit, and the model that it was derived from."""

    name: str
    commit: str
    files: Mapping[str, HubFile]
    base_model: str | None = None


@dataclass(frozen=True, slots=True)
class Hub:
    """A client of one endpoint. ``sleep`` waits between attempts."""

    client: httpx.Client
    endpoint: str = ENDPOINT
    token: str = ""
    offline: bool = False
    sleep: Callable[[float], None] = time.sleep
    on_bytes: OnBytes = field(default=lambda _name, _done, _size: None)

    def repository(self, address: HubAddress) -> HubRepository:
        """Return the files of a repository.

        Raises:
            ConfigError: it cannot be reached, does not exist, or its answer is not understood.
        """
        revision = quote(address.revision, safe="")
        url = f"{self.endpoint}/api/models/{address.repository}/revision/{revision}?blobs=true"
        found = self._listed(url, address.repository)
        try:
            return _repository(address.repository, found)
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise ConfigError(
                f"{self.endpoint} describes {address.repository} in an unknown form: {exc!r}"
            ) from exc

    def fetch(self, repository: HubRepository, file: HubFile, target: Path) -> None:
        """Download a file to ``target``; what was received before is kept as ``*.part``.

        Raises:
            ConfigError: the connection failed too often, the checksum differs, or the disk is full.
        """
        stated = file.sha256 or file.blob or repository.commit
        part = target.with_name(f"{target.name}.{stated[:12]}.part")
        url = f"{self.endpoint}/{repository.name}/resolve/{repository.commit}/{quote(file.path)}"
        try:
            self._receive(url, part, file)
            _verify(part, file)
            part.replace(target)
        except OSError as exc:
            full = "; the disk is full" if exc.errno in FULL else ""
            raise ConfigError(f"{part} cannot be written: {exc.strerror or exc}{full}") from exc

    def _receive(self, url: str, part: Path, file: HubFile) -> None:
        failures = 0
        while True:
            if _size(part) > file.size_bytes:
                part.unlink()
            before = _size(part)
            if before == file.size_bytes and (part.exists() or file.size_bytes):
                return
            try:
                self._append(url, part, file)
                if _size(part) == file.size_bytes:
                    return
                reason = "the connection was closed early"
            except (httpx.HTTPError, _Again) as exc:
                reason = str(exc) or type(exc).__name__
            failures = 0 if _size(part) > before else failures + 1
            if failures >= ATTEMPTS:
                raise ConfigError(
                    f"{file.path} could not be fetched from {self.endpoint}: {reason}. "
                    f"{_size(part)} of {file.size_bytes} bytes are kept; the same command resumes."
                )
            self.sleep(min(2.0**failures, 30.0))

    def _append(self, url: str, part: Path, file: HubFile) -> None:
        """Append to ``part`` until the connection ends."""
        offset = _size(part)
        wanted = {"Range": f"bytes={offset}-"} if offset else {}
        with self.client.stream("GET", url, headers={**self._headers(), **wanted}) as answer:
            self._check(answer, file.path)
            begin = _begin(answer)
            if begin != offset:
                part.unlink(missing_ok=True)
                if begin:
                    raise _Again(f"bytes from {begin} instead of {offset} were sent")
            with part.open("ab") as out:
                # Unbuffered: what a cut connection has sent is kept.
                for chunk in answer.iter_raw():
                    if out.tell() + len(chunk) > file.size_bytes:
                        out.truncate(0)
                        raise _Again(f"more than its {file.size_bytes} bytes were sent")
                    out.write(chunk)
                    self.on_bytes(file.path, out.tell(), file.size_bytes)

    def _listed(self, url: str, name: str) -> dict[str, Any]:
        if self.offline:
            raise ConfigError(f"{name} was not looked up: HF_HUB_OFFLINE is set")
        try:
            with self.client.stream("GET", url, headers=self._headers()) as answer:
                self._check(answer, name)
                text = b""
                for chunk in answer.iter_bytes():
                    text += chunk
                    if len(text) > LISTED_MAX_BYTES:
                        raise ConfigError(f"{url} answers more than {LISTED_MAX_BYTES} bytes")
            found = httpx.Response(200, content=text).json()
        except (httpx.HTTPError, _Again) as exc:
            raise ConfigError(
                f"{self.endpoint} cannot be reached: {str(exc) or type(exc).__name__}"
            ) from exc
        except ValueError as exc:
            raise ConfigError(f"{url} does not answer in JSON") from exc
        if not isinstance(found, dict):
            raise ConfigError(f"{url} does not answer with an object")
        return found

    def _headers(self) -> dict[str, str]:
        own = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {"Accept-Encoding": "identity", **own}

    def _check(self, answer: httpx.Response, name: str) -> None:
        status = answer.status_code
        if status in RETRIED or status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise _Again(f"HTTP {status}")
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ConfigError(
                f"{self.endpoint} refuses {name} (HTTP {status}): it does not exist, or needs a "
                "token of an account that has accepted its terms, in HF_TOKEN"
            )
        if not answer.is_success:
            raise ConfigError(f"{self.endpoint} has no {name} (HTTP {status})")


class _Again(Exception):
    """The reason for another attempt; it never leaves this module."""


def open_hub(environ: Mapping[str, str], on_bytes: OnBytes | None = None) -> Hub:
    """Return the Hub that the environment names."""
    given = environ.get("HF_ENDPOINT", "").strip().rstrip("/")
    if given and not given.startswith(("https://", "http://")):
        raise ConfigError(f"HF_ENDPOINT is {given!r}; it must begin with https:// or http://")
    return Hub(
        httpx.Client(timeout=TIMEOUT, follow_redirects=True),
        given or ENDPOINT,
        environ.get("HF_TOKEN", "").strip(),
        environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on"),
        on_bytes=on_bytes or (lambda _name, _done, _size: None),
    )


def _repository(name: str, found: Mapping[str, Any]) -> HubRepository:
    files = {}
    for one in found["siblings"]:
        path, lfs = one["rfilename"], one.get("lfs") or {}
        if is_inside(path):
            size = lfs.get("size", one.get("size"))
            if type(size) is not int or size < 0:
                raise ValueError(f"{path} has no size")
            files[path] = HubFile(path, size, _hex(lfs.get("sha256")), _hex(one.get("blobId")))
    commit = _hex(found["sha"])
    if not commit:
        raise ValueError("no commit")
    return HubRepository(name, commit, files, base_of(found.get("cardData") or {}))


def _hex(text: object) -> str:
    return text if isinstance(text, str) and re.fullmatch(r"[0-9a-f]{40,64}", text) else ""


def base_of(card: Mapping[str, Any]) -> str | None:
    """Return the repository of the model that a model card says it was derived from."""
    named = card.get("base_model")
    if isinstance(named, list) and len(named) == 1:
        named = named[0]
    is_name = isinstance(named, str) and re.fullmatch(rf"{_PART}/{_PART}", named, re.ASCII)
    return str(named) if is_name else None


def _begin(answer: httpx.Response) -> int:
    """Return the offset of the first byte of an answer."""
    if answer.status_code != httpx.codes.PARTIAL_CONTENT:
        return 0
    found = re.match(r"bytes (\d{1,15})-", answer.headers.get("Content-Range", ""))
    if found is None:
        raise _Again("a part without Content-Range was sent")
    return int(found[1])


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _verify(part: Path, file: HubFile) -> None:
    if not file.sha256 and len(file.blob) != hashlib.sha1(usedforsecurity=False).digest_size * 2:
        return
    if file.sha256:
        name, wanted, made = "sha256", file.sha256, hashlib.sha256()
    else:
        name, wanted, made = "Git blob", file.blob, hashlib.sha1(usedforsecurity=False)
        made.update(b"blob %d\0" % file.size_bytes)
    with part.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            made.update(chunk)
    if made.hexdigest() != wanted:
        part.unlink()
        raise ConfigError(
            f"{file.path}: checksum mismatch: the {name} is {made.hexdigest()}, and the repository "
            f"states {wanted}; the download was removed"
        )
