"""Masks of structured output: what is allowed, and how the place is kept over drafts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.model import grammar_constraint
from pilotfish_workers.model.grammar import Grammars
from pilotfish_workers.model.grammar_constraint import GrammarConstraint, bits
from pilotfish_workers.model.text import Text
from pilotfish_workers.speculative.sampler import Constraint
from tests.grammar_kit import (
    EOS,
    VOCAB,
    allowed,
    by_reasoning,
    byte_fallback,
    byte_level,
    constraint,
    next_of,
)

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["id", "name", "tags", "at"],
    "properties": {
        "id": {"type": "integer", "minimum": -20, "maximum": 300},
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["the", "ön", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "at": {"$ref": "#/$defs/place"},
    },
    "$defs": {
        "place": {
            "type": "object",
            "additionalProperties": False,
            "required": ["code"],
            "properties": {
                "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
                "in": {"$ref": "#/$defs/place"},
            },
        }
    },
}
GRAMMARS: dict[str, dict[str, str]] = {
    "schema": {"json_schema": json.dumps(SCHEMA)},
    "expression": {"regex": r"(the|an|in|é|中|[0-9]{1,3})( (the|er)){0,4}"},
    "sums": {"grammar": 'start: term ("+" term)*\nterm: /[0-9]+/ | "(" start ")"'},
    "spaces": {"grammar": 'start: "the" "in" | "an"\n%ignore /[ \\n]+/'},
    "lazy": {"grammar": 'start: item "."\nitem[lazy]: /[a-z ]*on/'},
    "suffix": {"grammar": 'start: item "."\nitem[suffix=/on?/, capture]: /[a-z ]*/'},
    "nested": {"grammar": 'start: "the " %json {"enum": ["the", 10, "é"]} "in"'},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return byte_level(tmp_path_factory.mktemp("byte-level"))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return byte_fallback(tmp_path_factory.mktemp("fallback"))


# --- masks are what plain reasoning over texts says -------------------------------------------


@dataclass
class Language:
    """A regular expression and every text that it stands for."""

    expression: str
    texts: frozenset[str]


_letters = st.sampled_from(["a", "b", "t", "h", "e", "1", " ", "é", "ö", "中", "/", "\n", "."])


def _literal(letters: str) -> Language:
    return Language(re.escape(letters), frozenset({letters}))


def _either(parts: list[Language]) -> Language:
    joined = "|".join(part.expression for part in parts)
    return Language(f"(?:{joined})", frozenset().union(*(part.texts for part in parts)))


def _sequence(parts: list[Language]) -> Language:
    texts = {""}
    for part in parts:
        texts = {head + tail for head in texts for tail in part.texts}
    return Language("".join(part.expression for part in parts), frozenset(texts))


def _repeated(part: Language, low: int, more: int) -> Language:
    times = [_sequence([part] * n).texts for n in range(low, low + more + 1)]
    expression = f"(?:{part.expression}){{{low},{low + more}}}"
    return Language(expression, frozenset().union(*times))


languages = st.recursive(
    st.text(_letters, min_size=1, max_size=4).map(_literal),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(_either),
        st.lists(inner, min_size=1, max_size=3).map(_sequence),
        st.builds(_repeated, inner, st.integers(0, 1), st.integers(0, 2)),
    ),
    max_leaves=5,
).filter(lambda language: len(language.texts) < 200)


@pytest.mark.parametrize("kind", ["byte-level", "fallback"])
@given(language=languages, choices=st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_a_token_is_allowed_just_where_it_begins_a_text_of_the_language(
    text: Text, fallback: Text, kind: str, language: Language, choices: random.Random
) -> None:
    words, eos = (text, EOS) if kind == "byte-level" else (fallback, (1,))
    assert all(re.fullmatch(language.expression, written) for written in language.texts)
    written = {one.encode() for one in language.texts}
    made = constraint(words, eos=eos, regex=language.expression)
    output: list[int] = []
    while True:
        so_far = b"".join(map(words.token_bytes, output))
        expected = by_reasoning(words, written, so_far, eos)
        assert next_of(made, output) == expected
        text_tokens = sorted(expected - set(eos))
        if not text_tokens:
            assert so_far in written
            return
        output.append(choices.choice(text_tokens))


def test_tokens_that_stand_for_the_same_bytes_are_allowed_alike(fallback: Text) -> None:
    words = fallback.vocabulary()
    first = next_of(constraint(fallback, eos=(1,), regex="ab|é"), [])
    assert {words[token] for token in first} == {"a", "<0x61>", "ab", "é", "<0xC3>"}


def test_what_must_come_may_be_written_in_every_way(text: Text) -> None:
    """Not only in the tokenizer's own, which would change the law beyond what is asked for."""
    words = text.vocabulary()
    ways = {"t", "th", "the"}
    for structure in (
        {"regex": "the"},
        {"grammar": 'start: "the"\n%llguidance {"no_forcing": false}'},
        {"grammar": 'start: %lark {\nstart: "the"\n%llguidance {"no_forcing": false}\n}'},
    ):
        assert {words[token] for token in next_of(constraint(text, **structure))} == ways
    schema = constraint(text, json_schema='{"enum": ["the"]}')
    assert {words[token] for token in next_of(schema, [words.index('"')])} == ways


