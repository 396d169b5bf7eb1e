"""Routes of the cluster's API keys."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve.api.admin import keys
from rkserve.api.json.schemas import Example
from rkserve.http.cluster_routes import ControlRoutes
from rkserve.http.openapi import ADMIN, CHANGE, KEY, returns
from rkserve.router.features.keys import ApiKeys
from rkserve.router.service import Service

KEYS = "/v1/keys"
ONE = f"{KEYS}/{{key_id}}"
ID = {"key_id": "The key's id."}
MADE = "a key of that id: `rkserve keys create` makes one"
SECRET = {"cache-control": "no-store"}


def add_keys(app: FastAPI, service: Service) -> None:
    """Add the routes to the application."""
    routes, made = ControlRoutes(app, service, "Keys"), ApiKeys(service)
    known = {"key_id": "key_0123456789abcdef"}

    @routes.route(
        f"POST {KEYS}",
        ADMIN,
        returns(keys.NewKeyAnswer, "The key; `value` is its secret, which is shown this once."),
        errors=CHANGE,
        headers=(KEY,),
        body=keys.KeyBody,
        example=Example({"name": "team-a", "scopes": ["infer"], "requests_per_minute": 60}),
    )
    async def create(request: Request) -> Response:
        """Make a key; when it is answered, all Routers but `routers_behind` take it."""
        return JSONResponse(await made.create(await routes.asked(request)), headers=SECRET)

    @routes.route(f"GET {KEYS}", ADMIN, returns(keys.KeysAnswer, "All keys."), errors=(503,))
    async def listed(request: Request) -> Response:
        """List the keys of the cluster, without secrets and without those of files."""
        await routes.asked(request, body=False)
        return JSONResponse(await made.listed())

    @routes.route(
        f"POST {ONE}/rotate",
        ADMIN,
        returns(keys.NewKeyAnswer, "The key; `value` is its new secret."),
        errors=CHANGE,
        paths=ID,
        headers=(KEY,),
        body=keys.RotateBody,
        may_be_empty=True,
        example=Example({"grace_s": 3600}, path=known, needs=MADE),
        says="Name, scopes, limits and stored responses stay those of the key.",
    )
    async def rotate(request: Request, key_id: str) -> Response:
        """Give a key another secret."""
        asked = await routes.asked(request)
        return JSONResponse(await made.rotate(key_id, asked), headers=SECRET)

    @routes.route(
        f"DELETE {ONE}",
        ADMIN,
        returns(keys.KeyRevoked, "No Router but `routers_behind` takes it any more."),
        errors=CHANGE,
        paths=ID,
        headers=(KEY,),
        example=Example(path=known, needs=MADE),
        says="Requests that run go on to their end; streams of logs and of the cluster's view end.",
    )
    async def revoke(request: Request, key_id: str) -> Response:
        """Revoke a key."""
        asked = await routes.asked(request, body=False)
        return JSONResponse(await made.revoke(key_id, asked))
