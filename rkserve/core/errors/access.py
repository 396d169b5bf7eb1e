"""Errors of access control: keys, scopes, and web pages of other origins."""

from __future__ import annotations

from rkserve.core.errors.requests import RequestError, RkserveError


class Forbidden(RequestError):
    """The caller's key does not have the scope of the call, or the call needs a key or this
    machine.
    """

    http_status = 403
    code = "forbidden"


class ModelNotAllowed(Forbidden):
    """The caller's key is for other models."""

    code = "model_not_allowed"
    sentence = "The key '{key}' is for other models than '{model}'. GET /v1/models lists its own."

    def __init__(self, key: str, model: str) -> None:
        RkserveError.__init__(self, key, model)
        self.key, self.model, self.param = key, model[:80], "model"


class ControlPortOnly(Forbidden):
    """The call is one of operators, which have a port of their own. Its address is not shown: it
    may be open to this machine alone.
    """

    code = "control_port_only"
    sentence = (
        "This service answers this call at its control port alone, as it does every call that "
        "needs another scope than 'infer'. `rkserve` on the head finds that port; elsewhere the "
        "operator knows its URL (RKSERVE_URL or --url)."
    )

    def __init__(self) -> None:
        RkserveError.__init__(self)


class HaproxyBypassed(Forbidden):
    """The request came to a Router, or to Serve's own proxy, beside HAProxy."""

    code = "haproxy_bypassed"
    sentence = (
        "This port takes requests from the cluster's own HAProxy alone. Send them to the port of "
        "the endpoint (http_options.port)."
    )

    def __init__(self) -> None:
        RkserveError.__init__(self)


class OriginNotAllowed(Forbidden):
    """A web page of another origin made the request."""

    code = "origin_not_allowed"

    def __init__(self, origin: str | None) -> None:
        RkserveError.__init__(self, origin)
        self.origin = origin

    @property
    def message(self) -> str:
        """The sentence for the user."""
        page = "another site" if self.origin is None else f"'{self.origin[:80]}'"
        return (
            f"Requests by web pages of {page} are refused. To allow them, add the page's origin to "
            "router.allowed_origins in serve_config.yaml."
        )


class InvalidApiKey(RequestError):
    """The call needs a key, and the given one is unknown, revoked or expired."""

    http_status = 401
    code = "invalid_api_key"


class TooManyWrongKeys(RkserveError):
    """An address has sent too many wrong keys within a minute; right keys from it still work."""

    http_status = 429
    kind = "rate_limit_error"
    code = "too_many_wrong_keys"
    sentence = (
        "This address has sent {limit} wrong keys within a minute, which is the limit. "
        "Try again in {retry_after_s} s."
    )

    def __init__(self, limit: int, retry_after_s: int) -> None:
        super().__init__(limit, retry_after_s)
        self.limit, self.retry_after_s = limit, retry_after_s


class KeysUnknown(RkserveError):
    """This Router has started while the Coordinator is away, and does not know the cluster's keys
    yet.
    """

    http_status = 503
    code = "keys_unknown"
    retry_after_s = 3
    sentence = "This Router has not received the cluster's keys yet. Try again in 3 s."


class KeyNotFound(RequestError):
    """No key has that ID."""

    http_status = 404
    code = "key_not_found"
    sentence = "There is no key '{key}'. GET /v1/keys lists those that there are."

    def __init__(self, key: str) -> None:
        RkserveError.__init__(self, key)
        self.key, self.param = key[:80], "key_id"


class KeyExists(RequestError):
    """Another key has that name."""

    http_status = 409
    code = "key_exists"
    sentence = "There is a key with the name '{name}' already. Rotate it, or choose another name."

    def __init__(self, name: str) -> None:
        RkserveError.__init__(self, name)
        self.name, self.param = name[:80], "name"
