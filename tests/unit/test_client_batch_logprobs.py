"""Log-probabilities in the shapes of OpenAI's answers."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.batch_logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    token_text,
)
from pilotfish_broker.logprobs import Alternative, TokenLogprob


def at(text: str | bytes, logprob: float = -0.5, *top: Alternative) -> TokenLogprob:
    raw = text.encode() if isinstance(text, str) else text
    return TokenLogprob(Alternative(1, logprob, raw), list(top))


def other(token: int, text: str, logprob: float) -> Alternative:
    return Alternative(token, logprob, text.encode())


def test_a_chat_has_token_bytes_and_alternatives() -> None:
    found = chat_logprobs([at("bl", -0.25, other(1, "bl", -0.25), other(2, "å", -1.5)), at("x")])
    assert found == {
        "content": [
            {
                "token": "bl",
                "logprob": -0.25,
                "bytes": [98, 108],
                "top_logprobs": [
                    {"token": "bl", "logprob": -0.25, "bytes": [98, 108]},
                    {"token": "å", "logprob": -1.5, "bytes": [195, 165]},
                ],
            },
            {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []},
        ],
        "refusal": None,
    }


def test_a_completion_has_four_lists() -> None:
    items = [at("bl", -0.25, other(2, "å", -0.125)), at("å", -0.5)]
    assert completion_logprobs(items, [], "blå") == {
        "tokens": ["bl", "å"],
        "token_logprobs": [-0.25, -0.5],
        "top_logprobs": [{"å": -0.125, "bl": -0.25}, {"å": -0.5}],
        "text_offset": [0, 2],
    }


def test_an_echoed_prompt_stands_before_the_output_and_its_first_token_has_no_probability() -> None:
    prompt = [None, at("ab", -2.0)]
    found = completion_logprobs([at("c", -1.0)], prompt, "aababc"[1:])
    assert found == {
        "tokens": ["ab", "ab", "c"],
        "token_logprobs": [None, -2.0, -1.0],
        "top_logprobs": [None, {"ab": -2.0}, {"c": -1.0}],
        "text_offset": [0, 2, 4],
    }


@pytest.mark.parametrize(
    ("text", "following", "first"),
    [
        ("aaab", ["a", "a", "b"], "a"),
        ("aaa", ["a", "a", "b"], "a"),  # a stop string cut the text
        ("hello", ["hello"], ""),  # a mark before the text
        ("hello", ["hel", "lo", "</s>"], ""),  # a mark behind it
        ("Hello", ["ello"], "H"),
        ("Hello", ["something", "else"], ""),  # marks within: it cannot be told
        ("åben", ["ben"], "å"),
    ],
)
def test_the_first_prompt_token_is_what_is_left_of_the_text(
    text: str, following: list[str], first: str
) -> None:
    items = [at(part) for part in following]
    found = completion_logprobs(items[1:], [None, items[0]], text)
    assert found["tokens"] == [first, *following]
    assert found["text_offset"][1] == len(first)


def test_a_token_inside_a_character_begins_where_the_character_does() -> None:
    raw = "a€b".encode()
    items = [at(raw[:2]), at(raw[2:3]), at(raw[3:])]
    found = completion_logprobs(items, [], "a€b")
    assert found["tokens"] == ["bytes:\\x61\\xe2", "bytes:\\x82", "bytes:\\xac\\x62"]
    assert found["text_offset"] == [0, 1, 1]
    assert bytes(chat_logprobs(items)["content"][1]["bytes"]) == b"\x82"


def test_bytes_that_are_no_text_stand_for_the_marks_that_are_shown_for_them() -> None:
    items = [at("a"), at(b"\xad"), at(b"\xff\xe2"), at("b")]
    assert completion_logprobs(items, [], "a\ufffd\ufffd\ufffdb")["text_offset"] == [0, 1, 2, 4]
    half = at("€".encode()[:2])  # ends the prompt, and its other half begins the output
    found = completion_logprobs([at("€".encode()[2:]), at("b")], [None, half], "x\ufffd\ufffdb")
    assert found["tokens"] == ["x", "bytes:\\xe2\\x82", "bytes:\\xac", "b"]
    assert found["text_offset"] == [0, 1, 2, 3]


@given(st.lists(st.text(min_size=1, max_size=4), max_size=8))
def test_offsets_are_where_whole_tokens_stand(parts: list[str]) -> None:
    text = "".join(parts)
    found = completion_logprobs([at(part) for part in parts], [], text)
    for part, offset in zip(parts, found["text_offset"], strict=True):
        assert text[offset : offset + len(part)] == part


@given(st.text(max_size=6), st.lists(st.integers(0, 24), max_size=6))
def test_offsets_never_fall_and_never_leave_the_text(text: str, cuts: list[int]) -> None:
    raw = text.encode()
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    parts = [raw[a:b] for a, b in itertools.pairwise(edges)]
    offsets = completion_logprobs([at(part) for part in parts], [], text)["text_offset"]
    assert offsets == sorted(offsets)
    for edge, offset in zip(edges, offsets, strict=False):
        before = raw[:edge].decode(errors="ignore")
        assert offset == len(before)


def test_what_json_cannot_write_is_written_otherwise() -> None:
    item = at("x", -math.inf, other(2, "y", -math.inf))
    shown = [chat_logprobs([item]), completion_logprobs([item], [], "x"), prompt_logprobs([item])]
    text = json.dumps(shown, allow_nan=False)
    assert text.count("-9999.0") == 2 + 3 + 2


def test_of_tokens_that_read_alike_the_likeliest_is_shown() -> None:
    item = at("x", -3.0, other(2, "x", -0.5), other(3, "x", -1.0))
    assert completion_logprobs([item], [], "x")["top_logprobs"] == [{"x": -0.5}]


def test_a_prompt_is_shown_by_token_ids() -> None:
    found = prompt_logprobs([None, at("b", -1.0, other(1, "b", -1.0), other(7, "c", -2.0))])
    assert found == [
        None,
        {
            "1": {"logprob": -1.0, "decoded_token": "b"},
            "7": {"logprob": -2.0, "decoded_token": "c"},
        },
    ]


def test_bytes_that_are_no_text_are_shown_as_bytes() -> None:
    assert token_text("å".encode()) == "å"
    assert token_text(b"\xe2\x82") == "bytes:\\xe2\\x82"
