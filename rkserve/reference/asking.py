"""Bodies of calls that generate, in OpenAI's words; other dialects share parts of them."""

from __future__ import annotations

from rkserve.api.json import limits
from rkserve.api.parsing.reasoning import EFFORTS, MOST_TOKENS
from rkserve.reference.shapes import (
    ANYTHING,
    COUNT,
    FLAG,
    INTEGER,
    NUMBER,
    TEXT,
    Schema,
    array,
    body,
    either,
    integer,
    mapping,
    number,
    obj,
    ref,
    said,
    text,
    words,
)

TEXTS = either(TEXT, array(TEXT))
IDS = array(INTEGER, 1)
MODEL = said(text(1, limits.MAX_MODEL_CHARS), "A model or an adapter.")
_STOP = text(1, limits.MAX_STOP_CHARS)
_SEED = integer(-(2**63), 2**64 - 1)
_SHARE = number(0, 1)

SAMPLING: dict[str, Schema] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "top_k": said(integer(-1), "0 and -1 are the whole vocabulary."),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repeat_penalty": number(0, limits.MAX_REPEAT_PENALTY, above=True),
    "repetition_penalty": said(
        number(0, limits.MAX_REPEAT_PENALTY, above=True), "vLLM's name of `repeat_penalty`."
    ),
    "mirostat": integer(0, 2),
    "mirostat_tau": number(0, limits.MAX_MIROSTAT_TAU, above=True),
    "mirostat_eta": number(0, 1, above=True),
}
STANDING: dict[str, Schema] = {
    "priority": said(INTEGER, "Lower goes first."),
    "timeout": said(
        number(0, limits.MAX_TIMEOUT_S, above=True), "Seconds for which the answer is of use."
    ),
}
DRAWS: dict[str, Schema] = {
    "seed": said(_SEED, "The same answer again."),
    "min_p": _SHARE,
    "logit_bias": said(mapping(number(-100, 100)), "By token id."),
}
ENDS: dict[str, Schema] = {
    "ignore_eos": said(FLAG, "The model does not end the answer: `max_tokens` does."),
    "min_tokens": said(integer(0, MOST_TOKENS), "The model does not end the answer before."),
}
GUIDES: dict[str, Schema] = {
    "guided_json": either(ANYTHING, TEXT),
    "guided_regex": TEXT,
    "guided_choice": array(text(1), 1, limits.MAX_GUIDE_CHOICES),
    "guided_grammar": TEXT,
    "guided_json_object": FLAG,
    "regex": said(TEXT, "SGLang's name of `guided_regex`."),
    "ebnf": said(TEXT, "SGLang's name of `guided_grammar`."),
    "structured_outputs": said(ANYTHING, "Exactly one of the above, without its prefix."),
}
# rkserve's own keys, which have the same names in all dialects.
OWN: dict[str, Schema] = {
    "strict_sampling": said(FLAG, "Refuse sampling that the runtime cannot honour."),
    "pause_on": said(
        array(either(_STOP, INTEGER), 1, limits.MAX_PAUSE_ON),
        "Texts and token ids after which the generation pauses.",
    ),
    "native_pause": said(FLAG, "The runtime itself pauses, with the KV cache kept."),
    "use_cache": said(TEXT, "The name of a prompt cache."),
    "cache_salt": said(
        text(1, limits.MAX_SALT_CHARS), "KV cache is shared with requests of the same salt only."
    ),
    "stop_token_ids": said(
        array(COUNT, 0, limits.MAX_STOP_IDS), "Token ids that end the answer, as an EOS does."
    ),
    "include_stop_str_in_output": said(FLAG, "What ended the answer is part of it."),
    "return_weight_versions": said(FLAG, "Tell which tokens come from which weights."),
    "keep_version": said(FLAG, "No switch of adapters while it runs."),
    **STANDING,
}
THINKING: dict[str, Schema] = {
    "enable_thinking": FLAG,
    "reasoning_effort": words(*EFFORTS),
    "max_reasoning_tokens": integer(1, MOST_TOKENS),
    "chat_template_kwargs": ANYTHING,
}
_OPENAI: dict[str, Schema] = {
    "stream": FLAG,
    "stream_options": body({}, {"include_usage": FLAG}),
    "n": integer(1, limits.MAX_CHOICES),
    "stop": either(_STOP, array(_STOP, 0, limits.MAX_STOP)),
    **SAMPLING,
    **DRAWS,
    "response_format": said(
        ANYTHING, "`text`, `json_object`, or `json_schema` with a schema: what the answer follows."
    ),
    **ENDS,
    **GUIDES,
    **OWN,
    "prompt_cache_key": said(TEXT, "Keeps the requests of a session together."),
    "user": said(TEXT, "As `prompt_cache_key`."),
    "return_token_ids": said(FLAG, "Token ids of prompt and answer."),
    "return_tokens_as_token_ids": said(FLAG, "Log-probabilities name tokens by their ids."),
    "skip_special_tokens": said(FLAG, "False shows special tokens in the text."),
}
FUNCTION = obj(
    {"name": text(1, limits.MAX_TOOL_NAME_CHARS)},
    {"description": TEXT, "parameters": ANYTHING, "strict": FLAG},
)

