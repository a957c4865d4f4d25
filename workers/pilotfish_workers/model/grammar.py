"""Structured output: compiles what a job asks for over one model's vocabulary.

llguidance turns a grammar into an Earley parser over a lexer made of derivatives of regular
expressions, and walks a tree of the whole vocabulary with it. This module gives it the vocabulary
and says in pilotfish's words what is wrong with a grammar. Imports neither torch nor transformers.

A token is allowed exactly where its bytes, behind those of the output, begin a text of the grammar.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.sampling import STRUCTURES, SamplingParams
from pilotfish_workers.model.errors import TextError
from pilotfish_workers.model.grammar_constraint import GrammarConstraint, GrammarError, bits
from pilotfish_workers.model.grammar_source import reason, to_lark

__all__ = ["GrammarConstraint", "GrammarError", "Grammars", "Words"]

_STACK_BYTES: Final = 256 << 20
"""llguidance follows references by recursion. A chain of them as long as a grammar may be takes
more than the usual 8 MiB, and would end the process. Pages that are not touched cost nothing."""
_SAMPLE: Final = '{"a": [1, "b c"]}'
_NAMES: Final = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
}

_stack_size = threading.Lock()


class Words(Protocol):
    """What is needed of a tokenizer; see `Text`."""

    @property
    def vocab_size(self) -> int: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def word_ids(self, word: str) -> list[tuple[int, ...]]: ...


class Grammars:
    """Compiles the grammars of all jobs of one model.

    Args:
        words: the tokenizer; asked at the first compilation only, for every token.
        is_hidden: whether a token leaves no trace in a text; such tokens are never allowed.
        vocab_size: rows of the model's output layer. Ids from the tokenizer's size on are never
            allowed.
        eos_ids: tokens that end an output, by the model's configuration.
    """

    def __init__(
        self,
        words: Words,
        is_hidden: Callable[[int], bool],
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
    ) -> None:
        self._words = words
        self._is_hidden = is_hidden
        self._vocab_size = vocab_size
        self._eos_ids = sorted({token for token in eos_ids if 0 <= token < vocab_size})
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._vocabulary: _Vocabulary | None = None

    def compile(self, params: SamplingParams) -> GrammarConstraint | None:
        """What `params` asks for, at the beginning of an output; None where that is nothing.

        Takes milliseconds, the first time up to seconds. May be called by several threads; what it
        returns is for one output and one thread at a time.

        Raises:
            InvalidRequest: the schema, expression or grammar is wrong, needs what is not
                supported, is too complex, or allows nothing; or this model can do none.
        """
        for field in STRUCTURES:
            source = getattr(params, field)
            if source is not None:
                return self._compile(field, source)
        return None

    def _compile(self, field: str, source: str) -> GrammarConstraint:
        lark = to_lark(field, source)
        vocabulary = self._ready(field)
        with self._compiling:  # one may take a gigabyte
            made = GrammarConstraint(vocabulary, lambda: _build(field, lark, vocabulary.tokenizer))
        if not made.masks([], []).any():
            raise _refusal(field, made.trouble)
        return made

    def _ready(self, field: str) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._refuse_unfit(field)
                self._vocabulary = _Vocabulary(self._texts(), self._eos_ids)
            return self._vocabulary

    def _refuse_unfit(self, field: str) -> None:
        if not self._eos_ids:
            raise InvalidRequest(
                "structured output ends with an end-of-sequence token and this model has none; "
                "name it as eos_token_id in the model's generation_config.json",
                field=field,
            )
        try:
            ids = self._words.word_ids(_SAMPLE)[0]
        except TextError:  # it cannot even write the sample
            ids = ()
        written = b"".join(map(self._words.token_bytes, ids))
        if written.removeprefix(b" ") != _SAMPLE.encode():
            raise InvalidRequest(
                "structured output needs tokens that stand for the same bytes wherever they are, "
                "and this model's do not; use one with a byte-level or byte-fallback tokenizer",
                field=field,
            )

    def _texts(self) -> list[bytes]:
        """The bytes of each token that may stand inside an output; empty for the others."""
        texts = [b""] * self._vocab_size
        for token in range(min(self._vocab_size, self._words.vocab_size)):
            if token not in self._eos_ids and not self._is_hidden(token):
                text = self._words.token_bytes(token)
                # no text has this byte, and to llguidance it marks special tokens
                texts[token] = b"" if text.startswith(b"\xff") else text
        return texts


class _Vocabulary:
    """Implements `grammar_constraint.Vocabulary`; shared by all threads.

    Attributes:
        tokenizer: llguidance's tree of all tokens.
    """

    def __init__(self, texts: list[bytes], eos_ids: list[int]) -> None:
        wrapper = TokenizerWrapper(_Bytes(texts, eos_ids[0]))
        self.tokenizer = LLTokenizer(wrapper, eos_token=eos_ids)
        self.size = len(texts)
        self.texts: NDArray[np.int32] = bits([i for i, text in enumerate(texts) if text], self.size)
        self.ends: NDArray[np.int32] = bits(eos_ids, self.size)
        self.end_ids = frozenset(eos_ids)


class _Bytes:
    """The form in which llguidance reads a vocabulary."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        # asked for only to choose among the ways to write a text, which is left off
        raise NotImplementedError


def _build(field: str, lark: str, tokenizer: LLTokenizer) -> LLMatcher:
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    limits = LLParserLimits(verbose_errors=False)
    matcher = _with_room(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=limits))
    if matcher.is_error():
        raise _refusal(field, reason(field, matcher.get_error()))
    return matcher


def _refusal(field: str, told: str) -> InvalidRequest:
    return InvalidRequest(f"this {_NAMES[field]} cannot be used: {told}", field=field)


def _with_room(call: Callable[[], LLMatcher]) -> LLMatcher:
    """The result of a call that may need a large stack."""
    result: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # a panic is no Exception
            result.set_exception(error)

    thread = threading.Thread(target=run, name="grammar")
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return result.result()
