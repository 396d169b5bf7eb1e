"""The Serve application that ``serve_config.yaml`` names as ``rkserve.app:build``."""

from rkserve.deployments.build import build

__all__ = ["build"]
