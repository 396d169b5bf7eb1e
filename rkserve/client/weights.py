"""Base weights on their way to the head: the call, its steps, and what is known of them then.

Like ``flows`` it has steps come out and results go in, and does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rkserve.client import answers
from rkserve.client.calls import FILE_S, Request, listed
from rkserve.client.flows import BlockingCall, Flow, OnProgress, Progress, RetryPolicy, exchange
from rkserve.client.upload import Upload


@dataclass(frozen=True, slots=True)
class PushedWeights:
    """Base weights that are on the head's disk, and on no board yet.

    ``label`` is how calls name them: ``model@version``, or ``default`` for what turned out to be
    the file of the model's own folder. ``body`` is the whole answer.
    """

    label: str
    model: str
    sha256: str
    size_bytes: int
    body: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)


@dataclass(frozen=True, slots=True)
class WeightsPush:
    """What to push: the source, and how it is called."""

    source: Path | str | bytes
    version: str | None
    model: str | None
    parameters: Sequence[Mapping[str, Any]] | None
    key: str


def push(what: WeightsPush, patience: RetryPolicy, told: OnProgress | None) -> Flow[PushedWeights]:
    """Send base weights to the head."""
    size = 0

    def sent(count: int) -> None:
        if told is not None:
            told(Progress("upload", count, size))

    source: Upload = yield BlockingCall(lambda: Upload.of(what.source, sent))
    size = source.size_bytes
    response = yield from exchange(_request(what, source), patience)
    body = answers.json_of(response)
    label, model = answers.text_of(body, "id"), answers.text_of(body, "model")
    return PushedWeights(label, model, source.sha256, size, body)


def _request(what: WeightsPush, source: Upload) -> Request:
    given = {
        "version": what.version,
        "model": what.model,
        "sha256": source.sha256,
        "size": source.size_bytes,
        "parameters": listed(what.parameters),
    }
    query = {name: str(value) for name, value in given.items() if value is not None}
    return Request("POST", "/v1/weights", query, upload=source, key=what.key, read_s=FILE_S)
