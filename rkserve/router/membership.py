"""Joining: the head's join tokens, the values that a board needs, and its approval.

``rkserve up`` writes the head's part into its state folder, and names that folder to Ray's
processes by ``FOLDER``. Join tokens are kept as digests with their expiry and compared in constant
time. Only a valid one gets the cluster's token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rkserve import __version__
from rkserve.api.admin.heartbeat import HeartbeatBody, OrderEntry
from rkserve.api.admin.join import (
    ApprovedAnswer,
    JoinAnswer,
    JoinBody,
    JoinWaiting,
    MembersAnswer,
    MemberState,
)
from rkserve.core.errors import (
    Forbidden,
    JoinDenied,
    JoinRefused,
    RateLimited,
    RouteNotFound,
)
from rkserve.core.files import replace_private
from rkserve.core.skew import skew_problem
from rkserve.router.fleet_update import MemberNews, member_secret, read_update, write_news
from rkserve.router.members import MemberBoard, Members, locked, read_json

log = logging.getLogger(__name__)

FOLDER = "RKSERVE_HEAD_STATE"
TERMS = "cluster.json"
TOKEN_BYTES = 24
MOST_TOKENS = 16
# Refused tokens per minute at one Router. Tokens cannot be guessed; this bounds the work and the
# log of a client that guesses.
REFUSALS, MINUTE_S = 20, 60.0
WAITING_RETRY_S = 5


@dataclass(frozen=True)
class ClusterTerms:
    """The head's part of an answer to a board; with ``approval`` new boards wait for it."""

    ray_address: str
    ray_version: str
    python: str
    token_file: str
    environ: Mapping[str, str]
    approval: bool = False
    measures: Sequence[tuple[str, str]] = ()  # library and model folder of real boards


def read_terms(folder: Path) -> ClusterTerms:
    """Return the head's part. Raises ``OSError``, or ``TypeError`` if something is missing."""
    found = read_json(folder / TERMS, {})
    known = {one.name for one in fields(ClusterTerms)}  # a later `rkserve up` may have written more
    return ClusterTerms(**{name: value for name, value in found.items() if name in known})


def write_terms(folder: Path, terms: ClusterTerms) -> None:
    """Write the head's part. Raises ``OSError``."""
    replace_private(folder / TERMS, json.dumps(asdict(terms), indent=1) + "\n")


