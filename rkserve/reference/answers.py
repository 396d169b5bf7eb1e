"""Answers of calls that generate, whole and in pieces, in every dialect."""

from __future__ import annotations

from rkserve.reference.shapes import (
    ANY,
    ANYTHING,
    COUNT,
    FLAG,
    INTEGER,
    NULL,
    NUMBER,
    SECONDS,
    TEXT,
    Schema,
    array,
    const,
    either,
    mapping,
    maybe,
    obj,
    ref,
    words,
)

_HEAD: dict[str, Schema] = {
    "id": TEXT,
    "created": INTEGER,
    "model": TEXT,
    "system_fingerprint": TEXT,
}
_VERSIONS = array(obj({"version": TEXT, "start": COUNT, "end": COUNT}))
_SPANS = {"weight_versions": _VERSIONS}
_IDS = array(INTEGER)
_CHOICE = {**_SPANS, "token_ids": _IDS}
_RAW = {**_CHOICE, "prompt_token_ids": _IDS}
_TIMED: dict[str, Schema] = {"timings": ref("Timings"), "weight_version": TEXT}
_REASON = words("stop", "length", "tool_calls", "function_call", "abort")
_CALLED = obj({"name": TEXT, "arguments": TEXT})
_TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": maybe(array(INTEGER))}
_CHAT_LOGPROBS = obj(
    {"content": array(obj({**_TOKEN, "top_logprobs": array(obj(_TOKEN))})), "refusal": NULL}
)
_LOGPROBS = obj(
    {
        "tokens": array(TEXT),
        "token_logprobs": array(maybe(NUMBER)),
        "top_logprobs": array(maybe(mapping(NUMBER))),
        "text_offset": array(INTEGER),
    }
)
_USAGE = {
    "prompt_tokens": COUNT,
    "completion_tokens": COUNT,
    "total_tokens": COUNT,
    "prompt_tokens_details": obj({"cached_tokens": COUNT}),
    "completion_tokens_details": obj({"reasoning_tokens": COUNT}),
}
_MESSAGE = obj(
    {"role": const("assistant"), "content": maybe(TEXT), "refusal": NULL},
    {
        "reasoning_content": TEXT,
        "function_call": _CALLED,
        "tool_calls": array(obj({"id": TEXT, "type": const("function"), "function": _CALLED})),
    },
)
_STREAMED: dict[str, Schema] = {
    "usage": maybe(ref("Usage")),
    "rkserve": ANYTHING,
    "prompt_token_ids": _IDS,
    **_TIMED,
    "error": ANYTHING,
}


def _chunk(kind: str, choice: Schema) -> Schema:
    return obj({**_HEAD, "object": const(kind), "choices": array(choice)}, _STREAMED)


_OPENAI: dict[str, Schema] = {
    "Timings": obj(
        {
            "queue_ms": SECONDS,
            "prefill_ms": SECONDS,
            "prefill_tokens": COUNT,
            "decode_ms": SECONDS,
            "decode_tokens": COUNT,
            "tokens_per_s": maybe(NUMBER),
            "cached": COUNT,
        },
        {
            "paused_ms": SECONDS,
            "batch": COUNT,
            "batch_wait_ms": SECONDS,
            "encode_ms": SECONDS,
            "continued": COUNT,
            "lost_ms": SECONDS,
        },
        "Board time as measured, added up over choices.",
    ),
    "Usage": obj(_USAGE),
    "ChatCompletion": obj(
        {
            **_HEAD,
            "object": const("chat.completion"),
            **_TIMED,
            "choices": array(
                obj(
                    {
                        "index": COUNT,
                        "message": _MESSAGE,
                        "logprobs": maybe(_CHAT_LOGPROBS),
                        "finish_reason": _REASON,
                    },
                    _CHOICE,
                )
            ),
            "usage": ref("Usage"),
        },
        {"prompt_token_ids": _IDS},
    ),
    "ChatChunk": _chunk(
        "chat.completion.chunk",
        obj(
            {
                "index": COUNT,
                "delta": obj(
                    {},
                    {
                        "role": const("assistant"),
                        "content": TEXT,
                        "refusal": NULL,
                        "reasoning_content": TEXT,
                        "function_call": ANYTHING,
                        "tool_calls": array(ANYTHING),
                    },
                ),
                "logprobs": maybe(_CHAT_LOGPROBS),
                "finish_reason": maybe(_REASON),
            },
            _CHOICE,
        ),
    ),
    "Completion": obj(
        {
            **_HEAD,
            "object": const("text_completion"),
            **_TIMED,
            "choices": array(
                obj(
                    {
                        "index": COUNT,
                        "text": TEXT,
                        "logprobs": maybe(_LOGPROBS),
                        "finish_reason": _REASON,
                    },
                    _RAW,
                )
            ),
            "usage": ref("Usage"),
        }
    ),
    "CompletionChunk": _chunk(
        "text_completion",
        obj(
            {
                "index": COUNT,
                "text": TEXT,
                "logprobs": maybe(_LOGPROBS),
                "finish_reason": maybe(_REASON),
            },
            _RAW,
        ),
    ),
}

