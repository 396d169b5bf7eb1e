"""The root of the error tree, and the removal of folder names from messages."""

from __future__ import annotations

import re
from typing import ClassVar


class RkserveError(Exception):
    """Base class of all errors that rkserve raises on purpose. ``message`` is one sentence for
    users.

    ``http_status``, ``kind`` and ``code`` become the status and the ``type`` and ``code`` of the
    OpenAI error object; ``param`` names the request's invalid key, if any.
    """

    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    # The message, with the names of attributes in braces; None is the first argument.
    sentence: ClassVar[str | None] = None

    param: str | None = None
    retry_after_s: int | None = None

    @property
    def message(self) -> str:
        """The sentence for the user."""
        if self.sentence is not None:
            return self.sentence.format_map(vars(self))
        return str(self.args[0]) if self.args else type(self).__name__

    def __str__(self) -> str:
        return self.message


# The folders of an absolute path, in quotes perhaps with blanks in them. What has no root is left:
# "tokens/s" and "on/off" are words.
_QUOTED = re.compile(r"""(?<=['"])(?:~|\.{1,2})?/(?:[^'"\n]*/)?(?=[^'"\n/]*['"])""")
_BARE = re.compile(r"""(?<![\w:/.~'"-])(?:~|\.{1,2})?/(?:[^\s'"/]+/)*""")


def without_folders(text: str) -> str:
    """Return ``text`` with every path shortened to the file's name, for readers outside this
    machine.
    """
    return _BARE.sub("", _QUOTED.sub("", text))
