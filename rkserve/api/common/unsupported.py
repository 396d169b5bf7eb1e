"""The table of unsupported parameters that would change the answer.

Each has a test for values without effect (mostly OpenAI's defaults), which clients send by default
and which are accepted. A parameter that is not in the table is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rkserve.api.json.fields import Fields, quoted
from rkserve.core.errors import UnsupportedParameter

Harmless = Callable[[Any, Fields], bool]


def _never(_value: Any, _body: Fields) -> bool:
    return False


def _only(*harmless: Any) -> Harmless:
    # `is` for booleans: 0 == False and 1 == True, and a client that sends 0 means a number.
    return lambda value, _body: any(
        value is h if isinstance(h, bool) else value == h and not isinstance(value, bool)
        for h in harmless
    )


def _generation_prompt(value: Any, body: Fields) -> bool:
    return value is True or (value is False and body.get("continue_final_message") is True)


def _empty(value: Any, _body: Fields) -> bool:
    return value in ([], {}, "")


# Of all dialects: these keys are vLLM's, SGLang's and llama.cpp's own.
SHARED: dict[str, Harmless] = {
    "typical_p": _only(1),
    "use_beam_search": _only(False),
    "bad_words": _empty,
    "allowed_token_ids": _empty,
    "logits_processors": _empty,
    "custom_logit_processor": _empty,
    "custom_params": _empty,
    "vllm_xargs": _empty,
    "stop_regex": _empty,
    "structural_tag": _empty,
    "prompt_logprobs": _only(False),
    "truncate_prompt_tokens": _never,
    "guided_whitespace_pattern": _never,
    "grammar": _empty,
    "max_new_tokens": _never,
    "min_new_tokens": _only(0),
    "n_predict": _never,
    "lora_path": _empty,
    "no_stop_trim": _only(False),
    "return_hidden_states": _only(False),
    "session_params": _empty,
    "thinking_token_budget": _never,
    "include_reasoning": _only(True),
    "separate_reasoning": _only(True),
    "top_a": _only(0),
    "tfs_z": _only(1),
    "top_n_sigma": _only(0, -1),
    "dry_multiplier": _only(0),
    "xtc_probability": _only(0),
    "dynatemp_range": _only(0),
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
TOKENS: dict[str, Harmless] = {
    "skip_special_tokens": _only(True),
    "return_token_ids": _only(False),
    "return_tokens_as_token_ids": _only(False),
}

CHAT: dict[str, Harmless] = {
    **SHARED,
    "modalities": _only(["text"]),
    "audio": _never,
    "web_search_options": _never,
    "chat_template": _never,
    "documents": _empty,
    "add_generation_prompt": _generation_prompt,
    "add_special_tokens": _only(False),
    "echo": _only(False),
    "input_ids": _empty,
    "mm_processor_kwargs": _empty,
    "cross_attention": _never,
}

COMPLETION: dict[str, Harmless] = {
    **SHARED,
    "suffix": _empty,
    "add_special_tokens": _only(True),
}


def refuse(body: Fields, table: dict[str, Harmless]) -> None:
    """Raise for the first unsupported parameter with an effect.

    Raises:
        UnsupportedParameter: its ``param`` names the parameter.
    """
    for name, harmless in table.items():
        value = body.get(name)
        if value is not None and not harmless(value, body):
            path, instead = body.path(name), _INSTEAD.get(name)
            raise UnsupportedParameter(
                f"Unsupported parameter: '{path}' with the value {quoted(value)} would change the "
                "answer, and rkserve cannot honour it." + (f" {instead}" if instead else ""),
                path,
            )
