"""The law that a drafted token was drawn from: a few tokens with weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ENTRY_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class SparseLaw:
    """Probabilities in proportion to weights; 0 for every token that is not listed.

    Weights are float32, as they travel, and everybody divides by the same sum in float64: drafter
    and target speak of the very same numbers.

    Attributes:
        ids: int64 `[m]`, all different, m ≥ 1.
        weights: float32 `[m]`, above 0 and finite.
    """

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]

    @classmethod
    def certain(cls, token: int) -> SparseLaw:
        """That of a token which could be no other one."""
        return cls(np.array([token], dtype=np.int64), np.ones(1, dtype=np.float32))

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """float64 `[m]`, their sum is 1."""
        # no sum of float32 numbers overflows float64
        shares: NDArray[np.float64] = self.weights / self.weights.sum(dtype=np.float64)
        return shares

    def probability(self, token: int) -> float:
        """Of one token."""
        return float(self.weights[self.ids == token].sum() / self.weights.sum(dtype=np.float64))

    def draw(self, uniform: float) -> int:
        """The token at a point of (0, 1), by the inverse of the cumulated probabilities."""
        reached = np.cumsum(self.weights, dtype=np.float64)
        # the first entry that reaches beyond the point, which is below the last one's end
        return int(self.ids[np.searchsorted(reached, uniform * reached[-1], side="right")])

    def to_bytes(self) -> bytes:
        """m little-endian uint32, then m little-endian float32."""
        return self.ids.astype("<u4").tobytes() + self.weights.astype("<f4").tobytes()

    @classmethod
    def from_bytes(cls, raw: bytes) -> SparseLaw:
        """Back from bytes.

        Raises:
            ValueError: it is no law.
        """
        if not raw or len(raw) % _ENTRY_BYTES:
            raise ValueError(f"a law has 8 bytes an entry, not {len(raw)} in all")
        middle = len(raw) // 2
        ids = np.frombuffer(raw[:middle], dtype="<u4").astype(np.int64)
        weights = np.frombuffer(raw[middle:], dtype="<f4").astype(np.float32)
        if not (np.isfinite(weights) & (weights > 0)).all():
            raise ValueError("a law's weights must be above 0 and finite")
        if np.unique(ids).size != ids.size:
            raise ValueError("a law lists no token twice")
        return cls(ids, weights)
