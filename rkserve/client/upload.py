"""Files to upload: size and sha256 in advance, then the bytes in pieces of 1 MiB."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from rkserve.client.errors import SourceFailed
from rkserve.core.files import file_digest

PIECE_BYTES = 1 << 20
ADAPTER_FILE = "adapter.rkllm"


@dataclass(frozen=True, slots=True)
class Upload:
    """A source to upload. ``on_sent`` is called with the bytes sent, from 0 at each try."""

    source: Path | bytes
    size_bytes: int
    sha256: str
    on_sent: Callable[[int], None] = field(default=lambda _: None, compare=False)

    @classmethod
    def of(cls, source: Path | str | bytes, on_sent: Callable[[int], None]) -> Upload:
        """Read the source once. A folder stands for the ``adapter.rkllm`` in it.

        Raises:
            SourceFailed: the source cannot be read.
        """
        if isinstance(source, bytes):
            return cls(source, len(source), hashlib.sha256(source).hexdigest(), on_sent)
        path = Path(source)
        path = path / ADAPTER_FILE if path.is_dir() else path
        try:
            return cls(path, path.stat().st_size, file_digest(path), on_sent)
        except OSError as exc:
            raise SourceFailed(f"{path} cannot be read: {exc.strerror or exc}") from exc

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes. Raises ``SourceFailed``."""
        with self._open() as file:
            sent = 0
            while piece := self._next(file, sent):
                yield piece
                sent += len(piece)
                self.on_sent(sent)

    async def pieces_async(self) -> AsyncIterator[bytes]:
        """Yield all bytes, read in a thread. Raises ``SourceFailed``."""
        file = await asyncio.to_thread(self._open)
        try:
            sent = 0
            while piece := await asyncio.to_thread(self._next, file, sent):
                yield piece
                sent += len(piece)
                self.on_sent(sent)
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
        """Return the next piece; the pieces add up to the announced size."""
        due = min(PIECE_BYTES, self.size_bytes - sent)
        try:
            piece = file.read(due)
        except OSError as exc:
            raise SourceFailed(f"{self.source!r} cannot be read: {exc.strerror or exc}") from exc
        if len(piece) < due:
            raise SourceFailed(f"{self.source!r} became shorter during the upload.")
        return piece
