"""Arguments of serve_config.yaml, and the settings models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rkserve.config.board_group import (
    BoardGroupConfig,
    PatienceConfig,
    PromptCacheConfig,
    SimulatedConfig,
)
from rkserve.config.router import RouterConfig
from rkserve.config.serve_config import (
    CoordinatorConfig,
    RkserveConfig,
)
from rkserve.models.settings import FolderSettings, SamplingDefaults

SETTINGS: tuple[type[BaseModel], ...] = (
    RkserveConfig,
    RouterConfig,
    CoordinatorConfig,
    BoardGroupConfig,
    PatienceConfig,
    PromptCacheConfig,
    SimulatedConfig,
    FolderSettings,
    SamplingDefaults,
)


def args(**changes: Any) -> dict[str, Any]:
    """Arguments with one group of simulated boards; changes go into the group."""
    return {"boards": [{"name": "sim", "model": "models/sim-chat", "simulated": {}, **changes}]}


REAL = {"model": "m", "library": "/usr/lib/librkllmrt.so"}
