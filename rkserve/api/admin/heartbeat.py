"""POST /v1/heartbeat: a board reports its version, and gets what an update wants of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from rkserve.api.admin.join import HostName
from rkserve.api.json.schemas import RequestModel

Key = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Name = Annotated[str, Field(max_length=80, pattern=r"^[\w.+-]*$")]


class HeartbeatBody(RequestModel):
    """A board that has joined. Keys of a later version are left out."""

    model_config = ConfigDict(extra="ignore")

    key: Key = Field(description="The board, as it is known while its identity stays.")
    host: HostName = Field(description="The board's host name.")
    version: Name = Field(description="The version of rkserve on the board.")
    stage: Name = Field("serving", description="`serving`, `installing`, `installed` or `trial`.")
    update: Name = Field("", description="The update that the stage and the problem belong to.")
    problem: str = Field("", max_length=4000, description="The reason of an update that failed.")
    before_tokens_per_s: float | None = Field(None, description="The speed before the update.")
    tokens_per_s: float | None = Field(None, description="The speed that was measured last.")


class WheelEntry(TypedDict):
    """A file that the board may need."""

    name: str
    sha256: str
    size: int


class MeasuredEntry(TypedDict):
    """The library and the model folder of a group of real boards, which show a board's speed."""

    library: str
    model: str


class OrderEntry(TypedDict):
    """The order of an update to a board.

    The board installs ``version``, with ``back`` the one before; with ``go`` it takes that into
    use. ``files`` are wheels with their sha256 and size. The version is taken back unless the board
    serves within ``limit_s``, with at least ``ratio`` of its speed before, measured for
    ``seconds``.
    """

    update: str
    version: str
    back: bool
    go: bool
    index: bool
    files: list[WheelEntry]
    ratio: float
    seconds: float
    limit_s: float


class ReplicaEntry(TypedDict):
    """A board replica on that host, as this Router sees it."""

    pid: int
    state: str


class HeartbeatAnswer(TypedDict):
    """The head's version, the replicas on the board's host, and its order if there is one."""

    version: str
    replicas: list[ReplicaEntry]
    order: OrderEntry | None
    measures: list[MeasuredEntry]
