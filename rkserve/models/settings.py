"""The settings of a model folder: its ``rkserve.yaml`` as frozen pydantic models."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

from rkserve.core.run_params import EncoderShape, Sampling

CONTEXT_STEP = 32  # the vendor's converter demands a multiple of 32
CONTEXT_MAX = 16384
# Families of vision models with numbers published by the vendor or in a model card.
Family = Literal[
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3.5",
    "internvl3",
    "minicpm-v",
    "smolvlm",
    "deepseek-ocr",
]
_QWEN_TAGS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
# Of the encoders as the vendor's demo exports them.
FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2-vl": {"size": 392, "tokens": 196, "tags": _QWEN_TAGS},
        "qwen2.5-vl": {"size": 392, "tokens": 196, "tags": _QWEN_TAGS},
        "qwen3-vl": {"size": 448, "tokens": 196, "tags": _QWEN_TAGS},
        "qwen3.5": {"tags": _QWEN_TAGS},
        "internvl3": {"tags": ("<img>", "</img>", "<IMG_CONTEXT>")},
        "minicpm-v": {"size": 448, "tokens": 64},
        "smolvlm": {"size": 512},
        "deepseek-ocr": {"size": 448, "tags": ("", "", "<\uff5c\u2581pad\u2581\uff5c>")},
    }
)
MAX_SIDE = 2048  # an image crosses a pipe in one frame


class VisionSettings(BaseModel):
    """The image encoder and the image tags of a vision model.

    `family` provides published values; the folder's own values take precedence. All of `size`,
    `tokens` and `tags` must be known in the end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Family | None = Field(
        None,
        description="Whose sizes and tags to take; [vision.md](../how-to/vision.md#families) has "
        "the table.",
    )
    encoder: str = Field(
        "vision.rknn", description="The image encoder, a file of this folder for librknnrt."
    )
    size: int = Field(
        ...,
        ge=16,
        le=MAX_SIDE,
        description="Width and height in pixels that the encoder was exported for.",
    )
    tokens: int = Field(
        ..., ge=1, le=16384, description="Tokens that one image takes in the context."
    )
    tags: tuple[str, str, str] = Field(
        ...,
        description="What the model expects before an image, behind it, and in the place of each "
        "of its tokens.",
    )
    fit: Literal["pad", "stretch"] = Field(
        "pad",
        description="How an image that is not square becomes so: with borders, as the vendor's "
        "demo does it, or out of proportion.",
    )
    background: tuple[int, int, int] = Field(
        (128, 128, 128),
        description="Red, green and blue of the borders, and of what is transparent.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        family = given.get("family")
        return {**FAMILIES.get(family, {}), **given} if isinstance(family, str) else given

    @field_validator("encoder")
    @classmethod
    def _is_a_file_of_the_folder(cls, encoder: str) -> str:
        if "/" in encoder or "\0" in encoder or not encoder.endswith(".rknn"):
            raise ValueError("name a file of the model folder that ends in .rknn")
        return encoder

    @field_validator("tags")
    @classmethod
    def _can_be_text(cls, tags: tuple[str, str, str]) -> tuple[str, str, str]:
        if any("\0" in tag for tag in tags):
            raise ValueError("a tag must not hold a NUL character")
        return tags

    @field_validator("background")
    @classmethod
    def _is_a_colour(cls, background: tuple[int, int, int]) -> tuple[int, int, int]:
        if not all(value in range(256) for value in background):
            raise ValueError("each value is from 0 to 255")
        return background


class RerankSettings(BaseModel):
    """Reranking by the probabilities of yes and no as the next token. The default texts are those
    that Qwen3-Reranker was trained with; they go through the model's own chat template.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    system: str = Field(
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".',
        max_length=4096,
        description="What the system says.",
    )
    prompt: str = Field(
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        max_length=4096,
        pattern=r"(?s)\{query\}.*\{document\}|\{document\}.*\{query\}",
        description="What the user says, with `{query}` and `{document}`.",
    )
    instruction: str = Field(
        "Given a web search query, retrieve relevant passages that answer the query",
        max_length=4096,
        description="What stands for `{instruction}`: the task in a sentence.",
    )
    yes: str = Field("yes", min_length=1, max_length=64, description="The word for yes: one token.")
    no: str = Field("no", min_length=1, max_length=64, description="The word for no: one token.")


class SamplingDefaults(BaseModel):
    """Default sampling of requests; on RKLLM 1.2.x, the fixed sampling of every request."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(
        0.8, ge=0, le=2, description="How freely tokens are chosen; 0 always takes the likeliest."
    )
    top_p: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Choose among the likeliest tokens that reach this sum; 1: all.",
    )
    top_k: int = Field(40, ge=1, description="Choose among this many of the likeliest tokens.")
    repeat_penalty: float = Field(
        1.1, gt=0, le=10, description="Factor against tokens that were there before; 1 is off."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="Held against a token each time that it was there; 0 is off."
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="Held once against a token that was there; 0 is off."
    )
    mirostat: int = Field(
        0,
        ge=0,
        le=2,
        description="Mirostat in place of `top_k` and `top_p`: its version, 0 is off. It cannot "
        "serve requests with a seed, logprobs or a grammar, which have to send 0.",
    )
    mirostat_tau: float = Field(
        5.0, gt=0, le=20, description="The surprise per token that Mirostat aims at."
    )
    mirostat_eta: float = Field(0.1, gt=0, le=1, description="How fast Mirostat corrects itself.")

    def values(self) -> Sampling:
        """Return them as the value used in requests."""
        return Sampling(**self.model_dump())


