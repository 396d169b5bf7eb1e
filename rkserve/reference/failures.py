"""Error objects in the three dialects, and which statuses calls of a kind may end with.

The codes of a status are read from the error tree, so that the list is what can be raised.
"""

from __future__ import annotations

from collections.abc import Iterator

from rkserve.core.errors import BoardStartFailed, ConfigError, RkserveError
from rkserve.reference.shapes import TEXT, Schema, const, maybe, obj, said

_ABOUT = {
    400: "The request cannot be served as it was sent.",
    401: "The call needs an API key.",
    403: "The call needs the admin key, or has to come from the Router's own machine; or a web "
    "page of another origin made it.",
    404: "What the request names does not exist.",
    405: "The path has other methods.",
    408: "The body did not arrive in time.",
    409: "The state of things does not allow it; nothing was changed.",
    413: "The body is longer than the configured limit.",
    415: "The body is not JSON by its headers, or compressed.",
    421: "The request is addressed to a host name that is not in the allow-list.",
    422: "Boards failed while they worked on this request, and no other one is asked.",
    429: "Too much at once; `retry-after` says when to come back.",
    500: "A hook of the operator's failed while the answer was generated.",
    502: "The runtime refused or ended this run.",
    503: "Nobody can serve it now; `retry-after` says when to come back.",
    504: "It was not done in time.",
}
BODY = (400, 408, 413, 415)
# Of every call: requests by other sites' pages, and to other host names.
ANY = (403, 421)
CLIENT = (401,)
OPERATOR = (403,)
# Of calls that a board answers.
GENERATION = (*BODY, *CLIENT, 404, 409, 422, 429, 500, 502, 503, 504)
# Of calls that tokenize, or look something up by a body.
LOOKUP = (*BODY, *CLIENT, 404, 503)
# Of calls that ask boards about what they have.
ASK = (*CLIENT, 404, 503)
# Of calls that the Coordinator carries out.
CHANGE = (*BODY, *OPERATOR, 404, 409, 503, 504)

_CODE = said(maybe(TEXT), "What went wrong, in one word.")
_PARAM = said(maybe(TEXT), "The key at fault, where one is.")
_MESSAGE = said(TEXT, "One sentence for the person who reads it.")

SCHEMAS: dict[str, Schema] = {
    "Error": obj(
        {"error": obj({"message": _MESSAGE, "type": TEXT, "param": _PARAM, "code": _CODE})},
        about="OpenAI's error object. A change of the cluster that failed tells its operation too.",
    ),
    "AnthropicError": obj(
        {
            "type": const("error"),
            "error": obj({"type": TEXT, "message": _MESSAGE, "param": _PARAM, "code": _CODE}),
        },
        about="Anthropic's error object, with the parameter and the code beside it.",
    ),
    "OllamaError": obj(
        {"error": _MESSAGE, "param": _PARAM, "code": _CODE},
        about="Ollama's error object, with the parameter and the code beside it.",
    ),
}


def about(status: int) -> str:
    """Return the meaning of a status, with its codes."""
    codes = ", ".join(f"`{code}`" for code in codes_of(status))
    return f"{_ABOUT[status]} Codes: {codes}." if codes else _ABOUT[status]


def statuses() -> list[int]:
    """All statuses of errors."""
    return sorted(_ABOUT)


def codes_of(status: int) -> list[str]:
    """The codes that come with a status."""
    # Errors that prevent a start are no answers.
    tree = {*_tree(RkserveError)} - {BoardStartFailed, ConfigError}
    return sorted({one.code for one in tree if one.http_status == status and one.code})


def _tree(parent: type[RkserveError]) -> Iterator[type[RkserveError]]:
    yield parent
    for child in parent.__subclasses__():
        yield from _tree(child)
