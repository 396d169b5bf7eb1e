"""The cluster beside a plain Ray Serve application on the same paced tokens.

``python -m benchmarks.serving.plain`` runs one after the other: an application as Ray's
documentation writes one (a FastAPI ingress that streams from a handle, Serve's Python proxy before
it), whose boards are generators with the runtime's pace; and rkserve with HAProxy and simulated
boards, each with its engine process. Nothing of rkserve is in the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve

from benchmarks.harness.command import ProgressLine, run
from benchmarks.harness.figures import machine_line
from benchmarks.harness.processes import chat_body
from benchmarks.harness.prompts import PROFILE, step_ms
from rkserve.bench.cluster import HOST, start
from rkserve.bench.connection import OK, Connection, Incoming, request_bytes
from rkserve.bench.processes import (
    PROC,
    CommandProcess,
    CpuUse,
    Json,
    hold,
    read,
    serve_commands,
)
from rkserve.bench.results import cores, machine
from rkserve.bench.systems import BenchProcesses, SimulatedDeployment
from rkserve.core.child_process import free_port
from rkserve.deployments.haproxy import FLAG

APP = "plain"
CLUSTER = "RKSERVE_BENCH_PLAIN"  # set in the process that has the plain application
BOARDS = 8
TOKEN_S = 0.02
TOKENS = 128
PREFILL_S = 0.1
WARM_S, IDLE_S = 4.0, 6.0
START_S, ANSWER_S = 300.0, 60.0
HEAD = ("proxy", "router")
OURS = (*HEAD, "board replica", "engine")
PROMPT = [{"role": "user", "content": "Write a story about a board."}]


# -- the plain application ------------------------------------------------------------------------


class PacedBoard:
    """A board that does nothing but wait."""

    async def generate(self, tokens: int) -> AsyncGenerator[str, None]:
        """Yield words at the runtime's pace."""
        due_s = time.monotonic() + PREFILL_S
        for number in range(tokens):
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            due_s += TOKEN_S
            yield f" word{number % 10}"


front = FastAPI()


@serve.ingress(front)
class PlainIngress:
    """The ingress of the example."""

    def __init__(self, boards: Any) -> None:
        self._boards = boards.options(stream=True)

    @front.get("/health")
    async def health(self) -> str:
        """Say that it lives."""
        return "ok"

    @front.post("/v1/chat/completions")
    async def chat(self, request: Request) -> StreamingResponse:
        """Stream an answer as OpenAI's API does."""
        # FastAPI resolves the annotation in the replica, where the function has only the names
        # that its body uses.
        assert isinstance(request, Request)
        body = await request.json()
        words = self._boards.generate.remote(body["max_tokens"])

        async def events() -> AsyncGenerator[str, None]:
            async for word in words:
                choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
                chunk = {"object": "chat.completion.chunk", "choices": [choice]}
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


def deploy(command: Json) -> Json:
    """Deploy the plain application; names are those by which processes are told apart."""
    anywhere = {"num_cpus": 0}  # else a machine has no more replicas than cores
    boards = serve.deployment(
        name="Board-plain", num_replicas=command["boards"], ray_actor_options=anywhere
    )(PacedBoard)
    ingress = serve.deployment(name="Router-plain", ray_actor_options=anywhere)(PlainIngress)
    serve.run(ingress.bind(boards.bind()), name=APP, route_prefix="/")
    return {}


def main_of_cluster() -> None:
    """Serve commands until stdin closes."""
    steps = {"start": start, "deploy": deploy}
    try:
        serve_commands(lambda command, _: steps[command["do"]](command))
    finally:
        serve.shutdown()
        ray.shutdown()


# -- the measurement ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Side:
    """One side at one load. CPU time in ms per token, without idle use where ``net``.

    ``ttft_ms`` is the median of the time beyond the prefill that the board reports.
    """

    name: str
    streams: int
    tokens_per_s: float
    ttft_ms: float
    gross: dict[str, float]
    net: dict[str, float]

    def cost(self, parts: Sequence[str] | None = None, *, net: bool = False) -> float:
        """Return the CPU time of some parts, or of all."""
        found = self.net if net else self.gross
        return sum(ms for part, ms in found.items() if parts is None or part in parts)