class ThinkingSettings(BaseModel):
    """A model's reasoning marks, if its template does not show them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    marks: tuple[str, str] | None = Field(
        None,
        description="What begins and ends its thoughts. Empty: `<think>` and `</think>`, if its "
        "template or its tokenizer knows them.",
    )
    separate: bool = Field(
        True,
        description="Whether answers give thoughts as `reasoning_content`. Otherwise they are part "
        "of the answer's text, with their marks, and cannot be limited.",
    )
    enabled: bool | None = Field(
        None,
        description="Whether it thinks for requests that do not say. Empty: as its template has "
        "it.",
    )
    history: Literal["template", "strip", "keep"] = Field(
        "template",
        description="What becomes of thoughts in earlier turns: left to the template, taken out, "
        "or put before the turn's words, as the model's card demands.",
    )
    budgets: dict[str, NonNegativeInt] = Field(
        {},
        description="Tokens of thoughts by `reasoning_effort`, for requests without "
        "`max_reasoning_tokens`; for example `{low: 256, medium: 1024}`.",
    )

    @field_validator("marks")
    @classmethod
    def _say_something(cls, marks: tuple[str, str] | None) -> tuple[str, str] | None:
        if marks is not None and not all(mark.strip() for mark in marks):
            raise ValueError("a mark must not be blank")
        return marks


class EmbeddingSettings(BaseModel):
    """The computation of embeddings from a model's hidden states."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    pooling: Literal["last", "mean", "cls"] = Field(
        "last",
        description="Which hidden state it is: `last` that of the last token, as decoders are "
        "trained, `mean` of all, `cls` that of the first token. The model's card says which.",
    )
    normalize: bool = Field(True, description="Whether vectors are given the length 1.")
    dimensions: int | None = Field(
        None,
        ge=1,
        description="How many dimensions the model's vectors have; a request that asks for just "
        "those is served then. Empty: not known before a text is computed.",
    )
    matryoshka: bool = Field(
        False,
        description="Whether the model was trained so that the first dimensions of its vectors are "
        "of use alone, and requests may ask for fewer.",
    )
    query_prefix: str = Field(
        "",
        max_length=4096,
        description="What is put before a query in `/v1/rerank`, and before the first text in "
        "`/score`: many models were trained with an instruction there.",
    )
    document_prefix: str = Field(
        "", max_length=4096, description="What is put before a document there."
    )


