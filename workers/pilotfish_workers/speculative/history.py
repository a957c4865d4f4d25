"""Which tokens a sequence has had, counted as it grows. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY = 64


class History:
    """Counts over one token list that only grows.

    A call looks only at what came since the last one, so that a round costs no more late in an
    output than early, but for the copy of its answer.

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
        self._places: dict[int, int] = {}
        self._ids = np.empty(_FIRST_CAPACITY, np.int64)
        self._counts = np.empty(_FIRST_CAPACITY, np.int64)

    def counts(self, drafted: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every different token of prompt, output and `drafted`, and how often it stands in
        output and `drafted` (0 for one that stands in the prompt alone).

        Returns:
            two int64 arrays `[m]`, the caller's own: token ids in the order in which they first
            came (all different; none is checked against a vocabulary), and their counts.
        """
        self._count_new()
        num_known = len(self._places)
        ids = np.empty(num_known + len(drafted), np.int64)
        counts = np.zeros(num_known + len(drafted), np.int64)
        ids[:num_known] = self._ids[:num_known]
        counts[:num_known] = self._counts[:num_known]
        new: dict[int, int] = {}
        for token in drafted:
            place = self._places.get(token)
            if place is None:
                place = new.setdefault(token, num_known + len(new))
                ids[place] = token
            counts[place] += 1
        size = num_known + len(new)
        return ids[:size], counts[:size]

    def _count_new(self) -> None:
        for position in range(self._num_counted, len(self.tokens)):
            token = self.tokens[position]
            place = self._places.get(token)
            if place is None:
                place = self._places[token] = len(self._places)
                if place == len(self._ids):
                    self._ids = np.resize(self._ids, 2 * place)
                    self._counts = np.resize(self._counts, 2 * place)
                self._ids[place] = token
                self._counts[place] = 0
            if position >= self.num_prompt:
                self._counts[place] += 1
        self._num_counted = len(self.tokens)
