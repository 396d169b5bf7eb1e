"""An update of the fleet, as files of the head's state folder: its order, and the boards' news.

The command ``rkserve update`` writes the order and reads the news; Routers do the reverse for the
boards' heartbeats. Both outlive either of them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from rkserve.api.admin.heartbeat import HeartbeatBody, OrderEntry, WheelEntry
from rkserve.core.files import open_private, private_folder, replace_private

T = TypeVar("T")

ORDER, NEWS = "update.json", "news"
FRESH_S = 30.0  # a board sends its news every few seconds
REWRITE_S = 10.0  # unchanged news; each one is a write to the head's disk


@dataclass(frozen=True)
class WheelFile:
    """A file that boards may need, with its sha256 and its size."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class FleetUpdate:
    """An update that goes on, or the last one.

    ``version`` is that of rkserve, ``folder`` has its wheels on the head. Boards in ``go`` may take
    it into use. With ``back`` it is the version before, which is there.
    """

    id: str
    version: str
    folder: str = ""
    files: tuple[WheelFile, ...] = ()
    back: bool = False
    index: bool = False
    go: tuple[str, ...] = ()
    ratio: float = 0.95
    seconds: float = 20.0
    limit_s: float = 900.0
    ended: bool = False

    def order_for(self, key: str) -> OrderEntry | None:
        """Return what it wants of a board."""
        if self.ended:
            return None
        files: list[WheelEntry] = [
            {"name": one.name, "sha256": one.sha256, "size": one.size} for one in self.files
        ]
        return OrderEntry(
            update=self.id,
            version=self.version,
            back=self.back,
            go=key in self.go,
            index=self.index,
            files=files,
            ratio=self.ratio,
            seconds=self.seconds,
            limit_s=self.limit_s,
        )


@dataclass(frozen=True)
class MemberNews:
    """The latest news of a board, at seconds since 1970."""

    key: str
    host: str
    version: str
    stage: str = "serving"
    update: str = ""
    problem: str = ""
    before_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    at_s: float = 0.0

    @classmethod
    def of(cls, body: HeartbeatBody, now_s: float) -> MemberNews:
        """Return the news of a heartbeat."""
        return cls(**body.model_dump(), at_s=now_s)


def member_secret(cluster_token: str) -> str:
    """Return the secret of a board's heartbeats; it does not reveal the cluster's token."""
    return hmac.new(cluster_token.encode(), b"rkserve heartbeat", hashlib.sha256).hexdigest()


def write_update(folder: Path, update: FleetUpdate) -> None:
    """Replace the order. Raises ``OSError``."""
    replace_private(folder / ORDER, json.dumps(asdict(update), indent=1) + "\n")


def read_update(folder: Path) -> FleetUpdate | None:
    """Return the order, None before the first one. Raises ``OSError`` if it is damaged."""
    found = _read(folder / ORDER)
    if found is None:
        return None
    made = _made(FleetUpdate, found)
    files = tuple(_made(WheelFile, one) for one in found.get("files", ()))
    return FleetUpdate(**{**made.__dict__, "files": files, "go": tuple(made.go)})


def write_news(folder: Path, news: MemberNews) -> None:
    """Store a board's news. Raises ``OSError``.

    They are not flushed to the disk: after a power cut the board sends them again.
    """
    private_folder(folder / NEWS)
    path = folder / NEWS / f"{news.key}.json"
    known = _read(path)
    unchanged = known is not None and {**known, "at_s": news.at_s} == asdict(news)
    if unchanged and news.at_s - known["at_s"] < REWRITE_S:
        return
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = open_private(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(news), file)
    fresh.replace(path)


def read_news(folder: Path) -> list[MemberNews]:
    """Return the news of all boards, by host. Raises ``OSError`` if one is damaged."""
    found = [_read(path) for path in sorted((folder / NEWS).glob("*.json"))]
    news = [_made(MemberNews, one) for one in found if one is not None]
    return sorted(news, key=lambda one: (one.host, one.key))


def fresh(news: Iterable[MemberNews], now_s: float | None = None) -> list[MemberNews]:
    """Return the news of boards that have sent some lately."""
    at_s = time.time() if now_s is None else now_s
    return [one for one in news if at_s - one.at_s < FRESH_S]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as exc:
        raise OSError(f"{path} is damaged: {exc}") from exc


def _made(kind: type[T], found: dict[str, Any]) -> T:
    """Return a record without the fields of a later version."""
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type] # all are dataclasses
    return kind(**{name: value for name, value in found.items() if name in known})
