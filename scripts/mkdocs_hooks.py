"""Changes to pages on their way into the site of mkdocs.yml.

The pages are written to be read in the repository, too, where links to source files work and
Mermaid diagrams are drawn. The site has neither the files nor a script from another server.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]\n]+)\]\(([^)#:\s]+)(?:#[^)]*)?\)")
DIAGRAM = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", re.S | re.M)
TRANSITION = re.compile(r"^\s*(\w+) --> (\w+): (.*)$", re.M)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page's Markdown for the site; mkdocs calls this for each page."""
    return DIAGRAM.sub(_table, without_source_links(markdown, page.file.src_uri))


def without_source_links(markdown: str, page: str) -> str:
    """Replace links to files outside docs/ by their text. ``page`` is a path below docs/."""

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[2]))
        return link[1] if target.startswith("../") else link[0]

    return LINK.sub(replaced, markdown)


def _table(diagram: re.Match[str]) -> str:
    rows = (
        f"| {state.replace('_', ' ')} | {event} | {after.replace('_', ' ')} |"
        for state, after, event in TRANSITION.findall(diagram[1])
    )
    return "\n".join(["| state | event | next state |", "| --- | --- | --- |", *rows])
