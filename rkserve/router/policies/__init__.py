"""Routing policies by name. A module in this folder adds policies with ``base.register``."""

from importlib import import_module
from pkgutil import iter_modules

from rkserve.router.policies.base import POLICIES

__all__ = ["POLICIES"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
