"""Entries of a job's token stream: its durable progress, and what clients read.

Fields of an entry: ``p`` position of its first token among the output tokens, ``t`` the token
ids (uint32, little endian), ``o`` offset of the text among the visible characters, ``x`` the text
that became visible. The last entry has the field ``e`` with the final status and no tokens.
Readers resume and drop repeats by position.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pilotfish_broker.spec import Status


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32."""
    values = array("I", ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack_ids(raw: bytes) -> list[int]:
    """Token ids from little-endian uint32."""
    values = array("I")
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


@dataclass(frozen=True, slots=True)
class Entry:
    """One commit as it stands in the stream; `end` is set in the last entry only."""

    position: int
    tokens: list[int]
    offset: int
    text: str
    end: Status | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes]) -> Entry:
        end = fields.get(b"e")
        return cls(
            position=int(fields.get(b"p", 0)),
            tokens=unpack_ids(fields.get(b"t", b"")),
            offset=int(fields.get(b"o", 0)),
            text=fields.get(b"x", b"").decode(),
            end=Status(end.decode()) if end is not None else None,
        )
