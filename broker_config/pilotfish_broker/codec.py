"""Frames ↔ bytes: ``[format version, tag, field, …]`` in msgpack, frames one after another.

The tag table is explicit and closed: no pickle, no class looked up by name, so that bytes from
the network can only ever become one of five plain dataclasses.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import msgpack

from pilotfish_broker.errors import DecodeError
from pilotfish_broker.messages import Close, Frame, Open, Proposal, Sync, Verdict

FORMAT_VERSION = 2
MAX_ENTRY_BYTES = 16 << 20
MAX_ITEMS = 1 << 20  # an array's head claims its length before a byte of it has arrived
MAX_TOKEN = (1 << 31) - 1
MAX_INTEGER = (1 << 63) - 1
LAW_ITEM_BYTES = 8  # a uint32 token id and a float32 weight
MAX_LAW_BYTES = 4096 * LAW_ITEM_BYTES

TAGS: dict[int, type[Frame]] = {1: Open, 2: Proposal, 3: Verdict, 4: Sync, 5: Close}
_TAG_OF = {kind: tag for tag, kind in TAGS.items()}
_INTEGERS = {"epoch", "session", "base", "digest", "accepted", "k"}
_TEXTS = {"job", "inbox", "reason"}


def encode(frame: Frame) -> bytes:
    """One frame as bytes; the bytes of several frames may be joined into one entry."""
    packed: bytes = msgpack.packb([FORMAT_VERSION, _TAG_OF[type(frame)], *_values(frame)])
    return packed


def _values(frame: Frame) -> tuple[Any, ...]:
    return tuple(getattr(frame, name) for name in frame.__slots__)


def encode_all(frames: Iterable[Frame]) -> bytes:
    """Several frames as one inbox entry."""
    return b"".join(map(encode, frames))


def decode_all(raw: bytes) -> list[Frame]:
    """The frames of one inbox entry.

    Raises:
        DecodeError: any part of it is no frame of this version; `raw` keeps the bytes.
    """
    if len(raw) > MAX_ENTRY_BYTES:
        raise DecodeError(f"an entry of {len(raw)} bytes is too large", raw)
    unpacker = msgpack.Unpacker(
        max_buffer_size=MAX_ENTRY_BYTES,
        max_array_len=min(len(raw), MAX_ITEMS),
        strict_map_key=True,
    )
    unpacker.feed(raw)
    frames: list[Frame] = []
    try:
        while unpacker.tell() < len(raw):
            frames.append(_frame(unpacker.unpack(), raw))
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise DecodeError(f"not msgpack: {type(error).__name__}", raw) from error
    return frames


def _frame(parts: Any, raw: bytes) -> Frame:
    if not isinstance(parts, list) or len(parts) < 2:
        raise DecodeError("a frame is a list of version, tag and fields", raw)
    version, tag, *values = parts
    if type(version) is not int or version != FORMAT_VERSION:
        raise DecodeError(f"format version {reprlib.repr(version)}, this is {FORMAT_VERSION}", raw)
    kind = TAGS.get(tag) if type(tag) is int else None
    if kind is None:
        raise DecodeError(f"unknown tag {reprlib.repr(tag)}", raw)
    names = [item.name for item in fields(kind)]
    if len(values) != len(names):
        raise DecodeError(f"{kind.__name__} has {len(names)} fields, not {len(values)}", raw)
    for name, value in zip(names, values, strict=True):
        _check(kind.__name__, name, value, raw)
    frame = kind(*values)
    if isinstance(frame, Proposal) and frame.q is not None and len(frame.q) != len(frame.tokens):
        raise DecodeError(f"{len(frame.tokens)} tokens with {len(frame.q)} laws", raw)
    return frame


def _check(kind: str, name: str, value: Any, raw: bytes) -> None:
    if name in _INTEGERS:
        right = type(value) is int and 0 <= value <= MAX_INTEGER
    elif name == "token":
        right = _is_token(value)
    elif name in _TEXTS:
        right = isinstance(value, str)
    elif name == "tokens":
        right = isinstance(value, list) and all(map(_is_token, value))
    else:
        right = value is None or (isinstance(value, list) and all(map(_is_law, value)))
    if not right:
        raise DecodeError(f"{kind}.{name} is not of its type", raw)


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN


def _is_law(value: Any) -> bool:
    """Whether it can be one sparse law; what is in it is for its reader to check."""
    return (
        isinstance(value, bytes)
        and 0 < len(value) <= MAX_LAW_BYTES
        and len(value) % LAW_ITEM_BYTES == 0
    )
