"""What structured output refuses, what it survives, and whom it does not disturb."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pilotfish_broker.errors import InvalidRequest
from pilotfish_workers.model.grammar import GrammarError
from pilotfish_workers.model.text import Text
from tests.grammar_kit import EOS, allowed, byte_level, constraint, next_of

EXPLOSIVE = "(((a{1,1000}){1,1000}){1,1000}){1,1000}"
"""Allowed, but its lexer grows without end as the output does."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return byte_level(tmp_path_factory.mktemp("byte-level"))


def schema(**parts: object) -> str:
    return json.dumps(parts)


@pytest.mark.parametrize(
    ("field", "source", "told"),
    [
        ("regex", "(a", r"unclosed group"),
        ("regex", "a(?=b)", r"look-around, including look-ahead and look-behind, is not supported"),
        ("regex", r"(a)\1", r"backreferences are not supported"),
        ("regex", "a\\", r"ends in a single backslash"),
        ("regex", r"a\b", r"not supported"),
        ("regex", "[^\x00-\U0010ffff]", r"no text can follow it"),
        ("json_schema", schema(type="objekt"), r"Invalid type: objekt"),
        ("json_schema", schema(type="array", uniqueItems=True), r"Unimplemented keys.*uniqueItems"),
        ("json_schema", schema(oneOf=[{}, {}]), r"oneOf.*coerce_one_of"),
        ("json_schema", schema(type="string", format="zip"), r"Unknown format: zip"),
        ("json_schema", schema(**{"$ref": "http://a.example/b"}), r"not present in a registry"),
        ("json_schema", schema(**{"$ref": "#"}), r"no text can follow it"),
        ("json_schema", schema(type="integer", minimum=5, maximum=3), r"Unsatisfiable"),
        ("json_schema", "false", r"Unsatisfiable schema"),
        (
            "json_schema",
            schema(
                allOf=[{"anyOf": [{"required": [f"{i}{j}"]} for j in "abcd"]} for i in "klmnopqr"]
            ),
            r"schema too large",
        ),
        ("grammar", "# nothing", r"start"),
        ("grammar", 'start: "a"\nstart: b', r"line 2: .*"),
        ("grammar", "start: b", r'line 1: unknown name: "b"'),
        ("grammar", 'start: "a', r"line 1: lexer error"),
        ("grammar", 'start: "a"\nb: <user>', r"names the special token <user>"),
        ("grammar", 'start: "" "a" <[7]>', r"names the special token <\[7\]>"),
        ("grammar", 'start: b\nb[stop = "x"]: /.*/', r"stop =.*taken back.*\{0,20\}"),
        ("grammar", "start: b\nb[max_tokens=3]: /.*/", r"max_tokens=.*taken back"),
        ("grammar", 'start: b "c"\nb[suffix=""]: /.*/', r'has suffix="";.*ends the output'),
        ("grammar", "start: b\nb[temperature=0.5]: /.*/", r"temperature"),
        ("grammar", "start: " + "(" * 20_000, r"too deeply nested"),
        ("grammar", "start: start", r"no text can follow it"),
        (
            "grammar",
            "start: A0\n" + "\n".join(f"A{n}: A{n + 1} A{n + 1}" for n in range(60)) + '\nA60: "a"',
            r"too big",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(
    text: Text, field: str, source: str, told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        constraint(text, **{field: source})
    assert caught.value.field == field
    message = str(caught.value)
    assert len(message) < 500
    assert "\n" not in message
    assert "no_forcing" not in message
    assert "%json" not in message


@pytest.mark.parametrize(
    "source",
    [
        'start: "<user> stop= temperature=" // <user> stop="a"\n# <[3]>',
        'start: "" "<user>"',
        r'start: "\"" "<user>"',
        r"start: /<user>\/<a>/ | /[<]user[>]/",
        'start: %json {"enum": ["<user>", "stop="]}',
    ],
)
def test_what_only_looks_like_something_refused_is_taken(text: Text, source: str) -> None:
    assert next_of(constraint(text, grammar=source))


def test_what_is_given_as_json_is_nothing_else_than_lark(text: Text) -> None:
    """llguidance itself would take a grammar that begins with a brace for its own JSON form."""
    with pytest.raises(InvalidRequest, match="line 1"):
        constraint(text, grammar='{"grammars": [{"lark_grammar": "start: \\"a\\""}]}')


@pytest.mark.parametrize("written", ["a/b", r"a\/b", "a\nb", "a\\\nb", 'a"b', "#a", "//", r"\\/"])
def test_no_sign_in_an_expression_ends_it_early(text: Text, written: str) -> None:
    made = constraint(text, regex=written)
    meant = {r"a\/b": "a/b", "a\\\nb": "a\nb", r"\\/": "\\/"}.get(written, written)
    output = [text.vocabulary().index(word) for word in _alphabetic(meant)]
    assert next_of(made, output) == set(EOS)


def _alphabetic(written: str) -> list[str]:
    return ["Ċ" if letter == "\n" else letter for letter in written]


def test_a_model_without_an_end_can_give_no_structured_output(text: Text) -> None:
    for ends in ((), (400,), (-1,)):
        with pytest.raises(InvalidRequest, match="eos_token_id") as caught:
            constraint(text, eos=ends, regex="a")
        assert caught.value.field == "regex"


def test_tokens_that_read_otherwise_beside_others_are_refused(tmp_path: Path) -> None:
    words = ["[UNK]", "[SEP]", "a", "b", "c", "##c", *'{}[]":,1']
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##", cleanup=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="byte-level or byte-fallback tokenizer"):
        constraint(Text(str(tmp_path)), eos=(1,), regex="a")


def test_a_tokenizer_that_writes_nothing_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"</s>": 0, "a": 1}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="byte-level or byte-fallback tokenizer"):
        constraint(Text(str(tmp_path)), eos=(0,), regex="a")


# --- faults of one output ---------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [[1], [97], [-1], [10**6], [290]])
def test_an_output_that_breaks_its_grammar_fails_alone(text: Text, wrong: list[int]) -> None:
    made, other = (constraint(text, regex="the( the)*") for _ in range(2))
    th, e, blank = (text.vocabulary().index(word) for word in ("th", "e", "Ġ"))
    rows = other.masks([], [th, e])
    for _ in range(2):  # and again, not only the first time
        with pytest.raises(GrammarError, match=f"token {wrong[0]} at position 2 "):
            made.masks([th, e, *wrong], [])
    assert np.array_equal(made.masks([], [th, e]), rows)
    made.rewind()
    assert np.array_equal(made.masks([], [th, e]), rows)
    assert blank in next_of(other, [th, e])


def test_drafts_beyond_the_limits_leave_the_place_as_it_was(text: Text) -> None:
    a = text.vocabulary().index("a")
    made = constraint(text, regex=EXPLOSIVE)
    rows = made.masks([], [a] * 40)
    known = [allowed(row) for row in rows]
    reach = known.index(set())
    assert 4 < reach < 40, "the limit lies inside the draft"
    assert known[1:reach] == [{a, *EOS}] * (reach - 1)
    assert known[reach:] == [set()] * (41 - reach)
    assert next_of(made) == {a}
    assert np.array_equal(made.masks([a], [a, a]), rows[1:4])


def test_an_output_beyond_the_limits_is_allowed_nothing_more(text: Text) -> None:
    a = text.vocabulary().index("a")
    made = constraint(text, regex=EXPLOSIVE)
    reach = next(length for length in range(40) if not next_of(made, [a] * length))
    assert 4 < reach < 40
    assert "more than the limits: lexer error: too many expressions" in made.trouble
    assert not next_of(made, [a] * reach), "nor at the next call"
    assert next_of(constraint(text, regex=EXPLOSIVE), [a]) == {a, *EOS}


def test_a_place_that_nothing_leads_on_from_allows_nothing(text: Text) -> None:
    a, b = (text.vocabulary().index(letter) for letter in "ab")
    made = constraint(text, grammar='start: "a" c\nc: "b" d\nd: d')
    assert [allowed(row) for row in made.masks([], [a, b, a])] == [{a}, {b}, set(), set()]
    assert next_of(made) == {a}, "a draft that goes there does no harm"
    assert not next_of(made, [a, b])
    assert made.trouble == "no text can follow it"


# --- threads and stacks -----------------------------------------------------------------------


def test_many_threads_compile_at_once_and_others_use_what_they_made(tmp_path: Path) -> None:
    fresh = byte_level(tmp_path)  # its tree of tokens is not built yet
    expected = {
        f"{word}(a|b){{0,{n}}}": fresh.token_bytes for n in range(4) for word in ("the", "é", "1")
    }
    barrier = threading.Barrier(6)

    def compile_all(offset: int) -> dict[str, object]:
        barrier.wait()
        order = [*expected][offset:] + [*expected][:offset]
        return {one: constraint(fresh, regex=one) for one in order}

    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(compile_all, range(6)))
    single = {one: next_of(constraint(fresh, regex=one)) for one in expected}
    for each in made:
        assert {one: next_of(each[one]) for one in expected} == single  # type: ignore[arg-type]


DEEP = """
import sys
from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.model.grammar import Grammars

class Bytes:
    vocab_size = 257
    def token_bytes(self, token_id):
        return bytes([token_id - 1]) if token_id else b""
    def word_ids(self, word):
        return [tuple(byte + 1 for byte in word.encode())]

grammars = Grammars(Bytes(), lambda token: token == 0, vocab_size=257, eos_ids=[0])
made = grammars.compile(SamplingParams(**{sys.argv[1]: sys.stdin.read()}))
print(made.masks([], []).any())
"""


@pytest.mark.parametrize("kind", ["rules", "terminals", "references"])
def test_the_longest_chain_of_references_does_not_end_the_process(kind: str) -> None:
    """It did, at the usual size of a stack."""
    field, source = chain(kind)
    done = subprocess.run(
        [sys.executable, "-c", DEEP, field], input=source, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def chain(kind: str) -> tuple[str, str]:
    """As long as 64 KiB can hold."""
    if kind == "references":
        steps = 1190
        defs: dict[str, object] = {
            f"{n}": {"properties": {"a": {"$ref": f"#/$defs/{n + 1}"}}} for n in range(steps)
        }
        whole = {"$ref": "#/$defs/0", "$defs": {**defs, f"{steps}": True}}
        return "json_schema", json.dumps(whole, separators=(",", ":"))
    letter = "a" if kind == "rules" else "A"
    steps = 4600
    rules = [f"{letter}{n}:{letter}{n + 1}" for n in range(steps)]
    return "grammar", "\n".join([f"start:{letter}0", *rules, f'{letter}{steps}:"x"'])
