"""Reranking and scoring of texts: by their vectors, or by a reranker model's yes or no.

A reranker model judges each pair in a request of its own; the requests of one call are spread over
all boards of the model.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial

from rkserve.api.common.renderer import Prompt
from rkserve.api.json.fields import MAX_SESSION_CHARS
from rkserve.api.openai.embeddings import VectorOptions, finished_vector, texts_of
from rkserve.api.openai.rerank import (
    RankedText,
    RankingAnswer,
    RerankModel,
    ScoresAnswer,
    judge_of,
    parse_rerank,
    parse_score,
    rank_answer,
    requests_of,
    score_answer,
    similarity,
    verdict,
)
from rkserve.core.messages import Delta, Event, GenerateRequest
from rkserve.router.features.embeddings import (
    CallContext,
    EmbeddingModel,
    Embeddings,
    RequestSpread,
    boards_at_work,
)
from rkserve.router.off_loop import off_loop
from rkserve.router.service import Service

Pairs = Sequence[tuple[RankedText, RankedText]]
_PREFIX = "rerank-"


Key = tuple[str, bool]  # a text, and whether it is a query


class Reranking:
    """The rerank and score calls of one Router. Use from its event loop."""

    def __init__(self, service: Service, embeddings: Embeddings) -> None:
        self._service, self._embeddings = service, embeddings

    async def rerank(self, body: bytes, visit: CallContext) -> tuple[RankingAnswer, dict[str, str]]:
        """Answer POST /v1/rerank. Raises ``RkserveError``."""
        with self._embeddings.entered(visit):
            call = await off_loop(len(body), partial(parse_rerank, body))
            scores, tokens, headers = await self._scores(call.wanted, call.pairs, body, visit)
            return rank_answer(call, f"rerank-{uuid.uuid4().hex}", scores, tokens), headers

    async def score(self, body: bytes, visit: CallContext) -> tuple[ScoresAnswer, dict[str, str]]:
        """Answer POST /score. Raises ``RkserveError``."""
        with self._embeddings.entered(visit):
            call = await off_loop(len(body), partial(parse_score, body))
            scores, tokens, headers = await self._scores(call.wanted, call.pairs, body, visit)
            call_id, created = f"score-{uuid.uuid4().hex}", int(time.time())
            return score_answer(call, call_id, created, scores, tokens), headers

    async def _scores(
        self, wanted: VectorOptions, pairs: Pairs, body: bytes, visit: CallContext
    ) -> tuple[list[float], int, dict[str, str]]:
        """Return the score of each pair, the number of tokens, and headers."""
        meant = await self._service.models.resolve(wanted.model, visit.policy)
        served = self._service.models.by_name[meant.model]
        settings = served.folder.settings
        if settings.rerank is not None:
            length = settings.context_length
            judge = judge_of(meant, settings.rerank, served.renderer, length)
            return await self._judged(judge, wanted, pairs, len(body), visit)
        model = await self._embeddings.model(wanted, visit)
        # A query that is common to all pairs is computed once, and so is a repeated document.
        unique: dict[Key, RankedText] = {}
        for one in (text for pair in pairs for text in pair):
            unique.setdefault((one.text, one.query), one)
        places = {key: at for at, key in enumerate(unique)}
        texts = await off_loop(len(body), partial(_prompts, list(unique.values()), model))
        made = await self._embeddings.vectors(wanted, model, texts, visit)

        def scores() -> list[float]:
            units = model.settings.model_copy(update={"normalize": True})
            found = [finished_vector(one, units, None) for one in made.vectors]
            return [
                similarity(
                    found[places[first.text, first.query]],
                    found[places[second.text, second.query]],
                )
                for first, second in pairs
            ]

        return await off_loop(sum(map(len, made.vectors)), scores), made.tokens, made.headers

    async def _judged(
        self, judge: RerankModel, wanted: VectorOptions, pairs: Pairs, size: int, visit: CallContext
    ) -> tuple[list[float], int, dict[str, str]]:
        """Return the scores by a model that answers yes or no to each pair.

        ``size`` is the length of the body. Raises ``RkserveError``, after cancelling the other
        requests.
        """
        service, name = self._service, judge.meant.model
        terms = visit.terms(wanted, service.config)
        call_id = f"{_PREFIX}{uuid.uuid4().hex}"
        session = (visit.session or wanted.session or call_id)[:MAX_SESSION_CHARS]
        requests = await off_loop(size, partial(requests_of, judge, pairs, call_id, session))
        spread: RequestSpread[GenerateRequest, float] = RequestSpread(
            service, visit, terms, requests
        )

        def score(_: GenerateRequest, event: Event, _board_id: str) -> float | None:
            return verdict(judge, event) if isinstance(event, Delta) else None

        boards = boards_at_work(service, name)
        scores = await spread.run(boards, score, "the answer was neither yes nor no")
        return scores, spread.tokens, spread.headers


def _prompts(texts: Sequence[RankedText], model: EmbeddingModel) -> list[Prompt]:
    """Return the texts with their model's prefixes, as a board gets them."""
    settings = model.settings
    whole = [
        (settings.query_prefix if one.query else settings.document_prefix) + one.text
        for one in texts
    ]
    return texts_of(whole, [one.path for one in texts], model.renderer, model.context_len)
