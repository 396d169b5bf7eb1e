"""The chat page and the cluster's page as files, with the headers that restrict them in a browser.

It knows files and headers, and neither routes nor the server behind them. The pages themselves are
in ``files/`` and ``files/cluster/``: HTML, CSS and JavaScript modules as they are sent, without a
build step.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_FILES = Path(__file__).parent / "files"
FRONT, CLUSTER_FRONT = "index.html", "cluster/index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "md": "text/markdown; charset=utf-8",
}

# The page is given nothing from elsewhere, sends nothing elsewhere and stands in no frame, and no
# text can become markup: it makes elements only (which is what trusted types enforce).
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # images that the user shows; answers have none
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # After an update the files belong together: a browser asks each time whether it has the latest.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """One file of the page. ``digest`` is another one where the content is."""

    content: bytes
    compressed: bytes
    media_type: str
    digest: str

    def form(self, *, gzip_accepted: bool) -> PageForm:
        """Return the file as one client gets it."""
        headers = {**HEADERS, "content-type": self.media_type, "vary": "accept-encoding"}
        if not gzip_accepted:
            return PageForm(self.content, {**headers, "etag": f'"{self.digest}"'})
        headers |= {"content-encoding": "gzip", "etag": f'"{self.digest}-gzip"'}
        return PageForm(self.compressed, headers)


@dataclass(frozen=True)
class PageForm:
    """A file in one encoding, with the headers that go with it."""

    content: bytes
    headers: Mapping[str, str]


@functools.cache  # compressing them takes longer than all else that makes a Router's application
def page_files() -> Mapping[str, PageFile]:
    """Return the files of the pages by their names, such as ``cluster/main.js``."""
    found = (one for one in _FILES.rglob("*") if one.is_file())
    return MappingProxyType(
        {
            name: _page_file(name, one.read_bytes())
            for name, one in ((one.relative_to(_FILES).as_posix(), one) for one in found)
        }
    )


def _page_file(name: str, content: bytes) -> PageFile:
    digest = hashlib.sha256(content).hexdigest()[:20]
    # Without a time in it, so that all Routers send the same bytes under the same tag.
    compressed = gzip.compress(content, mtime=0)
    return PageFile(content, compressed, _TYPES[name.rpartition(".")[2]], digest)
