"""The benchmark's arithmetic: what it reads, what it computes, what it says. No cluster."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.bench.__main__ import REPORT, SECONDS, options
from rkserve.bench.cases import Load, Loaded, Pair
from rkserve.bench.child import BenchFailed, Child
from rkserve.bench.client import hang_up
from rkserve.bench.figures import (
    CpuUse,
    Spread,
    board_rates,
    decode_rate,
    flaws,
    flaws_of_hang_ups,
    freed_ms,
    gaps_ms,
    never_idle_rate,
    percentile,
    ratio,
    tokens_between,
    ttft_ms,
    whole_rate,
)
from rkserve.bench.procfs import (
    MS_PER_TICK,
    Identity,
    MachineTimes,
    Memory,
    Reading,
    Stat,
    descendants,
    is_alive,
    memory,
    parse_machine,
    parse_rollup,
    parse_stat,
    part_of,
    snapshot,
)
from rkserve.bench.prompts import messages_of_length
from rkserve.bench.report import Machine, Results, render
from rkserve.bench.stream import Exchange, HangUp, Incoming, read_exchange
from rkserve.bench.summary import (
    Verdict,
    hang_up_figures,
    load_figures,
    pair_figures,
    verdicts,
)
from rkserve.bench.tables import figure, table
from rkserve.config import resolve_folder
from rkserve.modelfolder import open_model_folder
from rkserve.wire import sse
from rkserve.wire.renderer import Renderer

MB = 1_000_000


def answer(sent_s: float, first_s: float, end_s: float, board: str = "sim-0") -> Exchange:
    """One of 5 tokens, evenly spread."""
    step = (end_s - first_s) / 4
    texts = tuple(first_s + step * index for index in range(5))
    return Exchange(
        sent_s, texts, end_s, board=board, prompt_tokens=128, completion_tokens=5, queue_ms=100.0
    )


# -- reading /proc --------------------------------------------------------------------------------


def stat_line(pid: int, name: str, parent: int, ticks: tuple[int, int], nice: int = 0) -> str:
    user, system = ticks
    return (
        f"{pid} ({name}) S {parent} 1 1 0 -1 4194560 100 0 0 0 {user} {system} 7 7 "
        f"20 {nice} 3 0 {pid * 10} 1000000 500 18446744073709551615"
    )


def write_process(root: Path, pid: int, parent: int, command: str, rss: int = 10) -> None:
    folder = root / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(stat_line(pid, "python", parent, (1, 1)))
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
    (folder / "smaps_rollup").write_text(f"00-ff ---p\nRss:   {rss} kB\nPss:   {rss // 2} kB\n")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("python", id="plain"),
        pytest.param("ray::Serve Replica", id="with a blank"),
        pytest.param("a) S 1 (b", id="that imitates the fields behind it"),
    ],
)
def test_a_stat_line_is_read_whatever_the_process_is_called(name: str) -> None:
    stat = parse_stat(stat_line(42, name, 7, (150, 50), nice=15))

    assert stat.identity == Identity(42, 420)
    assert (stat.parent, stat.nice, stat.zombie) == (7, 15, False)
    assert stat.cpu_ms == pytest.approx(200 * MS_PER_TICK)


def test_memory_is_read_in_bytes_and_swap_lines_are_not_mistaken_for_it() -> None:
    text = (
        "55-7f ---p 0 0:0 0 [rollup]\nRss:  2000 kB\nPss:  900 kB\nPss_Dirty: 5 kB\nSwapPss: 7 kB"
    )

    assert parse_rollup(text) == Memory(2000 * 1024, 900 * 1024)


def test_the_machine_is_busy_with_all_but_idling_waiting_and_being_stolen_from() -> None:
    times = parse_machine("cpu  100 20 30 4000 500 1 2 60 99 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")

    assert times.busy_ms == pytest.approx(153 * MS_PER_TICK)
    assert times.stolen_ms == pytest.approx(60 * MS_PER_TICK)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("ray::ServeReplica:rkserve:Board-sim", "board replica"),
        ("ray::ServeReplica:rkserve:Router", "router"),
        ("ray::ProxyActor", "proxy"),
        ("ray::ServeController", "controller"),
        ("python -m rkserve.native.engine 1.0", "engine"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/s", "raylet"),
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/l", "gcs"),
        ("python -m rkserve.bench.client", "client"),
        ("ray::IDLE", "other Ray"),
    ],
)
def test_a_process_is_known_by_its_command_line(command: str, part: str) -> None:
    assert part_of(command) == part


def test_a_tree_is_followed_down_also_to_pids_that_are_smaller_than_their_parents(
    tmp_path: Path,
) -> None:
    write_process(tmp_path, 500, 1, "python -m rkserve.bench.cluster")
    write_process(tmp_path, 30, 500, "ray::ServeReplica:rkserve:Board-sim", rss=4000)
    write_process(tmp_path, 700, 30, "python -m rkserve.native.engine 1.0")
    write_process(tmp_path, 31, 1, "ray::ServeReplica:other:Board-sim")

    found = {identity.pid: part for identity, (part, _) in snapshot(tmp_path, [500]).items()}

    assert found == {500: "driver", 30: "board replica", 700: "engine"}
    assert {one.pid for one in descendants(tmp_path, 500)} == {30, 700}
    assert memory(tmp_path, [500])["board replica"] == [Memory(4000 * 1024, 2000 * 1024)]


def test_a_pid_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    write_process(tmp_path, 30, 1, "x")

    assert is_alive(tmp_path, Identity(30, 300))
    assert not is_alive(tmp_path, Identity(30, 299))
    assert not is_alive(tmp_path, Identity(31, 310))


def reading(at_s: float, busy_ms: float, **cpu_ms: float) -> Reading:
    processes = {
        Identity(number, 0): (part, Stat(Identity(number, 0), 1, spent, nice=15, zombie=False))
        for number, (part, spent) in enumerate(cpu_ms.items())
    }
    return Reading(at_s, processes, MachineTimes(busy_ms, stolen_ms=at_s * 10))


def test_cpu_use_adds_up_over_stretches_and_counts_a_new_process_from_its_start() -> None:
    use = CpuUse(cores=2)

    use.add(reading(0.0, 0.0, router=100.0), reading(1.0, 600.0, router=150.0, engine=30.0))
    use.add(reading(5.0, 900.0, router=400.0), reading(6.0, 1100.0, router=420.0))

    assert use.by_part_ms == {"router": 70.0, "engine": 30.0}
    assert use.wall_ms == pytest.approx(2000.0)
    assert use.ours_share == pytest.approx(100 / 4000)
    assert use.others_share == pytest.approx(700 / 4000)
    assert use.stolen_share == pytest.approx(20 / 4000)


# -- reading an answer ----------------------------------------------------------------------------


def chunk(text: str | None, **more: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return sse.data({"choices": choices, **more})


USAGE = {
    "prompt_tokens": 128,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 3},
}
EVENTS = (
    chunk("", id="role"),
    sse.PING,
    chunk("Hello"),
    chunk(" wörld"),
    sse.data({"choices": [{"delta": {}}], "timings": {"queue_ms": 12.5, "prefill_ms": 7.0}}),
    chunk(None, usage=USAGE) + sse.DONE,
)
HEAD = b"HTTP/1.1 200 OK\r\nX-Rkserve-Board: sim-1\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(parts: tuple[bytes, ...]) -> list[bytes]:
    return [b"%x\r\n%s\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"]


def test_a_streamed_answer_is_timed_by_the_events_that_bring_text() -> None:
    incoming = Incoming(sent_s=1.0)
    for index, data in enumerate((HEAD, *chunked(EVENTS))):
        assert not incoming.done
        incoming.feed(data, 2.0 + index)

    assert read_exchange(incoming) == Exchange(
        sent_s=1.0,
        content_s=(5.0, 6.0),
        end_s=9.0,
        board="sim-1",
        prompt_tokens=128,
        completion_tokens=2,
        cached_tokens=3,
        queue_ms=12.5,
        prefill_ms=7.0,
    )


@pytest.mark.parametrize("size", [1, 2, 7, 64, 100_000])
def test_it_does_not_matter_how_the_network_cuts_an_answer(size: int) -> None:
    wire = HEAD + b"".join(chunked(EVENTS))
    incoming = Incoming(sent_s=0.0)
    for at in range(0, len(wire), size):
        incoming.feed(wire[at : at + size], 1.0)

    exchange = read_exchange(incoming)

    assert incoming.done
    assert (len(exchange.content_s), exchange.completion_tokens) == (2, 2)
    assert exchange.error == ""


def test_a_refusal_is_an_error_with_the_servers_words() -> None:
    body = json.dumps({"error": {"message": "busy"}}).encode()
    incoming = Incoming(sent_s=0.0)
    incoming.feed(b"HTTP/1.1 429 Too Many\r\ncontent-length: %d\r\n\r\n" % len(body), 1.0)
    assert not incoming.done
    incoming.feed(body, 2.0)

    assert incoming.done
    assert read_exchange(incoming).error == 'HTTP 429: {"error": {"message": "busy"}}'


@pytest.mark.parametrize(
    ("events", "error"),
    [
        pytest.param(
            (chunk("a"), sse.data({"error": {"message": "it died"}})), "it died", id="it says so"
        ),
        pytest.param((chunk("a"),), "the answer ended without its usage", id="it just ends"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(events: tuple[bytes, ...], error: str) -> None:
    incoming = Incoming(sent_s=0.0)
    incoming.feed(HEAD + b"".join(chunked(events)), 1.0)

    assert read_exchange(incoming).error == error


def test_an_exchange_travels_as_json() -> None:
    exchange = answer(0.0, 1.0, 2.0)

    assert Exchange.from_json(json.loads(json.dumps(exchange.to_json()))) == exchange


# -- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        pytest.param([3.0, 1.0, 2.0], 0.5, 2.0, id="the middle of an odd number"),
        pytest.param([1.0, 2.0, 3.0, 4.0], 0.5, 2.5, id="between two of an even number"),
        pytest.param([1.0, 2.0], 1.0, 2.0, id="the largest"),
        pytest.param([7.0], 0.99, 7.0, id="of a single value"),
        pytest.param([float(n) for n in range(101)], 0.99, 99.0, id="of a hundred"),
    ],
)
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_a_ratio_is_that_of_the_medians_and_lies_in_its_interval() -> None:
    rng = random.Random(1)
    alone = [100 + rng.gauss(0, 2) for _ in range(30)]
    through = [value * 1.1 for value in alone]

    found = ratio(through, alone, random.Random(0))

    assert found.value == pytest.approx(1.1)
    assert found.low < 1.1 < found.high
    assert found.high - found.low < 0.05


def test_one_answer_gives_ttft_gaps_and_both_rates() -> None:
    exchange = answer(sent_s=10.0, first_s=11.0, end_s=13.0)

    assert ttft_ms(exchange) == pytest.approx(1000)
    assert gaps_ms(exchange) == pytest.approx([500] * 4)
    assert decode_rate(exchange) == pytest.approx(4 / 2)
    assert whole_rate(exchange) == pytest.approx(5 / 3)


def test_a_board_that_is_never_idle_pays_for_its_prefills() -> None:
    runs = [answer(0, 1, 2), answer(100, 101, 103)]

    assert never_idle_rate(runs) == pytest.approx(10 / 5)


def back_to_back(board: str, count: int, offset_s: float = 0.0) -> list[Exchange]:
    """Runs of 2 s that follow each other at once: 2.5 tokens/s."""
    starts = [offset_s + 2.0 * index for index in range(count)]
    return [answer(start, start + 0.5, start + 2.0, board) for start in starts]


@pytest.mark.parametrize("offset_s", [0.0, 0.3, 1.1, 1.9])
def test_a_boards_rate_does_not_depend_on_where_the_window_cuts_its_cycle(offset_s: float) -> None:
    runs = back_to_back("sim-0", 20, offset_s)

    rates = board_rates(runs, start_s=7.0, end_s=21.5, load_end_s=30.0)

    assert rates == {"sim-0": pytest.approx(2.5)}


def test_a_board_that_pauses_or_stops_pays_for_it() -> None:
    with_pause = [*back_to_back("sim-0", 5), *back_to_back("sim-0", 5, offset_s=20.0)]
    stops = back_to_back("sim-1", 5)

    rates = board_rates([*with_pause, *stops], start_s=4.0, end_s=28.0, load_end_s=30.0)

    assert rates["sim-0"] == pytest.approx(5 * 7 / 24)  # 7 answers between the ends at 4 and 28
    assert rates["sim-1"] == pytest.approx(5 * 3 / 26)  # 3 after the end at 4, until the load's end


def test_answers_that_the_window_cuts_count_with_what_arrived_in_it() -> None:
    whole = answer(0.0, 1.0, 2.0)
    cut = Exchange(sent_s=1.0, content_s=(1.5, 2.5, 3.5), board="sim-0")

    assert tokens_between([whole, cut], 1.5, 3.0) == pytest.approx(3 + 2)


def test_answers_unfit_for_measuring_are_named_and_counted() -> None:
    fine, hung_up = answer(0, 1, 2), Exchange(sent_s=0.0)
    short = Exchange(0.0, (1.0,), 2.0, prompt_tokens=128, completion_tokens=4, cached_tokens=64)

    assert flaws([fine, hung_up], 128, 5) == []
    assert flaws([short, short, Exchange(0.0, error="HTTP 429: busy")], 128, 5) == [
        "2 x 4 completion tokens, not 5",
        "2 x 64 cached tokens, not 0",
        "1 x HTTP 429: busy",
    ]


# -- hang-ups -------------------------------------------------------------------------------------


def left_at(closed_s: float, free_after_s: float = 0.05, **of_next: Any) -> HangUp:
    """A client that left, and an answer that was prefilled for 380 ms once the board was free."""
    first_s = closed_s + free_after_s + 0.38
    behind = replace(answer(closed_s - 0.1, first_s, first_s + 1), prefill_ms=380.0)
    left = Exchange(closed_s - 1, (closed_s - 0.2, closed_s - 0.1), board="sim-0")
    return HangUp(left, closed_s, replace(behind, **of_next))


def test_a_board_is_free_when_the_next_answer_comes_less_its_prefill() -> None:
    hang_ups = [left_at(10.0 * n, free_after_s=0.03 + 0.001 * n) for n in range(21)]

    figures = hang_up_figures(hang_ups)

    assert freed_ms(hang_ups[0]) == pytest.approx(30)
    assert figures.freed_ms.p50 == pytest.approx(40)
    assert figures.largest_ms == pytest.approx(50)
    assert figures.step_ms == pytest.approx(1000 / 16.69, rel=0.02)  # the profile's own rate
    assert flaws_of_hang_ups(hang_ups, 128, 5) == []


@pytest.mark.parametrize(
    ("hang_up", "flaw"),
    [
        pytest.param(
            replace(left_at(5.0), left=answer(1, 2, 3)),
            "an answer was not left in mid-stream",
            id="the client stayed to the end",
        ),
        pytest.param(
            replace(left_at(5.0), left=Exchange(4.0, board="sim-0")),
            "an answer was not left in mid-stream",
            id="it left before the first text",
        ),
        pytest.param(
            left_at(5.0, content_s=(), end_s=None),
            "nothing was answered after a hang-up",
            id="the board was never free",
        ),
        pytest.param(
            left_at(5.0, board="sim-1"),
            "the next answer came from another board",
            id="another board was free",
        ),
        pytest.param(
            left_at(5.0, content_s=(4.9, 6.0)),
            "the next answer did not wait for the hang-up",
            id="the board was free before",
        ),
        pytest.param(left_at(5.0, cached_tokens=9), "9 cached tokens, not 0", id="a reused prefix"),
    ],
)
def test_a_hang_up_that_says_nothing_of_the_board_is_named(hang_up: HangUp, flaw: str) -> None:
    assert flaws_of_hang_ups([left_at(1.0), hang_up], 128, 5) == [f"1 x {flaw}"]


class OneBoard:
    """A server that streams to one client until that leaves, and only then to the next."""

    def __init__(self) -> None:
        self.sent = 0
        self.left_s = 0.0
        self._free = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = json.loads(await reader.readexactly(int(head.split(b"content-length: ")[1])))
        writer.write(HEAD)
        try:
            if body["endless"]:
                await self._stream_until_it_leaves(reader, writer)
            else:
                await self._free.wait()
                writer.write(b"".join(chunked(EVENTS)))
                await reader.read()
        finally:
            writer.close()

    async def _stream_until_it_leaves(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        gone = asyncio.ensure_future(reader.read())
        while not gone.done():
            writer.write(b"".join(chunked((chunk("word"),))[:1]))
            self.sent += 1
            await asyncio.wait({gone}, timeout=0.02)
        assert gone.exception() is not None or gone.result() == b""
        self.left_s = time.monotonic()
        self._free.set()


async def hang_up_on(board: OneBoard, events: int, limit_s: float) -> HangUp:
    async with await asyncio.start_server(board.serve, "127.0.0.1", 0) as server:
        return await hang_up(
            {
                "host": "127.0.0.1",
                "port": server.sockets[0].getsockname()[1],
                "leaving": {"endless": True},
                "waiting": {"endless": False},
                "events": events,
                "pause_s": 0.05,
                "until_s": time.monotonic() + limit_s,
            }
        )


def test_the_client_leaves_in_mid_stream_and_waits_for_the_next_answer() -> None:
    async def main() -> None:
        board = OneBoard()
        found = await hang_up_on(board, events=3, limit_s=30)
        assert found.left.end_s is None
        assert 3 <= len(found.left.content_s) <= board.sent
        assert found.closed_s >= found.left.content_s[2] + 0.05
        assert found.closed_s <= board.left_s < found.next.content_s[0]
        assert (found.next.completion_tokens, found.next.prefill_ms) == (2, 7.0)
        assert HangUp.from_json(json.loads(json.dumps(asdict(found)))) == found

    asyncio.run(main())


def test_an_answer_that_does_not_get_far_enough_to_be_left_is_a_failure() -> None:
    with pytest.raises(BenchFailed, match="did not get as far as it should"):
        asyncio.run(hang_up_on(OneBoard(), events=1_000_000, limit_s=0.5))


# -- targets and the report -----------------------------------------------------------------------


def loaded(boards: int, time_scale: float = 1.0, replica_mb: float = 166.0) -> Loaded:
    runs = [run for n in range(boards) for run in back_to_back(f"sim-{n}", 20, 0.1 * n)]
    cpu, idle = CpuUse(2), CpuUse(2)
    cpu.add(reading(0, 0, router=0.0, proxy=0.0), reading(20, 900, router=300.0, proxy=100.0))
    idle.add(reading(0, 0, router=0.0), reading(10, 90, router=50.0))
    memories = {"board replica": [Memory(100 * MB, 50 * MB), Memory(int(replica_mb * MB), 90 * MB)]}
    load = Load(boards, 4 * boards, time_scale)
    return Loaded(load, runs, 5.0, 25.0, 30.0, cpu, memories, idle)


def test_a_load_is_summed_up_against_the_boards_that_it_had() -> None:
    figures = load_figures(loaded(3), board_rate=2.5)

    assert figures.rate == pytest.approx(7.5)
    assert figures.of_sum == pytest.approx(1.0)
    assert figures.unqueued_ttft_ms.p50 == pytest.approx(400)
    assert figures.cpu_ms_per_token == pytest.approx({"router": 2.0, "proxy": 2 / 3}, rel=0.02)
    # 400 ms in 20 s of which idling would take 100.
    assert figures.work_ms_per_token == pytest.approx(2.0, rel=0.02)


def test_a_board_that_never_answers_is_missing_from_the_sum() -> None:
    measured = loaded(3)
    measured.exchanges = [one for one in measured.exchanges if one.board != "sim-2"]

    assert load_figures(measured, board_rate=2.5).of_sum == pytest.approx(2 / 3)


def test_targets_are_judged_from_what_was_measured() -> None:
    alone = [answer(10 * n, 10 * n + 1.0, 10 * n + 3.0) for n in range(5)]
    slow = [answer(10 * n, 10 * n + 1.04, 10 * n + 3.2) for n in range(5)]
    pair = pair_figures(Pair(alone=alone, through=slow))
    paced = loaded(1, replica_mb=251)

    left = hang_up_figures([left_at(1.0, free_after_s=0.27)])

    found = verdicts(pair, left, [(paced, load_figures(paced, board_rate=2.5))])

    measured = [1.04, 2.0 / 2.16, 3.0 / 3.2, 270, 1.0, 251]
    assert [v.measured for v in found] == pytest.approx(measured)
    assert [v.reached for v in found] == [True, False, False, False, True, False]
    assert found[3].bound == pytest.approx(left.step_ms + 200)


@pytest.mark.parametrize(("free_after_s", "reached"), [(0.25, True), (0.27, False)])
def test_a_hang_up_may_take_a_decode_step_and_200_ms(free_after_s: float, reached: bool) -> None:
    left = [left_at(10.0 * n, free_after_s) for n in range(20)]

    (verdict,) = verdicts(None, hang_up_figures(left), [])

    assert verdict.reached is reached


@pytest.mark.parametrize(
    ("measured", "at_most", "reached"),
    [
        pytest.param(1.05, True, True, id="exactly at an upper bound"),
        pytest.param(1.051, True, False, id="above it"),
        pytest.param(1.05, False, True, id="exactly at a lower bound"),
        pytest.param(1.049, False, False, id="below it"),
    ],
)
def test_a_bound_belongs_to_what_reaches_it(measured: float, at_most: bool, reached: bool) -> None:
    assert Verdict("x", measured, 1.05, at_most).reached is reached


def results() -> Results:
    alone = [answer(10 * n, 10 * n + 1.0, 10 * n + 3.0) for n in range(5)]
    pair = Pair(alone=alone, through=alone)
    pair.cpu.add(reading(0, 0, router=0.0), reading(20, 900, router=300.0))
    figures = pair_figures(pair)
    paced = [(one, load_figures(one, 2.5)) for one in (loaded(1), loaded(3))]
    ceiling = [(one, load_figures(one, None)) for one in [loaded(1, time_scale=0)]]
    left = [left_at(10.0 * n) for n in range(20)]
    return Results(
        machine=Machine(2, "Some CPU", 24.0, {"Ray": "2.60.0"}),
        verdicts=verdicts(figures, hang_up_figures(left), [*paced, *ceiling]),
        pair=(pair, figures),
        hang_ups=(left, hang_up_figures(left)),
        paced=paced,
        ceiling=ceiling,
    )


def tables_of(text: str) -> list[list[str]]:
    """The Markdown tables in a text, each as its lines."""
    blocks = (block.splitlines() for block in text.split("\n\n"))
    return [block for block in blocks if block and block[0].startswith("|")]


def test_the_report_holds_every_part_and_well_formed_tables() -> None:
    text = render(results())

    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert [title.partition(" ")[2][:8] for title in titles] == [
        "What it ",
        "(a) The ",
        "A client",
        "(c) Boar",
        "(d) The ",
        "CPU per ",
        "Idle: CP",
        "Resident",
        "Noise",
        "How",
    ]
    found = tables_of(text)
    assert len(found) == 9
    for lines in found:
        assert len({line.count("|") for line in lines}) == 1
        assert len({len(line) for line in lines}) == 1
    assert "| (b) / (a) TTFT, medians " in text
    assert "reached" in text
    assert "| (b) hang-up to free board, p99: decode step + 200 ms " in text
    assert "2 x 166 (90)" in text
    assert "Measured windows: 20 s in (c), 20 s in (d)." in text


def test_a_report_of_some_cases_leaves_the_others_out() -> None:
    everything = results()
    assert everything.pair is not None
    alone_only = Pair(alone=everything.pair[0].alone)
    pair = (alone_only, pair_figures(alone_only))
    some = Results(everything.machine, [], pair, hang_ups=None, paced=[], ceiling=[])

    text = render(some)

    assert "(c)" not in text
    assert "must reach" not in text
    assert len(tables_of(text)) == 1


def test_tables_are_padded_and_figures_stand_to_the_right() -> None:
    assert table(["", "ms"], [["TTFT", figure(12345.678, 1)], ["gap", figure(None)]]) == (
        "|      |       ms |\n| ---- | -------: |\n| TTFT | 12 345.7 |\n| gap  |        - |\n"
    )


def test_a_spread_counts_its_values() -> None:
    spread = Spread.of([1.0, 2.0, 6.0])

    assert (spread.count, spread.mean, spread.p50) == (3, 3.0, 2.0)
    assert spread.p99 == pytest.approx(5.92)


# -- prompts, options, children -------------------------------------------------------------------


def test_prompts_have_exactly_the_tokens_that_were_asked_for_and_differ() -> None:
    renderer = Renderer(open_model_folder(resolve_folder(Path("models/sim-chat"))))

    prompts = [renderer.chat(messages_of_length(renderer, 128, number)).ids for number in range(16)]

    assert {len(ids) for ids in prompts} == {128}
    assert len(set(prompts)) == 16


def test_a_prompt_that_cannot_be_so_short_is_refused() -> None:
    renderer = Renderer(open_model_folder(resolve_folder(Path("models/sim-chat"))))

    with pytest.raises(BenchFailed, match="no prompt of exactly 5 tokens"):
        messages_of_length(renderer, 5, 0)


@pytest.mark.parametrize(
    ("arguments", "cases", "writes"),
    [
        pytest.param([], "abcd", REPORT, id="a full run writes the page"),
        pytest.param(["--quick"], "abcd", None, id="a quick one does not"),
        pytest.param(["--cases", "d,a"], "ad", None, id="neither do some of the cases"),
        pytest.param(["--cases", "c", "--output", "x.md"], "c", Path("x.md"), id="unless asked"),
    ],
)
def test_the_page_is_only_written_from_a_full_run(
    arguments: list[str], cases: str, writes: Path | None
) -> None:
    asked = options(arguments)

    assert (asked.cases, asked.output) == (cases, writes)
    assert asked.seconds == SECONDS or asked.quick


def test_a_case_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(["--cases", "a,e"])

    assert "is not some of a,b,c,d" in capsys.readouterr().err


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A child's module, which also starts a process of its own that nothing else would end."""
    (tmp_path / "echo_child.py").write_text(
        "import os, subprocess\n"
        "from rkserve.bench.child import BenchFailed, serve_commands\n"
        "def carry_out(command):\n"
        "    print('noise on stdout')\n"
        "    if command.get('fail'): raise BenchFailed('it cannot')\n"
        "    if command.get('die'): os._exit(3)\n"
        "    if command.get('spawn'):\n"
        "        orphan = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "        return {'pid': orphan.pid}\n"
        "    return {'echo': command}\n"
        "serve_commands(carry_out)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "echo_child"


def test_a_child_answers_and_what_it_prints_does_not_disturb(echo: str, tmp_path: Path) -> None:
    child = Child(echo, tmp_path / "log")
    try:
        long = "x" * 300_000
        assert child.ask({"text": long}, 30) == {"echo": {"text": long}}
        assert child.ask({"n": 2}, 30) == {"echo": {"n": 2}}
    finally:
        child.close()

    assert "noise on stdout" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param({"fail": True}, "echo_child it cannot", id="it refuses"),
        pytest.param({"die": True}, "echo_child has ended", id="it dies"),
    ],
)
def test_a_childs_failure_is_raised_with_its_log(
    echo: str, tmp_path: Path, command: dict[str, bool], words: str
) -> None:
    child = Child(echo, tmp_path / "log")
    try:
        with pytest.raises(BenchFailed, match=words) as caught:
            child.ask(command, 30)
    finally:
        child.close()

    assert "noise on stdout" in str(caught.value)


def test_closing_a_child_ends_what_it_left_behind(echo: str, tmp_path: Path) -> None:
    child = Child(echo, tmp_path / "log")
    orphan = child.ask({"spawn": True}, 30)["pid"]
    started = parse_stat(Path(f"/proc/{orphan}/stat").read_text()).identity

    child.close()

    assert not is_alive(Path("/proc"), started)


def test_a_child_ends_by_itself_when_its_parent_is_killed(echo: str, tmp_path: Path) -> None:
    import os
    import subprocess

    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom pathlib import Path\nfrom rkserve.bench.child import Child\n"
            f"child = Child({echo!r}, Path({str(tmp_path / 'log')!r}))\n"
            "child.ask({}, 30)\nprint(child.pid, flush=True)\ntime.sleep(600)\n",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    started = parse_stat(Path(f"/proc/{pid}/stat").read_text()).identity

    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    deadline_s = time.monotonic() + 30
    while is_alive(Path("/proc"), started) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_alive(Path("/proc"), started)
