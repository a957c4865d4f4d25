"""Checks of a request's values, at submit.

Every check takes a field's name and its value and returns the value as it is stored, one form for
each meaning, so that equal requests are written alike; what it cannot use raises
:class:`~pilotfish_broker.errors.InvalidRequest` with that field. True and false are no numbers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from pilotfish_broker.errors import InvalidRequest

Check = Callable[[str, Any], Any]

MAX_TOKEN_ID = (1 << 31) - 1
MAX_IDS = 1 << 18


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {shown(value)}", field=name)
    if not low <= value <= high:
        raise InvalidRequest(
            f"{name} must lie between {low} and {high}, not {shown(value)}", field=name
        )
    return int(value)


def number(name: str, value: Any, low: float, high: float, *, is_open: bool = False) -> float:
    """A number from `low`, or where `is_open` above it, to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, not {shown(value)}", field=name)
    # NaN compares as neither
    if not ((low < value if is_open else low <= value) and value <= high):
        limits = f"be above {low:g} and at most" if is_open else f"lie between {low:g} and"
        raise InvalidRequest(f"{name} must {limits} {high:g}, not {shown(value)}", field=name)
    return float(value) + 0.0  # makes 0.0 of -0.0


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, not {shown(value)}", field=name)
    return value


def text(name: str, value: Any, most: int) -> str:
    """A valid text of 1 to `most` characters."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a text, not {shown(value)}", field=name)
    if not value:
        raise InvalidRequest(f"{name} holds an empty text; leave it out", field=name)
    if len(value) > most:
        raise InvalidRequest(
            f"{name} holds a text of {len(value)} characters; {most} are the most", field=name
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{name} holds half of a character pair and is no valid text", field=name
        ) from None
    return value


def items(name: str, value: Any, most: int, what: str) -> list[Any]:
    """At most `most` items of a list; `what` says which, for the message."""
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name} must be a list of {what}, not {shown(value)}", field=name)
    if len(value) > most:
        raise InvalidRequest(f"{name} has {len(value)} entries; {most} are the most", field=name)
    return list(value)


def token_id(name: str, value: Any) -> int:
    """One token id, of whatever model."""
    return whole(name, value, 0, MAX_TOKEN_ID)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A set of token ids, in ascending order."""
    listed = items(name, value, MAX_IDS, "token ids")
    return tuple(sorted({token_id(name, item) for item in listed}))


def some_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The same, and not empty."""
    if not (ids := token_ids(name, value)):
        raise InvalidRequest(
            f"{name} is empty, so that no token could come; leave it out to allow all", field=name
        )
    return ids


def optional(check: Check) -> Check:
    """A check that None passes."""
    return lambda name, value: None if value is None else check(name, value)


def one_of(name: str, value: Any, words: tuple[str, ...]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in words:
        raise InvalidRequest(
            f"{name} must be one of {', '.join(words)}, not {shown(value)}", field=name
        )
    return value


def shown(value: Any) -> str:
    """A value as a message shows it, however large it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # whole numbers beyond some thousand digits have no decimal form
        return "a number of thousands of digits"
