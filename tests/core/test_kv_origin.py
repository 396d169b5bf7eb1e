"""Origins: under what positions of a KV cache were computed."""

from __future__ import annotations

import itertools

from rkserve.core.kv_origin import adapter_of, origin_of, salted
from rkserve.core.messages import AdapterRef

ADAPTERS = (None, AdapterRef("kind", "1", "1" * 64).key, AdapterRef("kind", "1", "1" * 64, 1e9).key)
SALTS = ("", salted("a"), salted("b"), salted(""), salted("\ud800"))


def test_two_of_them_agree_only_where_adapter_and_salt_do() -> None:
    pairs = list(itertools.product(ADAPTERS, SALTS))
    assert len({origin_of(*pair) for pair in pairs}) == len(pairs)


def test_an_origin_tells_its_adapter_and_without_a_salt_is_its_key() -> None:
    for adapter, salt in itertools.product(ADAPTERS, SALTS):
        assert adapter_of(origin_of(adapter, salt)) == adapter
    assert [origin_of(adapter) for adapter in ADAPTERS] == [*ADAPTERS]


def test_what_stands_for_a_salt_does_not_show_it() -> None:
    assert "tenant" not in salted("tenant")
    assert salted("tenant") == salted("tenant")
