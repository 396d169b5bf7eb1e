"""The releases of the vendor's runtime that rkserve drives, and the binary interface of each.

A release gets in here only once its header was read and laid down in ``decl``: the library checks
nothing, and a wrong layout corrupts memory rather than fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class Abi(Enum):
    """A binary interface, by the releases that have it."""

    V1_2 = "1.2.x"
    V1_3 = "1.3"


ACCEPTED: Mapping[str, Abi] = MappingProxyType(
    {"1.2.1": Abi.V1_2, "1.2.2": Abi.V1_2, "1.2.3": Abi.V1_2, "1.3.0": Abi.V1_3}
)
