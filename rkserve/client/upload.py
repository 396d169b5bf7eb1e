"""An adapter file on its way: its size and sha256 beforehand, its bytes in pieces.

It never holds a file whole, and knows nothing of where the bytes go.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from rkserve.client.errors import SourceFailed
from rkserve.core.file_digests import file_digest

PIECE_BYTES = 1 << 20
ADAPTER_FILE = "adapter.rkllm"


@dataclass(frozen=True, slots=True)
class Upload:
    """What is sent. ``told`` hears how many bytes have left, again from 0 at each try."""

    source: Path | bytes
    size_bytes: int
    sha256: str
    told: Callable[[int], None] = field(default=lambda _: None, compare=False)

    @classmethod
    def of(cls, source: Path | str | bytes, told: Callable[[int], None]) -> Upload:
        """Read the source once. A folder stands for the ``adapter.rkllm`` in it.

        Raises:
            SourceFailed: it cannot be read.
        """
        if isinstance(source, bytes):
            return cls(source, len(source), hashlib.sha256(source).hexdigest(), told)
        path = Path(source)
        path = path / ADAPTER_FILE if path.is_dir() else path
        try:
            return cls(path, path.stat().st_size, file_digest(path), told)
        except OSError as exc:
            raise SourceFailed(f"{path} cannot be read: {exc.strerror or exc}") from exc

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes. Raises ``SourceFailed``."""
        with self._open() as file:
            sent = 0
            while piece := self._next(file, sent):
                yield piece
                sent += len(piece)
                self.told(sent)

    async def pieces_async(self) -> AsyncIterator[bytes]:
        """Yield all bytes, and read them in a thread. Raises ``SourceFailed``."""
        file = await asyncio.to_thread(self._open)
        try:
            sent = 0
            while piece := await asyncio.to_thread(self._next, file, sent):
                yield piece
                sent += len(piece)
                self.told(sent)
        finally:
            file.close()

    def _open(self) -> BinaryIO:
        if isinstance(self.source, bytes):
            return BytesIO(self.source)
        try:
            return self.source.open("rb")
        except OSError as exc:
            raise SourceFailed(f"{self.source} cannot be read: {exc.strerror or exc}") from exc

    def _next(self, file: BinaryIO, sent: int) -> bytes:
        """Return the next piece: exactly as many bytes in all as were announced."""
        due = min(PIECE_BYTES, self.size_bytes - sent)
        try:
            piece = file.read(due)
        except OSError as exc:
            raise SourceFailed(f"{self.source!r} cannot be read: {exc.strerror or exc}") from exc
        if len(piece) < due:
            raise SourceFailed(f"{self.source!r} became shorter while it was sent.")
        return piece
