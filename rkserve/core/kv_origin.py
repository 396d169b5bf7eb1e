"""Under what the positions of a KV cache were computed: the key of an adapter, and a client's salt.

Positions are of use only under the same of both: another adapter computes others, and who says a
``cache_salt`` wants to share none with those who say another one or none, so that nobody finds out
by the time of an answer what others have asked (vLLM's parameter of that name). Pure.
"""

from __future__ import annotations

import hashlib

_BETWEEN = "#"  # no adapter's key has one
_DIGEST_BYTES = 16


def salted(cache_salt: str) -> str:
    """Return what stands for a client's salt, in hexadecimal; it says nothing of the salt."""
    return hashlib.blake2b(
        cache_salt.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES
    ).hexdigest()


def origin_of(adapter: str | None, salt: str = "") -> str | None:
    """Return the origin for an adapter's key and a ``salted`` salt; None: neither."""
    return f"{adapter or ''}{_BETWEEN}{salt}" if salt else adapter


def adapter_of(origin: str | None) -> str | None:
    """Return the key of the adapter in it; None is the base model."""
    return None if origin is None else origin.partition(_BETWEEN)[0] or None
