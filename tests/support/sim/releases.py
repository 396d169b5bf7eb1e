"""The releases that tests run with.

Most tests take BOTH: one release of each interface. EVERY is for what a release may have of its
own: layouts, detection, batches, pictures and logits.
"""

from __future__ import annotations

from rkserve.native.sim import build

BOTH = ("1.2.3", "1.3.0")
EVERY = tuple(build.RELEASES)
