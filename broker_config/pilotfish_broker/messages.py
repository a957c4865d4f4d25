"""The frames that draft and verify workers exchange, round by round.

`base` is the number of committed output tokens (the prompt does not count) that the frame
starts from, and `digest` covers the prompt and those tokens (see digest.py). `session` is a short
handle that the verify worker assigns; it is unique to that worker's incarnation and stands for
one (job, epoch, draft worker). `k` is the number of drafted tokens wanted next; 0 means none
until a Sync asks again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Open:
    """draft → verify. Offers to draft for a job, or asks for a Sync from `base` on."""

    job: str
    epoch: int
    inbox: str
    base: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """draft → verify. Drafted tokens that continue the prefix named by base and digest.

    `q` holds one sparse law a token, in bytes: m little-endian uint32 token ids, then m
    little-endian float32 weights. None where each token was certain (then q is one-hot), or where
    the job's rule needs none.
    """

    session: int
    base: int
    digest: int
    tokens: list[int]
    q: list[bytes] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """verify → draft. Of the proposal at `base`, `accepted` tokens stand, then `token`
    (recovered or bonus)."""

    session: int
    base: int
    accepted: int
    token: int
    k: int


@dataclass(frozen=True, slots=True)
class Sync:
    """verify → draft. The committed tokens from `base` on; the answer to Open and to every
    proposal that does not fit."""

    job: str
    epoch: int
    session: int
    base: int
    tokens: list[int]
    k: int


@dataclass(frozen=True, slots=True)
class Close:
    """Either way. The session is over, or was refused."""

    job: str
    epoch: int
    session: int
    reason: str


Frame = Open | Proposal | Verdict | Sync | Close
