"""Bodies, prompts and answers of /v1/rerank (Jina's and Cohere's shape) and /score (vLLM's).

Both compare texts by the cosine of their vectors, or by prompts for models that answer yes or no.
The score of such a prompt is the probability of "yes" as the next token, relative to "yes" and
"no".
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Annotated, Literal

from pydantic import Field, SkipValidation
from typing_extensions import NotRequired, TypedDict

from rkserve.api.common.parameters import Nonempty, OpenModel
from rkserve.api.common.renderer import PromptHeader, Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.json.fields import MAX_INPUTS, Fields, missing, parse_object, wrong_type
from rkserve.api.json.schemas import Count
from rkserve.api.openai.embeddings import TextUsage, VectorOptions, VectorRequest, check_count
from rkserve.api.parsing import sampling
from rkserve.api.parsing.answer_parser import ReasoningOptions
from rkserve.core.errors import ContextOverflow, InputTooLong, RequestError, UnsupportedParameter
from rkserve.core.messages import Delta, GenerateRequest
from rkserve.core.run_params import Sampling, Stepwise
from rkserve.models.settings import RerankSettings

_REFUSED: dict[str, sampling.Harmless] = dict.fromkeys(
    ("truncate_prompt_tokens", "max_chunks_per_doc", "max_tokens_per_doc"), sampling.never
)
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


class DocumentText(TypedDict):
    """The text of a document."""

    text: str


class RankedDocument(TypedDict):
    """A document with its score."""

    index: Count
    relevance_score: float
    document: NotRequired[DocumentText]


class RankingAnswer(TypedDict):
    """Documents, the most relevant one first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedDocument]
    usage: TextUsage


class PairScore(TypedDict):
    """The similarity of the texts of a pair."""

    index: Count
    object: Literal["score"]
    score: Annotated[float, Field(ge=-1, le=1)]


