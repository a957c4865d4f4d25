"""Entries of a job's token stream: its durable progress, and what clients read.

Fields of an entry: ``p`` position of its first token among the output tokens, ``t`` the token
ids (uint32, little endian), ``o`` offset of the text among the visible characters, ``x`` the text
that became visible; where the job wants them, ``l`` the log-probabilities of its tokens, and in one
entry ``m`` those of the prompt's tokens from the second on (see logprobs.py). The last entry has
the field ``e`` with the final status and no tokens. Readers resume and drop repeats by position.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pilotfish_broker.logprobs import TokenLogprob, unpack_logprobs
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
    """One commit as it stands in the stream.

    Attributes:
        position: place of the first of `tokens` among the output tokens.
        offset: place of the first character of `text` among the visible ones.
        end: set in the last entry only.
        logprobs: of each of `tokens`; empty where the job wants none.
        prompt_logprobs: of each of the prompt's tokens, None for the first, which nothing comes
            before; empty in all entries but one at most.
    """

    position: int
    tokens: list[int]
    offset: int
    text: str
    end: Status | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes], *, details: bool = True) -> Entry:
        """An entry from its fields.

        Args:
            details: decode its log-probabilities; a long prompt's take seconds.

        Raises:
            ValueError: they are no entry's.
            DecodeError: its log-probabilities cannot be read.
        """
        end = fields.get(b"e")
        entry = cls(
            position=int(fields.get(b"p", 0)),
            tokens=unpack_ids(fields.get(b"t", b"")),
            offset=int(fields.get(b"o", 0)),
            text=fields.get(b"x", b"").decode(),
            end=Status(end.decode()) if end is not None else None,
        )
        if details and b"l" in fields:
            entry.logprobs.extend(unpack_logprobs(fields[b"l"]))
            if len(entry.logprobs) != len(entry.tokens):
                raise ValueError(
                    f"{len(entry.tokens)} tokens with {len(entry.logprobs)} log-probabilities"
                )
        if details and b"m" in fields:
            entry.prompt_logprobs.extend([None, *unpack_logprobs(fields[b"m"])])
        return entry
