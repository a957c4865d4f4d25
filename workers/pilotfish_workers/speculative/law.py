"""The law that a drafted token was drawn from: a few tokens with weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """float64 `[m]`, their sum is 1."""
        raise NotImplementedError

    def probability(self, token: int) -> float:
        """Of one token."""
        raise NotImplementedError

    def draw(self, uniform: float) -> int:
        """The token at a point of (0, 1), by the inverse of the cumulated probabilities."""
        raise NotImplementedError

    def to_bytes(self) -> bytes:
        """m little-endian uint32, then m little-endian float32."""
        raise NotImplementedError

    @classmethod
    def from_bytes(cls, raw: bytes) -> SparseLaw:
        """Back from bytes.

        Raises:
            ValueError: it is no law.
        """
        raise NotImplementedError
