"""Finds a `multipleOf` in a JSON schema that would take too long to compile.

llguidance looks through the remainders for one that leads to an end, and nothing limits it: 10⁶ of
them take 14 s and 0.4 GB, 10⁸ more than a machine has. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

__all__ = ["MOST_REMAINDERS", "json_at", "large_multiple"]

MOST_REMAINDERS: Final = 1 << 16
"""About half a second of compiling."""
_MOST_ROUND: Final = 99
"""The search is short for a number below a hundred times a power of ten, however high."""
_COMBINING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties"})
"""Where one of these stands, a value may have to be a multiple of several numbers."""
_FAR: Final = 20
"""Decimal places, before and behind the point, beyond which llguidance refuses a number."""


def json_at(text: str) -> Any:
    """The JSON value with which a text begins, numbers as Decimal; None where there is none."""
    decoder = json.JSONDecoder(parse_float=Decimal, parse_int=Decimal)
    try:
        return decoder.raw_decode(text.lstrip())[0]
    except (ValueError, RecursionError):
        return None


def large_multiple(schema: Any) -> Decimal | None:
    """A number of which an output would have to be a multiple, with too many remainders; None
    where all are fine.

    Args:
        schema: as `json_at` reads it.
    """
    names: set[str] = set()
    multiples: list[Decimal] = []
    for name, value in _members(schema):
        names.add(name)
        if name == "multipleOf" and isinstance(value, Decimal) and value > 0:
            multiples.append(value.normalize())
    together = Decimal(1)
    for multiple in multiples:
        if _has_too_many(multiple):
            return multiple
        if names & _COMBINING and not _is_far(multiple):
            together = _common(together, multiple)
            if _has_too_many(together):
                return together
    return None


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of all objects inside, without recursion."""
    level = [value]
    while level:
        item = level.pop()
        if isinstance(item, dict):
            yield from item.items()
            level += item.values()
        elif isinstance(item, list):
            level += item


def _has_too_many(multiple: Decimal) -> bool:
    digits, exponent = _parts(multiple)
    if digits <= _MOST_ROUND:
        return False
    return digits > MOST_REMAINDERS or digits * 10 ** min(max(exponent, 0), _FAR) > MOST_REMAINDERS


def _is_far(multiple: Decimal) -> bool:
    return abs(_parts(multiple)[1]) > _FAR or abs(multiple.adjusted()) > _FAR


def _common(one: Decimal, other: Decimal) -> Decimal:
    """The least common multiple; both are not far."""
    scale = min(_parts(one)[1], _parts(other)[1])
    both = (digits * 10 ** (exponent - scale) for digits, exponent in map(_parts, (one, other)))
    return Decimal((0, tuple(map(int, str(math.lcm(*both)))), scale)).normalize()


def _parts(number: Decimal) -> tuple[int, int]:
    """Digits as a whole number, and the power of ten that it is to be multiplied by."""
    _, digits, exponent = number.as_tuple()
    return int("".join(map(str, digits[: 2 * _FAR]))), int(exponent)
