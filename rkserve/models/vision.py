"""Settings of a model folder for images.

Families are those with numbers published by the vendor or in a model card; other values come from
the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

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