def test_a_character_in_several_tokens_is_completed(text: Text) -> None:
    made = constraint(text, regex="é+|中")
    first, second = (text.vocabulary().index(sign) for sign in "Ã©")
    merged = text.vocabulary().index("Ã©")
    assert {first, merged} < next_of(made, [])
    assert next_of(made, [first]) == {second}
    assert next_of(made, [first, second]) == {first, merged, *EOS}


# --- ends, special tokens, sizes --------------------------------------------------------------


def test_every_end_is_allowed_just_where_the_grammar_accepts(text: Text) -> None:
    made = constraint(text, regex="ab?")
    a, b = (text.vocabulary().index(letter) for letter in "ab")
    rows = made.masks([], [a, b])
    assert [allowed(row) for row in rows] == [{a}, {b, *EOS}, set(EOS)]


def test_behind_an_end_there_are_only_ends(text: Text) -> None:
    made = constraint(text, regex="ab*")
    a, b = (text.vocabulary().index(letter) for letter in "ab")
    assert [allowed(row) for row in made.masks([a], [EOS[1], EOS[0], b])] == [
        {b, *EOS},
        set(EOS),
        set(EOS),
        set(),
    ]
    assert next_of(made, [a, b]) == {b, *EOS}, "a drafted end is taken back"
    assert next_of(made, [a, b, EOS[1]]) == set(EOS)


def test_no_grammar_allows_a_special_token_or_one_without_text(text: Text) -> None:
    everything = constraint(text, regex="(?s:.*)")
    invalid_bytes = constraint(
        text, grammar='%llguidance {"allow_invalid_utf8": true}\nstart: /(?s-u:.*)/'
    )
    for made in (everything, invalid_bytes):
        found = next_of(made)
        assert set(EOS) < found
        assert found.isdisjoint({1, 2}), "<user> and <assistant>"
        assert max(found) < text.vocab_size
        assert not allowed(made.masks([], [1])[1]), "nor is it taken as a draft"


def test_an_end_with_a_text_of_its_own_is_an_end_and_no_text(text: Text) -> None:
    a, b, c = (text.vocabulary().index(letter) for letter in "abc")
    made = constraint(text, eos=(b,), regex="a[bc]?")
    assert [allowed(row) for row in made.masks([], [a, c])] == [{a}, {b, c}, {b}]
    assert next_of(constraint(text, eos=(b,), regex="a[bc]"), [a]) == {c}


def test_the_vocabulary_has_the_last_word_on_what_is_text() -> None:
    """Whatever the library thinks of a token."""

    class Tokens:
        eos_token_id, bos_token_id = 0, None
        tokens = (b"", b"a", b"b")

        def __call__(self, text: bytes) -> list[int]:
            raise NotImplementedError

    @dataclass
    class Narrow:
        size = 3
        texts, ends, end_ids = bits([1], 3), bits([0], 3), frozenset({0})

    tokenizer = LLTokenizer(TokenizerWrapper(Tokens()), eos_token=[0])
    made = GrammarConstraint(Narrow(), lambda: LLMatcher(tokenizer, "start: /[ab]*/", log_level=0))
    assert [allowed(row) for row in made.masks([], [1, 2, 1])] == [{0, 1}, {0, 1}, set(), set()]


