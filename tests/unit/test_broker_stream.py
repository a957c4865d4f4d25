"""Entries of the token stream survive Redis's flat fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
