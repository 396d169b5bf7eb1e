"""What the library and the system say, for people who need not know this machine's folders.

Their words are worth telling, and hold paths. It knows text and no error.
"""

from __future__ import annotations

import re

# The folders of an absolute path, in quotes perhaps with blanks in them. What has no root is left:
# "tokens/s" and "on/off" are words.
_QUOTED = re.compile(r"""(?<=['"])(?:~|\.{1,2})?/(?:[^'"\n]*/)?(?=[^'"\n/]*['"])""")
_BARE = re.compile(r"""(?<![\w:/.~'"-])(?:~|\.{1,2})?/(?:[^\s'"/]+/)*""")


def without_folders(text: str) -> str:
    """Return ``text`` with every path in it cut down to the file's name."""
    return _BARE.sub("", _QUOTED.sub("", text))
