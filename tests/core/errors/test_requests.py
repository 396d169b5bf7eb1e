"""Errors of requests: what clients can rely on."""

from __future__ import annotations

import pytest

from rkserve.api.common.output import error_object
from rkserve.core import errors
from rkserve.core.errors import RkserveError

INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(errors.RequestError("x", "n"), (400, INVALID, "n", None, None), id="bad"),
        pytest.param(
            errors.UnsupportedParameter("x", "tools"),
            (400, INVALID, "tools", "unsupported_parameter", None),
            id="unsupported",
        ),
        pytest.param(
            errors.ModelNotFound("m"),
            (404, INVALID, "model", "model_not_found", None),
            id="unknown model",
        ),
        pytest.param(
            errors.ContextOverflow(9, 8),
            (400, INVALID, "messages", "context_length_exceeded", None),
            id="overflow",
        ),
        pytest.param(
            errors.SamplingFixed("1.2.3", ("top_k",)),
            (400, INVALID, "top_k", "sampling_fixed", None),
            id="fixed sampling",
        ),
    ],
)
def test_clients_can_rely_on(error: RkserveError, said: tuple[object, ...]) -> None:
    status, headers, body = error_object(error)
    got = body["error"]
    retry_after = headers.get("retry-after")
    assert (status, got["type"], got["param"], got["code"], retry_after) == said


def test_the_overflow_of_an_untokenized_prompt_says_at_least() -> None:
    assert "has at least 5000" in errors.ContextOverflow(5000, 4096, "prompt", True).message
    assert "has 5000" in errors.ContextOverflow(5000, 4096, "prompt").message