def test_tokens_with_a_byte_that_no_text_has_are_left_out() -> None:
    """llguidance takes 0xFF at the beginning of a token for a sign of its own."""

    class Bytes:
        texts = (b"</s>", *(bytes([byte]) for byte in range(256)), b"\xff\xfe", b"a\xff")
        vocab_size = len(texts)

        def token_bytes(self, token_id: int) -> bytes:
            return self.texts[token_id]

        def word_ids(self, word: str) -> list[tuple[int, ...]]:
            return [tuple(byte + 1 for byte in word.encode())]

    words = Bytes()
    grammars = Grammars(words, lambda token: token == 0, vocab_size=words.vocab_size, eos_ids=[0])
    made = grammars.compile(
        SamplingParams(grammar='%llguidance {"allow_invalid_utf8": true}\nstart: /(?s-u:.*)/')
    )
    assert made is not None
    assert next_of(made) == set(range(words.vocab_size)) - {256, 257}


@pytest.mark.parametrize("size", [288, 289, 319, 320, 1000])
def test_rows_are_as_wide_as_the_models_vocabulary(text: Text, size: int) -> None:
    params = SamplingParams(regex="a*")
    made = text.constraint(params, vocab_size=size, eos_ids=EOS)
    assert made is not None
    rows = made.masks([], [0, 1])
    assert rows.dtype == np.int32
    assert rows.shape == (3, -(-size // 32))
    assert allowed(rows[0]) == next_of(constraint(text, regex="a*"))


def test_a_model_with_fewer_rows_than_the_tokenizer_has_tokens(text: Text) -> None:
    made = text.constraint(SamplingParams(regex="the|é"), vocab_size=265, eos_ids=(0, 400))
    assert made is not None
    words = text.vocabulary()
    every = next_of(constraint(text, regex="the|é"))
    assert max(every) == words.index("Ã©") >= 265
    assert next_of(made) == every - {words.index("Ã©")}


def test_without_structure_there_is_no_constraint(text: Text) -> None:
    assert text.constraint(SamplingParams(), vocab_size=VOCAB, eos_ids=()) is None


# --- the place is kept over drafts, commits and refusals --------------------------------------


def expected_rows(
    text: Text, structure: dict[str, str], output: Sequence[int], drafted: Sequence[int]
) -> list[set[int]]:
    """Row by row from constraints that have seen nothing else; up to where drafts break off."""
    rows = []
    for length in range(len(drafted) + 1):
        fresh = constraint(text, **structure)
        row = next_of(fresh, [*output, *drafted[:length]])
        rows.append(row)
        if length < len(drafted) and drafted[length] not in row:
            break
    return rows


@pytest.mark.parametrize("name", GRAMMARS)
@given(choices=st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_rows_over_drafts_equal_rows_without_a_past(
    text: Text, name: str, choices: random.Random
) -> None:
    structure = GRAMMARS[name]
    made, other = constraint(text, **structure), constraint(text, **structure)
    output: list[int] = []
    for _ in range(7):
        drafted = _draft(other, output, choices)
        for attempt in range(choices.choice([1, 1, 2])):
            if attempt:  # the drafter begins anew with other tokens
                drafted = _mixed(drafted, choices)
            rows = [allowed(row) for row in made.masks(output, drafted)]
            expected = expected_rows(text, structure, output, drafted)
            assert rows[: len(expected)] == expected
            assert rows[len(expected) :] == [set()] * (len(drafted) + 1 - len(expected))
        kept = choices.randint(0, len(expected) - 1)
        output += drafted[:kept]
        recovered = sorted(expected[kept])
        output.append(choices.choice(recovered))


def _draft(other: Constraint, output: list[int], choices: random.Random) -> list[int]:
    """Tokens that are mostly allowed, so that drafts are long."""
    drafted: list[int] = []
    for _ in range(choices.randint(0, 5)):
        found = sorted(allowed(other.masks(output, drafted)[-1])) if choices.random() < 0.9 else []
        drafted.append(choices.choice(found or [-1, 1, 97, 290, VOCAB, 10**6, *EOS]))
        if not found:
            break
    return drafted


def _mixed(drafted: list[int], choices: random.Random) -> list[int]:
    place = choices.randint(0, len(drafted))
    return [*drafted[:place], choices.randrange(VOCAB), *drafted[place:]]


@pytest.mark.parametrize("name", GRAMMARS)
def test_after_rewinding_it_is_as_new(text: Text, name: str) -> None:
    made = constraint(text, **GRAMMARS[name])
    walked = walk(text, made, random.Random(1), 12)
    before = made.masks([], walked)
    made.rewind()
    assert np.array_equal(made.masks([], walked), before)
    assert np.array_equal(constraint(text, **GRAMMARS[name]).masks([], walked), before)
    assert all(token in allowed(row) for token, row in zip(walked, before, strict=False))


def test_a_resumed_output_is_taken_at_once(text: Text) -> None:
    made = constraint(text, **GRAMMARS["schema"])
    walked = walk(text, made, random.Random(2), 60)
    row = made.masks(walked, [])
    resumed = constraint(text, **GRAMMARS["schema"])
    assert np.array_equal(resumed.masks(walked, []), row)


def test_rows_are_copies(text: Text) -> None:
    made = constraint(text, regex="ab*")
    rows = made.masks([], [])
    rows[:] = -1
    assert next_of(made) == {text.vocabulary().index("a")}


def test_no_row_is_looked_for_twice(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter asks for one row more each time, and commits what it drafted."""
    looked = []
    fill = grammar_constraint.fill_next_token_bitmask

    def counted(*args: Any) -> None:
        looked.append(args)
        fill(*args)

    monkeypatch.setattr(grammar_constraint, "fill_next_token_bitmask", counted)
    made = constraint(text, regex="[ab]*")
    a, b = (text.vocabulary().index(letter) for letter in "ab")
    drafted = [a, b, a, b]
    for length in range(5):
        made.masks([], drafted[:length])
    assert len(looked) == 5
    made.masks([a, b, a], [b])
    assert len(looked) == 5
    made.masks([a, b, a, a], [])
    assert len(looked) == 6


# --- whole outputs ----------------------------------------------------------------------------


def walk(text: Text, made: Constraint, choices: random.Random, most: int) -> list[int]:
    """An output drawn from the masks alone, with a leaning towards ends; without them."""
    closing = {text.vocabulary().index(sign) for sign in '"}],'}
    output: list[int] = []
    while len(output) < most:
        found = next_of(made, output)
        if found & set(EOS):
            break
        preferred = sorted(found & closing) if choices.random() < 0.5 else []
        output.append(choices.choice(preferred or sorted(found)))
    return output


@pytest.mark.parametrize("seed", range(25))
def test_output_by_the_masks_is_json_by_the_schema(text: Text, seed: int) -> None:
    made = constraint(text, **GRAMMARS["schema"])
    output = walk(text, made, random.Random(seed), 4000)
    assert next_of(made, output) == set(EOS), "complete: nothing but an end may follow"
    check_by_schema(json.loads(text.decode(output)))


def check_by_schema(value: Any) -> None:
    assert set(value) <= {"id", "name", "kind", "tags", "at"}
    assert type(value["id"]) is int
    assert -20 <= value["id"] <= 300
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert value.get("kind") in ("the", "ön", None)
    assert len(value["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in value["tags"])
    place = value["at"]
    while place is not None:
        assert set(place) <= {"code", "in"}
        assert re.fullmatch("[A-Z]{2}-[0-9]+", place["code"])
        place = place.get("in")


def test_names_come_in_the_order_of_the_schema(text: Text) -> None:
    made = constraint(text, **GRAMMARS["schema"])
    for seed in range(5):
        output = walk(text, made, random.Random(seed), 4000)
        made.rewind()
        names = list(json.loads(text.decode(output)))
        assert names == [name for name in ("id", "name", "kind", "tags", "at") if name in names]
