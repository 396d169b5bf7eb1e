"""JSON schemas of rising nastiness, the same ones for the same seed: the first are harmless.

They are what clients send by habit, by mistake and on purpose: deep, wide, recursive,
contradictory, of wrong types, with keywords that no grammar has.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Json = Any
HOSTILE = 6
_KEYS = (
    *("a", "b", "name", "id", "c d", "über", "日本", 'q"t', "back\\slash", "\N{OCTOPUS}"),
    *("new\nline", "", "$ref", "x-guidance", "<|im_end|>", "a/b~c%", "__proto__", "k" * 60),
)
_WORDS = (*_KEYS, "1", "null", " ", "\t", "\u2028", "é́", "-0")
_PATTERNS = (
    *("^[a-z]{1,5}$", "a+b", "^(x|yy)*$", r"^\d{3}-\d{4}$", "^$", ".", r"^[^\s]{2,4}$"),
    *(r"\p{L}+", "(?=a)b", "[", "^(a|a)*$", r"^\w+@\w+\.org$", "(a{2,9}){2,9}", "^é?日$"),
)
_FORMATS = (
    *("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "duration"),
    *("regex", "nonsense", "idn-email", "json-pointer"),
)
_UNKNOWN = (
    *("not", "if", "uniqueItems", "contains", "dependentSchemas", "propertyNames"),
    *("unevaluatedProperties", "minProperties", "maxProperties", "$dynamicRef"),
)
_WRONG: tuple[tuple[str, Json], ...] = (
    *(("type", 5), ("type", "foo"), ("type", []), ("properties", []), ("required", "a")),
    *(("required", [1, None]), ("items", 7), ("enum", {}), ("enum", []), ("anyOf", {})),
    *(("anyOf", []), ("allOf", [5]), ("minimum", "3"), ("maximum", None), ("minLength", -1)),
    *(("maxLength", 1.5), ("pattern", 9), ("$ref", 9), ("$ref", "#/nowhere"), ("$defs", [])),
    *(
        ("const", float(1 << 70)),
        ("multipleOf", 0),
        ("multipleOf", -2),
        ("additionalProperties", 3),
    ),
    *(("patternProperties", {"[": {}}), ("format", []), ("prefixItems", {}), ("minItems", 1 << 40)),
)


class Maker:
    """Makes one schema; ``level`` is from 0 to 1."""

    def __init__(self, chance: random.Random, level: float) -> None:
        self._chance, self._level = chance, level
        self._defs = 0

    def schema(self) -> Json:
        """Return a whole one, with definitions where something refers to them."""
        root = self._node(1 + round(4 * self._level))
        if self._defs and isinstance(root, dict):
            root["$defs"] = {f"d{at}": self._node(1) for at in range(self._defs)}
        if isinstance(root, dict) and self._often(0.05):
            root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return root

    def _often(self, share: float) -> bool:
        return self._chance.random() < share * self._level

    def _node(self, depth: int) -> Json:
        if self._often(0.02):
            return self._chance.choice([True, False, {}])
        leaves: list[Callable[[int], Json]] = [self._text, self._number, self._enum, self._plain]
        inner: list[Callable[[int], Json]] = [self._object, self._object, self._array]
        if self._level > 0.2:
            inner += [self._either, self._all, self._reference]
        made = self._chance.choice(inner if depth > 0 and self._chance.random() < 0.8 else leaves)
        found = made(depth - 1)
        if self._often(0.06):
            key, value = self._chance.choice(_WRONG)
            found[key] = value
        if self._often(0.05):
            found[self._chance.choice(_UNKNOWN)] = self._chance.choice(
                [True, {}, {"type": "null"}, 2]
            )
        if self._often(0.05):
            found["x-guidance"] = {"lenient": True, "coerce_one_of": True}
        return found

    def _bounds(self, low: str, high: str, upto: int) -> dict[str, Json]:
        """Limits, some of which nothing satisfies."""
        first, second = sorted(self._chance.randint(0, upto) for _ in range(2))
        if self._often(0.15):
            first, second = second, first
        picked = {low: first, high: second}
        return {key: value for key, value in picked.items() if self._chance.random() < 0.6}

    def _text(self, _: int) -> Json:
        found: dict[str, Json] = {"type": "string", **self._bounds("minLength", "maxLength", 12)}
        if self._often(0.5):
            found["pattern"] = self._chance.choice(_PATTERNS)
        elif self._often(0.4):
            found["format"] = self._chance.choice(_FORMATS)
        return found

    def _number(self, _: int) -> Json:
        kind = self._chance.choice(["integer", "number"])
        low, high = self._chance.choice(
            [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")]
        )
        found = {"type": kind, **self._bounds(low, high, 1000)}
        if self._often(0.4):
            shift = self._chance.choice([-700, 0.25, -1e-7, 1e18])
            found = {key: value if key == "type" else value + shift for key, value in found.items()}
        if self._often(0.2):
            found["multipleOf"] = self._chance.choice([2, 5, 0.1, 7])
        return found

    def _plain(self, _: int) -> Json:
        kinds = ["null", "boolean", "integer", "string"]
        if self._often(0.3):
            return {"type": self._chance.sample(kinds, 2)}
        return {"type": self._chance.choice(kinds)}

    def _value(self) -> Json:
        return self._chance.choice(
            [1, 0, -1.5, 1e30, True, None, [], {}, [1, "x"], {"k": [None]}, *_WORDS]
        )

    def _enum(self, _: int) -> Json:
        if self._often(0.4):
            return {"const": self._value()}
        if self._often(0.1):
            return {"enum": [f"{self._chance.choice(_WORDS)}{number}" for number in range(800)]}
        return {"enum": [self._value() for _ in range(self._chance.randint(1, 6))]}

    def _object(self, depth: int) -> Json:
        wide = 30 if self._often(0.06) else 4
        keys = self._chance.choices(_KEYS, k=self._chance.randint(0, wide))
        if wide > 4:
            keys = [f"{key}{number}" for number, key in enumerate(keys)]
        found: dict[str, Json] = {
            "type": "object",
            "properties": {key: self._node(depth if wide == 4 else 0) for key in keys},
            "required": [key for key in dict.fromkeys(keys) if self._chance.random() < 0.5],
        }
        if self._chance.random() < 0.7:
            found["additionalProperties"] = False
        elif self._often(0.6):
            found["additionalProperties"] = self._node(depth)
        if self._often(0.15):
            pattern = self._chance.choice(["^x-", "[0-9]$", "^[a-z]$", *_PATTERNS])
            found["patternProperties"] = {pattern: self._node(depth)}
        if self._often(0.08):
            found["required"].append("not there")
        return found

    def _array(self, depth: int) -> Json:
        found: dict[str, Json] = {"type": "array", **self._bounds("minItems", "maxItems", 4)}
        if self._chance.random() < 0.8:
            found["items"] = self._node(depth)
        if self._often(0.2):
            found["prefixItems"] = [self._node(depth) for _ in range(self._chance.randint(1, 3))]
        return found

    def _either(self, depth: int) -> Json:
        name = self._chance.choice(["anyOf", "anyOf", "oneOf"])
        found: Json = {name: [self._node(depth) for _ in range(self._chance.randint(1, 4))]}
        if self._often(0.15):
            found["type"] = self._chance.choice(["object", "string"])
        return found

    def _all(self, depth: int) -> Json:
        return {"allOf": [self._node(depth) for _ in range(self._chance.randint(1, 3))]}

    def _reference(self, _: int) -> Json:
        if self._often(0.2):
            return {"$ref": self._chance.choice(["#", "#/properties/a", "https://x.invalid/s"])}
        self._defs = min(3, self._defs + 1)
        return {"$ref": f"#/$defs/d{self._chance.randrange(3 if self._often(0.1) else self._defs)}"}


def hostile(number: int) -> Json:
    """Return one that takes the compiler too long, too much memory, or has too many characters."""
    texts = [{"type": "string", "pattern": f"a{at}"} for at in range(200 + number)]
    nested: Json = {"type": "integer"}
    for _ in range(90):
        nested = {"anyOf": [nested]}
    kinds: list[Json] = [
        {"allOf": texts},
        nested,
        {"enum": ["x" * 60 + str(at) for at in range(2000)]},
    ]
    return kinds[number % len(kinds)]


def schemas(count: int, seed: int = 12) -> list[Json]:
    """Return them in the order of their nastiness; the last ones are hostile."""
    last = HOSTILE
    made = [Maker(random.Random(f"{seed}/{at}"), at / count).schema() for at in range(count - last)]
    return [*made, *(hostile(number) for number in range(last))]
