"""Parameters and lines of the calls that show logs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from rkserve.api.json.schemas import RequestModel, Seconds
from rkserve.core.logs import KEPT_LINES, PAGE_LINES, LogLine

MAX_ID_CHARS = 80


class LogsQuery(RequestModel):
    """Query of a call that shows logs."""

    tail: int | None = Field(
        None,
        ge=0,
        le=KEPT_LINES,
        description=f"How many of the last lines of each process come first; {PAGE_LINES} without "
        "it. A process remembers the last thousand.",
    )
    follow: bool | None = Field(
        None, description="Whether new lines follow until the client hangs up."
    )
    request_id: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_ID_CHARS,
        description="Only lines of this request, by the beginning of its id.",
    )


class LogEntry(TypedDict):
    """One log line."""

    source: Annotated[str, Field(description="A board's name, `coordinator` or a Router's name.")]
    time_s: Seconds
    level: str
    logger: str
    request_id: Annotated[str, Field(description="Of the request that it is about, or empty.")]
    message: str
    engine_pid: Annotated[
        NotRequired[int], Field(description="Where the board's engine or its library wrote it.")
    ]


def log_entry(source: str, line: LogLine) -> LogEntry:
    """Return a line of the log of ``source``."""
    entry = LogEntry(
        source=source,
        time_s=round(line.time_s, 3),
        level=line.level,
        logger=line.logger,
        request_id=line.request_id,
        message=line.message,
    )
    if line.engine_pid:
        entry["engine_pid"] = line.engine_pid
    return entry
