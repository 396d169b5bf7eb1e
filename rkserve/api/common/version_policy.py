"""The version of the weights for a request, by its model name and its version policy.

It is resolved against the adapter versions of the desired state. A choice that these leave open is
made by the board when the request starts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from rkserve.api.json.fields import MAX_LABEL_CHARS, quoted
from rkserve.core.desired_state import AdapterVersion, AdapterVersions, Desired
from rkserve.core.errors import RequestError, VersionUnavailable
from rkserve.core.messages import AdapterRef
from rkserve.models.adapters import parts_of, version_order

POLICY = "x-version-policy"
SESSION = "x-session-id"
_MINIMUM = "min-version:"


class Freshness(str, Enum):
    """The required freshness of the weights."""

    ANY = "any"
    LATEST = "latest-only"
    MINIMUM = "min-version"


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """The version policy of a request; ``version`` is the minimum."""

    wanted: Freshness = Freshness.ANY
    version: str = ""

    @property
    def text(self) -> str:
        """The header's value."""
        return f"{_MINIMUM}{self.version}" if self.version else self.wanted.value

    def allows(self, version: str) -> bool:
        """Return whether a version may serve the request; ``v9`` is less than ``v10``."""
        if self.wanted is not Freshness.MINIMUM:
            return True
        return version_order(version) >= version_order(self.version)


ANY = VersionPolicy()


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The weights that a model name stands for.

    Without adapter and line it is the base ``model``. ``adapter`` is one version; with ``line``
    the board chooses by the ``session``, and ``active`` is the version served by default.
    ``named``: the request named the version.
    """

    model: str
    adapter: AdapterRef | None = None
    line: str | None = None
    active: AdapterRef | None = None
    min_epoch: int = 0
    named: bool = False

    @property
    def ref(self) -> AdapterRef | None:
        """The version in force now, for objects that belong to a version and not to a request."""
        return self.adapter or self.active

    @property
    def adapter_name(self) -> str | None:
        """The adapter's name without a version."""
        return self.line if self.adapter is None else self.adapter.name


def read_policy(header: str) -> VersionPolicy:
    """Read the header ``x-version-policy``. Raises ``RequestError``."""
    text = header.strip()
    if text in (Freshness.ANY.value, Freshness.LATEST.value):
        return VersionPolicy(Freshness(text))
    version = text.removeprefix(_MINIMUM).strip()
    if text.startswith(_MINIMUM) and version and len(version) <= MAX_LABEL_CHARS:
        return VersionPolicy(Freshness.MINIMUM, version)
    raise RequestError(
        f"Invalid '{POLICY}': {quoted(text)}. It is 'any', 'latest-only' or "
        "'min-version:<version>'.",
        POLICY,
    )


def find_line(
    asked: str, models: Collection[str], desired: Desired
) -> tuple[AdapterVersions, str | None] | None:
    """Return the adapter line of a model name, and the version in the name.

    See ``parts_of`` for the forms. None: no line has that name, or a model has it. Raises
    ``RequestError``: several models have a line of that name.
    """
    if asked in models:
        return None
    parts = parts_of(asked)
    found = [
        line
        for line in desired.lines
        if line.name == parts.name and line.model in models and parts.base in (None, line.model)
    ]
    if len(found) > 1:
        raise parts.ambiguous(line.model for line in found)
    return (found[0], parts.version) if found else None


def bind(line: AdapterVersions, version: str | None, policy: VersionPolicy) -> ResolvedModel | None:
    """Return the resolved model for a line; None if the line does not serve the version.

    Raises:
        VersionUnavailable: the policy allows none of the versions that the line serves.
        RequestError: the request names one that its own policy does not allow.
    """
    if version is not None:
        return _named(line, version, policy)
    if not _served(line):
        return None
    return _allowed(line, policy)


def check_label(label: str, policy: VersionPolicy) -> None:
    """Check the label of a base model's weights against a policy. Raises ``VersionUnavailable``."""
    if not policy.allows(label):
        raise VersionUnavailable(policy.text, f"the model's weights are '{label}'")


def _named(line: AdapterVersions, version: str, policy: VersionPolicy) -> ResolvedModel | None:
    found = line.version(version)
    if found is None:
        return None
    if not policy.allows(version):
        raise RequestError(
            f"The request names version '{version}', which its own '{POLICY}' does not allow.",
            POLICY,
        )
    return ResolvedModel(line.model, found.ref, min_epoch=line.epoch, named=True)


def _allowed(line: AdapterVersions, policy: VersionPolicy) -> ResolvedModel:
    served = _served(line)
    if policy.wanted is Freshness.LATEST:
        fit = served[-1:]
    else:
        fit = [one for one in served if policy.allows(one.ref.version)]
    if not fit:
        at = " and ".join(one.ref.version for one in served)
        raise VersionUnavailable(policy.text, f"'{line.name}' is at {at}")
    if len(fit) == len(served):
        active = fit[0].ref
        return ResolvedModel(line.model, line=line.name, active=active, min_epoch=line.epoch)
    return ResolvedModel(line.model, fit[-1].ref, min_epoch=line.epoch)


def _served(line: AdapterVersions) -> list[AdapterVersion]:
    """Return the versions that serve the bare name, the newest last."""
    tried = line.candidate is not None and (line.switched or line.weight > 0)
    found = [line.active, line.candidate if tried else None]
    return [one for one in found if one is not None]
