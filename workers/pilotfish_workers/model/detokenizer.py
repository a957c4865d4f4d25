"""Token ids to text as they come, never showing half a character.

Two ways, by the tokenizer's decoder. A byte-level one (GPT-2, Llama 3, Qwen, SmolLM) maps each
token to bytes, so an incremental UTF-8 decoder is exact and takes constant time. For any other
(SentencePiece with byte fallback, WordPiece) a short window of tokens is decoded with and without
the new ones and the difference is the new text.
"""

import codecs
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

__all__ = ["ByteDetokenizer", "Detokenizer", "Peeking", "WindowDetokenizer", "byte_alphabet"]

_REPLACEMENT = "\ufffd"
_MAX_HELD = 8
"""Tokens after which a window that still ends in a replacement character is shown as it is; no
character takes that many, so those bytes are invalid for good."""


class Detokenizer(Protocol):
    """Incremental decoding of one output. All pushes and the flush together equal
    `decode(all ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)`."""

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids and return the text that is now certain; may be empty."""
        ...

    def flush(self) -> str:
        """Return what was held back; call once at the end."""
        ...


@runtime_checkable
class Peeking(Protocol):
    """A detokenizer that may hold back more than a half character."""

    def peek(self) -> str:
        """The held text as it is if the output ends here; empty if it ends in half a character."""
        ...


def byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies, as GPT-2 chose
    them: a printable Latin-1 byte stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


class ByteDetokenizer:
    """For byte-level tokenizers. `token_bytes(id)` is empty for special and unknown tokens."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """See `Detokenizer.push`."""
        return self._decoder.decode(b"".join(map(self._token_bytes, ids)))

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer.

    `decode(ids)` decodes a list; `is_hidden(id)` tells special tokens, which leave no trace;
    `is_byte(id)` tells byte-fallback tokens: a run of them is decoded as a whole when it has
    ended, since one invalid byte turns the whole run into replacement characters.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_hidden: Callable[[int], bool],
        is_byte: Callable[[int], bool],
    ) -> None:
        self._decode = decode
        self._is_hidden = is_hidden
        self._is_byte = is_byte
        self._context: list[int] = []  # already shown; settles spaces at the seam
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """See `Detokenizer.push`."""
        return "".join(self._push_one(token) for token in ids)

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        text = self._new_text()
        self._context, self._held = [], []
        return text

    def peek(self) -> str:
        """See `Peeking.peek`: a run of bytes that has not ended, and so may still turn out
        invalid."""
        text = self._new_text() if self._held else ""
        return "" if text.endswith(_REPLACEMENT) else text

    def _push_one(self, token: int) -> str:
        if self._is_hidden(token):
            return ""
        self._held.append(token)
        if self._is_byte(token):
            return ""
        text = self._new_text()
        if not text or (text.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD):
            return ""
        # the context must never be empty text by accident: a decoder may strip what comes first
        self._context, self._held = self._held, []
        return text

    def _new_text(self) -> str:
        shown = self._decode(self._context)
        return self._decode(self._context + self._held)[len(shown) :]
