"""Entries of the token stream survive Redis's flat fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_broker.errors import DecodeError
from pilotfish_broker.logprobs import Alternative, TokenLogprob, pack_logprobs
from pilotfish_broker.spec import Status
from pilotfish_broker.stream import Entry, pack_ids, unpack_ids


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_token_ids_survive_packing(tokens: list[int]) -> None:
    packed = pack_ids(tokens)
    assert unpack_ids(packed) == tokens
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_an_id_that_is_no_uint32_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([token])


def test_an_entry_has_position_tokens_offset_and_text() -> None:
    fields = {b"p": b"3", b"t": pack_ids([7, 8]), b"o": b"5", b"x": "né🦈".encode()}
    assert Entry.from_fields(fields) == Entry(3, [7, 8], 5, "né🦈")


def test_the_last_entry_has_the_status_and_no_tokens() -> None:
    assert Entry.from_fields({b"e": b"failed"}) == Entry(0, [], 0, "", Status.FAILED)


FIELDS = {b"p": b"3", b"t": pack_ids([7, 8]), b"o": b"5", b"x": b"ab"}
TWO = [
    TokenLogprob(Alternative(7, -0.5, b"a"), [Alternative(9, -0.25, b"c")]),
    TokenLogprob(Alternative(8, -1.5, b"b"), []),
]


def test_log_probabilities_stand_beside_the_tokens_they_are_of() -> None:
    entry = Entry.from_fields({**FIELDS, b"l": pack_logprobs(TWO)})
    assert entry == Entry(3, [7, 8], 5, "ab", logprobs=TWO)
    assert Entry.from_fields(FIELDS).logprobs == []


def test_the_first_token_of_a_prompt_has_no_log_probability() -> None:
    entry = Entry.from_fields({**FIELDS, b"m": pack_logprobs(TWO)})
    assert entry.prompt_logprobs == [None, *TWO]
    assert Entry.from_fields({**FIELDS, b"m": pack_logprobs([])}).prompt_logprobs == [None]
    assert Entry.from_fields(FIELDS).prompt_logprobs == []


def test_log_probabilities_for_another_number_of_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens with 1 log-prob"):
        Entry.from_fields({**FIELDS, b"l": pack_logprobs(TWO[:1])})


@pytest.mark.parametrize("name", [b"l", b"m"])
def test_log_probabilities_that_are_none_are_refused(name: bytes) -> None:
    with pytest.raises(DecodeError):
        Entry.from_fields({**FIELDS, name: b"rubbish"})
