"""POST /v1/join: a board asks the head for what its Ray needs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from rkserve.api.json.schemas import RequestModel

Version = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[\w.+]+$")]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
HostName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[\w.-]+$")]


class JoinBody(RequestModel):
    """The board that asks, with a join token in the Authorization header."""

    host: HostName = Field(description="The board's host name.")
    ray: Version = Field(description="The version of Ray on the board.")
    python: Version = Field(description="The minor version of Python on the board, such as 3.11.")
    machine: Digest = Field("", description="A digest of the board's machine-id.")
    serial: Digest = Field("", description="A digest of the serial number of the board's SoC.")


class JoinAnswer(TypedDict):
    """The values that the board's Ray starts with.

    ``notes`` are sentences about a copied card or another host name.
    """

    ray_address: str
    ray_version: str
    cluster_token: str
    environ: dict[str, str]
    notes: list[str]
