"""The groups of the application with boards of many kinds, and how tests find those of theirs.

``varied_fixtures`` deploys it.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.cluster.local_cluster import App
from tests.support.paths import PROJECT

NAME = "varied"
# Of each group its name is the beginning of its boards' names.
EMBED, VISION = "embed", "vision"
BATCH, BATCHED, PAIR, TWICE = "batch", "batched", "pair", "twice"
REST, RESTED, NAP = "rest", "sim-rest", "nap"
IDLE_S = 1.0
NEAR, CATALOGUED = "near", "near-chat"
CACHE, CACHED = "cache", "cached"
ADAPT, ADAPTED = "adapt", "adapted"
PLAIN, FILTERED = "plain", "filtered"
# The titles of the adapters that are whole.
TITLES = {
    ("pirate", "v1"): "Captain Hook",
    ("pirate", "v10"): "Captain Kidd",
    ("poet", "v1"): "Sappho",
    ("cook", "v1"): "Escoffier",
}
PAGE = (PROJECT / "docs" / "how-to" / "interrupting.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)^```$", PAGE, re.S | re.M))
HOOKS = re.findall(r"^```yaml\nhooks: (\[.*\])\n```$", PAGE, re.M)


def of(varied: App, group: str, boards: int = 1) -> App:
    """Return the application as the tests of one group see it, whose boards are ready and idle."""
    found = App(varied.cluster, varied.name, group, boards)
    found.settled()
    return found


def adapter_file(model: Path, name: str, version: str) -> Path:
    """Return the place of a version's file in a model folder, in a new folder."""
    file = model / "adapters" / name / version / "adapter.rkllm"
    file.parent.mkdir(parents=True)
    return file
