"""Tiny vocabularies, and what a mask must be by plain reasoning over texts."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.model.grammar import GrammarConstraint
from pilotfish_workers.model.text import Text
from pilotfish_workers.speculative.sampler import Constraint
from tests.tiny_models import SPECIAL_TOKENS, build_tokenizer

VOCAB = 300
"""Rows of the imagined model's output layer; the byte-level tokenizer has 288 tokens."""
EOS = (0, 3)
"""Two tokens that end an output: `<eos>` and `<system>`."""
SPECIAL = {*SPECIAL_TOKENS, "<unk>", "<s>", "</s>"}


def byte_level(folder: Path) -> Text:
    """Bytes, a few merges such as " the" and "é", fillers, four special tokens."""
    build_tokenizer().save_pretrained(folder)
    return Text(str(folder))


def byte_fallback(folder: Path) -> Text:
    """As SentencePiece: some tokens stand for the same byte; the first space is not shown."""
    words = ["<unk>", "</s>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "a", "b", "ab", "é", "中", "1", "▁▁"]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "</s>", "<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    return Text(str(folder))


def constraint(text: Text, *, eos: Sequence[int] = EOS, **structure: str) -> GrammarConstraint:
    made = text.constraint(SamplingParams(**structure), vocab_size=VOCAB, eos_ids=eos)
    assert made is not None
    return made


def allowed(row: NDArray[np.int32]) -> set[int]:
    """Ids of a row's bits, as the interface numbers them."""
    return {
        32 * word + bit for word in range(len(row)) for bit in range(32) if row[word] >> bit & 1
    }


def next_of(made: Constraint, output: Sequence[int] = ()) -> set[int]:
    return allowed(made.masks(output, [])[0])


def by_reasoning(
    text: Text, language: Collection[bytes], output: bytes, eos: Sequence[int] = EOS
) -> set[int]:
    """The tokens after which `output` still begins a text of a finite language, and the tokens
    that end it where it is one."""
    begun = {written[:length] for written in language for length in range(len(written) + 1)}
    found = {token for token, piece in _pieces(text).items() if output + piece in begun}
    return found | (set(eos) if output in language else set())


@functools.cache
def _pieces(text: Text) -> dict[int, bytes]:
    special = {token for token, word in enumerate(text.vocabulary()) if word in SPECIAL}
    return {t: text.token_bytes(t) for t in range(text.vocab_size) if t not in special}
