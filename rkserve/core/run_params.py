"""Frozen values that engine processes use too: sampling and inputs of a run.

They are apart from the other messages to keep the imports of a starting engine few: requests wait
while it starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from rkserve.core.skew import crosses_versions

# Releases that the simulator can imitate; not beside the pydantic models of the configuration,
# whose import takes longer than that of the simulator.
SimulatedRelease = Literal["1.2.3", "1.3.0", "1.3.1"]


@crosses_versions
@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling values of one generation, with ranges checked by the API.

    ``temperature`` 0 means greedy. ``repeat_penalty`` is RKLLM's (1.0 = off); the two OpenAI
    penalties are additive (0.0 = off).
    """

    temperature: float = 0.8
    top_p: float = 0.9
    top_k: int = 40
    repeat_penalty: float = 1.1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1


@crosses_versions
@dataclass(frozen=True, slots=True)
class Scored:
    """A token's log-probability (natural logarithm).

    ``top`` are the likeliest IDs at that position with theirs, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# Of runs that measure speed: as long as those of the vendor's table. An answer that ended earlier
# than the fewest tokens says nothing about speed.
SPEED_TOKENS, FEWEST_SPEED_TOKENS = 64, 8
SPEED_TEXT = (
    "Tell a long story about a lighthouse on a small island, the family that keeps its lamp, the "
    "storm of one winter, and the ship that they see in the night. Describe the sea, the sky and "
    "the sounds in the house. Let each of the four people speak. Do not stop before the morning, "
    "when the wind has gone, and say what each of them does then. Write plain sentences, in the "
    "order in which things happen, and take your time with each of them."
)
NEVER_ENDS = 2**31 - 1  # more tokens than any answer has: the model does not end the answer


class GuideKind(str, Enum):
    """The notation of a grammar."""

    JSON_SCHEMA = "json_schema"  # the schema as JSON
    REGEX = "regex"
    LARK = "lark"  # or the GBNF of llama.cpp
    CALLS = "calls"  # of tools, as JSON: see ``sampling.calls``


@crosses_versions
@dataclass(frozen=True, slots=True)
class Guide:
    """A grammar that the answer must follow."""

    kind: GuideKind
    text: str


class Confine(str, Enum):
    """The confinement of engine processes."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Guided(str, Enum):
    """The generation method for answers that follow a grammar and need no other step-by-step
    feature.
    """

    AUTO = "auto"  # optimistic where a step would send the whole context again
    STEPS = "steps"
    OPTIMISTIC = "optimistic"


@crosses_versions
@dataclass(frozen=True, slots=True)
class Stepwise:
    """Features of a generation that the runtime's own sampling does not have.

    ``seed``, ``choice`` and the index of a token in the answer determine every draw. If
    ``top_logprobs`` is a number, tokens come with log-probabilities: of the chosen ones, of that
    many of the likeliest, and of all in ``also``; ``prompt_logprobs`` are those of the prompt as
    well. The whole answer follows ``guide``. ``free``: only the guide requires steps, so the
    runtime's own draws suffice as long as they follow it. The model does not end an answer before
    ``least`` tokens.
    """

    seed: int
    choice: int = 0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    guide: Guide | None = None
    also: tuple[int, ...] = ()
    free: bool = False
    least: int = 0


@crosses_versions
@dataclass(frozen=True, slots=True)
class Picture:
    """An image in the format of the model's encoder: RGB, one byte per channel, row by row."""

    width: int
    height: int
    pixels: bytes = field(repr=False)


@crosses_versions
@dataclass(frozen=True, slots=True)
class Embeds:
    """A prompt of embeddings: float32, row by row, one row of ``columns`` for each position."""

    rows: int
    columns: int
    data: bytes = field(repr=False)


@crosses_versions
@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Dimensions of the cross-attention of an encoder-decoder model's decoder."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def row(self) -> int:
        """Numbers of the K cache, or of the V cache, for each token of the encoder."""
        return self.layers * self.kv_heads * self.head_dim


@crosses_versions
@dataclass(frozen=True, slots=True)
class EncoderStates:
    """An encoder's output for cross-attention; raw bytes, float32, and int32 for ``positions``.

    ``k_cache`` is ``[layers, tokens, KV heads, head size]``, ``v_cache`` ``[layers, KV heads, head
    size, tokens]``; mask and positions have one value for each token.
    """

    shape: EncoderShape
    tokens: int
    k_cache: bytes = field(repr=False)
    v_cache: bytes = field(repr=False)
    mask: bytes = field(repr=False)
    positions: bytes = field(repr=False)

    @classmethod
    def zeros(cls, shape: EncoderShape) -> EncoderStates:
        """Return states of one token, for trial runs."""
        number = bytes(4)
        return cls(shape, 1, number * shape.row, number * shape.row, number, number)


class Pooling(str, Enum):
    """The reduction of the hidden states of all positions to one vector."""

    LAST = "last"  # that of the last token, which attends to all others
    MEAN = "mean"
    CLS = "cls"  # that of the first token
    ALL = "all"  # none: the hidden state of every token, row by row
