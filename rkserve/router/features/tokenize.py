"""Calls answered by the Router without a board: token counts, tokenizer facts, model details."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from rkserve.api.common.calls import ChatCall
from rkserve.api.common.plan import header
from rkserve.api.common.renderer import Prompt, PromptHeader, Renderer
from rkserve.api.json.fields import JsonObject, parse_object
from rkserve.api.ollama.models import FolderFacts
from rkserve.api.openai.tokenize import (
    DetokenizedAnswer,
    DetokenizeRequest,
    TokenizeCall,
    TokensAnswer,
    parse_info,
    parse_tokenize,
    tokenizer_info,
)
from rkserve.core.errors import UnsupportedParameter
from rkserve.router.auth.callers import Caller
from rkserve.router.off_loop import off_loop
from rkserve.router.served_models import ServedModel
from rkserve.router.service import Service, read_call


@contextmanager
def let_in(service: Service, caller: Caller) -> Iterator[None]:
    """Count a call of the caller. Raises ``RateLimited``."""
    service.admit(caller)
    try:
        yield
    finally:
        caller.leave()


async def count_prompt(service: Service, body: bytes, parse: Callable[[bytes], ChatCall]) -> int:
    """Return the number of prompt tokens of a chat body.

    Raises:
        RequestError: the body is invalid, or the model has no tokenizer at the Router.
    """
    call = await read_call(body, parse)
    meant = await service.models.resolve(call.model)
    served = service.models.by_name[meant.model]
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
    """Wake a model by name if it sleeps. Raises as a request for it would."""
    meant = await service.models.resolve(asked)
    await service.waking.ready(meant.model)


async def folder_facts(service: Service, model_ids: list[str]) -> dict[str, FolderFacts]:
    """Return the details of models' folders, by model."""
    served = {model_id: service.models.by_name[model_id] for model_id in model_ids}
    return await asyncio.to_thread(
        lambda: {model_id: _facts(one) for model_id, one in served.items()}
    )


def _facts(served: ServedModel) -> FolderFacts:
    folder, size, digest = served.folder, 0, ""
    cpu = folder.file is not None
    if cpu or folder.weights is not None:  # otherwise only the boards have the file
        size = sum(part.stat().st_size for part in folder.parts(cpu=cpu))
        digest = folder.content_digest(cpu=cpu)
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


T = TypeVar("T")


class Tokenization:
    """The tokenizer calls of one Router. Use from its event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, body: bytes) -> bytes:
        """Answer POST /tokenize in JSON. Raises ``RequestError``, ``ModelNotFound``."""
        call = await self._off_loop(body, partial(parse_tokenize, body))
        model = await self._model(call.model)
        self._service.check_images(call.messages, model)
        served = self._service.models.by_name[model]
        return await self._off_loop(body, lambda: _written(_tokenize(served, call)))

    async def detokenize(self, body: bytes) -> bytes:
        """Answer POST /detokenize in JSON. Raises ``RequestError``, ``ModelNotFound``."""
        call = await self._off_loop(body, lambda: DetokenizeRequest.read(parse_object(body)))
        served = self._service.models.by_name[await self._model(call.model)]
        most = served.folder.settings.context_length
        text = partial(served.renderer.whole_text, tuple(call.tokens), "tokens", most)
        return await self._off_loop(body, lambda: _written({"prompt": text()}))

    async def _off_loop(self, body: bytes, work: Callable[[], T]) -> T:
        return await off_loop(len(body), work, counts=True)

    async def info(self, query: Sequence[tuple[str, str]]) -> JsonObject:
        """Answer GET /tokenizer_info. Raises ``RequestError``, ``ModelNotFound``."""
        served = self._service.models.by_name[await self._model(parse_info(query))]
        settings, facts = served.folder.settings, served.renderer.facts()
        if facts["eos_token"] is None and settings.eos_token_ids:
            facts["eos_token"] = served.renderer.strings(settings.eos_token_ids[:1])[0]
        return tokenizer_info(served.folder.tokenizer_config, facts, settings.context_length)

    async def _model(self, asked: str | None) -> str:
        """Return the model of a call: an adapter's base model, or the only one.

        Without a name, the only model that generates is meant, even with embedding models beside
        it.
        """
        models = self._service.models
        return (await models.resolve(models.only if asked is None else asked)).model


def _tokenize(served: ServedModel, call: TokenizeCall) -> TokensAnswer:
    renderer, length = served.renderer, served.folder.settings.context_length
    count = None
    if call.text is not None:
        ids = renderer.counted(call.text, special=call.special, context_len=length)
    else:
        # In text mode the prompt is a text, and taking its IDs raises the error for that.
        if call.tools.given:
            renderer.form()  # raises the same error as a chat if the model takes no tools
        header = PromptHeader(
            answer=call.answer, tools=call.tools.given, images=True, prefill=call.prefill
        )
        prompt = renderer.chat(call.messages, header=header)
        if prompt.images:
            ids, count = renderer.image_ids(prompt), prompt.counted
        elif prompt.text is not None:
            ids = renderer.counted(prompt.text, special=False, context_len=length)
        else:
            ids = prompt.ids
    return {
        "count": len(ids) if count is None else count,  # with the tokens of images
        "max_model_len": length,
        "tokens": list(ids),
        "token_strs": renderer.strings(ids) if call.strings else None,
    }


def _written(answer: TokensAnswer | DetokenizedAnswer) -> bytes:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