SCHEMAS: dict[str, Schema] = {
    "ChatMessage": obj(
        {"role": words("system", "developer", "user", "assistant", "tool", "function")},
        {
            "content": said(
                either(TEXT, array(ANYTHING), {"type": "null"}),
                "A text, or parts: `text`, `refusal`, and of a user `image_url`.",
            ),
            "name": TEXT,
            "tool_call_id": said(TEXT, "Without it a result answers the first open call."),
            "tool_calls": array(ANYTHING),
            "reasoning_content": TEXT,
            "prefix": said(FLAG, "Of a final message of the assistant: the answer continues it."),
        },
    ),
    "ChatRequest": body(
        {"model": MODEL, "messages": array(ref("ChatMessage"), 1)},
        {
            "max_completion_tokens": integer(1),
            "max_tokens": said(integer(1), "The deprecated name."),
            **_OPENAI,
            "logprobs": FLAG,
            "top_logprobs": integer(0, limits.MAX_TOP_LOGPROBS),
            "tools": array(
                obj({"type": words("function"), "function": FUNCTION}), 0, limits.MAX_TOOLS
            ),
            "tool_choice": either(words("none", "auto", "required"), ANYTHING),
            "parallel_tool_calls": FLAG,
            "functions": said(array(FUNCTION, 0, limits.MAX_TOOLS), "Deprecated."),
            "function_call": said(either(words("none", "auto"), ANYTHING), "Deprecated."),
            **THINKING,
            "continue_final_message": said(
                FLAG, "The answer continues the final message, which is the assistant's."
            ),
            "add_generation_prompt": said(FLAG, "False with `continue_final_message` only."),
        },
    ),
    "CompletionRequest": body(
        {
            "model": MODEL,
        },
        {
            "prompt": said(
                either(text(0), array(INTEGER), array(either(text(1), IDS), 1, limits.MAX_CHOICES)),
                "Demanded, and not empty, unless there are `prompt_embeds`.",
            ),
            "prompt_embeds": said(
                TEXTS, "In place of `prompt`: base64 of safetensors, or of a NumPy array."
            ),
            "cross_attention": said(
                body(
                    {
                        "k_cache": said(TEXT, "`[layers, tokens, KV heads, head size]`."),
                        "v_cache": said(TEXT, "`[layers, KV heads, head size, tokens]`."),
                        "mask": said(array(number(), 1), "One number for each token."),
                        "positions": said(array(COUNT, 1), "One for each token."),
                    },
                    {},
                ),
                "An encoder's output, for encoder-decoder models; caches as `prompt_embeds`.",
            ),
            "max_tokens": said(COUNT, "0 only with `echo`."),
            **_OPENAI,
            "logprobs": either(integer(0, limits.MAX_TOP_LOGPROBS), {"const": False}),
            "echo": FLAG,
            "best_of": integer(1, limits.MAX_CHOICES),
        },
    ),
    "GenerateRequest": body(
        {
            "token_ids": IDS,
            "sampling_params": said(
                body(
                    {},
                    {
                        **SAMPLING,
                        **DRAWS,
                        **ENDS,
                        "n": integer(1, limits.MAX_CHOICES),
                        "stop": either(_STOP, array(_STOP, 0, limits.MAX_STOP)),
                        "stop_token_ids": array(COUNT, 0, limits.MAX_STOP_IDS),
                        "max_tokens": integer(1),
                        "logprobs": integer(0, limits.MAX_TOP_LOGPROBS),
                        "prompt_logprobs": either(
                            integer(0, limits.MAX_TOP_LOGPROBS), {"const": False}
                        ),
                        "structured_outputs": ANYTHING,
                    },
                ),
                "vLLM's SamplingParams: what is left out has their values and not the model's.",
            ),
        },
        {
            "model": said(MODEL, "May be left out where only one generates."),
            "request_id": said(text(1, limits.MAX_MODEL_CHARS), "Comes back in the answer."),
            "stream": FLAG,
            "stream_options": body({}, {"include_usage": FLAG}),
            **{name: OWN[name] for name in ("cache_salt", "priority", "timeout", "pause_on")},
        },
    ),
    "SglangGenerateRequest": body(
        {},
        {
            "text": said(either(text(1), array(text(1), 1, limits.MAX_CHOICES)), "Or `input_ids`."),
            "input_ids": either(IDS, array(IDS, 1, limits.MAX_CHOICES)),
            "sampling_params": said(
                ANYTHING, "SGLang's: what is left out has their values and not the model's."
            ),
            "return_logprob": FLAG,
            "logprob_start_len": said(integer(-1), "-1: none of the prompt."),
            "top_logprobs_num": integer(0, limits.MAX_TOP_LOGPROBS),
            "stream": FLAG,
            "rid": said(text(1, limits.MAX_MODEL_CHARS), "Comes back in the answer."),
            "lora_path": said(TEXT, "The name of an adapter."),
            "model": said(MODEL, "May be left out where only one generates."),
        },
    ),
    "ResponseRequest": body(
        {"model": MODEL, "input": either(TEXT, array(ANYTHING, 1))},
        {
            "instructions": TEXT,
            "previous_response_id": TEXT,
            "store": FLAG,
            "max_output_tokens": integer(1),
            "stream": FLAG,
            **SAMPLING,
            "tools": said(
                array(ANYTHING, 0, limits.MAX_TOOLS),
                "Those of other types than `function` are left out.",
            ),
            "max_tool_calls": integer(1),
            "safety_identifier": TEXT,
            "prompt_cache_key": said(TEXT, "Keeps the requests of a session together."),
            "service_tier": said(TEXT, "There is one: `default`."),
            "tool_choice": either(words("none", "auto", "required"), ANYTHING),
            "parallel_tool_calls": FLAG,
            "reasoning": body({}, {"effort": words(*EFFORTS)}),
            "text": body({}, {"format": ANYTHING}),
            "include": array(TEXT),
            "top_logprobs": integer(0, limits.MAX_TOP_LOGPROBS),
            "metadata": mapping(TEXT),
            "truncation": words("disabled"),
            "background": {"const": False},
            **DRAWS,
            **ENDS,
            **GUIDES,
            **OWN,
            **THINKING,
        },
    ),
    "MessagesRequest": body(
        {"model": MODEL, "messages": array(ref("AnthropicMessage"), 1), "max_tokens": integer(1)},
        (
            _messages := {
                "system": either(TEXT, array(ANYTHING, 1)),
                "stop_sequences": array(_STOP, 0, limits.MAX_STOP_SEQUENCES),
                "stream": FLAG,
                "tools": said(
                    array(ANYTHING, 0, limits.MAX_TOOLS),
                    "Those of other types than `custom` are left out.",
                ),
                "tool_choice": ANYTHING,
                "thinking": ANYTHING,
                "output_config": ANYTHING,
                "output_format": ANYTHING,
                "metadata": ANYTHING,
                **SAMPLING,
                **DRAWS,
                **ENDS,
                **GUIDES,
                **OWN,
                **THINKING,
            }
        ),
    ),
    "CountRequest": body(
        {"model": MODEL, "messages": array(ref("AnthropicMessage"), 1)}, _messages
    ),
    "AnthropicMessage": obj(
        {
            "role": words("user", "assistant", "system"),
            "content": either(TEXT, array(ANYTHING, 1)),
        }
    ),
    "OllamaOptions": body(
        {},
        {
            **SAMPLING,
            **DRAWS,
            "num_predict": INTEGER,
            "stop": either(_STOP, array(_STOP, 0, limits.MAX_STOP_SEQUENCES)),
        },
    ),
    "OllamaChatRequest": body(
        {"model": MODEL},
        {
            "messages": said(array(ANYTHING), "None: the model is loaded, if it sleeps."),
            "tools": array(ANYTHING, 0, limits.MAX_TOOLS),
            **(
                _ollama := {
                    "stream": said(FLAG, "True unless it is said otherwise."),
                    "options": ref("OllamaOptions"),
                    "format": either(words("", "json"), ANYTHING),
                    "think": either(FLAG, words(*EFFORTS)),
                    "keep_alive": said(
                        either(TEXT, NUMBER), "Only 0 has a meaning: it is refused."
                    ),
                    **OWN,
                    **THINKING,
                }
            ),
        },
    ),
    "OllamaGenerateRequest": body(
        {"model": MODEL},
        {
            "prompt": said(TEXT, "None: the model is loaded, if it sleeps."),
            "system": TEXT,
            "raw": FLAG,
            **_ollama,
        },
    ),
}
