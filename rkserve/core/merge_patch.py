"""JSON Merge Patches (RFC 7396) between objects: made by a Router, applied by clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch from one object to another; empty if they are equal.

    Keys of ``after`` must not be None: a patch cannot set them.
    """
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        known = before.get(name)
        if known is value or known == value:
            continue
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            patch[name] = merge_patch(known, value)
        else:
            patch[name] = value
    return patch


def patched(before: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object after a patch."""
    after = dict(before)
    for name, value in patch.items():
        if value is None:
            after.pop(name, None)
        elif isinstance(value, Mapping):
            known = after.get(name)
            after[name] = patched(known if isinstance(known, Mapping) else {}, value)
        else:
            after[name] = value
    return after
