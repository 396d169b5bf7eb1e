"""An image encoder in the vendor's RKNN runtime (librknnrt): pixels to rows of floats.

The only module with pointers of another library. A model of the wrong shape is refused at load. An
engine keeps the rows of recent images in a cache, by their pixels.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rkserve.core.errors import CallFailed, LibraryMissing, LoadFailed, Misuse, ReleaseRefused
from rkserve.core.run_params import Picture
from rkserve.native.binding.library import open_library
from rkserve.native.binding.releases import NO_IMAGE_TAGS, c_path
from rkserve.native.decl.rknn_api import ffi
from rkserve.native.runtime import Image, VisionParams

LIBRARY = "librknnrt.so"
OLDEST, TOO_NEW = (2, 3), (3, 0)  # the releases with these structs
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_CHANNELS, _FLOAT = 3, 4
_IMAGE_DIMS, _ROWS_DIMS = 4, 2
_FUNCTIONS = (
    *("rknn_init", "rknn_destroy", "rknn_query", "rknn_inputs_set", "rknn_run"),
    *("rknn_outputs_get", "rknn_outputs_release", "rknn_set_core_mask"),
)
_CORES = {1: "RKNN_NPU_CORE_AUTO", 2: "RKNN_NPU_CORE_0_1", 3: "RKNN_NPU_CORE_0_1_2"}


@dataclass(frozen=True, slots=True)
class ImageEncoderShape:
    """The input size of an encoder, and its output: ``tokens`` rows of ``row_floats`` floats."""

    width: int
    height: int
    tokens: int
    row_floats: int


class RknnEncoder:
    """One loaded encoder. Use it from one thread.

    Raises:
        LibraryMissing: the library cannot be opened.
        ReleaseRefused: the structs of the library's release are unknown.
        LoadFailed: the model cannot be loaded, or is not an image encoder.
    """

    def __init__(self, library: Path, model: Path, cores: int = 1) -> None:
        self._ffi: Any = ffi
        if not model.is_file():
            raise LoadFailed(f"image encoder {model} does not exist")
        self._lib = _opened(self._ffi, library)
        context = self._ffi.new("rknn_context *")
        keep: list[Any] = []
        code = self._lib.rknn_init(
            context, c_path(self._ffi, str(model), keep), 0, 0, self._ffi.NULL
        )
        if code != 0:
            raise LoadFailed(
                f"rknn_init returned {code} for {model}; see the library's lines in the log"
            )
        self._context: Any = context[0]
        try:
            self.release = self._checked_release(library)
            self._outputs, self.shape = self._measured(model)
            if cores > 1:
                self._load_call("rknn_set_core_mask", getattr(self._lib, _CORES[cores]))
        except BaseException:
            self._lib.rknn_destroy(self._context)
            raise

    def encode(self, pixels: bytes) -> bytes:
        """Return the rows of one image: RGB, a byte per channel, row by row.

        Raises:
            Misuse: the image has another size than the encoder.
            CallFailed: the library refused the image.
        """
        shape, ffi = self.shape, self._ffi
        if len(pixels) != shape.width * shape.height * _CHANNELS:
            raise Misuse(
                f"{len(pixels)} bytes are not an RGB image of {shape.width}x{shape.height} pixels"
            )
        given = ffi.new("rknn_input *")
        data = ffi.from_buffer(pixels)  # kept alive until the library has copied it
        given.buf, given.size = data, len(pixels)
        given.type, given.fmt = self._lib.RKNN_TENSOR_UINT8, self._lib.RKNN_TENSOR_NHWC
        self._call("rknn_inputs_set", 1, given)
        self._call("rknn_run", ffi.NULL)
        outputs = ffi.new("rknn_output[]", self._outputs)
        for index in range(self._outputs):
            outputs[index].index, outputs[index].want_float = index, 1
        self._call("rknn_outputs_get", self._outputs, outputs, ffi.NULL)
        try:
            return self._woven(outputs)
        finally:
            self._call("rknn_outputs_release", self._outputs, outputs)

    def close(self) -> None:
        """Free the context. Raises ``CallFailed``."""
        self._call("rknn_destroy")

    # -- internals ------------------------------------------------------------------------------

    def _woven(self, outputs: Any) -> bytes:
        """Return a copy of the rows; several outputs are joined token by token."""
        size = self.shape.row_floats // self._outputs * _FLOAT
        wanted = self.shape.tokens * size
        parts = []
        for index in range(self._outputs):
            output = outputs[index]
            if output.buf == self._ffi.NULL or output.size != wanted:
                raise CallFailed("rknn_outputs_get", 0, f"{output.size} bytes instead of {wanted}")
            parts.append(bytes(self._ffi.buffer(output.buf, wanted)))
        if len(parts) == 1:
            return parts[0]
        rows = range(0, wanted, size)
        return b"".join(part[at : at + size] for at in rows for part in parts)

    def _checked_release(self, library: Path) -> str:
        version = self._ffi.new("rknn_sdk_version *")
        self._query("RKNN_QUERY_SDK_VERSION", version)
        release = self._ffi.string(version.api_version).decode(errors="replace")
        found = _VERSION.match(release)
        numbers = () if found is None else tuple(map(int, found.groups()))
        if not OLDEST <= numbers < TOO_NEW:
            raise ReleaseRefused(
                f"{library} reports version {release!r}; rkserve supports librknnrt from 2.3 "
                "to 2.x. Install the librknnrt.so that belongs to the toolkit of the image encoder."
            )
        return ".".join(map(str, numbers))

    def _measured(self, model: Path) -> tuple[int, ImageEncoderShape]:
        """Return the number of outputs, and the sizes of the model."""
        counts = self._ffi.new("rknn_input_output_num *")
        self._query("RKNN_QUERY_IN_OUT_NUM", counts)
        if counts.n_input != 1 or counts.n_output < 1:
            raise LoadFailed(
                f"{model} has {counts.n_input} inputs and {counts.n_output} outputs; an image "
                "encoder has one input"
            )
        height, width = self._image_size(model)
        sizes = {self._row_size(index) for index in range(counts.n_output)}
        if len(sizes) != 1 or 0 in (both := sizes.pop()):
            raise LoadFailed(f"the outputs of {model} differ in shape, or are not rows of floats")
        tokens, floats = both
        return counts.n_output, ImageEncoderShape(width, height, tokens, floats * counts.n_output)

    def _image_size(self, model: Path) -> tuple[int, int]:
        attr = self._attr("RKNN_QUERY_INPUT_ATTR", 0)
        dims = tuple(attr.dims)[: attr.n_dims]
        if len(dims) == _IMAGE_DIMS and dims[0] == 1:
            channels_first = attr.fmt == self._lib.RKNN_TENSOR_NCHW
            channels, *size = dims[1:] if channels_first else (dims[3], dims[1], dims[2])
            if channels == _CHANNELS and min(size) > 0:
                return size[0], size[1]
        raise LoadFailed(f"the input of {model} is not an RGB image: its dimensions are {dims}")

    def _row_size(self, index: int) -> tuple[int, int]:
        """Return rows and floats per row; some models have dimensions of 1 in between."""
        attr = self._attr("RKNN_QUERY_OUTPUT_ATTR", index)
        dims = list(attr.dims)[: attr.n_dims]
        while len(dims) > _ROWS_DIMS and 1 in dims:  # such as [1, 196, 1, 1536]
            dims.remove(1)
        return (dims[0], dims[1]) if len(dims) == _ROWS_DIMS else (0, 0)

    def _attr(self, command: str, index: int) -> Any:
        attr = self._ffi.new("rknn_tensor_attr *")
        attr.index = index
        self._query(command, attr)
        return attr

    def _query(self, command: str, into: Any) -> None:
        size = self._ffi.sizeof(self._ffi.typeof(into).item)
        self._load_call("rknn_query", getattr(self._lib, command), into, size)

    def _load_call(self, function: str, *args: Any) -> None:
        code = getattr(self._lib, function)(self._context, *args)
        if code != 0:
            raise LoadFailed(f"{function} of the image encoder returned {code}")

    def _call(self, function: str, *args: Any) -> None:
        code = getattr(self._lib, function)(self._context, *args)
        if code != 0:
            raise CallFailed(function, code)


def _opened(ffi: Any, path: Path) -> Any:
    library = open_library(ffi, path, LIBRARY)
    for name in _FUNCTIONS:
        try:
            getattr(library, name)
        except ffi.error as exc:
            raise LibraryMissing(f"{path} is not {LIBRARY}: function {name} is missing.") from exc
    return library


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

    def __init__(self, encoder: Encoder, params: VisionParams, *, tags_at_load: bool) -> None:
        """With ``tags_at_load`` the language model's runtime has the image tags already."""
        shape = encoder.shape
        found = (shape.width, shape.height, shape.tokens)
        if found != (params.width, params.height, params.tokens):
            raise LoadFailed(
                f"image encoder {params.model} has {shape.width}x{shape.height} pixels and "
                f"{shape.tokens} tokens; the model folder says {params.width}x{params.height} "
                f"pixels and {params.tokens} tokens"
            )
        self._encoder, self._params = encoder, params
        self._tags = NO_IMAGE_TAGS if tags_at_load else params.tags
        # By owner and digest, the least recently used first.
        self._rows: OrderedDict[tuple[int, bytes], bytes] = OrderedDict()
        self._bytes = 0  # in the cache
        self.encoded = 0  # images that were not in the cache

    def encode(
        self, pictures: Sequence[tuple[Picture, int]], left: Callable[[], bool]
    ) -> Image | None:
        """Return the images as a runtime input; None if ``left`` returned True meanwhile.

        Each image comes with its owner: the time of an answer does not tell that another owner
        has shown the same image.

        Raises ``NativeError``.
        """
        rows = []
        for picture, owner in pictures:
            if left():
                return None
            rows.append(self._rows_of(picture, owner))
        params = self._params
        return Image(
            data=b"".join(rows),
            n_tokens=params.tokens,
            n_images=len(rows),
            width=params.width,
            height=params.height,
            tags=self._tags,
        )

    def _rows_of(self, picture: Picture, owner: int) -> bytes:
        # Computed from the pixels themselves: a client's claim cannot select another image's rows.
        key = (owner, hashlib.sha256(picture.pixels).digest())
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


def open_vision(params: VisionParams, *, tags_at_load: bool) -> CachedEncoder:
    """Load the encoder. Raises ``NativeError``."""
    encoder = RknnEncoder(params.library, params.model, params.cores)
    return CachedEncoder(encoder, params, tags_at_load=tags_at_load)
