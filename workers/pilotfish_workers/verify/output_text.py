"""One output's visible text: stop strings cut it, and what may still become one is held back.

Pure: token ids in, text out. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish_workers.model.detokenizer import Detokenizer, Peeking
from pilotfish_workers.speculative.stops import StopStrings, stop_strings


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a round's tokens made of the visible text.

    Attributes:
        num_tokens: how many of the tokens belong to the output: all, or those up to and including
            the one at which a stop string became complete.
        text: characters that became visible.
        is_stopped: a stop string is complete; the output ends here.
    """

    num_tokens: int
    text: str
    is_stopped: bool


class OutputText:
    """Visible text of one output, as its tokens come.

    The output ends at the first character at which any stop string is complete; if several are
    complete there, the longest counts, and the text ends before it. Whatever may still become a
    stop string is held back, and no more than that. The result does not depend on how the tokens
    fall into rounds: tokens are looked at one by one.

    Args:
        detokenizer: a fresh one, for this output alone.
        stop: texts that end the output, none of them empty.
        include_stop: the text ends after the stop string instead.
        min_tokens: a stop string that becomes complete before the output has so many tokens is
            passed over.
        prefix: shown before the output's own text; not searched for stop strings.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        prefix: str = "",
    ) -> None:
        self._detokenizer = detokenizer
        self._peeking = detokenizer if isinstance(detokenizer, Peeking) else None
        self._strings = stop_strings(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._prefix = prefix
        self._num_tokens = 0
        self._held = ""  # taken from the detokenizer and not shown
        self._state = 0  # of the search, after all that was taken
        self._num_seen = 0  # characters that the detokenizer holds and that were searched already
        self._is_stopped = False

    def push(self, tokens: Sequence[int]) -> Pushed:
        """Take a round's tokens, without a stop token, which has no text. Not after a stop."""
        before, self._prefix = self._prefix, ""
        if self._strings is None:
            return Pushed(len(tokens), before + self._detokenizer.push(tokens), False)
        pieces = [before]
        for index, token in enumerate(tokens):
            self._num_tokens += 1
            is_searched = self._num_tokens >= self._min_tokens
            pieces.append(self._push_one(self._strings, token, is_searched))
            if self._is_stopped:
                return Pushed(index + 1, "".join(pieces), True)
        return Pushed(len(tokens), "".join(pieces), False)

    def flush(self) -> str:
        """What was held back; call once, when the output has ended.

        A half character shows only now. A stop string that it completes cuts the text as any
        other does; why the output ended stays what it was.
        """
        text, self._prefix = self._prefix, ""
        if self._is_stopped:
            return text
        rest = self._detokenizer.flush()
        if self._strings is not None:
            rest = self._take(self._strings, rest, self._num_tokens >= self._min_tokens)
            rest, self._held = rest + self._held, ""
        return text + rest

    def resume(self, output: Sequence[int]) -> None:
        """Take committed tokens, whose text is out already as far as it was not held back. Call
        it before anything else; no output leaves everything as it is."""
        if not output:
            return
        self._prefix = ""
        self._num_tokens = len(output)
        if self._strings is None:
            self._detokenizer.push(output)
        elif self._peeking is None:
            self._take(self._strings, self._detokenizer.push(output), False)
        else:
            for token in output:
                self._push_one(self._strings, token, False)

    def _push_one(self, strings: StopStrings, token: int, is_searched: bool) -> str:
        shown = self._take(strings, self._detokenizer.push((token,)), is_searched)
        if self._peeking is None or self._is_stopped:
            return shown
        # what the detokenizer itself holds ends the output as soon as it completes a stop string
        ahead = self._peeking.peek()
        if is_searched and self._search(strings, ahead)[1]:
            return shown + self._take(strings, ahead, True)
        self._num_seen = max(self._num_seen, len(ahead))
        return shown

    def _take(self, strings: StopStrings, new: str, is_searched: bool) -> str:
        """Search new text and return what may be shown."""
        if not new:
            return ""
        text = self._held + new
        if is_searched:
            self._state, end, length = self._search(strings, new)
            if end:
                self._is_stopped = True
                end += len(self._held)
                self._held = ""
                return text[: end if self._include_stop else end - length]
        else:
            self._state = strings.skip(self._state, new)
        self._num_seen = 0
        begin = len(text) - strings.num_open(self._state)
        self._held = text[begin:]
        return text[:begin]

    def _search(self, strings: StopStrings, text: str) -> tuple[int, int, int]:
        """`StopStrings.find` behind the characters that were searched already."""
        state = strings.skip(self._state, text[: self._num_seen])
        state, end, length = strings.find(state, text[self._num_seen :])
        return state, end + self._num_seen if end else 0, length
