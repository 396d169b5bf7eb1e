"""What ``serve_config.yaml`` may say of stored responses, as a frozen pydantic model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rkserve.config.board_group import Settings


class ResponsesConfig(Settings):
    """What Routers keep of the answers of `/v1/responses` ([api.md](api.md#stored-responses))."""

    store: Literal["default", "asked", "never"] = Field(
        "default",
        description="Which are kept: with `default` those of all requests that do not say "
        "`store: false`, as OpenAI does; with `asked` those that say `store: true`; with `never` "
        "none, and nothing can go on from an earlier one.",
    )
    keep_s: float = Field(
        7 * 24 * 3600.0,
        gt=0,
        description="How long one is kept after it was made, or after another one went on from it.",
    )
    max_bytes: int = Field(
        256 * 1024**2,
        ge=1024**2,
        description="What all of a node's may take together; the longest unused go first.",
    )
