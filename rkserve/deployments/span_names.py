"""Names of spans and of their attributes.

Names of requests to models are those of OpenTelemetry's semantic conventions for generative AI,
which are in development: this is the only place that has them. Version 1.41.1 is the last one with
them; the repository to which they have moved has no release yet.
"""

from __future__ import annotations

from typing import Final

CONVENTIONS: Final = "1.41.1"
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{CONVENTIONS}"

# Of HTTP, which are stable.
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
ERROR_TYPE: Final = "error.type"

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_ID: Final = "gen_ai.response.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
STREAM: Final = "gen_ai.request.stream"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
# By the names of a request's parameters.
PARAMETERS: Final = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
}

# Of rkserve: for these there is no convention.
KEY: Final = "rkserve.key"
ADAPTER: Final = "rkserve.adapter"
BOARDS: Final = "rkserve.boards"
BOARD: Final = "rkserve.board"
CHOICE: Final = "rkserve.choice"
FAILOVERS: Final = "rkserve.failovers"
CLIENT_LEFT: Final = "rkserve.client_left"
QUEUE: Final = "rkserve.queue"  # router or board
EXPECTED_TOKENS: Final = "rkserve.expected_cached_tokens"
BEFORE_TOKENS: Final = "rkserve.tokens_before"
PREFILL_TOKENS: Final = "rkserve.prefill.tokens"
PREFILL_MS: Final = "rkserve.prefill.runtime_ms"
DECODE_TOKENS: Final = "rkserve.decode.tokens"
DECODE_MS: Final = "rkserve.decode.runtime_ms"
PAUSED_MS: Final = "rkserve.paused_ms"
WHY: Final = "rkserve.failover.reason"
