"""What may be seen of an output that stop strings end, by definition and a character at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish import SamplingParams


@dataclass(frozen=True, slots=True)
class Shown:
    """An output with stop strings.

    Attributes:
        after: the text that is to be seen after each of its tokens; the last one is the result's.
        reason: "stop" or "length".
    """

    after: list[str]
    reason: str

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to the output."""
        return len(self.after)


def shown(pieces: Sequence[bytes], params: SamplingParams) -> Shown:
    """What an output is of which all tokens' bytes are known, were it not for its stop strings.

    It ends at the first character at which a stop string is complete, if it has `min_tokens` by
    then. Before that all characters are to be seen but those that may still become one.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    after: list[str] = []
    for number, piece in enumerate(pieces, start=1):
        known = len(text)
        text += decoder.decode(piece)
        for end in range(known + 1, len(text) + 1) if number >= params.min_tokens else ():
            found = [stop for stop in params.stop if text[:end].endswith(stop)]
            if found:
                end -= 0 if params.include_stop_str_in_output else max(map(len, found))
                return Shown([*after, text[:end]], "stop")
        after.append(text[: len(text) - num_open(text, params.stop)])
    return Shown([*after[:-1], text + decoder.decode(b"", final=True)], "length")


def num_open(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text are a beginning of a stop string."""
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((len(begun) for begun in beginnings if text.endswith(begun)), default=0)
