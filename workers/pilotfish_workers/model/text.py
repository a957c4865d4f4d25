"""The tokenizer side of a model: text and chat messages to ids, ids to text, vocabularies."""

import functools
import hashlib
import json
import re
import threading
from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import ByteLevel
from transformers import AutoTokenizer

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.model.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_alphabet,
)
from pilotfish_workers.model.errors import TextError
from pilotfish_workers.model.grammar import GrammarConstraint, Grammars

__all__ = ["Detokenizer", "Text"]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Text:
    """The tokenizer of one model folder or hub id. No code that comes with it is run.

    Threads may share it.
    """

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()  # fast tokenizers refuse to encode for two threads at once
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            self._vocabulary = _vocabulary_of(self._tokenizer)
        except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
            raise TextError(f"cannot load the tokenizer of {path!r}: {error}") from error
        added = self._tokenizer.added_tokens_decoder
        self._special = frozenset(number for number, token in added.items() if token.special)
        self._shown_bytes = functools.cache(self._bytes_of)
        self._inside_bytes = functools.cache(self._inside)  # else three calls of a decoder
        self._alphabet = byte_alphabet()
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self._is_byte_level = isinstance(getattr(backend, "decoder", None), ByteLevel)
        self._grammars: dict[tuple[int, tuple[int, ...]], Grammars] = {}

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        return len(self._vocabulary)

    def vocabulary(self) -> list[str]:
        """Every token by id; an id that stands for nothing is the empty string."""
        return list(self._vocabulary)

    def fingerprint(self) -> str:
        """SHA-256, hexadecimal, of the vocabulary: equal for tokenizers with the same ids."""
        return hashlib.sha256(json.dumps(self._vocabulary).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds by itself."""
        try:
            return self._ids(text)
        except (ValueError, TypeError, UnicodeError) as error:
            raise TextError(f"cannot tokenize the prompt: {error}") from error

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's own template, up to where it answers.

        `TextError` if the model has no template or the template refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise TextError("this model has no chat template: send a prompt instead of messages")
        try:
            with self._lock:
                ids: list[int] = self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=False
                )
        except Exception as error:  # a template is a program and may raise anything
            raise TextError(f"the model's chat template failed: {error}") from error
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` without special tokens, spaces left as they are."""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one output."""
        if self._is_byte_level:
            return ByteDetokenizer(self._shown_bytes)
        return WindowDetokenizer(self.decode, self._is_hidden, self._is_byte)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, inside a text: a space that a decoder leaves out only at the
        very beginning is there. A special token stands for its own name; an id that stands for
        nothing is empty. May be half a character."""
        if not self._is_hidden(token_id):
            shown = self._shown_bytes if self._is_byte_level else self._inside_bytes
            return shown(token_id)
        is_special = token_id in self._special and token_id < len(self._vocabulary)
        return self._vocabulary[token_id].encode() if is_special else b""

    def word_ids(self, word: str) -> list[tuple[int, ...]]:
        """The token sequences that write a word at the beginning of a text and after a space,
        different ones only.

        As vLLM's bad words, which however take the second only where it is as long as the first.
        Spaces before the word do not count, unless there is nothing else.

        Raises:
            TextError: the word has no tokens.
        """
        bare = word.lstrip(" ")
        found: dict[tuple[int, ...], None] = {}  # an ordered set
        for text in (bare, f" {bare}") if bare else (word,):
            try:
                ids = self._ids(text, add_special_tokens=False)
            except (ValueError, TypeError, UnicodeError) as error:
                raise TextError(f"cannot tokenize the word {word!r}: {error}") from error
            if ids:
                found[tuple(ids)] = None
        if not found:
            raise TextError(f"the word {word!r} has no tokens in this model's vocabulary")
        return list(found)

    def constraint(
        self, params: SamplingParams, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> GrammarConstraint | None:
        """What the structured output of one job allows; see `Grammars.compile`.

        Args:
            vocab_size: rows of the model's output layer.
            eos_ids: tokens that end an output by the model's configuration.
        """
        grammars = Grammars(self, self._is_hidden, vocab_size=vocab_size, eos_ids=eos_ids)
        # the first of several threads wins, since its tree of tokens is expensive
        return self._grammars.setdefault((vocab_size, tuple(eos_ids)), grammars).compile(params)

    def _ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        with self._lock:
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _inside(self, token_id: int) -> bytes:
        """What a decoder that is not byte-level makes of one token behind another."""
        token = self._vocabulary[token_id]
        if self._is_byte(token_id) and self.decode([token_id]) != token:
            return bytes([int(token[3:5], 16)])
        text = self.decode([token_id, token_id])[len(self.decode([token_id])) :]
        if "\ufffd" in text and all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        return text.encode()

    def _bytes_of(self, token_id: int) -> bytes:
        """What a byte-level decoder makes of one token."""
        if self._is_hidden(token_id):
            return b""
        token = self._vocabulary[token_id]
        if all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        return token.encode()  # an added token stands for its own text

    def _is_hidden(self, token_id: int) -> bool:
        """Whether decoding skips the token: special ones, and ids that stand for nothing."""
        is_known = 0 <= token_id < len(self._vocabulary) and self._vocabulary[token_id] != ""
        return not is_known or token_id in self._special

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._vocabulary[token_id]) is not None


def _vocabulary_of(tokenizer: Any) -> list[str]:
    by_token: dict[str, int] = tokenizer.get_vocab()
    words = [""] * (max(by_token.values(), default=-1) + 1)
    for token, number in by_token.items():
        words[number] = token
    return words
