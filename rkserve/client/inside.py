"""The calls that look into boards and answers: generations, KV caches, prompt caches, boards.

Both clients have them. What changes something has no idempotency key, and is sent once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rkserve.client import answers
from rkserve.client.calls import Names, Request
from rkserve.client.running import AsyncRuns, Runs

BUILD_S = 300.0  # a prompt cache takes the prefill of its whole prompt


def given(**params: Any) -> dict[str, Any]:
    """Return the parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}


def joined(names: Names | None) -> str | None:
    """Return names as a query has them."""
    return names if names is None or isinstance(names, str) else ",".join(names)


def control_path(generation: str, *rest: str) -> str:
    """Return the path of a generation."""
    return "/".join(["/v1/generations", quote(generation, safe=""), *rest])


def cache_path(model: str, *rest: str) -> str:
    """Return the path of a model's prompt caches."""
    return "/".join(["/v1/cache", *(quote(part, safe="") for part in (model, *rest))])


def control(generation: str, action: str, **params: Any) -> Request:
    """Control one generation."""
    return Request("POST", control_path(generation, action), body=given(**params))


def clear(
    model: str | None,
    boards: Names | None,
    *,
    generation: str | None,
    ranges: Sequence[tuple[int, int]] | None,
    everything: bool,
    keep_system_prompt: bool | None,
) -> Request:
    """Clear KV caches."""
    body = given(
        model=model,
        boards=[boards] if isinstance(boards, str) else boards and list(boards),
        generation=generation,
        ranges=ranges and [list(one) for one in ranges],
        all=everything or None,
        keep_system_prompt=keep_system_prompt,
    )
    return Request("POST", "/v1/cache/kv/clear", body=body)


def build(
    model: str, name: str, prompt: str | None, messages: Sequence[Mapping[str, Any]] | None
) -> Request:
    """Build a prompt cache."""
    told = None if messages is None else [dict(one) for one in messages]
    body = given(cache_name=name, prompt=prompt, messages=told)
    return Request("POST", cache_path(model), body=body, read_s=BUILD_S)


