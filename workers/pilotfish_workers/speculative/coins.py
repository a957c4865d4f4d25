"""Random numbers without a state: each is a function of what it is for.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a key and a
counter into random words. The key is the job's seed and its sample; the counter is (block,
position, base, purpose), so that a job that resumes anywhere draws what it would have drawn.

Draws by a drafter and the coins of a test for acceptance are for one round, so the round's base
(its committed length) counts too. The draw of the token that is emitted (recovered, bonus, plain,
and all draws of `coupled`) is for its position alone. Keyed by position alone, coins that were
looked at in one round would be used again in the next: under `block`, where later drafted tokens
decide over earlier ones, that is a bias.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What a random number is for."""

    TOKEN = 0
    ACCEPT = 1
    DRAFT = 2


class Coins:
    """The random numbers of one sample of one job.

    Args:
        seed: any whole number; taken modulo 2⁶⁴.
        sample: index of the sample among the job's n.
    """

    def __init__(self, seed: int, sample: int = 0) -> None:
        raise NotImplementedError

    @classmethod
    def of_job(cls, job: str, seed: int | None, sample: int) -> Coins:
        """Those of a job; without a seed its id is the seed."""
        raise NotImplementedError

    def token(self, position: int) -> float:
        """In (0, 1), for the emitted token at an output position."""
        raise NotImplementedError

    def accept(self, position: int, base: int) -> float:
        """In (0, 1), for the test of the drafted token at a position in the round at `base`."""
        raise NotImplementedError

    def draft(self, position: int, base: int) -> float:
        """In (0, 1), for a drafter's draw at a position in the round at `base`."""
        raise NotImplementedError

    def noise(self, position: int, size: int) -> NDArray[np.float64]:
        """float64 `[size]` in (0, 1), one for each token of the vocabulary, for `coupled`'s draw
        at a position; a longer vocabulary only adds to it."""
        raise NotImplementedError
