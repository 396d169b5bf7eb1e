"""Paced servers with OpenAI's API, one for each board, in one process.

As a server on each board would, they stream chunks at the pace of all sides. Gateways and rkserve
are put before the same ones. The child is started by ``CommandProcess``, and answers ``start``
with the ports of its servers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.serving.plain.pace import DONE, MODEL, choice, event, paced_words
from rkserve.bench.processes import Json, serve_commands

HOST = "127.0.0.1"
PROMPT_TOKENS = 16  # for the usage alone: the prefill takes the same for every prompt


async def chunks(body: Json) -> AsyncGenerator[str, None]:
    """Yield the events of one answer, as vLLM's server does: role, words, end, usage."""
    tokens = int(body["max_tokens"])
    head: Json = {"id": "chatcmpl-paced", "created": int(time.time()), "model": body["model"]}
    role = event(**head, choices=choice({"role": "assistant", "content": ""}))
    async for word in paced_words(tokens):
        yield role + event(**head, choices=choice({"content": word}))
        role = ""
    yield event(**head, choices=choice({}, "length"))
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event(**head, choices=[], usage=usage(tokens))
    yield DONE


def usage(tokens: int) -> dict[str, int]:
    """Return the usage of an answer of so many tokens."""
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": PROMPT_TOKENS + tokens,
    }


async def chat(request: Request) -> Response:
    """Answer a chat: as a stream, or whole, as probes of gateways ask."""
    body = await request.json()
    if body.get("stream"):
        return StreamingResponse(chunks(body), media_type="text/event-stream")
    tokens = int(body.get("max_tokens") or 1)
    message = {"role": "assistant", "content": "".join([w async for w in paced_words(tokens)])}
    whole = {"index": 0, "message": message, "finish_reason": "length"}
    return JSONResponse(
        {
            "id": "chatcmpl-paced",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body["model"],
            "choices": [whole],
            "usage": usage(tokens),
        }
    )


async def models(_: Request) -> Response:
    """List the one model."""
    one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "bench"}
    return JSONResponse({"object": "list", "data": [one]})


async def health(_: Request) -> Response:
    """Return 200."""
    return PlainTextResponse("ok")


def application() -> Starlette:
    """Return the application of every server."""
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


def start(command: Json) -> Json:
    """Start so many servers in a thread; return their ports."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(command["boards"])]
    config = uvicorn.Config(
        application(), loop="uvloop", http="httptools", log_level="warning", access_log=False
    )
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, args=(sockets,), daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return {"ports": [one.getsockname()[1] for one in sockets]}


def main() -> None:
    """Serve commands until stdin closes; the thread ends with the process."""
    steps: dict[str, Any] = {"start": start}
    serve_commands(lambda command, _: steps[command["do"]](command))


if __name__ == "__main__":
    main()
