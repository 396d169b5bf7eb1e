"""The rule for names of adapters, their versions and prompt caches, which become parts of paths."""

from __future__ import annotations

import re

from rkserve.core.errors import RequestError

# No ':', '@' or '/': the first two are separators in a request's model, the last one in paths.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
QUOTED_CHARACTERS = 40


def check_cache_name(name: str, param: str = "cache_name") -> str:
    """Return a valid prompt cache name. Raises ``RequestError`` with the rule."""
    if not NAME.fullmatch(name):
        shown = repr(name if len(name) <= QUOTED_CHARACTERS else f"{name[:QUOTED_CHARACTERS]}...")
        raise RequestError(
            f"Invalid '{param}': {shown}. The name of a prompt cache begins with a letter or a "
            "digit and has at most 64 letters, digits, '.', '_' and '-'.",
            param,
        )
    return name
