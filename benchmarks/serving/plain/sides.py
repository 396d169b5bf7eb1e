"""The sides: how each is started, and what of it is head and board."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.harness.prompts import PROFILE, step_ms
from benchmarks.serving.plain.gateways import LITELLM, SMG, Gateway, programs, serving
from benchmarks.serving.plain.measure import Running
from benchmarks.serving.plain.pace import TOKEN_S
from benchmarks.serving.plain.ray_apps import OFF, ray_haproxy
from rkserve.bench.processes import PROC, CommandProcess, ProcessReading, read, read_named
from rkserve.bench.systems import RAY_ENVIRON, BenchProcesses, Note, SimulatedDeployment
from rkserve.core.child_process import free_port, free_ports
from rkserve.deployments.haproxy import environ

START_S = 300.0
APPS, SERVERS = "benchmarks.serving.plain.ray_apps", "benchmarks.serving.plain.upstreams"
UPSTREAM, GATEWAY = "upstream", "gateway"  # parts, beside those of a cluster
Opened = AbstractContextManager[Running]


@dataclass(frozen=True, slots=True)
class Side:
    """One side. ``head`` and ``boards`` describe its processes for the report.

    ``open`` starts it in a folder with so many boards, and ends it with its block.
    """

    name: str
    title: str
    head: str
    boards: str
    open: Callable[[Path, int, Note], Opened]


@contextmanager
def ray_app(
    environment: Callable[[Path], Mapping[str, str]],
    app: str,
    folder: Path,
    boards: int,
    note: Note,
) -> Iterator[Running]:
    """Run one of the plain applications. ``environment`` may put files into its folder."""
    with _cluster(folder, {**environment(folder / "f")}, note) as (child, port):
        child.ask({"do": "deploy", "app": app, "boards": boards}, START_S)
        yield Running(port, lambda: read(PROC, [child.pid]))


@contextmanager
def gateway(one: Gateway, folder: Path, boards: int, note: Note) -> Iterator[Running]:
    """Run a gateway before paced servers."""
    note(f"installing {one.package} {one.version}")
    bin_ = programs(one)
    note("starting")
    port, key = free_port(), f"sk-{secrets.token_hex(32)}"
    with (
        _servers(folder, boards) as (servers, ports),
        serving(one.command(bin_, folder, port, ports), folder, key) as process,
    ):
        parts = {GATEWAY: [process.pid], UPSTREAM: [servers.pid]}
        yield Running(
            port,
            lambda: read_named(PROC, parts),
            key=key,
            ended=lambda: process.poll() is not None,
        )


@contextmanager
def rkserve_upstreams(folder: Path, boards: int, note: Note) -> Iterator[Running]:
    """Run rkserve with HAProxy and one Router before paced servers."""
    variables = {**RAY_ENVIRON, **environ(folder / "f", free_ports())}
    with (
        _servers(folder, boards) as (servers, ports),
        _cluster(folder, variables, note) as (child, port),
    ):
        (state := folder / "s").mkdir()
        command = {"do": "deploy", "app": "upstreams", "folder": str(state), "ports": ports}
        child.ask(command, START_S)

        def read_both() -> ProcessReading:
            cluster = read(PROC, [child.pid])
            others = read_named(PROC, {UPSTREAM: [servers.pid]})
            return replace(cluster, processes={**cluster.processes, **others.processes})

        yield Running(port, read_both)


@contextmanager
def rkserve_boards(folder: Path, boards: int, note: Note) -> Iterator[Running]:
    """Run rkserve with HAProxy, one Router and simulated boards."""
    processes = BenchProcesses(folder, note, front=True)
    try:
        pace = TOKEN_S * 1e3 / step_ms()
        processes.deploy(SimulatedDeployment(PROFILE, boards, pace, park=False, prefix_reuse=False))
        yield Running(
            processes.address[1], lambda: read(PROC, processes.pids()), reports_prefill=True
        )
    finally:
        processes.close()


@contextmanager
def _servers(folder: Path, boards: int) -> Iterator[tuple[CommandProcess, list[int]]]:
    child = CommandProcess(SERVERS, folder / "upstreams.log")
    try:
        ports = child.ask({"do": "start", "boards": boards}, START_S)["ports"]
        yield child, ports
    finally:
        child.close()


@contextmanager
def _cluster(
    folder: Path, variables: dict[str, str], note: Note
) -> Iterator[tuple[CommandProcess, int]]:
    note("starting Ray")
    port = free_port()
    child = CommandProcess(APPS, folder / "ray.log", variables)
    try:
        child.ask({"do": "start", "folder": str(folder), "port": port}, START_S)
        note("deploying")
        yield child, port
    finally:
        child.close()


GENERATORS = "replicas of Ray with a generator each"
PACED = "paced servers with OpenAI's API, all in one process"
SIDES = {
    one.name: one
    for one in (
        Side(
            "plain",
            "plain Ray Serve",
            "Serve's Python proxy, the FastAPI ingress",
            GENERATORS,
            partial(ray_app, lambda _: OFF, "plain"),
        ),
        Side(
            "haproxy",
            "the same behind Ray's HAProxy",
            "HAProxy and its manager, the FastAPI ingress",
            GENERATORS,
            partial(ray_app, ray_haproxy, "plain"),
        ),
        Side(
            "direct",
            "Ray's direct streaming",
            "HAProxy and its manager, the router that it asks for a board",
            "replicas of Ray that answer HTTP themselves",
            partial(ray_app, ray_haproxy, "direct"),
        ),
        Side(
            "litellm",
            f"LiteLLM {LITELLM.version}",
            "LiteLLM's proxy with one worker",
            PACED,
            partial(gateway, LITELLM),
        ),
        Side("smg", f"SMG {SMG.version}", "SMG", PACED, partial(gateway, SMG)),
        Side(
            "upstreams",
            "rkserve, the same servers",
            "HAProxy and its manager, one Router",
            PACED,
            rkserve_upstreams,
        ),
        Side(
            "rkserve",
            "rkserve",
            "HAProxy and its manager, one Router",
            "replicas of Ray, and an engine process each with a simulated library",
            rkserve_boards,
        ),
    )
}
