"""The boards of a head: those that have joined, those that wait for approval, and denied ones.

They are kept in one private file of the head's state folder, which commands and Routers change
under its lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rkserve.api.admin.join import MemberEntry, MemberState
from rkserve.core.errors import JoinRefused, MemberNotFound, RequestError
from rkserve.core.files import open_private, replace_private
from rkserve.router.fleet_update import read_news

JOINED, WAITING, DENIED = MemberState.JOINED, MemberState.WAITING, MemberState.DENIED
MOST_BOARDS, MOST_WAITING = 4096, 256
# A board that waits asks with the token that it came with, even after that has expired; so it does
# for a short time after its approval.
WAITING_S, APPROVED_S = 24 * 3600.0, 600.0
ID_CHARS = 8
NEW_ID = "sudo rm -f /etc/machine-id /var/lib/dbus/machine-id && sudo systemd-machine-id-setup"


@dataclass(frozen=True)
class MemberBoard:
    """A board that has asked to join: digests of its machine-id and serial, empty if unknown.

    ``since_s`` is the time of its state, ``token`` the digest of the join token that it came with,
    and ``token_until_s`` the time until which it may ask with that, though it has expired.
    """

    host: str
    machine: str = ""
    serial: str = ""
    since_s: float = 0.0
    state: MemberState = JOINED
    token: str = ""
    token_until_s: float = 0.0

    @property
    def has_identity(self) -> bool:
        """True if it is known by more than its host name."""
        return bool(self.machine or self.serial)

    @property
    def key(self) -> tuple[str, str]:
        """The identity: machine-id and serial number, or the host name where both are unknown."""
        return (self.machine, self.serial) if self.has_identity else (self.host, "")

    @property
    def id(self) -> str:
        """A short name of the identity, for boards of one host name."""
        return hashlib.sha256(" ".join(self.key).encode()).hexdigest()[:ID_CHARS]

    def entry(self, known: Iterable[MemberBoard], seen_s: float | None = None) -> MemberEntry:
        """Return the board as the operator sees it; ``seen_s`` is the time of its last news."""
        entry = MemberEntry(
            id=self.id,
            host=self.host,
            state=self.state.value,
            since_s=self.since_s,
            notes=[*notes_on(self, known)],
        )
        if seen_s is not None:
            entry["seen_s"] = seen_s
        return entry


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
        elif not same_card and board.host == other.host and board.key != other.key:
            yield (
                f"Another board has joined as {board.host}, too: give each a host name of its own, "
                f"such as by hostnamectl set-hostname."
            )


def next_state(board: MemberBoard, earlier: MemberBoard | None, *, approval: bool) -> MemberState:
    """Return the state of a board that asks, by its earlier one.

    An approval is of an identity. A board without one has but a host name, which another board can
    take: its approval is of the token that it came with.
    """
    if earlier is not None and earlier.state == DENIED:
        return DENIED
    if not approval:
        return JOINED
    known = board.has_identity or (
        earlier is not None and hmac.compare_digest(earlier.token, board.token)
    )
    return JOINED if earlier is not None and earlier.state == JOINED and known else WAITING


@dataclass(frozen=True)
class MemberRequest:
    """A board's request as it was registered; ``repeated`` if its state was the same before."""

    board: MemberBoard
    notes: list[str]
    name: str
    repeated: bool


