"""Which tokens a sequence has had, counted as it grows. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class History:
    """Counts over one token list that only grows.

    Args:
        tokens: prompt and output; the caller's own list.
        num_prompt: how many of them are the prompt.
    """

    def __init__(self, tokens: list[int], num_prompt: int) -> None:
        self.tokens = tokens
        self.num_prompt = num_prompt
        self.rewind()

    def rewind(self) -> None:
        """Count anew at the next use."""
        self._num_counted = 0

    def counts(self, drafted: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every different token of prompt, output and `drafted`, and how often it stands in
        output and `drafted` (0 for one that stands in the prompt alone)."""
        raise NotImplementedError
