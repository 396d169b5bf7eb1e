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
from rkserve.api.common.version_policy import read_session
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
from rkserve.router.auth import queue_terms
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


class RerankerModel:
    """Scores by a model that answers yes or no. Use from the Router's event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def judge(self, wanted: VectorOptions, visit: CallContext) -> RerankModel | None:
        """Return the prompts and words of the call's model; None if it compares vectors.

        Raises:
            UnsupportedParameter: its words are not tokens of the vocabulary.
            RkserveError: as ``ServedModels.resolve``.
        """
        meant = await self._service.models.resolve(wanted.model, visit.policy)
        served = self._service.models.served(meant.model)
        settings = served.folder.settings
        if settings.rerank is None:
            return None
        return judge_of(meant, settings.rerank, served.renderer, settings.context_length)

    async def scores(
        self, judge: RerankModel, wanted: VectorOptions, pairs: Pairs, size: int, visit: CallContext
    ) -> tuple[list[float], int, dict[str, str]]:
        """Return the score of each pair, the number of tokens, and headers.

        ``size`` is the length of the body. Raises ``RkserveError``, after cancelling the other
        requests.
        """
        service, name = self._service, judge.meant.model
        terms = queue_terms(wanted, visit.caller, visit.timeout_s, service.config, visit.started_s)
        call_id = f"{_PREFIX}{uuid.uuid4().hex}"
        session = read_session(visit.session, wanted.session, call_id)
        requests = await off_loop(size, partial(requests_of, judge, pairs, call_id, session))
        spread: RequestSpread[GenerateRequest, float] = RequestSpread(
            service, visit, terms, requests
        )

        def score(_: GenerateRequest, event: Event, _board_id: str) -> float | None:
            return verdict(judge, event) if isinstance(event, Delta) else None

        boards = boards_at_work(service, name)
        scores = await spread.run(boards, score, "it said neither yes nor no")
        return scores, spread.tokens, spread.headers


Key = tuple[str, bool]  # a text, and whether it is a query


class Reranking:
    """The rerank and score calls of one Router. Use from its event loop."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        self._judging = RerankerModel(embeddings.service)

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
        """Return the similarity of each pair, the number of tokens, and headers."""
        judge = await self._judging.judge(wanted, visit)
        if judge is not None:
            return await self._judging.scores(judge, wanted, pairs, len(body), visit)
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


def _prompts(texts: Sequence[RankedText], model: EmbeddingModel) -> list[Prompt]:
    """Return the texts with their model's prefixes, as a board gets them."""
    settings = model.settings
    whole = [
        (settings.query_prefix if one.query else settings.document_prefix) + one.text
        for one in texts
    ]
    return texts_of(whole, [one.path for one in texts], model.renderer, model.context_len)
