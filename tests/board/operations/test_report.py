"""Report of a board: the digest of its model file."""

import asyncio
import threading
from pathlib import Path

import pytest

from rkserve.board.operations.report import ModelFileDigest
from rkserve.core import files


async def test_a_stopped_digest_writes_no_record_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state folder may be removed right after a board has stopped."""
    writing, released = threading.Event(), threading.Event()

    def slowly(_path: Path, _text: str) -> None:
        writing.set()
        released.wait(60)

    monkeypatch.setattr(files, "replace_private", slowly)
    file = tmp_path / "model.rkllm"
    file.write_bytes(b"weights")
    digest = ModelFileDigest(file, tmp_path / "record.json")
    looking = asyncio.create_task(digest.look())
    assert await asyncio.to_thread(writing.wait, 60)
    looking.cancel()
    await asyncio.wait((looking,))
    stopping = asyncio.create_task(digest.stop())
    await asyncio.wait((stopping,), timeout=0.05)
    assert not stopping.done()
    released.set()
    await asyncio.wait_for(stopping, 60)
