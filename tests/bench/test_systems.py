"""The systems under test, and the processes that are measured beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.bench import presets
from rkserve.bench.presets import Bench, PresetOptions
from rkserve.bench.processes import BenchFailed
from rkserve.bench.systems import (
    NamedProcesses,
    RunningServers,
    SimulatedCluster,
    SimulatedDeployment,
    parse_watched,
    watch_named,
)
from rkserve.bench.target import Target
from tests.support.http.fake_openai import FakeOpenAi, serving
from tests.support.values.bench_load import at_once


@pytest.fixture
def server() -> Iterator[FakeOpenAi]:
    with serving() as fake:
        yield fake


class Policies(RunningServers):
    """One server under the names of policies; some of them ask for other models than others."""

    time_factor = 0.001

    def __init__(self, server: FakeOpenAi, models: Mapping[str, str]) -> None:
        super().__init__([Target(name, server.url, model) for name, model in models.items()])


def names(server: FakeOpenAi) -> list[str]:
    return [one.messages[-1]["content"] for one in server.asked]


def test_processes_are_measured_where_they_are_named(server: FakeOpenAi) -> None:
    class Watching(Policies):
        def watch(self) -> None:
            watched.append(1)

    watched: list[int] = []
    presets.play_all(Bench(Watching(server, {"a": "ok"})), at_once(1), PresetOptions(), "Load")
    assert watched == [1]


def test_faster_boards_are_asked_faster(tmp_path: Path) -> None:
    boards = SimulatedDeployment("rk3588-qwen3-0.6b-w8a8", 3, 0.1)
    site = SimulatedCluster(boards, ["prefix"], tmp_path, lambda _: None)
    assert (site.time_factor, site.clients, site.names) == (0.1, 3, ["prefix"])
    at_once_too = replace(boards, time_scale=0.0)
    assert SimulatedCluster(at_once_too, [], tmp_path, lambda _: None).time_factor == 1.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param("server=41", NamedProcesses("server", pid=41), id="pid"),
        pytest.param(
            "server=my server --x=1", NamedProcesses("server", text="my server --x=1"), id="text"
        ),
    ],
)
def test_processes_are_named_by_pid_or_command(given: str, expected: NamedProcesses) -> None:
    assert parse_watched(given) == expected


@pytest.mark.parametrize("given", ["server", "=41", "server="])
def test_a_process_without_a_name_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="name=pid"):
        parse_watched(given)


def test_a_process_is_measured_with_all_below_it() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    mark = f"watched-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", code, mark], stdin=subprocess.PIPE) as child:
        for watched in (NamedProcesses("it", pid=child.pid), NamedProcesses("it", text=mark)):
            watch = watch_named([watched])
            watch.start()
            use, memories = watch.stop()
            assert list(use.by_part_ms) == ["it"]
            assert use.wall_ms > 0
            assert all(one.rss > 0 for one in memories["it"])


def test_a_process_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="no process runs that is it"):
        watch_named([NamedProcesses("it", text="x")], root=tmp_path)
