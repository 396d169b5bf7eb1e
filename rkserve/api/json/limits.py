"""The limits of one request.

Body size and time are limited before a body is parsed.
"""

from __future__ import annotations

# No template writes a message with less than four tokens, and no context is longer than 16,384.
MAX_MESSAGES = 4096  # or items of a conversation, or parts of one message
MAX_CHOICES = 16  # n times the number of prompts: each keeps a board busy for a while
MAX_INPUTS = 2048  # texts of one call for vectors, as OpenAI
MAX_DIMENSIONS = 65536  # of a vector; no model has so many
MAX_STOP = 4  # as OpenAI
MAX_STOP_SEQUENCES = 16  # in dialects that know no limit of their own
MAX_STOP_CHARS = 512  # every token of the answer is compared with them
MAX_STOP_IDS = 256  # token ids
MAX_PAUSE_ON = 16  # entries of pause_on; each may have as many characters as a stop string
MAX_CLEAR_RANGES = 64  # of one edit: each is a call into the runtime
MAX_TOOLS = 128  # as OpenAI
MAX_TOOL_NAME_CHARS = 128
MAX_TYPES_NAMED = 8  # of tools that were left out, in a response header
MAX_MODEL_CHARS = 256  # the name comes back in the answer and in errors
MAX_QUOTED_CHARS = 80  # of a client's value in an error message
MAX_SALT_CHARS = 512
MAX_REPEAT_PENALTY = 10.0  # as in rkserve.yaml
MAX_MIROSTAT_TAU = 20.0  # target surprise in nats, of which the usual one is 5
MAX_TOP_LOGPROBS = 20  # as OpenAI of chats
MAX_LOGIT_BIAS = 1024  # entries; OpenAI takes 300
MAX_GUIDE_CHOICES = 1024
MAX_REFERENCES = 1024  # items of earlier responses in one input; each is looked up on a disk
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's legacy completions

# No vocabulary in use has longer tokens. A text beyond this many characters per position cannot
# fit, and is refused before minutes are spent on tokenizing it.
CHARS_PER_TOKEN = 256
# Characters that /tokenize takes for each position of the context: many times what fits, for
# programs that count before they cut.
COUNTED_CHARS_PER_POSITION = 32

# A runtime that is asked for an absurd top_k allocates for it, and dies. With a tokenizer, top_k is
# cut to the size of the vocabulary; without one that size is unknown.
TEXT_MODE_MAX_TOP_K = 1024

# Of calls that change the cluster.
MAX_KEY_CHARS = 200  # an Idempotency-Key; it is kept with its operation
MAX_NAMED = 256  # boards, models or requests that one call may name
MAX_LABEL_CHARS = 128  # of weights; it comes back in a header of every answer
MAX_SESSION_CHARS = 256
MAX_TIMEOUT_S = 3600
MAX_LEASE_S = 7 * 24 * 3600
MAX_OBSERVE_S = 24 * 3600
MAX_LISTED = 1000  # operations or lines of the audit log
MAX_PATH_CHARS = 4096  # of a path or a URL
