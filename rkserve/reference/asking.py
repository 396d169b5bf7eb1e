"""Parts of request bodies."""

from __future__ import annotations

from rkserve.api.json import limits
from rkserve.reference.shapes import INTEGER, array, said, text

IDS = array(INTEGER, 1)
MODEL = said(text(1, limits.MAX_MODEL_CHARS), "A model or an adapter.")
