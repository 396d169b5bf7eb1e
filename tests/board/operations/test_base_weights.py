"""The weights of an engine's load: the next ones, their marker, and what follows a refusal."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.operations.base_weights import BaseWeights
from rkserve.board.rules.generations import BoardCounters
from rkserve.board.rules.hang_limits import RunTimeouts
from rkserve.board.rules.obligations import Obligations
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.settings import BoardSettings
from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore
from rkserve.board.storage.staged_artifacts import StagedWeights
from rkserve.core.board_report import HASHING, UNREADABLE, BoardState
from rkserve.core.errors import (
    AdapterBroken,
    BoardBehind,
    LoadFailed,
    RebaseFailed,
    StageFailed,
)
from rkserve.native.sim import models as sim_models
from rkserve.native.sim.models import reseed
from tests.support.boards.board_bench import PLAIN, SETTINGS, Bench, Listener, until
from tests.support.boards.fakes import FakeEngine, run_loop
from tests.support.boards.holding import LINE, in_turn, rest
from tests.support.boards.rebased import (
    BROKEN,
    CONTENT,
    LIMIT_S,
    SEEDS,
    Rebased,
    Voices,
    base_of,
    give,
    play,
    rebased,
)
from tests.support.sim.sim_board import FOLDER, Sim


async def ends(*clients: Listener) -> None:
    await asyncio.gather(*(client.end() for client in clients))


def is_on(it: Rebased, label: str) -> bool:
    report = it.board.report()
    base = it.bases.get(label)
    return (report.state, report.base) == (BoardState.READY, "" if base is None else base.digest)


# -- which file, and whose caches --------------------------------------------------------------


class SlowStore(CacheStore):
    """Notes how often it is asked for which weights, and whether two ask at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, CacheFingerprint("m", "r"), 1 << 20)
        self.gate = threading.Event()
        self.asked: list[str] = []
        self.inside = self.most_inside = 0

    def reseal(self, base: str) -> None:
        self.asked.append(base)
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        assert self.gate.wait(LIMIT_S)
        super().reseal(base)
        self.inside -= 1


def caching_with(store: CacheStore) -> PromptCaching:
    settings = BoardSettings(
        "b", FOLDER.id, 64, frozenset(), caches=store, park_min_tokens=4, kv_position_bytes=1
    )
    return PromptCaching(settings, BoardCounters())


@pytest.mark.parametrize("leaves", [False, True], ids=["waits", "leaves"])
async def test_caches_are_resealed_one_after_the_other_and_for_the_last_weights(
    tmp_path: Path, leaves: bool
) -> None:
    store = SlowStore(tmp_path / "cache")
    caching = caching_with(store)
    await caching.open()
    first = asyncio.create_task(caching.reseal("1" * 64))
    await until(lambda: store.inside == 1)
    if leaves:
        first.cancel()
    others = [asyncio.create_task(caching.reseal(digit * 64)) for digit in "23"]
    await rest()
    store.gate.set()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert store.most_inside == 1
    assert (store.asked[0], store.asked[-1]) == ("1" * 64, "3" * 64)
    assert "2" * 64 not in store.asked
    await caching.close()


def test_weights_that_are_only_noted_are_not_what_a_load_falls_back_on(tmp_path: Path) -> None:
    async def main() -> None:
        staged = StagedWeights(tmp_path / "weights", "b", FOLDER.id)
        store = SlowStore(tmp_path / "cache")
        caching = caching_with(store)
        charge = Obligations("b", FOLDER.id, tuple, governed=False)
        tried: list[Path | None] = []

        async def start(path: Path | None) -> FakeEngine:
            tried.append(path)
            if path is not None:
                raise LoadFailed("rkllm_init returned -1")
            store.gate.set()
            return FakeEngine(lambda _: PLAIN)

        bases = BaseWeights(SETTINGS, staged, charge, caching, start)
        await bases.open()
        await caching.open()
        noted = base_of(CONTENT, "w1")
        staged.begin(noted)
        staged.chunk(noted.digest, 0, CONTENT)
        staged.commit(noted)
        noting = asyncio.create_task(bases.note(noted))
        await until(lambda: store.inside == 1)
        await bases.load()
        await noting
        assert tried == [staged.path(noted), None]
        assert (bases.base, bases.digest, store.asked[-1]) == (None, "", "")
        await caching.close()

    run_loop(main())