def new_token(folder: Path, lifetime_s: float, now_s: float) -> str:
    """Return a new join token, valid for so long. Raises ``OSError``."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with locked(folder):
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

    def check(self, token: bytes, asked: JoinBody) -> Path:
        """Return the head's folder to the bearer of a join token.

        A board that waits for approval may ask on with a token that has expired meanwhile.

        Raises:
            JoinRefused: no ``rkserve up`` started this head.
            RateLimited: too many tokens were refused within a minute.
            Forbidden: the token is unknown or has expired.
        """
        folder, now_s = self.folder(), self._clock()
        if len(self._refused) == REFUSALS and (since_s := now_s - self._refused[0]) < MINUTE_S:
            left_s = max(1, int(MINUTE_S - since_s))
            raise RateLimited(f"{REFUSALS} refused join tokens per minute", left_s)
        sent, key = _digest(token), _member(asked).key
        try:
            tokens = _tokens(folder)
            members = Members(folder).read(now_s)
        except OSError as exc:
            raise JoinRefused(f"The head's join tokens cannot be read: {exc}.") from exc
        # All are compared, so that the time does not depend on the match.
        fits = [hmac.compare_digest(sent, one["digest"]) for one in tokens]
        valid = [one["expires_s"] > now_s for one in tokens]
        fits += [hmac.compare_digest(sent, one.token) for one in members]
        valid += [one.key == key and now_s < one.token_until_s for one in members]
        if not any(fit and alive for fit, alive in zip(fits, valid, strict=True)):
            self._refused.append(now_s)
            raise Forbidden(
                "The join token is unknown or has expired. `rkserve token` on the head prints a "
                "new one; send it as 'Authorization: Bearer <token>'."
            )
        return folder

    def folder(self) -> Path:
        """Return the head's state folder. Raises ``JoinRefused``: no ``rkserve up`` started it."""
        folder = self._folder
        if folder is None or not (folder / TERMS).exists():
            raise JoinRefused(
                "Boards cannot join by this call: the head was not started by `rkserve up`, or the "
                "Router is on another node. Start the board's Ray by `ray start --address`."
            )
        return folder

    def admit(self, folder: Path, token: bytes, asked: JoinBody) -> JoinAnswer | JoinWaiting:
        """Register a board, and return what its Ray needs, or that it waits for approval.

        Raises:
            JoinRefused: its versions are not the head's, or the head's files are damaged.
            JoinDenied: the operator has denied it.
        """
        try:
            terms = read_terms(folder)
            cluster_token = Path(terms.token_file).read_text(encoding="utf-8").strip()
            _check_versions(terms, asked)
            board = replace(_member(asked), since_s=self._clock(), token=_digest(token))
            made = Members(folder).ask(board, approval=terms.approval)
        except (OSError, TypeError) as exc:
            raise JoinRefused(f"The head's state cannot be read or written: {exc}.") from exc
        state = made.board.state
        if state == MemberState.DENIED:
            raise JoinDenied(
                f"The operator has denied {board.host}. `rkserve approve {made.name}` on the head "
                "takes that back."
            )
        waits = state == MemberState.WAITING
        if not (waits and made.repeated):
            log.info("%s %s", board.host, "waits for approval" if waits else "joins")
            for note in made.notes:
                log.warning("%s", note)
        if waits:
            command = f"rkserve approve {made.name}"
            return JoinWaiting(state="waiting", id=made.board.id, command=command, notes=made.notes)
        return JoinAnswer(
            ray_address=terms.ray_address,
            ray_version=terms.ray_version,
            cluster_token=cluster_token,
            environ=dict(terms.environ),
            notes=made.notes,
            version=__version__,
        )

    def beat(self, secret: bytes, asked: HeartbeatBody) -> tuple[OrderEntry | None, ClusterTerms]:
        """Take a board's news; return what an update wants of it, and the head's part.

        Raises:
            JoinRefused: no ``rkserve up`` started this head, its files are damaged, or the versions
                do not serve together.
            Forbidden: the board is not of this cluster.
        """
        folder = self.member_folder(secret)
        if problem := skew_problem(asked.version, __version__):
            raise JoinRefused(problem)
        try:
            write_news(folder, MemberNews.of(asked, self._clock()))
            update = read_update(folder)
            order = None if update is None else update.order_for(asked.key)
            return order, read_terms(folder)
        except (OSError, TypeError) as exc:
            raise JoinRefused(f"The head's state cannot be read or written: {exc}.") from exc

    def member_folder(self, secret: bytes) -> Path:
        """Return the head's folder to a board of this cluster. Raises as ``beat``."""
        folder = self.folder()
        try:
            token = Path(read_terms(folder).token_file).read_text(encoding="utf-8").strip()
        except (OSError, TypeError) as exc:
            raise JoinRefused(f"The head's state cannot be read: {exc}.") from exc
        if not hmac.compare_digest(member_secret(token).encode(), secret):
            raise Forbidden("This board is of another cluster: join again with a new join token.")
        return folder

    def wheel(self, secret: bytes, sha256: str) -> Path:
        """Return a file of the update that goes on. Raises as ``beat``, or ``RouteNotFound``."""
        folder = self.member_folder(secret)
        try:
            update = read_update(folder)
        except (OSError, TypeError) as exc:
            raise JoinRefused(f"The head's state cannot be read: {exc}.") from exc
        files = () if update is None or update.ended else update.files
        for one in files:
            if one.sha256 == sha256 and update is not None:
                return Path(update.folder) / one.name
        raise RouteNotFound(f"No update that goes on has a file with the sha256 {sha256}.")

    def listed(self) -> MembersAnswer:
        """Return the boards that have asked to join. Raises ``JoinRefused``."""
        folder = self.folder()
        try:
            approval = bool(read_json(folder / TERMS, {}).get("approval"))
            data = Members(folder).entries(self._clock())
        except OSError as exc:
            raise JoinRefused(f"The head's state cannot be read: {exc}.") from exc
        return MembersAnswer(object="list", approval=approval, data=data)

    def decide(
        self, names: Sequence[str], state: MemberState, who: str, *, everything: bool = False
    ) -> ApprovedAnswer:
        """Approve or deny boards by host name or id, or all that wait.

        Raises:
            MemberNotFound: no board has that name.
            RequestError: several boards have it.
            JoinRefused: the head's files are damaged.
        """
        folder, now_s = self.folder(), self._clock()
        try:
            data = Members(folder).decide(names, state, now_s, everything=everything)
        except OSError as exc:
            raise JoinRefused(f"The head's state cannot be read or written: {exc}.") from exc
        for one in data:
            log.info("%s (%s): %s by %s", one["host"], one["id"], one["state"], who)
        return ApprovedAnswer(object="list", data=data)


def _member(asked: JoinBody) -> MemberBoard:
    return MemberBoard(asked.host, asked.machine, asked.serial)


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
    if problem := skew_problem(asked.version, __version__):
        raise JoinRefused(problem)


def _tokens(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_json(folder / "join_tokens.json", [])
    return found


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
