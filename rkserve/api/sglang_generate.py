"""SGLang's ``/generate`` for trainers: texts or token IDs in, text and token IDs out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, SkipValidation
from typing_extensions import NotRequired, TypedDict

from rkserve.api.common import output
from rkserve.api.common.answer import AnswerOrigin, AnyCall, Dialect, DialectAnswer, WeightSpans
from rkserve.api.common.calls import (
    REQUEST_PREFIX,
    CompletionCall,
    TextOrIds,
    check_choices,
    read_prompt,
)
from rkserve.api.common.logprobs import of_prompt
from rkserve.api.common.parameters import (
    AnyObject,
    BaseSampling,
    LogitBias,
    ModelName,
    Nonempty,
    NonemptyIds,
    RequestId,
    RunParameters,
    Seed,
    StopIds,
    StopSequences,
    StreamParameters,
    TopLogprobs,
)
from rkserve.api.json.fields import MAX_CHOICES, Fields, JsonObject, missing, parse_object
from rkserve.api.json.schemas import Count
from rkserve.api.parsing import sampling
from rkserve.api.parsing.sampling import SamplingOptions, read_guide
from rkserve.api.vllm_generate import NEUTRAL, cut
from rkserve.core.errors import RequestError
from rkserve.core.messages import Delta, Finished, FinishReason
from rkserve.core.run_params import NEVER_ENDS, Scored

DEFAULT_TOKENS = 128
_PARAMS = "sampling_params"


def _empty(value: Any, _body: Fields) -> bool:
    return value in (False, [], {}, "")


_REFUSED: dict[str, sampling.Harmless] = dict.fromkeys(
    (
        *("input_embeds", "image_data", "video_data", "audio_data", "token_ids_logprob"),
        *("return_hidden_states", "return_routed_experts", "session_params", "session_id"),
        *("custom_logit_processor", "bootstrap_host", "bootstrap_room", "structural_tag"),
    ),
    _empty,
)


@dataclass(frozen=True)
class SglangCall(CompletionCall):
    """A call of /generate. Log-probabilities of prompts begin at ``logprob_start``.

    With ``listed`` the answer is an array, as for several prompts.
    """

    logprob_start: int = -1
    listed: bool = False


class SglangSampling(BaseSampling):
    """SGLang's sampling values: what is left out has their values and not the model's."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_new_tokens: int = Field(DEFAULT_TOKENS, ge=0)
    min_new_tokens: int = Field(0, ge=0, le=NEVER_ENDS)
    stop: StopSequences = ()
    stop_token_ids: StopIds = ()
    sampling_seed: Seed | None = None
    min_p: float = Field(0.0, ge=0, le=1)
    logit_bias: LogitBias = Field(default_factory=tuple)
    ignore_eos: bool = False
    regex: SkipValidation[str | None] = None
    ebnf: SkipValidation[str | None] = None
    json_schema: SkipValidation[AnyObject | str | None] = None
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: SkipValidation[bool] = True

    def steps(self, top: int | None) -> SamplingOptions:
        """Return the options, with ``top`` log-probabilities. Raises ``RequestError``."""
        guides = {"regex": self.regex, "ebnf": self.ebnf, "guided_json": self.json_schema}
        return SamplingOptions(
            seed=self.sampling_seed,
            min_p=self.min_p,
            logit_bias=self.logit_bias,
            top_logprobs=top,
            guide=read_guide(Fields(guides)),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_new_tokens,
        )


class SglangGenerateRequest(RunParameters, StreamParameters):
    """The body of POST /generate."""

    text: SkipValidation[
        Nonempty | Annotated[list[Nonempty], Field(min_length=1, max_length=MAX_CHOICES)] | None
    ] = Field(None, description="Or `input_ids`.")
    input_ids: SkipValidation[
        NonemptyIds
        | Annotated[list[NonemptyIds], Field(min_length=1, max_length=MAX_CHOICES)]
        | None
    ] = None
    sampling_params: SglangSampling = Field(default_factory=SglangSampling)
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, ge=-1, description="-1: none of the prompt.")
    top_logprobs_num: TopLogprobs = 0
    rid: RequestId | None = Field(None, description="Comes back in the answer.")
    lora_path: str | None = Field(None, description="The name of an adapter.")
    model: ModelName | None = Field(None, description="May be left out where only one generates.")


_PARAMS_REFUSED: dict[str, sampling.Harmless] = {
    **{
        name: harmless
        for name, harmless in sampling.UNSUPPORTED.items()
        if name not in SglangSampling.keys()  # noqa: SIM118 - a method of the model
    },
    "stream_interval": lambda _value, _body: True,  # only how a stream is cut into chunks
}


def parse_generate(body: bytes) -> SglangCall:
    """Read the body of POST /generate. Raises ``RequestError``."""
    values = parse_object(body)
    fields = Fields(values)
    sampling.refuse_unsupported(fields, _REFUSED)
    prompts, listed = _prompts(fields)
    given = fields.child(_PARAMS) or Fields({}, _PARAMS)
    sampling.refuse_unsupported(given, _PARAMS_REFUSED)
    given.only((*SglangSampling.keys(), *_PARAMS_REFUSED))
    if isinstance(fields.get("rid"), list):
        raise RequestError("Invalid 'rid': send one request for each id.", "rid")
    asked = SglangGenerateRequest.read(values)
    params, scored = asked.sampling_params, asked.return_logprob
    check_choices(params.n, len(prompts), "n")
    return SglangCall(
        model=asked.lora_path or asked.model or "",
        max_tokens=params.max_new_tokens,
        prompts=prompts,
        prompt_param="input_ids" if asked.text is None else "text",
        n=params.n,
        prompt_top=asked.top_logprobs_num if scored and asked.logprob_start_len >= 0 else None,
        steps=params.steps(asked.top_logprobs_num if scored else None),
        token_ids=True,
        special_tokens=not params.skip_special_tokens,
        request_id=asked.rid,
        logprob_start=asked.logprob_start_len,
        listed=listed or params.n > 1,
        sampling=NEUTRAL | params.sampling(),
        stop=params.stop,
        stop_ids=tuple(dict.fromkeys(params.stop_token_ids)),
        include_stop=params.no_stop_trim,
        **asked.streaming(),
        **asked.own(),
    )


