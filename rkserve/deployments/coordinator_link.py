"""The way to the Coordinator over Ray; only here its exceptions there become ours."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from rkserve.core.errors import CoordinatorAway, RkserveError

log = logging.getLogger(__name__)


class RayHeadLink:
    """``HeadLink`` over Ray's handle of the Coordinator's deployment."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of the Coordinator; see ``HeadLink``."""
        # In a context of its own: a client that hangs up must not cancel what the call began.
        remote = getattr(self._handle, method).remote
        response = contextvars.Context().run(remote, *args)

        async def answer() -> Any:
            return await response

        done = False
        try:
            said = await asyncio.wait_for(answer(), timeout_s)
            done = True
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise CoordinatorAway(
                f"The Coordinator did not answer '{method}' within {timeout_s:g} s."
            ) from None
        except RayTaskError as exc:
            done = True
            if isinstance(exc.cause, RkserveError):
                raise exc.cause from None
            log.exception("the Coordinator raised what it should not")
            raise CoordinatorAway("The Coordinator failed; its log says why.") from exc
        except (RayError, RayServeException) as exc:
            raise CoordinatorAway(
                f"The Coordinator cannot be reached ({type(exc).__name__}); GET /v1/operations "
                "tells later what became of the call."
            ) from exc
        else:
            return said
        finally:
            if not done:
                # A call that waits must not be left to wait for nobody; one that changes the
                # cluster is the Coordinator's own task, which a cancelled call does not end.
                with contextlib.suppress(RayError, RayServeException):
                    response.cancel()