_RESPONSE: dict[str, Schema] = {
    "id": TEXT,
    "object": const("response"),
    "created_at": INTEGER,
    "completed_at": maybe(INTEGER),
    "status": words("in_progress", "completed", "incomplete", "cancelled", "failed"),
    "background": const(False),
    "error": maybe(ANYTHING),
    "incomplete_details": maybe(obj({"reason": TEXT})),
    "model": TEXT,
    "output": array(ANYTHING),
    "truncation": const("disabled"),
    "usage": maybe(
        obj(
            {
                "input_tokens": COUNT,
                "input_tokens_details": obj({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
                "output_tokens": COUNT,
                "output_tokens_details": obj({"reasoning_tokens": COUNT}),
                "total_tokens": COUNT,
            }
        )
    ),
    "instructions": maybe(TEXT),
    "max_output_tokens": maybe(INTEGER),
    "metadata": mapping(TEXT),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), NUMBER),
    "service_tier": const("default"),
    "safety_identifier": maybe(TEXT),
    "prompt_cache_key": maybe(TEXT),
    "parallel_tool_calls": FLAG,
    "max_tool_calls": maybe(INTEGER),
    "tool_choice": either(TEXT, ANYTHING),
    "tools": array(ANYTHING),
    "reasoning": ANYTHING,
    "text": ANYTHING,
    "top_logprobs": COUNT,
    "previous_response_id": maybe(TEXT),
    "store": FLAG,
}
_RESPONSES: dict[str, Schema] = {
    "Response": obj(
        _RESPONSE,
        {"system_fingerprint": TEXT, **_TIMED, **_SPANS},
    ),
    "ResponseEvent": obj(
        {"type": TEXT, "sequence_number": COUNT},
        {
            "response": ref("Response"),
            **dict.fromkeys(
                (
                    "rkserve",
                    "item",
                    "part",
                    "item_id",
                    "output_index",
                    "content_index",
                    "delta",
                    "logprobs",
                    "text",
                    "arguments",
                    "code",
                    "message",
                    "param",
                ),
                ANY,
            ),
        },
    ),
    "ResponseItems": obj(
        {
            "object": const("list"),
            "data": array(ANYTHING),
            "first_id": maybe(TEXT),
            "last_id": maybe(TEXT),
            "has_more": FLAG,
        }
    ),
    "ResponseDeleted": obj({"id": TEXT, "object": const("response"), "deleted": const(True)}),
}

