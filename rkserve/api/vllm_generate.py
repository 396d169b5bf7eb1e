"""vLLM's ``/inference/v1/generate``: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SkipValidation
from typing_extensions import NotRequired, TypedDict

from rkserve.api.common import output
from rkserve.api.common.answer import (
    AnswerOrigin,
    AnyCall,
    Dialect,
    DialectAnswer,
    FinishedBy,
    UsageAnswer,
    WeightSpans,
    pause_status,
)
from rkserve.api.common.calls import REQUEST_PREFIX, CompletionCall
from rkserve.api.common.logprobs import ChatLogprobs, Chosen, chat_logprobs
from rkserve.api.common.parameters import (
    TOP_K_OFF,
    AnyObject,
    BaseSampling,
    CompletionLogprobs,
    LengthParameters,
    ModelName,
    NonemptyIds,
    RequestId,
    RunParameters,
    StopIds,
    Stops,
    StreamParameters,
)
from rkserve.api.json.fields import MAX_CHOICES, Fields, JsonObject, parse_object
from rkserve.api.json.schemas import Count
from rkserve.api.parsing import sampling
from rkserve.core.messages import Delta, Finished, Paused
from rkserve.core.run_params import Scored

DEFAULT_TOKENS = 16
# Defaults of vLLM's SamplingParams, which apply instead of the model's.
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": TOP_K_OFF,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "mirostat": 0,
}
# They only change the text of an answer, which has none here.
_SILENT = (
    *("detokenize", "output_kind", "spaces_between_special_tokens", "skip_special_tokens"),
    *("include_stop_str_in_output", "flat_logprobs", "skip_clone"),
)
_PARAMS = "sampling_params"
_REFUSED: dict[str, sampling.Harmless] = {
    "features": sampling.only({}),
    "kv_transfer_params": sampling.only({}),
}
_PARAMS_REFUSED: dict[str, sampling.Harmless] = {
    **{
        name: harmless
        for name, harmless in sampling.UNSUPPORTED.items()
        if name != "prompt_logprobs"
    },
    "extra_args": sampling.only({}),
    "best_of": lambda value, body: value == (body.get("n") or 1),
}


class VllmSampling(BaseSampling, LengthParameters):
    """vLLM's SamplingParams: what is left out has their values and not the model's."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Stops = ()
    stop_token_ids: StopIds = ()
    max_tokens: int = Field(DEFAULT_TOKENS, ge=1)
    logprobs: CompletionLogprobs = None
    prompt_logprobs: CompletionLogprobs = None
    structured_outputs: SkipValidation[AnyObject | None] = None


class VllmGenerateRequest(RunParameters, StreamParameters):
    """The body of POST /inference/v1/generate."""

    token_ids: NonemptyIds
    sampling_params: VllmSampling
    model: ModelName | None = Field(None, description="May be left out where only one generates.")
    request_id: RequestId | None = Field(None, description="Comes back in the answer.")


def parse_generate(body: bytes) -> CompletionCall:
    """Read the body of POST /inference/v1/generate. Raises ``RequestError``."""
    values = parse_object(body)
    fields = Fields(values)
    sampling.refuse_unsupported(fields, _REFUSED)
    given = fields.child(_PARAMS) or Fields({}, _PARAMS)
    sampling.refuse_unsupported(given, _PARAMS_REFUSED)
    given.only((*VllmSampling.keys(), *_SILENT, *_PARAMS_REFUSED))
    asked = VllmGenerateRequest.read(values)
    params = asked.sampling_params
    return CompletionCall(
        model=asked.model or "",
        max_tokens=params.max_tokens,
        prompts=(tuple(asked.token_ids),),
        prompt_param="token_ids",
        n=params.n,
        prompt_top=params.prompt_logprobs,
        steps=params.steps(
            Fields({"structured_outputs": params.structured_outputs}), params.logprobs
        ),
        token_ids=True,
        tokens_as_ids=True,
        request_id=asked.request_id,
        sampling=NEUTRAL | params.sampling(),
        stop=params.stop,
        stop_ids=tuple(dict.fromkeys(params.stop_token_ids)),
        **asked.streaming(),
        **asked.own(),
    )


class GeneratedChoice(WeightSpans):
    """The tokens of an answer."""

    index: Count
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: FinishedBy | None