class ScoresAnswer(TypedDict):
    """A score for each pair, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: TextUsage


class TextObject(OpenModel):
    """A text in an object."""

    text: Nonempty


_OneText = Nonempty | TextObject
_TextList = Annotated[list[_OneText], Field(min_length=1, max_length=MAX_INPUTS)]
_OneOrMore = SkipValidation[_OneText | _TextList | None]


class RerankRequest(VectorRequest):
    """The body of POST /v1/rerank."""

    query: SkipValidation[_OneText]
    documents: SkipValidation[_TextList]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = True


class ScoreRequest(VectorRequest):
    """One text with many, or pairs: `text_1` and `text_2`, or their other names."""

    text_1: _OneOrMore = None
    queries: _OneOrMore = None
    data_1: _OneOrMore = None
    text_2: _OneOrMore = None
    documents: _OneOrMore = None
    data_2: _OneOrMore = None


def parse_rerank(body: bytes) -> RankCall:
    """Read the body of POST /v1/rerank. Raises ``RequestError``."""
    values = parse_object(body)
    asked, fields = RerankRequest.read(values), Fields(values)
    query = _text(fields.get("query"), "query", query=True)
    found = fields.items("documents")
    check_count(len(found), "documents")
    documents = tuple(_text(one, f"documents[{at}]") for at, one in enumerate(found))
    sampling.refuse_unsupported(fields, _REFUSED)
    return RankCall(asked.options(), query, documents, asked.top_n, asked.return_documents)


def parse_score(body: bytes) -> ScoreCall:
    """Read the body of POST /score: one text with many, or pairs of as many each.

    Raises ``RequestError``.
    """
    values = parse_object(body)
    wanted, fields = ScoreRequest.read(values).options(), Fields(values)
    first, second = _texts(fields, _FIRST, query=True), _texts(fields, _SECOND)
    sampling.refuse_unsupported(fields, _REFUSED)
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


def rank_answer(
    call: RankCall, call_id: str, scores: Sequence[float], tokens: int
) -> RankingAnswer:
    """Return the answer of POST /v1/rerank: the most relevant document first."""
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[: call.top_n]
    return {
        "id": call_id,
        "object": "list",
        "model": call.wanted.model,
        "results": [_ranked(call, at, scores[at]) for at in order],
        "usage": _usage(tokens),
    }


def _ranked(call: RankCall, at: int, score: float) -> RankedDocument:
    found: RankedDocument = {"index": at, "relevance_score": score}
    if call.return_documents:
        found["document"] = {"text": call.documents[at].text}
    return found


def score_answer(
    call: ScoreCall, call_id: str, created: int, scores: Sequence[float], tokens: int
) -> ScoresAnswer:
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


def _usage(tokens: int) -> TextUsage:
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


_CERTAIN = Sampling(
    temperature=0.0,
    top_k=1,
    repeat_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    mirostat=0,
)
_PLACES = re.compile(r"\{(instruction|query|document)\}")
# The answer is one token, for which the context needs room.
_ANSWER_TOKENS = 1


@dataclass(frozen=True, slots=True)
class RerankModel:
    """A rerank model for one call. ``yes`` and ``no`` are token IDs."""

    meant: ResolvedModel
    settings: RerankSettings
    renderer: Renderer
    context_len: int
    yes: int
    no: int


def judge_of(
    meant: ResolvedModel, settings: RerankSettings, renderer: Renderer, context_len: int
) -> RerankModel:
    """Return the rerank model of a call.

    Raises ``UnsupportedParameter``: it has no tokenizer, or a word that is not one token.
    """
    if renderer.tokenizer is None:
        raise UnsupportedParameter(
            "Unsupported model: it is served without a tokenizer, and judging documents needs the "
            "ids of its words.",
            "model",
        )
    ids: list[int] = []
    for word in (settings.yes, settings.no):
        found = renderer.tokenizer.encode(word, add_special_tokens=False)
        if len(found) != 1:
            raise UnsupportedParameter(
                f"Unsupported model: {word!r} has {len(found)} tokens in its vocabulary, and what "
                "it says of a document has to be one. Its operator can change 'rerank' in the "
                "rkserve.yaml of its folder.",
                "model",
            )
        ids += found
    return RerankModel(meant, settings, renderer, context_len, *ids)


def requests_of(
    judge: RerankModel, pairs: Sequence[tuple[RankedText, RankedText]], call_id: str, session: str
) -> list[GenerateRequest]:
    """Return a request for each query and document.

    Raises ``InputTooLong``: both together are longer than the context.
    """
    meant = judge.meant
    asked = Stepwise(seed=0, top_logprobs=0, also=(judge.yes, judge.no))
    return [
        GenerateRequest(
            request_id=f"{call_id}/{number}",
            model=meant.model,
            prompt_ids=_prompt(judge, query, document),
            max_tokens=_ANSWER_TOKENS,
            sampling=_CERTAIN,
            adapter=meant.adapter,
            line=meant.line,
            session=session,
            min_epoch=meant.min_epoch,
            keep_version=meant.named,
            stepwise=asked,
            once=True,
        )
        for number, (query, document) in enumerate(pairs)
    ]


def _prompt(judge: RerankModel, query: RankedText, document: RankedText) -> tuple[int, ...]:
    texts = {
        "instruction": judge.settings.instruction,
        "query": query.text,
        "document": document.text,
    }
    # All at once, so that braces in a text stay text.
    asked = _PLACES.sub(lambda found: texts[found[1]], judge.settings.prompt)
    messages = [
        {"role": "system", "content": judge.settings.system},
        {"role": "user", "content": asked},
    ]
    if not judge.settings.system:
        del messages[0]
    # The first token is the verdict.
    variables = ReasoningOptions(enabled=False).given(judge.renderer.thinking.enabled)
    header = PromptHeader(variables=variables, thoughtless=True)
    try:
        prompt = judge.renderer.chat(messages, judge.context_len, header)
    except ContextOverflow as exc:
        raise InputTooLong(exc.prompt_tokens, judge.context_len, document.path, True) from None
    if len(prompt.ids) + _ANSWER_TOKENS > judge.context_len:
        raise InputTooLong(len(prompt.ids), judge.context_len, document.path)
    return prompt.ids


def verdict(judge: RerankModel, delta: Delta) -> float | None:
    """Return the probability of yes from an answer's token; None without a token."""
    if not delta.logprobs or delta.logprobs[0] is None:
        return None
    likely = dict(delta.logprobs[0].top)
    if judge.yes not in likely or judge.no not in likely:
        return None
    return 1 / (1 + math.exp(likely[judge.no] - likely[judge.yes]))