async def play(port: int, streams: int, seconds: float, read_cpu: Any) -> tuple[Any, ...]:
    """Return events, the CPU use, the length of the window, and TTFTs beyond the prefill."""
    request = request_bytes(HOST, port, chat_body("sim-chat", PROMPT, TOKENS))
    begun_s = time.monotonic()
    first_s, last_s = begun_s + WARM_S, begun_s + WARM_S + seconds
    arrived: list[float] = []
    waits: list[float] = []

    async def client(number: int) -> None:
        await asyncio.sleep(number * TOKENS * TOKEN_S / streams)
        connection = await Connection.open(HOST, port)
        while time.monotonic() < last_s:
            connection.send(request)
            incoming = connection.so_far
            hold([] if await connection.ends_by(time.monotonic() + ANSWER_S) else ["too slow"])
            hold([] if incoming.status == OK else [f"HTTP {incoming.status}"])
            times = _texts(incoming)
            arrived.extend(times)
            if first_s <= incoming.sent_s < last_s:
                waits.append((times[0] - incoming.sent_s) * 1e3 - _prefill_ms(incoming))
        connection.close()

    async def watch() -> CpuUse:
        use = CpuUse(cores())
        await asyncio.sleep(first_s - time.monotonic())
        before = read_cpu()
        await asyncio.sleep(last_s - time.monotonic())
        use.add(before, read_cpu())
        return use

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(number) for number in range(streams)))
    use = await watching
    return sum(first_s <= at_s < last_s for at_s in arrived), use, seconds, waits


def _texts(incoming: Incoming) -> list[float]:
    """Return the times of the events with text."""
    return [at_s for at_s, event in incoming.events if b'"content":' in event and _has_text(event)]


def _has_text(event: bytes) -> bool:
    chunk = json.loads(event.removeprefix(b"data: "))
    return any(one["delta"].get("content") for one in chunk["choices"])


def _prefill_ms(incoming: Incoming) -> float:
    for _, event in reversed(incoming.events):
        if b'"timings"' in event:
            return float(json.loads(event.removeprefix(b"data: "))["timings"]["prefill_ms"])
    return PREFILL_S * 1e3


def sides(name: str, port: int, pids: Sequence[int], seconds: float, streams: int) -> list[Side]:
    """Measure one side, idle, with one stream, and with as many as boards."""

    def read_cpu() -> Any:
        return read(PROC, pids)

    time.sleep(2.0)
    idle, before = CpuUse(cores()), read_cpu()
    time.sleep(IDLE_S)
    idle.add(before, read_cpu())
    found = []
    for count in (1, streams):
        events, use, took_s, waits = asyncio.run(play(port, count, seconds, read_cpu))
        hold([] if waits and events else [f"{name}: no answer began in {seconds:g} s"])
        gross = {part: ms / events for part, ms in use.by_part_ms.items()}
        rest = {part: ms / idle.wall_ms for part, ms in idle.by_part_ms.items()}
        net = {
            part: max(0.0, use.by_part_ms[part] - rest.get(part, 0.0) * use.wall_ms) / events
            for part in use.by_part_ms
        }
        found.append(Side(name, count, events / took_s, statistics.median(waits), gross, net))
    return found


@contextmanager
def plain_cluster(folder: Path, boards: int) -> Iterator[tuple[int, list[int]]]:
    """Run the plain application; give its port and the roots of its processes."""
    port = free_port()
    child = CommandProcess("benchmarks.serving.plain", folder / "plain.log", _environ())
    try:
        child.ask({"do": "start", "folder": str(folder), "port": port}, START_S)
        child.ask({"do": "deploy", "boards": boards}, START_S)
        yield port, [child.pid]
    finally:
        child.close()


def _environ() -> dict[str, str]:
    return {CLUSTER: "1", FLAG: "0", "RAY_AUTH_MODE": "disabled"}


