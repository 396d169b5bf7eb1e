"""Ray clusters of this benchmark: plain applications, and rkserve before upstreams.

The *plain* application is as Ray's documentation writes one: a FastAPI ingress that streams from a
handle, whose boards are generators with the pace. The *direct* one is wired as Ray's ``serve.llm``
wires direct streaming: boards are the ingress, HAProxy asks a router for a board and sends the
request there itself. Nothing of rkserve is in either.

``serve.llm`` itself cannot be used: it needs an engine, vLLM or SGLang.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.round_robin_router import RoundRobinRouter

from benchmarks.serving.plain.pace import DONE, MODEL, choice, event, paced_words
from rkserve.app import build
from rkserve.bench.cluster import HOST, start
from rkserve.bench.processes import Json, serve_commands
from rkserve.core.child_process import free_ports
from rkserve.deployments.haproxy import BINARY, BRIEF_DRAIN, FLAG, environ

APP = "app"
# Ray's default of 5 lets three of eight streams wait for others to end; LLMRouter has this, too.
AT_ONCE = 1000
ANYWHERE = {"num_cpus": 0}  # else a machine has no more replicas than cores
# Of the environment for HAProxy only what keeps this Ray apart from others of the machine.
PLACES = ("_PORT", "_LOC", "_PATH", "_BASE", "_FILE")
OFF = {FLAG: "0", "RAY_AUTH_MODE": "disabled"}


async def sent_events(words: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    """Yield the events of an answer."""
    async for word in words:
        yield event(choices=choice({"content": word}))
    yield DONE


# -- the plain application ------------------------------------------------------------------------


class PacedBoard:
    """A board that does nothing but wait."""

    async def generate(self, tokens: int) -> AsyncGenerator[str, None]:
        """Yield words at the pace."""
        async for word in paced_words(tokens):
            yield word


front = FastAPI()


@serve.ingress(front)
class PlainIngress:
    """The ingress of the example."""

    def __init__(self, boards: Any) -> None:
        self._boards = boards.options(stream=True)

    @front.get("/health")
    async def health(self) -> str:
        """Return 200."""
        return "ok"

    @front.post("/v1/chat/completions")
    async def chat(self, request: Request) -> StreamingResponse:
        """Stream an answer as OpenAI's API does."""
        # FastAPI resolves the annotation in the replica, where the function has only the names
        # that its body uses.
        assert isinstance(request, Request)
        body = await request.json()
        words = self._boards.generate.remote(body["max_tokens"])
        return StreamingResponse(sent_events(words), media_type="text/event-stream")


# -- direct streaming -----------------------------------------------------------------------------

own = FastAPI()
routes = FastAPI()


@serve.ingress(own)
class DirectBoard:
    """A board that answers HTTP itself."""

    @own.get("/health")
    async def health(self) -> str:
        """Return 200."""
        return "ok"

    @own.post("/v1/chat/completions")
    async def chat(self, request: Request) -> StreamingResponse:
        """Stream an answer as OpenAI's API does."""
        assert isinstance(request, Request)  # as above
        body = await request.json()
        words = paced_words(body["max_tokens"])
        return StreamingResponse(sent_events(words), media_type="text/event-stream")


@serve.ingress(routes)
class DirectRouter:
    """The choice of a board for HAProxy, as LLMRouter of ``serve.llm`` makes it."""

    def __init__(self, boards: Any) -> None:
        self._boards = boards

    @routes.post("/internal/route")
    async def route(self) -> dict[str, Any]:
        """Return the address of a board."""
        async with self._boards.choose_replica(_reserve=False) as chosen:
            replica = chosen._replica  # noqa: SLF001 - the address has no public name in Ray 2.60
            host, port = replica.backend_http_endpoint
            return {"host": host, "port": port, "replica_id": replica.replica_id.to_full_id_str()}


# -- the cluster ----------------------------------------------------------------------------------


def plain(command: Json) -> serve.Application:
    """Return the plain application; names are those by which processes are told apart."""
    boards = serve.deployment(
        name="Board-plain", num_replicas=command["boards"], ray_actor_options=ANYWHERE
    )(PacedBoard)
    ingress = serve.deployment(
        name="Router-plain", ray_actor_options=ANYWHERE, max_ongoing_requests=AT_ONCE
    )(PlainIngress)
    return ingress.bind(boards.bind())


def direct(command: Json) -> serve.Application:
    """Return the application with direct streaming."""
    boards = serve.deployment(
        name="Board-direct",
        num_replicas=command["boards"],
        ray_actor_options=ANYWHERE,
        request_router_config=RequestRouterConfig(request_router_class=RoundRobinRouter),
    )(DirectBoard).bind()
    router = serve.deployment(
        name="Router-direct", ray_actor_options=ANYWHERE, max_ongoing_requests=AT_ONCE
    )(DirectRouter)
    return boards._with_ingress_request_router(  # noqa: SLF001 - Ray has no public way; ``serve.llm`` calls it, too
        router.bind(boards)
    )


def upstreams(command: Json) -> serve.Application:
    """Return rkserve with one Router before the servers at these ports."""
    folder = Path(command["folder"])
    return build(
        {
            "router": {"replicas": 1},
            "boards": upstream_groups(command["ports"]),
            "state_dir": str(folder),
            "coordinator": {"data_dir": str(folder / "data")},
        }
    )


def upstream_groups(ports: list[int]) -> list[Json]:
    """Return the groups of rkserve's configuration for upstreams at these ports."""
    return [
        {
            "name": f"upstream-{number}",
            "model": MODEL,
            "upstream": {"url": f"http://{HOST}:{port}/v1"},
        }
        for number, port in enumerate(ports, 1)
    ]


APPLICATIONS: dict[str, Callable[[Json], serve.Application]] = {
    "plain": plain,
    "direct": direct,
    "upstreams": upstreams,
}


def deploy(command: Json) -> Json:
    """Deploy one of the applications; return how many seconds that took."""
    begun_s = time.monotonic()
    serve.run(APPLICATIONS[command["app"]](command), name=APP, route_prefix="/")
    return {"took_s": time.monotonic() - begun_s}


def ray_haproxy(folder: Path) -> dict[str, str]:
    """Return the environment of a Ray with its own HAProxy, at its best.

    ``RAY_SERVE_THROUGHPUT_OPTIMIZED`` is Ray's switch for one loop for each replica, and gRPC
    between replicas.
    """
    made = environ(folder, free_ports()).items()
    apart = {name: value for name, value in made if name.endswith(PLACES) and name != BINARY}
    return {**apart, **OFF, **BRIEF_DRAIN, FLAG: "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}


def main() -> None:
    """Serve commands until stdin closes."""
    steps = {"start": start, "deploy": deploy}
    try:
        serve_commands(lambda command, _: steps[command["do"]](command))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    # As a module with a name: Ray sends classes of a script by value, with all that they refer to.
    from benchmarks.serving.plain import ray_apps  # noqa: PLW0406 - Ray pickles a script's classes by value

    ray_apps.main()