class CrossAttentionSettings(BaseModel):
    """Dimensions of the decoder's cross-attention, as in the model's config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(ge=1, le=1024, description="Layers of the decoder with cross-attention.")
    kv_heads: int = Field(ge=1, le=1024, description="K and V heads of each of these layers.")
    head_dim: int = Field(ge=1, le=4096, description="Numbers of a head.")
    max_tokens: int = Field(
        ge=1,
        le=CONTEXT_MAX,
        description="The most tokens of the encoder's output that the model was converted for.",
    )

    @property
    def shape(self) -> EncoderShape:
        """The dimensions of the caches in requests."""
        return EncoderShape(self.layers, self.kv_heads, self.head_dim)


class FolderSettings(BaseModel):
    """Settings of a model in rkserve.yaml; every key is optional."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    context_length: int = Field(
        4096,
        ge=CONTEXT_STEP,
        le=CONTEXT_MAX,
        multiple_of=CONTEXT_STEP,
        description="Tokens of prompt and answer together; at most what the model was converted "
        "for.",
    )
    eos_token_ids: tuple[NonNegativeInt, ...] = Field(
        (),
        description="Ids of tokens that end an answer, also where the runtime reads a wrong one "
        "from the model's file.",
    )
    chat_template: str | None = Field(
        None,
        description="A built-in chat template in the place of the folder's own; "
        "docs/reference/api.md lists their names.",
    )
    tool_format: Literal["hermes", "llama", "mistral", "mistral-args", "pythonic"] | None = Field(
        None,
        description="The form in which the model calls tools; docs/reference/api.md describes "
        "them. Empty: guessed from its chat template.",
    )
    max_adapters: int = Field(
        4,
        ge=1,
        description="LoRA adapters that a board holds at once. The runtime cannot unload one: a "
        "request for one more than that makes the board load its model anew.",
    )
    max_adapter_bytes: int | None = Field(
        None,
        ge=1,
        description="What these adapters may take together, by the sizes of their files, as "
        "`max_adapters` limits their number. Empty: no limit.",
    )
    hidden_size: int | None = Field(
        None,
        ge=1,
        description="Numbers in the embedding of a token, `hidden_size` of the model's "
        "config.json. Without it the model takes no `prompt_embeds`, since the runtime reads as "
        "many as the model has, unchecked.",
    )
    kv_bytes_per_token: int | None = Field(
        None,
        ge=1,
        description="What one position of the KV cache takes in memory, for the reports; usually "
        "2 x layers x KV heads x head size x 2 bytes.",
    )
    prompt_cache: bool | None = Field(
        None,
        description="Whether prompt caches may be kept on disk. Empty: not for Qwen3.5, known by "
        "the names of the folder and of the model's file, whose runtime cannot save them; for all "
        "others.",
    )
    n_keep: int = Field(
        -1,
        ge=-1,
        description="Positions at the beginning that the runtime keeps when a context that is full "
        "is shifted; -1 leaves it to the runtime.",
    )
    ignore_eos_token: bool = Field(
        False,
        description="Whether the runtime goes on past the token that it takes for the "
        "end. Answers then end at their `max_tokens`, or at one of `eos_token_ids`, should the "
        "model still come to it: for a model whose end the runtime reads wrongly, and for answers "
        "of a fixed length. RKLLM 1.3.0 and later; older releases refuse to load with it.",
    )
    sampling: SamplingDefaults = SamplingDefaults()
    thinking: ThinkingSettings = ThinkingSettings()
    embedding: EmbeddingSettings | None = Field(
        None, description="How texts become vectors. Without it the model makes none."
    )
    vision: VisionSettings | None = Field(
        None, description="How the model sees images. Without it it takes none."
    )
    rerank: RerankSettings | None = Field(
        None,
        description="How documents are judged in `/v1/rerank` and `/score`. Without it they are "
        "compared by their vectors; `{}` is right for Qwen3-Reranker.",
    )
    cross_attention: CrossAttentionSettings | None = Field(
        None,
        description="Sizes of the cross-attention of an encoder-decoder model, whose decoder is "
        "loaded with `use_cross_attn`. Every prompt of it needs `cross_attention`, the encoder's "
        "output, in `/v1/completions`. RKLLM 1.2.1 and later, which are all that rkserve accepts.",
    )

    @model_validator(mode="after")
    def _decode_only(self) -> FolderSettings:
        if self.cross_attention is not None:
            for name in ("embedding", "vision", "rerank"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"cross_attention and {name} do not go together: only completions can "
                        "bring the encoder's output"
                    )
        return self