def _prompts(fields: Fields) -> tuple[tuple[TextOrIds, ...], bool]:
    """Return the prompts, and whether they came as a list."""
    given = [name for name in ("text", "input_ids") if fields.get(name) is not None]
    if not given:
        raise missing("input_ids")
    if len(given) > 1:
        raise RequestError("Send either 'text' or 'input_ids', not both.", "input_ids")
    (name,) = given
    value = fields.get(name)
    kind: type = str if name == "text" else list
    if not isinstance(value, list) or not value or not isinstance(value[0], kind):
        return (read_prompt(value, name),), False
    if len(value) > MAX_CHOICES:
        raise RequestError(f"Invalid '{name}': it may have {MAX_CHOICES} prompts at most.", name)
    return tuple(read_prompt(one, f"{name}[{at}]") for at, one in enumerate(value)), True


class SglangFacts(WeightSpans):
    """Facts about an answer. A score is a log-probability, an id and null."""

    id: str
    finish_reason: JsonObject | None
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    weight_version: str
    output_token_logprobs: NotRequired[list[list[Any]]]
    output_top_logprobs: NotRequired[list[list[list[Any]] | None]]
    input_token_logprobs: NotRequired[list[list[Any]]]
    input_top_logprobs: NotRequired[list[list[list[Any]] | None]]


class SglangGenerated(TypedDict):
    """An answer, or all of it so far."""

    text: str
    output_ids: list[int]
    meta_info: SglangFacts
    index: NotRequired[Count]


class SglangAnswer(DialectAnswer):
    """The answer to a call of /generate. Chunks of a stream hold all that came before."""

    def __init__(self, call: AnyCall, answer_id: str, created: int, stamp: AnswerOrigin) -> None:
        super().__init__(call, answer_id, created, stamp)
        assert stamp.lexicon is not None
        assert isinstance(call, SglangCall)
        self._lexicon, self._call = stamp.lexicon, call
        self._stops = stamp.ends | frozenset(call.stop_ids)

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the answer of a choice so far."""
        self.add(index, delta)
        found, void = self._tokens[index].news()
        return output.data(self._so_far(index)) if found or void or delta.text else b""

    def finish(self, index: int, finished: Finished) -> bytes:
        self.end(index, finished)
        return output.data(self._so_far(index))

    def whole(self) -> Any:
        found = [self._one(index) for index in range(self._choices)]
        return found if self._call.listed else found[0]

    def _so_far(self, index: int) -> JsonObject:
        return {**self._one(index), "index": index}

    def _one(self, index: int) -> JsonObject:
        ids = [token_id for token_id, _ in self._tokens[index].chosen]
        return {
            "text": self.speech(index).words,
            "output_ids": ids,
            "meta_info": self._about(index, ids),
        }

    def _about(self, index: int, ids: list[int]) -> JsonObject:
        end = self._ends.get(index)
        rid = self._call.request_id or self.id
        usage = None if end is None else end.usage
        return {
            "id": rid if self._choices == 1 else f"{rid}/{index}",
            "finish_reason": None if end is None else self._reason(index, end, ids),
            "prompt_tokens": len(self._lexicon.prompts[index]),
            "completion_tokens": len(ids),
            "cached_tokens": 0 if usage is None else usage.cached_tokens,
            "weight_version": self._version(index),
            **(self._spans(index) if end is not None else {}),
            **self._logprobs(index),
        }

    def _reason(self, index: int, end: Finished, ids: list[int]) -> JsonObject:
        if end.reason is FinishReason.LENGTH:
            return {"type": "length", "length": len(ids)}
        if end.reason is FinishReason.ABORT:
            return {"type": "abort", "message": "The request was aborted."}
        matched: str | int | None = end.stopped_by
        last = self._tokens[index].last
        if matched is None and last in self._stops:
            matched = last
        return {"type": "stop", "matched": matched}

    def _logprobs(self, index: int) -> JsonObject:
        top = self._call.steps.top_logprobs
        if top is None:
            return {}
        found = self._tokens[index].chosen
        entry = {"output_token_logprobs": [self._of(one, scored) for one, scored in found]}
        if top:
            entry["output_top_logprobs"] = [self._top(scored, top) for _, scored in found]
        if self._call.prompt_top is None:
            return entry
        prompt = self._lexicon.prompts[index]
        scores = self._tokens[index].prompt
        pairs = of_prompt(prompt, scores) if len(scores) == len(prompt) - 1 else []
        pairs = pairs[self._call.logprob_start :]
        entry["input_token_logprobs"] = [self._of(one, scored) for one, scored in pairs]
        if top:
            entry["input_top_logprobs"] = [self._top(scored, top) for _, scored in pairs]
        return entry

    def _of(self, token_id: int, scored: Scored | None) -> list[Any]:
        return [None if scored is None else scored.logprob, token_id, None]

    def _top(self, scored: Scored | None, top: int) -> Any:
        if scored is None:
            return None
        return [[logprob, token_id, None] for token_id, logprob in cut(scored, top).top]


GENERATE = Dialect(parse_generate, SglangAnswer, REQUEST_PREFIX)
