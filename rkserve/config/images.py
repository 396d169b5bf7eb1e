"""What the Router lets clients show to models that see; values only."""

from __future__ import annotations

from pydantic import Field

from rkserve.config.board_group import Settings


class ImagesConfig(Settings):
    """Images in chats. Whatever is beyond these limits is a 400 before any board hears of it."""

    max_count: int = Field(
        8, ge=1, le=64, description="Images of one request, those of earlier turns included."
    )
    max_bytes: int = Field(
        8 * 1024 * 1024,
        ge=1,
        description="Longest file of an image. One in a data URI is also bounded by "
        "`max_body_bytes`, of which it takes four bytes for three.",
    )
    max_pixels: int = Field(
        16_000_000,
        ge=1,
        le=100_000_000,
        description="Width times height of an image. Decoding takes up to 22 bytes of the Router's "
        "memory for each (measured: JPEG 3, PNG 8 to 12, WebP 17 to 22); two images are decoded at "
        "once.",
    )
    fetch: bool = Field(
        False,
        description="Whether images may be given by an http(s) URL, which the Router fetches from "
        "public addresses only ([vision.md](../how-to/vision.md#urls)).",
    )
    fetch_hosts: tuple[str, ...] = Field(
        (),
        description="Names of hosts that images may be fetched from, exactly as in the URL. Empty: "
        "all that have public addresses.",
    )
    fetch_timeout_s: float = Field(
        10.0, gt=0, le=120, description="Longest time for an image to be fetched, in all."
    )
