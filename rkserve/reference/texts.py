"""Endpoints about texts: vectors, what is compared by them, and token ids."""

from __future__ import annotations

from rkserve.api.json import limits
from rkserve.reference import failures
from rkserve.reference.asking import FUNCTION, IDS, MODEL, STANDING
from rkserve.reference.endpoints import Access, Endpoint, Example, in_json, in_query, told
from rkserve.reference.openai import ANSWERED, ASKED, HELLO, SIM
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
    const,
    either,
    integer,
    maybe,
    number,
    obj,
    ref,
    text,
    words,
)

EMBED = "sim-embed"
_TEXTS = "Vectors and ranks"
_TOKENS = "Tokens"
_ONE = either(text(1), obj({"text": text(1)}))
_SEVERAL = either(_ONE, array(_ONE, 1, limits.MAX_INPUTS))
_SESSION: dict[str, Schema] = {**STANDING, "user": TEXT, "prompt_cache_key": TEXT}
_COUNTED = obj({"prompt_tokens": COUNT, "total_tokens": COUNT, "completion_tokens": {"const": 0}})

SCHEMAS: dict[str, Schema] = {
    "EmbeddingsRequest": body(
        {
            "model": MODEL,
            "input": either(text(1), IDS, array(either(text(1), IDS), 1, limits.MAX_INPUTS)),
        },
        {
            "encoding_format": words("float", "base64"),
            "dimensions": integer(1, limits.MAX_DIMENSIONS),
            **_SESSION,
        },
    ),
    "Embeddings": obj(
        {
            "object": const("list"),
            "data": array(
                obj(
                    {
                        "object": const("embedding"),
                        "index": COUNT,
                        "embedding": either(array(NUMBER), TEXT),
                    }
                )
            ),
            "model": TEXT,
            "usage": obj({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }
    ),
    "PoolingRequest": body(
        {
            "model": MODEL,
            "input": either(text(1), IDS, array(either(text(1), IDS), 1, limits.MAX_INPUTS)),
        },
        {"encoding_format": words("float", "base64"), "task": words("token_embed"), **_SESSION},
    ),
    "Pooled": obj(
        {
            "id": TEXT,
            "object": const("list"),
            "created": COUNT,
            "model": TEXT,
            "data": array(
                obj(
                    {
                        "index": COUNT,
                        "object": const("pooling"),
                        "data": either(array(array(NUMBER)), TEXT),
                    }
                )
            ),
            "usage": obj(
                {"prompt_tokens": COUNT, "total_tokens": COUNT, "completion_tokens": COUNT}
            ),
        }
    ),
    "RerankRequest": body(
        {"model": MODEL, "query": _ONE, "documents": array(_ONE, 1, limits.MAX_INPUTS)},
        {"top_n": integer(1), "return_documents": FLAG, **_SESSION},
    ),
    "Ranking": obj(
        {
            "id": TEXT,
            "object": const("list"),
            "model": TEXT,
            "results": array(
                obj(
                    {"index": COUNT, "relevance_score": NUMBER},
                    {"document": obj({"text": TEXT})},
                )
            ),
            "usage": _COUNTED,
        }
    ),
    "ScoreRequest": body(
        {"model": MODEL},
        {
            **dict.fromkeys(("text_1", "queries", "data_1"), _SEVERAL),
            **dict.fromkeys(("text_2", "documents", "data_2"), _SEVERAL),
            **_SESSION,
        },
        about="One text with many, or pairs: `text_1` and `text_2`, or their other names.",
    ),
    "Scores": obj(
        {
            "id": TEXT,
            "object": const("list"),
            "created": INTEGER,
            "model": TEXT,
            "data": array(obj({"index": COUNT, "object": const("score"), "score": number(-1, 1)})),
            "usage": _COUNTED,
        }
    ),
    "TokenizeRequest": body(
        {},
        {
            "model": MODEL,
            "prompt": TEXT,
            "messages": array(ref("ChatMessage"), 1),
            "add_special_tokens": FLAG,
            "add_generation_prompt": FLAG,
            "continue_final_message": FLAG,
            "return_token_strs": FLAG,
            "tools": array(obj({"type": words("function"), "function": FUNCTION})),
            "chat_template_kwargs": ANYTHING,
        },
        about="Either `prompt` or `messages`. `model` may be left out where only one generates.",
    ),
    "Tokens": obj(
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": array(INTEGER),
            "token_strs": maybe(array(TEXT)),
        }
    ),
    "TokenizerInfo": obj(
        {
            "tokenizer_class": TEXT,
            "model_max_length": COUNT,
            "add_bos_token": FLAG,
            "add_eos_token": FLAG,
            "chat_template": maybe(TEXT),
            "vocab_size": COUNT,
            **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), maybe(TEXT)),
        }
    ),
    "DetokenizeRequest": body({"tokens": array(INTEGER)}, {"model": MODEL}),
    "Detokenized": obj({"prompt": TEXT}),
}


