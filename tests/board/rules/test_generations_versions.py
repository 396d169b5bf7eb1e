"""Which version of the weights an answer is made with, and that it says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.rules.generations import VERSIONS_REMEMBERED, VersionCounters, VersionSpans
from rkserve.core.board_report import GenerationState, VersionFigures
from rkserve.core.desired_state import InFlight, Probe, Weights
from rkserve.core.errors import AdapterBroken, ModelNotFound
from rkserve.core.messages import ControlAction, FinishReason, VersionSpan
from rkserve.native.sim import models as sim_models
from tests.board.operations.test_adopt import in_prefill, play
from tests.support.boards.board_bench import Listener, until
from tests.support.boards.holding import KINDS, LINE, SAYING, Governed, Oracle
from tests.support.sim.sim_board import words


@pytest.mark.promise(
    "Versions in answers", "Every answer has the versions of its weights, range by range"
)
@pytest.mark.parametrize(
    ("runs", "tokens", "spans"),
    [
        pytest.param([], 0, [], id="no run"),
        pytest.param([("a", 0)], 5, [("a", 0, 5)], id="one run"),
        pytest.param([("a", 0), ("a", 3)], 5, [("a", 0, 5)], id="goes on with the same"),
        pytest.param([("a", 0), ("b", 3)], 5, [("a", 0, 3), ("b", 3, 5)], id="switched"),
        pytest.param([("a", 0), ("b", 3)], 3, [("a", 0, 3)], id="nothing came after the switch"),
        pytest.param([("a", 0), ("b", 0)], 4, [("b", 0, 4)], id="nothing came before it"),
        pytest.param([("a", 0), ("b", 9), ("c", 4)], 6, [("a", 0, 4), ("c", 4, 6)], id="edited"),
        pytest.param([("a", 2)], 4, [("a", 0, 4)], id="an edit before the first run"),
        pytest.param([("a", 0), ("b", 5)], 3, [("a", 0, 3)], id="taken back at the end"),
    ],
)
def test_spans_cover_all_tokens_in_order(
    runs: list[tuple[str, int]], tokens: int, spans: list[tuple[str, int, int]]
) -> None:
    found = VersionSpans()
    for label, at in runs:
        found.begin(label, at)
    assert found.of(tokens) == tuple(VersionSpan(*span) for span in spans)


def test_the_book_forgets_what_was_not_used_for_longest() -> None:
    book = VersionCounters()
    book.add("first", requests=1)
    for number in range(VERSIONS_REMEMBERED):
        book.add(f"v{number}", requests=1)
        book.add("v0", tokens=10, decode_ms=5.0)
    assert len(book.figures) == VERSIONS_REMEMBERED
    assert book.figures[-1] == VersionFigures(
        "v0", 1, 0, 10 * VERSIONS_REMEMBERED, 5.0 * VERSIONS_REMEMBERED
    )
    assert "first" not in {one.version for one in book.figures}


@pytest.mark.promise("Adapters", "In-flight requests are pinned, switched or aborted, as requested")
@KINDS
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
@pytest.mark.parametrize("in_flight", list(InFlight), ids=[how.value for how in InFlight])
def test_what_runs_keeps_its_version_goes_on_with_the_new_one_or_ends(
    tmp_path: Path, release: str, n_batch: int, native: bool, in_flight: InFlight
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        await told.serve("v1")
        runs = told.ask(line=LINE, native_pause=native)
        await told.said(runs, 5)
        waits = told.ask(f"{SAYING} two", line=LINE)
        adoption = await told.serve("v2", in_flight)
        told.pace()
        labels = {
            InFlight.PIN: {f"{LINE}@v1"},
            InFlight.SWITCH: {f"{LINE}@v1", f"{LINE}@v2"},
            InFlight.ABORT: {f"{LINE}@v1"},
        }
        for client in (runs, waits):
            await client.end()
            oracle.check(client, told.versions)
        assert runs.finished is not None
        assert {span.version for span in runs.finished.versions} == labels[in_flight]
        assert waits.finished is not None
        assert [span.version for span in waits.finished.versions] == [f"{LINE}@v2"]
        assert adoption.switched == int(in_flight is InFlight.SWITCH)
        assert (runs.finished.reason is FinishReason.ABORT) == (in_flight is InFlight.ABORT)

    play(tmp_path, body, release, n_batch)


@KINDS
def test_what_is_held_goes_on_with_the_version_that_came_meanwhile(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        await told.serve("v1")
        clients = [told.ask(f"{SAYING} {n}", line=LINE, native_pause=n == 0) for n in range(3)]
        keeps = told.ask(f"{SAYING} and keep", line=LINE, keep_version=True)
        await told.said(clients[0], 5)
        await told.hold(adapter=LINE)
        await told.serve("v2", InFlight.SWITCH, pauses=())
        for client in (*clients, keeps):
            await client.end()
            oracle.check(client, told.versions)
        found = [span.version for span in clients[0].finished.versions]  # type: ignore[union-attr]
        assert found == [f"{LINE}@v1", f"{LINE}@v2"]

    play(tmp_path, body, release, n_batch)


@pytest.mark.promise("Versions in answers", "All are stamped, none is stale after a commit")
def test_nothing_that_begins_after_a_change_is_stale(tmp_path: Path) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        await told.serve("v1")
        await told.hold()
        clients = [told.ask(f"{SAYING} {n}", 6, line=LINE) for n in range(3)]
        keeps = told.ask(f"{SAYING} keep", 6, line=LINE, keep_version=True)
        await until(lambda: told.board.report().queued == 4)
        await told.serve("v2", pauses=())
        for client in (*clients, keeps):
            await client.end()
            assert client.finished is not None
            assert [span.version for span in client.finished.versions] == [f"{LINE}@v2"]
            oracle.check(client, told.versions)

    play(tmp_path, body)


def test_a_batch_splits_where_a_change_gives_its_requests_two_versions(tmp_path: Path) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        await told.serve("v1")
        await told.hold()
        line = told.ask(line=LINE)
        named = told.ask(adapter=told.versions["v1"].ref)
        await until(lambda: told.board.report().queued == 2)
        await told.serve("v2", pauses=())
        for client, version in ((line, "v2"), (named, "v1")):
            await client.end()
            assert client.finished is not None
            assert [span.version for span in client.finished.versions] == [f"{LINE}@{version}"]
            oracle.check(client, told.versions)

    play(tmp_path, body, n_batch=2)


def test_a_new_label_counts_from_the_token_on_at_which_it_came(tmp_path: Path) -> None:
    async def body(told: Governed, _: Oracle) -> None:
        client = told.ask()
        await told.said(client, 5)
        model = client.asked.model
        await told.tell(weights=(Weights(model, "step-7"),))
        told.pace()
        await client.end()
        assert client.finished is not None
        assert [span.version for span in client.finished.versions] == ["default", "step-7"]
        assert client.finished.versions[-1].end == len(client.ids)

    play(tmp_path, body)


def test_the_report_counts_by_version(tmp_path: Path) -> None:
    async def body(told: Governed, _: Oracle) -> None:
        await told.serve("v1")
        for extra in ({}, {"line": LINE}, {"line": LINE}):
            asked: dict[str, Any] = extra
            await told.ask(max_tokens=7, **asked).end()
        broken = told.versions["v2"].ref.__class__("tone", "none", "0" * 64)
        with pytest.raises(AdapterBroken):
            await told.ask(adapter=broken).end()
        with pytest.raises(ModelNotFound):
            await told.ask(line="nobody").end()
        found = {
            one.version: (one.requests, one.failed, one.tokens)
            for one in told.board.report().versions
        }
        # The runtime counts decoding steps: the first token of a run comes with its prefill.
        assert found == {"default": (1, 0, 6), "tone@v1": (2, 0, 12), "tone@none": (0, 1, 0)}

    play(tmp_path, body)


@KINDS
def test_a_probe_changes_nothing_of_what_is_served(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        await told.serve("v1")
        client = told.ask(line=LINE)
        await told.said(client, 5)
        ref = told.versions["v2"].ref
        probing = asyncio.create_task(told.board.load_adapter(ref, client.asked.prompt_ids, 8))
        await until(lambda: told.board.report().queued == 1)
        told.pace()
        await client.end()
        probe = await probing
        assert (probe.board_id, probe.key, probe.tokens) == ("b", ref.key, 8)
        assert ref.key in told.board.report().adapters
        oracle.check(client, told.versions)
        after = told.ask(f"{SAYING} after", line=LINE)
        await after.end()
        oracle.check(after, told.versions)
        assert after.finished is not None
        assert [span.version for span in after.finished.versions] == [f"{LINE}@v1"]
        # Of what the runtime refuses, the engine and its board live on.
        bad = told.stage_content("bad", sim_models.render_adapter("Tone", base="another-model"))
        with pytest.raises(AdapterBroken):
            await told.board.load_adapter(bad.ref, client.asked.prompt_ids, 8)
        assert told.board.report().engine_starts == 1
        await told.ask(max_tokens=3).end()

    play(tmp_path, body, release, n_batch)


LABEL = f"{LINE}@v1"


async def trial(told: Governed, version: str, tokens: int = 4) -> Probe:
    return await told.board.load_adapter(told.versions[version].ref, words(SAYING), tokens)


async def said_and_stand_again(told: Governed, client: Listener) -> None:
    """As ``told.said``, and once more where it has gone on; a trial is shorter and passes."""
    await told.said(client, 5)
    told.sim.gate("token:5", then=partial(told.stand, 5))


@KINDS
def test_what_is_loaded_and_was_tried_is_known_at_once(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        first = await trial(told, "v2")
        client = told.ask(max_tokens=400)
        await told.said(client, 4)
        run, again = told.board.slot.live.running, await trial(told, "v2")
        assert told.board.slot.live.running is run is not None
        assert again == replace(first, load_ms=0.0)
        assert first.load_ms > 0
        await client.hang_up()
        # It is known of this engine only.
        await told.board.refresh("for the test")
        assert (await trial(told, "v2")).load_ms > 0

    play(tmp_path, body, release, n_batch)


@KINDS
def test_what_serves_already_is_tried_and_two_who_ask_share_a_trial(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, _: Oracle) -> None:
        await told.serve("v1")
        await told.ask(max_tokens=3, line=LINE).end()
        runs = len(told.sim.tap.commands)
        found = await asyncio.gather(*(trial(told, "v1") for _ in range(3)))
        assert {probe.tokens for probe in found} == {4}
        assert len(told.sim.tap.commands) == runs + 1

    play(tmp_path, body, release, n_batch)


@KINDS
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
def test_a_long_answer_makes_way_for_a_trial_and_goes_on_by_itself(
    tmp_path: Path, release: str, n_batch: int, native: bool
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        await told.serve("v1")
        clients = [told.ask(f"{SAYING} {n}", 300, line=LINE, native_pause=native) for n in range(4)]
        await said_and_stand_again(told, clients[0])
        assert (await trial(told, "v2")).tokens == 4
        there = len(clients[0].ids)
        assert not clients[0].task.done()
        assert 5 <= there < 300
        told.pace()
        for client in clients:
            assert (await client.end())[1] in (FinishReason.LENGTH, FinishReason.STOP)
            oracle.check(client, told.versions)
            assert client.finished is not None
            assert [span.version for span in client.finished.versions] == [LABEL]
        assert len(clients[0].ids) > there
        assert told.board.report().pauses == 0

    play(tmp_path, body, release, n_batch, load_patience_s=0.05)


@KINDS
def test_a_switch_of_versions_meets_the_request_that_made_way(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        await told.serve("v1")
        client = told.ask(max_tokens=300, line=LINE)
        await said_and_stand_again(told, client)
        await trial(told, "v2")
        await told.serve("v2", InFlight.SWITCH)
        told.pace()
        await client.end()
        oracle.check(client, told.versions)
        assert client.finished is not None
        assert [span.version for span in client.finished.versions] == [LABEL, f"{LINE}@v2"]

    play(tmp_path, body, release, n_batch, load_patience_s=0.05)


@KINDS
@pytest.mark.parametrize("what", ["abort", "hang up", "pause", "hold", "end"])
def test_what_makes_way_can_still_be_told_everything(
    tmp_path: Path, release: str, n_batch: int, what: str
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        client = told.ask(max_tokens=8 if what == "end" else 60, native_pause=True)
        other = told.ask(f"{SAYING} other", 20)
        await said_and_stand_again(told, client)
        loading = asyncio.create_task(trial(told, "v2"))
        await until(lambda: told.state(client) is not GenerationState.GENERATING)
        if what == "abort":
            await told.board.control("g1", ControlAction.ABORT)
        elif what == "hang up":
            await client.hang_up()
        elif what == "hold":
            await told.hold()
            # In a batch it has left its run already, and only waits for the board.
            assert told.state(client) in (GenerationState.PAUSED, GenerationState.QUEUED)
            assert (await loading).tokens == 4
            await told.release()
        elif what == "pause" and told.state(client) is GenerationState.PAUSING:
            [info] = await told.board.control("g1", ControlAction.PAUSE)
            assert (info.state, info.paused_by) == (GenerationState.PAUSED, "request")
            assert (await loading).tokens == 4
            await told.board.control("g1", ControlAction.RESUME)
        told.pace()
        assert (await loading).tokens == 4
        if what != "hang up":
            reason = (await client.end())[1]
            assert (reason is FinishReason.ABORT) == (what == "abort")
            oracle.check(client, told.versions)
        await other.end()
        oracle.check(other, told.versions)
        await until(lambda: told.board.report().running == 0)

    play(tmp_path, body, release, n_batch, load_patience_s=0.01)


@KINDS
def test_a_trial_that_meets_a_prefill_takes_the_board_at_its_end(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        clients = await in_prefill(told, n_batch)
        loading = asyncio.create_task(trial(told, "v2"))
        await until(lambda: told.state(clients[0]) is GenerationState.QUEUED)
        told.pace()
        assert (await loading).tokens == 4
        for client in clients:
            await client.end()
            oracle.check(client, told.versions)

    play(tmp_path, body, release, n_batch, load_patience_s=0.01)


@KINDS
def test_a_trial_that_nobody_waits_for_any_more_is_withdrawn(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, oracle: Oracle) -> None:
        client = told.ask(max_tokens=100)
        await told.said(client, 4)
        loading = asyncio.create_task(trial(told, "v2"))
        await until(lambda: told.board.report().queued == 1)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert told.board.report().queued == 0
        told.pace()
        await client.end()
        oracle.check(client, told.versions)
        assert told.board.report().adapters == ()

    play(tmp_path, body, release, n_batch)