class Members:
    """The boards of the head with this state folder. Its calls read and write a small file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "boards.json"

    def read(self, now_s: float) -> list[MemberBoard]:
        """Return all boards but those that have waited for too long. Raises ``OSError``."""
        try:
            listed = read_json(self._file, [])
            found = [_board(one) for one in listed]
        except (AttributeError, TypeError, ValueError) as exc:
            raise OSError(f"{self._file} is damaged: {exc}") from exc
        return [one for one in found if one.state != WAITING or now_s < one.since_s + WAITING_S]

    def entries(self, now_s: float) -> list[MemberEntry]:
        """Return the boards as the operator sees them. Raises ``OSError``."""
        # Boards of one host name share a time: the news do not tell their identities.
        latest: dict[str, float] = {}
        for news in read_news(self._folder):
            latest[news.host] = max(news.at_s, latest.get(news.host, 0.0))
        return _entries(self.read(now_s), latest)

    def ask(self, board: MemberBoard, *, approval: bool) -> MemberRequest:
        """Register a board that asks to join.

        Raises:
            JoinRefused: too many boards wait.
            OSError: the file is damaged, or cannot be written.
        """
        with locked(self._folder):
            known = self.read(board.since_s)
            earlier = next((one for one in known if one.key == board.key), None)
            state = next_state(board, earlier, approval=approval)
            waiting = sum(one.state == WAITING for one in known if one is not earlier)
            if state == WAITING and waiting >= MOST_WAITING:
                raise JoinRefused(
                    f"{MOST_WAITING} boards wait already: approve or deny some of them first."
                )
            repeated = earlier is not None and earlier.state == state
            made = replace(board, state=state)
            if earlier is not None and repeated:
                made = replace(made, since_s=earlier.since_s)
            if state == WAITING:
                made = replace(made, token_until_s=made.since_s + WAITING_S)
            everything = [*(one for one in known if one.key != board.key), made]
            if made != earlier:  # waiting boards ask every few seconds
                self._write(everything)
        notes = [*notes_on(board, known)]
        return MemberRequest(made, notes, shortest_name(made, everything), repeated)

    def decide(
        self, names: Sequence[str], state: MemberState, now_s: float, *, everything: bool = False
    ) -> list[MemberEntry]:
        """Approve or deny boards by host name or id, or all that wait. Returns their entries.

        Raises:
            MemberNotFound: no board has that name.
            RequestError: several boards have it.
            OSError: the file is damaged, or cannot be written.
        """
        with locked(self._folder):
            known = self.read(now_s)
            until_s = now_s + APPROVED_S if state == JOINED else 0.0
            meant = {named(name, known).key for name in names}
            if everything:
                meant |= {one.key for one in known if one.state == WAITING}
            changed = [
                replace(one, state=state, since_s=now_s, token_until_s=until_s)
                if one.key in meant and one.state != state
                else one
                for one in known
            ]
            if changed != known:
                self._write(changed)
        ids = {one.id for one in changed if one.key in meant}
        return [entry for entry in _entries(changed) if entry["id"] in ids]

    def _write(self, boards: Sequence[MemberBoard]) -> None:
        text = json.dumps([asdict(one) for one in boards[-MOST_BOARDS:]], indent=1)
        replace_private(self._file, f"{text}\n")


def _board(values: Mapping[str, Any]) -> MemberBoard:
    """Return a board of the file. Boards that joined before there were approvals have no state."""
    given = {"state": JOINED, **values}
    if "joined_s" in given:
        given["since_s"] = given.pop("joined_s")
    return MemberBoard(**{**given, "state": MemberState(given["state"])})


def _entries(
    boards: Sequence[MemberBoard], latest: Mapping[str, float] = MappingProxyType({})
) -> list[MemberEntry]:
    """Return boards as the operator sees them, with notes by those that asked before."""
    return [one.entry(boards[:at], latest.get(one.host)) for at, one in enumerate(boards)]


def named(name: str, known: Sequence[MemberBoard]) -> MemberBoard:
    """Return the board of this host name or id. Raises ``MemberNotFound`` or ``RequestError``."""
    found = [one for one in known if name in (one.host, one.id)]
    if not found:
        raise MemberNotFound(name)
    if len(found) > 1:
        ids = ", ".join(f"{one.id} ({one.state.value})" for one in found)
        raise RequestError(f"{len(found)} boards are called {name}: give one of the ids {ids}.")
    return found[0]


def shortest_name(board: MemberBoard, known: Iterable[MemberBoard]) -> str:
    """Return the host name of a board, or its id where another board has that name."""
    others = (one for one in known if one.key != board.key)
    return board.id if any(one.host == board.host for one in others) else board.host


def read_json(path: Path, default: Any) -> Any:
    """Return the JSON of a file, or ``default`` without it. Raises ``OSError`` if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except ValueError as exc:
        raise OSError(f"{path} is damaged: {exc}") from exc


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: commands and several Routers write there."""
    descriptor = open_private(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
