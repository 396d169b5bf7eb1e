"""Calls for the head's catalogue: uploads of models in pieces, the list with their copies, and
fetches by boards before a model is deployed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from rkserve.api.admin.catalog import (
    CatalogAnswer,
    NodeCopy,
    PieceQuery,
    PrefetchAnswer,
    PrefetchBody,
    PushBody,
    UploadAnswer,
    VersionQuery,
    copies,
    node_copy,
    upload_answer,
)
from rkserve.api.admin.query import ControlRequest
from rkserve.core.board_report import BoardReport, CopyState, ModelCopy
from rkserve.core.errors import BoardFailed, RkserveError
from rkserve.fleet.board_table import BoardAddress
from rkserve.router.features.weights import require_admin
from rkserve.router.service import Service

PREFETCH_S = 10.0  # a board answers at once, and goes on by itself
ANY_SOC = ("", "any")
UNFIT = "unfit"


class Catalog:
    """The models of the head that boards fetch."""

    def __init__(self, service: Service) -> None:
        self._cluster = service.cluster
        self._fleet = service.fleet

    async def listed(self) -> CatalogAnswer:
        """List the models of the catalogue, and the boards that have or fetch them."""
        return {
            "models": [
                {
                    "name": name,
                    "version": version,
                    "bytes": size,
                    "copies": copies(self._fleet.reports(name)),
                }
                for name, version, size in await self._cluster.catalog_models()
            ]
        }

    async def begin(self, asked: ControlRequest) -> UploadAnswer:
        """Begin an upload, or resume one."""
        push = asked.read(PushBody)
        require_admin(asked, older=push.allow_older)
        index, claim = push.index(), push.claim(asked.who)
        return upload_answer(await self._cluster.catalog_upload(index, push.replace, claim))

    async def piece(self, asked: ControlRequest, name: str, data: bytes) -> int:
        """Write a piece; return the bytes that are there."""
        at = asked.read(PieceQuery)
        return await self._cluster.catalog_piece(name, at.version, at.path, at.number, data)

    async def end(self, asked: ControlRequest, name: str) -> UploadAnswer:
        """Publish an upload."""
        version = asked.read(VersionQuery).version
        return upload_answer(await self._cluster.catalog_end(name, version))

    async def prefetch(self, asked: ControlRequest, name: str) -> PrefetchAnswer:
        """Have a board of each node fetch a model, and return how far each is."""
        again = asked.read(PrefetchBody).again
        platform, limit = await self._cluster.catalog_target(name)
        addresses = self._fleet.addresses(fetching=True)
        known = ((one, self._fleet.report_of(one)) for one in addresses if not one.upstream)
        chosen = one_per_node((one, report) for one, report in known if report is not None)
        rows, nodes, fitting = list[NodeCopy](), dict[str, str](), list[BoardAddress]()
        for node, (address, report) in chosen.items():
            nodes[address.board_id] = node
            soc = "" if report.hardware is None else report.hardware.soc
            if fits(platform, soc):
                fitting.append(address)
            else:
                reason = f"the model is for {platform}, and this is {soc}"
                rows.append(node_copy(address.board_id, node, _failed(reason), UNFIT))
        answers = await self._fleet.ask(
            fitting, "prefetch_model", name, limit, again, timeout_s=PREFETCH_S
        )
        failed = {board: _failed(_reason(error)) for board, error in answers.failed.items()}
        for board, copy in (answers.found | failed).items():
            rows.append(node_copy(board, nodes[board], copy))
        rows += _without_process(self._fleet.reports(), chosen)
        return {"name": name, "boards": sorted(rows, key=lambda row: row["board"])}


def one_per_node(
    boards: Iterable[tuple[BoardAddress, BoardReport]],
) -> dict[str, tuple[BoardAddress, BoardReport]]:
    """Return the board that fetches for each node: the first by name of those that answer."""
    found: dict[str, tuple[BoardAddress, BoardReport]] = {}
    for address, report in sorted(boards, key=lambda one: (one[0].silent, one[0].board_id)):
        found.setdefault(report.node, (address, report))
    return found


def fits(platform: str, soc: str) -> bool:
    """Return whether a model's SoC is, as far as both are known, a board's or a revision of it."""
    return platform in ANY_SOC or not soc or soc.upper().startswith(platform.upper())


def _reason(error: RkserveError) -> str:
    return error.reason if isinstance(error, BoardFailed) else str(error)


def _failed(reason: str) -> ModelCopy:
    return ModelCopy(CopyState.FAILED, reason=reason)


def _without_process(reports: Iterable[BoardReport], nodes: Collection[str]) -> Iterator[NodeCopy]:
    """Yield the boards that cannot start, on nodes without another board."""
    for one in reports:
        node = one.board_id.partition("@")[2]
        if not one.replica and node and node not in nodes:
            yield node_copy(one.board_id, node, _failed(f"the board cannot start: {one.reason}"))
