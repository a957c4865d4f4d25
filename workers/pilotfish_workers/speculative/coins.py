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

import hashlib
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORD = 1 << 64
# A word's upper 52 bits name one of 2⁵² equal parts of (0, 1); its middle is the random number,
# exactly. With 53 bits the middle of the last part would be rounded to 1.
_UNUSED_BITS = 12
_HALF_PART = 2.0**-53
_EXPONENT = np.uint64(0x3FF0000000000000)


class Purpose(IntEnum):
    """What a random number is for."""

    TOKEN = 0
    ACCEPT = 1
    DRAFT = 2


class Coins:
    """The random numbers of one sample of one job. For one thread.

    Args:
        seed: any whole number; taken modulo 2⁶⁴.
        sample: index of the sample among the job's n.
    """

    def __init__(self, seed: int, sample: int = 0) -> None:
        key = np.array([seed % _WORD, sample % _WORD], dtype=np.uint64)
        self._philox = np.random.Philox(key=key)
        self._counter = np.zeros(4, dtype=np.uint64)
        # to set the state is several times cheaper than to make a generator
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": key},
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,  # nothing is left over from another counter
            "has_uint32": 0,
            "uinteger": 0,
        }

    @classmethod
    def of_job(cls, job: str, seed: int | None, sample: int) -> Coins:
        """Those of a job; without a seed its id is the seed."""
        if seed is None:
            seed = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "little")
        return cls(seed, sample)

    def token(self, position: int) -> float:
        """In (0, 1), for the emitted token at an output position."""
        return self._uniform(Purpose.TOKEN, position, 0)

    def accept(self, position: int, base: int) -> float:
        """In (0, 1), for the test of the drafted token at a position in the round at `base`."""
        return self._uniform(Purpose.ACCEPT, position, base)

    def draft(self, position: int, base: int) -> float:
        """In (0, 1), for a drafter's draw at a position in the round at `base`."""
        return self._uniform(Purpose.DRAFT, position, base)

    def noise(self, position: int, size: int) -> NDArray[np.float64]:
        """float64 `[size]` in (0, 1), one for each token of the vocabulary, for `coupled`'s draw
        at a position; a longer vocabulary only adds to it."""
        self._turn_to(Purpose.TOKEN, position, 0)
        words = np.asarray(self._philox.random_raw(size), dtype=np.uint64)
        # the same numbers as `_uniform`, without a slow conversion: the bits become the fraction
        # of a number in [1, 2)
        words >>= np.uint64(_UNUSED_BITS)
        words |= _EXPONENT
        uniforms = words.view(np.float64)
        uniforms -= 1 - _HALF_PART
        return uniforms

    def _uniform(self, purpose: Purpose, position: int, base: int) -> float:
        self._turn_to(purpose, position, base)
        return float(self._philox.random_raw() >> _UNUSED_BITS) * 2 * _HALF_PART + _HALF_PART

    def _turn_to(self, purpose: Purpose, position: int, base: int) -> None:
        self._counter[:] = (0, position, base, purpose)
        self._philox.state = self._state