def _rerank(path: str) -> Endpoint:
    return Endpoint(
        "POST",
        path,
        _TEXTS,
        "Order documents by how near they are to a query.",
        Access.CLIENT,
        (told(ref("Ranking"), says="The most relevant one first.", headers=ANSWERED),),
        failures.GENERATION,
        ASKED,
        in_json(ref("RerankRequest")),
        Example({"model": EMBED, "query": "fish", "documents": ["A trout.", "A stone."]}),
    )


def _score(path: str) -> Endpoint:
    return Endpoint(
        "POST",
        path,
        _TEXTS,
        "Say how near texts are to each other.",
        Access.CLIENT,
        (told(ref("Scores"), says="A score for each pair, in their order.", headers=ANSWERED),),
        failures.GENERATION,
        ASKED,
        in_json(ref("ScoreRequest")),
        Example({"model": EMBED, "text_1": "fish", "text_2": ["A trout.", "A stone."]}),
    )


def _tokenize(path: str) -> Endpoint:
    return Endpoint(
        "POST",
        path,
        _TOKENS,
        "Return the token ids of a text or a conversation.",
        Access.CLIENT,
        (told(ref("Tokens"), says="The ids."),),
        (*failures.LOOKUP, 429),
        body=in_json(ref("TokenizeRequest")),
        example=Example({"model": SIM, "messages": HELLO}),
    )


def _detokenize(path: str) -> Endpoint:
    return Endpoint(
        "POST",
        path,
        _TOKENS,
        "Return the text of token ids.",
        Access.CLIENT,
        (told(ref("Detokenized"), says="The text."),),
        (*failures.LOOKUP, 429),
        body=in_json(ref("DetokenizeRequest")),
        example=Example({"model": SIM, "tokens": [72, 101]}),
    )


def _tokenizer_info(path: str) -> Endpoint:
    return Endpoint(
        "GET",
        path,
        _TOKENS,
        "Describe the tokenizer of a model.",
        Access.CLIENT,
        (told(ref("TokenizerInfo"), says="Keys of its tokenizer_config.json, as in force."),),
        (400, *failures.CLIENT, 404, 503),
        (in_query("model", TEXT, "Needed where several models generate text."),),
        example=Example(query={"model": SIM}),
    )


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/embeddings",
        _TEXTS,
        "Make vectors of texts.",
        Access.CLIENT,
        (told(ref("Embeddings"), says="A vector for each text.", headers=ANSWERED),),
        failures.GENERATION,
        ASKED,
        in_json(ref("EmbeddingsRequest")),
        Example({"model": EMBED, "input": ["A trout.", "A stone."]}),
    ),
    Endpoint(
        "POST",
        "/pooling",
        _TEXTS,
        "Return the hidden states of all tokens of texts, as vLLM does.",
        Access.CLIENT,
        (told(ref("Pooled"), says="A row for each token of each text.", headers=ANSWERED),),
        failures.GENERATION,
        ASKED,
        in_json(ref("PoolingRequest")),
        Example({"model": EMBED, "input": ["A trout."]}),
    ),
    *(_rerank(path) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    *(_score(path) for path in ("/v1/score", "/score")),
    *(_tokenize(path) for path in ("/tokenize", "/v1/tokenize")),
    *(_detokenize(path) for path in ("/detokenize", "/v1/detokenize")),
    *(_tokenizer_info(path) for path in ("/tokenizer_info", "/v1/tokenizer_info")),
)
