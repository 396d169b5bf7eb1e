"""Texts compared with each other: /v1/rerank and /score, by their vectors, or by what a model says
of each pair. It knows no HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial

from rkserve.api.common.renderer import Prompt
from rkserve.api.json.body import JsonObject
from rkserve.api.openai.embeddings import Wanted, finished_vector, texts_of
from rkserve.api.openai.rerank import (
    Text,
    parse_rerank,
    parse_score,
    rank_answer,
    score_answer,
    similarity,
)
from rkserve.router.features.embeddings import Embeddings, Model, Visit, beside
from rkserve.router.features.rerank_by_model import Judging

Pairs = Sequence[tuple[Text, Text]]
Key = tuple[str, bool]  # a text, and whether it is a query
Answer = tuple[JsonObject, dict[str, str]]  # and its headers


class Ranking:
    """Use it from the Router's event loop."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        self._judging = Judging(embeddings.service)

    async def rerank(self, body: bytes, visit: Visit) -> Answer:
        """Answer POST /v1/rerank. Raises ``RkserveError``."""
        with self._embeddings.entered(visit):
            call = await beside(len(body), partial(parse_rerank, body))
            scores, tokens, headers = await self._scores(call.wanted, call.pairs, body, visit)
            return rank_answer(call, f"rerank-{uuid.uuid4().hex}", scores, tokens), headers

    async def score(self, body: bytes, visit: Visit) -> Answer:
        """Answer POST /score. Raises ``RkserveError``."""
        with self._embeddings.entered(visit):
            call = await beside(len(body), partial(parse_score, body))
            scores, tokens, headers = await self._scores(call.wanted, call.pairs, body, visit)
            call_id, created = f"score-{uuid.uuid4().hex}", int(time.time())
            return score_answer(call, call_id, created, scores, tokens), headers

    async def _scores(
        self, wanted: Wanted, pairs: Pairs, body: bytes, visit: Visit
    ) -> tuple[list[float], int, dict[str, str]]:
        """Return how near the texts of each pair are, and how many tokens that took."""
        judge = await self._judging.judge(wanted, visit)
        if judge is not None:
            return await self._judging.scores(judge, wanted, pairs, len(body), visit)
        model = await self._embeddings.model(wanted, visit)
        # The query of all pairs is computed once, and so is a document that comes twice.
        unique: dict[Key, Text] = {}
        for one in (text for pair in pairs for text in pair):
            unique.setdefault((one.text, one.query), one)
        places = {key: at for at, key in enumerate(unique)}
        texts = await beside(len(body), partial(_prompts, list(unique.values()), model))
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

        return await beside(sum(map(len, made.vectors)), scores), made.tokens, made.headers


def _prompts(texts: Sequence[Text], model: Model) -> list[Prompt]:
    """Return the texts as a board gets them."""
    settings = model.settings
    whole = [
        (settings.query_prefix if one.query else settings.document_prefix) + one.text
        for one in texts
    ]
    return texts_of(whole, [one.path for one in texts], model.renderer, model.context_len)
