"""Joining: the head's join tokens, the values that a board needs, and the boards that have joined.

``rkserve up`` writes the head's part into its state folder, and names that folder to Ray's
processes by ``FOLDER``. Join tokens are kept as digests with their expiry and compared in constant
time. Only a valid one gets the cluster's token.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rkserve.api.admin.join import JoinAnswer, JoinBody
from rkserve.core.errors import Forbidden, JoinRefused, RateLimited
from rkserve.core.files import open_private, replace_private

log = logging.getLogger(__name__)

FOLDER = "RKSERVE_HEAD_STATE"
TOKEN_BYTES = 24
MOST_TOKENS, MOST_BOARDS = 16, 4096
# Refused tokens per minute at one Router. Tokens cannot be guessed; this bounds the work and the
# log of a client that guesses.
REFUSALS, MINUTE_S = 20, 60.0
NEW_ID = "sudo rm -f /etc/machine-id /var/lib/dbus/machine-id && sudo systemd-machine-id-setup"


@dataclass(frozen=True)
class ClusterTerms:
    """The head's part of an answer to a board."""

    ray_address: str
    ray_version: str
    python: str
    token_file: str
    environ: Mapping[str, str]


@dataclass(frozen=True)
class MemberBoard:
    """A board that has joined: digests of its machine-id and serial number, empty if unknown."""

    host: str
    machine: str = ""
    serial: str = ""
    joined_s: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """The identity: machine-id and serial number, or the host name where both are unknown."""
        return (self.machine, self.serial) if self.machine or self.serial else (self.host, "")


def notes_on(board: MemberBoard, known: Iterable[MemberBoard]) -> Iterator[str]:
    """Yield a sentence for each board whose card or host name this one seems to share."""
    for other in known:
        same_card = bool(board.machine) and board.machine == other.machine
        both = bool(board.serial) and bool(other.serial)
        same_soc = both and board.serial == other.serial
        if same_card and both and not same_soc:
            yield (
                f"{board.host} has the machine-id of {other.host}, and is another board: its card "
                f"is a copy. On {board.host}: {NEW_ID}"
            )
        elif same_soc and not same_card:
            yield f"This is the board that joined as {other.host}, with another system image."
        elif same_card and board.host != other.host:
            yield (
                f"This is the board that joined as {other.host}; it is called "
                f"<group>@{board.host} from now on."
            )
        elif not same_card and board.host == other.host:
            yield (
                f"Another board has joined as {board.host}, too: give each a host name of its own, "
                f"such as by hostnamectl set-hostname."
            )


def write_terms(folder: Path, terms: ClusterTerms) -> None:
    """Write the head's part. Raises ``OSError``."""
    replace_private(folder / "cluster.json", json.dumps(asdict(terms), indent=1) + "\n")


def new_token(folder: Path, lifetime_s: float, now_s: float) -> str:
    """Return a new join token, valid for so long. Raises ``OSError``."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with _locked(folder):
        kept = [one for one in _tokens(folder) if one["expires_s"] > now_s][1 - MOST_TOKENS :]
        added = {"digest": _digest(token.encode()), "expires_s": now_s + lifetime_s}
        text = json.dumps([*kept, added], indent=1)
        replace_private(folder / "join_tokens.json", f"{text}\n")
    return token


class Membership:
    """The joining of boards at one Router. Its calls read and write small files."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        """``folder`` is the head's state folder, None where ``rkserve up`` did not start Ray."""
        self._folder, self._clock = folder, clock
        self._refused: deque[float] = deque(maxlen=REFUSALS)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Membership:
        """Return the membership of the head that this environment is of."""
        folder = environ.get(FOLDER)
        return cls(Path(folder) if folder else None)

    def check(self, token: bytes) -> Path:
        """Return the head's folder to the bearer of a join token.

        Raises:
            JoinRefused: no ``rkserve up`` started this head.
            RateLimited: too many tokens were refused within a minute.
            Forbidden: the token is unknown or has expired.
        """
        folder = self._folder
        if folder is None or not (folder / "cluster.json").exists():
            raise JoinRefused(
                "Boards cannot join by this call: the head was not started by `rkserve up`, or the "
                "Router is on another node. Start the board's Ray by `ray start --address`."
            )
        now_s = self._clock()
        if len(self._refused) == REFUSALS and (since_s := now_s - self._refused[0]) < MINUTE_S:
            left_s = max(1, int(MINUTE_S - since_s))
            raise RateLimited(f"{REFUSALS} refused join tokens per minute", left_s)
        sent = _digest(token)
        try:
            tokens = _tokens(folder)
        except OSError as exc:
            raise JoinRefused(f"The head's join tokens cannot be read: {exc}.") from exc
        # All are compared, so that the time does not depend on the match.
        fits = [hmac.compare_digest(sent, one["digest"]) for one in tokens]
        valid = [one["expires_s"] > now_s for one in tokens]
        if not any(fit and alive for fit, alive in zip(fits, valid, strict=True)):
            self._refused.append(now_s)
            raise Forbidden(
                "The join token is unknown or has expired. `rkserve token` on the head prints a "
                "new one; send it as 'Authorization: Bearer <token>'."
            )
        return folder

    def admit(self, folder: Path, asked: JoinBody) -> JoinAnswer:
        """Register a board, and return what its Ray needs.

        Raises ``JoinRefused``: its versions are not the head's, or the head's files are damaged.
        """
        try:
            terms = ClusterTerms(**_read(folder / "cluster.json", {}))
            token = Path(terms.token_file).read_text(encoding="utf-8").strip()
            _check_versions(terms, asked)
            notes = self._register(folder, asked)
        except (OSError, TypeError) as exc:
            raise JoinRefused(f"The head's state cannot be read or written: {exc}.") from exc
        return JoinAnswer(
            ray_address=terms.ray_address,
            ray_version=terms.ray_version,
            cluster_token=token,
            environ=dict(terms.environ),
            notes=notes,
        )

    def _register(self, folder: Path, asked: JoinBody) -> list[str]:
        board = MemberBoard(asked.host, asked.machine, asked.serial, self._clock())
        with _locked(folder):
            known = [MemberBoard(**one) for one in _read(folder / "boards.json", [])]
            others = [one for one in known if one.key != board.key]
            text = json.dumps([asdict(one) for one in [*others, board][-MOST_BOARDS:]], indent=1)
            replace_private(folder / "boards.json", f"{text}\n")
        notes = [*notes_on(board, known)]
        log.info("%s joins", board.host)
        for note in notes:
            log.warning("%s", note)
        return notes


def _check_versions(terms: ClusterTerms, asked: JoinBody) -> None:
    if asked.ray != terms.ray_version:
        raise JoinRefused(
            f"Ray is {asked.ray} on {asked.host} and {terms.ray_version} on the head; a node joins "
            f"only with the same. On the board: pip install 'ray[serve]=={terms.ray_version}'"
        )
    if asked.python != terms.python:
        raise JoinRefused(
            f"Python is {asked.python} on {asked.host} and {terms.python} on the head; a node "
            f"joins only with the same. On the board: uv venv --python {terms.python}"
        )


def _tokens(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _read(folder / "join_tokens.json", [])
    return found


def _read(path: Path, default: Any) -> Any:
    """Return the JSON of a file, or ``default`` without it. Raises ``OSError`` if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except ValueError as exc:
        raise OSError(f"{path} is damaged: {exc}") from exc


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: commands and several Routers write there."""
    descriptor = open_private(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
