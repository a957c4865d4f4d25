"""Checks of the sampling parameters that need one of their own; see checks.py for their form."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from pilotfish_broker.checks import MAX_TOKEN_ID, items, number, shown, text, token_id, whole
from pilotfish_broker.errors import InvalidRequest

MIN_TEMPERATURE = 1e-3  # logits of any model, divided by it, are far from the end of float32
MAX_TEMPERATURE = 100.0
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD = 1024  # characters, or token ids
MAX_STRUCTURE_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 128  # what reads it on workers may be recursive
MAX_ID_DIGITS = len(str(MAX_TOKEN_ID))


def temperature(name: str, value: Any) -> float:
    """0, or what logits can be divided by."""
    checked = number(name, value, 0.0, MAX_TEMPERATURE)
    if 0 < checked < MIN_TEMPERATURE:
        raise InvalidRequest(
            f"{name} {checked:g} is too low to divide by: use 0 for the most likely token, or "
            f"{MIN_TEMPERATURE:g} at least",
            field=name,
        )
    return checked


def top_k(name: str, value: Any) -> int:
    """How many tokens; -1 means all as well as 0 does."""
    return max(0, whole(name, value, -1, MAX_TOKEN_ID))


def logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """A mapping of token ids (or their digits, as in JSON) to biases, or such pairs; as pairs in
    ascending order of ids."""
    what = "token ids to numbers"
    if isinstance(value, Mapping):
        value = list(value.items())
    elif not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name} must map {what}, not be {shown(value)}", field=name)
    biases: dict[int, float] = {}
    for pair in items(name, value, MAX_BIASES, "pairs"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InvalidRequest(f"{name} must map {what}; {shown(pair)} is no pair", field=name)
        token = _biased_token(name, pair[0])
        if token in biases:
            raise InvalidRequest(f"{name} has the token id {token} twice", field=name)
        biases[token] = number(name, pair[1], -MAX_BIAS, MAX_BIAS)
    return tuple(sorted(biases.items()))


def bad_words(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Texts and lists of token ids, none of them empty; each once."""
    words: dict[str | tuple[int, ...], None] = {}
    for item in items(name, value, MAX_BAD_WORDS, "texts or of lists of token ids"):
        if isinstance(item, list | tuple):
            ids = items(name, item, MAX_BAD_WORD, "token ids")
            if not ids:
                raise InvalidRequest(f"{name} holds an empty list; leave it out", field=name)
            words[tuple(token_id(name, token) for token in ids)] = None
        else:
            words[text(name, item, MAX_BAD_WORD)] = None
    return tuple(words)


def stop(name: str, value: Any) -> tuple[str, ...]:
    """A text or a list of texts, each once."""
    listed = [value] if isinstance(value, str) else items(name, value, MAX_STOPS, "texts")
    return tuple(dict.fromkeys(text(name, item, MAX_STOP_CHARACTERS) for item in listed))


def structure(name: str, value: Any) -> str:
    """The text of an expression or a grammar; whether it is one is for a worker to say."""
    checked = text(name, value, MAX_STRUCTURE_BYTES)
    if len(checked.encode()) > MAX_STRUCTURE_BYTES:
        raise _too_large(name)
    return checked


def json_schema(name: str, value: Any) -> str:
    """A JSON schema, as JSON text or as what that stands for; as text without blanks, its keys in
    the order given, which is the order of the output's keys."""
    if isinstance(value, str) and len(value) > MAX_STRUCTURE_BYTES:
        raise _too_large(name)
    if not isinstance(value, str | Mapping | bool):
        raise InvalidRequest(
            f"{name} must be a JSON schema (an object, true or false), not {shown(value)}",
            field=name,
        )
    try:
        # by way of text in any case: a mapping may have keys that are the same in JSON
        given = value if isinstance(value, str) else _dumped(value)
        parsed = json.loads(given)
        written = _dumped(parsed)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{name} is no valid JSON: {error}", field=name) from None
    if not isinstance(parsed, dict | bool):
        raise InvalidRequest(
            f"{name} must be a JSON object, true or false, not {shown(parsed)}", field=name
        )
    if _depth(parsed) > MAX_SCHEMA_DEPTH:
        raise InvalidRequest(f"{name} is nested deeper than {MAX_SCHEMA_DEPTH}", field=name)
    return structure(name, written)


def speculation(name: str, value: Any, most: int) -> str | int:
    """Who chooses the number of drafted tokens, or the number."""
    if not isinstance(value, str):
        return whole(name, value, 1, most)
    if value not in ("auto", "off"):
        raise InvalidRequest(
            f"{name} must be 'auto', 'off' or a number, not {shown(value)}", field=name
        )
    return value


def _biased_token(name: str, value: Any) -> int:
    """A token id, or its digits, since keys in JSON are texts."""
    is_digits = isinstance(value, str) and value.isascii() and value.isdigit()
    if is_digits and len(value) <= MAX_ID_DIGITS:
        value = int(value)
    return token_id(name, value)


def _dumped(value: Any) -> str:
    return json.dumps(
        dict(value) if isinstance(value, Mapping) else value,
        ensure_ascii=False,
        allow_nan=False,
        separators=(",", ":"),
    )


def _depth(value: Any) -> int:
    """Levels of a parsed JSON value, without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [child for item in level for child in _children(item)]
    return depth


def _children(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_large(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is larger than {MAX_STRUCTURE_BYTES >> 10} KiB", field=name)
