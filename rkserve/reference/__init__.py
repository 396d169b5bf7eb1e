"""Declarations of the HTTP API: every endpoint, its bodies, statuses and an example.

``document`` makes the OpenAPI document from them, ``page`` the reference in Markdown. Tests compare
them with the routes and their answers.
"""
