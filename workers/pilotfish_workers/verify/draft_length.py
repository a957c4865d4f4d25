"""How many tokens to ask the drafter for next: one small state a sequence.

A plain rule for now: longer after full acceptance, shorter after a rejection of the first token,
none for a while when hardly anything is accepted, then another try. Only outcomes of earlier
rounds count, never the drafted tokens themselves, so that the output's law stays the target's.
"""

from __future__ import annotations

from pilotfish_broker.settings import MAX_DRAFT_TOKENS

START = 4
LONGEST_AUTO = 8
SMOOTHING = 0.15
WORTH_IT = 0.08
REST_ROUNDS = 48


class DraftLength:
    """Chooses K for one sequence.

    Args:
        speculation: "auto", "off" or a fixed K.
    """

    def __init__(self, speculation: str | int) -> None:
        self._fixed = {"auto": None, "off": 0}.get(str(speculation), speculation)
        self._length = START
        self._rate = 0.5  # smoothed share of drafted tokens that were accepted
        self._resting = 0
        self._misses = 0

    @property
    def is_off(self) -> bool:
        """Whether no session is wanted at all."""
        return self._fixed == 0

    def choose(self, most: int) -> int:
        """K for the next round, at most `most`."""
        if self._resting > 0:
            return 0
        wanted = self._length if self._fixed is None else int(self._fixed)
        return max(0, min(wanted, most, MAX_DRAFT_TOKENS))

    def miss(self, longest_rest: int) -> None:
        """Count a proposal that came late or empty: rest for 1, 2, 4 … rounds before the next."""
        self._resting = min(1 << self._misses, longest_rest)
        self._misses = min(self._misses + 1, 16)

    def learn(self, drafted: int, accepted: int) -> None:
        """Count one round; `drafted` 0 is a round of plain decoding."""
        if drafted == 0:
            self._resting = max(0, self._resting - 1)
            return
        self._misses = 0
        self._rate += SMOOTHING * (accepted / drafted - self._rate)
        if accepted == drafted:
            self._length = min(self._length + 1, LONGEST_AUTO)
        elif accepted == 0:
            self._length = max(self._length - 1, 1)
        if self._rate < WORTH_IT and self._fixed is None:
            self._resting = REST_ROUNDS
            self._rate = 2 * WORTH_IT  # the next try gets a few rounds to prove itself