class Generated(TypedDict):
    """Answers as token ids."""

    request_id: str
    id: str
    model: str
    created: int
    choices: list[GeneratedChoice]
    prompt_logprobs: list[JsonObject | None] | None
    kv_transfer_params: None
    system_fingerprint: str
    weight_version: str
    usage: UsageAnswer


class GeneratedChunk(TypedDict):
    """More token ids of answers."""

    request_id: str
    id: str
    choices: list[GeneratedChoice]
    usage: NotRequired[UsageAnswer]
    rkserve: NotRequired[JsonObject]
    error: NotRequired[JsonObject]
    system_fingerprint: NotRequired[str]
    weight_version: NotRequired[str]


class GenerateAnswer(DialectAnswer):
    """The answer to a call of /inference/v1/generate."""

    def __init__(self, call: AnyCall, answer_id: str, created: int, stamp: AnswerOrigin) -> None:
        super().__init__(call, answer_id, created, stamp)
        assert stamp.lexicon is not None
        self._lexicon, self._call = stamp.lexicon, call
        self._request_id = call.request_id or answer_id

    def delta(self, index: int, delta: Delta) -> bytes:
        self.add(index, delta)
        found, void = self._tokens[index].news()
        if not found and not void:
            return b""
        more = {"rkserve": {"retract_tokens": void}} if void else {}
        return output.data({**self._chunk([self._choice(index, found, None)]), **more})

    def paused(self, index: int, paused: Paused) -> bytes:
        if not self._tells_of_pauses:
            return output.PAUSED
        return output.PAUSED + output.data(
            {**self._chunk([]), "rkserve": pause_status(index, paused)}
        )

    def finish(self, index: int, finished: Finished) -> bytes:
        self.end(index, finished)
        found, _ = self._tokens[index].news()
        last = self._choice(index, found, finished.reason.value) | self._spans(index)
        return output.data({**self._chunk([last]), **self._seal([self._version(index)])})

    def closing(self) -> bytes:
        """Return the usage, where it was asked for, and the end of the stream."""
        usage = output.data({**self._chunk([]), "usage": self.usage()})
        return (usage if self._call.include_usage else b"") + output.DONE

    def whole(self) -> JsonObject:
        choices = [
            self._choice(index, self._tokens[index].chosen, self._ends[index].reason.value)
            | self._spans(index)
            for index in range(self._choices)
        ]
        return {
            **self._chunk(choices),
            "model": self._model,
            "created": self._created,
            "prompt_logprobs": self._of_prompt(),
            "kv_transfer_params": None,
            **self._seal(self.versions),
            "usage": self.usage(),
        }

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        return {"request_id": self._request_id, "id": self.id, "choices": choices}

    def _choice(self, index: int, found: list[Chosen], reason: str | None) -> JsonObject:
        top = self._call.steps.top_logprobs
        shown = [(one, None if of is None else cut(of, top or 0)) for one, of in found]
        return {
            "index": index,
            "logprobs": None if top is None else chat_logprobs(self._lexicon, shown),
            "finish_reason": reason,
            "token_ids": [token_id for token_id, _ in found],
        }

    def _of_prompt(self) -> list[JsonObject | None] | None:
        top = self._call.prompt_top if isinstance(self._call, CompletionCall) else None
        if top is None:
            return None
        pairs = zip(self._lexicon.prompts[0][1:], self._tokens[0].prompt, strict=False)
        return [None, *(self._position(*pair, top) for pair in pairs)]

    def _position(self, token_id: int, scored: Scored, top: int) -> JsonObject:
        """Return a position of a prompt: its own token first, then the likeliest ones."""
        ranks = {one: rank for rank, (one, _) in enumerate(scored.top, 1)}
        found = {token_id: scored.logprob, **dict(scored.top[:top])}
        known = self._lexicon.known
        return {
            str(one): {
                "logprob": logprob,
                "rank": ranks.get(one),
                "decoded_token": known.piece(one).decode(errors="replace"),
            }
            for one, logprob in found.items()
        }


def cut(scored: Scored, top: int) -> Scored:
    """Return the log-probability of a token with so many of the likeliest ones."""
    return Scored(scored.logprob, scored.top[:top])


GENERATE = Dialect(parse_generate, GenerateAnswer, REQUEST_PREFIX)
