"""Random use of a board: everyone gets their own answer and nothing else, whatever others do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.board.engine.protocol import RunCommand
from rkserve.core.board_report import BoardState
from rkserve.core.errors import BoardFailed, BoardOutOfOrder, RkserveError
from rkserve.core.messages import Delta, Event, Finished, FinishReason
from rkserve.native.runtime import RunEnd
from tests.support.boards.board_bench import PATIENCE, SETTINGS, Bench, request, until
from tests.support.boards.fakes import EOS, Script
from tests.support.boards.own_time import run_loop

LENGTH, STOP_AT = 6, 3


@dataclass(frozen=True)
class Client:
    """Comes after ``wait`` turns of the loop; hangs up after ``patience`` events, or stays.

    Deltas are passed on to it where it is ``direct``.
    """

    wait: int
    patience: int | None
    max_tokens: int
    stop: bool
    trouble: Script | None
    direct: bool = False


class EchoBench(Bench):
    """Every run answers with the marker in its prompt, and has the trouble that goes with it."""

    def __init__(self, troubles: Mapping[int, Script | None], *, per_run: bool) -> None:
        patience = replace(PATIENCE, first_token_s=0.05, token_s=0.05, abort_s=0.02)
        limits = replace(SETTINGS, patience=patience, crash_limit=99, queue_limit=99)
        super().__init__(settings=limits, per_run=per_run)
        self._troubles = dict(troubles)

    def _next(self, command: RunCommand) -> Script:
        # The end of a prompt is sent also where the rest is in the KV cache.
        marker = command.entries[0].ids[-1]
        tokens = [(1000 * marker + at, piece(marker, at)) for at in range(LENGTH)]
        script = self._troubles.pop(marker, None) or Script([])
        return replace(script, tokens=[*tokens, (EOS, b"")])


def piece(marker: int, at: int) -> bytes:
    return b"%d.%d;" % (marker, at)


def expected(marker: int, client: Client) -> tuple[str, FinishReason]:
    """Return the answer that this client has to get if nothing happens to its own run."""
    stopped = client.stop and client.max_tokens > STOP_AT
    count = STOP_AT if stopped else min(client.max_tokens, LENGTH)
    whole = stopped or client.max_tokens > LENGTH
    text = b"".join(piece(marker, at) for at in range(count)).decode()
    return text, FinishReason.STOP if whole else FinishReason.LENGTH


async def consume(bench: EchoBench, marker: int, client: Client) -> None:
    """Be this client. Its own trouble may cost it its answer, another's may not."""
    for _ in range(client.wait):
        await asyncio.sleep(0)
    stop = (f"{marker}.{STOP_AT}",) if client.stop else ()
    text, seen, reason = "", 0, None

    def take(event: Event) -> None:
        nonlocal text, seen, reason
        seen += 1
        if isinstance(event, Delta):
            assert all(i == EOS or i // 1000 == marker for i in event.token_ids)
            text += event.text
        elif isinstance(event, Finished):
            reason = event.reason

    asked = request(5, marker, max_tokens=client.max_tokens, stop=stop)
    events = bench.board.generate(asked, pass_on=take if client.direct else None)
    try:
        async for event in events:
            take(event)
            if client.patience is not None and seen >= client.patience:
                break
    except RkserveError as exc:
        # A board that is hung takes no request; whoever waits for it already is not concerned.
        refused = type(exc) is BoardOutOfOrder and exc.reason.startswith("hung: ") and seen == 0
        assert refused or client.trouble is not None
        return
    finally:
        await events.aclose()
    answer, why = expected(marker, client)
    if reason is None:
        assert answer.startswith(text)
    else:
        assert (text, reason) == (answer, why)


TROUBLES = st.one_of(
    st.builds(Script, st.just([]), die_at=st.integers(0, LENGTH)),
    st.builds(Script, st.just([]), hang_at=st.integers(0, LENGTH), deaf=st.booleans()),
    st.builds(Script, st.just([]), end=st.just(RunEnd.FAILED)),
    st.builds(Script, st.just([]), raises=st.just(TypeError("a bug"))),
)
HARMLESS = st.builds(Script, st.just([]), late=st.integers(1, 2), kv_off=st.sampled_from([0, -2]))
CLIENT = st.builds(
    Client,
    wait=st.integers(0, 20),
    patience=st.one_of(st.none(), st.integers(0, 6)),
    max_tokens=st.integers(1, 8),
    stop=st.booleans(),
    direct=st.booleans(),
    trouble=st.one_of(st.none(), st.none(), st.none(), HARMLESS, TROUBLES),
)


@settings(max_examples=25, deadline=None)
@given(clients=st.lists(CLIENT, min_size=1, max_size=8), per_run=st.booleans())
def test_everyone_gets_their_own_answer_and_the_board_is_usable_afterwards(
    clients: list[Client], per_run: bool
) -> None:
    async def main() -> None:
        markers = dict(enumerate(clients, start=10))
        bench = EchoBench({m: c.trouble for m, c in markers.items()}, per_run=per_run)
        await bench.board.start()
        await asyncio.gather(*(consume(bench, m, c) for m, c in markers.items()))
        await until(lambda: bench.state is BoardState.READY)
        last = Client(wait=0, patience=None, max_tokens=8, stop=False, trouble=None)
        await consume(bench, 99, last)
        report = bench.board.report()
        assert (report.running, report.queued) == (0, 0)
        await bench.board.stop()
        with pytest.raises(BoardFailed):
            await anext(bench.board.generate(request()))

    run_loop(main())
