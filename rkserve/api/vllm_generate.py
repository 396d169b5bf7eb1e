"""vLLM's ``/inference/v1/generate``: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from typing import Any

from rkserve.api.common import output, unsupported
from rkserve.api.common.answer import AnswerOrigin, AnyCall, BaseAnswer, Dialect, pause_status
from rkserve.api.common.calls import (
    REQUEST_PREFIX,
    TOP_K_OFF,
    CompletionCall,
    read_choices,
    read_maybe_model,
    read_prompt,
    read_request_id,
    read_shared,
)
from rkserve.api.common.logprobs import Chosen, chat_logprobs
from rkserve.api.common.output import error_event
from rkserve.api.json.body import JsonObject, parse_object
from rkserve.api.json.fields import Fields, Range, missing, wrong_type
from rkserve.api.json.limits import MAX_TOP_LOGPROBS
from rkserve.api.parsing.sampling import read_steps
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
# Keys beside the sampling parameters.
OWN = (
    *("stream", "stream_options", "cache_salt", "priority", "timeout", "strict_sampling"),
    *("pause_on", "native_pause", "use_cache", "return_weight_versions", "keep_version"),
    *("prompt_cache_key", "user"),
)
SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "ignore_eos"),
    *("max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "structured_outputs"),
)
# They only change the text of an answer, which has none here.
_SILENT = (
    *("detokenize", "output_kind", "spaces_between_special_tokens", "skip_special_tokens"),
    *("include_stop_str_in_output", "flat_logprobs", "skip_clone"),
)
_PARAMS = "sampling_params"
_REFUSED: dict[str, unsupported.Harmless] = {
    "features": lambda value, _body: value == {},
    "kv_transfer_params": lambda value, _body: value == {},
}
_PARAMS_REFUSED: dict[str, unsupported.Harmless] = {
    **{
        name: harmless for name, harmless in unsupported.SHARED.items() if name != "prompt_logprobs"
    },
    "extra_args": lambda value, _body: value == {},
    "best_of": lambda value, body: value == (body.get("n") or 1),
}


def parse_generate(body: bytes) -> CompletionCall:
    """Read the body of POST /inference/v1/generate.

    Raises:
        RequestError: with the ``param`` at fault.
    """
    fields = Fields(parse_object(body))
    unsupported.refuse(fields, _REFUSED)
    prompt = read_ids(fields, "token_ids")
    given = fields.child(_PARAMS)
    if given is None:
        raise missing(_PARAMS)
    unsupported.refuse(given, _PARAMS_REFUSED)
    given.only((*SAMPLING, *_SILENT, *_PARAMS_REFUSED))
    params = Fields(
        {name: given.get(name) for name in SAMPLING if name != "prompt_logprobs"}
        | {name: fields.get(name) for name in OWN}
    )
    asked = params.integer("max_tokens", Range(1))
    shared = read_shared(params)
    return CompletionCall(
        model=read_maybe_model(fields) or "",
        max_tokens=DEFAULT_TOKENS if asked is None else asked,
        prompts=(prompt,),
        prompt_param="token_ids",
        n=read_choices(params, prompts=1),
        prompt_top=_top(given, "prompt_logprobs"),
        steps=read_steps(params, chat=False),
        token_ids=True,
        tokens_as_ids=True,
        request_id=read_request_id(fields, "request_id"),
        **{**shared, "sampling": {**NEUTRAL, **shared["sampling"]}},
    )


def read_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """Read a required prompt of token IDs. Raises ``RequestError``."""
    value = fields.get(name)
    if value is None:
        raise missing(fields.path(name))
    if not isinstance(value, list):
        raise wrong_type(fields.path(name), "an array of token ids", value)
    found = read_prompt(value, fields.path(name))
    assert isinstance(found, tuple)
    return found


def _top(given: Fields, name: str) -> int | None:
    if given.get(name) is False:
        return None
    return given.integer(name, Range(0, MAX_TOP_LOGPROBS))


class GenerateAnswer(BaseAnswer):
    """The answer to a call of /inference/v1/generate."""

    def __init__(self, call: AnyCall, answer_id: str, created: int, stamp: AnswerOrigin) -> None:
        super().__init__(call, answer_id, created, stamp)
        assert stamp.lexicon is not None
        self._lexicon, self._call = stamp.lexicon, call
        self._request_id = call.request_id or answer_id

    def opening(self, _index: int) -> bytes:
        """Return nothing: there is no role."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the chunk of the new tokens of a choice."""
        self.add(index, delta)
        found, void = self._tokens[index].news()
        if not found and not void:
            return b""
        more = {"rkserve": {"retract_tokens": void}} if void else {}
        return output.data({**self._chunk([self._choice(index, found, None)]), **more})

    def paused(self, index: int, paused: Paused) -> bytes:
        """Return the events of a pause."""
        if not self._tells_of_pauses:
            return output.PAUSED
        return output.PAUSED + output.data(
            {**self._chunk([]), "rkserve": pause_status(index, paused)}
        )

    def finish(self, index: int, finished: Finished) -> bytes:
        """Return the chunk that ends a choice."""
        self.end(index, finished)
        found, _ = self._tokens[index].news()
        last = self._choice(index, found, finished.reason.value) | self._spans(index)
        return output.data({**self._chunk([last]), **self._seal([self._version(index)])})

    def closing(self) -> bytes:
        """Return the usage, where it was asked for, and the end of the stream."""
        usage = output.data({**self._chunk([]), "usage": self.usage()})
        return (usage if self._call.include_usage else b"") + output.DONE

    def broken(self, exc: BaseException) -> bytes:
        """Return the error event that ends a stream which breaks."""
        return error_event(exc) + output.DONE

    def whole(self) -> JsonObject:
        """Return the answer. Every choice must have ended."""
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


def _ping(_call: AnyCall) -> bytes:
    return output.PING


def _broken(exc: BaseException) -> bytes:
    return error_event(exc) + output.DONE


GENERATE = Dialect(parse_generate, GenerateAnswer, REQUEST_PREFIX, _ping, _broken)
