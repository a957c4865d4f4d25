"""Log-probabilities of tokens, as they stand in a job's token stream.

In bytes: a msgpack array ``[version, [item, …]]``, an item ``[token id, log-probability, text,
[[token id, log-probability, text], …]]``: the token that stands there, then the most likely ones.
Texts are bytes, since a token may hold part of a character.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from pilotfish_broker.errors import DecodeError

LOGPROBS_VERSION = 1


@dataclass(frozen=True, slots=True)
class Alternative:
    """One token at a position.

    Attributes:
        logprob: natural logarithm of its probability by the model's own logits, before the
            chain; minus infinity where that is 0.
        text: its bytes; those of several tokens joined are UTF-8.
    """

    token_id: int
    logprob: float
    text: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """What is known of one position.

    Attributes:
        chosen: the token that stands there.
        top: the most likely ones, the likeliest first; `chosen` may be among them or not.
    """

    chosen: Alternative
    top: list[Alternative]


def pack_logprobs(items: Iterable[TokenLogprob]) -> bytes:
    """Positions one after another as bytes."""
    return join_positions(
        [pack_position(*_flat(item.chosen), list(map(_flat, item.top))) for item in items]
    )


def pack_position(
    token_id: int, logprob: float, text: bytes, top: Sequence[tuple[int, float, bytes]]
) -> bytes:
    """One position of `join_positions`: the token that stands there, then the most likely ones.

    From plain values, since a long prompt has millions of them: `pack_logprobs`' objects take ten
    times as long.
    """
    packed: bytes = msgpack.packb((token_id, logprob, text, top))
    return packed


def join_positions(positions: Sequence[bytes]) -> bytes:
    """The same bytes as `pack_logprobs` makes of them."""
    packer = msgpack.Packer()
    begin: bytes = packer.pack_array_header(2) + packer.pack(LOGPROBS_VERSION)
    count: bytes = packer.pack_array_header(len(positions))
    return b"".join([begin, count, *positions])


def unpack_logprobs(raw: bytes) -> list[TokenLogprob]:
    """Positions back from bytes.

    Raises:
        DecodeError: it was written by another version, or is damaged.
    """
    try:
        version, items = msgpack.unpackb(raw)
        if type(version) is not int or version != LOGPROBS_VERSION:
            raise ValueError("another version")
        return [_position(*item) for item in _list(items)]
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        message = f"log-probabilities cannot be read: {type(error).__name__}"
        raise DecodeError(message, raw) from error


def _flat(item: Alternative) -> tuple[int, float, bytes]:
    return item.token_id, item.logprob, item.text


def _position(token: Any, logprob: Any, text: Any, top: Any) -> TokenLogprob:
    chosen = _alternative(token, logprob, text)
    return TokenLogprob(chosen, [_alternative(*other) for other in _list(top)])


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def _alternative(token: Any, logprob: Any, text: Any) -> Alternative:
    if type(token) is not int or not 0 <= token < 1 << 31:
        raise ValueError("no token id")
    # NaN and plus infinity are logarithms of no probability
    if type(logprob) is not float or not logprob < math.inf:
        raise ValueError("no log-probability")
    if not isinstance(text, bytes):
        raise TypeError("no text in bytes")
    return Alternative(token, logprob, text)
