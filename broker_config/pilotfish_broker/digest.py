"""A digest of a token prefix that grows with the prefix.

A polynomial hash modulo the Mersenne prime 2^61 − 1 (Karp and Rabin, 1987): one multiplication a
token, and the same value in every process and on every machine. It guards against stale or lost
frames, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable

_PRIME = (1 << 61) - 1
_BASE = 1_000_003_919_563_771


def extend(digest: int, tokens: Iterable[int]) -> int:
    """Digest of a prefix with `digest`, followed by `tokens`. The empty prefix has digest 0."""
    for token in tokens:
        digest = (digest * _BASE + token + 1) % _PRIME
    return digest
