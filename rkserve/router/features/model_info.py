"""What clients of other dialects ask besides answers: counts, models to be ready, model facts.

Nothing is generated here, and no board is asked. It knows a ``Service`` and no routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rkserve.api.common.calls import ChatCall
from rkserve.api.common.plan import header
from rkserve.api.common.renderer import Prompt, Renderer
from rkserve.api.ollama.models import FolderFacts
from rkserve.core.errors import RateLimited, UnsupportedParameter
from rkserve.router.auth.callers import Caller
from rkserve.router.off_loop import off_loop
from rkserve.router.service import ServedModel, Service, read_call


@contextmanager
def let_in(service: Service, caller: Caller) -> Iterator[None]:
    """Count a call as one of its caller's. Raises ``RateLimited``."""
    try:
        caller.enter()
    except RateLimited:
        service.metrics.rate_limited.inc()
        raise
    try:
        yield
    finally:
        caller.leave()


async def count_prompt(service: Service, body: bytes, parse: Callable[[bytes], ChatCall]) -> int:
    """Return the tokens of the prompt that a chat's body becomes.

    Raises:
        RequestError: it is no such body, or the model cannot count without its board.
    """
    call = await read_call(body, parse)
    meant = await service.meant(call.model)
    served = service.served(meant.model)
    service.check_images(call.messages, meant.model)
    if served.renderer.tokenizer is None:
        raise UnsupportedParameter(
            "Unsupported model: it is served without a tokenizer, so only its boards can count.",
            "model",
        )

    def prompt() -> Prompt:
        return served.renderer.chat(call.messages, header=header(call, served.renderer))

    return (await off_loop(len(body), prompt, counts=True)).tokens


async def make_ready(service: Service, asked: str) -> None:
    """Wake the model that a name means, if it sleeps. Raises as a request for it would."""
    meant = await service.meant(asked)
    await service.waking.ready(meant.model)


async def folder_facts(service: Service, model_ids: list[str]) -> dict[str, FolderFacts]:
    """Return what the folders of models tell, by model."""
    served = {model_id: service.served(model_id) for model_id in model_ids}
    return await asyncio.to_thread(
        lambda: {model_id: _facts(one) for model_id, one in served.items()}
    )


def _facts(served: ServedModel) -> FolderFacts:
    folder, size, digest = served.folder, 0, ""
    if folder.weights is not None:  # else only the boards have it
        size, digest = folder.weights.stat().st_size, folder.content_digest()
    return FolderFacts(
        size,
        digest,
        folder.settings.sampling.values(),
        folder.chat_template,
        tools=_can_call(served.renderer),
        thinking=served.renderer.marks is not None,
        embedding=folder.settings.embedding is not None,
        vision=folder.settings.vision is not None,
    )


def _can_call(renderer: Renderer) -> bool:
    try:
        renderer.form()
    except UnsupportedParameter:
        return False
    return True
