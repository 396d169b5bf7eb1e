"""POST /v1/join, by which a board asks for the settings of its Ray, and the approval of boards."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from rkserve.api.admin.query import Name
from rkserve.api.json.schemas import RequestModel, Seconds, one_of

Version = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[\w.+]+$")]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
MOST_NAMED = 256
HostName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[\w.-]+$")]


class MemberState(str, Enum):
    """The state of a board that has asked to join."""

    JOINED = "joined"
    WAITING = "waiting"
    DENIED = "denied"


class JoinBody(RequestModel):
    """The board that asks, with a join token in the Authorization header.

    Keys of a later version are left out.
    """

    model_config = ConfigDict(extra="ignore")

    host: HostName = Field(description="The board's host name.")
    ray: Version = Field(description="The version of Ray on the board.")
    python: Version = Field(description="The minor version of Python on the board, such as 3.11.")
    machine: Digest = Field("", description="A digest of the board's machine-id.")
    serial: Digest = Field("", description="A digest of the serial number of the board's SoC.")
    version: str = Field("", max_length=40, description="The version of rkserve on the board.")


class JoinAnswer(TypedDict):
    """The values that the board's Ray starts with.

    ``notes`` are sentences about a copied card or another host name. ``version`` is that of rkserve
    on the head.
    """

    ray_address: str
    ray_version: str
    cluster_token: str
    environ: dict[str, str]
    notes: list[str]
    version: str


class JoinWaiting(TypedDict):
    """The board waits for the operator's approval, and asks again.

    ``command`` approves it on the head.
    """

    state: Literal["waiting"]
    id: str
    command: str
    notes: list[str]


class MemberEntry(TypedDict):
    """A board that has asked to join: its host name, and the time of its state.

    A board that has joined sends a heartbeat every few seconds; `seen_s` is the time of the last.
    """

    id: str
    host: str
    state: Annotated[str, one_of(MemberState)]
    since_s: Seconds
    notes: list[str]
    seen_s: NotRequired[Seconds]


class MembersAnswer(TypedDict):
    """The boards that have asked to join; ``approval`` is true where new ones wait for it."""

    object: Literal["list"]
    approval: bool
    data: list[MemberEntry]


class ApprovedAnswer(TypedDict):
    """The boards that were approved or denied."""

    object: Literal["list"]
    data: list[MemberEntry]


class DenyBody(RequestModel):
    """Boards to deny."""

    boards: list[Name] = Field(
        min_length=1, max_length=MOST_NAMED, description="Host names or ids."
    )


class ApproveBody(RequestModel):
    """Boards to approve."""

    boards: list[Name] | None = Field(
        None, min_length=1, max_length=MOST_NAMED, description="Host names or ids."
    )
    all: bool = Field(False, description="All that wait.")
