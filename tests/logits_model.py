"""A model with logits whose law after every prefix is known, and whose cache is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pilotfish_broker.digest import extend
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.speculative.accept import Outcome
from pilotfish_workers.speculative.best import best_tokens
from pilotfish_workers.speculative.draw import draw_tokens
from pilotfish_workers.speculative.judge import judge
from pilotfish_workers.speculative.sampler import Case, Draw, Drawn
from tests.worker_kit import FunctionModel


class LogitsModel(FunctionModel):
    """Random logits, a function of the prefix alone: equal bit by bit in any batch and chunking.

    Args:
        seed: models of different seeds have logits in common and some of their own.
        own: standard deviation of those of their own; of those in common it is `scale`.

    Attributes:
        logits: other ones for some prefixes, by digest; float32 `[V]`.
    """

    def __init__(
        self, seed: int = 0, *, scale: float = 2.0, own: float = 1.0, **options: Any
    ) -> None:
        super().__init__(lambda digest, position, token: digest, **options)
        self._seed, self._scale, self._own = seed, scale, own
        self.logits: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = {}

    def greedy(self, rows: Sequence[Rows]) -> list[list[int]]:
        """See `Model.greedy`."""
        best = iter(best_tokens(self._forward(rows)))
        return [[next(best) for _ in range(row.num_logits)] for row in rows]

    def verify(self, rows: Sequence[Rows], cases: Sequence[Case | None]) -> list[Outcome | None]:
        """See `Model.verify`."""
        logits = self._forward(rows)
        return judge(logits, best_tokens(logits), cases, [row.num_logits for row in rows])

    def draw(self, rows: Sequence[Rows], draws: Sequence[Draw | None]) -> list[Drawn | None]:
        """See `Model.draw`."""
        drawn = iter(draw_tokens(self._forward(rows), [one for one in draws if one is not None]))
        return [None if one is None else next(drawn) for one in draws]

    def logits_after(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 `[V]`: the logits after a prefix."""
        return torch.from_numpy(self._logits(extend(0, tokens)))

    def _forward(self, rows: Sequence[Rows]) -> torch.Tensor:
        digests = [digest for answers in super().greedy(rows) for digest in answers]
        logits = [self._logits(digest) for digest in digests]
        return torch.from_numpy(np.array(logits).reshape(len(digests), self.info.vocab_size))

    def _logits(self, digest: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        if digest in self.logits:
            return self.logits[digest]
        common, own = (
            np.random.Generator(np.random.Philox(key=[digest, seed])).normal(
                size=self.info.vocab_size
            )
            for seed in (0, self._seed + 1)
        )
        return (self._scale * common + self._own * own).astype(np.float32)
