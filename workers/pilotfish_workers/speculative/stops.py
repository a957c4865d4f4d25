"""Where an output ends: at a stop token or its limit within a round, at a stop string in its text.

Imports no torch.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterable, Sequence

__all__ = ["StopStrings", "cut", "stop_strings"]


def cut(
    tokens: Sequence[int], stop_ids: Collection[int], remaining: int
) -> tuple[list[int], str | None]:
    """Cut a round's tokens at the first stop token or at the limit, whichever comes first.

    Args:
        tokens: accepted tokens and the recovered or bonus one.
        stop_ids: token ids that end the output; the one that does is kept.
        remaining: how many tokens the job may still take, at least 1.

    Returns:
        the tokens to commit, and why the output ends there: "stop", "length", or None (it goes
        on). A stop token that is also the last allowed one is a "stop"; one beyond the limit is
        never seen.
    """
    allowed = tokens[:remaining]
    for index, token in enumerate(allowed):
        if token in stop_ids:
            return list(allowed[: index + 1]), "stop"
    return list(allowed), "length" if len(allowed) == remaining else None


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces, a step a character.

    The automaton of Aho and Corasick, "Efficient string matching" (CACM 18:6, 1975). A state is a
    number: it stands for the longest end of the text so far that begins one of the strings. The
    text before the first piece has state 0. Objects never change and may be shared.

    Args:
        strings: what to find. An empty one is never found.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found = [0]  # state → length of the longest string that ends here, 0 for none
        for string in strings:
            self._insert(string)
        self._fail = [0] * len(self._next)
        self._held = [0] * len(self._next)
        self._link()
        self.longest = max(self._depth)

    def find(self, state: int, text: str) -> tuple[int, int, int]:
        """Read on from `state` to the first character at which a string is complete.

        Returns:
            the state there; the number of characters of `text` up to and including that one; the
            length of the string, the longest if several end there. Both numbers are 0, and the
            state is that after all of `text`, if no string is complete.
        """
        for index, character in enumerate(text):
            state = self._step(state, character)
            if self._found[state]:
                return state, index + 1, self._found[state]
        return state, 0, 0

    def skip(self, state: int, text: str) -> int:
        """The state after `text`, whatever is complete within."""
        if len(text) > self.longest:  # nothing before can matter any more
            state, text = 0, text[-self.longest :]
        for character in text:
            state = self._step(state, character)
        return state

    def num_open(self, state: int) -> int:
        """Characters at the end of the text so far that may still become one of the strings."""
        return self._held[state]

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(0)
            state = following
        self._found[state] = len(string)

    def _link(self) -> None:
        """Fill in what is read off shorter ends, nearest to the root first."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            fail = self._fail[state]
            self._found[state] = self._found[state] or self._found[fail]
            # a string that is complete is open only as the beginning of a longer one
            self._held[state] = self._depth[state] if self._next[state] else self._held[fail]
            for character, following in self._next[state].items():
                self._fail[following] = self._step(fail, character) if state else 0
                queue.append(following)

    def _step(self, state: int, character: str) -> int:
        while (following := self._next[state].get(character)) is None:
            if not state:
                return 0
            state = self._fail[state]
        return following


@functools.lru_cache(maxsize=64)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton for these strings; samples and jobs that have the same ones share it."""
    return StopStrings(strings)