def measure(folder: Path, boards: int, seconds: float, note: Any) -> list[Side]:
    """Measure both sides."""
    (place := folder / "p").mkdir()
    note("the plain application")
    with plain_cluster(place, boards) as (port, pids):
        found = sides("plain Ray Serve", port, pids, seconds, boards)
    note("rkserve")
    processes = BenchProcesses(folder, note, front=True)
    try:
        pace = TOKEN_S * 1e3 / step_ms()
        processes.deploy(SimulatedDeployment(PROFILE, boards, pace, park=False, prefix_reuse=False))
        port = processes.address[1]
        found += sides("rkserve", port, processes.pids(), seconds, boards)
    finally:
        processes.close()
    return found


def table(found: Sequence[Side]) -> str:
    """Return the figures as Markdown tables."""
    lines = [
        "| side | streams | tokens/s | TTFT added p50, ms | head, ms a token | above idle | all "
        "| above idle |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        cells = (
            one.cost(HEAD),
            one.cost(HEAD, net=True),
            one.cost(OURS),
            one.cost(OURS, net=True),
        )
        lines.append(
            f"| {one.name} | {one.streams} | {one.tokens_per_s:.0f} | {one.ttft_ms:.1f} | "
            + " | ".join(f"{cell:.3f}" for cell in cells)
            + " |"
        )
    for streams in dict.fromkeys(one.streams for one in found):
        plain, ours = (one for one in found if one.streams == streams)
        lines.append(
            f"| ratio | {streams} | | | {ours.cost(HEAD) / plain.cost(HEAD):.3f} | "
            f"{ours.cost(HEAD, net=True) / plain.cost(HEAD, net=True):.3f} | "
            f"{ours.cost(OURS) / plain.cost(OURS):.3f} | "
            f"{ours.cost(OURS, net=True) / plain.cost(OURS, net=True):.3f} |"
        )
    lines += ["", "| side | streams | " + " | ".join(OURS) + " |", "| --- |" + " ---: |" * 5]
    lines += [
        f"| {one.name} | {one.streams} | "
        + " | ".join(f"{one.gross.get(part, 0.0):.3f}" for part in OURS)
        + " |"
        for one in found
    ]
    return "\n".join(lines)


def page(found: Sequence[Side], boards: int) -> str:
    """Return the report as Markdown."""
    return (
        "# Beside a plain Ray Serve application\n\n"
        f"Written by `make bench-plain`: {boards} boards with a token every "
        f"{TOKEN_S * 1e3:.0f} ms, answers of {TOKENS} tokens, one stream and as many as boards. "
        "*Plain* is an application as Ray's documentation writes one: a FastAPI ingress that "
        "streams from a handle, Serve's Python proxy before it, boards that are generators in "
        "their replicas; it has none of rkserve's "
        "code. *rkserve* runs behind HAProxy, with one Router, and each board has a simulated "
        "library in an engine process, which counts. CPU times are ms per token that arrived; "
        "*above idle* is without what the same processes take when nothing is asked. "
        "*TTFT added* is what is beyond the prefill that the board reports. "
        "A plain side that cannot keep up has less "
        "than its tokens a second, and its TTFT grows with the length of the run.\n\n"
        f"{machine_line(machine())}\n{table(found)}\n"
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="rkserve beside a plain Ray Serve application")
    parser.add_argument("--boards", type=int, default=BOARDS)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--output", type=Path, help="where the page goes, too")
    given = parser.parse_args()
    note = ProgressLine().note

    def work(folder: Path) -> None:
        text = page(measure(folder, given.boards, given.seconds, note), given.boards)
        if given.output is not None:
            given.output.write_text(text, encoding="utf-8")
        sys.stdout.write(text)

    return run(work)


if __name__ == "__main__":
    # As a module with a name: Ray sends classes of a script by value, with all that they refer to.
    from benchmarks.serving import plain  # noqa: PLW0406 - it is itself

    if os.environ.get(CLUSTER):
        plain.main_of_cluster()
    else:
        sys.exit(plain.main())
