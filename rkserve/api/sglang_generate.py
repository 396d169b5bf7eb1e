"""SGLang's ``/generate`` for trainers: texts or token IDs in, text and token IDs out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rkserve.api.common import output, unsupported
from rkserve.api.common.answer import AnswerOrigin, AnyCall, BaseAnswer, Dialect
from rkserve.api.common.calls import (
    REQUEST_PREFIX,
    CompletionCall,
    TextOrIds,
    read_choices,
    read_maybe_model,
    read_prompt,
    read_request_id,
    read_shared,
    read_stop,
)
from rkserve.api.common.logprobs import of_prompt
from rkserve.api.common.output import error_event
from rkserve.api.json.body import JsonObject, parse_object
from rkserve.api.json.fields import Fields, Range, missing
from rkserve.api.json.limits import MAX_CHOICES, MAX_STOP_SEQUENCES, MAX_TOP_LOGPROBS
from rkserve.api.parsing.sampling import read_steps
from rkserve.api.vllm_generate import NEUTRAL, OWN, cut
from rkserve.core.errors import RequestError
from rkserve.core.messages import Delta, Finished, FinishReason, Paused
from rkserve.core.run_params import Scored

DEFAULT_TOKENS = 128
_PARAMS = "sampling_params"
# SGLang's names of sampling parameters, and rkserve's.
_NAMES = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "n", "stop_token_ids")},
    **{name: name for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")},
    **{name: name for name in ("ignore_eos", "regex", "ebnf", "logit_bias")},
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "json_schema": "guided_json",
    "no_stop_trim": "include_stop_str_in_output",
}
_MORE = ("max_new_tokens", "stop", "skip_special_tokens", "spaces_between_special_tokens")
_PARAMS_REFUSED: dict[str, unsupported.Harmless] = {
    **{
        name: harmless
        for name, harmless in unsupported.SHARED.items()
        if name not in (*_NAMES, *_MORE)
    },
    "stream_interval": lambda _value, _body: True,  # only how a stream is cut into chunks
}


def _empty(value: Any, _body: Fields) -> bool:
    return value in (False, [], {}, "")


_REFUSED: dict[str, unsupported.Harmless] = dict.fromkeys(
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


def parse_generate(body: bytes) -> SglangCall:
    """Read the body of POST /generate.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    fields = Fields(parse_object(body))
    unsupported.refuse(fields, _REFUSED)
    prompts, listed = _prompts(fields)
    given = fields.child(_PARAMS) or Fields({}, _PARAMS)
    unsupported.refuse(given, _PARAMS_REFUSED)
    given.only((*_NAMES, *_MORE, *_PARAMS_REFUSED))
    params = Fields(
        {name: given.get(theirs) for theirs, name in _NAMES.items()}
        | {name: fields.get(name) for name in OWN}
    )
    shared = read_shared(params) | {"stop": read_stop(given, "stop", MAX_STOP_SEQUENCES)}
    scored = fields.flag("return_logprob")
    top = fields.integer("top_logprobs_num", Range(0, MAX_TOP_LOGPROBS)) or 0
    start = fields.integer("logprob_start_len", Range(-1))
    start = -1 if start is None else start
    steps = read_steps(Fields({**_values(params), "logprobs": top if scored else None}), chat=False)
    asked = given.integer("max_new_tokens", Range(0))
    n = read_choices(params, prompts=len(prompts))
    return SglangCall(
        model=fields.text("lora_path") or read_maybe_model(fields) or "",
        max_tokens=DEFAULT_TOKENS if asked is None else asked,
        prompts=prompts,
        prompt_param="input_ids" if fields.get("text") is None else "text",
        n=n,
        prompt_top=top if scored and start >= 0 else None,
        steps=steps,
        token_ids=True,
        special_tokens=given.maybe_flag("skip_special_tokens") is False,
        request_id=_rid(fields),
        logprob_start=start,
        listed=listed or n > 1,
        **{**shared, "sampling": {**NEUTRAL, **shared["sampling"]}},
    )


def _values(params: Fields) -> JsonObject:
    names = (*_NAMES.values(), *OWN)
    return {name: params.get(name) for name in names}


def _rid(fields: Fields) -> str | None:
    if isinstance(fields.get("rid"), list):
        raise RequestError("Invalid 'rid': send one request for each id.", "rid")
    return read_request_id(fields, "rid")


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


class SglangAnswer(BaseAnswer):
    """The answer to a call of /generate. Chunks of a stream hold all that came before."""

    def __init__(self, call: AnyCall, answer_id: str, created: int, stamp: AnswerOrigin) -> None:
        super().__init__(call, answer_id, created, stamp)
        assert stamp.lexicon is not None
        assert isinstance(call, SglangCall)
        self._lexicon, self._call = stamp.lexicon, call
        self._stops = stamp.ends | frozenset(call.stop_ids)

    def opening(self, _index: int) -> bytes:
        """Return nothing: there is no role."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the answer of a choice so far."""
        self.add(index, delta)
        found, void = self._tokens[index].news()
        return output.data(self._so_far(index)) if found or void or delta.text else b""

    def paused(self, _index: int, _paused: Paused) -> bytes:
        """Return a comment."""
        return output.PAUSED

    def finish(self, index: int, finished: Finished) -> bytes:
        """Return the whole answer of a choice."""
        self.end(index, finished)
        return output.data(self._so_far(index))

    def closing(self) -> bytes:
        """Return the end of the stream."""
        return output.DONE

    def broken(self, exc: BaseException) -> bytes:
        """Return the error event that ends a stream which breaks."""
        return error_event(exc) + output.DONE

    def whole(self) -> Any:
        """Return the answer, or the answers. Every choice must have ended."""
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
        told = {"output_token_logprobs": [self._of(one, scored) for one, scored in found]}
        if top:
            told["output_top_logprobs"] = [self._top(scored, top) for _, scored in found]
        if self._call.prompt_top is None:
            return told
        prompt = self._lexicon.prompts[index]
        scores = self._tokens[index].prompt
        pairs = of_prompt(prompt, scores) if len(scores) == len(prompt) - 1 else []
        pairs = pairs[self._call.logprob_start :]
        told["input_token_logprobs"] = [self._of(one, scored) for one, scored in pairs]
        if top:
            told["input_top_logprobs"] = [self._top(scored, top) for _, scored in pairs]
        return told

    def _of(self, token_id: int, scored: Scored | None) -> list[Any]:
        return [None if scored is None else scored.logprob, token_id, None]

    def _top(self, scored: Scored | None, top: int) -> Any:
        if scored is None:
            return None
        return [[logprob, token_id, None] for token_id, logprob in cut(scored, top).top]


def _ping(_call: AnyCall) -> bytes:
    return output.PING


def _broken(exc: BaseException) -> bytes:
    return error_event(exc) + output.DONE


GENERATE = Dialect(parse_generate, SglangAnswer, REQUEST_PREFIX, _ping, _broken)
