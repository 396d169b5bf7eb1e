"""The routes of OpenAI's Responses API: answers, and those that are kept."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve.api.responses.answers import RESPONSES
from rkserve.api.responses.stored import check_lookup, deleted, read_page
from rkserve.http.auth import check_client
from rkserve.http.streaming import respond
from rkserve.router.auth.api_keys import ClientKey
from rkserve.router.service import Service
from rkserve.router.stored_responses.memory import Memory
from rkserve.router.stored_responses.store import Responses, owner_of

_ROUTE = "/v1/responses"


def add_responses(app: FastAPI, service: Service, responses: Responses) -> None:
    """Add the routes."""

    def owner(request: Request) -> str:
        return owner_of(check_client(request, service.keys), service.keys)

    def memory(client: ClientKey | None) -> Memory:
        return responses.memory(owner_of(client, service.keys))

    @app.post(_ROUTE)
    async def respond_to(request: Request) -> Response:
        """Answer a conversation as OpenAI's newer API does."""
        return await respond(service, request, RESPONSES, remember=memory)

    @app.get(f"{_ROUTE}/{{response_id}}")
    async def read(request: Request, response_id: str) -> JSONResponse:
        """Tell a response again."""
        whose = owner(request)
        check_lookup(request.query_params.multi_items())
        return JSONResponse((await responses.one(whose, response_id)).response)

    @app.get(f"{_ROUTE}/{{response_id}}/input_items")
    async def read_items(request: Request, response_id: str) -> JSONResponse:
        """List what a response was made of."""
        whose = owner(request)
        page = read_page(request.query_params.multi_items())
        last = await responses.one(whose, response_id)
        said = []
        if last.previous is not None:
            before = await responses.conversation(whose, last.previous, as_far=True)
            said = [item for one in before for item in one.said]
        return JSONResponse(page.of([*said, *last.items]))

    @app.delete(f"{_ROUTE}/{{response_id}}")
    async def delete(request: Request, response_id: str) -> JSONResponse:
        """Forget a response."""
        await responses.delete(owner(request), response_id)
        return JSONResponse(deleted(response_id))
