"""Token IDs as chains of block hashes: the prefix of a prompt in a few numbers. Pure.

A link is the hash of one block and of the link before it, so that equal links mean equal prefixes
under equal keys. Hashes are neither secret nor proof: a board compares token IDs before it reuses a
context.

The key, or origin, is the adapter's key and a salt of the API key and the client's ``cache_salt``:
another adapter computes other positions, and a salt keeps others from detecting a prompt by the
time to its first token (as vLLM's parameter of that name does).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")

BLOCK = 32  # tokens of a link; a prefix that ends within a block loses half a block on average
FILES = 64  # the last used files of a board that are reported: reports must not grow with the disk
STRIDE = 8  # every 8th link (256 tokens), and the last one, are reported for a context on a disk

_FORM = 1  # of the packed contexts; another form is not read, and a board without it holds nothing

# Hashes of tuples of ints are the same in every process of one build of Python, which Ray demands
# of a cluster anyway, at half the cost of a digest. This value identifies the hash function.
SCHEME = (hash((1 << 40, -7, 65_537, 3)) + _FORM) & 0xFFFF_FFFF

# Scheme, park_min; tokens, leaf, tail and number of marks of the live one; flags; number of files;
# compatibility and fetch_ms. Then the files' tokens, the numbers of their marks, and all marks.
_HEAD = struct.Struct("<IIIqqHBHqf")
_APPENDS, _LIVE, _PREFIX = 1, 2, 4


@lru_cache(maxsize=4096)
def seed_of(origin: str | None) -> int:
    """Return the start of chains of that origin; different origins share no link."""
    content = (origin or "").encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")


class BlockHashes:
    """The IDs of one context, with its links."""

    __slots__ = ("ids", "links", "seed")

    def __init__(self, ids: tuple[int, ...], seed: int, links: tuple[int, ...] = ()) -> None:
        """``links`` are those already known."""
        self.ids = ids
        self.seed = seed
        self.links = _continue(ids, seed, links)

    def __len__(self) -> int:
        return len(self.ids)

    def extended(self, more: tuple[int, ...]) -> BlockHashes:
        """Return the chain with more IDs at its end; only new blocks are hashed."""
        return BlockHashes(self.ids + more, self.seed, self.links)

    @property
    def leaf(self) -> int:
        """The last link."""
        return self.links[-1] if self.links else self.seed

    def tail(self, tokens: int) -> int:
        """Return the hash of the first ``tokens`` ids, exactly."""
        full = tokens // BLOCK
        last = self.links[full - 1] if full else self.seed
        return hash((last, self.ids[full * BLOCK : tokens]))

    @property
    def marks(self) -> tuple[int, ...]:
        """The links by which chains with the same prefix are recognised; the last one is the
        leaf.
        """
        return _sparse(self.links)


def _sparse(links: tuple[int, ...]) -> tuple[int, ...]:
    return (*links[STRIDE - 1 : len(links) - 1 : STRIDE], *links[-1:])


def _continue(ids: tuple[int, ...], seed: int, known: tuple[int, ...]) -> tuple[int, ...]:
    full = len(ids) // BLOCK
    links = list(known[:full])
    last = links[-1] if links else seed
    for at in range(len(links) * BLOCK, full * BLOCK, BLOCK):
        last = hash((last, ids[at : at + BLOCK]))
        links.append(last)
    return tuple(links)


@dataclass(frozen=True, slots=True)
class LivePrefix:
    """A live context: its length, last link and exact end. ``dense`` marks are all links."""

    tokens: int
    leaf: int
    tail: int
    marks: tuple[int, ...] = ()
    dense: bool = False

    @classmethod
    def of(cls, chain: BlockHashes, *, dense: bool = False) -> LivePrefix:
        """Return the context that a run over that chain leaves."""
        marks = chain.links if dense else chain.marks
        return cls(len(chain), chain.leaf, chain.tail(len(chain)), marks, dense)

    @property
    def filed(self) -> FilePrefix:
        """The file that it becomes where it is written to a disk."""
        return FilePrefix(self.tokens, _sparse(self.marks) if self.dense else self.marks)

    def common(self, chain: BlockHashes) -> int:
        """Return the tokens of its common prefix with the chain, in whole blocks but for its end.

        Only ``dense`` marks tell.
        """
        if self.tokens <= len(chain) and chain.tail(self.tokens) == self.tail:
            return self.tokens
        most = min(len(self.marks), len(chain.links))
        if not self.dense or not most:
            return 0
        # A link stands for all blocks before it, so the first pair that agrees is the longest.
        pairs = zip(self.marks[most - 1 :: -1], chain.links[most - 1 :: -1], strict=True)
        apart = next((at for at, (mine, other) in enumerate(pairs) if mine == other), most)
        return (most - apart) * BLOCK


@dataclass(frozen=True, slots=True)
class FilePrefix:
    """A context on a disk, usable as far as it matches; ``tokens`` are all of its own."""

    tokens: int
    marks: tuple[int, ...]

    @property
    def leaf(self) -> int:
        """The last link."""
        return self.marks[-1]


@dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """The reusable contexts of a board.

    ``appends``: the live context may be extended as a whole. ``prefix``: a prompt may also share
    only its beginning. Contexts of at least ``park_min`` tokens are saved to disk when another one
    replaces them; 0: they are lost.

    Boards of the same ``compatibility`` may load each other's files; 0: of none. To fetch a file
    from another board and to load it takes ``fetch_ms`` per token.
    """

    appends: bool = False
    park_min: int = 0
    live: LivePrefix | None = None
    files: tuple[FilePrefix, ...] = ()
    prefix: bool = False
    compatibility: int = 0
    fetch_ms: float = 0.0


def pack(holdings: CachedPrefixes) -> bytes:
    """Return the contexts as a report carries them."""
    live, files = holdings.live, holdings.files
    flags = _APPENDS * holdings.appends | _LIVE * (live is not None) | _PREFIX * holdings.prefix
    exact = (0, 0, 0, 0) if live is None else (live.tokens, live.leaf, live.tail, len(live.marks))
    marks = [*(live.marks if live is not None else ())]
    for file in files:
        marks += file.marks
    return b"".join(
        (
            _HEAD.pack(
                *(SCHEME, holdings.park_min, *exact, flags, len(files)),
                *(holdings.compatibility, holdings.fetch_ms),
            ),
            struct.pack(f"<{len(files)}I", *(file.tokens for file in files)),
            struct.pack(f"<{len(files)}H", *(len(file.marks) for file in files)),
            struct.pack(f"<{len(marks)}q", *marks),
        )
    )


def unpack(data: bytes) -> CachedPrefixes | None:
    """Return the argument of ``pack``; None if another build of Python or rkserve wrote it."""
    if len(data) < _HEAD.size:
        return None
    scheme, park_min, *exact, flags, count, compatible, fetch_ms = _HEAD.unpack_from(data)
    long, leaf, tail, own = exact
    columns = _HEAD.size + count * 6
    if scheme != SCHEME or len(data) < columns:
        return None
    tokens = struct.unpack_from(f"<{count}I", data, _HEAD.size)
    sizes = struct.unpack_from(f"<{count}H", data, _HEAD.size + count * 4)
    total = own + sum(sizes)
    if 0 in sizes or len(data) != columns + total * 8:
        return None
    marks = struct.unpack_from(f"<{total}q", data, columns)
    prefix = bool(flags & _PREFIX)
    live = LivePrefix(long, leaf, tail, marks[:own], prefix) if flags & _LIVE else None
    files, at = [], own
    for each, size in zip(tokens, sizes, strict=True):
        files.append(FilePrefix(each, marks[at : at + size]))
        at += size
    appends = bool(flags & _APPENDS)
    return CachedPrefixes(appends, park_min, live, tuple(files), prefix, compatible, fetch_ms)


_BETWEEN = "#"  # no adapter's key has one
_DIGEST_BYTES = 16


def salted(cache_salt: str) -> str:
    """Return an identifier of a client's salt, in hexadecimal, that does not reveal the salt."""
    return hashlib.blake2b(
        cache_salt.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES
    ).hexdigest()


def owned(caller: str, salt: str) -> str:
    """Return the salt of a caller's name and a ``salted`` salt."""
    return salted(f"{salt}{_BETWEEN}{caller}")


def origin_of(adapter: str | None, salt: str = "") -> str | None:
    """Return the origin for an adapter's key and a ``salted`` salt; None: neither."""
    return f"{adapter or ''}{_BETWEEN}{salt}" if salt else adapter


def adapter_of(origin: str | None) -> str | None:
    """Return the adapter's key in an origin; None is the base model."""
    return None if origin is None else origin.partition(_BETWEEN)[0] or None


def common_prefix(one: Sequence[T], other: Sequence[T]) -> int:
    """Return the length of the common prefix of two sequences of one type."""
    # Slices are compared in C: a Python loop over 16,384 positions, once per cache entry, is too
    # slow.
    same, differs = 0, min(len(one), len(other))
    if one[:differs] == other[:differs]:
        return differs
    while differs - same > 1:
        middle = (same + differs) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            differs = middle
    return same