_ANTHROPIC_USAGE = obj(
    {
        "input_tokens": INTEGER,
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "output_tokens": COUNT,
    }
)
_ANTHROPIC: dict[str, Schema] = {
    "Message": obj(
        {
            "id": TEXT,
            "type": const("message"),
            "role": const("assistant"),
            "model": TEXT,
            "content": array(
                either(
                    obj({"type": const("text"), "text": TEXT}),
                    obj({"type": const("thinking"), "thinking": TEXT, "signature": TEXT}),
                    obj({"type": const("tool_use"), "id": TEXT, "name": TEXT, "input": ANYTHING}),
                )
            ),
            "stop_reason": words(
                "end_turn",
                "max_tokens",
                "stop_sequence",
                "tool_use",
                "model_context_window_exceeded",
                "abort",
            ),
            "stop_sequence": maybe(TEXT),
            "usage": _ANTHROPIC_USAGE,
            "system_fingerprint": TEXT,
            **_TIMED,
        },
        _SPANS,
    ),
    "MessageEvent": obj(
        {
            "type": words(
                "message_start",
                "content_block_start",
                "content_block_delta",
                "content_block_stop",
                "message_delta",
                "message_stop",
                "ping",
                "error",
            )
        },
        {
            **dict.fromkeys(("message", "content_block", "delta", "rkserve", "error"), ANYTHING),
            "index": COUNT,
            "usage": _ANTHROPIC_USAGE,
            "system_fingerprint": TEXT,
            **_TIMED,
            **_SPANS,
        },
    ),
    "TokenCount": obj({"input_tokens": COUNT}),
}

_LINE: dict[str, Schema] = {"model": TEXT, "created_at": TEXT, "done": FLAG}
_LAST: dict[str, Schema] = {
    "done_reason": TEXT,
    "total_duration": COUNT,
    "load_duration": COUNT,
    "prompt_eval_count": COUNT,
    "prompt_eval_duration": COUNT,
    "eval_count": COUNT,
    "eval_duration": COUNT,
    "rkserve": ANYTHING,
}
_OLLAMA: dict[str, Schema] = {
    "OllamaChat": obj(
        {
            **_LINE,
            "message": obj(
                {"role": const("assistant"), "content": TEXT},
                {
                    "thinking": TEXT,
                    "tool_calls": array(
                        obj({"id": TEXT, "function": obj({"name": TEXT, "arguments": ANYTHING})})
                    ),
                },
            ),
        },
        _LAST,
    ),
    "OllamaGenerate": obj({**_LINE, "response": TEXT}, {**_LAST, "thinking": TEXT}),
}

_GENERATED = obj(
    {
        "index": COUNT,
        "token_ids": _IDS,
        "logprobs": maybe(_CHAT_LOGPROBS),
        "finish_reason": maybe(_REASON),
    },
    _SPANS,
)
_SCORES = array(array(ANY))
_TRAINERS: dict[str, Schema] = {
    "Generated": obj(
        {
            "request_id": TEXT,
            "id": TEXT,
            "model": TEXT,
            "created": INTEGER,
            "choices": array(_GENERATED),
            "prompt_logprobs": maybe(array(maybe(ANYTHING))),
            "kv_transfer_params": NULL,
            "system_fingerprint": TEXT,
            "weight_version": TEXT,
            "usage": ref("Usage"),
        }
    ),
    "GeneratedChunk": obj(
        {"request_id": TEXT, "id": TEXT, "choices": array(_GENERATED)},
        {
            "usage": ref("Usage"),
            "rkserve": ANYTHING,
            "error": ANYTHING,
            "system_fingerprint": TEXT,
            "weight_version": TEXT,
        },
    ),
    "SglangGenerated": obj(
        {
            "text": TEXT,
            "output_ids": _IDS,
            "meta_info": obj(
                {
                    "id": TEXT,
                    "finish_reason": maybe(ANYTHING),
                    "prompt_tokens": COUNT,
                    "completion_tokens": COUNT,
                    "cached_tokens": COUNT,
                    "weight_version": TEXT,
                },
                {
                    **_SPANS,
                    "output_token_logprobs": _SCORES,
                    "output_top_logprobs": array(maybe(_SCORES)),
                    "input_token_logprobs": _SCORES,
                    "input_top_logprobs": array(maybe(_SCORES)),
                },
            ),
        },
        {"index": COUNT},
    ),
}

SCHEMAS: dict[str, Schema] = {**_TRAINERS, **_OPENAI, **_RESPONSES, **_ANTHROPIC, **_OLLAMA}
