"""What a replica writes into Serve's log about calls that it refused."""

from __future__ import annotations

import logging

import pytest

from rkserve.core.errors import StateConflict
from rkserve.deployments.logging import RefusalsInOneLine


def logged(error: Exception, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    logger = logging.getLogger("test of Serve's logger")
    said = RefusalsInOneLine()
    logger.addFilter(said)
    try:
        raise error
    except type(error):
        logger.exception("Request failed.")
    finally:
        logger.removeFilter(said)
    return caplog.records[-1]


def test_a_refusal_is_one_line_of_information(caplog: pytest.LogCaptureFixture) -> None:
    record = logged(StateConflict("resume", "generating"), caplog)
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert record.getMessage() == (
        "refused: StateConflict: Cannot resume a generation that is generating."
    )


def test_a_fault_keeps_its_level_and_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    record = logged(ZeroDivisionError("x"), caplog)
    assert record.levelno == logging.ERROR
    assert record.exc_info
    assert record.getMessage() == "Request failed."
