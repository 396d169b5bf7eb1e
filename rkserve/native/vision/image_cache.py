"""The images of a run, as the runtime takes them: encoded here, or found among those of before.

The cache is by content: equal pixels have equal rows, whoever sends them. It lives as long as the
engine and is bounded in bytes. It knows an encoder and no runtime, no frames and no requests.
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
    """What makes rows of pixels; see ``RknnEncoder``."""

    shape: ImageEncoderShape

    def encode(self, pixels: bytes) -> bytes:
        """Return the rows of one image. Raises ``NativeError``."""


class CachedEncoder:
    """What one engine sees with.

    Raises:
        LoadFailed: the encoder is not the one that the model folder describes.
    """

    def __init__(self, encoder: Encoder, params: VisionParams, release: str) -> None:
        """``release`` is that of the language model's runtime."""
        shape = encoder.shape
        found = (shape.width, shape.height, shape.tokens)
        if found != (params.width, params.height, params.tokens):
            raise LoadFailed(
                f"the image encoder {params.model} takes {shape.width} x {shape.height} pixels and "
                f"makes {shape.tokens} tokens of them; the model folder says {params.width} x "
                f"{params.height} and {params.tokens}"
            )
        self._encoder, self._params = encoder, params
        self._tags = NO_IMAGE_TAGS if RELEASES[release].image_tags_at_load else params.tags
        self._rows: OrderedDict[bytes, bytes] = OrderedDict()  # the longest unused first
        self._held = 0  # bytes of them
        self.encoded = 0  # images that were not found

    def see(self, pictures: Sequence[Picture], left: Callable[[], bool]) -> Image | None:
        """Return what the runtime is given of these; None where the run was ``left`` meanwhile.

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
        # Computed here from what is encoded: nobody else's word says which image it is.
        key = hashlib.sha256(picture.pixels).digest()
        found = self._rows.get(key)
        if found is not None:
            self._rows.move_to_end(key)
            return found
        rows = self._encoder.encode(picture.pixels)
        self.encoded += 1
        self._rows[key] = rows
        self._held += len(rows)
        while self._held > self._params.cache_bytes:
            _, oldest = self._rows.popitem(last=False)
            self._held -= len(oldest)
        return rows


def open_vision(params: VisionParams, release: str) -> CachedEncoder:
    """Load the encoder. Raises ``NativeError``."""
    encoder = RknnEncoder(params.library, params.model, params.cores)
    return CachedEncoder(encoder, params, release)
