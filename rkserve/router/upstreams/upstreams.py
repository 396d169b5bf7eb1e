"""All upstreams of one Router, and the calls in flight of which they may get generations.

Boards get rendered prompts, which hold no conversation. The conversations stay here, at the Router,
apart from the requests that cross to boards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from rkserve.api.common.answer import AnyCall
from rkserve.api.common.version_policy import ANY, POLICY, VersionPolicy
from rkserve.api.upstream.requests import refusal
from rkserve.config.board_group import BoardGroupConfig, UpstreamConfig
from rkserve.core.board_report import GenerationInfo, RouterGenerations
from rkserve.core.desired_state import Desired
from rkserve.core.errors import ConfigError, UnsupportedParameter
from rkserve.core.messages import ControlAction
from rkserve.router.upstreams.metrics import UpstreamMetrics

if TYPE_CHECKING:
    # With its HTTP client a tenth of a Router's imports, and most Routers have no upstream.
    import httpx

    from rkserve.router.upstreams.link import UpstreamLink


class Upstreams:
    """The upstreams of one Router, by the names of their groups. Use from one event loop.

    ``alone`` are the models that no boards have, with the lengths of their contexts.
    """

    def __init__(
        self,
        links: Mapping[str, UpstreamLink] | None = None,
        calls: dict[str, AnyCall] | None = None,
    ) -> None:
        """``calls`` is the table that the ``links`` read."""
        self.links = dict(links or {})
        self.calls = {} if calls is None else calls
        self._by_key = {link.key: link for link in self.links.values()}
        self._of: dict[str, list[UpstreamLink]] = {}
        for link in self.links.values():
            self._of.setdefault(link.model, []).append(link)
        self.alone = {
            model: max(link.config.context_length for link in of)
            for model, of in self._of.items()
            if of[0].alone
        }

    @property
    def waits_s(self) -> dict[str, float]:
        """The waits for a board before an upstream gets a request, by the upstream's address."""
        return {link.key: link.config.overflow_wait_s for link in self.links.values()}

    def serve(self, model: str) -> bool:
        """Return whether the model has an upstream."""
        return model in self._of

    def unsuited(self, model: str, call: AnyCall, policy: VersionPolicy = ANY) -> tuple[str, ...]:
        """Return the addresses of the upstreams that cannot honour a parameter of a call.

        Raises ``UnsupportedParameter``: the model has no boards, and no upstream of it can.
        """
        of = self._of.get(model, [])
        refused = {link.key: exc for link in of if (exc := _refusal(link, call, policy))}
        if model in self.alone and len(refused) == len(of):
            raise next(iter(refused.values()))
        return tuple(refused)

    def enter(self, completion: str, model: str, call: AnyCall) -> None:
        """Keep the conversation of a call until ``leave``, if an upstream may get it."""
        if model in self._of:
            self.calls[completion] = call

    def leave(self, completion: str) -> None:
        """Forget a call; idempotent."""
        self.calls.pop(completion, None)

    def infos(self) -> list[GenerationInfo]:
        """Return this Router's generations at upstreams, which no other Router knows."""
        return [info for link in self.links.values() for info in link.infos()]

    def control(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> RouterGenerations:
        """Abort the choices of a generation at upstreams; other actions are refused."""
        found = [
            info for link in self.links.values() for info in link.stop(generation, action, choice)
        ]
        if action is ControlAction.ABORT:
            return RouterGenerations(done=tuple(found), known=bool(found))
        return RouterGenerations(refused=tuple(found), known=bool(found))

    def cut(self, replica: str, request_id: str) -> bool:
        """Abort a generation; return False if no upstream with that address has it."""
        link = self._by_key.get(replica)
        return link is not None and link.cut(request_id)

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(link.aclose() for link in self.links.values()))


def _refusal(
    link: UpstreamLink, call: AnyCall, policy: VersionPolicy
) -> UnsupportedParameter | None:
    if policy is not ANY:
        return UnsupportedParameter(
            f"Unsupported parameter: '{POLICY}' is about versions of weights, which the upstream "
            f"{link.name} does not tell.",
            POLICY,
        )
    return refusal(call, link.config, link.name, alone=link.alone)


def open_upstreams(
    groups: Iterable[BoardGroupConfig],
    metrics: UpstreamMetrics,
    *,
    environ: Mapping[str, str],
    models: Collection[str] = (),
    routers: int = 1,
    desired: Callable[[], Desired] = Desired,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Upstreams:
    """Return the upstreams of these groups, with their keys.

    Args:
        groups: those with ``upstream``.
        metrics: the Router's.
        environ: has the variables of ``key_env``.
        models: those that have boards.
        routers: the number of Routers, which share the requests at once.
        desired: returns the desired state.
        transport: replaces the network, in tests.

    Raises:
        ConfigError: a key is not there.
    """
    calls: dict[str, AnyCall] = {}
    upstreams = [(group, group.upstream) for group in groups if group.upstream is not None]
    if not upstreams:
        return Upstreams({}, calls)

    from rkserve.router.upstreams.link import UpstreamLink

    links = {
        group.name: UpstreamLink(
            group.name,
            group.model_id,
            upstream,
            calls,
            metrics,
            secret=read_key(group.name, upstream, environ),
            places=max(1, upstream.concurrency // routers),
            queue_limit=group.queue_limit,
            alone=group.model_id not in models,
            desired=desired,
            transport=transport,
        )
        for group, upstream in upstreams
    }
    return Upstreams(links, calls)


def read_key(name: str, config: UpstreamConfig, environ: Mapping[str, str]) -> str | None:
    """Return the key of an upstream, None if it needs none. Raises ``ConfigError``."""
    if config.key_env is not None:
        found = environ.get(config.key_env, "").strip()
        where = f"the environment variable {config.key_env}"
    elif config.key_file is not None:
        where = f"the file {config.key_file}"
        try:
            lines = config.key_file.expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"The key of the upstream {name}: {where} cannot be read.") from exc
        used = (line.strip() for line in lines)
        found = next((line for line in used if line and not line.startswith("#")), "")
    else:
        return None
    if not found:
        raise ConfigError(f"The key of the upstream {name}: {where} has none.")
    if not (found.isascii() and found.isprintable()) or " " in found:
        raise ConfigError(f"The key of the upstream {name}: {where} has one that no header takes.")
    return found
