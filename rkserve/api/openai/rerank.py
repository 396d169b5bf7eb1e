"""Bodies and answers of /v1/rerank (Jina's and Cohere's shape) and /score (vLLM's).

Both compare texts by the cosine of their vectors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from rkserve.api.common import unsupported
from rkserve.api.json.body import JsonObject, parse_object
from rkserve.api.json.fields import Fields, Range, missing, wrong_type
from rkserve.api.openai.embeddings import VectorOptions, check_count, read_wanted
from rkserve.core.errors import RequestError

_REFUSED: dict[str, unsupported.Harmless] = {
    name: lambda _value, _body: False
    for name in ("truncate_prompt_tokens", "max_chunks_per_doc", "max_tokens_per_doc")
}
# The older name of each of the two keys goes first, as in vLLM.
_FIRST, _SECOND = ("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")


@dataclass(frozen=True, slots=True)
class RankedText:
    """One text, and its path in the body. The others are compared with a ``query``."""

    text: str
    path: str
    query: bool = False


@dataclass(frozen=True, slots=True)
class RankCall:
    """A call of /v1/rerank. ``top_n`` of None ranks all."""

    wanted: VectorOptions
    query: RankedText
    documents: tuple[RankedText, ...]
    top_n: int | None = None
    return_documents: bool = True

    @property
    def pairs(self) -> list[tuple[RankedText, RankedText]]:
        """The pairs of texts that are compared."""
        return [(self.query, document) for document in self.documents]


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """A call of /score."""

    wanted: VectorOptions
    pairs: list[tuple[RankedText, RankedText]]


def parse_rerank(body: bytes) -> RankCall:
    """Read the body of POST /v1/rerank.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    fields = Fields(parse_object(body))
    wanted = read_wanted(fields)
    query = _text(fields.get("query"), "query", query=True)
    found = fields.items("documents")
    check_count(len(found), "documents")
    documents = tuple(_text(one, f"documents[{at}]") for at, one in enumerate(found))
    unsupported.refuse(fields, _REFUSED)
    returned = fields.maybe_flag("return_documents")
    top_n = fields.integer("top_n", Range(1))
    return RankCall(wanted, query, documents, top_n, returned is not False)


def parse_score(body: bytes) -> ScoreCall:
    """Read the body of POST /score: one text with many, or pairs of as many each.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    fields = Fields(parse_object(body))
    wanted = read_wanted(fields)
    first, second = _texts(fields, _FIRST, query=True), _texts(fields, _SECOND)
    unsupported.refuse(fields, _REFUSED)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        name = second[0].path.partition("[")[0]
        raise RequestError(
            f"Invalid '{name}': {len(first)} texts are to be compared with one each, but it has "
            f"{len(second)}.",
            name,
        )
    return ScoreCall(wanted, list(zip(first, second, strict=True)))


def _texts(fields: Fields, names: Sequence[str], *, query: bool = False) -> list[RankedText]:
    name = next((one for one in names if fields.get(one) is not None), None)
    if name is None:
        raise missing(names[0])
    value = fields.get(name)
    if not isinstance(value, list):
        return [_text(value, name, query=query)]
    found = fields.items(name)
    check_count(len(found), name)
    return [_text(one, f"{name}[{at}]", query=query) for at, one in enumerate(found)]


def _text(value: object, path: str, *, query: bool = False) -> RankedText:
    """Read a string, or an object with the string under ``text``."""
    if value is None:
        raise missing(path)
    if isinstance(value, dict):
        return _text(value.get("text"), f"{path}.text", query=query)
    if not isinstance(value, str):
        raise wrong_type(path, "a string or an object with 'text'", value)
    if not value:
        raise RequestError(f"Invalid '{path}': it is empty.", path)
    return RankedText(value, path, query)


def similarity(one: array[float], other: array[float]) -> float:
    """Return the cosine of two vectors of length one, at most 1 in spite of rounding."""
    cosine: float = sum(map(mul, one, other))
    return max(-1.0, min(1.0, cosine))


def rank_answer(call: RankCall, call_id: str, scores: Sequence[float], tokens: int) -> JsonObject:
    """Return the answer of POST /v1/rerank: the most relevant document first."""
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[: call.top_n]
    return {
        "id": call_id,
        "object": "list",
        "model": call.wanted.model,
        "results": [
            {
                "index": at,
                "relevance_score": scores[at],
                **(
                    {"document": {"text": call.documents[at].text}} if call.return_documents else {}
                ),
            }
            for at in order
        ],
        "usage": _usage(tokens),
    }


def score_answer(
    call: ScoreCall, call_id: str, created: int, scores: Sequence[float], tokens: int
) -> JsonObject:
    """Return the answer of POST /score, in the order of the pairs."""
    return {
        "id": call_id,
        "object": "list",
        "created": created,
        "model": call.wanted.model,
        "data": [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ],
        "usage": _usage(tokens),
    }


def _usage(tokens: int) -> JsonObject:
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