class InsideCalls(Runs):
    """The work and the caches of boards."""

    def board(self, board: str) -> dict[str, Any]:
        """Return what one board says of itself."""
        return self._ask(f"/v1/boards/{quote(board)}", dict)

    def generations(self) -> list[dict[str, Any]]:
        """Return what runs, waits or is paused now."""
        return self._ask("/v1/generations", answers.rows)

    def generation(self, generation: str) -> dict[str, Any]:
        """Return one generation, with what it has generated."""
        return self._ask(control_path(generation), dict)

    def pause_generation(self, generation: str, choice: int | None = None) -> dict[str, Any]:
        """Pause a generation, or one of its choices; returns when nothing more of it comes."""
        return self._tell(control(generation, "pause", choice=choice))

    def edit_generation(
        self,
        generation: str,
        *,
        choice: int | None = None,
        replace_last: int | None = None,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        role: str | None = None,
        clear: Sequence[tuple[int, int]] | None = None,
    ) -> dict[str, Any]:
        """Change a paused generation: drop its last tokens, append a text or token ids."""
        return self._tell(
            control(
                generation,
                "edit",
                choice=choice,
                replace_last=replace_last,
                text=text,
                token_ids=token_ids,
                role=role,
                clear=clear,
            )
        )

    def resume_generation(self, generation: str, choice: int | None = None) -> dict[str, Any]:
        """Let a paused generation go on."""
        return self._tell(control(generation, "resume", choice=choice))

    def abort_generation(self, generation: str, choice: int | None = None) -> dict[str, Any]:
        """End a generation, whatever it does; its client gets what there is."""
        return self._tell(control(generation, "abort", choice=choice))

    def kv_size(self, *, model: str | None = None, boards: Names | None = None) -> dict[str, Any]:
        """Return what the KV caches hold, by board and together."""
        return self._ask("/v1/cache/kv/size", dict, model=model, boards=joined(boards))

    def clear_kv(
        self,
        *,
        model: str | None = None,
        boards: Names | None = None,
        generation: str | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        everything: bool = False,
        keep_system_prompt: bool | None = None,
    ) -> dict[str, Any]:
        """Clear KV caches of a model, of boards, or of everything; the system prompt stays.

        With ``generation`` and ``ranges`` clear positions of one paused answer's context.
        """
        return self._tell(
            clear(
                model,
                boards,
                generation=generation,
                ranges=ranges,
                everything=everything,
                keep_system_prompt=keep_system_prompt,
            )
        )

    def caches(self, model: str) -> list[dict[str, Any]]:
        """Return the prompt caches of a model, by board."""
        return self._ask(cache_path(model), answers.rows)

    def build_cache(
        self,
        model: str,
        name: str,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Build a prompt cache on every board of a model, of a prompt or of messages."""
        return self._tell(build(model, name, prompt, messages))

    def delete_cache(self, model: str, name: str) -> dict[str, Any]:
        """Delete a prompt cache wherever it is."""
        return self._tell(Request("DELETE", cache_path(model, name)))


class AsyncInsideCalls(AsyncRuns):
    """The work and the caches of boards."""

    async def board(self, board: str) -> dict[str, Any]:
        """Return what one board says of itself."""
        return await self._ask(f"/v1/boards/{quote(board)}", dict)

    async def generations(self) -> list[dict[str, Any]]:
        """Return what runs, waits or is paused now."""
        return await self._ask("/v1/generations", answers.rows)

    async def generation(self, generation: str) -> dict[str, Any]:
        """Return one generation, with what it has generated."""
        return await self._ask(control_path(generation), dict)

    async def pause_generation(self, generation: str, choice: int | None = None) -> dict[str, Any]:
        """Pause a generation, or one of its choices; returns when nothing more of it comes."""
        return await self._tell(control(generation, "pause", choice=choice))

    async def edit_generation(
        self,
        generation: str,
        *,
        choice: int | None = None,
        replace_last: int | None = None,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        role: str | None = None,
        clear: Sequence[tuple[int, int]] | None = None,
    ) -> dict[str, Any]:
        """Change a paused generation: drop its last tokens, append a text or token ids."""
        return await self._tell(
            control(
                generation,
                "edit",
                choice=choice,
                replace_last=replace_last,
                text=text,
                token_ids=token_ids,
                role=role,
                clear=clear,
            )
        )

    async def resume_generation(self, generation: str, choice: int | None = None) -> dict[str, Any]:
        """Let a paused generation go on."""
        return await self._tell(control(generation, "resume", choice=choice))

    async def abort_generation(self, generation: str, choice: int | None = None) -> dict[str, Any]:
        """End a generation, whatever it does; its client gets what there is."""
        return await self._tell(control(generation, "abort", choice=choice))

    async def kv_size(
        self, *, model: str | None = None, boards: Names | None = None
    ) -> dict[str, Any]:
        """Return what the KV caches hold, by board and together."""
        return await self._ask("/v1/cache/kv/size", dict, model=model, boards=joined(boards))

    async def clear_kv(
        self,
        *,
        model: str | None = None,
        boards: Names | None = None,
        generation: str | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        everything: bool = False,
        keep_system_prompt: bool | None = None,
    ) -> dict[str, Any]:
        """Clear KV caches of a model, of boards, or of everything; the system prompt stays.

        With ``generation`` and ``ranges`` clear positions of one paused answer's context.
        """
        return await self._tell(
            clear(
                model,
                boards,
                generation=generation,
                ranges=ranges,
                everything=everything,
                keep_system_prompt=keep_system_prompt,
            )
        )

    async def caches(self, model: str) -> list[dict[str, Any]]:
        """Return the prompt caches of a model, by board."""
        return await self._ask(cache_path(model), answers.rows)

    async def build_cache(
        self,
        model: str,
        name: str,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Build a prompt cache on every board of a model, of a prompt or of messages."""
        return await self._tell(build(model, name, prompt, messages))

    async def delete_cache(self, model: str, name: str) -> dict[str, Any]:
        """Delete a prompt cache wherever it is."""
        return await self._tell(Request("DELETE", cache_path(model, name)))
