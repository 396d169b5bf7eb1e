"""Names and values of rkserve's own response headers; it knows what a board accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rkserve.messages import Accepted

BOARD = "x-rkserve-board"
RELEASE = "x-rkserve-release"
QUEUED_AHEAD = "x-rkserve-queued-ahead"
SAMPLING_IGNORED = "x-rkserve-sampling-ignored"
EPOCH = "x-rkserve-epoch"
WEIGHT_VERSION = "x-weight-version"


def answer_headers(accepted: Sequence[Accepted], versions: Sequence[str]) -> dict[str, str]:
    """Return the headers of an answer whose choices were accepted like this, in their order.

    ``versions`` are those of the weights, by choice.

    Boards and releases are named once each. ``QUEUED_AHEAD`` is how many requests were before the
    choice that has to wait longest. ``SAMPLING_IGNORED`` is only there where a parameter
    that the client set could not be honoured for at least one choice.
    """
    ignored = _once(name for one in accepted for name in one.sampling_ignored)
    headers = {
        BOARD: _once(one.board_id for one in accepted),
        RELEASE: _once(one.release for one in accepted),
        QUEUED_AHEAD: str(max(one.queued_ahead for one in accepted)),
        SAMPLING_IGNORED: ignored,
        # The oldest of what the boards obeyed: all choices are at least that new.
        EPOCH: str(min(one.epoch for one in accepted)),
        WEIGHT_VERSION: _once(versions),
    }
    return {name: value for name, value in headers.items() if value}


def _once(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
