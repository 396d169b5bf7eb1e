"""Options that RKLLM lacks: those that single steps add, and those that no call may have.

Single steps give seed, bias, log-probabilities, grammars and no early end. They are slower than
RKLLM's own sampling, so an option without effect, such as a seed with greedy sampling, does not
count. The table of other parameters has a test for values without effect (mostly OpenAI's
defaults), which clients send by default and which are accepted. A parameter that is not in the
table is accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rkserve.api.json.fields import (
    MAX_GUIDE_CHOICES,
    MAX_LOGIT_BIAS,
    Fields,
    as_fields,
    missing,
    quoted,
    wrong_type,
)
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.run_params import NEVER_ENDS, Guide, GuideKind, Sampling, Stepwise

_MAX_BIAS = 100


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

        ``prompt``: also compute the prompt's log-probabilities. Raises ``UnsupportedParameter``:
        mirostat, which carries a state from token to token, or a grammar together with a minimum
        length.
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


def check_ids(steps: SamplingOptions, check: Callable[[int, str], None]) -> None:
    """Call ``check`` on every token ID."""
    for token_id, _ in steps.logit_bias:
        check(token_id, f"logit_bias.{token_id}")


def read_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Read ``logit_bias``: an object of token ids and numbers. Raises ``RequestError``."""
    if value in ([], ""):
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


Named = tuple[str, Guide]  # the parameter, and what it asks for

JSON_OBJECT = Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')
_STRUCTURED = "structured_outputs"
_SGLANG = {"regex": "regex", "ebnf": "grammar", "json_schema": "json"}
_OURS = ("json", "regex", "choice", "grammar", "json_object")
_GUIDES = frozenset(
    ("response_format", _STRUCTURED, "regex", "ebnf", *(f"guided_{name}" for name in _OURS))
)


def is_extension(name: str) -> bool:
    """Return whether the parameter of a grammar is vLLM's or SGLang's own."""
    return name.startswith(("guided_", _STRUCTURED)) or name in _SGLANG


def read_guide(fields: Fields) -> Named | None:
    """Read the grammar of a call; None without one.

    Raises ``RequestError``: an invalid ``param``, or several grammars.
    """
    if _GUIDES.isdisjoint(fields.keys()):
        return None
    found = [_response_format(fields)]
    found += [_guided(fields, f"guided_{name}", name) for name in _OURS]
    found.append(_structured(fields))
    # SGLang reads a schema of this name only beside its sampling values.
    found += [_guided(fields, name, _SGLANG[name]) for name in ("regex", "ebnf")]
    asked = [one for one in found if one is not None]
    if len(asked) > 1:
        names = " and ".join(f"'{name}'" for name, _ in asked)
        raise RequestError(f"Only one of {names} can constrain the answer.", asked[1][0])
    return asked[0] if asked else None


def _response_format(fields: Fields) -> Named | None:
    name = "response_format"
    given = fields.child(name)
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return name, JSON_OBJECT
    if kind != "json_schema":
        raise UnsupportedParameter(
            f"Unsupported parameter: '{name}' with the type {quoted(kind)}. Supported are 'text', "
            "'json_object' and 'json_schema'.",
            f"{name}.type",
        )
    schema = given.required_child("json_schema")
    schema.text("name")
    # Always strict: an answer that may leave its schema is not worth the single steps.
    schema.maybe_flag("strict")
    return name, schema_guide(schema)


def _structured(fields: Fields) -> Named | None:
    """Read ``structured_outputs``, vLLM's newer form of all of them."""
    given = fields.child(_STRUCTURED)
    if given is None:
        return None
    found = [_guided(given, name, name) for name in _OURS]
    asked = [one for one in found if one is not None]
    if len(asked) != 1:
        raise RequestError(
            f"Invalid '{_STRUCTURED}': it must have exactly one of {', '.join(_OURS)}.",
            _STRUCTURED,
        )
    return _STRUCTURED, asked[0][1]


def _guided(fields: Fields, name: str, kind: str) -> Named | None:
    value, path = fields.get(name), fields.path(name)
    if value is None or value is False:
        return None
    if kind == "json":
        return path, schema_guide(fields, name)
    if kind == "choice":
        return path, _choice(value, path)
    if kind == "json_object":
        fields.flag(name)
        return path, JSON_OBJECT
    text = fields.required_text(name)
    return path, Guide(GuideKind.REGEX if kind == "regex" else GuideKind.LARK, text)


def schema_guide(fields: Fields, name: str = "schema") -> Guide:
    """Return the schema under a key: an object, or its text as vLLM takes it."""
    value, path = fields.get(name), fields.path(name)
    if value is None:
        raise missing(path)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as exc:
            raise RequestError(f"Invalid '{path}': it is not JSON: {exc}.", path) from exc
    as_fields(value, path)
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(value, separators=(",", ":")))


