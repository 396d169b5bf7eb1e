"""Drives what a run can be given besides text and ids: adapters, prompt caches, embeddings,
pictures, cross attention, and the caller's own tokenizer and embedding layer.

It knows how both releases pass them. Like sim_driver it refuses to judge.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.native.binding.releases import RELEASES
from rkserve.native.sim import models
from tests.support.sim.sim_driver import EMBED, MULTIMODAL, Answer, Run, Sim, ids_of
from tests.support.sim.sim_driver import opened as library


@dataclass(frozen=True)
class Rows:
    """EMBED input: rows of floats, as bytes."""

    rows: bytes


@dataclass(frozen=True)
class Seen:
    """MULTIMODAL input. All pictures have the same number of rows, and so have all videos."""

    prompt: str
    images: Sequence[bytes] = ()
    videos: Sequence[bytes] = ()
    tags: tuple[str, str, str] | None = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
    frames: int = 1


Tokenize = Callable[[bytes, Any, int], int]
Embed = Callable[[list[int], Any, int], int]


class FeatureSim(Sim):
    """A handle whose runs also take Rows and Seen, ``lora=name`` and ``save=path``."""

    def __init__(
        self,
        release: str,
        *,
        tokenize: Tokenize | None = None,
        embed: Embed | None = None,
        tags: tuple[bytes, bytes, bytes] | None = None,
        **param: Any,
    ) -> None:
        self.tokenize, self.embed = tokenize, embed
        self.hooked: list[tuple[str, Any]] = []  # what the callbacks were called with
        self._kept: list[Any] = []  # for one run
        self._hooks: list[Any] = []  # for good
        if tags and RELEASES[release].image_tags_at_load:
            self._tags = [library(release)[0].new("char[]", tag) for tag in tags]
            param |= dict(zip(("img_start", "img_end", "img_content"), self._tags, strict=True))
        super().__init__(release, **param)

    def callbacks(self) -> dict[str, Any]:
        ffi, fields = self.ffi, super().callbacks()
        self._me = ffi.new_handle(self)
        if self.tokenize:
            hook = ffi.callback("LLMTokenizerCallback", self._on_tokenize, error=-1)
            fields |= {"tokenizer_callback": hook, "tokenizer_userdata": self._me}
            self._hooks.append(hook)
        if self.embed:
            hook = ffi.callback("LLMGetEmbedCallback", self._on_embed, error=-1)
            fields |= {"embed_callback": hook, "embed_userdata": self._me}
            self._hooks.append(hook)
        return fields

    def _on_tokenize(self, userdata: Any, text: Any, n: int, ids: Any, room: int) -> int:
        assert self.ffi.from_handle(userdata) is self
        assert self.tokenize
        given = bytes(self.ffi.buffer(text, n))
        self.hooked.append(("tokenize", given))
        return int(self.tokenize(given, ids, room))

    def _on_embed(self, userdata: Any, ids: Any, n: int, rows: Any, room: int) -> int:
        assert self.ffi.from_handle(userdata) is self
        assert self.embed
        given = list(self.ffi.unpack(ids, n))
        self.hooked.append(("embed", given))
        assert room == n * models.EMBED_DIM * 4
        return int(self.embed(given, self.ffi.buffer(rows, room), room))

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def _chars(self, text: str | os.PathLike[str]) -> Any:
        return self._keep(self.ffi.new("char[]", os.fsencode(text)))

    def _floats(self, rows: bytes) -> Any:
        """Exactly so many floats: a read beyond them is for a sanitizer to see."""
        floats = self._keep(self.ffi.new("float[]", max(1, len(rows) // 4)))
        self.ffi.memmove(floats, rows, len(rows))
        return floats

    # --- runs, of anything that `fill` knows

    def run(self, given: Any, answer: Answer | None = None, **how: Any) -> Run:
        return super().run(given, answer, **how)

    def run_batch(self, given: Sequence[Any], answer: Answer | None = None, **how: Any) -> Run:
        return super().run_batch(given, answer, **how)

    def prepare(self, given: Any, **how: Any) -> tuple[Any, Any]:
        return super().prepare(given, **how)

    def fill(self, run_input: Any, given: Any) -> None:
        if isinstance(given, Rows):
            run_input.input_type = EMBED
            run_input.embed_input.embed = self._floats(given.rows)
            run_input.embed_input.n_tokens = len(given.rows) // (4 * models.EMBED_DIM)
        elif isinstance(given, Seen):
            run_input.input_type = MULTIMODAL
            self._fill_seen(run_input.multimodal_input, given)
        else:
            super().fill(run_input, given)

    def _fill_seen(self, seen: Any, given: Seen) -> None:
        seen.prompt = self._chars(given.prompt)
        if RELEASES[self.release].takes_video:
            self._fill_part(seen.image, "image", given.images, given)
            self._fill_part(seen.video, "video", given.videos, given)
        elif given.images:
            seen.image_embed = self._floats(b"".join(given.images))
            seen.n_image = len(given.images)
            seen.n_image_tokens = len(given.images[0]) // (4 * models.EMBED_DIM)
            seen.image_width = seen.image_height = 392

    def _fill_part(self, part: Any, kind: str, shown: Sequence[bytes], given: Seen) -> None:
        if not shown:
            return
        rows = len(shown[0]) // (4 * models.EMBED_DIM)
        setattr(part, f"{kind}_embed", self._floats(b"".join(shown)))
        setattr(part, f"n_{kind}", len(shown))
        if kind == "image":
            part.n_image_tokens = rows
        else:
            part.n_frame_per_video, part.n_frame_tokens = given.frames, rows // given.frames
        if given.tags:
            for name, tag in zip(("start", "end", "content"), given.tags, strict=True):
                setattr(part, f"{kind}_{name}", self._chars(tag))

    def prepare_batch(
        self,
        given: Sequence[Any],
        *,
        lora: str | None = None,
        save: Path | str | None = None,
        **how: Any,
    ) -> tuple[Any, Any]:
        self._kept = []
        if lora is not None:
            how["lora_params"] = self._keep(self.ffi.new("RKLLMLoraParam *", [self._chars(lora)]))
        if save is not None:
            path = self._chars(save) if save else self.ffi.NULL
            how["prompt_cache_params"] = self._keep(
                self.ffi.new("RKLLMPromptCacheParam *", [1, path])
            )
        return super().prepare_batch(given, **how)

    # --- calls

    def load_lora(self, path: Path, name: str, scale: float = 1.0) -> int:
        path_, name_ = self._chars(path), self._chars(name)
        adapter = self.ffi.new("RKLLMLoraAdapter *", [path_, name_, scale])
        return int(self.lib.rkllm_load_lora(self.handle, adapter))

    def load_cache(self, path: Path | str) -> int:
        return int(self.lib.rkllm_load_prompt_cache(self.handle, self._chars(path)))

    def release_cache(self) -> int:
        return int(self.lib.rkllm_release_prompt_cache(self.handle))

    def set_cross_attention(self, keys: Sequence[float], tokens: int) -> int:
        """Keys as given, plain values, mask and positions."""
        ffi = self.ffi
        param = ffi.new("RKLLMCrossAttnParam *")
        param.encoder_k_cache = k = ffi.new("float[]", list(keys))
        param.encoder_v_cache = v = ffi.new("float[]", len(keys))
        param.encoder_mask = mask = ffi.new("float[]", [1.0] * tokens)
        param.encoder_pos = pos = ffi.new("int32_t[]", list(range(tokens)))
        param.num_tokens = tokens
        code = int(self.lib.rkllm_set_cross_attn_params(self.handle, param))
        for gone in (k, v, mask, pos):  # the runtime has copied what it needs
            ffi.buffer(gone)[:] = b"\xdd" * len(ffi.buffer(gone))
        return code


def opened(release: str, **how: Any) -> FeatureSim:
    """A handle whose EOS has no text."""
    sim = FeatureSim(release, skip_special_token=True, **how)
    assert sim.code == 0
    return sim


def turn(text: str) -> list[int]:
    """What a user says next in a conversation whose last answer has no EOS, and the header."""
    return ids_of(f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


# --- the files of prompt caches

CACHE_HEADER = struct.Struct("<8sIIQQ64sIIQ")
CACHE_FIELDS = ("magic", "format", "crc", "size", "adapter", "model", "n", "reserved", "writer")


def held(path: Path) -> list[int]:
    """The ids in a prompt cache."""
    content = path.read_bytes()
    n = CACHE_HEADER.unpack_from(content)[6]
    return list(struct.unpack_from(f"<{n}i", content, CACHE_HEADER.size + 16 * n))
