"""A grammar's place in one output and in the drafts behind it. Imports neither torch nor
transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from pilotfish_broker.errors import PilotfishError
from pilotfish_workers.model.grammar_source import reason

__all__ = ["GrammarConstraint", "GrammarError", "Vocabulary", "bits"]


class GrammarError(PilotfishError):
    """A stored output does not follow its job's own grammar. It concerns this job alone: submit
    it again."""


class Vocabulary(Protocol):
    """A model's token ids as rows of bits.

    Attributes:
        size: number of ids.
        texts: int32 `[ceil(size / 32)]`, the tokens that may stand inside an output.
        ends: int32, the same shape: the end-of-sequence tokens.
        end_ids: the same as ids.
    """

    size: int
    texts: NDArray[np.int32]
    ends: NDArray[np.int32]
    end_ids: frozenset[int]


def bits(ids: Sequence[int], size: int) -> NDArray[np.int32]:
    """int32 `[ceil(size / 32)]` with bit t % 32 of word t // 32 set for each t in `ids`."""
    is_set = np.zeros(-(-size // 32) * 32, bool)
    is_set[list(ids)] = True
    return np.packbits(is_set, bitorder="little").view("<i4").astype(np.int32)


class GrammarConstraint:
    """Implements `Constraint`.

    The parser stays where the last draft ended, and rows are kept, so that a call costs what
    differs from the call before: a drafter asks for one row more each time, and accepted tokens
    need no second look.

    Args:
        vocabulary: the model's.
        build: compiles the grammar anew, so that it shares nothing with other outputs.

    Raises:
        InvalidRequest: from `build`.
    """

    def __init__(self, vocabulary: Vocabulary, build: Callable[[], LLMatcher]) -> None:
        self._vocabulary = vocabulary
        self._build = build
        self._matcher = build()
        self._forget()

    def rewind(self) -> None:
        """See `Constraint.rewind`."""
        # a parser that met a limit never recovers
        if self._matcher.is_error() or not self._matcher.reset():
            self._matcher = self._build()
        self._forget()

    @property
    def trouble(self) -> str:
        """Why the last call allowed nothing from some row on, if not for a drafted token."""
        told = reason("", self._matcher.get_error())
        # to the library, a place that nothing leads on from is an error too
        if told in ("", "NoExtensionBias"):
            return "no text can follow it"
        return f"it takes more than the limits: {told}"

    def _forget(self) -> None:
        self._base = 0  # tokens of the output that are settled
        self._ahead: list[int] = []  # tokens behind them that the parser has taken
        self._rows: list[NDArray[np.int32]] = []  # allowed behind the settled ones, then on
        self._end: int | None = None  # place of the first end-of-sequence token, if taken

    def masks(self, output: Sequence[int], drafted: Sequence[int]) -> NDArray[np.int32]:
        """See `Constraint.masks`. Of `output` only what is new is read.

        All end-of-sequence tokens are allowed where the grammar accepts. Behind one, and where
        nothing else can follow, they alone are. Rows are zero behind a drafted token that is not
        allowed, where the grammar leads nowhere, and from where on it would take more than
        llguidance's limits; see `trouble`.

        Raises:
            GrammarError: `output` does not follow the grammar; never by tokens that these masks
                allowed. The same at every further call with that output.
        """
        if self._matcher.is_error() or len(output) < self._base:
            self.rewind()
        rows = np.zeros((len(drafted) + 1, self._vocabulary.ends.size), np.int32)
        if not self._settle(output[self._base :], drafted):
            return rows
        for place in range(len(rows)):
            if place > len(self._ahead) and not self._take(drafted[place - 1]):
                break
            if place == len(self._rows) and not self._look(rows[place]):
                break
            rows[place] = self._rows[place]
        return rows

    def _settle(self, new: Sequence[int], drafted: Sequence[int]) -> bool:
        """Take new output for good, and go back to what of `drafted` has been taken before.

        False where it would take more than the limits.
        """
        wanted = [*new, *drafted]
        known = min(len(self._ahead), max(0, len(self._rows) - 1))
        same = 0
        while same < min(known, len(wanted)) and self._ahead[same] == wanted[same]:
            same += 1
        self._return_to(same)
        for token in new[same:]:
            if not self._take(token):
                if self._matcher.is_error():
                    return False
                raise GrammarError(
                    f"token {token} at position {self._base + len(self._ahead)} of the output "
                    "does not follow the job's own grammar: the stored output is damaged; submit "
                    "the job again"
                )
        self._base += len(new)
        del self._ahead[: len(new)], self._rows[: len(new)]
        return True

    def _return_to(self, place: int) -> None:
        """Undo the tokens ahead from `place` on."""
        taken = self._base + len(self._ahead) if self._end is None else self._end
        surplus = taken - (self._base + place)  # the parser itself takes no end
        if surplus > 0:
            self._matcher.rollback(surplus)
        if self._end is not None and self._end >= self._base + place:
            self._end = None
        del self._ahead[place:], self._rows[place + 1 :]

    def _take(self, token: int) -> bool:
        """Go one token on, if that is allowed."""
        if token in self._vocabulary.end_ids:
            is_allowed = self._end is not None or self._matcher.is_accepting()
            if is_allowed and self._end is None:
                self._end = self._base + len(self._ahead)
        else:
            is_allowed = (
                self._end is None
                and self._is_text(token)
                and self._matcher.try_consume_tokens([token]) == 1
            )
        if is_allowed:
            self._ahead.append(token)
        return is_allowed

    def _is_text(self, token: int) -> bool:
        if not 0 <= token < self._vocabulary.size:
            return False
        return bool(self._vocabulary.texts[token >> 5] >> (token & 31) & 1)

    def _look(self, row: NDArray[np.int32]) -> bool:
        """Find out what is allowed behind all tokens ahead. `row` is room to work in.

        False, and nothing found, where it would take more than the limits.
        """
        if self._end is not None:
            self._rows.append(self._vocabulary.ends)
            return True
        fill_next_token_bitmask(self._matcher, row[np.newaxis])
        if self._matcher.is_error():
            row[:] = 0
            return False
        found = row & self._vocabulary.texts
        if self._matcher.is_accepting():
            found |= self._vocabulary.ends
        self._rows.append(found)
        return True
