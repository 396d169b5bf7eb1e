"""Sampling options that RKLLM lacks: seed, bias, log-probabilities, grammar, no early end.

They need single steps, which are slower than RKLLM's own sampling. So an option without effect,
such as a seed with greedy sampling, does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rkserve.api.json.fields import Fields, Range, wrong_type
from rkserve.api.json.limits import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS
from rkserve.api.parsing.grammar import Named, read_guide
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.run_params import NEVER_ENDS, Sampling, Stepwise

_SEED = Range(-(2**63), 2**64 - 1)
_SHARE = Range(0, 1)
_TOP = Range(0, MAX_TOP_LOGPROBS)
_MAX_BIAS = 100
_LEAST = Range(0, NEVER_ENDS)


@dataclass(frozen=True)
class SamplingOptions:
    """The options of one call. ``top_logprobs`` of None: no log-probabilities.

    ``guide`` is the grammar of the answer, with the parameter that stated it. The model cannot end
    the answer before ``min_tokens``, with ``ignore_eos`` not at all.
    """

    seed: int | None = None
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    guide: Named | None = None
    ignore_eos: bool = False
    min_tokens: int = 0

    def asked(self, sampling: Sampling, *, ranked: bool = False) -> str | None:
        """Return the first parameter that needs single steps, else None.

        ``ranked``: the best of several answers is returned.
        """
        certain = sampling.temperature == 0 or sampling.top_k == 1
        asked = {
            "" if self.guide is None else self.guide[0]: self.guide is not None,
            "logprobs": self.top_logprobs is not None,
            "logit_bias": bool(self.logit_bias),
            **self._ends,
            "best_of": ranked,
            "min_p": self.min_p > 0 and not certain,
            "seed": self.seed is not None and not certain,
        }
        return next((name for name, needed in asked.items() if needed), None)

    @property
    def _ends(self) -> dict[str, bool]:
        return {"ignore_eos": self.ignore_eos, "min_tokens": self.min_tokens > 0}

    def _only_guided(self, sampling: Sampling, *, ranked: bool) -> bool:
        """Return whether only a grammar needs single steps."""
        rest = replace(self, guide=None)
        return self.guide is not None and rest.asked(sampling, ranked=ranked) is None

    def stepwise(
        self, sampling: Sampling, choice: int, dice: int, *, ranked: bool, prompt: bool
    ) -> Stepwise | None:
        """Return the single-step options of a choice; ``dice`` is the seed if none was given.

        ``prompt``: also compute the prompt's log-probabilities.

        Raises:
            UnsupportedParameter: mirostat, which carries a state from token to token, or a grammar
                together with a minimum length.
        """
        name = self.asked(sampling, ranked=ranked)
        if name is None:
            return None
        if sampling.mirostat:
            raise UnsupportedParameter(
                f"Unsupported parameter: '{name}' cannot be honoured with 'mirostat', which is on "
                "(perhaps by the model's own settings). Send 'mirostat': 0.",
                name,
            )
        for end in (end for end, wanted in self._ends.items() if wanted and self.guide):
            raise UnsupportedParameter(
                f"Unsupported parameter: '{end}' cannot be honoured where the answer follows a "
                "grammar, which says itself where it ends.",
                end,
            )
        top = self.top_logprobs
        return Stepwise(
            seed=dice if self.seed is None else self.seed,
            choice=choice,
            min_p=self.min_p,
            logit_bias=self.logit_bias,
            top_logprobs=0 if top is None and ranked else top,
            prompt_logprobs=prompt and top is not None,
            guide=None if self.guide is None else self.guide[1],
            free=self._only_guided(sampling, ranked=ranked),
            least=NEVER_ENDS if self.ignore_eos else self.min_tokens,
        )


def read_steps(fields: Fields, *, chat: bool) -> SamplingOptions:
    """Read the keys of a call. Raises ``RequestError`` with the ``param`` at fault."""
    top = _of_chat(fields) if chat else _of_completion(fields)
    return replace(read_extras(fields), top_logprobs=top)


def read_draws(fields: Fields) -> SamplingOptions:
    """Read seed, ``min_p`` and bias. Raises ``RequestError``."""
    return SamplingOptions(
        seed=fields.integer("seed", _SEED),
        min_p=fields.number("min_p", _SHARE) or 0.0,
        logit_bias=_logit_bias(fields),
    )


def read_extras(fields: Fields, guide: Named | None = None) -> SamplingOptions:
    """Read these keys for dialects with other keys for log-probabilities.

    ``guide`` is the grammar from the dialect's own keys. Raises ``RequestError``.
    """
    own = read_guide(fields)
    if own is not None and guide is not None:
        raise RequestError(
            f"Only one of '{guide[0]}' and '{own[0]}' can say what the answer follows.", own[0]
        )
    return replace(
        read_draws(fields),
        guide=guide or own,
        ignore_eos=fields.flag("ignore_eos"),
        min_tokens=fields.integer("min_tokens", _LEAST) or 0,
    )


def read_top(fields: Fields, name: str = "top_logprobs") -> int | None:
    """Read the number of likeliest tokens to list. Raises ``RequestError``."""
    return fields.integer(name, _TOP)


def check_ids(steps: SamplingOptions, check: Callable[[int, str], None]) -> None:
    """Call ``check`` on every token ID."""
    for token_id, _ in steps.logit_bias:
        check(token_id, f"logit_bias.{token_id}")


def _of_chat(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", _TOP)
    # Trainers (PipelineRL) send completions' number here, which vLLM takes for the switch.
    given = fields.get("logprobs")
    if type(given) is int and given in (0, 1):
        given = bool(given)
    elif given is not None:
        given = fields.flag("logprobs")
    if given:
        return top or 0
    if top:
        raise RequestError(
            "Invalid 'top_logprobs': it needs 'logprobs' to be true.", "top_logprobs"
        )
    return None


def _of_completion(fields: Fields) -> int | None:
    # A client of chats may send its switch here, too: off is off.
    return None if fields.get("logprobs") is False else fields.integer("logprobs", _TOP)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    value = fields.get("logit_bias")
    if value is None or value in ([], ""):
        return ()
    if not isinstance(value, dict):
        raise wrong_type("logit_bias", "an object of token ids and numbers", value)
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"Invalid 'logit_bias': it may have {MAX_LOGIT_BIAS} tokens at most, but has "
            f"{len(value)}.",
            "logit_bias",
        )
    found = {_token_id(key): _bias(amount, key) for key, amount in value.items()}
    return tuple(sorted(found.items()))


def _token_id(key: str) -> int:
    # Other digits than these are digits to Python, and no number of thousands of them is an id.
    if not (key.isascii() and key.isdigit() and len(key) <= len(str(2**31))):
        raise RequestError(f"Invalid 'logit_bias': {key[:40]!r} is not a token id.", "logit_bias")
    return int(key)


def _bias(value: Any, key: str) -> float:
    path = f"logit_bias.{key}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_type(path, "a number", value)
    if not -_MAX_BIAS <= value <= _MAX_BIAS or math.isnan(value):
        raise RequestError(
            f"Invalid '{path}': expected a number between -{_MAX_BIAS} and {_MAX_BIAS}.", path
        )
    return float(value)
