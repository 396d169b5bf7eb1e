"""Rerank prompts for models that answer yes or no, and the score of the answer.

The score is the probability of "yes" as the next token, relative to "yes" and "no".
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rkserve.api.common.renderer import PromptHeader, Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.openai.rerank import RankedText
from rkserve.api.parsing.reasoning import ReasoningOptions
from rkserve.core.errors import ContextOverflow, InputTooLong, UnsupportedParameter
from rkserve.core.messages import Delta, GenerateRequest
from rkserve.core.run_params import Sampling, Stepwise
from rkserve.models.rerank import RerankSettings

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

    Raises:
        UnsupportedParameter: it has no tokenizer, or a word that is not one token.
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

    Raises:
        InputTooLong: both together are longer than the context.
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
    said = {
        "instruction": judge.settings.instruction,
        "query": query.text,
        "document": document.text,
    }
    # All at once, so that braces in a text stay text.
    asked = _PLACES.sub(lambda found: said[found[1]], judge.settings.prompt)
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
