"""Encryption of the channel: by bytes, and over sockets with something between both ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from rkserve.core.messages import GenerateRequest
from rkserve.transport.connection import RouterHandshake
from rkserve.transport.encryption import EncryptionError, TlsRecords, new_identity
from rkserve.transport.server import ChannelAddress
from tests.support.boards.channel_bench import ENCRYPTED, PATIENT, Board, read, router, until
from tests.support.boards.channel_streams import spoken, words

PROMPT = "mary had a little lamb"


def shaken(board: TlsRecords, router: TlsRecords) -> None:
    """Let both ends shake hands."""
    wire = router.begin()
    while wire:
        _, wire = board.decrypt(wire)
        if wire:
            _, wire = router.decrypt(wire)


def ends() -> tuple[TlsRecords, TlsRecords]:
    """Both ends of a connection, after their handshake."""
    identity = new_identity()
    board, router = TlsRecords(identity), TlsRecords(identity.fingerprint)
    shaken(board, router)
    return board, router


def test_bytes_come_back_as_they_were_however_they_are_cut() -> None:
    board, router = ends()
    said = [b"a", bytes(range(256)) * 300, b"", b"b" * 40]
    wire = b"".join(board.encrypt(one) for one in said)
    found = b""
    for at in range(0, len(wire), 1000):
        plain, answer = router.decrypt(wire[at : at + 1000])
        assert answer == b""
        found += plain
    assert found == b"".join(said)


def test_what_is_said_before_the_end_of_the_handshake_waits_for_it() -> None:
    identity = new_identity()
    board, router = TlsRecords(identity), TlsRecords(identity.fingerprint)
    first = router.begin()
    assert router.encrypt(b"early") == b""
    _, answer = board.decrypt(first)
    _, rest = router.decrypt(answer)
    assert board.decrypt(rest) == (b"early", b"")


def test_the_owner_of_another_certificate_learns_nothing() -> None:
    board, router = TlsRecords(new_identity()), TlsRecords(new_identity().fingerprint)
    router.encrypt(b"secret")
    _, answer = board.decrypt(router.begin())
    with pytest.raises(EncryptionError, match="the certificate is not the board's"):
        router.decrypt(answer)
    assert router.encrypt(b"more") == b""


@pytest.mark.parametrize("at", [0, 3, 7, -1], ids=["its kind", "its length", "its text", "its tag"])
def test_a_record_that_was_changed_is_refused(at: int) -> None:
    board, router = ends()
    record = bytearray(board.encrypt(b"x" * 40))
    record[at] ^= 1
    with pytest.raises(EncryptionError, match="TLS failed"):
        router.decrypt(bytes(record) + bytes(1 << 16))


def test_an_older_version_of_tls_is_refused() -> None:
    identity = new_identity()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    with pytest.raises(EncryptionError, match="TLS failed"):
        TlsRecords(identity).decrypt(outgoing.read())


def test_every_replica_has_a_certificate_of_its_own() -> None:
    assert new_identity().fingerprint != new_identity().fingerprint


class Tap:
    """Passes bytes on between a Router and a board, and keeps them."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def before(self, address: ChannelAddress) -> AsyncIterator[ChannelAddress]:
        """Yield the address at which it listens for that one."""

        async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(address.host, address.port)
            for source, sink in ((reader, there[1]), (there[0], writer)):
                task = asyncio.get_running_loop().create_task(self._pass_on(source, sink))
                self.tasks.add(task)

        server = await asyncio.start_server(joined, "127.0.0.1", 0)
        try:
            yield replace(address, port=server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                self.seen += data
                sink.write(data)
        finally:
            sink.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["in clear", "encrypted"])
async def test_who_listens_in_reads_neither_prompt_nor_answer_where_it_is_encrypted(
    encrypted: bool,
) -> None:
    board, tap = Board("sim-0", ENCRYPTED if encrypted else PATIENT), Tap()
    board.steps = words("a wolf", " in sheep's clothing")
    await board.outlet.listen("127.0.0.1")
    assert board.outlet.address is not None
    async with tap.before(board.outlet.address) as tapped:
        board.offers = lambda: tapped
        async with router(board) as (channels, [link]):
            line = channels.line("replica of sim-0")
            assert line is not None
            inbox = line.generate(GenerateRequest(PROMPT, "m", (1,), 4))
            await until(lambda: inbox.over)
            assert spoken(await read(link, board)) == "a wolf in sheep's clothing"
            assert board.streamed == 0
    assert [word in tap.seen for word in (PROMPT.encode(), b"a wolf")] == [not encrypted] * 2


async def test_a_router_connects_to_no_board_that_cannot_encrypt_where_it_must(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = Board("sim-0", PATIENT)
    board.steps = words("Hello")
    async with router(board, config=ENCRYPTED, connected=False) as (channels, [link]):
        with caplog.at_level(logging.WARNING):
            await link.reports()
            await until(lambda: "channel.encrypt: always requires" in caplog.text)
        assert channels.line("replica of sim-0") is None
        assert spoken(await read(link, board)) == "Hello"
        assert board.streamed == 1


async def test_an_impostor_at_the_board_s_address_is_named_and_its_answers_are_not_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It even knows the key, as who reads Ray's traffic would, and has a certificate of its own."""
    board, impostor = Board("sim-0", ENCRYPTED), Board("sim-0", ENCRYPTED)
    board.steps, impostor.steps = words("Hello"), words("Lies")
    await board.outlet.listen("127.0.0.1")
    impostor.outlet._key = board.outlet._key
    await impostor.outlet.listen("127.0.0.1")
    right, wrong = board.outlet.address, impostor.outlet.address
    assert right is not None
    assert wrong is not None
    board.offers = lambda: replace(right, port=wrong.port)
    async with router(board, connected=False) as (_, [link]):
        with caplog.at_level(logging.WARNING):
            await link.reports()
            await until(lambda: "the certificate is not the board's" in caplog.text)
        assert spoken(await read(link, board)) == "Hello"
        assert impostor.requests == []
    await impostor.outlet.close()


async def test_an_opening_with_more_behind_it_in_clear_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = Board("sim-0", ENCRYPTED)
    board.steps = words("Hello")
    await board.outlet.listen("127.0.0.1")
    address = board.outlet.address
    assert address is not None

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader, real = await asyncio.open_connection(address.host, address.port)
        opening = await reader.readexactly(RouterHandshake(b"").need)
        writer.write(opening + bytes(64))
        await writer.drain()
        for one in (real, writer):
            one.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, family=socket.AF_INET)
    board.offers = lambda: replace(address, port=server.sockets[0].getsockname()[1])
    async with router(board, connected=False) as (_, [link]):
        with caplog.at_level(logging.WARNING):
            await link.reports()
            await until(lambda: "in clear" in caplog.text)
    server.close()
