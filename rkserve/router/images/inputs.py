"""The images of a call, decoded at the Router: what a stranger sent never reaches a board as it is.

It knows the limits and where images come from; how a file is decoded is for the room ``images``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rkserve.api.prompting.images import ImagePart
from rkserve.config.images import ImagesConfig
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.run_params import Picture
from rkserve.models.vision import VisionSettings
from rkserve.router.images.decode import picture_of

# Threads of their own: in asyncio's shared ones a few large images would keep others from working.
AT_ONCE = 2
# What one request may bring to a board: it crosses the channel in one frame of at most 64 MiB, as
# base64, and all events of that connection wait for it.
MAX_PIXEL_BYTES = 32 * 1024 * 1024
Fetch = Callable[[ImagePart], Awaitable[bytes]]


class Sight:
    """Use it from the Router's event loop."""

    def __init__(self, config: ImagesConfig, fetch: Fetch | None = None) -> None:
        """``fetch`` gets the file of an image at a URL; None where that is not allowed."""
        self._config, self._fetch = config, fetch
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="image")

    async def pictures(
        self, images: tuple[ImagePart, ...], vision: VisionSettings | None
    ) -> tuple[Picture, ...]:
        """Return the images of a call as the encoder of its model takes them.

        Raises:
            RequestError: one cannot be read, is too large, or may not be fetched; its ``param``
                names it.
        """
        if not images:
            return ()
        vision = self.check(images, vision)
        # One after the other: a request with eight of them takes no more memory than one with one.
        return tuple([await self._picture(image, vision) for image in images])

    def check(self, images: tuple[ImagePart, ...], vision: VisionSettings | None) -> VisionSettings:
        """Hold the images of a call to what their model may be shown.

        Raises:
            RequestError: it sees none, or there are too many.
        """
        if vision is None:
            raise UnsupportedParameter(
                "Unsupported content part: this model takes no images.", images[0].path
            )
        most = min(self._config.max_count, MAX_PIXEL_BYTES // (3 * vision.size**2))
        if len(images) > most:
            raise RequestError(
                f"Invalid '{images[most].path}': a request may have {most} images, those of "
                f"earlier turns included; this one has {len(images)}.",
                images[most].path,
            )
        return vision

    async def _picture(self, image: ImagePart, vision: VisionSettings) -> Picture:
        data = await self._file(image)
        most = self._config.max_bytes
        if len(data) > most:
            raise RequestError(
                f"Invalid '{image.path}': the image has {len(data)} bytes; {most} are the most "
                "that are read.",
                image.path,
            )
        work = partial(picture_of, data, image.path, vision, self._config.max_pixels)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _file(self, image: ImagePart) -> bytes:
        if not image.url:
            return image.data
        if self._fetch is None:
            raise UnsupportedParameter(
                "Unsupported image: this server fetches none from URLs. Send it as a data URI, "
                "such as 'data:image/png;base64,...'.",
                image.path,
            )
        return await self._fetch(image)
