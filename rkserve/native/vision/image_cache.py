"""The image encoder of an engine with a cache of encoded images.

The cache is keyed by content: equal pixels have equal rows, independent of the client. It lives as
long as the engine and is bounded in bytes. It knows no runtime, frames or requests.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from rkserve.core.errors import LoadFailed
from rkserve.core.run_params import Picture
from rkserve.native.binding.releases import NO_IMAGE_TAGS, RELEASES
from rkserve.native.runtime import Image, VisionParams
from rkserve.native.vision.encoder import ImageEncoderShape, RknnEncoder


class Encoder(Protocol):
    """An encoder of pixels to rows; see ``RknnEncoder``."""

    shape: ImageEncoderShape

    def encode(self, pixels: bytes) -> bytes:
        """Return the rows of one image. Raises ``NativeError``."""


class CachedEncoder:
    """One engine's image encoder and its cache.

    Raises:
        LoadFailed: the encoder differs from the description in the model folder.
    """

    def __init__(self, encoder: Encoder, params: VisionParams, release: str) -> None:
        """``release`` is the version of the language model's runtime."""
        shape = encoder.shape
        found = (shape.width, shape.height, shape.tokens)
        if found != (params.width, params.height, params.tokens):
            raise LoadFailed(
                f"image encoder {params.model} has {shape.width}x{shape.height} pixels and "
                f"{shape.tokens} tokens; the model folder says {params.width}x{params.height} "
                f"pixels and {params.tokens} tokens"
            )
        self._encoder, self._params = encoder, params
        self._tags = NO_IMAGE_TAGS if RELEASES[release].image_tags_at_load else params.tags
        self._rows: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._bytes = 0  # in the cache
        self.encoded = 0  # images that were not in the cache

    def encode(self, pictures: Sequence[Picture], left: Callable[[], bool]) -> Image | None:
        """Return the images as a runtime input; None if ``left`` returned True meanwhile.

        Raises ``NativeError``.
        """
        rows = []
        for picture in pictures:
            if left():
                return None
            rows.append(self._rows_of(picture))
        params = self._params
        return Image(
            data=b"".join(rows),
            n_tokens=params.tokens,
            n_images=len(rows),
            width=params.width,
            height=params.height,
            tags=self._tags,
        )

    def _rows_of(self, picture: Picture) -> bytes:
        # Computed from the pixels themselves: a client's claim cannot select another image's rows.
        key = hashlib.sha256(picture.pixels).digest()
        found = self._rows.get(key)
        if found is not None:
            self._rows.move_to_end(key)
            return found
        rows = self._encoder.encode(picture.pixels)
        self.encoded += 1
        self._rows[key] = rows
        self._bytes += len(rows)
        while self._bytes > self._params.cache_bytes:
            _, oldest = self._rows.popitem(last=False)
            self._bytes -= len(oldest)
        return rows


def open_vision(params: VisionParams, release: str) -> CachedEncoder:
    """Load the encoder. Raises ``NativeError``."""
    encoder = RknnEncoder(params.library, params.model, params.cores)
    return CachedEncoder(encoder, params, release)