# -- weights that are no good ---------------------------------------------------------------------


@in_turn
@pytest.mark.parametrize("flaw", sorted(BROKEN))
def test_a_file_that_cannot_be_loaded_leaves_everything_as_it_was(
    tmp_path: Path, release: str, n_batch: int, flaw: str
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        content, words_of_it = BROKEN[flaw]
        it.bases["bad"] = give(it.board, content, "bad")
        client = await it.midway()
        with pytest.raises(RebaseFailed, match=words_of_it):
            await it.switch("bad")
        report = it.board.report()
        assert (report.base, report.state) == ("", BoardState.JOINING)
        assert words_of_it in report.reason
        await ends(client)
        voices.check(client, "default")  # both spans are of the same weights
        refused = it.told.ask()
        with pytest.raises(BoardBehind, match="not loaded"):
            await refused.end()
        await it.switch("default")
        assert is_on(it, "default")
        again = it.told.ask()
        await ends(again)
        voices.check(again, "default")

    play(tmp_path, body, release, n_batch)


def test_what_was_refused_is_not_tried_again_and_again(tmp_path: Path) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        it.bases["bad"] = give(it.board, BROKEN["magic"][0], "bad")
        with pytest.raises(RebaseFailed):
            await it.switch("bad")
        loads = len(it.sim.loads)
        same = await it.board.adopt(it.told.desired)
        later = await it.told.hold()  # whatever else it is told works
        for adoption in (same, later):
            assert "magic" in adoption.refused
        assert len(it.sim.loads) == loads
        await it.told.release()
        await it.switch("default")
        assert len(it.sim.loads) == loads  # it had those
        with pytest.raises(RebaseFailed):
            await it.switch("bad")  # asked for anew
        assert len(it.sim.loads) == loads + 2
        await it.switch("w1")
        assert is_on(it, "w1")
        client = it.told.ask()
        await ends(client)
        voices.check(client, "w1")

    play(tmp_path, body)


def test_what_was_refused_is_tried_again_after_a_rest(tmp_path: Path) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        it.sim.fault("init_fail")
        with pytest.raises(RebaseFailed, match="rkllm_init"):
            await it.switch("w1")
        adoption = await it.board.adopt(it.told.desired)
        assert adoption.refused == ""
        assert is_on(it, "w1")

    play(tmp_path, body, base_rest_s=0.0)


@in_turn
@pytest.mark.parametrize(
    "fault",
    ["init_segv", "init_null_handle", "error_at_token:2", "segv_at_token:2"],
)
def test_an_engine_that_fails_with_the_other_weights_is_followed_by_one_with_those_of_before(
    tmp_path: Path, release: str, n_batch: int, fault: str
) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        client = await it.midway()
        await it.told.hold()  # the fault is for the trial, and not for this run
        it.sim.fault(fault)
        with pytest.raises(RebaseFailed):
            await it.switch("w1")
        await until(lambda: it.board.report().state is BoardState.JOINING)
        assert it.board.report().base == ""
        await it.switch("default", pauses=())
        await ends(client)
        voices.check(client, "default")
        await it.switch("w1")
        assert is_on(it, "w1")

    play(tmp_path, body, release, n_batch)


def test_a_trial_that_hangs_ends_with_the_engine(tmp_path: Path) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        it.sim.fault("hang_at_token:2")
        with pytest.raises(RebaseFailed, match="trial"):
            await it.switch("w1")
        await it.switch("default")
        await until(lambda: is_on(it, "default"))

    play(tmp_path, body, patience=RunTimeouts(first_token_s=30.0, token_s=2.0, abort_s=1.0))


def test_what_is_loaded_or_wanted_is_not_removed(tmp_path: Path) -> None:
    async def body(it: Rebased, _voices: Voices) -> None:
        w1, w2 = it.bases["w1"], it.bases["w2"]
        await it.switch("w1")
        with pytest.raises(StageFailed, match="loaded"):
            it.board.intake.remove(w1)
        assert it.board.intake.remove(w2)
        assert it.board.report().staged == (w1.key,)
        await it.switch("default")
        assert it.board.intake.remove(w1)
        assert it.board.report().staged == ()

    play(tmp_path, body)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "file gone"])
