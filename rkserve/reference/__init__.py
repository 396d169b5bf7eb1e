"""What the Router answers over HTTP, declared: every endpoint, its bodies, statuses and an example.

``document`` makes OpenAPI of it, and ``page`` a reference in Markdown. It knows shapes and words,
and neither routes nor how anything is answered; tests hold the two together.
"""
