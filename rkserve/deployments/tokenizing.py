"""Token ids of texts and texts of token ids, at the Router: no board has anything to do with it.

It knows the models' tokenizers through a ``Service``, and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from rkserve.deployments.service import INLINE_BODY_BYTES, ServedModel, Service
from rkserve.errors import RequestError
from rkserve.wire.jsonbody import JsonObject
from rkserve.wire.renderer import Header
from rkserve.wire.tokens import (
    TokenizeCall,
    detokenized,
    parse_detokenize,
    parse_tokenize,
    tokenized,
)

T = TypeVar("T")


class Tokenizing:
    """Use it from the Router's event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, body: bytes) -> JsonObject:
        """Answer POST /tokenize. Raises ``RequestError``, ``ModelNotFound``."""
        call = await off_loop(body, partial(parse_tokenize, body))
        served = await self._served(call.model)
        return await off_loop(body, partial(_tokenize, served, call))

    async def detokenize(self, body: bytes) -> JsonObject:
        """Answer POST /detokenize. Raises ``RequestError``, ``ModelNotFound``."""
        call = await off_loop(body, partial(parse_detokenize, body))
        served = await self._served(call.model)
        text = partial(served.renderer.whole_text, call.ids, "tokens")
        return detokenized(await off_loop(body, text))

    async def _served(self, asked: str | None) -> ServedModel:
        """Return the model whose tokenizer is meant: an adapter's base, or the only one."""
        service = self._service
        if asked is not None:
            return service.served((await service.meant(asked)).model)
        names = list(service.fleet.models)
        if len(names) == 1:
            return service.served(names[0])
        raise RequestError(
            "Missing required parameter: 'model'. Only where a single model is served may it be "
            "left out.",
            "model",
        )


async def off_loop(body: bytes, work: Callable[[], T]) -> T:
    """Do what takes the longer, the longer the body is: a long one would hold up token streams."""
    return work() if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(work)


def _tokenize(served: ServedModel, call: TokenizeCall) -> JsonObject:
    renderer = served.renderer
    if call.text is not None:
        ids = renderer.counted(call.text, special=call.special)
    else:
        # In text mode that is a text, and asking for its ids says so.
        if call.tools.given:
            renderer.form()  # a model that cannot be offered any is refused as by a chat
        header = Header(answer=call.answer, tools=call.tools.given)
        prompt = renderer.chat(call.messages, header=header)
        ids = prompt.ids if prompt.text is None else renderer.counted(prompt.text, special=False)
    strings = renderer.strings(ids) if call.strings else None
    return tokenized(ids, served.folder.settings.context_length, strings)