def test_a_replica_that_starts_again_loads_what_was_loaded(tmp_path: Path, kept: bool) -> None:
    async def body(it: Rebased, _voices: Voices) -> None:
        await it.switch("w1")

    play(tmp_path, body)
    if not kept:
        for file in (tmp_path / "weights").glob("*.rkllm"):
            file.unlink()

    async def main() -> None:
        async with rebased(tmp_path, governed=True) as it:
            w1 = base_of(reseed(CONTENT, SEEDS["w1"]), "w1")
            report = it.board.report()
            assert report.base == (w1.digest if kept else "")
            assert (report.state, report.engine_starts) == (BoardState.JOINING, 1)
            it.bases["w1"] = w1
            adoption = await it.switch("w1")
            assert adoption.missing_base == (None if kept else w1)
            assert it.board.report().engine_starts == 1

    run_loop(main(), 60.0)


@pytest.mark.parametrize(
    "marker",
    [b"", b"{", b"[]", b'{"model": 1, "version": 2, "digest": 3, "size_bytes": "x"}', b"\xff"],
)
def test_a_damaged_marker_costs_a_load_and_nothing_else(tmp_path: Path, marker: bytes) -> None:
    async def main() -> None:
        (tmp_path / "b.base").write_bytes(marker)
        async with rebased(tmp_path) as it:
            assert is_on(it, "default")

    run_loop(main(), 60.0)


def test_a_marked_file_that_cannot_be_loaded_any_more_gives_way_to_the_folders(
    tmp_path: Path,
) -> None:
    async def body(it: Rebased, _voices: Voices) -> None:
        await it.switch("w1")

    play(tmp_path, body)

    async def main() -> None:
        sim = Sim(tmp_path)
        sim.fault("init_fail")
        places = {"weights_dir": tmp_path / "weights", "base_file": tmp_path / "b.base"}
        async with sim.board(**places) as board:
            assert (board.report().base, len(sim.loads)) == ("", 2)
            assert not (tmp_path / "b.base").exists()

    run_loop(main(), 60.0)


# -- what belongs to the weights ------------------------------------------------------------------


def test_adapters_are_loaded_anew_and_one_that_does_not_fit_is_broken(tmp_path: Path) -> None:
    async def body(it: Rebased, voices: Voices) -> None:
        content = sim_models.render_adapter("Tone", seed=1, base=FOLDER.id)
        version = it.told.stage_content("v1", content)
        voices.stage(version, content, "default", "w1")  # the same adapter everywhere
        client = await it.midway(adapter=version.ref)
        await it.switch("w1")
        await ends(client)
        assert client.finished is not None
        assert [span.version for span in client.finished.versions] == [f"{LINE}@v1"]
        ids, rest_of_it = client.asked.prompt_ids, len(client.ids) - 5
        begun = voices.says("default", ids, 5, version.ref)
        ended = voices.says("w1", (*ids, *begun), rest_of_it, version.ref)
        assert client.ids == begun + ended
        assert ended != voices.says("default", (*ids, *begun), rest_of_it, version.ref)
        stranger = reseed(CONTENT, 4, model_id="stranger")
        it.bases["w4"] = give(it.board, stranger, "w4")
        await it.switch("w4")
        with pytest.raises(AdapterBroken, match="another base model"):
            await it.told.ask(adapter=version.ref).end()
        plain = it.told.ask()
        await ends(plain)

    play(tmp_path, body)


def test_a_board_tells_the_digest_of_its_model_folder_s_file_from_the_start(tmp_path: Path) -> None:
    file, record = tmp_path / "m.rkllm", tmp_path / "board.digest"
    file.write_bytes(b"the model")

    async def main(**settings: Any) -> str:
        bench = Bench(PLAIN, settings=replace(SETTINGS, own_digest_file=record, **settings))
        async with bench.running():
            assert bench.board.report().own_digest == (HASHING if settings["own_file"] else "")
            if settings["own_file"]:
                await until(lambda: bench.board.report().own_digest != HASHING)
            told = bench.board.report()
            assert told.own_bytes == (9 if told.own_digest not in ("", UNREADABLE) else 0)
            return told.own_digest

    digest = hashlib.sha256(b"the model").hexdigest()
    assert run_loop(main(own_file=file)) == digest
    assert digest in record.read_text(encoding="utf-8")
    assert run_loop(main(own_file=tmp_path / "missing.rkllm")) == UNREADABLE
    assert run_loop(main(own_file=None)) == ""
