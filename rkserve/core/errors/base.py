"""The root of the error tree."""

from __future__ import annotations

from typing import ClassVar


class RkserveError(Exception):
    """Anything rkserve raises on purpose. ``message`` is one sentence for the person who reads it.

    ``http_status``, ``kind`` and ``code`` become the status and the ``type`` and ``code`` of the
    OpenAI error object; ``param`` names the request's key at fault, where one is.
    """

    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    param: str | None = None
    retry_after_s: int | None = None

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return str(self.args[0]) if self.args else type(self).__name__

    def __str__(self) -> str:
        return self.message
