"""Names and values of rkserve's own headers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rkserve.api.json.fields import Range, quoted
from rkserve.api.json.limits import MAX_TIMEOUT_S, MAX_TYPES_NAMED
from rkserve.core.errors import RequestError
from rkserve.core.messages import Accepted

BOARD = "x-rkserve-board"
RELEASE = "x-rkserve-release"
QUEUED_AHEAD = "x-rkserve-queued-ahead"
SAMPLING_IGNORED = "x-rkserve-sampling-ignored"
TOOLS_IGNORED = "x-rkserve-tools-ignored"
EPOCH = "x-rkserve-epoch"
WEIGHT_VERSION = "x-weight-version"
TIMEOUT = "x-request-timeout"
_TIMEOUT = Range(0, MAX_TIMEOUT_S, above=True)


def read_timeout(header: str | None) -> float | None:
    """Return the seconds of an x-request-timeout header. Raises ``RequestError``."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    complaint = "it is no number" if math.isnan(seconds) else _TIMEOUT.complaint(seconds)
    if complaint is not None:
        raise RequestError(f"Invalid '{TIMEOUT}': {complaint}, but got {quoted(header)}.", TIMEOUT)
    return seconds


def answer_headers(accepted: Sequence[Accepted], versions: Sequence[str]) -> dict[str, str]:
    """Return the headers of an answer, from the admissions of its choices in order.

    ``versions`` are those of the weights, by choice.

    Boards and releases are named once each. ``QUEUED_AHEAD`` is the longest queue before any
    choice. ``SAMPLING_IGNORED`` is present only if a parameter that the client set could not be
    applied to at least one choice.
    """
    ignored = _once(name for one in accepted for name in one.sampling_ignored)
    headers = {
        BOARD: _once(one.board_id for one in accepted),
        RELEASE: _once(one.release for one in accepted),
        QUEUED_AHEAD: str(max(one.queued_ahead for one in accepted)),
        SAMPLING_IGNORED: ignored,
        # The oldest epoch among the boards: all choices are at least that new.
        EPOCH: str(min(one.epoch for one in accepted)),
        WEIGHT_VERSION: _once(versions),
    }
    return {name: value for name, value in headers.items() if value}


def tool_headers(left_out: Sequence[str]) -> dict[str, str]:
    """Return the header with the types of the tools that were left out, if any."""
    if not left_out:
        return {}
    more = ["..."] if len(left_out) > MAX_TYPES_NAMED else []
    return {TOOLS_IGNORED: ", ".join([*left_out[:MAX_TYPES_NAMED], *more])}


def _once(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