def _choice(value: Any, path: str) -> Guide:
    if not isinstance(value, list):
        raise wrong_type(path, "an array of strings", value)
    if not 1 <= len(value) <= MAX_GUIDE_CHOICES:
        raise RequestError(
            f"Invalid '{path}': it may have 1 to {MAX_GUIDE_CHOICES} strings, but has "
            f"{len(value)}.",
            path,
        )
    for at, one in enumerate(value):
        if not isinstance(one, str) or not one:
            raise wrong_type(f"{path}[{at}]", "a string that is not empty", one)
    return Guide(GuideKind.LARK, "start: " + " | ".join(json.dumps(one) for one in value))


Harmless = Callable[[Any, Fields], bool]


def never(_value: Any, _body: Fields) -> bool:
    """Return that no value is harmless."""
    return False


def only(*harmless: Any) -> Harmless:
    """Return the test for a few values."""
    # `is` for booleans: 0 == False and 1 == True, and a client that sends 0 means a number.
    return lambda value, _body: any(
        value is h if isinstance(h, bool) else value == h and not isinstance(value, bool)
        for h in harmless
    )


def _generation_prompt(value: Any, body: Fields) -> bool:
    return value is True or (value is False and body.get("continue_final_message") is True)


def empty(value: Any, _body: Fields) -> bool:
    """Return whether a list, an object or a text is empty."""
    return value in ([], {}, "")


# Of all dialects: these keys are vLLM's, SGLang's and llama.cpp's own.
UNSUPPORTED: dict[str, Harmless] = {
    **dict.fromkeys(
        (
            *("bad_words", "allowed_token_ids", "logits_processors", "custom_logit_processor"),
            *("custom_params", "vllm_xargs", "stop_regex", "structural_tag", "grammar"),
            *("lora_path", "session_params"),
        ),
        empty,
    ),
    **dict.fromkeys(
        (
            *("truncate_prompt_tokens", "guided_whitespace_pattern", "max_new_tokens"),
            *("n_predict", "thinking_token_budget"),
        ),
        never,
    ),
    **dict.fromkeys(
        ("use_beam_search", "prompt_logprobs", "no_stop_trim", "return_hidden_states"), only(False)
    ),
    **dict.fromkeys(("include_reasoning", "separate_reasoning"), only(True)),
    **dict.fromkeys(
        ("min_new_tokens", "top_a", "dry_multiplier", "xtc_probability", "dynatemp_range"), only(0)
    ),
    **dict.fromkeys(("typical_p", "tfs_z"), only(1)),
    "top_n_sigma": only(0, -1),
}
# Supported alternatives.
_INSTEAD = {
    "add_generation_prompt": "It is false where 'continue_final_message' is true.",
    "lora_path": "Name the adapter in 'model'.",
    "max_new_tokens": "OpenAI's name of it is 'max_tokens'.",
    "min_new_tokens": "vLLM's name of it is 'min_tokens'.",
    "n_predict": "OpenAI's name of it is 'max_tokens'.",
    "no_stop_trim": "vLLM's name of it is 'include_stop_str_in_output'.",
    "thinking_token_budget": "Its name here is 'max_reasoning_tokens'.",
    "cross_attention": "Send it to /v1/completions.",
    "grammar": "Send a grammar as 'guided_grammar' or 'ebnf'.",
}

# Of dialects other than OpenAI's chats and completions, whose answers do not list tokens.
UNSUPPORTED_TOKENS: dict[str, Harmless] = {
    "skip_special_tokens": only(True),
    "return_token_ids": only(False),
    "return_tokens_as_token_ids": only(False),
}

UNSUPPORTED_CHAT: dict[str, Harmless] = {
    **UNSUPPORTED,
    "modalities": only(["text"]),
    "audio": never,
    "web_search_options": never,
    "chat_template": never,
    "documents": empty,
    "add_generation_prompt": _generation_prompt,
    "add_special_tokens": only(False),
    "echo": only(False),
    "input_ids": empty,
    "mm_processor_kwargs": empty,
    "cross_attention": never,
}

UNSUPPORTED_COMPLETION: dict[str, Harmless] = {
    **UNSUPPORTED,
    "suffix": empty,
    "add_special_tokens": only(True),
}


def refuse_unsupported(body: Fields, table: dict[str, Harmless]) -> None:
    """Raise for the first unsupported parameter with an effect.

    Raises ``UnsupportedParameter``: its ``param`` names the parameter.
    """
    given = table.keys() & body.keys()  # few, if any, of the many
    for name in (name for name in table if name in given) if given else ():
        value = body.get(name)
        if value is not None and not table[name](value, body):
            path, instead = body.path(name), _INSTEAD.get(name)
            raise UnsupportedParameter(
                f"Unsupported parameter: '{path}' with the value {quoted(value)} would change the "
                "answer, and rkserve cannot honour it." + (f" {instead}" if instead else ""),
                path,
            )
