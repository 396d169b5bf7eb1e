"""Damaged adapters with the right sha256: refused by their structure, or by a trial."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import zlib
from collections import Counter
from pathlib import Path

import pytest

from rkserve.board.board import Board
from rkserve.core.board_report import BoardState, TrialVerdict
from rkserve.core.messages import AdapterRef
from rkserve.models.files import ADAPTER_HEAD, ADAPTER_REST, adapter_flaw
from rkserve.native.sim.models import render_adapter
from tests.support.boards.board_bench import text_of
from tests.support.boards.fakes import run_loop
from tests.support.sim.sim_board import FOLDER, Sim, ask, chat

pytestmark = pytest.mark.slow

VALID = render_adapter("pirate", seed=3, base=FOLDER.id, size=1200)
BASE_AT = ADAPTER_HEAD.size + 16
# Beginnings of other files, and of nothing.
BEGINNINGS = (b"GGUF", b"PK\x03\x04", b"\x7fELF", b"<html>", b"RKSIMLLM", bytes(64))


def repaired(content: bytes) -> bytes:
    """Return it with the checksum that its content has by now."""
    crc = zlib.crc32(content[ADAPTER_HEAD.size :])
    return content[:12] + struct.pack("<I", crc) + content[16:]


def mutated(rng: random.Random) -> bytes:
    """Return a damaged file: bits, cuts, additions, other beginnings, fields with the right sum."""
    content = bytearray(VALID)
    kind = rng.randrange(40)
    if kind < 28:
        for _ in range(rng.randrange(1, 8)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind < 32:
        del content[rng.randrange(1, len(content)) :]
    elif kind < 36:
        content += rng.randbytes(rng.randrange(1, 200))
    elif kind < 38:
        begin = rng.choice(BEGINNINGS)
        content[: len(begin)] = begin
    elif kind < 39:
        at = rng.randrange(8, ADAPTER_HEAD.size + ADAPTER_REST.size)
        content[at] ^= 1 + rng.randrange(255)
        return repaired(bytes(content))
    else:  # for another base model, and no fault in its form
        content[BASE_AT : BASE_AT + 5] = b"other"
        return repaired(bytes(content))
    return bytes(content)


def put(sim: Sim, number: int, content: bytes) -> AdapterRef:
    """Put a file into the board's folder of adapters, with its own sha256 in the manifest."""
    place = sim.models / "adapters" / f"m{number}" / "1"
    place.mkdir(parents=True)
    (place / "adapter.rkllm").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    manifest = {"sha256": digest, "size": len(content)}
    (place / "manifest.json").write_text(json.dumps(manifest))
    return AdapterRef(f"m{number}", "1", digest)


async def judged(sim: Sim, board: Board, number: int, content: bytes, model: str | None) -> str:
    """Return the part that refused a file, or ``passed``."""
    file = sim.place / "uploaded"
    file.write_bytes(content)
    if adapter_flaw(file, model):
        return "structure"
    found = await board.try_adapter(put(sim, number, content), chat("Count to 3"), 2)
    assert found.verdict in (TrialVerdict.REFUSED, TrialVerdict.PASSED), found
    return "trial" if found.verdict is TrialVerdict.REFUSED else "passed"


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_damaged_adapter_never_reaches_an_engine_that_serves(tmp_path: Path, count: int) -> None:
    """A head without the model's file cannot compare base models: then the trial does."""
    counts = run_loop(tried(Sim(tmp_path), count), 3600.0)
    print(f"{count} mutations: {dict(counts)}")  # noqa: T201 - the figures of the documentation
    assert counts["structure"] > 0.9 * count
    assert counts["trial"] > 0


async def tried(sim: Sim, count: int) -> Counter[str]:
    """Give a board so many damaged files; return the number that each check refused."""
    rng, counts = random.Random(20261124), Counter[str]()
    async with sim.board() as board:
        for number in range(count):
            content = mutated(rng)
            if content == VALID:
                continue
            model = FOLDER.id if number % 2 else None
            serving = len(sim.taps)
            part = await judged(sim, board, number, content, model)
            counts[part] += 1
            if part == "structure":
                assert len(sim.taps) == serving, "no engine was replaced"
            if part == "trial":
                assert not board.report().adapters
                assert "load_adapter" not in sim.tap.called, "the engine that serves now"
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."
        report = board.report()
        assert (report.state, report.crashes) == (BoardState.READY, ())
    return counts
